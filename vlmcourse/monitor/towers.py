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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmcourse.config import TOWERS
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
def sum_gradient_squares(model: nn.Module, optimizer: Any, world_size: int) -> Squares:
    """Return this rank's share of the squared norm of each tower's gradient.

    Args:
        model: under any strategy but one that `hides_tensors`, after the last backward of a step.
        optimizer: over its parameters, of `build_optimizer`: its groups know their towers.
        world_size: ranks of the run.
    Communicates: nothing, or where a gradient is still a sum in parts, an all-reduce of it.
    """
    found: Squares = dict.fromkeys(TOWERS, 0.0)
    for tower, trained in _trained_by_tower(model, optimizer):
        by_share: dict[float, list[Tensor]] = defaultdict(list)
        for p in trained:
            if p.grad is not None:
                by_share[_share(p, model, world_size)].append(_settled(p.grad, p))
        for share, parts in by_share.items():
            found[tower] += share * sum(float(_join(chunk).square_().sum()) for chunk in _chunks(parts))
    return found


@torch.no_grad()
def sum_update_squares(model: nn.Module, optimizer: Any, world_size: int) -> tuple[Squares, Squares]:
    """Return this rank's share of the squared norms of the last update and of the weights after it, by tower.

    Args:
        model: as in `sum_gradient_squares`, after the update.
        optimizer: AdamW over its parameters, sharded or not, which has just updated them; or what stands for an
            engine's.
        world_size: ranks of the run.

    Returns:
        Updates and weights; of trained weights only, in units of the weights.
    """
    kept = local_optimizer(getattr(getattr(optimizer, "engine", None), "optimizer", optimizer))
    owner = {p: i for i, group in enumerate(kept.param_groups) for p in group["params"] if kept.state.get(p)}
    is_dealt_out = kept is not optimizer and not is_engine(model)  # zero1: each parameter's state is on one rank
    mine = [(tower, p) for tower, trained in _trained_by_tower(model, optimizer) for p in trained if p in owner]
    updates: Squares = dict.fromkeys(TOWERS, 0.0)
    weights: Squares = dict.fromkeys(TOWERS, 0.0)
    if not mine:
        return updates, weights
    steps = torch.stack([kept.state[p]["step"] for _, p in mine]).tolist()  # waits for the device once
    alike: dict[tuple[str, int, float, float], list[Tensor]] = defaultdict(list)
    for (tower, p), step in zip(mine, steps, strict=True):
        share = 1.0 if is_dealt_out else _share(p, model, world_size)
        alike[tower, owner[p], share, step].append(p)
    for (tower, number, share, step), parameters in alike.items():
        for chunk in _chunks(parameters):
            states = [kept.state[p] for p in chunk]
            of_update, of_weights = _last_update_squares(chunk, states, kept.param_groups[number], step)
            updates[tower] += share * of_update
            weights[tower] += share * of_weights
    return updates, weights


def _last_update_squares(
    parameters: Sequence[Tensor], states: Sequence[dict[str, Tensor]], group: dict[str, Any], step: float
) -> tuple[float, float]:
    """Return the square of what AdamW's last step has changed of some weights of a group, and of these weights now.

    With a the weights now and u = m / (sqrt(v) + eps'), the update was -(c u + k a) / (1 - k), where k = lr decay and c
    is the rate with both corrections of bias. Its square needs three sums, and few passes over memory.
    """
    (beta1, beta2), k = group["betas"], group["lr"] * group["weight_decay"]
    root_of_bias = math.sqrt(1 - beta2**step)
    c = group["lr"] * root_of_bias / (1 - beta1**step)
    after = _join([state.get("master", p.detach()) for p, state in zip(parameters, states, strict=True)])
    root = _join([state["exp_avg_sq"] for state in states]).sqrt_().add_(group["eps"] * root_of_bias)
    moved = _join([state["exp_avg"] for state in states]).div_(root)
    uu, ua, aa = torch.stack([torch.dot(moved, moved), torch.dot(moved, after), torch.dot(after, after)]).tolist()
    return (c**2 * uu + 2 * c * k * ua + k**2 * aa) / (1 - k) ** 2, aa


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of this rank's parts of some tensors in one row, in fp32 or more: one pass instead of many."""
    return at_least_fp32(torch.cat([local_part(tensor).flatten() for tensor in tensors]))


def _trained_by_tower(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield each tower's trained parameters; groups are asked, which is faster than to look for names in a model."""
    skip = model.pipeline.tied_copy if isinstance(model, PipelinedModel) else None
    for tower in TOWERS:
        groups = [group["params"] for group in optimizer.param_groups if group["tower"] == tower]
        yield tower, [p for params in groups for p in params if p is not skip]


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


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut a list so that each piece has few elements on this rank, or one tensor."""
    chunk: list[Tensor] = []
    num_elements = 0
    for tensor in tensors:
        size = local_part(tensor).numel()
        if chunk and num_elements + size > CHUNK_ELEMENTS:
            yield chunk
            chunk, num_elements = [], 0
        chunk.append(tensor)
        num_elements += size
    if chunk:
        yield chunk
