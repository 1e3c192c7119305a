"""The planner's predictions beside published figures, group by group: what `vlmcourse validate` prints.

Enters: `FigureRow`s. Leaves: one dict a group with the keys `KEYS`, and why rows were not used. Chapter 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from vlmcourse.planner.figure_scores import error_summary, mean_regret_pct, mean_spearman
from vlmcourse.planner.figure_values import FigureRow
from vlmcourse.planner.peak import estimate_peak
from vlmcourse.planner.roofline import estimate_tokens_per_s

KEYS = (
    "name",
    "rows",
    "used",
    "memory_median_pct",
    "memory_p90_pct",
    "tokens_median_pct",
    "tokens_p90_pct",
    "spearman",
    "regret_pct",
)
"""Of a group's summary, in their order; what a group has no figures for is None."""
Predict = Callable[[FigureRow], float | None]


@dataclass(frozen=True)
class Group:
    """The rows of one group and what was made of them."""

    name: str
    rows: list[FigureRow] = field(default_factory=list[FigureRow])

    def reasons(self) -> dict[str, int]:
        """Return why rows were not used, without their line numbers, and how many each."""
        found = Counter(row.reason.partition(": ")[2] or row.reason for row in self.rows if row.reason)
        return dict(found.most_common())


def predict_memory_bytes(row: FigureRow) -> float | None:
    """Predict the peak of the rank that a row looked at, in bytes; None for a row that cannot be described."""
    return None if row.run is None else float(estimate_peak(row.run, row.stage).total_bytes)


def memory_interval(row: FigureRow) -> tuple[float, float] | None:
    """Return a row's peak in bytes if no gathered input of a product is kept, and if all are; None for a row unused.

    The two are the ends of what asynchronous collectives may leave allocated; see `Software.keeps_gathered`.
    """
    if row.run is None:
        return None
    ends = (replace(row.run, software=replace(row.run.software, keeps_gathered=keeps)) for keeps in (False, True))
    least, most = (float(estimate_peak(run, row.stage).total_bytes) for run in ends)
    return least, most


def count_within(rows: Sequence[FigureRow], margin: float = 0.05) -> tuple[int, int, int]:
    """Count the rows whose measured peak lies in their `memory_interval`, each end moved out by a part of itself.

    Args:
        rows: of one or more groups.
        margin: of each end.

    Returns:
        Rows inside, rows with a measured peak, and rows among these whose interval is wider than a point.
    """
    inside = measured = wide = 0
    for row in rows:
        interval = memory_interval(row)
        if interval is None or not row.memory_bytes:
            continue
        measured += 1
        wide += interval[1] > interval[0]
        inside += interval[0] * (1 - margin) <= row.memory_bytes <= interval[1] * (1 + margin)
    return inside, measured, wide


def predict_tokens_per_s(row: FigureRow) -> float | None:
    """Predict tokens a second of one GPU; None for a row that cannot be described."""
    if row.run is None or row.device is None:
        return None
    return estimate_tokens_per_s(row.run, row.device)


def group_rows(rows: Sequence[FigureRow]) -> list[Group]:
    """Sort rows into their groups, in the order in which these appear."""
    groups: dict[str, Group] = {}
    for row in rows:
        groups.setdefault(row.group, Group(row.group)).rows.append(row)
    return list(groups.values())


def memory_pairs(rows: Sequence[FigureRow], predict: Predict = predict_memory_bytes) -> list[tuple[float, float]]:
    """Return predicted and measured peaks in bytes, of the rows that have both."""
    pairs = ((predict(row), row.memory_bytes) for row in rows if row.memory_bytes)
    return [(predicted, measured) for predicted, measured in pairs if predicted is not None and measured is not None]


def summarise_group(group: Group) -> dict[str, str | int | float | None]:
    """Return a group's numbers under `KEYS`: errors and regret in per cent."""
    used = [row for row in group.rows if not row.reason]
    memory = memory_pairs(used)
    tokens = [
        (row.choice, predicted, row.tokens_per_s)
        for row in used
        if row.tokens_per_s and (predicted := predict_tokens_per_s(row)) is not None
    ]
    memory_median, memory_p90 = error_summary(memory)
    tokens_median, tokens_p90 = error_summary([(predicted, measured) for _, predicted, measured in tokens])
    values = (
        group.name,
        len(group.rows),
        len(used),
        memory_median,
        memory_p90,
        tokens_median,
        tokens_p90,
        mean_spearman(tokens),
        mean_regret_pct(tokens),
    )
    return dict(zip(KEYS, values, strict=True))
