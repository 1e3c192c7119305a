"""What the ranks of a session say at the end of a cell, and whether they are still in step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmcourse.notebook.rank_names import name_ranks


@dataclass(frozen=True)
class CellEnd:
    """How one rank finished a cell."""

    rank: int
    failed: bool
    groups: Mapping[str, tuple[int, Sequence[int]]]
    """By name of each group: how many collectives and messages the rank began in it, and the group's ranks."""
    has_pending: bool
    """Whether a failed cell left a collective behind that has not ended."""
    collectives: Mapping[str, Sequence[str]] | None = None
    """By name of each group: the collectives that the rank began in it; None where they were too many to tell."""


def find_difference(ends: Mapping[int, CellEnd]) -> str:
    """Say which ranks began more collectives than others in a cell that all of them finished; "" if none did.

    The first collective of the next cell would be taken for the one that is missing.
    """
    for first in ends.values():
        for name, (_, members) in first.groups.items():
            known = [(ends[rank].collectives, rank) for rank in members if rank in ends]
            if any(found is None for found, _ in known):
                continue
            begun = {rank: list((found or {}).get(name, ())) for found, rank in known}
            fewest = min(begun.values(), key=len)
            more = [rank for rank, ops in begun.items() if len(ops) > len(fewest)]
            if more:
                others = [rank for rank in begun if rank not in more]
                call = begun[more[0]][len(fewest)]
                return (
                    f"the ranks are out of step: {name_ranks(more)} began a collective ({call}) that "
                    f"{name_ranks(others)} did not begin in this cell, and the next cell would mix them up: every rank "
                    "must call every collective"
                )
    return ""
