"""AdamW with a learning rate a tower, warm-up and cosine decay, and clipping by the true global norm.

Enters: a model (plain, DDP or FSDP2) whose towers are called vision, projector and language. Frozen towers get no
gradient, no optimizer state and no group here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vlmcourse.config import TOWERS, OptimizerConfig
from vlmcourse.parallel.apply import named_plain_parameters
from vlmcourse.parallel.clipping import clip_over_stages, multiply_local_parts, total_norm
from vlmcourse.parallel.data import shard_optimizer
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.sync import is_engine
from vlmcourse.train.low_precision import LowPrecisionAdamW


def freeze_towers(model: nn.Module, towers: Iterable[str]) -> None:
    """Switch off gradients of the named towers; call it before the model is distributed."""
    for tower in towers:
        model.get_submodule(tower).requires_grad_(False)


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    *,
    shards_state: bool = False,
    precision: str = "fp32",
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Build AdamW over the trainable parameters, two groups a tower: with weight decay (matrices) and without.

    Args:
        model: already distributed, so that moments are made for shards where weights are shards.
        config: rates by tower, decay and betas.
        shards_state: whether each rank keeps the moments of some parameters only (zero1).
        precision: one of `precision_rules.PRECISIONS`; bf16 weights get a `LowPrecisionAdamW`.
        seed: of what that one rounds at random.

    Returns:
        The optimizer; each group also holds `tower` and `base_lr`, which `set_learning_rates` scales.

    Raises:
        ValueError: if nothing is trainable.
    """
    groups = []
    named = [(name, p) for name, p in named_plain_parameters(model) if p.requires_grad]
    for tower in TOWERS:
        trainable = [(name, p) for name, p in named if name.startswith(f"{tower}.")]
        base_lr = getattr(config, f"lr_{tower}")
        for decay in (True, False):
            parameters = [p for name, p in trainable if is_decayed(name, p) == decay]
            if parameters:
                weight_decay = config.weight_decay if decay else 0.0
                group = {"params": parameters, "lr": base_lr, "weight_decay": weight_decay}
                groups.append(group | {"tower": tower, "base_lr": base_lr})
    if isinstance(model, PipelinedModel):
        groups += _groups_of_other_stages(model, groups, config)
    if not groups:
        raise ValueError("every tower is frozen: nothing would train; leave one out of model.freeze")
    # The fused kernel updates all tensors of a group in one call: many small tensors otherwise cost more time in Python
    # than in arithmetic.
    options: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": config.eps}
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    if precision in ("bf16_master", "bf16_pure"):
        kind = LowPrecisionAdamW
        options |= {"keeps_master": precision == "bf16_master", "seed": seed}
        options["name_parameters"] = lambda: {p: name for name, p in named_plain_parameters(model)}
    else:
        options["fused"] = True
    return shard_optimizer(groups, kind, **options) if shards_state else kind(groups, **options)


def _groups_of_other_stages(
    model: PipelinedModel, groups: list[dict[str, Any]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return an empty group for each tower that is trained on other stages only: every rank then tells all rates.

    Communicates: one all-gather of a few names over the pipeline.
    """
    everyone: list[Any] = [None] * model.pipeline.pp
    dist.all_gather_object(everyone, [group["tower"] for group in groups], group=model.pipeline.group)
    missing = {tower for of_rank in everyone for tower in of_rank} - {group["tower"] for group in groups}
    rates = {tower: getattr(config, f"lr_{tower}") for tower in TOWERS if tower in missing}
    return [{"params": [], "lr": rate, "tower": tower, "base_lr": rate} for tower, rate in rates.items()]


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies: to matrices, not to norms, biases, or class and position embeddings."""
    # What DeepSpeed has cut up is flat, or empty, and keeps its shape beside it.
    num_dims = len(getattr(parameter, "ds_shape", parameter.shape))
    return num_dims >= 2 and "position" not in name and "class" not in name


def learning_rate_scale(step: int, num_steps: int, warmup_steps: int, min_lr_fraction: float) -> float:
    """Return what every learning rate is multiplied by in one step.

    Args:
        step: 0 .. num_steps - 1.
        num_steps: optimizer steps of the whole run.
        warmup_steps: steps of linear rise; the first step already has 1 / warmup_steps.
        min_lr_fraction: where the cosine ends, after `num_steps`.

    Returns:
        A factor from 0 to 1; a function of the step alone, so a resumed run needs no scheduler state.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return min_lr_fraction + (1 - min_lr_fraction) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rates(optimizer: torch.optim.Optimizer, scale: float) -> dict[str, float]:
    """Set each group's rate to its tower's base rate x `scale`; return the rates by tower."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * scale
    return {group["tower"]: group["lr"] for group in optimizer.param_groups}


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale all gradients of a model down so that their global norm is at most `max_norm`, under any strategy.

    Returns:
        The L2 norm of the whole gradient before clipping, equal on every rank; of a DeepSpeed engine, nan.
    Communicates: see `clip_global_norm`; in a pipeline an all-reduce of 8 bytes over its ranks.
    """
    if is_engine(model):
        return math.nan  # the engine clips in its step, and knows the norm after it
    if not isinstance(model, PipelinedModel):
        return clip_global_norm(model.parameters(), max_norm)
    pipeline = model.pipeline
    return clip_over_stages(pipeline.parameters(), max_norm, pipeline.group, pipeline.device, skip=pipeline.tied_copy)


@torch.no_grad()
def clip_global_norm(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients down so that the norm over all of them is at most `max_norm`.

    Call it once a step, after the last micro-batch's gradients were exchanged: clipping parts would clip differently.

    Args:
        parameters: of the whole model; frozen ones have no gradient and do not count.
        max_norm: the limit; 0 measures only.

    Returns:
        The L2 norm of the whole gradient before clipping, equal on every rank and under every strategy.
    Communicates: where gradients are shards, all-reduces of 4 bytes to add up the ranks' squares.
    """
    return float(scale_to_norm(parameters, max_norm))


@torch.no_grad()
def scale_to_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Do what `clip_global_norm` does, and return the norm as a tensor of the device: nothing waits for its value."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(gradients)
    if max_norm > 0:
        multiply_local_parts(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))  # as torch's own clipping
    return norm
