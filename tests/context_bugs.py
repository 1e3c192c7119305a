"""Bugs that the context-parallel tests plant: each is a plausible slip, and must be noticed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from vlmcourse.parallel import attention_block, chunks, context, differentiable, gather_attention, ring, ulysses

Group = dist.ProcessGroup
Plant = Callable[[], contextlib.AbstractContextManager[Any]]


# Of attention.


def merged_without_lse(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    return out + block_out, torch.logaddexp(lse, block_lse)


def with_own_lse(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Any:
    return attention_block.attend_block_backward(grad, q, k, v, *attention_block.attend_block(q, k, v, causal), causal)


class OneHopLess(ring.PassedOn):
    """The last message with gradients does not leave."""

    num_sent = 0

    def __init__(self, tensor: Tensor, group: Group, tag: int) -> None:
        self.is_lost = False
        if tag == ring.GRADIENT_TAG:
            OneHopLess.num_sent += 1
            self.is_lost = OneHopLess.num_sent % (group.size() - 1) == 0
        if self.is_lost:
            self.lost = torch.zeros_like(tensor)
        else:
            super().__init__(tensor, group, tag)

    def wait(self) -> Tensor:
        return self.lost if self.is_lost else super().wait()


class MixedUpRing(ring.PassedOn):
    """Gradients of keys and of values change places on the way."""

    def __init__(self, tensor: Tensor, group: Group, tag: int) -> None:
        self.tag = tag
        super().__init__(tensor, group, tag)

    def wait(self) -> Tensor:
        received = super().wait()
        return received.flip(0) if self.tag == ring.GRADIENT_TAG else received


def one_meeting_less(query_rank: int, key_rank: int, cp: int, order: str) -> Iterator[chunks.Meeting]:
    for meeting in chunks.visible_meetings(query_rank, key_rank, cp, order):
        if not (query_rank == key_rank and meeting.query > meeting.key):
            yield meeting


def later_blocks_too(query_rank: int, key_rank: int, cp: int, order: str) -> Iterator[chunks.Meeting]:
    for i, query in enumerate(chunks.chunks_of_rank(query_rank, cp, order)):
        for j, key in enumerate(chunks.chunks_of_rank(key_rank, cp, order)):
            yield chunks.Meeting(i, j, query == key)


def diagonal_not_masked(query_rank: int, key_rank: int, cp: int, order: str) -> Iterator[chunks.Meeting]:
    for meeting in chunks.visible_meetings(query_rank, key_rank, cp, order):
        yield chunks.Meeting(meeting.query, meeting.key, False)


def own_gradient_only(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
    return grads[0][ctx.group.rank()].contiguous(), None


def mean_gradient(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
    part = grads[0].new_empty(grads[0].shape[1:])
    dist.reduce_scatter_single(part, grads[0].contiguous().flatten(0, 1), group=ctx.group)
    return part / ctx.group.size(), None


def as_is(tensor: Tensor, dim: int, cp: int, order: str) -> Tensor:
    return tensor


ATTENTION_BUGS: dict[str, tuple[str, Plant]] = {
    "merged without log-sum-exp": ("ring", lambda: mock.patch.object(ring, "merge_blocks", merged_without_lse)),
    "backward with a block's own log-sum-exp": (
        "ring",
        lambda: mock.patch.object(ring, "attend_block_backward", with_own_lse),
    ),
    "gradients sent one step too few": ("ring", lambda: mock.patch.object(ring, "PassedOn", OneHopLess)),
    "gradients of keys and values mixed up on the way": (
        "ring",
        lambda: mock.patch.object(ring, "PassedOn", MixedUpRing),
    ),
    "an earlier chunk of the same rank left out": (
        "ring",
        lambda: mock.patch.object(ring, "visible_meetings", one_meeting_less),
    ),
    "masked chunks not skipped": ("ring", lambda: mock.patch.object(ring, "visible_meetings", later_blocks_too)),
    "own chunk not masked": ("ring", lambda: mock.patch.object(ring, "visible_meetings", diagonal_not_masked)),
    "gathered keys left in the order of ranks": (
        "allgather",
        lambda: mock.patch.object(gather_attention, "sort_parts", as_is),
    ),
    "gradients of keys not summed": (
        "allgather",
        lambda: mock.patch.object(differentiable._Gather, "backward", staticmethod(own_gradient_only)),
    ),
    "gradients of keys averaged": (
        "allgather",
        lambda: mock.patch.object(differentiable._Gather, "backward", staticmethod(mean_gradient)),
    ),
    "exchanged positions left in the order of ranks": (
        "ulysses",
        lambda: mock.patch.multiple(ulysses, sort_parts=as_is, unsort_parts=as_is),
    ),
    "results not put back in the order of ranks": (
        "ulysses",
        lambda: mock.patch.object(ulysses, "unsort_parts", as_is),
    ),
    "gradients of the exchange not sent back": (
        "ulysses",
        lambda: mock.patch.object(differentiable._Exchange, "backward", staticmethod(lambda ctx, grad: (grad, None))),
    ),
}
"""Name -> the method it is planted in, and what plants it."""


# Of the whole model.


def positions_from_zero(tensor: Tensor, dim: int, *, group: Group, order: str) -> Tensor:
    part = chunks.take_part(tensor, dim, group.rank(), group.size(), order)
    return part if part.is_floating_point() else tensor.narrow(dim, 0, part.shape[dim])


def positions_in_other_order(tensor: Tensor, dim: int, *, group: Group, order: str) -> Tensor:
    kind = order if tensor.is_floating_point() else "contiguous"
    return chunks.take_part(tensor, dim, group.rank(), group.size(), kind)


class _GatherOwnGradient(differentiable._Gather):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return own_gradient_only(ctx, *grads)


def tiles_in_reverse(part: Tensor, group: Group) -> Tensor:
    return differentiable.gather_from_ranks(part, group).flip(0)


def features_detached(part: Tensor, group: Group) -> Tensor:
    return differentiable.gather_from_ranks(part.detach(), group)


def _patched_take_part(function: Callable[..., Tensor]) -> Plant:
    return lambda: mock.patch.object(context, "_take_part_in_group", function)


def _patched_gather(function: Callable[..., Tensor]) -> Plant:
    return lambda: mock.patch.object(context, "gather_from_ranks", function)


MODEL_BUGS: dict[str, Plant] = {
    "positions count from zero on every rank": _patched_take_part(positions_from_zero),
    "positions in the other order": _patched_take_part(positions_in_other_order),
    "gradients of features not summed": _patched_gather(lambda part, group: _GatherOwnGradient.apply(part, group)),
    "gradients of features lost": _patched_gather(features_detached),
    "tiles of other ranks": _patched_gather(tiles_in_reverse),
    "labels in the other order": contextlib.nullcontext,
    "gradients not summed": contextlib.nullcontext,
    "mean of means over ranks": contextlib.nullcontext,
}
"""Name -> what plants it; the last three are slips of the caller, see `context_worker.bug_in_model`."""
