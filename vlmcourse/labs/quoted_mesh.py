"""The mesh that is quoted for InternVL2-26B, trained for real with a tiny model: its losses and its bytes.

Enters: ranks. Leaves: losses to compare with one process's, and the planner's bytes beside the ledger's. Imports no
figures, so that eight ranks start quickly. Chapter 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.labs.memory_check import Comparison, compare
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.train.trainer import Trainer

MESH_SETTINGS: Mapping[str, Any] = {
    "parallel.strategy": "zero2",
    "parallel.tp": 2,
    "parallel.vision_tp": 1,
    "parallel.gradient_sync": "every",
    "activations.vision": "full",
    "activations.language": "full",
}
"""What is quoted for InternVL2-26B, as a configuration of this package says it, without the batch."""


@dataclass(frozen=True)
class MeshRun:
    """A small model trained on a mesh."""

    losses: tuple[float, ...]
    degrees: dict[str, int]
    """Of the axes that are longer than 1."""
    comparison: Comparison
    """The planner's bytes of this rank beside the ledger's."""


def mesh_config(accumulation_steps: int, settings: Mapping[str, Any] = MESH_SETTINGS) -> TrainConfig:
    """Return a run of the tiny model in fp32 on the digits, one sample a micro-batch; no settings are one process's."""
    train = {"precision": "fp32", "num_steps": 20, "micro_batch_size": 1, "accumulation_steps": accumulation_steps}
    return parse_config({"train": train, "data": {"num_train_samples": 128, "num_eval_samples": 8}}, dict(settings))


def train_on_mesh(ranks: Ranks, *, accumulation_steps: int = 4, num_steps: int = 2) -> MeshRun:
    """Train the tiny model on the quoted mesh, then compare one step's bytes with the planner's; all ranks together.

    Args:
        ranks: this process's place, of an even number.
        accumulation_steps: micro-batches of a step.
        num_steps: optimizer steps whose losses are wanted.

    Raises:
        ValueError: if the ranks cannot be split into groups of two.
    Communicates: what training does.
    """
    trainer = Trainer(mesh_config(accumulation_steps), ranks, show_progress=False)
    losses = tuple(trainer.train_step().loss for _ in range(num_steps))
    layout = trainer.place.layout
    degrees = {"tp": layout.tp, "dp": layout.dp_replicate * layout.dp_shard}
    found = compare("quoted", {**MESH_SETTINGS, "train.accumulation_steps": 2}, ranks)
    return MeshRun(losses, degrees, found)


def train_alone(ranks: Ranks, num_micro_batches: int, *, num_steps: int = 2) -> tuple[float, ...]:
    """Return the losses of the same steps in one process that takes all micro-batches one after the other."""
    trainer = Trainer(mesh_config(num_micro_batches, {}), ranks, show_progress=False)
    return tuple(trainer.train_step().loss for _ in range(num_steps))
