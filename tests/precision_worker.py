"""Trains a small model in every precision under every strategy, lets gradients overflow, answers questions, resumes,
moves layers; on the ranks it gets.

Usage: precision_worker.py FOLDER. In it are the weights `learned.pt` of `precision_cases.learn`; each rank writes what
it found to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parity import AwkwardTrainer, load
from precision_cases import (
    ANSWERS,
    BAD_GRADIENTS,
    EVERY,
    POLICIES,
    RESUMED,
    RUNS,
    STRATEGIES,
    answer,
    build,
    precision_config,
    run,
    run_with_policy,
    spoil_gradients,
)

from vlmcourse.data.samples import Batch
from vlmcourse.parallel.apply import named_plain_parameters
from vlmcourse.parallel.comm import local_part
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.parallel.verify import fingerprint
from vlmcourse.planner.stages import StageSplit
from vlmcourse.train import trainer as trainer_module
from vlmcourse.train.nan_finder import find_in_step

MOVES = ((4, 2), (1, 5), (3, 3))
"""Layers of the two stages, after each step: each of the blocks changes ranks."""


@contextlib.contextmanager
def overflow_on(ranks: Ranks, rank: int) -> Iterator[None]:
    """After the exchange of gradients, one element of one rank's own last gradient is infinite."""
    real = trainer_module.accumulate_gradients

    def accumulate(model: Any, *args: Any, **kwargs: Any) -> Any:
        done = real(model, *args, **kwargs)
        if ranks.rank == rank:
            gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
            next(g for g in reversed(gradients) if g.numel()).view(-1)[-1] = math.inf
        return done

    with mock.patch.object(trainer_module, "accumulate_gradients", accumulate):
        yield


def weights_hash(trainer: AwkwardTrainer) -> list[int]:
    """Return a hash of every tensor that this rank stores."""
    return [fingerprint(local_part(p)) for _, p in named_plain_parameters(trainer.model)]


def overflow(strategy: str, ranks: Ranks) -> dict[str, Any]:
    """Make a step that overflows on the last rank only, and one that does not."""
    trainer = build(precision_config(strategy, "fp16"), ranks)
    before = weights_hash(trainer)
    with overflow_on(ranks, ranks.world_size - 1):
        bad = trainer.train_step()
    between = weights_hash(trainer)
    good = trainer.train_step()
    return {
        "skipped": [bad.skipped, good.skipped],
        "scales": [bad.loss_scale, good.loss_scale, trainer.scaler.scale],
        "kept": before == between,
        "moved": between != weights_hash(trainer),
        "state": trainer.scaler.state_dict(),
        "finite": all(bool(torch.isfinite(p).all()) for p in map(local_part, trainer.model.parameters())),
    }


def resume(strategy: str, precision: str, folder: str, ranks: Ranks) -> dict[str, Any]:
    """Train three steps and save after two of them; make the third in another run too. The second step overflows."""
    # The steps of tp cost by the micro-batch.
    whole_batch: dict[str, Any] = {"micro_batch_size": 8, "accumulation_steps": 1} if strategy == "tp" else {}
    config = precision_config(strategy, precision, folder, **whole_batch)

    def step(trainer: AwkwardTrainer, number: int) -> float:
        with overflow_on(ranks, 0) if number == 1 and precision == "fp16" else contextlib.nullcontext():
            return trainer.train_step().loss

    whole, other = build(config, ranks), build(config, ranks)
    for number in range(2):
        step(whole, number)
    if whole.scheduler is not None:
        whole.scheduler.move(split_into(MOVES[0]))
    whole.save()
    other.resume(Path(folder) / f"{strategy}-{precision}")
    return {
        "losses": [step(trainer, 2) for trainer in (whole, other)],
        "same weights": weights_hash(whole) == weights_hash(other),
        "scalers": [whole.scaler.state_dict(), other.scaler.state_dict()],
    }


def split_into(layers: tuple[int, ...]) -> StageSplit:
    """Return a split of the small model: patches, one vision block, projector, two language blocks, output."""
    return StageSplit(num_vision_layers=1, num_language_layers=2, layers_per_stage=layers)


def move(precision: str, ranks: Ranks) -> list[dict[str, int]]:
    """Train a pipeline whose layers stay, and one whose layers move after each step.

    Returns:
        Of both, a hash of each weight and each tensor of optimizer state of the whole model, by name.
    """
    found = []
    for strategy in ("pp", "adaptive"):
        # Without clipping: where the layers are decides the order in which squares are added up.
        trainer = build(precision_config(strategy, precision, max_grad_norm=0.0), ranks)
        for layers in MOVES:
            trainer.train_step()
            if trainer.scheduler is not None:
                trainer.scheduler.move(split_into(layers))
                assert trainer.scheduler.pipeline.split.layers_per_stage == layers
        mine = {}
        for name, parameter in named_plain_parameters(trainer.model):
            mine[name] = fingerprint(parameter)
            mine |= {f"{key} of {name}": fingerprint(x) for key, x in trainer.optimizer.state[parameter].items()}
        everyone: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(everyone, mine)
        found.append({name: value for of_rank in everyone for name, value in of_rank.items()})
    return found


def fault(strategy: str, ranks: Ranks, precision: str = "fp32", pixel: float = math.nan) -> tuple[list[str], str]:
    """Look into a step of which one picture has a pixel that does not go; returns what was said, and the picture.

    Args:
        strategy: one of `STRATEGIES`.
        ranks: this process's place.
        precision: of the run.
        pixel: NaN is seen in the input; 1e6 is a number there, and infinite after the first cast to fp16.
    """
    trainer = build(precision_config(strategy, precision), ranks)
    guilty = next(sample_id for batch in _every_batch(trainer) for sample_id in _with_picture(batch))
    real = trainer.load_step

    def load_step(step: int) -> list[Batch]:
        batches = real(step)
        for batch in batches:
            tile = 0
            for sample_id, number in zip(batch.sample_ids, batch.tiles_per_sample, strict=True):
                if sample_id == guilty:
                    batch.pixel_values_ICHW[tile, 0, 2, 3] = pixel
                tile += number
        return batches

    trainer.load_step = load_step  # type: ignore[method-assign]
    return find_in_step(trainer), guilty


def bad_gradient(strategy: str, ranks: Ranks) -> dict[str, Any]:
    """Make a step with a finite loss and a gradient of NaN; say what stopped it, what it left, and what is found."""
    trainer = build(precision_config(strategy, "fp32", max_grad_norm=0.5 * (strategy != "pp")), ranks)
    before, said = weights_hash(trainer), ""
    with spoil_gradients():
        try:
            trainer.train_step()
        except RuntimeError as error:
            said = str(error)
        found = find_in_step(trainer)
    return {"said": said, "kept": before == weights_hash(trainer), "step": trainer.step, "found": found}


def _every_batch(trainer: AwkwardTrainer) -> list[Batch]:
    """Return the step's samples of all ranks in one batch."""
    indices = trainer.sampler.indices(0)
    return [trainer.collator([trainer.train_data[i] for i in indices])]


def _with_picture(batch: Batch) -> list[str]:
    return [name for name, number in zip(batch.sample_ids, batch.tiles_per_sample, strict=True) if number][::-1]


def find_all(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Return everything that the tests look at."""
    found: dict[str, Any] = {"overflow": {}, "faults": {}, "late faults": {}}
    weights, runs = load(folder / "learned.pt"), str(folder / "runs")
    found["runs"] = {(s, precision): run(s, precision, ranks) for s, every in RUNS.items() for precision in every}
    for strategy in STRATEGIES:
        found["overflow"][strategy] = overflow(strategy, ranks)
    for strategy in ("ddp", "fsdp", "pp"):
        found["faults"][strategy] = fault(strategy, ranks)
    for strategy in ("ddp", "cp"):
        found["late faults"][strategy] = fault(strategy, ranks, "fp16", 1e6)
    found["gradients"] = {strategy: bad_gradient(strategy, ranks) for strategy in BAD_GRADIENTS}
    found["resume"] = {case: resume(*case, runs, ranks) for case in RESUMED}
    found["answers"] = {(s, p): answer(s, p, weights, ranks) for s, every in ANSWERS.items() for p in every}
    found["policies"] = {(p, policy): run_with_policy("fsdp", p, policy, ranks) for p in EVERY for policy in POLICIES}
    found["moved"] = {precision: move(precision, ranks) for precision in ("bf16_master", "bf16_pure")}
    return found


def main(folder: Path) -> None:
    """Run everything and write it down."""
    ranks = init_ranks(timeout_s=60)
    torch.save(find_all(folder, ranks), folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
