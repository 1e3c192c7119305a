"""Runs of two ranks that a controller steers, and the same run left alone. Usage: controlled_worker.py FOLDER.

Each rank writes what it recorded to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import torch
from parity import awkward_samples, build_trainer, parity_config

from vlmcourse.config import TrainConfig
from vlmcourse.control.controller import ReferenceController
from vlmcourse.parallel.apply import unwrap
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.train.activations import BlockRunner
from vlmcourse.train.controlled import ControlledRun
from vlmcourse.train.trainer import Trainer

NUM_STEPS = 36
SLEEP_S = 2e-4
"""That the slow rank takes longer for each token."""
SLOW_RANK = 1


def build(config: TrainConfig, ranks: Ranks, folder: Path, name: str, strategy: str = "ddp") -> Trainer:
    train = dataclasses.replace(config.train, num_steps=NUM_STEPS)
    run = dataclasses.replace(config.run, output_dir=str(folder), name=name)
    parallel = dataclasses.replace(config.parallel, strategy=strategy)
    config = dataclasses.replace(config, train=train, run=run, parallel=parallel)
    return build_trainer(config, ranks, seed=3)


def slow_down(trainer: Trainer) -> None:
    """Let this rank's forward take longer by its tokens, as on a slower machine."""

    def wait(module: Any, arguments: tuple[Any, ...]) -> None:
        time.sleep(SLEEP_S * arguments[0].numel())

    unwrap(trainer.model).register_forward_pre_hook(wait)


def run(trainer: Trainer, steered: ControlledRun | None = None, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Train, and keep losses, norms, what each rank worked on, and what the controller did."""
    found: dict[str, Any] = {"losses": [], "norms": [], "tokens": [], "samples": [], "micro_batches": [], "covered": []}
    if steered is not None:
        trainer.after_step.append(steered)
    blocks = list(unwrap(trainer.model).get_submodule("vision.blocks").children())
    for _ in range(num_steps):
        found["covered"].append(any(isinstance(block.__dict__.get("forward"), BlockRunner) for block in blocks))
        report = trainer.train_step()
        contents = trainer.monitor.last_contents
        found["losses"].append(report.loss)
        found["norms"].append(report.grad_norm)
        found["tokens"].append(contents["text_tokens"] + contents["image_tokens"])
        found["samples"].append(contents["samples"])
        found["micro_batches"].append(contents["micro_batches"])
    if steered is not None:
        found |= {"done": steered.done, "refused": steered.refused, "settings": vars(steered.settings)}
    return found


class Asks:
    """Asks for everything that a running process cannot do, and for another global batch."""

    def observe(self, metrics: dict[str, Any]) -> Any:
        if metrics["step"] > 1:
            return []
        return [
            {"action": "compress", "on": True},
            {"action": "shard", "zero_stage": 3},
            {"action": "replace", "rank": 1},
            {"action": "move_layers", "layers_per_stage": [3, 4]},
            {"action": "micro_batch", "micro_batch_size": 1, "accumulation_steps": 1},
            {"action": "go faster"},
        ]


def main() -> None:
    folder, ranks = Path(sys.argv[1]), init_ranks()
    config = parity_config("ddp", 2, ranks.world_size, "all towers")
    found: dict[str, Any] = {"alone": run(build(config, ranks, folder, "alone"))}

    trainer = build(config, ranks, folder, "slow")
    if ranks.rank == SLOW_RANK:
        slow_down(trainer)
    steered = ControlledRun(
        trainer, ReferenceController().observe, notice_s=lambda: 0.5 if trainer.step == 30 else None
    )
    found["slow"] = run(trainer, steered)
    found["checkpoints"] = sorted(path.name for path in (folder / "slow").glob("checkpoints/*"))

    trainer = build(config, ranks, folder, "tight")
    budget = int(1.02 * trainer.monitor._process.memory_info().rss)
    steered = ControlledRun(trainer, ReferenceController().observe, memory_budget_bytes=budget)
    found["tight"] = run(trainer, steered, num_steps=10)

    trainer = build(config, ranks, folder, "asks")
    found["asks"] = run(trainer, ControlledRun(trainer, Asks().observe), num_steps=3)
    try:
        trainer = build(config, ranks, folder, "fsdp", strategy="fsdp")
        ControlledRun(trainer, Asks().observe)
    except ValueError as error:
        found["fsdp"] = str(error)
    found["measured"] = [trainer.collator.measure(sample) for sample in awkward_samples()]
    found["counted"] = [
        (sum(batch.tiles_per_sample), batch.num_tokens)
        for batch in (trainer.collator([sample]) for sample in awkward_samples())
    ]
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main()
