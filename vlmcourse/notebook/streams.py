"""What ranks print, as lines: bytes from several pipes in, tagged text out.

`LineSplitter` turns the bytes of one rank into finished lines and into states of a line that is being overwritten with
carriage returns, as progress bars do. `TerminalPrinter` and `NotebookPrinter` show both, after `folding.py` has joined
equal lines.
"""

from __future__ import annotations

import codecs
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from vlmcourse.notebook.flood import FloodLimit
from vlmcourse.notebook.kept_output import KeptOutput
from vlmcourse.notebook.rank_names import RankNumbers, rank_tag

PROGRESS_EVERY_S = 0.2
LOGGED_EVERY_S = 10.0
"""Between the states of a progress bar that a file or a pipe gets, each as a line of its own."""
CURSOR_MOVES = re.compile(r"\x1b\[\d*[A-GJKST]")
"""Escape sequences that move the cursor or erase; they make no sense between the lines of other ranks."""

TaggedLine = tuple[RankNumbers, str]
"""A finished line and the ranks that printed it."""


class LineSplitter:
    """Cuts the output of one rank into lines."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._shown = ""
        self._open: list[str] = []
        self._returned = False

    def feed(self, data: bytes) -> tuple[list[str], str | None]:
        """Take bytes as they arrive, cut anywhere.

        Args:
            data: the next bytes; empty at the end of the output.
        Returns:
            The lines that are now complete, and the present state of a line that is being overwritten (None where
            there is no such line, empty where it has wiped itself out). At the end of the output an unfinished line
            counts as complete.
        """
        text = self._held + self._decoder.decode(data, final=not data)
        # A carriage return at the very end may be the first half of a Windows line end.
        self._held = "\r" if data and text.endswith("\r") else ""
        *complete, rest = text.removesuffix(self._held).split("\n")
        lines, state = [], None
        for part in complete:
            if not (self._open or self._returned or "\r" in part or "\x1b" in part):
                lines.append(part)
                state = None
                continue
            self._write(part.removesuffix("\r"))
            state = "" if self._returned else None
            lines += self._finish()
        if rest:
            self._write(rest)
        if not data and (self._open or self._returned):
            state = "" if self._returned else None
            lines += self._finish()
        return lines, self._visible() if self._returned else None if lines else state

    def _write(self, text: str) -> None:
        *overwritten, last = text.split("\r")
        for part in overwritten:
            self._open.append(part)
            self._shown, self._open, self._returned = self._visible(), [], True
        if last:
            self._open.append(last)

    def _finish(self) -> list[str]:
        text, was_bar, has_moves = self._visible(), self._returned, False
        if "\x1b" in text:
            plain = CURSOR_MOVES.sub("", text)
            text, has_moves = plain, plain != text
        self._shown, self._open, self._returned = "", [], False
        # A bar that wiped itself out, and the empty lines between nested bars, leave nothing to read.
        return [] if (was_bar or has_moves) and not text.strip() else [text]

    def _visible(self) -> str:
        """Return what a terminal shows of the open line after its carriage returns."""
        text = "".join(self._open)
        if not self._returned:
            return text
        return (text if "\x1b" in text else text + self._shown[len(text) :]).rstrip()


class Printer(Protocol):
    """Shows the output of all ranks to a person."""

    def lines(self, lines: Sequence[TaggedLine]) -> None:
        """Show finished lines."""
        ...

    def progress(self, rank: int, text: str) -> None:
        """Show the present state of a line that is being overwritten."""
        ...

    def idle(self) -> None:
        """Show what has waited long enough; called many times a second."""
        ...

    def make_room(self) -> None:
        """Show what belongs before a display that comes next."""
        ...

    def finish(self) -> None:
        """Show what is left: no line comes any more."""
        ...


class TerminalPrinter:
    """Prints tagged lines to a stream; the progress of one rank at a time is updated in place, in a terminal.

    Elsewhere its state is a line now and then.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._shows_progress = False
        self._last_s = 0.0 if self._stream.isatty() else time.monotonic()

    def lines(self, lines: Sequence[TaggedLine]) -> None:
        """Print finished lines, after wiping a progress line."""
        if lines:
            self._stream.write(self._wipe() + "".join(f"{rank_tag(ranks)} {text}\n" for ranks, text in lines))
            self._stream.flush()

    def progress(self, rank: int, text: str) -> None:
        """Redraw the progress line, a few times a second; where there is no terminal, print it every 10 s."""
        every_s = PROGRESS_EVERY_S if self._stream.isatty() else LOGGED_EVERY_S
        if text and time.monotonic() - self._last_s < every_s:
            return
        self._last_s = time.monotonic()
        if not self._stream.isatty():
            if text:
                self.lines([((rank,), text)])
            return
        self._stream.write(self._wipe() + (f"[{rank}] {text}" if text else ""))
        self._stream.flush()
        self._shows_progress = bool(text)

    def idle(self) -> None:
        """Nothing is held back."""

    make_room = finish = idle

    def _wipe(self) -> str:
        wipe = "\r\x1b[K" if self._shows_progress else ""
        self._shows_progress = False
        return wipe


class NotebookPrinter:
    """Prints tagged lines as the cell's output; each rank's progress bar is an output of its own, updated in place.

    Of a flood of lines it shows the beginning and the end.
    """

    def __init__(self) -> None:
        self._bars: dict[int, Any] = {}
        self._last_s: dict[int, float] = {}
        self._kept = KeptOutput()
        self._limit = FloodLimit(self._kept, time.monotonic())

    def lines(self, lines: Sequence[TaggedLine]) -> None:
        """Print finished lines, or give progress bars their last state."""
        plain = []
        for ranks, text in lines:
            bar = self._bars.pop(ranks[0], None) if self._bars and len(ranks) == 1 else None
            if bar is None:
                plain.append((rank_tag(ranks), text))
            else:
                self._kept.write([f"{rank_tag(ranks)} {text}"])
                bar.update(_as_text(ranks[0], text), raw=True)
        if plain:
            self._write(self._limit.feed(plain, time.monotonic()))

    def progress(self, rank: int, text: str) -> None:
        """Update the rank's progress bar, a few times a second."""
        from IPython.display import display

        now_s = time.monotonic()
        if text and now_s - self._last_s.get(rank, 0.0) < PROGRESS_EVERY_S:
            return
        self._last_s[rank] = now_s
        if not text:
            if rank in self._bars:
                self._bars.pop(rank).update({"text/plain": ""}, raw=True)
        elif rank in self._bars:
            self._bars[rank].update(_as_text(rank, text), raw=True)
        else:
            self._bars[rank] = display(_as_text(rank, text), raw=True, display_id=True)

    def idle(self) -> None:
        """Show how a flood goes on."""
        self._write(self._limit.idle(time.monotonic()))

    def make_room(self) -> None:
        """Show the latest lines of a flood."""
        self._write(self._limit.latest())

    def finish(self) -> None:
        """Show the end of a flood."""
        self._write(self._limit.finish())
        self._kept.close()

    def _write(self, lines: list[str]) -> None:
        if lines:
            sys.stdout.write("\n".join(lines) + "\n")


def _as_text(rank: int, text: str) -> Mapping[str, str]:
    return {"text/plain": f"[{rank}] {text}"}
