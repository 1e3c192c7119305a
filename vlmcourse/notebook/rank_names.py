"""How several ranks are named together: in a sentence, as the tag of a line, and by what is said of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

RankNumbers = tuple[int, ...]
"""One rank or several, in order."""


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 2`, `ranks 0, 1, 3` or, where four or more follow one another, `ranks 0-6, 9`."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(_write_runs(ranks, shortest=4))}"


@lru_cache(1024)
def rank_tag(ranks: RankNumbers) -> str:
    """Return what stands before a line of these ranks: `[2]`, `[0,2]` or, where three or more follow, `[0,2-4]`."""
    return f"[{','.join(_write_runs(ranks, shortest=3))}]"


def _write_runs(ranks: Iterable[int], shortest: int) -> list[str]:
    """Write ranks as numbers, and as `first-last` where at least `shortest` of them follow one another."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [text for run in runs for text in ([f"{run[0]}-{run[-1]}"] if len(run) >= shortest else map(str, run))]


def group_ranks(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Group ranks by what is said of them, in the order of the first rank of each text."""
    found: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        found.setdefault(text, []).append(rank)
    return found
