"""Bytes of one rank by owner: the training state exactly, activations and working memory by stated estimates.

Enters: parameter counts (`shapes.py`), a `Plan`, a workload. Leaves: `StateBytes` and `RankMemory`. Chapter 1 sets
these numbers against what `monitor.ledger` measures. GB is 10^9 bytes here, GiB 2^30.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from vlmcourse.planner.activations import estimate_activation_bytes
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.stage_params import Unit, count_local, list_units, unit_sizes
from vlmcourse.planner.stages import find_split
from vlmcourse.planner.state_bytes import StateBytes, estimate_state_bytes
from vlmcourse.planner.workload import Workload
from vlmcourse.presets import VLMShape

__all__ = [
    "ALLOWANCE_BYTES",
    "GB",
    "RankMemory",
    "StateBytes",
    "estimate_gathered_bytes",
    "estimate_rank_memory",
    "estimate_stage",
    "estimate_state_bytes",
    "local_params",
    "state_of",
    "whole_bytes",
]

GB = 10**9

ALLOWANCE_BYTES = 2 * 2**30
"""Kept free on every device for what this arithmetic does not count: the CUDA context, NCCL's and cuBLAS's buffers,
gradient buckets, fragmentation. The size is this course's allowance, not a measurement."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What the fullest rank needs, by owner, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Whole weights and gradients that ZeRO-3 holds while a unit is at work, those of the root unit included."""
    activations: int
    allowance: int = ALLOWANCE_BYTES
    """Kept free for what is not counted; `reserved` is another thing, what an allocator holds of a device."""
    host_weights: int = 0
    """Weights of this rank whose home is the node's main memory (or its files), not the device."""
    host_gradients: int = 0
    """Gradients that it updates with there."""
    host_optimizer: int = 0
    """Optimizer state of this rank that lives there, not on the device."""

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer state on the device."""
        return self.weights + self.gradients + self.optimizer

    @property
    def device_total(self) -> int:
        """Everything that must fit in the device's memory."""
        return self.state + self.gathered + self.activations + self.allowance

    @property
    def host_total(self) -> int:
        """All of this rank that lives off the device."""
        return self.host_weights + self.host_gradients + self.host_optimizer

    def by_owner(self) -> dict[str, int]:
        """Return the owners on the device and their bytes."""
        names = [field.name for field in dataclasses.fields(self) if not field.name.startswith("host_")]
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """Show the owners that hold something, in GB."""
        return ", ".join(f"{name} {size / GB:.1f}" for name, size in self.by_owner().items() if size) + " GB"


def estimate_rank_memory(plan: Plan, model: VLMShape, workload: Workload | None = None) -> RankMemory:
    """Estimate what the fullest rank of a plan needs.

    Args:
        plan: how the ranks share the work.
        model: the model's shape.
        workload: tokens and tiles of a sample; the default is 2048 tokens and one tile.

    Returns:
        Bytes by owner of the pipeline stage that needs most.
    """
    workload = workload or Workload()
    stages = [estimate_stage(plan, model, workload, stage) for stage in range(find_split(plan, model).num_stages)]
    return max(stages, key=lambda memory: memory.device_total)


def state_of(towers: Mapping[str, int], plan: Plan, zero_stage: int) -> StateBytes:
    """Add up the state of towers, given the parameters that a rank's group holds of each."""
    state = StateBytes(weights=0, gradients=0, optimizer=0)
    for tower, num_params in towers.items():
        state += estimate_state_bytes(
            num_params,
            precision=plan.precision,
            optimizer=plan.optimizer,
            zero_stage=zero_stage,
            shard_degree=plan.dp_shard,
            trainable=tower not in plan.frozen,
        )
    return state


def estimate_stage(plan: Plan, model: VLMShape, workload: Workload, stage: int) -> RankMemory:
    """Estimate one rank of one pipeline stage, as `estimate_rank_memory` does of the stage that needs most."""
    state = state_of(local_params(plan, model, stage), plan, plan.zero_stage)
    return RankMemory(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=0 if plan.offload_optimizer else state.optimizer,
        host_optimizer=state.optimizer if plan.offload_optimizer else 0,
        gathered=estimate_gathered_bytes(plan, model, stage),
        activations=estimate_activation_bytes(plan, model, workload, stage),
    )


def local_params(plan: Plan, model: VLMShape, stage: int) -> dict[str, int]:
    """Count the parameters of each tower that one rank's data-parallel group holds, before any ZeRO sharding.

    What stands on a stage is `find_split`'s answer. Tensor parallelism splits matrices; norms and the like are whole.

    Args:
        plan: how the ranks share the work.
        model: the model's shape.
        stage: pipeline stage, from 0.
    """
    return count_local(_units_of(plan, model, stage), plan.tp, plan.vision_tp)


def _units_of(plan: Plan, model: VLMShape, stage: int) -> tuple[Unit, ...]:
    vision_plan = "split" if plan.vision_tp > 1 else "replicate"
    return list_units(model, find_split(plan, model), stage, vision_plan)


def estimate_gathered_bytes(plan: Plan, model: VLMShape, stage: int) -> int:
    """Estimate ZeRO-3's working memory on one rank of a pipeline stage: what is whole for a while, not split.

    A unit is what is gathered and freed together: a layer; the embedding and the output matrix, where they are two;
    and all the rest (projector, patch and position embedding, norms, a tied embedding), which is the root unit. The
    root stays gathered from the forward to the backward pass and has its whole gradient at the end; beside it the
    largest other unit is at work, with its whole gradient, while one like it is prefetched. Weights travel as they are
    kept, under autocast in fp32.

    Args:
        plan: how the ranks share the work.
        model: the model's shape.
        stage: pipeline stage, from 0.

    Returns:
        Bytes; 0 where weights are not split.
    """
    return 0 if plan.zero_stage < 3 or plan.dp_shard == 1 else whole_bytes(plan, model, stage)


def whole_bytes(plan: Plan, model: VLMShape, stage: int, *, layered: bool = False) -> int:
    """Return what `estimate_gathered_bytes` describes; layered: none fetched ahead, the projector a unit.

    A unit is gathered from one flat buffer, so for a moment it is there twice, before it has a gradient.
    """
    tied = model.language.tied_embeddings
    root, units = unit_sizes(
        _units_of(plan, model, stage), plan.tp, plan.vision_tp, tied_embeddings=tied, layered=layered
    )
    weight_bytes = plan.recipe.weight_bytes

    def held(tower: str, size: int, copies: int) -> int:
        return size * (copies * weight_bytes + (0 if tower in plan.frozen else plan.recipe.gradient_bytes))

    rest = sum(held(*part, copies=1) for part in root)
    if not layered:
        return rest + max(held(*unit, copies=2) for unit in units)
    return rest + max(*(2 * weight_bytes * size for _, size in units), *(held(*unit, copies=1) for unit in units))
