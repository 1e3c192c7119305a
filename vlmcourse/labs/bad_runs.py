"""Chapter 6's bad runs: made on the ranks at hand, mended as their diagnosis advises, and looked at step by step.

Enters: names of planted faults, or folders of runs. Leaves: gains of fixes, predicted and measured in turns; spans of a
step for a timeline; and shares of waiting, by whom they are due to. The faults and the fixes themselves are `faults`',
what is concluded is `monitor.diagnosis`'.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch.distributed as dist

from vlmcourse.faults.catalog import FAULTS
from vlmcourse.faults.cures import CURES, apply_cure, find_fix
from vlmcourse.faults.planted import run_fault, run_name
from vlmcourse.labs.zero_stages import show_running
from vlmcourse.monitor.diagnosis import Fix, RunFacts, diagnose, read_run
from vlmcourse.parallel.comm import wait_for_all
from vlmcourse.parallel.ranks import Ranks, init_ranks
from vlmcourse.spans import COMPUTE, DATA, DATA_WAIT, PHASES, Span
from vlmcourse.values import suggest_choice


@dataclass(frozen=True, kw_only=True)
class FixGain:
    """One fix, as it was advised and as it turned out."""

    fault: str
    fix: str
    """The first that the diagnosis of the first turn named and that can be applied here."""
    predicted: float
    """Part of the time of a token that it was said to save, 0 to 1; the mean of the turns."""
    uncertainty: float
    """How far off that may be, as the diagnosis says; the mean of the turns."""
    measured: tuple[float, ...]
    """That it saved, in each turn; below 0 if it cost time."""


def measure_gains(
    names: Sequence[str], num_turns: int = 2, num_steps: int = 10, ranks: Ranks | None = None
) -> list[FixGain]:
    """Make each faulty run and the same run with its fix, in turns, and compare what was said with what came of it.

    Args:
        names: of faults that have a cure in `faults.cures`.
        num_turns: how often each pair of runs is made.
        num_steps: of each run; 8 or more, since a diagnosis needs as many.
        ranks: this process's place, one of 2; by default what `init_ranks` finds.

    Returns:
        The same on every rank.

    Raises:
        ValueError: if there is no cure for a name, or a diagnosis found no finding of the fault's cause.
    Communicates: as training does.
    """
    for name in names:
        if name not in CURES:
            raise ValueError(f"fault {name!r}: {suggest_choice(name, tuple(CURES))}")
    ranks = ranks or init_ranks(timeout_s=120)
    shared: list[Any] = [tempfile.mkdtemp() if ranks.is_main else None]
    dist.broadcast_object_list(shared)
    folder, said, saved = Path(shared[0]), dict[str, list[Fix]](), dict[str, list[float]]()
    try:
        with show_running(ranks) as show:
            for turn in range(num_turns):
                for name in names:
                    show(f"turn {turn + 1} of {num_turns}: {name}, and its fix")
                    fix, measured = _run_pair(name, folder / str(turn), num_steps, ranks)
                    said.setdefault(name, []).append(fix)
                    saved.setdefault(name, []).append(measured)
        wait_for_all(ranks)
    finally:
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    return [
        FixGain(
            fault=name,
            fix=said[name][0].what,
            predicted=mean(fix.saved_share for fix in said[name]),
            uncertainty=mean(fix.uncertainty_share for fix in said[name]),
            measured=tuple(saved[name]),
        )
        for name in names
    ]


def _run_pair(name: str, folder: Path, num_steps: int, ranks: Ranks) -> tuple[Fix, float]:
    """Run a fault and its first cure; return the fix, and the part of a token's time that it saved."""
    cure = CURES[name][0]
    run_fault(FAULTS[name], run_name(name), folder, ranks, num_steps=num_steps)
    wait_for_all(ranks)  # all ranks have written their last step
    faulty = diagnose(folder / run_name(name))
    fix = find_fix(cure, (*faulty.findings, *faulty.below), FAULTS[name].cause)
    mended = f"{run_name(name)}-mended"
    run_fault(apply_cure(name, cure, fix), mended, folder, ranks, num_steps=num_steps)
    wait_for_all(ranks)
    now = diagnose(folder / mended)
    return fix, 1 - faulty.tokens_per_s / now.tokens_per_s


# --- One step, looked at --------------------------------------------------------------------------------------------


def find_spans(run_folder: str | Path, step: int) -> list[Span]:
    """Return what every rank did in a step of a run with one micro-batch a step, from its step log.

    The log holds how long each phase took, not when it began: phases stand in the order in which a step goes through
    them, each in one piece, and what is in none of them last.

    Args:
        run_folder: `output_dir/name`.
        step: not one of the first two, which are warm-up.

    Raises:
        ValueError: if the run has no such step after its warm-up, or steps of several micro-batches.
    """
    facts = read_run(run_folder)
    if step not in facts.steps:
        raise ValueError(f"step {step}: the run has steps {min(facts.steps)} to {max(facts.steps)} after its warm-up")
    records = facts.steps[step]
    if any((record.micro_batches or 1) > 1 for record in records.values()):
        raise ValueError(f"{run_folder}: phases of several micro-batches alternate, and the log does not say how")
    began_s = min(record.start_s for record in records.values())
    spans = []
    for rank, record in records.items():
        start_s = record.start_s - began_s
        for phase in (*PHASES, "other"):
            seconds = getattr(record, f"{phase}_s") or 0.0
            name = {DATA_WAIT: DATA, "other": COMPUTE}.get(phase, phase)
            spans.append(Span(rank, "", name, start_s, start_s + seconds))
            start_s += seconds
    return spans


def find_waits(facts: RunFacts) -> dict[str, float]:
    """Return the share of the time that ranks wait because one is late, and because data are on their way.

    In each step the rank that waits least is late for nobody, so what it waits is the way of the data; the others wait
    that long too, and for the latest rank beyond it.

    Args:
        facts: of a run whose log tells waits from work.

    Returns:
        "data on their way" and "late ranks": shares of the time of all ranks, 0 to 1.
    """
    waits_s = [[record.communication_s or 0.0 for record in ranks.values()] for ranks in facts.steps.values()]
    way_s = sum(min(of_ranks) for of_ranks in waits_s)
    all_s = sum(mean(of_ranks) for of_ranks in waits_s)
    return {"data on their way": way_s / facts.wall_s, "late ranks": (all_s - way_s) / facts.wall_s}
