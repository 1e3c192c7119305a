"""Lines that several ranks print at about the same time, as one line: (rank, line, time) in, (ranks, line) out.

A line is held back, for less than 0.1 s, while other ranks may still print the same one. The order of a rank's own
lines never changes. `FoldingPrinter` puts this between the ranks and a printer.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Self

from vlmcourse.notebook.streams import Printer, TaggedLine

HOLD_S = 0.08
"""How long a line waits for its twins; the time between two calls of `release` is added."""


@dataclass(slots=True)
class _Held:
    number: int
    text: str
    ranks: list[int]
    since_s: float


class LineFolder:
    """Holds the latest lines of all ranks, and joins those that are equal."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """Expect lines from `ranks`, and from no other."""
        self._last = dict.fromkeys(ranks, -1)
        """The number of the latest line that each rank has printed."""
        self._held: deque[_Held] = deque()
        self._by_text: dict[str, list[_Held]] = {}
        self._count = 0

    def feed(self, rank: int, text: str, now_s: float) -> None:
        """Take a line of one rank.

        Args:
            rank: who printed it.
            text: the line, without its end.
            now_s: seconds on a clock that only goes forward.
        """
        last = self._last[rank]
        same = self._by_text.get(text)
        # Only a line below the rank's latest one can be joined: any other would change the order of its lines.
        if same is not None and same[-1].number > last:
            held = same[0] if same[0].number > last else same[bisect_right(same, last, key=attrgetter("number"))]
            held.ranks.append(rank)
        else:
            held = _Held(self._count, text, [rank], now_s)
            self._count += 1
            self._held.append(held)
            if same is None:
                self._by_text[text] = [held]
            else:
                same.append(held)
        self._last[rank] = held.number

    def release(self, now_s: float) -> list[TaggedLine]:
        """Return the lines that no other rank can join any more, or that have waited long enough, in order."""
        passed_by_all = min(self._last.values())
        ready = []
        while self._held and (self._held[0].number <= passed_by_all or self._held[0].since_s + HOLD_S <= now_s):
            ready.append(self._take_first())
        return ready

    def flush(self) -> list[TaggedLine]:
        """Return all lines that are held."""
        return [self._take_first() for _ in range(len(self._held))]

    def _take_first(self) -> TaggedLine:
        held = self._held.popleft()
        same = self._by_text[held.text]
        if len(same) > 1:
            del same[0]
        else:
            del self._by_text[held.text]
        return tuple(sorted(held.ranks)), held.text


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
            self._printer.lines([*self._folder.flush(), ((rank,), text)])
        else:
            self._folder.feed(rank, text, self._clock())

    def progress(self, rank: int, text: str) -> None:
        """Show the present state of a line that is being overwritten; the first one after the lines before it."""
        if not text:
            self._with_bar.discard(rank)
        elif rank not in self._with_bar:
            self.make_room()
            self._with_bar.add(rank)
        self._printer.progress(rank, text)

    def idle(self) -> None:
        """Show what has waited long enough; to be called after each reading, and many times a second."""
        self._printer.lines(self._folder.release(self._clock()))
        self._printer.idle()

    def make_room(self) -> None:
        """Show everything that belongs before a display."""
        self._printer.lines(self._folder.flush())
        self._printer.make_room()

    def finish(self) -> None:
        """Show everything: no rank prints any more."""
        self._printer.lines(self._folder.flush())
        self._printer.finish()
