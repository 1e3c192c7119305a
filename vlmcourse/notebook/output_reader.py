"""What a person sees of a cell: lines of ranks with their tags, displays in their place, the notebook's own remarks."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any

from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from vlmcourse.notebook.folding import FoldingPrinter
from vlmcourse.notebook.jobs import MARK, JobFolder
from vlmcourse.notebook.options import CellOptions
from vlmcourse.notebook.streams import NotebookPrinter, TerminalPrinter


class OutputReader:
    """Shows what ranks print, and what rank 0 displays, in the order in which it was printed."""

    def __init__(self, folder: JobFolder, printer: FoldingPrinter, display_pub: DisplayPublisher) -> None:
        self.token = secrets.token_hex(8)
        self._folder = folder
        self._printer = printer
        self._display_pub = display_pub
        start, _, end = MARK.format(token=self.token, number="|").partition("|")
        self.show_pinned: Callable[[], None] | None = None
        """Shows again what must outlast a clearing of the output."""
        self._has_notice = False
        self._said: list[str] = []
        """Lines that were shown before a notice, and must outlast it."""
        self._mark_start = start
        self._mark = re.compile(re.escape(start) + r"(\d*)" + re.escape(end))

    def notice(self, text: str) -> None:
        """Show a line that the first output of a rank replaces."""
        print(text, flush=True)
        self._has_notice = True

    def end_notice(self, wait: bool = True) -> None:
        """Take the notice away, when the next output comes (`wait`) or at once."""
        if self._has_notice:
            self._has_notice = False
            sys.stdout.flush()
            self._clear(wait=wait)
            if self._said:
                print(*self._said, sep="\n", flush=True)

    def say(self, text: str) -> None:
        """Show a line that is not a rank's; it stays."""
        self._printer.idle()
        self.end_notice()
        self._said.append(text)
        print(text, flush=True)

    def read_from(self, folder: JobFolder) -> None:
        """Take displays from another folder from now on: that of a new attempt."""
        self._folder = folder

    def line(self, rank: int, text: str) -> None:
        """Show a finished line, or what it announces."""
        if rank not in self._printer.ranks:
            for number in filter(None, self._mark.findall(text)):
                self._folder.take_display(int(number))
            return
        self.end_notice()
        if self._mark_start not in text:
            self._printer.line(rank, text)
            return
        before, *marked = self._mark.split(text)
        if before or not marked:
            self._printer.line(rank, before)
        for number, after in zip(marked[::2], marked[1::2], strict=True):
            if number:
                self._show(rank, self._folder.take_display(int(number)))
            if after:
                self._printer.line(rank, after)

    def progress(self, rank: int, text: str) -> None:
        """Show the present state of a progress bar."""
        if rank in self._printer.ranks and not self._mark.search(text):
            self.end_notice()
            self._printer.progress(rank, text)

    def idle(self) -> None:
        """Show what has been held back long enough."""
        self._printer.idle()

    def finish(self) -> None:
        """Show everything that is held back; a notice that nothing has replaced goes."""
        self._printer.finish()
        self.end_notice(wait=False)

    def _clear(self, **how: Any) -> None:
        self._display_pub.clear_output(**how)
        if self.show_pinned is not None:
            self.show_pinned()

    def _show(self, rank: int, message: dict[str, Any]) -> None:
        if message.pop("clear", False):
            self._printer.make_room(rank)
            self._clear(**message)
        elif set(message["data"]) <= {"text/plain"} and not message["transient"]:
            for line in message["data"].get("text/plain", "").splitlines():
                self._printer.line(rank, line)
        else:
            self._printer.make_room(rank)
            self._display_pub.publish(**message)


def make_printer(shell: InteractiveShell, options: CellOptions, ranks: Sequence[int] = ()) -> FoldingPrinter:
    """Return what shows the output of ranks (by default all) to a person, in a notebook or in IPython in a terminal."""
    printer = NotebookPrinter() if hasattr(shell, "kernel") else TerminalPrinter()
    all_ranks = range(options.nproc * options.nnodes[1])
    return FoldingPrinter(printer, options.shown_ranks or ranks or all_ranks)
