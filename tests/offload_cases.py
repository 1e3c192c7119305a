"""What two ranks do for the tests of offloading, after the cases of `engines_worker.py`."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from parity import AwkwardTrainer, Recording, awkward_samples, build_trainer, parity_config, record
from torch import Tensor

from vlmcourse.config import TrainConfig
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel import engine_offload, engines, nvme, op_builds
from vlmcourse.parallel.engine_places import measure_state_places
from vlmcourse.parallel.engines import gather_engine_state
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.presets import get_model
from vlmcourse.state_offload import OffloadConfig
from vlmcourse.train.trainer import Trainer

NUM_STEPS = 3
WEIGHT_SEED = 100
OPTIMIZER = OffloadConfig(optimizer="cpu")
BOTH = OffloadConfig(optimizer="cpu", parameters="cpu")
RUNS = {
    "zero1 optimizer": ("deepspeed-zero1", "all towers", OPTIMIZER),
    "zero2 optimizer": ("deepspeed-zero2", "vision frozen", OPTIMIZER),
    "zero3 optimizer": ("deepspeed-zero3", "tied embeddings", OPTIMIZER),
    "zero3 both": ("deepspeed-zero3", "vision frozen", BOTH),
    "fsdp both": ("fsdp", "vision frozen", BOTH),
    "zero2 DeepSpeed's Adam": ("deepspeed-zero2", "all towers", OffloadConfig(optimizer="cpu", adam="deepspeed")),
}
"""Name -> strategy, case of the parity tests, what is offloaded."""


def offload_config(name: str, num_ranks: int) -> TrainConfig:
    strategy, case, offload = RUNS[name]
    return dataclasses.replace(parity_config(strategy, 2, num_ranks, case), offload=offload)


def build(config: TrainConfig, ranks: Ranks, seed: int = WEIGHT_SEED) -> AwkwardTrainer:
    return build_trainer(config, ranks, seed)


class StubOp:
    """Stands for DeepSpeed's compiled `cpu_adam`: the same arithmetic by PyTorch, and a count of its calls."""

    def __init__(self) -> None:
        self.num_updates = 0

    def create_adam(self, *settings: object) -> None:
        pass

    def destroy_adam(self, number: int) -> None:
        pass

    def adam_update(
        self,
        number: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        is_corrected: bool,
        *tensors: Tensor,
    ) -> None:
        weights, gradients, first, second = tensors
        self.num_updates += 1
        first.lerp_(gradients, 1 - beta1)
        second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        weights.mul_(1 - lr * decay)
        denominator = (second / (1 - beta2**step)).sqrt_().add_(eps)
        weights.addcdiv_(first, denominator, value=-lr / (1 - beta1**step))


@contextmanager
def stub_builds() -> Iterator[StubOp]:
    """Let DeepSpeed load a `StubOp` where it would compile."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    op = StubOp()
    before = CPUAdamBuilder._loaded_ops
    CPUAdamBuilder._loaded_ops["cpu_adam"] = op
    built, op_builds.is_built = op_builds.is_built, lambda name: True
    try:
        yield op
    finally:
        before.pop("cpu_adam")
        op_builds.is_built = built


def run(name: str, ranks: Ranks) -> tuple[Recording, dict[str, Any]]:
    config = offload_config(name, ranks.world_size)
    with stub_builds() as op:
        trainer = build(config, ranks, WEIGHT_SEED + ranks.rank)
        recording = record(trainer, NUM_STEPS)
    if config.parallel.strategy != "fsdp":
        for norm, gradients in zip(recording.grad_norms, recording.gradients, strict=True):
            for gradient in gradients.values():
                gradient *= min(1.0, config.train.max_grad_norm / (norm + 1e-6))
        places = dataclasses.asdict(measure_state_places(trainer.model))
    else:
        places = {}
    return recording, places | {"num_updates": op.num_updates}


def main(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return {"runs": {name: run(name, ranks) for name in RUNS}}
