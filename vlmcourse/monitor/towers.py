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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmcourse.config import TOWERS
from vlmcourse.parallel.comm import at_least_fp32, local_part
from vlmcourse.parallel.data import local_optimizer
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.sync import is_engine

CHUNK_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
"""Elements that are looked at together, by type of device: a few temporary tensors of this size. On a CPU so few that
they stay in its cache, and that a sum of squares in fp32 keeps its digits; on a GPU so many that it is kept busy."""
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
    alike: dict[tuple[str, float], list[tuple[Tensor]]] = defaultdict(list)
    ranks_per_stage, skip = _ranks_per_stage(model, world_size), _tied_copy(model)
    for group in optimizer.param_groups:
        tower = group["tower"]
        for p in group["params"]:
            if p.grad is not None and p is not skip:
                alike[tower, _share(p, ranks_per_stage)].append((_settled(p.grad, p),))
    found: list[tuple[str, float]] = []
    sums: list[Tensor] = []
    for (tower, share), gradients in alike.items():
        for (row,) in _rows(gradients):
            found.append((tower, share))
            sums.append(torch.dot(row, row))
    return _add_up(found, _read(sums))


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
    is_dealt_out = kept is not optimizer and not is_engine(model)  # zero1: each parameter's state is on one rank
    ranks_per_stage, skip = _ranks_per_stage(model, world_size), _tied_copy(model)
    tower_of = {id(p): group["tower"] for group in optimizer.param_groups for p in group["params"] if p is not skip}
    mine = [
        (tower_of[id(p)], number, 1.0 if is_dealt_out else _share(p, ranks_per_stage), p, kept.state[p])
        for number, group in enumerate(kept.param_groups)
        for p in group["params"]
        if id(p) in tower_of and kept.state.get(p)
    ]
    steps = _read([state["step"] for *_, state in mine])  # waits for the device once
    alike: dict[tuple[str, int, float, float], list[tuple[Tensor, ...]]] = defaultdict(list)
    for (tower, number, share, p, state), step in zip(mine, steps, strict=True):
        tensors = state.get("master", p), state["exp_avg"], state["exp_avg_sq"]
        alike[tower, number, share, step].append(tuple(map(local_part, tensors)))
    found: list[tuple[str, float, tuple[float, float]]] = []
    sums: list[Tensor] = []
    for (tower, number, share, step), kept_tensors in alike.items():
        factors, eps = _factors_of(kept.param_groups[number], step)
        for weights, moment, square in _rows(kept_tensors):
            root = square.sqrt().add_(eps)
            moved = torch.div(moment, root, out=root)
            found.append((tower, share, factors))
            sums += torch.dot(moved, moved), torch.dot(moved, weights), torch.dot(weights, weights)
    numbers = _read(sums)
    places = [(tower, share) for tower, share, _ in found]
    updates = [
        uu * moved**2 + 2 * ua * moved * decayed + aa * decayed**2
        for (*_, (moved, decayed)), uu, ua, aa in zip(found, *(numbers[i::3] for i in range(3)), strict=True)
    ]
    return _add_up(places, updates), _add_up(places, numbers[2::3])


def _factors_of(group: dict[str, Any], step: float) -> tuple[tuple[float, float], float]:
    """Return by what AdamW's last step is told from the weights now, and the eps to tell it with.

    With a the weights now and u = m / (sqrt(v) + eps'), the update was -(c u + k a) / (1 - k), where k = lr decay and c
    is the rate with both corrections of bias. Its square needs three sums, and few passes over memory.

    Returns:
        c / (1 - k) and k / (1 - k); eps'.
    """
    (beta1, beta2), k = group["betas"], group["lr"] * group["weight_decay"]
    root_of_bias = math.sqrt(1 - beta2**step)
    c = group["lr"] * root_of_bias / (1 - beta1**step)
    return (c / (1 - k), k / (1 - k)), group["eps"] * root_of_bias


def _read(numbers: Sequence[Tensor]) -> list[float]:
    """Return scalars of one device as numbers: the only place here where a GPU is waited for."""
    return torch.stack(list(numbers)).tolist() if numbers else []


def _add_up(places: Iterable[tuple[str, float]], squares: Iterable[float]) -> Squares:
    """Add up squares by tower, each with its share."""
    found: Squares = dict.fromkeys(TOWERS, 0.0)
    for (tower, share), square in zip(places, squares, strict=True):
        found[tower] += share * square
    return found


def _rows(tensors: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield what tensors of a rank hold in rows of few elements, in fp32 or more: one pass instead of many.

    Args:
        tensors: of equal sizes in each tuple, whose elements stay beside each other. Rows may be views: change none.
    """
    limit = CHUNK_ELEMENTS[tensors[0][0].device.type]
    chunk: list[tuple[Tensor, ...]] = []
    num_elements = 0
    for together in tensors:
        size = together[0].numel()
        if chunk and num_elements + size > limit:
            yield _join(chunk)
            chunk, num_elements = [], 0
        if size > limit:
            pieces = zip(*(tensor.flatten().split(limit) for tensor in together), strict=True)
            yield from (tuple(map(at_least_fp32, piece)) for piece in pieces)
        else:
            chunk.append(together)
            num_elements += size
    if chunk:
        yield _join(chunk)


def _join(chunk: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return tensors in one row for each place of the tuples."""
    return tuple(
        at_least_fp32(torch.cat([tensor.flatten() for tensor in column])) for column in zip(*chunk, strict=True)
    )


def _tied_copy(model: nn.Module) -> Tensor | None:
    """Return the second copy of an embedding that stands on two stages of a pipeline: it counts once."""
    return model.pipeline.tied_copy if isinstance(model, PipelinedModel) else None


def _ranks_per_stage(model: nn.Module, world_size: int) -> int:
    """Return how many ranks hold parts of the same parameters."""
    return world_size // (model.pipeline.pp if isinstance(model, PipelinedModel) else 1)


def _share(parameter: Tensor, num_ranks: int) -> float:
    """Return one over the number of ranks that hold the same piece of a parameter, of `num_ranks` that hold any."""
    if not isinstance(parameter, DTensor):
        return 1 / num_ranks
    mesh = parameter.device_mesh
    axes = zip(mesh.shape, parameter.placements, strict=True)
    copies = math.prod(size for size, placement in axes if placement.is_replicate())
    return mesh.size() / (num_ranks * copies)


def _settled(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, added up over the ranks where it lies in summands."""
    if not isinstance(gradient, DTensor):
        return gradient
    if any(placement.is_partial() for placement in gradient.placements):
        assert isinstance(parameter, DTensor)
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)
