"""What a learner's code leaves behind besides its value: the line in which it failed, and the text that it printed.

Enters: an error as it was raised, or what code prints. Leaves: words for the feedback. A line is found by its file and
number, so that one raised on a rank is looked up where the notebook's cells are known.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import sysconfig
import traceback
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import vlmcourse

MAX_KEPT = 4000
"""Characters of what a call printed that are kept."""
MAX_LINES, MAX_WIDTH = 10, 110
"""Lines of what was printed that the feedback shows, and characters of a line."""
MAX_PARTS = 1000
"""Functions, classes and values of a learner's code that are looked through."""
MAX_PLACES = 20
"""Innermost places that are kept of an error: one that recurses without end has a thousand."""
_NOT_THEIRS = (
    f"{Path(vlmcourse.__file__).parent}/",
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")),
    "<frozen",
)
"""How files of the course and of Python begin: what fails there was called by a line of the learner's."""
_PACKAGES = ("/site-packages/", "/dist-packages/")


STARTING = "starting {n} ranks, "
"""How the line begins that a check prints while it waits for its ranks."""


class Place(NamedTuple):
    """A line of code that an error passed through."""

    function: str
    file: str
    line: int
    begins: int
    """Line on which the function begins."""


def places_of(error: BaseException) -> list[Place]:
    """Return the places of an error that may be a learner's, the innermost last: none of a library, none of ours."""
    codes = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    places = [Place(code.co_name, code.co_filename, line, code.co_firstlineno) for code, line in codes]
    return [place for place in places if _is_theirs(place.file)][-MAX_PLACES:]


def _is_theirs(file: str) -> bool:
    return not file.startswith(_NOT_THEIRS) and not any(folder in file for folder in _PACKAGES)


def files_of(function: Any) -> dict[tuple[str, int], str]:
    """Return the files of a learner's function and of what it uses, by each function's name and first line.

    A function that was sent to another process has lost them on the way.
    """
    found: dict[tuple[str, int], str] = {}
    todo, seen = [function], set[int]()
    while todo and len(seen) < MAX_PARTS:
        part = todo.pop()
        if isinstance(part, (types.MethodType, staticmethod, classmethod)):
            part = part.__func__
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, types.CodeType):
            found[part.co_name, part.co_firstlineno] = part.co_filename
            todo += [constant for constant in part.co_consts if isinstance(constant, types.CodeType)]
        elif isinstance(part, types.FunctionType) and _is_theirs(part.__code__.co_filename):
            todo += [part.__code__, *_enclosed(part)]
            todo += [part.__globals__[name] for name in _names(part.__code__) if name in part.__globals__]
        elif isinstance(part, type):
            todo += vars(part).values()
    return found


def _enclosed(function: types.FunctionType) -> list[Any]:
    """Return the values that a function has of the one around it; one that is not bound yet is left out."""
    values = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a function and those inside it look up."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


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


def without_progress(text: str) -> str:
    """Return what a check printed without the lines that only say what it waits for."""
    before, after = map(re.escape, STARTING.split("{n}"))
    return re.sub(rf"^{before}\d+{after}.*\n?", "", text, flags=re.MULTILINE)


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
