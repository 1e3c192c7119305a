"""From the frames of a running thread to the lines of the person's code: what is inside PyTorch is left out.

Also says under which `if` a line stands, because `if rank == 0:` is behind most hangs.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

from vlmcourse.notebook.hang.rank_state import Condition, Place
from vlmcourse.notebook.jobs import FILE_NAME

MAX_PLACES = 12
NOTEBOOK_FOLDER = f"{Path(__file__).parent.parent}/"
STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/"
PERSONS_CODE = ("<string>", "<stdin>")
"""Sources without a file that are nevertheless the person's: `python -c` and standard input."""

FrameLine = tuple[FrameType, int]
"""A frame and the line that it was at when it was looked at."""


def frames_of_thread(ident: int) -> list[FrameLine]:
    """Return the frames of a thread, innermost first."""
    found, frame = [], sys._current_frames().get(ident)
    while frame is not None:
        found.append((frame, frame.f_lineno or 0))
        frame = frame.f_back
    return found


def frames_of_traceback(trace: TracebackType | None) -> list[FrameLine]:
    """Return the frames that an exception went through, innermost first."""
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found[::-1]


def is_torch(file: str) -> bool:
    """Whether a source file is PyTorch's own."""
    torch = sys.modules.get("torch")
    folder = f"{Path(torch.__file__).parent}/" if torch is not None and torch.__file__ else "/site-packages/torch/"
    return folder in file


def is_shown(file: str) -> bool:
    """Whether lines of a source file help the person: those of PyTorch and of what runs the cell do not."""
    if file == FILE_NAME or file in PERSONS_CODE:
        return True
    if file.startswith(STANDARD_LIBRARY) and "-packages/" not in file:
        return False
    return not (file.startswith((NOTEBOOK_FOLDER, "<")) or "/IPython/" in file or is_torch(file))


def find_places(lines: Iterable[tuple[str, int, str]], with_conditions: bool) -> tuple[Place, ...]:
    """Return the lines of the person's code and of libraries among those of a stack.

    Args:
        lines: file, line and function of every frame, innermost first.
        with_conditions: whether to read the sources, to say under which `if` each line stands.
    """
    lines = list(lines)
    if lines and lines[-1][0] in PERSONS_CODE and any(file.startswith(NOTEBOOK_FOLDER) for file, _, _ in lines):
        lines.pop()  # the command that began the rank
    shown = [each for each in lines if is_shown(each[0])]
    kept = [*shown[:MAX_PLACES], *(each for each in shown[MAX_PLACES:] if each[0] == FILE_NAME)]
    return tuple(make_place(file, line, function, with_conditions) for file, line, function in kept)


def make_place(file: str, line: int, function: str, with_conditions: bool = True) -> Place:
    """Describe one line of a source file."""
    text = linecache.getline(file, line).strip()
    if not with_conditions:
        return Place(file, line, function, text)
    return Place(file, line, function, text, find_conditions(file, line))


def find_conditions(file: str, line: int) -> tuple[Condition, ...]:
    """Return the `if`s around a line within its function, outermost first."""
    tree = parse_source(file, tuple(linecache.getlines(file)))
    found: list[Condition] = []
    for node in walk_to(tree, line) if tree is not None else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = []
        elif isinstance(node, ast.If) and (node.body[0].lineno == line or line > (node.test.end_lineno or 0)):
            in_body = node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
            found.append(Condition(node.lineno, ast.unparse(node.test), in_body))
    return tuple(found)


@cache
def parse_source(file: str, lines: tuple[str, ...]) -> ast.Module | None:
    """Return the syntax tree of a source file; None where it cannot be had."""
    if file == FILE_NAME:  # the magic itself is not Python, and others in the cell keep their lines
        lines = ("\n", *(re.sub(r"^(\s*)[%!].*", r"\1pass", text) for text in lines[1:]))
    try:
        return ast.parse(textwrap.dedent("".join(lines)))
    except (SyntaxError, ValueError):
        return None


def walk_to(node: ast.AST, line: int) -> Iterator[ast.AST]:
    """Yield the statements that contain a line, from the outside in."""
    for child in ast.iter_child_nodes(node):
        first, last = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
        if first is None or last is None or first <= line <= last:
            if isinstance(child, ast.stmt):
                yield child
            yield from walk_to(child, line)
