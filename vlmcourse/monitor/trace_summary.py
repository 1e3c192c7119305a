"""What a merged trace says, in words: where each rank's time went, who is slow, what takes longest.

Enters: the JSON object of `trace_merge.merge_traces`. Leaves: a `TraceSummary`; printed, it is a table. Every moment of
the recorded steps counts once: as computing; else, where communication is on its way, as exposed communication; else,
where data are loaded, as a data stall; else as idle, which on a CPU is Python between two operators too. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcourse.monitor.rank_spread import describe_slowest, find_slowest
from vlmcourse.monitor.trace_activity import RankActivity, interval_of, read_activities
from vlmcourse.monitor.trace_files import ROUNDING_US, Event
from vlmcourse.monitor.trace_merge import ABOUT, merge_folder, read_merged
from vlmcourse.parallel.overlap import Interval, intersect, merge, subtract, total_s

COMPUTE, EXPOSED, STALL, IDLE = "compute", "exposed communication", "data stall", "idle"
"""What a moment of a rank is; the first that holds."""


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """Where one rank's time went, in seconds over all recorded steps; the first four add up to `seconds`."""

    rank: int
    compute_s: float
    exposed_s: float
    """Communication that was not covered by computing."""
    stall_s: float
    """Loading data, while neither computing nor communicating."""
    idle_s: float
    seconds: float
    communication_s: float
    """All of it, behind computing too."""

    @property
    def own_s(self) -> float:
        """Time that this rank needed for itself; the rank with the most keeps the others waiting."""
        return self.seconds - self.exposed_s


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """One operator, or one kernel of a GPU, over all ranks and recorded steps."""

    name: str
    self_s: float
    """Without the operators that it calls."""
    calls: int


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A time in which a rank computed nothing."""

    rank: int
    step: int
    start_s: float
    """Since the trace began."""
    seconds: float
    kind: str
    """What the rank did in most of it: exposed communication, data stall or idle."""
    before: str
    """The operator that ended before it, and what ran on from before it where that was not computing."""
    after: str
    """The operator that began after it."""


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """What all ranks did in the recorded steps."""

    steps: tuple[int, ...]
    step_s: float
    """Mean seconds of a step, on the slowest rank."""
    ranks: tuple[RankTime, ...]
    operators: tuple[OperatorTime, ...]
    """Those with the most self time, the most first."""
    longest_gap: Gap | None
    clock_uncertainty_s: float
    """How far the clocks of two ranks may still be apart."""

    @property
    def slowest(self) -> RankTime:
        """The rank with the most time of its own, which the others wait for."""
        return max(self.ranks, key=lambda of_rank: of_rank.own_s)

    @property
    def spread(self) -> float:
        """Own time of the slowest rank over the median of the others'; 1 where all are alike, or there is one."""
        return find_slowest({of_rank.rank: of_rank.own_s for of_rank in self.ranks})[1] or 1.0

    def __str__(self) -> str:
        """Return a table of the ranks, the operators, the longest gap and the clocks."""
        first, last = self.steps[0], self.steps[-1]
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        lines = [
            f"{which}: {1e3 * self.step_s:.1f} ms a step, on {len(self.ranks)} rank(s)",
            f"rank  {'compute':>14}  {'exposed comm.':>14}  {'data stall':>14}  {'idle':>14}  {'comm. hidden':>12}",
        ]
        lines += [self._row(of_rank) for of_rank in self.ranks]
        if len(self.ranks) > 1:
            own_ms = 1e3 * self.slowest.own_s / len(self.steps)
            lines.append(
                f"slowest: rank {self.slowest.rank} with {own_ms:.1f} ms a step of its own, {self.spread:.2f} x "
                f"{describe_slowest(len(self.ranks))}"
            )
        if (gap := self.longest_gap) is not None:
            lines.append(
                f"longest time without computing: {1e3 * gap.seconds:.1f} ms on rank {gap.rank} in step {gap.step} "
                f"({gap.kind}), after {gap.before}, before {gap.after}"
            )
        lines.append("most self time, all ranks and steps together:")
        lines += [f"{1e3 * op.self_s:>10.2f} ms  {op.calls:>6} x  {op.name}" for op in self.operators]
        if len(self.ranks) > 1:
            lines.append(f"clocks of the ranks agree to {1e6 * self.clock_uncertainty_s:.0f} us")
        return "\n".join(lines)

    def _row(self, of_rank: RankTime) -> str:
        parts = (of_rank.compute_s, of_rank.exposed_s, of_rank.stall_s, of_rank.idle_s)
        cells = [f"{1e3 * part / len(self.steps):7.1f} ms{100 * part / of_rank.seconds:3.0f} %" for part in parts]
        sent_s = of_rank.communication_s
        hidden = f"{100 * (1 - of_rank.exposed_s / sent_s):.0f} %" if sent_s else "-"
        return f"{of_rank.rank:>4}  {'  '.join(cells)}  {hidden:>12}"


def summarise_folder(folder: str | Path, num_operators: int = 10) -> TraceSummary:
    """Merge the traces of a folder, write the merged one beside them, and return what it says.

    One process does it, when all ranks have written theirs. For the merged trace see `merge_folder`.

    Raises:
        FileNotFoundError: if traces are missing.
        ValueError: if they cannot be merged, or show no step.
    """
    path = merge_folder(folder)
    return summarise(read_merged(path), num_operators)


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
        clock_uncertainty_s=sum(sorted(clock["uncertainty_s"] for clock in trace[ABOUT]["clocks"])[-2:]),
    )


def _split_time(activity: RankActivity) -> RankTime:
    windows = activity.windows
    compute_s, exposed_s, stall_s, communication_s = (
        total_s(intersect(parts, windows))
        for parts in (activity.compute, activity.exposed, activity.stalled, activity.communication)
    )
    seconds = total_s(windows)
    return RankTime(
        rank=activity.rank,
        compute_s=compute_s,
        exposed_s=exposed_s,
        stall_s=stall_s,
        idle_s=seconds - compute_s - exposed_s - stall_s,
        seconds=seconds,
        communication_s=communication_s,
    )


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
