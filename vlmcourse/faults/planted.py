"""Make a short run with a fault in it, so that its files can be looked at.

Enters: the name of a fault and a folder. Leaves: a run's folder like any other, with its step log. Chapter 6.
"""

from __future__ import annotations

from pathlib import Path

from vlmcourse.config import parse_config
from vlmcourse.faults.catalog import BASE, FAULTS, Fault
from vlmcourse.faults.lookalikes import LOOKALIKES
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.train.report import TrainResult
from vlmcourse.train.trainer import Trainer
from vlmcourse.values import suggest_choice


def run_name(name: str) -> str:
    """Return the name of a fault's run, which is that of its folder."""
    return name.replace(",", "").replace(" ", "-")


def run_planted(name: str, output_dir: str | Path, ranks: Ranks, *, num_steps: int | None = None) -> TrainResult:
    """Train the tiny model for a few steps with a fault; all ranks must call this.

    Args:
        name: of `FAULTS` or `LOOKALIKES`; `run_name` gives the run's.
        output_dir: parent folder of the run.
        ranks: this process's place. The faults are of two ranks; with others they weigh more or less.
        num_steps: instead of `BASE`'s.

    Returns:
        How the run ended.

    Raises:
        ValueError: if there is no such fault.
    Communicates: as training does.
    """
    known = {**FAULTS, **LOOKALIKES}
    if name not in known:
        raise ValueError(f"fault {name!r}: {suggest_choice(name, tuple(known))}")
    return run_fault(known[name], run_name(name), output_dir, ranks, num_steps=num_steps)


def run_fault(
    fault: Fault, folder_name: str, output_dir: str | Path, ranks: Ranks, *, num_steps: int | None = None
) -> TrainResult:
    """Do the same for a fault that is in no catalogue, such as one of `cures.apply_cure`, in a folder of that name.

    Communicates: as training does.
    """
    table = {"run": {"name": folder_name, "output_dir": str(output_dir)}}
    steps = {} if num_steps is None else {"train.num_steps": num_steps}
    settings = {**BASE, **fault.overrides, **steps}

    def build(**overrides: int) -> Trainer:
        changed = {f"train.{name}": value for name, value in overrides.items()}
        return Trainer(parse_config(table, {**settings, **changed}), ranks, show_progress=False)

    if fault.resumes:
        first = build(num_steps=settings["train.num_steps"] // 2)
        with fault.plant(first):
            first.fit()
    trainer = build()
    if fault.resumes:
        trainer.resume()
    with fault.plant(trainer):
        return trainer.fit()
