"""May an exception be caught on its way up a stack? Read from compiled code, which is there where the source is not.

A rank that waits in a collective goes on after that has given up, if anything around the call catches the error: then
nothing about its hang is certain.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import CodeType

from vlmcourse.notebook.hang.places import NOTEBOOK_FOLDER, FrameLine, is_torch, parse_source, read_lines, walk_to

HARMLESS = frozenset(
    (
        *("no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast", "no_sync"),
        *("record_function", "profile", "fork_rng", "sdpa_kernel", "loss_parallel", "implicit_replication"),
        *("CommDebugMode", "FlopCounterMode", "device", "stream", "nullcontext", "open"),
        *("closing", "redirect_stdout", "redirect_stderr", "TemporaryDirectory", "tqdm", "trange"),
    )
)
"""What is known to let errors pass, of all that can stand after `with`."""

Handler = tuple[int, int, bool]
"""First and last offset of the code that it covers; whether it belongs to a `with`."""


def may_catch(frames: Sequence[FrameLine]) -> bool:
    """Whether an error in the innermost frame may be caught before it reaches what runs the cell.

    Errors pass PyTorch's own frames; of every other frame it must be seen that they do.
    """
    for frame, line in frames:
        code = frame.f_code
        if code.co_filename.startswith(NOTEBOOK_FOLDER) or is_torch(code.co_filename):
            continue
        around = [is_with for first, end, is_with in find_handlers(code) if first <= frame.f_lasti < end]
        if not all(around) or (around and not lets_pass(code.co_filename, line)):
            return True
    return False


@lru_cache(1024)
def find_handlers(code: CodeType) -> tuple[Handler, ...]:
    """Return the handlers of a function: `except`, `finally` and `with`, but not what the compiler adds to clean up."""
    names = {each.offset: each.opname for each in dis.get_instructions(code)}
    following = dict(zip(names, list(names)[1:], strict=False))
    return tuple(
        (entry.start, entry.end, names.get(following.get(entry.target, -1)) == "WITH_EXCEPT_START")
        for entry in dis._parse_exception_table(code)  # type: ignore[attr-defined]
        if names.get(entry.target) == "PUSH_EXC_INFO"
    )


def lets_pass(file: str, line: int) -> bool:
    """Whether every `with` around a line is known to be harmless; False where the source is not known."""
    tree = parse_source(file, read_lines(file))
    names = list(_name_contexts(tree, line)) if tree is not None else []
    return bool(names) and HARMLESS.issuperset(names)


def _name_contexts(tree: ast.Module, line: int) -> Iterator[str]:
    for node in walk_to(tree, line):
        for item in node.items if isinstance(node, ast.With | ast.AsyncWith) else ():
            called = item.context_expr.func if isinstance(item.context_expr, ast.Call) else item.context_expr
            yield called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
