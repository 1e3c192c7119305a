"""Norm of the gradient and size of the update, tower by tower, under every strategy whose tensors can be seen.

Enters: a distributed model before clipping, and again with its optimizer after the update. Leaves: sums of squares of
this rank's share, to be added over all ranks: a piece that several ranks hold counts on each of them for a part. So one
sum over the ranks is right for whole weights, shards, parts of matrices and stages alike.

The update is computed from the moments that AdamW keeps, without a copy of the weights: it has just changed a weight w
by -lr m / (sqrt(v) + eps) - lr decay w. Where weights are rounded to 16 bits, it is what was asked for before rounding.
DeepSpeed's engines of ZeRO-1 to 3 hide gradients and moments: there is nothing to report then. Chapter 6.

Source: Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2, for the update of AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmcourse.config import TOWERS
from vlmcourse.parallel.apply import named_plain_parameters
from vlmcourse.parallel.comm import at_least_fp32, local_part
from vlmcourse.parallel.data import local_optimizer
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.sync import is_engine

CHUNK_ELEMENTS = 2**24
"""Elements whose updates are computed together: a few temporary tensors of this size."""
Squares = dict[str, float]
"""By tower."""


def hides_tensors(model: nn.Module) -> bool:
    """Whether gradients and moments of a model cannot be seen: an engine that keeps them in its own parts."""
    engine: Any = model
    return is_engine(model) and bool(engine.zero_optimization_stage())


@torch.no_grad()
def sum_gradient_squares(model: nn.Module, world_size: int) -> Squares:
    """Return this rank's share of the squared norm of each tower's gradient.

    Args:
        model: under any strategy but one that `hides_tensors`, after the last backward of a step.
        world_size: ranks of the run.
    Communicates: nothing, or where a gradient is still a sum in parts, an all-reduce of it.
    """
    found = dict.fromkeys(TOWERS, 0.0)
    for tower, trained in _trained_by_tower(model):
        shares = [(p, p.grad) for p in trained if p.grad is not None]
        parts = [_settled(gradient, p) for p, gradient in shares]
        found[tower] = _weighted_squares(parts, [_share(p, model, world_size) for p, _ in shares])
    return found


@torch.no_grad()
def sum_update_squares(model: nn.Module, optimizer: Any, world_size: int) -> tuple[Squares, Squares]:
    """Return this rank's share of the squared norms of the last update and of the weights before it, by tower.

    Args:
        model: as in `sum_gradient_squares`, after the update.
        optimizer: AdamW over its parameters, sharded or not, which has just updated them; or what stands for an
            engine's.
        world_size: ranks of the run.

    Returns:
        Updates and weights; of trained weights only, in units of the weights.
    """
    kept = local_optimizer(getattr(getattr(optimizer, "engine", None), "optimizer", optimizer))
    owned = {p: group for group in kept.param_groups for p in group["params"] if kept.state.get(p)}
    is_dealt_out = kept is not optimizer and not is_engine(model)  # zero1: each parameter's state is on one rank
    updates, weights = dict.fromkeys(TOWERS, 0.0), dict.fromkeys(TOWERS, 0.0)
    for tower, trained in _trained_by_tower(model):
        mine = [p for p in trained if p in owned]
        for chunk in _chunks(mine):
            shares = [1.0 if is_dealt_out else _share(p, model, world_size) for p in chunk]
            steps = torch.stack([kept.state[p]["step"] for p in chunk]).tolist()  # waits for the device once
            pairs = [_last_update(p, kept.state[p], owned[p], step) for p, step in zip(chunk, steps, strict=True)]
            updates[tower] += _weighted_squares([update for update, _ in pairs], shares)
            weights[tower] += _weighted_squares([before for _, before in pairs], shares)
    return updates, weights


def _last_update(p: Tensor, state: dict[str, Tensor], group: dict[str, Any], step: float) -> tuple[Tensor, Tensor]:
    """Return by how much AdamW has changed this rank's part of a weight, and what that was before."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    mean, square = (at_least_fp32(local_part(state[key])) for key in ("exp_avg", "exp_avg_sq"))
    after = local_part(state["master"]) if "master" in state else at_least_fp32(local_part(p.detach()))
    moved = mean / (square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])) * (lr / (1 - beta1**step))
    before = (after + moved).div_(1 - lr * group["weight_decay"])
    return after - before, before


def _trained_by_tower(model: nn.Module) -> Iterator[tuple[str, list[nn.Parameter]]]:
    skip = model.pipeline.tied_copy if isinstance(model, PipelinedModel) else None
    named = [(name, p) for name, p in named_plain_parameters(model) if p.requires_grad and p is not skip]
    for tower in TOWERS:
        yield tower, [p for name, p in named if name.startswith(f"{tower}.")]


def _share(parameter: Tensor, model: nn.Module, world_size: int) -> float:
    """Return one over the number of ranks that hold the same piece of a parameter."""
    num_ranks = world_size // (model.pipeline.pp if isinstance(model, PipelinedModel) else 1)
    if not isinstance(parameter, DTensor):
        return 1 / num_ranks
    mesh = parameter.device_mesh
    axes = zip(mesh.shape, parameter.placements, strict=True)
    copies = math.prod(size for size, placement in axes if placement.is_replicate())
    return mesh.size() / (num_ranks * copies)


def _settled(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, added up over the ranks where it lies in summands."""
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        assert isinstance(parameter, DTensor)
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def _weighted_squares(tensors: Sequence[Tensor], shares: Sequence[float]) -> float:
    """Return the sum of squares of some tensors, each times its share; waits for the device once."""
    filled = [(tensor, share) for tensor, share in zip(tensors, shares, strict=True) if tensor.numel()]
    if not filled:
        return 0.0
    norms = torch._foreach_norm([at_least_fp32(tensor) for tensor, _ in filled])
    factors = torch.tensor([share for _, share in filled], dtype=torch.float64, device=filled[0][0].device)
    return float((torch.stack(list(norms)).double().square() * factors).sum())


def _chunks(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Cut a list so that each piece has few elements on this rank, or one parameter."""
    chunk: list[nn.Parameter] = []
    num_elements = 0
    for parameter in parameters:
        size = local_part(parameter).numel()
        if chunk and num_elements + size > CHUNK_ELEMENTS:
            yield chunk
            chunk, num_elements = [], 0
        chunk.append(parameter)
        num_elements += size
    if chunk:
        yield chunk
