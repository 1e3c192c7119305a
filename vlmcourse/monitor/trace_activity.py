"""What each rank did when: a merged trace sorted into computation, communication, loading data and nothing.

Enters: the JSON object of `trace_merge.merge_traces`. Leaves: a `RankActivity` a rank, all on one time axis, and the
spans of one step to draw. Within a rank, an interval is

- compute: on a CPU, PyTorch's operators on any thread, except while they wait for a collective that they called, and
  except those that load data; on a GPU, kernels and copies that are not NCCL's;
- communication: collectives on their way (gloo's, NCCL's kernels), their calls and waits, and the phase of that name;
- data: the phase `data_wait`, and PyTorch's `DataLoader`;
- and several of these at once where they overlap. What only a compiled extension does (DeepSpeed's optimizers on a CPU)
  is none of them: PyTorch's profiler does not see it.

Chapter 6.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmcourse.monitor.trace_files import STEP_PREFIX, Event
from vlmcourse.monitor.trace_merge import ABOUT
from vlmcourse.parallel.overlap import GLOO, NCCL_KERNELS, Interval, intersect, is_operator, merge, subtract
from vlmcourse.parallel.phases import PHASE_PREFIX
from vlmcourse.spans import BACKWARD, COMMUNICATION, COMPUTE, DATA, DATA_WAIT, FORWARD, OPTIMIZER, PHASES, Span

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU does."""
LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Categories of what asks for it, on the CPU."""
CALLS = (GLOO, "c10d::", "_c10d_functional::", "nccl:")
"""What names of collectives and of waits for them begin with, on a CPU."""
DATA_LOADER, OPTIMIZER_STEP = "enumerate(DataLoader)", "Optimizer.step#"
"""What names begin with that PyTorch gives to loading data and to an optimizer's step, in any loop."""


@dataclass(frozen=True, kw_only=True)
class RankActivity:
    """What one rank did in the recorded steps; intervals in seconds since the trace began, merged and in order."""

    rank: int
    steps: Mapping[int, Interval]
    """From a step's begin to the next one's, or to the last one's own end."""
    compute: tuple[Interval, ...]
    communication: tuple[Interval, ...]
    data: tuple[Interval, ...]
    phases: Mapping[str, tuple[Interval, ...]]
    """By name of `spans.PHASES`; empty where a phase was not marked. On a GPU, forward, backward and optimizer are when
    those kernels ran that the CPU launched in them, which may be much later."""
    operators: Sequence[Event] = field(repr=False)
    """What `compute` is made of, in order of their start."""
    sent: Sequence[Event] = field(repr=False)
    """What `communication` is made of, in order of their start."""

    @property
    def windows(self) -> tuple[Interval, ...]:
        """The steps, as one union."""
        return merge(self.steps.values())

    @property
    def exposed(self) -> tuple[Interval, ...]:
        """Where communication was on its way and this rank did not compute."""
        return subtract(self.communication, self.compute)

    @property
    def stalled(self) -> tuple[Interval, ...]:
        """Where this rank loaded data and neither computed nor communicated."""
        return subtract(subtract(self.data, self.compute), self.communication)


def read_activities(trace: Mapping[str, Any]) -> list[RankActivity]:
    """Return what every rank of a merged trace did, rank by rank.

    Raises:
        ValueError: if the trace is not a merged one, or a rank has no recorded step or computed nothing in it.
    """
    if ABOUT not in trace:
        raise ValueError(f"the trace has no {ABOUT!r}: give what trace_merge.merge_traces returns")
    rank_of = {row["pid"]: row["rank"] for row in trace[ABOUT]["rows"]}
    spans: dict[int, list[Event]] = {rank: [] for rank in sorted(set(rank_of.values()))}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            spans[rank_of[event["pid"]]].append(event)
    return [_read_rank(rank, of_rank) for rank, of_rank in spans.items()]


def interval_of(event: Event) -> Interval:
    """Return begin and end of a span in seconds."""
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def _read_rank(rank: int, spans: Sequence[Event]) -> RankActivity:
    on_cpu = [span for span in spans if not _is_on_gpu(span)]
    kernels = [span for span in spans if span.get("cat") in ON_GPU]
    steps = _find_steps(on_cpu)
    if not steps:
        raise ValueError(f"rank {rank} recorded no span {STEP_PREFIX!r}...: record it with profile_steps")
    phases = {name: _union(span for span in on_cpu if span["name"] == PHASE_PREFIX + name) for name in PHASES}
    data = merge([*phases[DATA_WAIT], *_union(span for span in on_cpu if span["name"].startswith(DATA_LOADER))])
    phases[OPTIMIZER] = merge(
        [*phases[OPTIMIZER], *_union(span for span in on_cpu if span["name"].startswith(OPTIMIZER_STEP))]
    )
    if kernels:
        gloo = [span for span in on_cpu if span["name"].startswith(GLOO)]
        sent = [span for span in kernels if span["name"].startswith(NCCL_KERNELS)] + gloo
        operators = [span for span in kernels if not span["name"].startswith(NCCL_KERNELS)]
        compute = _union(operators)
        launches_s = _find_launches(on_cpu)
        for name in (FORWARD, BACKWARD, OPTIMIZER):
            phases[name] = _union(_launched_in(phases[name], operators, launches_s))
    else:
        marked = PHASE_PREFIX + COMMUNICATION
        sent = [span for span in on_cpu if span["name"].startswith(CALLS) or span["name"] == marked]
        operators = [span for span in on_cpu if is_operator(span["name"])]
        compute = subtract(_compute_on_cpu(operators, sent), data)
    windows = merge(steps.values())
    if not intersect(compute, windows):
        raise ValueError(f"rank {rank} computed nothing in the recorded steps: run forward and backward in them")
    return RankActivity(
        rank=rank,
        steps=steps,
        compute=compute,
        communication=_union(sent),
        data=data,
        phases=phases,
        operators=sorted(operators, key=lambda span: span["ts"]),
        sent=sorted(sent, key=lambda span: span["ts"]),
    )


def _is_on_gpu(span: Event) -> bool:
    return span.get("cat") in (*ON_GPU, "gpu_user_annotation")


def _find_launches(on_cpu: Iterable[Event]) -> dict[int, float]:
    """Return when the CPU asked for each of a GPU's activities, in seconds, by the number that both have."""
    calls = (span for span in on_cpu if span.get("cat") in LAUNCHES)
    return {span["args"]["correlation"]: span["ts"] / 1e6 for span in calls if "correlation" in span.get("args", {})}


def _launched_in(phase: Sequence[Interval], kernels: Iterable[Event], launches_s: Mapping[int, float]) -> list[Event]:
    """Return the kernels that the CPU asked for in a phase: backward's are launched by another thread meanwhile."""
    begins = [begin for begin, _ in phase]
    found = []
    for kernel in kernels:
        launched_s = launches_s.get(kernel.get("args", {}).get("correlation"))
        if launched_s is not None and (at := bisect_right(begins, launched_s)) and launched_s < phase[at - 1][1]:
            found.append(kernel)
    return found


def _find_steps(on_cpu: Iterable[Event]) -> dict[int, Interval]:
    """Return the recorded steps by number, each up to the next."""
    marked = sorted(
        (*interval_of(span), int(span["name"].removeprefix(STEP_PREFIX)))
        for span in on_cpu
        if span["name"].startswith(STEP_PREFIX) and span["name"].removeprefix(STEP_PREFIX).isdigit()
    )
    begins = [begin for begin, _, _ in marked]
    return {
        number: (begin, begins[i + 1] if i + 1 < len(begins) else end) for i, (begin, end, number) in enumerate(marked)
    }


def _compute_on_cpu(operators: Iterable[Event], sent: Iterable[Event]) -> tuple[Interval, ...]:
    """Return when operators ran, without what they, or what they run on the same thread, waited for collectives."""
    waits: dict[tuple[int, int], list[Event]] = {}
    for span in sent:
        waits.setdefault((span["pid"], span["tid"]), []).append(span)
    rows: dict[tuple[int, int], list[Event]] = {}
    for span in operators:
        rows.setdefault((span["pid"], span["tid"]), []).append(span)
    alone = [subtract(_union(spans), _union(waits.get(row, ()))) for row, spans in rows.items()]
    return merge(interval for of_row in alone for interval in of_row)


def _union(spans: Iterable[Event]) -> tuple[Interval, ...]:
    return merge(interval_of(span) for span in spans)


# --- One step, to draw ------------------------------------------------------------------------------------------------


def read_step_spans(
    trace: Mapping[str, Any], step: int | None = None, *, join_gaps_s: float | None = None
) -> list[Span]:
    """Return one step of all ranks as spans, for `plots.plot_timeline`.

    Args:
        trace: a merged one.
        step: its number; by default the first that was recorded.
        join_gaps_s: pauses of a lane up to this long are not shown; by default a 500th of the step, as fine as a
            picture can be.

    Returns:
        Spans in seconds since the first rank began the step. Lanes: compute (named after the phase in which it was:
        forward, backward, or other), communication (named after the collective that began), data, optimizer.

    Raises:
        ValueError: if this step was not recorded, and as `read_activities` does.
    """
    activities = read_activities(trace)
    recorded = sorted(activities[0].steps)
    step = recorded[0] if step is None else step
    if any(step not in activity.steps for activity in activities):
        raise ValueError(f"step {step} was not recorded on every rank: choose one of {', '.join(map(str, recorded))}")
    start_s = min(activity.steps[step][0] for activity in activities)
    longest_s = max(end - begin for activity in activities for begin, end in [activity.steps[step]])
    gap_s = longest_s / 500 if join_gaps_s is None else join_gaps_s
    return [span for activity in activities for span in _spans_of(activity, step, start_s, gap_s)]


def _spans_of(activity: RankActivity, step: int, start_s: float, gap_s: float) -> list[Span]:
    window = (activity.steps[step],)
    of_phases = {name: activity.phases[name] for name in (FORWARD, BACKWARD)}
    other = subtract(activity.compute, merge(part for parts in of_phases.values() for part in parts))
    other = subtract(other, activity.phases[OPTIMIZER])
    found = [
        *((COMPUTE, name, intersect(activity.compute, parts)) for name, parts in of_phases.items()),
        (COMPUTE, "other", other),
        (DATA, DATA_WAIT, activity.data),
        (OPTIMIZER, OPTIMIZER, activity.phases[OPTIMIZER]),
    ]
    found += [(COMMUNICATION, name, parts) for name, parts in _collectives(activity).items()]
    return [
        Span(activity.rank, lane, name, begin - start_s, end - start_s)
        for lane, name, parts in found
        for begin, end in _join(intersect(merge(parts), window), gap_s)
    ]


def _collectives(activity: RankActivity) -> dict[str, tuple[Interval, ...]]:
    """Return when collectives were on their way, by name; calls and waits around them as `wait`."""
    by_name: dict[str, list[Interval]] = {}
    for span in activity.sent:
        name = span["name"].removeprefix(GLOO)
        is_call = span["name"].startswith(CALLS[1:]) or span["name"].startswith(PHASE_PREFIX)
        by_name.setdefault("wait" if is_call else name, []).append(interval_of(span))
    known = merge(interval for name, of_name in by_name.items() if name != "wait" for interval in of_name)
    unions = {name: merge(intervals) for name, intervals in by_name.items()}
    return unions | ({"wait": subtract(unions["wait"], known)} if "wait" in unions else {})


def _join(parts: Sequence[Interval], gap_s: float) -> list[Interval]:
    """Close pauses that are too short to see."""
    joined: list[Interval] = []
    for begin, end in parts:
        if joined and begin - joined[-1][1] <= gap_s:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
