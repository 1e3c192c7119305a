"""What the traces of a profile say, as plain numbers that can be printed, written down and read again. No torch.

Enters: numbers of `monitor.trace_summary`, or the file `summary.json` beside a profile's traces. Leaves: a
`TraceSummary`; printed, it is a table. `monitor.diagnosis` reads the file of a run that was profiled. Chapter 6.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from vlmcourse.monitor.rank_spread import describe_slowest, find_slowest
from vlmcourse.monitor.whole_file import replace_file

PROFILE_FOLDER, SUMMARY_JSON = "profile", "summary.json"
"""In a run's folder, and in that one."""
SHORT_S = 10e-6
"""About what PyTorch takes to start an operator with autograd, or a kernel: a shorter one waits for its start."""


@dataclass(frozen=True, kw_only=True)
class CopyTime:
    """Copies of one rank's GPU in one direction, over all recorded steps."""

    direction: str
    """HtoD (host to device), DtoH, DtoD, HtoH or PtoP, as CUDA names it."""
    calls: int
    num_bytes: int
    seconds: float
    """At least one was on its way."""
    exposed_s: float
    """Of that, while no kernel ran and no collective was on its way."""


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
    num_operators: int = 0
    """Operators that call no other; on a GPU kernels."""
    operators_s: float = 0.0
    """What these took, added up, those beside each other too."""
    num_short: int = 0
    """Of these, how many took less than `SHORT_S`."""
    copies: tuple[CopyTime, ...] = ()
    """Of a GPU, by direction."""

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
    on_gpu: bool = False
    """Whether operators are a GPU's kernels."""
    shared_exposed_s: float | None = None
    """Exposed communication of the rank that has least, collective by collective, over all recorded steps; None where
    ranks have different numbers of collectives, and in summaries of older versions."""

    @property
    def slowest(self) -> RankTime:
        """The rank with the most time of its own, which the others wait for."""
        return max(self.ranks, key=lambda of_rank: of_rank.own_s)

    @property
    def spread(self) -> float:
        """Own time of the slowest rank over the median of the others'; 1 where all are alike, or there is one."""
        return find_slowest({of_rank.rank: of_rank.own_s for of_rank in self.ranks})[1] or 1.0

    @property
    def shared_exposed_share(self) -> float:
        """Part of the ranks' time that `shared_exposed_s` is; 0 where that is not known."""
        return (self.shared_exposed_s or 0.0) * len(self.ranks) / sum(of_rank.seconds for of_rank in self.ranks)

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
        lines += [self._counts(of_rank) for of_rank in self.ranks if of_rank.num_operators]
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

    def _counts(self, of_rank: RankTime) -> str:
        """Say how many operators or kernels a rank ran a step, how long one took, and what it copied."""
        number, num_steps = of_rank.num_operators, len(self.steps)
        what = "kernels" if self.on_gpu else "operators that call no other"
        said = (
            f"rank {of_rank.rank}: {number / num_steps:,.0f} {what} a step, "
            f"{1e6 * of_rank.operators_s / number:.1f} us "
            f"each, {of_rank.num_short / number:.0%} below {1e6 * SHORT_S:.0f} us"
        )
        return said + "".join(
            f"; {copy.direction} {copy.num_bytes / num_steps / 1e6:.1f} MB a step in "
            f"{1e3 * copy.seconds / num_steps:.1f} ms, {1e3 * copy.exposed_s / num_steps:.1f} ms of it exposed"
            for copy in of_rank.copies
        )


def name_steps(profile: TraceSummary) -> str:
    """Return which steps were recorded, in words."""
    first, last = profile.steps[0], profile.steps[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def describe_operators(of_rank: RankTime, profile: TraceSummary) -> str:
    """Return how many operators or kernels a rank ran a step, and how long they took."""
    number, num_steps = of_rank.num_operators, len(profile.steps)
    what = "kernels" if profile.on_gpu else "operators"
    if not number:
        return f"no {what} counted"
    return (
        f"{number / num_steps:,.0f} {what} a step of {1e6 * of_rank.operators_s / number:.1f} us on the mean, "
        f"{of_rank.num_short / number:.0%} of them below {1e6 * SHORT_S:.0f} us"
    )


def write_summary(summary: TraceSummary, folder: str | Path) -> Path:
    """Write a summary as `summary.json` into a profile's folder; return its path."""
    path = Path(folder) / SUMMARY_JSON
    replace_file(path, json.dumps(dataclasses.asdict(summary), indent=1) + "\n")
    return path


def read_summary(path: str | Path) -> TraceSummary:
    """Read what `write_summary` wrote.

    Raises:
        OSError: if there is no such file.
        ValueError: if it holds something else.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        ranks = [
            RankTime(**of_rank | {"copies": tuple(CopyTime(**copy) for copy in of_rank["copies"])})
            for of_rank in found["ranks"]
        ]
        summary = TraceSummary(
            **found
            | {
                "steps": tuple(found["steps"]),
                "ranks": tuple(ranks),
                "operators": tuple(OperatorTime(**operator) for operator in found["operators"]),
                "longest_gap": Gap(**found["longest_gap"]) if found["longest_gap"] is not None else None,
            }
        )
        if not (summary.steps and summary.ranks and all(of_rank.seconds > 0 for of_rank in summary.ranks)):
            raise ValueError("there is no step or no rank in it")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{str(path)!r} is no summary of this version ({error}): make it again with "
            "vlmcourse.monitor.trace_summary.summarise_folder(its folder)"
        ) from error
    return summary
