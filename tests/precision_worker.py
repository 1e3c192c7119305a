"""Trains a small model in every precision under every strategy, lets gradients overflow, resumes; on the ranks it gets.

Usage: precision_worker.py FOLDER. Each rank writes what it found to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from parity import AwkwardTrainer, Recording, awkward_samples, record, small_shape

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.data.samples import Batch
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.apply import fingerprint, named_plain_parameters
from vlmcourse.parallel.comm import local_part
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.presets import VLMShape
from vlmcourse.train import trainer as trainer_module
from vlmcourse.train.nan_finder import find_in_step

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "fsdp": {"strategy": "fsdp"},
    "tp": {"strategy": "single", "tp": 2},
    "pp": {"strategy": "single", "pp": 2},
    "cp": {"strategy": "ddp", "cp": 2},
}
"""On two ranks."""
SAME_SUMS = ("single", "ddp", "zero1", "fsdp")
"""These add up the same two micro-batches as one process does, in the same formats: equal to the last bits."""
NUM_STEPS = 2
WEIGHT_SEED = 100


def precision_config(strategy: str, precision: str, folder: str = "runs", **train: Any) -> TrainConfig:
    """Return a run whose step is two micro-batches of four samples, the same two wherever it runs."""
    shares = strategy in ("ddp", "zero1", "zero2", "fsdp")
    options = {"num_steps": 4, "micro_batch_size": 4, "accumulation_steps": 1 if shares else 2, "max_grad_norm": 0.5}
    return parse_config(
        {
            "run": {"output_dir": folder, "name": f"{strategy}-{precision}"},
            "train": options | {"precision": precision} | train,
            "optimizer": {"warmup_steps": 1, "eps": 1e-5, "weight_decay": 0.1},
            "parallel": STRATEGIES.get(strategy, {"strategy": strategy}),
        }
    )


def even_shape() -> VLMShape:
    """Return a shape like that of the parity tests with widths that 2 divides, and fewer layers."""
    shape = small_shape()
    vision = replace(shape.vision, num_layers=1, mlp_size=32)
    language = replace(shape.language, num_layers=2, num_heads=2, mlp_size=46)
    return replace(shape, vision=vision, language=language)


def build(config: TrainConfig, ranks: Ranks) -> AwkwardTrainer:
    """Build a trainer of the small model."""
    samples = awkward_samples()
    model = build_model(even_shape(), seed=WEIGHT_SEED)
    return AwkwardTrainer(config, ranks, model=model, train_data=samples, eval_data=samples[:1], show_progress=False)


def run(strategy: str, precision: str, ranks: Ranks) -> Recording:
    """Train some steps; what was rounded differently on two ranks shows in the weights, which each rank records."""
    trainer = build(precision_config(strategy, precision), ranks)
    return record(trainer, NUM_STEPS if strategy in SAME_SUMS else 1)


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
    """Train four steps at once, and again with a stop after two; the second step overflows."""

    def steps(trainer: AwkwardTrainer, numbers: range) -> list[float]:
        losses = []
        for step in numbers:
            with overflow_on(ranks, 0) if step == 1 and precision == "fp16" else contextlib.nullcontext():
                losses.append(trainer.train_step().loss)
        return losses

    whole = build(precision_config(strategy, precision, folder), ranks)
    whole_losses = steps(whole, range(4))
    first = build(precision_config(strategy, precision, folder), ranks)
    steps(first, range(2))
    first.save()
    second = build(precision_config(strategy, precision, folder), ranks)
    second.resume(Path(folder) / f"{strategy}-{precision}")
    rest = steps(second, range(2, 4))
    return {
        "losses": [whole_losses[2:], rest],
        "same weights": weights_hash(whole) == weights_hash(second),
        "scalers": [whole.scaler.state_dict(), second.scaler.state_dict()],
    }


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


def _every_batch(trainer: AwkwardTrainer) -> list[Batch]:
    """Return the step's samples of all ranks in one batch."""
    indices = trainer.sampler.indices(0)
    return [trainer.collator([trainer.train_data[i] for i in indices])]


def _with_picture(batch: Batch) -> list[str]:
    return [name for name, number in zip(batch.sample_ids, batch.tiles_per_sample, strict=True) if number][::-1]


def find_all(folder: str, ranks: Ranks, strategies: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return everything that the tests look at."""
    found: dict[str, Any] = {"runs": {}, "overflow": {}, "resume": {}, "faults": {}, "late faults": {}}
    for strategy, precisions in strategies.items():
        for precision in precisions:
            found["runs"][strategy, precision] = run(strategy, precision, ranks)
        found["overflow"][strategy] = overflow(strategy, ranks)
    for strategy in ("ddp", "fsdp", "pp"):
        found["faults"][strategy] = fault(strategy, ranks)
    for strategy in ("ddp", "cp"):
        found["late faults"][strategy] = fault(strategy, ranks, "fp16", 1e6)
    for strategy, precision in (("ddp", "fp16"), ("fsdp", "bf16_pure"), ("fsdp", "bf16_master")):
        found["resume"][strategy, precision] = resume(strategy, precision, folder, ranks)
    return found


EVERY = ("fp16", "bf16_master", "bf16_pure", "fp8")
RUNS = {
    "ddp": EVERY,
    "zero1": ("bf16_master", "bf16_pure"),
    "zero2": (),
    "fsdp": EVERY,
    "tp": ("fp16", "bf16_master", "bf16_pure"),
    "pp": ("fp16", "bf16_master", "bf16_pure"),
    "cp": ("fp16", "bf16_master", "bf16_pure"),
}
"""What is trained under each strategy, besides steps that overflow; zero1 and zero2 differ from ddp and fsdp in what
they store only."""


def main(folder: str) -> None:
    """Run everything and write it down."""
    ranks = init_ranks(timeout_s=60)
    found = find_all(str(Path(folder) / "runs"), ranks, RUNS)
    torch.save(found, Path(folder) / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(sys.argv[1])
