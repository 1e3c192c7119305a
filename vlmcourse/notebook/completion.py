"""Tab completion of `%%torchrun` and `%torchrun` lines: the text before the cursor in, what may come next out."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import InteractiveShell

from vlmcourse.notebook.options import FLAGS, LAUNCHERS
from vlmcourse.notebook.subcommands import Subcommand

CELL_MAGIC, LINE_MAGIC = "%%torchrun", "%torchrun"
NAME_LISTS = ("--in", "--out")
"""Flags that take names of variables, and may be given again."""
EXAMPLES = {"-n": ("2", "4", "8"), "--nproc": ("2", "4", "8"), "--launcher": LAUNCHERS}
ASSIGNED = re.compile(r"^\s*(\w+(?:\s*,\s*\w+)*)\s*(?::[^=\n]+)?=(?!=)", re.MULTILINE)


def complete_torchrun(shell: InteractiveShell, subcommands: Mapping[str, Subcommand]) -> None:
    """Let a shell complete the lines of the course's magics.

    Args:
        shell: of the notebook.
        subcommands: what `%torchrun` can do.
    """

    @context_matcher(identifier="vlmcourse")
    def match(context: CompletionContext) -> SimpleMatcherResult:
        names = [name for name in shell.user_ns if not name.startswith("_") and name not in shell.user_ns_hidden]
        typed, found = list_completions(context.full_text, context.cursor_line, context.text_until_cursor, names,
                                        subcommands)  # fmt: skip
        return SimpleMatcherResult(
            completions=[SimpleCompletion(text, type="magic") for text in found],
            matched_fragment=typed,
            ordered=True,
            suppress=bool(found),
        )

    completer = shell.Completer
    assert completer is not None
    others = [known for known in completer.custom_matchers if getattr(known, "matcher_identifier", "") != "vlmcourse"]
    completer.custom_matchers[:] = [*others, match]  # type: ignore[list-item]


def list_completions(
    cell: str, line_number: int, before: str, names: Collection[str], subcommands: Mapping[str, Subcommand]
) -> tuple[str, list[str]]:
    """Return the word that is being typed, and what it may become; nothing where this is no line of the magics.

    Args:
        cell: all of its text.
        line_number: of the cursor, from 0.
        before: the line up to the cursor.
        names: variables of the notebook.
        subcommands: what `%torchrun` can do.
    """
    magic, *words = before.split(" ")
    if not words:
        return "", []
    *words, typed = [word for word in words[:-1] if word] + words[-1:]
    if magic == CELL_MAGIC and not any(line.strip() for line in cell.split("\n")[:line_number]):
        body = "\n".join(cell.split("\n")[line_number + 1 :])
        return _complete_cell_line(words, typed, names, body)
    if magic.strip() == LINE_MAGIC:
        offered = tuple(subcommands) if not words else subcommands[words[0]].flags if words[0] in subcommands else ()
        return typed, _beginning_with(typed, offered)
    return "", []


def _complete_cell_line(words: list[str], typed: str, names: Collection[str], body: str) -> tuple[str, list[str]]:
    flags = [flag for flag in FLAGS if flag in NAME_LISTS or flag not in words]
    flag = next((word for word in reversed(words) if word.startswith("-")), "")
    if typed.startswith("-"):
        return typed, _beginning_with(typed, flags)
    if flag in NAME_LISTS:
        offered = sorted(names) if flag == "--in" else sorted(find_assigned(body))
        listed, comma, typed = typed.rpartition(",")
        taken = {*listed.split(","), *(name for word in words for name in word.split(","))}
        found = _beginning_with(typed, [name for name in offered if name not in taken])
        # After a finished name (not a comma) another flag may follow as well.
        return typed, found if typed or comma else [*found, *flags]
    if words and words[-1] in EXAMPLES:
        return typed, _beginning_with(typed, EXAMPLES[words[-1]])
    if words and words[-1] in FLAGS and words[-1] != "--show":
        return "", []  # a number, or a file, which the notebook completes by itself
    return typed, _beginning_with(typed, flags)


def find_assigned(body: str) -> set[str]:
    """Return names that a cell assigns, which `--out` may bring back; the cell may be unfinished."""
    return {name.strip() for found in ASSIGNED.finditer(body) for name in found[1].split(",")}


def _beginning_with(typed: str, offered: Collection[str]) -> list[str]:
    return [word for word in offered if word.startswith(typed)]
