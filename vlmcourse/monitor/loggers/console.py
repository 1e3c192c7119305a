"""Show the rows of a run on the terminal, one line each, above the progress bar.

Enters: rows. Leaves: lines, given to whatever prints them. A row has dozens of values and a line has room for few: the
line shows loss, gradient norm, learning rates, tokens per second, memory and the evaluation, where the row has them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vlmcourse.monitor.loggers.protocol import Row, RunInfo

WIDTH = 120
SHOWN: tuple[tuple[str, str, str], ...] = (
    ("loss/total", "loss", ".4f"),
    ("gradients/norm", "gradient norm", ".3g"),
    ("performance/tokens_per_second", "tokens/s", ",.0f"),
    ("performance/mfu", "MFU", ".1%"),
    ("performance/gpu_util", "GPU %", ".0f"),
    ("performance/memory_used_gb", "GB", ".1f"),
    ("eval/exact_match", "exact match", ".1%"),
)
"""Name in a row, word on the line, format of the number."""


class ConsoleLogger:
    """One line a row, printed by a function that knows what else is on the screen."""

    name = "console"
    retries = True

    def __init__(self, write: Callable[[str], None], *, is_terminal: bool | None = None) -> None:
        """Take what prints a line.

        Args:
            write: prints a text that has no newline at its end.
            is_terminal: whether colours may be used; by default whether stdout is a terminal.
        """
        self._write = write
        self._is_terminal = sys.stdout.isatty() if is_terminal is None else is_terminal

    def start(self, info: RunInfo) -> None:
        """Show what the run is and what it runs on."""
        table = Table.grid(padding=(0, 2))
        table.add_row("run", Text(f"{info.name}, in {info.folder}"))
        for key, value in info.hardware.items():
            table.add_row(Text(key), Text(str(value)))
        self._write(self._render(table))

    def log(self, row: Row) -> None:
        """Print one line."""
        text = Text(f"step {row['step']:>6}", style="bold")
        for key, word, form in SHOWN:
            if (value := row.get(key)) is not None:
                text.append(f"  {word} ", style="dim").append(format(value, form), style="not dim")
        self._write(self._render(text))

    def close(self) -> None:
        """Print nothing more."""

    def _render(self, what: Table | Text) -> str:
        file = io.StringIO()
        console = Console(file=file, width=WIDTH, force_terminal=self._is_terminal, highlight=False)
        console.print(what, soft_wrap=isinstance(what, Text))
        return file.getvalue().rstrip("\n")
