"""The text of a notebook cell as Python that ranks can run, with the line numbers that the person sees.

Magics and shell lines inside the cell are translated as the notebook translates its own; a mistake in the syntax shows
here, before any process starts.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from IPython.core.displayhook import DisplayHook

from vlmcourse.notebook.jobs import FILE_NAME


class CellSyntaxError(ValueError):
    """The cell is not Python; no rank was started.

    Not itself a SyntaxError: IPython would show that with the frames of the magic in front.
    """

    def __init__(self, error: SyntaxError) -> None:
        super().__init__("".join(traceback.format_exception_only(error)).strip("\n"))

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@dataclass(frozen=True)
class PreparedCell:
    """A cell that has been read without a mistake."""

    source: str
    """Python with empty lines in front, so that its line numbers are those of the notebook's cell."""
    shown_lines: list[str]
    """The cell as it was written, first line included."""
    shows_last_value: bool
    """Whether the value of a last expression is shown: not after a semicolon."""


def prepare_cell(first_line: str, body: str, transform: Callable[[str], str]) -> PreparedCell:
    """Translate and check the code of a cell.

    Args:
        first_line: the magic and its flags, such as `%%torchrun -n 2`.
        body: the lines below it.
        transform: IPython's translation of magics to Python.
    Raises:
        CellSyntaxError: if this is not Python; file name and line are those of the notebook's cell.
    """
    lines = body.split("\n")
    num_empty = next((index for index, text in enumerate(lines) if text.strip()), len(lines))
    source = transform("\n".join(lines[num_empty:]))
    padded = "\n" * (1 + num_empty) + source
    try:
        compile(padded, FILE_NAME, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        raise CellSyntaxError(error) from error
    shown_lines = [first_line.rstrip(), *lines]
    return PreparedCell(padded, shown_lines, not DisplayHook.semicolon_at_end_of_expression(source))
