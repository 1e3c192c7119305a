"""What ranks print, as lines: bytes from several pipes in, tagged text out.

`LineSplitter` turns the bytes of one rank into finished lines and into states of a line that is being overwritten with
carriage returns, as progress bars do. `TerminalPrinter` and `NotebookPrinter` show both.
"""

from __future__ import annotations

import codecs
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

PROGRESS_EVERY_S = 0.2
LOGGED_EVERY_S = 10.0
"""Between the states of a progress bar that a file or a pipe gets, each as a line of its own."""
CURSOR_MOVES = re.compile(r"\x1b\[\d*[A-GJKST]")
"""Escape sequences that move the cursor or erase; they make no sense between the lines of other ranks."""


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

    def line(self, rank: int, text: str) -> None:
        """Show one finished line."""
        ...

    def progress(self, rank: int, text: str) -> None:
        """Show the present state of a line that is being overwritten."""
        ...


class TerminalPrinter:
    """Prints tagged lines to a stream; the progress of one rank at a time is updated in place, in a terminal.

    Elsewhere its state is a line now and then.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._shows_progress = False
        self._last_s = 0.0 if self._stream.isatty() else time.monotonic()

    def line(self, rank: int, text: str) -> None:
        """Print one finished line, after wiping a progress line."""
        self._stream.write(f"{self._wipe()}[{rank}] {text}\n")
        self._stream.flush()

    def progress(self, rank: int, text: str) -> None:
        """Redraw the progress line, a few times a second; where there is no terminal, print it every 10 s."""
        every_s = PROGRESS_EVERY_S if self._stream.isatty() else LOGGED_EVERY_S
        if text and time.monotonic() - self._last_s < every_s:
            return
        self._last_s = time.monotonic()
        if not self._stream.isatty():
            if text:
                self.line(rank, text)
            return
        self._stream.write(self._wipe() + (f"[{rank}] {text}" if text else ""))
        self._stream.flush()
        self._shows_progress = bool(text)

    def _wipe(self) -> str:
        wipe = "\r\x1b[K" if self._shows_progress else ""
        self._shows_progress = False
        return wipe


class NotebookPrinter:
    """Prints tagged lines as the cell's output; each rank's progress bar is an output of its own, updated in place."""

    def __init__(self) -> None:
        self._bars: dict[int, Any] = {}
        self._last_s: dict[int, float] = {}

    def line(self, rank: int, text: str) -> None:
        """Print one finished line, or give a progress bar its last state."""
        bar = self._bars.pop(rank, None)
        if bar is None:
            sys.stdout.write(f"[{rank}] {text}\n")
        else:
            bar.update(_as_text(rank, text), raw=True)

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


def _as_text(rank: int, text: str) -> Mapping[str, str]:
    return {"text/plain": f"[{rank}] {text}"}
