"""What a merged trace says, in words: where each rank's time went, who is slow, what takes longest.

Enters: the JSON object of `trace_merge.merge_traces`. Leaves: a `TraceSummary`; printed, it is a table. Every moment of
the recorded steps counts once: as computing; else, where communication is on its way, as exposed communication; else,
where data are loaded, as a data stall; else as idle, which on a CPU is Python between two operators too. Chapter 6.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from vlmcourse.monitor.profile_summary import (
    SHORT_S,
    CopyTime,
    Gap,
    OperatorTime,
    RankTime,
    TraceSummary,
    write_summary,
)
from vlmcourse.monitor.trace_activity import RankActivity, interval_of, read_activities
from vlmcourse.monitor.trace_files import ROUNDING_US, Event
from vlmcourse.monitor.trace_merge import ABOUT, merge_folder, read_merged
from vlmcourse.parallel.overlap import GLOO, NCCL_KERNELS, Interval, intersect, merge, subtract, total_s

COMPUTE, EXPOSED, STALL, IDLE = "compute", "exposed communication", "data stall", "idle"
"""What a moment of a rank is; the first that holds."""
KERNEL, COPY = "kernel", "gpu_memcpy"
"""Categories of a GPU's spans."""


def summarise_folder(folder: str | Path, num_operators: int = 10) -> TraceSummary:
    """Merge the traces of a folder, write the merged one and `summary.json` beside them, and return what they say.

    One process does it, when all ranks have written theirs. For the merged trace see `merge_folder`.

    Raises:
        FileNotFoundError: if traces are missing.
        ValueError: if they cannot be merged, or show no step.
    """
    path = merge_folder(folder)
    summary = summarise(read_merged(path), num_operators)
    write_summary(summary, folder)
    return summary


def summarise(trace: Mapping[str, Any], num_operators: int = 10) -> TraceSummary:
    """Return what a merged trace says.

    Args:
        trace: what `merge_traces` returns.
        num_operators: how many operators to name.

    Raises:
        ValueError: as `read_activities` does.
    """
    activities = read_activities(trace)
    gaps = [gap for activity in activities for gap in _find_gaps(activity)]
    longest = max(gaps, key=lambda gap: gap[2] - gap[1], default=None)
    steps = tuple(sorted(activities[0].steps))
    ranks = tuple(_split_time(activity) for activity in activities)
    return TraceSummary(
        steps=steps,
        step_s=max(of_rank.seconds for of_rank in ranks) / len(steps),
        ranks=ranks,
        operators=tuple(rank_operators(activities)[:num_operators]),
        longest_gap=_describe_gap(*longest) if longest is not None else None,
        on_gpu=any(_is_on_gpu(activity) for activity in activities),
        shared_exposed_s=_share_exposed(activities),
        clock_uncertainty_s=sum(sorted(clock["uncertainty_s"] for clock in trace[ABOUT]["clocks"])[-2:]),
    )


def _split_time(activity: RankActivity) -> RankTime:
    windows = activity.windows
    compute_s, exposed_s, stall_s, communication_s = (
        total_s(intersect(parts, windows))
        for parts in (activity.compute, activity.exposed, activity.stalled, activity.communication)
    )
    seconds = total_s(windows)
    leaves = _find_leaves(activity)
    return RankTime(
        rank=activity.rank,
        compute_s=compute_s,
        exposed_s=exposed_s,
        stall_s=stall_s,
        idle_s=seconds - compute_s - exposed_s - stall_s,
        seconds=seconds,
        communication_s=communication_s,
        num_operators=len(leaves),
        operators_s=sum(span["dur"] for span in leaves) / 1e6,
        num_short=sum(span["dur"] / 1e6 < SHORT_S for span in leaves),
        copies=tuple(_sum_copies(activity)),
    )


def _share_exposed(activities: Sequence[RankActivity]) -> float | None:
    """Return the exposed communication of the rank that has least, for the n-th call of each collective on all ranks.

    What is exposed in no collective, such as the call of one, counts as that of the rank that has least of it.

    Returns:
        Seconds; None where ranks called a collective not equally often.
    """
    of_ranks = [_exposed_by_call(activity) for activity in activities]
    if len({tuple((name, len(calls)) for name, calls in sorted(of_rank.items())) for of_rank in of_ranks}) > 1:
        return None
    by_call = [calls for name in of_ranks[0] for calls in zip(*(of_rank[name] for of_rank in of_ranks), strict=True)]
    between = [
        total_s(intersect(activity.exposed, activity.windows)) - sum(map(sum, of_rank.values()))
        for activity, of_rank in zip(activities, of_ranks, strict=True)
    ]
    return sum(map(min, by_call)) + max(0.0, min(between))


def _exposed_by_call(activity: RankActivity) -> dict[str, list[float]]:
    """Return the exposed seconds of each collective that began in the steps, by name and in order.

    Where several are on their way, a moment counts for the one that began first.
    """
    exposed = intersect(activity.exposed, activity.windows)
    begins, sums = [begin for begin, _ in exposed], [0.0, *accumulate(end - begin for begin, end in exposed)]

    def exposed_until(moment_s: float) -> float:
        at = bisect_right(begins, moment_s)
        return sums[at] - max(0.0, exposed[at - 1][1] - moment_s) if at else 0.0

    found: dict[str, list[float]] = {}
    counted_s = 0.0
    for span in activity.sent:
        begin_s, end_s = interval_of(span)
        if span["name"].startswith((GLOO, *NCCL_KERNELS)) and any(a <= begin_s < b for a, b in activity.windows):
            seconds = exposed_until(max(end_s, counted_s)) - exposed_until(max(begin_s, counted_s))
            counted_s = max(end_s, counted_s)
            found.setdefault(span["name"], []).append(seconds)
    return found


def _is_on_gpu(activity: RankActivity) -> bool:
    return any(span.get("cat") == KERNEL for span in activity.operators)


def _find_leaves(activity: RankActivity) -> list[Event]:
    """Return a GPU's kernels, or a CPU's operators that call no other, that began within the steps."""
    if _is_on_gpu(activity):
        found = [span for span in activity.operators if span.get("cat") == KERNEL]
    else:
        rows: dict[tuple[int, int], list[Event]] = {}
        for span in activity.operators:
            rows.setdefault((span["pid"], span["tid"]), []).append(span)
        ordered = [sorted(spans, key=lambda span: (span["ts"], -span["dur"])) for spans in rows.values()]
        found = [
            span
            for spans in ordered
            for span, after in zip(spans, [*spans[1:], None], strict=True)
            if after is None or after["ts"] + ROUNDING_US >= span["ts"] + span["dur"]
        ]
    return [span for span in found if any(a <= interval_of(span)[0] < b for a, b in activity.windows)]


def _sum_copies(activity: RankActivity) -> list[CopyTime]:
    """Return what a GPU copied, by direction; a CPU's operators have no copies of this kind."""
    spans: dict[str, list[Event]] = {}
    for span in activity.operators:
        if span.get("cat") == COPY:
            spans.setdefault((span["name"].removeprefix("Memcpy ").split() or ["unknown"])[0], []).append(span)
    kernels = merge(interval_of(span) for span in activity.operators if span.get("cat") == KERNEL)
    found = []
    for direction, copies in sorted(spans.items()):
        busy = intersect(merge(map(interval_of, copies)), activity.windows)
        inside = [span for span in copies if intersect((interval_of(span),), activity.windows)]
        found.append(
            CopyTime(
                direction=direction,
                calls=len(inside),
                num_bytes=sum(int(span.get("args", {}).get("bytes", 0)) for span in inside),
                seconds=total_s(busy),
                exposed_s=total_s(subtract(subtract(busy, kernels), activity.communication)),
            )
        )
    return [copy for copy in found if copy.calls]


def rank_operators(activities: Iterable[RankActivity]) -> list[OperatorTime]:
    """Return the operators (on a GPU the kernels) of the recorded steps, those with the most self time first."""
    self_us: dict[str, float] = {}
    calls: dict[str, int] = {}
    for activity in activities:
        rows: dict[tuple[int, int], list[Event]] = {}
        for span in activity.operators:
            if intersect((interval_of(span),), activity.windows):
                rows.setdefault((span["pid"], span["tid"]), []).append(span)
        for spans in rows.values():
            for name, microseconds in _self_times(spans):
                self_us[name] = self_us.get(name, 0.0) + microseconds
                calls[name] = calls.get(name, 0) + 1
    found = [OperatorTime(name=name, self_s=us / 1e6, calls=calls[name]) for name, us in self_us.items()]
    return sorted(found, key=lambda op: -op.self_s)


def _self_times(spans: Sequence[Event]) -> list[tuple[str, float]]:
    """Return name and self time in microseconds of each span of one row."""
    times: list[list[Any]] = []
    open_spans: list[tuple[float, list[Any]]] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        while open_spans and open_spans[-1][0] <= span["ts"] + ROUNDING_US:
            open_spans.pop()
        if open_spans:
            open_spans[-1][1][1] -= span["dur"]
        times.append([span["name"], span["dur"]])
        open_spans.append((span["ts"] + span["dur"], times[-1]))
    return [(name, max(0.0, microseconds)) for name, microseconds in times]


def _find_gaps(activity: RankActivity) -> list[tuple[RankActivity, float, float]]:
    """Return when a rank computed nothing within the steps."""
    return [(activity, begin, end) for begin, end in subtract(merge(activity.windows), activity.compute)]


def _describe_gap(activity: RankActivity, begin_s: float, end_s: float) -> Gap:
    whole: tuple[Interval, ...] = ((begin_s, end_s),)
    parts = {EXPOSED: total_s(intersect(activity.exposed, whole)), STALL: total_s(intersect(activity.stalled, whole))}
    parts[IDLE] = end_s - begin_s - sum(parts.values())
    kind = max(parts, key=lambda name: parts[name])
    ended = [span for span in activity.operators if interval_of(span)[1] <= begin_s + ROUNDING_US / 1e6]
    began = [span for span in activity.operators if interval_of(span)[0] >= end_s - ROUNDING_US / 1e6]
    before = max(ended, key=lambda span: interval_of(span)[1])["name"] if ended else "the begin of the trace"
    inside = [span for span in activity.sent if kind == EXPOSED and intersect((interval_of(span),), whole)]
    if inside:
        before += f", in {max(inside, key=lambda span: total_s(intersect((interval_of(span),), whole)))['name']}"
    return Gap(
        rank=activity.rank,
        step=next(step for step, (first, last) in activity.steps.items() if first <= begin_s < last),
        start_s=begin_s,
        seconds=end_s - begin_s,
        kind=kind,
        before=before,
        after=began[0]["name"] if began else "the end of the trace",
    )
