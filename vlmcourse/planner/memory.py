"""Bytes of one rank by owner: the training state exactly, activations and working memory by stated estimates.

Enters: parameter counts (`shapes.py`), a `Plan`, a workload. Leaves: `StateBytes` and `RankMemory`. Chapter 1 sets
these numbers against what `monitor.ledger` measures. GB is 10^9 bytes here, GiB 2^30.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from vlmcourse.planner import shapes
from vlmcourse.planner.activations import Workload, estimate_activation_bytes
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.recipes import OPTIMIZERS, PRECISIONS, Precision
from vlmcourse.planner.stages import find_split
from vlmcourse.presets import VLMShape

GB = 10**9

ALLOWANCE_BYTES = 2 * 2**30
"""Kept free on every device for what this arithmetic does not count: the CUDA context, NCCL's and cuBLAS's buffers,
gradient buckets, fragmentation. The size is this course's allowance, not a measurement."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Training state that a rank keeps between steps, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    """Moments and, in mixed precision, the fp32 master copy of the weights."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
        )


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


def estimate_state_bytes(
    num_params: int,
    *,
    precision: str = "bf16_mixed",
    optimizer: str = "adamw",
    zero_stage: int = 0,
    shard_degree: int = 1,
    trainable: bool = True,
) -> StateBytes:
    """Count the training state of one rank.

    Args:
        num_params: parameters of the model, or of the part of it that this rank's group holds.
        precision: a name in `PRECISIONS`.
        optimizer: a name in `OPTIMIZERS`.
        zero_stage: 0 splits nothing, 1 the optimizer state, 2 gradients too, 3 weights too.
        shard_degree: ranks that split it.
        trainable: False for frozen parameters, which have weights only.

    Returns:
        Bytes on the fullest rank (uneven splits round up).

    Raises:
        ValueError: for an unknown name or a number out of range.

    Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", figure 1:
    7.5e9 parameters on 64 ranks need 120, 31.4, 16.6 and 1.9 GB in stages 0 to 3.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision = {precision!r}: choose one of {', '.join(PRECISIONS)}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer = {optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
    recipe = dataclasses.replace(PRECISIONS[precision], moment_bytes=OPTIMIZERS[optimizer])
    return estimate_recipe_bytes(
        num_params, recipe, zero_stage=zero_stage, shard_degree=shard_degree, trainable=trainable
    )


def estimate_recipe_bytes(
    num_params: int, recipe: Precision, *, zero_stage: int = 0, shard_degree: int = 1, trainable: bool = True
) -> StateBytes:
    """Count the training state of one rank as `estimate_state_bytes` does, with a recipe's own bytes of moments."""
    if num_params < 0 or shard_degree < 1:
        raise ValueError(f"num_params = {num_params}, shard_degree = {shard_degree}: need 0 or more, and 1 or more")
    if zero_stage not in range(4):
        raise ValueError(f"zero_stage = {zero_stage!r}: must be 0, 1, 2 or 3")
    shard = -(-num_params // shard_degree)
    weights = (shard if zero_stage >= 3 else num_params) * recipe.weight_bytes
    if not trainable:
        return StateBytes(weights=weights, gradients=0, optimizer=0)
    return StateBytes(
        weights=weights,
        gradients=(shard if zero_stage >= 2 else num_params) * recipe.gradient_bytes,
        optimizer=(shard if zero_stage >= 1 else num_params) * (recipe.master_bytes + recipe.moment_bytes),
    )


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

    Tensor parallelism is taken to split the whole language tower; its norms, which every rank keeps, are under
    0.01 % of it. The projector is never split. What stands on a stage is `find_split`'s answer.

    Args:
        plan: how the ranks share the work.
        model: the model's shape.
        stage: pipeline stage, from 0.
    """
    split, language = find_split(plan, model), model.language
    vision = len(split.vision_blocks(stage)) * shapes.count_vision_layer_params(model.vision)
    if stage == 0:
        vision += shapes.count_vision_embedding_params(model.vision)
    held = len(split.language_blocks(stage)) * shapes.count_language_layer_params(language)
    if stage == split.fusion_stage:
        held += shapes.count_embedding_params(language)
    if stage == split.num_stages - 1:
        held += shapes.count_head_params(language)
        if language.tied_embeddings and stage != split.fusion_stage:
            held += shapes.count_embedding_params(language)  # the last stage needs a copy to tie to
    return {
        "vision": -(-vision // plan.vision_tp),
        "projector": shapes.count_projector_params(model) if stage == split.fusion_stage else 0,
        "language": -(-held // plan.tp),
    }


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
    split, language, vision = find_split(plan, model), model.language, model.vision
    root: list[tuple[str, int]] = []
    units: list[tuple[str, int]] = []
    if split.language_blocks(stage):
        units.append(("language", shapes.count_language_layer_params(language)))
    if split.vision_blocks(stage):
        units.append(("vision", shapes.count_vision_layer_params(vision)))
    if stage == 0:
        root.append(("vision", shapes.count_vision_embedding_params(vision)))
    if stage == split.fusion_stage:
        (units if layered else root).append(("projector", shapes.count_projector_params(model)))
    if stage == split.num_stages - 1:
        root.append(("language", language.hidden_size))  # the final norm
    if stage in (split.fusion_stage, split.num_stages - 1):
        (root if language.tied_embeddings else units).append(("language", shapes.count_embedding_params(language)))
    degrees = {"vision": plan.vision_tp, "projector": 1, "language": plan.tp}

    def held(tower: str, num_params: int, copies: int) -> int:
        gradient_bytes = 0 if tower in plan.frozen else plan.recipe.gradient_bytes
        return -(-num_params // degrees[tower]) * (copies * plan.recipe.weight_bytes + gradient_bytes)

    rest = sum(held(*part, copies=1) for part in root)
    if not layered:
        return rest + max(held(*unit, copies=2) for unit in units)
    twice = (2 * plan.recipe.weight_bytes * -(-num_params // degrees[tower]) for tower, num_params in units)
    return rest + max(*twice, *(held(*unit, copies=1) for unit in units))
