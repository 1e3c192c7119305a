"""What two ranks do for `test_parallel_engines.py`. Usage: engines_worker.py FOLDER.

Each rank trains the small model of the parity tests under every engine and writes its recordings to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from parity import AwkwardTrainer, Recording, build_trainer, parity_config, record

from vlmcourse.config import TrainConfig
from vlmcourse.layout import DEEPSPEED, ENGINES
from vlmcourse.parallel import engines
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.train.nan_finder import find_in_step

RUNS = {
    **{f"{strategy}, all towers": (strategy, "all towers", 2) for strategy in ENGINES},
    "deepspeed-zero2, vision frozen": ("deepspeed-zero2", "vision frozen", 1),
    "deepspeed-zero3, vision frozen": ("deepspeed-zero3", "vision frozen", 2),
    "deepspeed-zero1, clipping off": ("deepspeed-zero1", "clipping off", 1),
    "deepspeed-zero3, tied embeddings": ("deepspeed-zero3", "tied embeddings", 1),
}
"""Name -> strategy, case of the parity tests, accumulation steps."""
NUM_STEPS = 3
SAVED_STEP = 2
WEIGHT_SEED = 100
"""Of rank 0; other ranks begin with other weights, which must not matter."""


def build(config: TrainConfig, ranks: Ranks, seed: int) -> AwkwardTrainer:
    return build_trainer(config, ranks, seed)


def run(name: str, ranks: Ranks, strategy: str | None = None) -> Recording:
    of, case, steps = RUNS[name]
    alone = strategy == "single"
    config = parity_config(strategy or of, 1 if alone else steps, ranks.world_size, case)
    recording = record(build(config, ranks, WEIGHT_SEED + ranks.rank), NUM_STEPS)
    if config.parallel.strategy in DEEPSPEED and config.train.max_grad_norm:
        # An engine clips in its step, after the moment at which gradients are recorded.
        for norm, gradients in zip(recording.grad_norms, recording.gradients, strict=True):
            for gradient in gradients.values():
                gradient *= min(1.0, config.train.max_grad_norm / (norm + 1e-6))
    return recording


def resume(strategy: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Save after some steps, go on, and go on again in a new trainer with other weights."""
    config = parity_config(strategy, 2, ranks.world_size, "all towers")
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, output_dir=str(folder), name=strategy))
    first = build(config, ranks, WEIGHT_SEED)
    for _ in range(SAVED_STEP):
        first.train_step()
    first.save()
    expected = [first.train_step().loss for _ in range(2)]
    second = build(config, ranks, WEIGHT_SEED + 7)
    step = second.resume()
    found: dict[str, Any] = {"step": step, "expected": expected}
    found["losses"] = [second.train_step().loss for _ in range(2)]
    found["exact"] = second.evaluate().fraction
    return found


def find_a_nan(ranks: Ranks) -> list[str]:
    """Spoil the pictures of the second rank and look for them in an engine whose weights are shards."""
    trainer = build(parity_config("deepspeed-zero3", 2, ranks.world_size, "all towers"), ranks, WEIGHT_SEED)
    batches = trainer.load_step(0)
    for batch in batches if ranks.rank == 1 else []:
        if batch.pixel_values_ICHW is not None:
            batch.pixel_values_ICHW.fill_(float("nan"))
    trainer.load_step = lambda step: batches  # type: ignore[method-assign]
    return find_in_step(trainer)


def share_nothing(ranks: Ranks) -> str:
    """Start ZeRO-3 with DeepSpeed's own threshold, under which a small model stays whole; return what is said."""
    config = parity_config("deepspeed-zero3", 2, ranks.world_size, "all towers")
    ours = engines.build_deepspeed_settings

    def theirs(config: TrainConfig) -> dict[str, Any]:
        return ours(config) | {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100_000}}

    engines.build_deepspeed_settings = theirs
    try:
        build(config, ranks, WEIGHT_SEED)
    except RuntimeError as error:
        return str(error)
    finally:
        engines.build_deepspeed_settings = ours
    return ""


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    found: dict[str, Any] = {name: run(name, ranks) for name in RUNS}
    found["resume"] = {strategy: resume(strategy, ranks, folder) for strategy in (*DEEPSPEED, "accelerate-ddp")}
    found["nan"] = find_a_nan(ranks)
    found["whole"] = share_nothing(ranks)
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
