"""From the frames of a running thread to the lines of the person's code: what is inside PyTorch is left out.

Also says under which `if` a line stands, because `if rank == 0:` is behind most hangs. That is for whoever reads what
ranks wrote down: a thread of a rank must not parse while its main thread does, see `parse_source`.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import re
import sys
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from types import FrameType, TracebackType

from vlmcourse.notebook.hang.rank_state import Condition, Place, RankState
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


def find_places(lines: Iterable[tuple[str, int, str]]) -> tuple[Place, ...]:
    """Return the lines of the person's code and of libraries among those of a stack, without their conditions.

    Args:
        lines: file, line and function of every frame, innermost first.
    """
    lines = list(lines)
    if lines and lines[-1][0] in PERSONS_CODE and any(file.startswith(NOTEBOOK_FOLDER) for file, _, _ in lines):
        lines.pop()  # the command that began the rank
    shown = [each for each in lines if is_shown(each[0])]
    kept = [*shown[:MAX_PLACES], *(each for each in shown[MAX_PLACES:] if each[0] == FILE_NAME)]
    return tuple(Place(file, line, function, read_line(file, line).strip()) for file, line, function in kept)


def read_line(file: str, line: int) -> str:
    """Return one line of a source file; empty where it is not known."""
    lines = read_lines(file)
    return lines[line - 1] if 1 <= line <= len(lines) else ""


def read_lines(file: str) -> tuple[str, ...]:
    """Return the lines of a source file; none where it cannot be read.

    `linecache` is looked at once and never changed: its functions read an entry in several steps, and fail where
    another thread throws it away in between, as printing a traceback or a warning does.
    """
    entry = linecache.cache.get(file)
    if entry is not None and len(entry) > 1:
        return tuple(entry[2])
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return ()
    return _read_file(file, status.st_mtime_ns, status.st_size)


@lru_cache(256)
def _read_file(file: str, _mtime_ns: int, _size: int) -> tuple[str, ...]:
    with contextlib.suppress(OSError, UnicodeDecodeError, SyntaxError), tokenize.open(file) as source:
        return tuple(source.readlines())
    return ()


def add_conditions(state: RankState, cell_lines: Sequence[str] = ()) -> RankState:
    """Return a state whose places have the `if`s around them.

    Args:
        state: of a rank on this machine.
        cell_lines: of the notebook's cell, which is no file.
    """
    cell = tuple(f"{line}\n" for line in cell_lines)
    return replace(
        state,
        stack=tuple(
            replace(each, conditions=find_conditions(each.file, each.line, cell if each.is_cell else None))
            for each in state.stack
        ),
    )


def find_conditions(file: str, line: int, lines: tuple[str, ...] | None = None) -> tuple[Condition, ...]:
    """Return the `if`s around a line within its function, outermost first.

    Args:
        file: the source's.
        line: number of the line, from 1.
        lines: of the source; by default they are read from the file.
    """
    tree = parse_source(file, read_lines(file) if lines is None else lines)
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
    """Return the syntax tree of a source file; None where it cannot be had.

    In CPython 3.11.7 (issue 106905 of its repository) two threads that parse at the same time count the depth of their
    trees together, and either may fail with a SystemError. So threads beside a running cell call this only while the
    main thread waits in compiled code.
    """
    if file == FILE_NAME:  # the magic itself is not Python, and others in the cell keep their lines
        lines = ("\n", *(re.sub(r"^(\s*)[%!].*", r"\1pass", text) for text in lines[1:]))
    return parse(textwrap.dedent("".join(lines)))


def parse(text: str) -> ast.Module | None:
    """Return the syntax tree of a text; None where it is not Python, or two threads got in each other's way twice."""
    for _ in range(2):
        with contextlib.suppress(SystemError):
            try:
                return ast.parse(text)
            except (SyntaxError, ValueError):
                return None
    return None


def walk_to(node: ast.AST, line: int) -> Iterator[ast.AST]:
    """Yield the statements that contain a line, from the outside in."""
    for child in ast.iter_child_nodes(node):
        first, last = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
        if first is None or last is None or first <= line <= last:
            if isinstance(child, ast.stmt):
                yield child
            yield from walk_to(child, line)
