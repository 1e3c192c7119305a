"""`%torchrun WORD …`: a table of what the line magic can do, and an error that says what to type instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vlmcourse.notebook.options import FLAGS, CellOptionsError
from vlmcourse.values import did_you_mean


@dataclass(frozen=True)
class Subcommand:
    """One thing that `%torchrun` does."""

    run: Callable[[str], None]
    """Called with the rest of the line."""
    help: str
    """In a few words, after its name."""
    flags: tuple[str, ...] = ()
    """What the rest of the line may contain; offered by tab completion."""


def run_subcommand(line: str, table: Mapping[str, Subcommand]) -> None:
    """Do what a `%torchrun` line says.

    Args:
        line: what follows `%torchrun`.
        table: what it may begin with.
    Raises:
        CellOptionsError: if it begins with anything else.
    """
    word, _, rest = line.strip().partition(" ")
    if word in table:
        table[word].run(rest.strip())
        return
    known = "\n".join(f"  %torchrun {name}: {command.help}" for name, command in table.items())
    if not word:
        raise CellOptionsError(f"%torchrun does one of these; a cell for ranks begins with %%torchrun\n{known}")
    if word.partition("=")[0] in FLAGS:
        raise CellOptionsError(
            f"%torchrun has no flag {word!r}: flags of a cell stand on its first line, after %%torchrun with two "
            f"percent signs; %torchrun does one of these\n{known}"
        )
    kind = "flag" if word.startswith("-") else "command"
    raise CellOptionsError(f"%torchrun has no {kind} {word!r}: {did_you_mean(word, table)}\n{known}")
