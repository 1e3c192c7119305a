"""What a learner's code leaves behind besides its value: the line in which it failed, and the text that it printed.

Enters: an error as it was raised, or what code prints. Leaves: words for the feedback. A line is found by its file and
number, so that one raised on a rank is looked up where the notebook's cells are known.
"""

from __future__ import annotations

import io
import linecache
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import vlmcourse

MAX_KEPT = 4000
"""Characters of what a call printed that are kept."""
MAX_LINES, MAX_WIDTH = 10, 110
"""Lines of what was printed that the feedback shows, and characters of a line."""
MAX_PLACES = 20
"""Innermost places that are kept of an error: one that recurses without end has a thousand."""
_NOT_THEIRS = (
    f"{Path(vlmcourse.__file__).parent}/",
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")),
    "<frozen",
)
"""How files of the course and of Python begin: what fails there was called by a line of the learner's."""
_PACKAGES = ("/site-packages/", "/dist-packages/")


class Place(NamedTuple):
    """A line of code that an error passed through."""

    function: str
    file: str
    line: int


def places_of(error: BaseException) -> list[Place]:
    """Return the places of an error that may be a learner's, the innermost last: none of a library, none of ours."""
    places = [Place(f.f_code.co_name, f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    theirs = [place for place in places if not place.file.startswith(_NOT_THEIRS)]
    return [place for place in theirs if not any(folder in place.file for folder in _PACKAGES)][-MAX_PLACES:]


def describe_place(places: Sequence[Place]) -> str:
    """Return " (in f, line 7: its text)" for the innermost place whose text is known; "" where there is none.

    Code that was made from text, as a dataclass's `__init__` is, has no text to be shown: what called it is named.
    """
    known = [(place, linecache.getline(place.file, place.line).strip()) for place in places]
    for place, text in reversed(known):
        if text:
            shown = text if len(text) <= MAX_WIDTH else f"{text[:MAX_WIDTH]} ..."
            return f" ({_name(place)}line {place.line}: {shown})"
    return f" ({_name(places[-1])}line {places[-1].line})" if places else ""


def _name(place: Place) -> str:
    """Return "in f, " for a function's line; "" for one of a cell or a lambda, which has no name."""
    return f"in {place.function}, " if place.function.isidentifier() else ""


class Printed(io.StringIO):
    """A stdout that keeps the beginning of what is printed; it stays open whoever closes it."""

    def write(self, text: str) -> int:
        """Keep what there is room for."""
        super().write(text[: max(MAX_KEPT - self.tell(), 0)])
        return len(text)

    def close(self) -> None:
        """Do nothing: a learner's code may close its stdout."""


def show_printed(cases: Iterable[tuple[str, object]], who: str = "your code") -> None:
    """Print what a learner's code printed in the first wrong case that printed anything, else in the first case.

    Each line is indented, so that none reads as the grader's own; nothing is said if nothing was printed.

    Args:
        cases: of each what was printed, and whether its answer was wrong.
        who: printed it.
    """
    loud = sorted(((not wrong, number, printed) for number, (printed, wrong) in enumerate(cases) if printed.strip()))
    lines = loud[0][2].rstrip().splitlines() if loud else []
    if lines:
        print(f"{who} printed:")
    for line in lines[:MAX_LINES]:
        print(f"  | {line:.{MAX_WIDTH}}".rstrip())
    if len(lines) > MAX_LINES:
        print(f"  | ... and {len(lines) - MAX_LINES} lines more")
