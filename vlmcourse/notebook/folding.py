"""Lines that several ranks print at about the same time, as one line: (rank, line, time) in, (ranks, line) out.

A line is held back, for less than 0.1 s, while other ranks may still print the same one. The order of a rank's own
lines never changes. `FoldingPrinter` puts this between the ranks and a printer.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Self

from vlmcourse.notebook.rank_names import RankNumbers
from vlmcourse.notebook.streams import Printer, TaggedLine

HOLD_S = 0.08
"""How long a line waits for its twins; the time between two calls of `release` is added."""


class LineFolder:
    """Holds the latest lines of all ranks, and joins those that are equal.

    Held lines are numbered in the order in which they first came. Plain lists of numbers and texts, and not an object a
    line: hundreds of thousands of lines a second have to pass.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        """Expect lines from `ranks`, and from no other."""
        self._last = dict.fromkeys(ranks, -1)
        """The number of the latest line that each rank has printed."""
        self._first = 0
        """The number of the first line that is held; the lists below begin with it."""
        self._texts: list[str] = []
        self._printed_by: list[int] = []
        """The ranks that have printed each line: bit n stands for rank n."""
        self._since_s: list[float] = []
        self._numbers: dict[str, list[int] | int] = {}
        """Where a text is held, rising; a list only where it is held more than once."""

    def feed(self, rank: int, text: str, now_s: float) -> None:
        """Take a line of one rank.

        Args:
            rank: who printed it.
            text: the line, without its end.
            now_s: seconds on a clock that only goes forward.
        """
        last = self._last[rank]
        same = self._numbers.get(text, -1)
        # Only a line below the rank's latest one can be joined: any other would change the order of its lines.
        if isinstance(same, list):
            index = bisect_right(same, last)
            number = same[index] if index < len(same) else -1
        else:
            number = same
        if number > last:
            self._printed_by[number - self._first] |= 1 << rank
        else:
            number = self._hold(text, 1 << rank, now_s)
        self._last[rank] = number

    def release(self, now_s: float) -> list[TaggedLine]:
        """Return the lines that no other rank can join any more, or that have waited long enough, in order."""
        passed_by_all = min(self._last.values()) + 1 - self._first
        return self._take(max(passed_by_all, bisect_right(self._since_s, now_s - HOLD_S)))

    def flush(self, rank: int | None = None) -> list[TaggedLine]:
        """Return the lines that are held up to the latest one of `rank`, or all."""
        return self._take(len(self._texts) if rank is None else self._last[rank] + 1 - self._first)

    def _hold(self, text: str, printed_by: int, now_s: float) -> int:
        number = self._first + len(self._texts)
        self._texts.append(text)
        self._printed_by.append(printed_by)
        self._since_s.append(now_s)
        same = self._numbers.setdefault(text, number)
        if isinstance(same, list):
            same.append(number)
        elif same != number:
            self._numbers[text] = [same, number]
        return number

    def _take(self, num_lines: int) -> list[TaggedLine]:
        """Let go of the first held lines."""
        if num_lines <= 0:
            return []
        texts = self._texts[:num_lines]
        lines = [(numbers_of(ranks), text) for ranks, text in zip(self._printed_by, texts, strict=False)]
        self._first += num_lines
        for held in (self._texts, self._printed_by, self._since_s):
            del held[:num_lines]
        if self._texts:
            for text in dict.fromkeys(texts):
                same = self._numbers[text]
                left = [number for number in same if number >= self._first] if isinstance(same, list) else []
                if left:
                    self._numbers[text] = left
                else:
                    del self._numbers[text]
        else:
            self._numbers.clear()
        return lines


@lru_cache(1024)
def numbers_of(bits: int) -> RankNumbers:
    """Return the ranks whose bits are set."""
    return tuple(rank for rank in range(bits.bit_length()) if bits >> rank & 1)


class FoldingPrinter:
    """Shows the lines of all ranks on a printer, equal ones once; progress bars go past the folding."""

    def __init__(self, printer: Printer, ranks: Iterable[int], clock: Callable[[], float] = time.monotonic) -> None:
        """Fold what `ranks` print; `clock` returns seconds."""
        self.ranks = frozenset(ranks)
        self._printer = printer
        self._folder = LineFolder(self.ranks)
        self._clock = clock
        self._with_bar: set[int] = set()
        """Ranks whose next line is the last state of a progress bar."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def line(self, rank: int, text: str) -> None:
        """Take one finished line of a rank; `idle` shows it."""
        if rank in self._with_bar:
            self._with_bar.remove(rank)
            self._printer.lines([*self._folder.flush(rank), ((rank,), text)])
        else:
            self._folder.feed(rank, text, self._clock())

    def progress(self, rank: int, text: str) -> None:
        """Show the present state of a line that is being overwritten; the first one after the lines before it."""
        if not text:
            self._with_bar.discard(rank)
        elif rank not in self._with_bar:
            self.make_room(rank)
            self._with_bar.add(rank)
        self._printer.progress(rank, text)

    def idle(self) -> None:
        """Show what has waited long enough; to be called after each reading, and many times a second."""
        self._printer.lines(self._folder.release(self._clock()))
        self._printer.idle()

    def make_room(self, rank: int) -> None:
        """Show what belongs before a display of `rank`."""
        self._printer.lines(self._folder.flush(rank))
        self._printer.make_room()

    def finish(self) -> None:
        """Show everything: no rank prints any more."""
        self._printer.lines(self._folder.flush())
        self._printer.finish()
