"""Strong and weak scaling of the tiny model on the ranks at hand: real runs on 1, 2, 4 of them, in turns.

Enters: ranks that have met. Leaves: a `monitor.scaling.ScalingReport` of each kind. Every run is a `Trainer`'s, with a
step log as any training has; the runs of one turn follow each other, so that a busy machine slows them all. Chapter 6.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vlmcourse.config import TrainConfig
from vlmcourse.labs.engine_table import name_machine
from vlmcourse.labs.zero_stages import open_trainer, tiny_config
from vlmcourse.machine import num_usable_cores
from vlmcourse.monitor.scaling import NUM_WARMUP, ScalingReport, analyse_scaling
from vlmcourse.parallel.fewer_ranks import Regrouping
from vlmcourse.parallel.ranks import Ranks, init_ranks
from vlmcourse.planner.scaling import KINDS

SAMPLES_A_RANK = 2
"""That the most ranks get in a micro-batch; in strong scaling fewer ranks share as many samples as those."""
Runs = Mapping[int, tuple[str, int]]
"""By number of ranks: the name of a run, and its samples a rank."""


def measure_scaling(
    kinds: Sequence[str] = KINDS,
    num_turns: int = 3,
    num_steps: int = 8,
    sizes: Sequence[int] = (),
    ranks: Ranks | None = None,
    config: TrainConfig | None = None,
) -> dict[str, ScalingReport]:
    """Train the tiny model on several numbers of ranks, in turns, and say how it scales; all ranks must call this.

    Each turn builds a model anew for each number of ranks, makes `NUM_WARMUP` steps that do not count, and
    `num_steps` that do; rank 0 prints a line a turn. Models that these ranks wrapped before lose their group: build
    them again afterwards.

    Args:
        kinds: "strong", "weak" or both; runs that both need are made once.
        num_turns: 2 or more; 3 turns give an interval, 5 a good one.
        num_steps: timed steps of each run, 1 or more.
        sizes: numbers of ranks, 1 and more; by default 1, 2, 4, ... up to all.
        ranks: this process's place, one of 2 or more on one machine; by default what `init_ranks` finds.
        config: the run under a strategy for several ranks whose log tells waits; micro_batch_size is what a rank gets
            among the most. By default the tiny model under ddp, in fp32.

    Returns:
        A report of each kind, the same on every rank.

    Raises:
        ValueError: if a number is out of range.
        RuntimeError: on a rank that had to wait for others that failed.
    Communicates: what the runs do; the process group is left and joined again for each run.
    """
    ranks = ranks or init_ranks(timeout_s=120)
    sizes = tuple(sizes) or tuple(1 << power for power in range(ranks.world_size.bit_length()))
    base = config or _default_config()
    plans = {kind: _plan_runs(kind, sizes, base.train.micro_batch_size) for kind in kinds}
    _check(plans, num_turns, num_steps, ranks)
    runs = {name: (size, samples) for plan in plans.values() for size, (name, samples) in plan.items()}
    shared: list[Any] = [tempfile.mkdtemp() if ranks.is_main else None]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    try:
        with Regrouping(ranks) as regrouping:
            for turn in range(num_turns):
                for name, (size, samples) in runs.items():
                    with regrouping.only(size) as few:
                        if few is not None:
                            _run(base, few, samples, folder / str(turn) / name, num_steps)
                if ranks.is_main:  # a turn takes long on few cores: silence would look like a hang
                    print(f"turn {turn + 1} of {num_turns}: {len(runs)} runs have ended", flush=True)
        found: list[Any] = [_analyse(plans, folder, num_turns, ranks) if ranks.is_main else None]
        dist.broadcast_object_list(found)
    finally:
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    return found[0]


def _default_config() -> TrainConfig:
    config = tiny_config("ddp")
    return replace(config, train=replace(config.train, micro_batch_size=SAMPLES_A_RANK))


def _plan_runs(kind: str, sizes: Sequence[int], samples_a_rank: int) -> dict[int, tuple[str, int]]:
    """Return the runs of one kind; a run of as many ranks with as many samples has the same name in both kinds."""
    most = max(sizes)
    samples = {size: samples_a_rank * (most // size if kind == "strong" else 1) for size in sizes}
    return {size: (f"{size}-ranks-{count}-samples", count) for size, count in samples.items()}


def _check(plans: Mapping[str, Runs], num_turns: int, num_steps: int, ranks: Ranks) -> None:
    unknown = [kind for kind in plans if kind not in KINDS]
    sizes = sorted(next(iter(plans.values()))) if plans else []
    if unknown or not plans or num_turns < 2 or num_steps < 1:
        raise ValueError(
            f"kinds = {tuple(plans)}, num_turns = {num_turns}, num_steps = {num_steps}: need some of {KINDS}, 2 turns "
            "or more, and 1 step or more"
        )
    if len(sizes) < 2 or sizes[0] != 1 or sizes[-1] > ranks.world_size or any(sizes[-1] % size for size in sizes):
        raise ValueError(
            f"sizes = {sizes} on {ranks.world_size} ranks: need 1 and larger ones that divide the largest, up to the "
            "ranks that were started; start 2 or more ('%%torchrun -n 4' in a notebook)"
        )


def _run(base: TrainConfig, ranks: Ranks, samples: int, run_folder: Path, num_steps: int) -> None:
    """Make one run with a step log."""
    parallel = base.parallel if ranks.world_size > 1 else replace(base.parallel, strategy="single")
    train = replace(base.train, micro_batch_size=samples)
    with open_trainer(replace(base, parallel=parallel, train=train), ranks) as trainer:
        trainer.monitor.open(run_folder, 0)
        try:
            for _ in range(NUM_WARMUP + num_steps):
                trainer.train_step()
        finally:
            trainer.monitor.close()


def _analyse(plans: Mapping[str, Runs], folder: Path, num_turns: int, ranks: Ranks) -> dict[str, ScalingReport]:
    cores = num_usable_cores() if ranks.device.type == "cpu" else None
    return {
        kind: analyse_scaling(
            kind,
            [{size: folder / str(turn) / name for size, (name, _) in plan.items()} for turn in range(num_turns)],
            machine=name_machine(ranks),
            num_cores=cores,
        )
        for kind, plan in plans.items()
    }
