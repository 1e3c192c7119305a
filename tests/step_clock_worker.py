"""What two ranks do for `test_monitor_steps.py`: runs in which rank 1 sleeps. Usage: step_clock_worker.py FOLDER."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from parity import awkward_samples, small_shape
from torch import nn

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.apply import plain_parts
from vlmcourse.parallel.holdings import BLOCK
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.train.trainer import Trainer

SLEEP_S = 0.6
SLOW_RANK = 1
REFERENCE = {"tp": "alone", "cp": "alone", "pp": "alone"}
"""Case -> the run of one process with the same samples a step; of the others it is "alone, twice as many"."""
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "tp": {"tp": 2},
    "cp": {"strategy": "fsdp", "cp": 2},
    "pp": {"pp": 2},
    "deepspeed-zero0": {"strategy": "deepspeed-zero0"},
    "deepspeed-zero1": {"strategy": "deepspeed-zero1"},
}


def config_of(folder: Path, name: str, **train: Any) -> TrainConfig:
    table = {
        "run": {"output_dir": str(folder), "name": name},
        "train": {"num_steps": 3, "micro_batch_size": 4, "accumulation_steps": 2, "log_every": 2} | train,
        "parallel": CASES.get(name, {}),
    }
    return parse_config(table)


def build(config: TrainConfig, ranks: Ranks) -> Trainer:
    shape = small_shape()
    vision = dataclasses.replace(shape.vision, num_heads=2, hidden_size=24, mlp_size=32)
    language = dataclasses.replace(shape.language, mlp_size=44)
    model = build_model(dataclasses.replace(shape, vision=vision, language=language), seed=0)
    samples = [sample for sample in awkward_samples() if not sample.sample_id.startswith("mute")]
    return Trainer(config, ranks, model=model, train_data=samples, eval_data=samples[:2], show_progress=False)


def let_sleep(model: nn.Module, trainer: Trainer) -> None:
    """Let the last block of this rank sleep in the first forward of each step after the first."""
    blocks = [m for part in plain_parts(model) for name, m in part.named_modules() if BLOCK.fullmatch(name)]
    slept: set[int] = set()

    def sleep(*_: Any) -> None:
        if trainer.model.training and trainer.step not in slept:
            time.sleep(SLEEP_S if trainer.step else 0)
            slept.add(trainer.step)

    blocks[-1].register_forward_pre_hook(sleep)


def run_case(folder: Path, name: str, ranks: Ranks) -> dict[str, Any]:
    config = config_of(folder, name)
    trainer = build(dataclasses.replace(config, logging=dataclasses.replace(config.logging, memory_owners=True)), ranks)
    if ranks.rank == SLOW_RANK:
        let_sleep(trainer.model, trainer)
        if name == "ddp":
            trainer.after_step.append(lambda trainer, _: time.sleep(SLEEP_S if trainer.step == 2 else 0))
    result = trainer.fit()
    return {"history": result.history}


def main() -> None:
    folder = Path(sys.argv[1])
    ranks = init_ranks(timeout_s=120)
    found = {name: run_case(folder, name, ranks) for name in CASES}
    (folder / f"found{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    shutdown_ranks()


if __name__ == "__main__":
    main()
