"""Small sums over all ranks, and the other few things that every rank must agree on.

Enters: plain numbers, tensors or words of one rank. Leaves: the same on every rank, or an error on all of them. With
one rank nothing is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from vlmcourse.parallel.phases import phase
from vlmcourse.parallel.ranks import Ranks, answers
from vlmcourse.spans import COMMUNICATION


def sum_over_ranks(values: Sequence[float | Tensor], ranks: Ranks) -> list[float]:
    """Add each of `values` over all ranks.

    Args:
        values: numbers or one-element tensors; the same count, in the same order, on every rank.
        ranks: this process's place.

    Returns:
        The sums, equal on all ranks; computed in float64, so counts below 2^53 are exact.
    Communicates: one all-reduce over all ranks, 8 bytes a value and rank.
    """
    return _reduce(values, ranks, dist.ReduceOp.SUM)


def max_over_ranks(values: Sequence[float | Tensor], ranks: Ranks) -> list[float]:
    """Return the largest of each of `values` over all ranks; otherwise as `sum_over_ranks`."""
    return _reduce(values, ranks, dist.ReduceOp.MAX)


def gather_numbers(values: Sequence[float], ranks: Ranks) -> list[list[float]]:
    """Return the numbers of every rank, rank by rank.

    Args:
        values: the same count on every rank; nan is a number too.
        ranks: this process's place.
    Communicates: one all-gather over all ranks, 8 bytes a value and rank.
    """
    mine = torch.tensor(values, dtype=torch.float64, device=ranks.device)
    if ranks.world_size == 1:
        return [mine.tolist()]
    everyone = [torch.empty_like(mine) for _ in range(ranks.world_size)]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).tolist()


def _reduce(values: Sequence[float | Tensor], ranks: Ranks, op: dist.ReduceOp.RedOpType) -> list[float]:
    parts = [torch.as_tensor(value, dtype=torch.float64, device=ranks.device).detach() for value in values]
    numbers = torch.stack(parts)
    if ranks.world_size == 1:
        return numbers.tolist()
    with phase(COMMUNICATION):
        dist.all_reduce(numbers, op=op)
        return numbers.tolist()


def check_alike(mine: dict[str, str], ranks: Ranks) -> None:
    """Refuse ranks that are about to do something else than rank 0: they would wait for each other.

    Args:
        mine: what must be alike, in words, by name.
        ranks: this process's place.

    Raises:
        ValueError: on all ranks, naming those that differ from rank 0 and in what.
    Communicates: an all-gather of 64 letters; only where these differ, one of all words.
    """
    if ranks.world_size == 1 or not dist.is_initialized() or not answers():
        return
    if len(set(_gather(hashlib.sha256(repr(mine).encode()).hexdigest()))) == 1:
        return
    everyone: list[dict[str, str]] = _gather(mine)
    others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    first, other = everyone[0], everyone[others[0]]
    name, *more = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    raise ValueError(
        f"rank {ranks.rank}: rank(s) {', '.join(map(str, others))} distribute something else than rank 0: {name} is "
        f"{first.get(name, 'not there')} on rank 0 and {other.get(name, 'not there')} on rank {others[0]}"
        f"{f', and {len(more)} more' if more else ''}. All ranks must call with the same configuration and a model "
        "of the same shape, frozen alike"
    )


def gather_texts(texts: Sequence[str], ranks: Ranks) -> list[list[str]]:
    """Return the texts of every rank, rank by rank; ranks may have different numbers of them.

    Communicates: one all-gather of a length, and one of the texts.
    """
    return [list(texts)] if ranks.world_size == 1 else _gather(list(texts))


def _gather(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 where its type is narrower, and as it is where it is fp32 or float64.

    What needs more digits than weights have (losses, softmax, norms) is computed so, and a model in float64 stays in
    float64 from one end to the other: there, ranks and one process must agree to 1e-9.
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def wait_for_all(ranks: Ranks) -> None:
    """Return when every rank has called this.

    Communicates: one barrier over all ranks.
    """
    if ranks.world_size > 1:
        dist.barrier()


def gather_full(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded, on the CPU of every rank.

    Args:
        tensor: a plain tensor, or a `DTensor` of any placement.

    Returns:
        A detached copy of the full tensor, on CPU.
    Communicates: one all-gather over each axis of the tensor's mesh that it is sharded on; every rank must call it.
    """
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        # Axis by axis, in the order in which FSDP2 lies over the axes of a model: in one go PyTorch does the same, with
        # a warning.
        for axis in range(whole.device_mesh.ndim):
            placements = list(whole.placements)
            placements[axis] = Replicate()
            whole = whole.redistribute(placements=placements)
        whole = whole.to_local()
    return whole.to("cpu", copy=True)


def local_part(tensor: Tensor) -> Tensor:
    """Return the piece of a tensor that this rank stores: its shard of a `DTensor`, or all of a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
