"""How a run scales: speed-ups, fitted laws and the split of what is lost, read from step logs of each number of ranks.

Enters: folders of runs that differ in their number of ranks, measured in turns. Leaves: a `ScalingReport`. Nothing but
step logs is read, so any runs will do: `labs.scaling` makes them on the ranks at hand. Left out: work between steps
(checkpoints, evaluation), and the first steps of each run. The arithmetic is `planner.scaling`'s and its neighbours'.
Chapter 6.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmcourse.layout import align
from vlmcourse.monitor.step_log import StepRecord, common_steps, read_step_log
from vlmcourse.planner.efficiency_loss import LOSSES, EfficiencyLoss, StepParts, split_loss
from vlmcourse.planner.scaling import RankTimes, Speedup, find_serial_fraction, measure_speedups
from vlmcourse.planner.scaling_fit import GustafsonFit, ScalingFit, fit_amdahl, fit_communication, fit_gustafson
from vlmcourse.planner.scaling_limits import Comparison, LastPaying, compare_laws, estimate_last_paying

NUM_WARMUP = 3
"""Steps left out at the beginning of each run: buffers are made, threads started, DDP's buckets arranged."""
Steps = list[list[StepParts]]
"""Each step by rank."""


@dataclass(frozen=True, kw_only=True)
class ScalingReport:
    """How one kind of scaling came out; all numbers are of the machine that the runs were made on."""

    kind: str
    """strong: the same samples a step; weak: as many on each rank."""
    machine: str
    num_cores: int | None
    """That the ranks shared; None where each had a GPU of its own."""
    times: tuple[RankTimes, ...]
    speedups: tuple[Speedup, ...]
    losses: tuple[EfficiencyLoss, ...]
    """Of each number of ranks above 1, from the mean of all steps: their efficiency is near that of `speedups`, which
    takes the median step of each turn, and which a single long step does not upset."""
    amdahl: ScalingFit
    """In weak scaling: that no step takes longer on more ranks."""
    communication: ScalingFit | None
    """None where fewer than 3 numbers of ranks were run."""
    gustafson: GustafsonFit | None
    """Of weak scaling."""
    comparison: Comparison | None
    """Whether step times grow with the ranks more than chance explains; None as above."""
    last_paying: LastPaying
    """As measured, and by the richest law there is where that fits well."""

    @property
    def crowded(self) -> tuple[int, ...]:
        """Numbers of ranks that had less than a core each."""
        cores = self.num_cores
        return tuple(one.num_ranks for one in self.times if cores is not None and one.num_ranks > cores)

    @property
    def warning(self) -> str:
        """What must be known before these numbers are believed; empty if nothing is."""
        if not self.crowded:
            return ""
        sizes = " and ".join(map(str, self.crowded))
        return (
            f"{sizes} ranks share {self.num_cores} cores: their computing is slow because of that, not because of the "
            "program, and no fit through them says anything about a larger machine"
        )

    def __str__(self) -> str:
        """Show a line a number of ranks, the fits, and what cannot be concluded."""
        shared = ["lost % of it to", *LOSSES]
        head = ["ranks", "step (ms)", "speed-up (95 %)", "efficiency", "Amdahl's s from it", *shared]
        rows = [head]
        losses = {loss.num_ranks: loss for loss in self.losses}
        for one, speedup in zip(self.times, self.speedups, strict=True):
            loss = losses.get(one.num_ranks)
            shares = [f"{100 * share:.1f}" for share in (loss.lost, *loss.shares.values())] if loss else [""] * 6
            serial = find_serial_fraction(speedup.speedup.value, one.num_ranks) if loss else math.nan
            of_one = "" if not loss else f"{serial:.3f}" if serial <= 1 else "over 1: none"
            is_strong = self.kind == "strong"
            row = [str(one.num_ranks), f"{1e3 * one.mean_s:.1f}", str(speedup.speedup)]
            rows.append([*row, f"{speedup.efficiency.value:.2f}", of_one if is_strong else "", *shares])
        lines = [f"{self.kind} scaling, {len(self.times[0].step_s)} turns, {self.machine}", align(rows)]
        fits = (self.gustafson or self.amdahl, self.communication, self.comparison)
        lines += [str(found) for found in fits if found is not None]
        lines.append(f"pays up to {self.last_paying}")
        return "\n".join([*lines, *([f"note: {self.warning}"] if self.warning else [])])


def analyse_scaling(
    kind: str,
    turns: Sequence[Mapping[int, str | Path]],
    *,
    machine: str,
    num_cores: int | None,
    num_warmup: int = NUM_WARMUP,
) -> ScalingReport:
    """Read the runs of all turns and say how they scale.

    Args:
        kind: "strong" or "weak": what the runs were.
        turns: of each turn, the folder of the run on each number of ranks, 1 among them; 2 turns or more.
        machine: in words, for the report.
        num_cores: that the ranks shared; None where each had a GPU of its own.
        num_warmup: steps left out at the beginning of each run.

    Raises:
        FileNotFoundError: if a folder has no step log.
        ValueError: if a run has too few steps or another number of ranks than was said, its waits were not told
            from its work, or turns are missing.
    """
    sizes = sorted({size for turn in turns for size in turn})
    if len(turns) < 2 or any(sorted(turn) != sizes for turn in turns) or sizes[0] != 1 or len(sizes) < 2:
        raise ValueError(
            f"turns with {[sorted(turn) for turn in turns]} ranks: need 2 turns or more, all with the same numbers of "
            "ranks, 1 and more"
        )
    steps = [{size: read_steps(turn[size], size, num_warmup) for size in sizes} for turn in turns]
    times = tuple(_time_of(kind, size, steps) for size in sizes)
    losses = tuple(_mean_loss(kind, size, steps) for size in sizes[1:])
    amdahl = fit_amdahl(kind, times)
    communication = fit_communication(kind, times) if len(sizes) > 2 else None
    return ScalingReport(
        kind=kind,
        machine=machine,
        num_cores=num_cores,
        times=times,
        speedups=tuple(measure_speedups(kind, times)),
        losses=losses,
        amdahl=amdahl,
        communication=communication,
        gustafson=fit_gustafson(times) if kind == "weak" else None,
        comparison=compare_laws(kind, times) if len(sizes) > 2 else None,
        last_paying=estimate_last_paying(times, communication or amdahl),
    )


def read_steps(run_folder: str | Path, num_ranks: int, num_warmup: int = NUM_WARMUP) -> Steps:
    """Read the parts of the steps that all ranks of a run have made, the first ones left out.

    Args:
        run_folder: `output_dir/name` of the run.
        num_ranks: that it must have had.
        num_warmup: steps left out.

    Raises:
        FileNotFoundError: if it has no step log.
        ValueError: if no step is left, the run had other ranks, or its waits were not told from its work.
    """
    steps = list(common_steps(read_step_log(run_folder)).values())[num_warmup:]
    sizes = {len(step) for step in steps}
    if sizes != {num_ranks}:
        raise ValueError(
            f"{run_folder}: {len(steps)} steps after the first {num_warmup}, of {sorted(sizes)} ranks: need 1 or more, "
            f"of {num_ranks}; make more steps, or start it on {num_ranks} ranks"
        )
    return [[_parts_of(record, run_folder) for _, record in sorted(step.items())] for step in steps]


def _parts_of(record: StepRecord, run_folder: str | Path) -> StepParts:
    waited_s = record.communication_s
    if waited_s is None or record.data_wait_s is None or record.forward_s is None or record.backward_s is None:
        raise ValueError(
            f"{run_folder}, step {record.step}: its log does not tell waits for other ranks from work (zero2, fsdp, "
            "hsdp and DeepSpeed on a GPU): scale a run under ddp or zero1, or read a profiler's trace"
        )
    computing_s = record.forward_s + record.backward_s
    return StepParts(
        data_wait_s=record.data_wait_s,
        computing_s=computing_s,
        communication_s=waited_s,
        serial_s=record.step_s - waited_s - record.data_wait_s - computing_s,
        waits_s=tuple(record.waits_s or ()),
    )


def _time_of(kind: str, size: int, turns: Sequence[Mapping[int, Steps]]) -> RankTimes:
    """Return the times of one number of ranks in each turn: the median step, and what the slowest rank waited."""
    step_s, waits_s = [], []
    for turn in turns:
        step_s.append(statistics.median(statistics.fmean(rank.step_s for rank in step) for step in turn[size]))
        own = statistics.median(max(rank.own_s for rank in step) for step in turn[size])
        waits_s.append(max(0.0, step_s[-1] - own))
    return RankTimes(num_ranks=size, step_s=tuple(step_s), communication_s=tuple(waits_s))


def _mean_loss(kind: str, size: int, turns: Sequence[Mapping[int, Steps]]) -> EfficiencyLoss:
    """Return the loss over the steps of all turns together; each turn has as many."""
    alone = [step[0] for turn in turns for step in turn[1]]
    return split_loss(kind, alone, [step for turn in turns for step in turn[size]])
