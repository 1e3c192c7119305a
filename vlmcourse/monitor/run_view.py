"""What a person wants to know of a run at one moment: how far, how fast, which rank is slow, behind or silent.

Enters: by rank, its last steps; rows of the log; what was found out about the run's process. Leaves: a `RunView`, which
the notebook's dashboard and `vlmcourse watch` show. Files alone are known here: no rank is asked. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from vlmcourse.monitor.rank_spread import describe_slowest, find_slowest
from vlmcourse.monitor.step_log import RESUME, EventRecord, StepRecord

WAITING, RUNNING, FINISHED, STOPPED = "waiting", "running", "finished", "stopped"
PHASES = ("data_wait", "forward", "backward", "communication", "optimizer", "other")
"""Parts of a step as `StepRecord` has them, in the order in which they are drawn."""
WINDOW = 10
"""Bars and ranks are compared over the mean of so many steps, the last ones that all ranks have ended."""
SILENT_S, SILENT_STEPS = 10.0, 5.0
"""A rank is silent after so many seconds without a line, and no less than so many of its steps."""
BEHIND_S, BEHIND_STEPS = 1.0, 2.0
"""A rank that has not ended a step is behind when another did so this long ago, and no less than so many steps."""
OWNER_PREFIX, GIB = "memory/", 2**30


@dataclass(frozen=True, kw_only=True)
class RankView:
    """One rank."""

    rank: int
    step: int
    """Optimizer steps it has ended; 0 before the first."""
    since_step_s: float | None
    """Seconds since it ended that step: until now, or in a run that has ended until the end of any rank's last step."""
    step_s: float | None
    """Mean over the window, as are the next two."""
    phases_s: dict[str, float]
    """By `PHASES`; those that cannot be told are absent."""
    own_s: float | None
    """Work of its own in a step, waits for others left out."""
    rss_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    problem: str = ""
    """"silent", "behind" or nothing."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run at one moment."""

    folder: str
    state: str
    """One of WAITING (no step yet), RUNNING, FINISHED, and STOPPED: its process has ended without a result."""
    step: int = 0
    """The newest that any rank has ended."""
    num_steps: int | None = None
    world_size: int = 0
    running_s: float | None = None
    """To now or the end, from the beginning of the first step that was read or, later, from the last resumption: a
    pause is no time of the run."""
    resumed_step: int | None = None
    """The step after which it was last resumed; None where it was not, or so long ago that it was not read."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """By step, of the rows of the log."""
    tokens_per_s: list[tuple[int, float]] = field(default_factory=list)
    """By step: text and image tokens of all ranks."""
    owners_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by owner, as the last row has them; empty where the rows have none."""
    ranks: list[RankView] = field(default_factory=list)
    window_steps: int = 0
    """How many steps the means are of."""
    slowest_rank: int | None = None
    """The one with the longest work of its own; None where that cannot be told."""
    rank_spread: float | None = None
    """Its own work over the median of the others'."""
    last_event: str = ""
    """Such as "evaluation after step 100: 2.1 s"; empty before the first."""
    problem: str = ""
    """What in the files could not be read."""

    def summary(self) -> dict[str, Any]:
        """Return the numbers without the curves, ready for JSON."""
        shown = {name: value for name, value in vars(self).items() if name not in ("losses", "tokens_per_s", "ranks")}
        last = {"loss": self.losses, "tokens_per_s": self.tokens_per_s}
        return {
            **shown,
            **{name: curve[-1][1] if curve else None for name, curve in last.items()},
            "ranks": [dict(vars(rank)) for rank in self.ranks],
            "remarks": list_remarks(self),
        }


@dataclass
class RankTrail:
    """The last lines of one rank's file."""

    steps: dict[int, StepRecord] = field(default_factory=dict)
    event: EventRecord | None = None
    long_event: EventRecord | None = None
    """The last evaluation or checkpoint: a row of the log takes no time to speak of."""

    def add(self, record: StepRecord | EventRecord, keep: int = 4 * WINDOW) -> None:
        """Take one more line; of steps the last `keep` are kept."""
        if isinstance(record, EventRecord):
            self.event = record
            self.long_event = self.long_event if record.event in ("log", RESUME) else record
            return
        self.steps.pop(record.step, None)
        self.steps[record.step] = record
        if len(self.steps) > keep:
            del self.steps[next(iter(self.steps))]

    @property
    def last(self) -> StepRecord | None:
        """The newest step."""
        return self.steps[max(self.steps)] if self.steps else None

    @property
    def sign_s(self) -> float | None:
        """When it last showed that it is alive: the end of its last step or event, by the wall clock."""
        ends = [] if self.last is None else [end_of(self.last)]
        ends += [] if self.event is None else [self.event.start_s + self.event.seconds]
        return max(ends, default=None)


def end_of(step: StepRecord) -> float:
    """Return when a step ended, by the wall clock."""
    return step.start_s + step.step_s


def view_ranks(trails: Mapping[int, RankTrail], now_s: float, *, is_live: bool) -> list[RankView]:
    """Compare ranks.

    Args:
        trails: of every rank of the run, by rank.
        now_s: the wall clock, or in a run that has ended the last sign of any rank.
        is_live: whether ranks may still write, so that one that does not is a problem.
    """
    window = find_window(trails)
    newest = max((trail.last.step for trail in trails.values() if trail.last), default=0)
    first_ended_s = min((end_of(t.steps[newest]) for t in trails.values() if newest in t.steps), default=now_s)
    views = []
    for rank, trail in sorted(trails.items()):
        last = trail.last
        recent = [trail.steps[step] for step in window] or ([last] if last else [])
        step_s = _mean([record.step_s for record in recent])
        phases = {name: _mean([getattr(record, f"{name}_s") for record in recent]) for name in PHASES}
        problem = ""
        if is_live and newest:
            quiet_s = now_s - (trail.sign_s if trail.sign_s is not None else first_ended_s)
            longest_s = max((record.step_s for record in recent), default=0.0)
            if quiet_s > max(SILENT_S, SILENT_STEPS * longest_s):
                problem = "silent"
            elif (last.step if last else 0) < newest and now_s - first_ended_s > max(
                BEHIND_S, BEHIND_STEPS * longest_s
            ):
                problem = "behind"
        views.append(
            RankView(
                rank=rank,
                step=last.step if last else 0,
                since_step_s=max(0.0, now_s - end_of(last)) if last else None,
                step_s=step_s,
                phases_s={name: seconds for name, seconds in phases.items() if seconds is not None},
                own_s=_mean([record.own_s for record in recent]),
                rss_bytes=last.rss_bytes if last else None,
                allocated_bytes=last.allocated_bytes if last else None,
                reserved_bytes=last.reserved_bytes if last else None,
                problem=problem,
            )
        )
    return views


def find_window(trails: Mapping[int, RankTrail]) -> list[int]:
    """Return the last steps, at most `WINDOW`, that all ranks have ended; but for the run's first."""
    common = set.intersection(*(set(trail.steps) for trail in trails.values())) if trails else set()
    return sorted(common - {1} or common)[-WINDOW:]


def find_slowest_view(ranks: Sequence[RankView]) -> tuple[int | None, float | None]:
    """Return the rank with the longest work of its own, and that work over the median of the others'.

    None and None with one rank, and where a rank's waits cannot be told from its work.
    """
    own_s = {view.rank: view.own_s for view in ranks if view.own_s is not None}
    return find_slowest(own_s) if len(own_s) >= max(2, len(ranks)) else (None, None)


def find_owners(row: Mapping[str, Any]) -> dict[str, int]:
    """Return bytes by owner of a row: its `memory/<owner>_gib`, peaks of the whole process left out."""
    names = {name: name.removeprefix(OWNER_PREFIX).removesuffix("_gib") for name in row}
    return {
        owner: round(GIB * row[name])
        for name, owner in names.items()
        if name == f"{OWNER_PREFIX}{owner}_gib" and not owner.startswith("peak_") and _is_number(row[name])
    }


def list_facts(view: RunView) -> list[str]:
    """Say in a few words each how far the run is: step, loss, tokens per second, time, what it did last."""
    facts = [f"step {view.step}" + (f" of {view.num_steps}" if view.num_steps else "")]
    if view.losses:
        facts.append(f"loss {view.losses[-1][1]:.4f}")
    if view.tokens_per_s:
        facts.append(f"{view.tokens_per_s[-1][1]:,.0f} tokens/s")
    if view.running_s is not None:
        since = "" if view.resumed_step is None else f" since it went on after step {view.resumed_step}"
        facts.append(f"{view.running_s:.0f} s{since}")
    if view.last_event:
        facts.append(f"last {view.last_event}")
    return facts


def list_remarks(view: RunView) -> list[str]:
    """Say in sentences what a person should look at: how the run stands, who is slow, behind or silent."""
    said = []
    if view.state == STOPPED:
        said.append(f"the run has stopped after step {view.step} without a result: its process has ended")
    silent = [rank for rank in view.ranks if rank.problem == "silent"]
    if silent and len(silent) == len(view.ranks) and len(view.ranks) > 1:
        # a rank that never ended a step says nothing of how long ago the last step of any was
        quiet_s = min((rank.since_step_s for rank in silent if rank.since_step_s is not None), default=0.0)
        reasons = "an evaluation, a checkpoint, or ranks that wait for each other; files do not say which"
        is_even = all(rank.step == view.step for rank in silent)
        said.append(f"no rank has ended a step for {quiet_s:.0f} s" + (f": {reasons}" if is_even else ""))
    else:
        said += [_describe_silent(rank) for rank in silent]
    said += [
        f"rank {rank.rank} is behind: it has ended step {rank.step}, others step {view.step}"
        for rank in view.ranks
        if rank.problem and rank.step < view.step
    ]
    if view.slowest_rank is not None and view.rank_spread is not None:
        said.append(
            f"slowest rank: {view.slowest_rank}, whose own work takes {view.rank_spread:.2f} times "
            f"{describe_slowest(len(view.ranks))}"
        )
    elif view.world_size > 1 and view.window_steps:
        said.append("slowest rank: cannot be told, since waits of this strategy are not seen apart from work")
    if view.problem:
        said.append(view.problem)
    return said


def _describe_silent(rank: RankView) -> str:
    if rank.since_step_s is None:
        return f"rank {rank.rank} is silent: it has ended no step"
    usual = "" if rank.step_s is None else f"; its steps take {rank.step_s:.2f} s"
    return f"rank {rank.rank} is silent: no step for {rank.since_step_s:.0f} s{usual}"


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None where there is none, or a value is not known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
