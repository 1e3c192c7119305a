"""Three collectives that a gradient passes through: all-gather, all-to-all and the sum over ranks.

Enters: one tensor of each rank of a group. Leaves: tensors of all of them, connected to the autograd graph. Each rank
then computes its own part of the loss from them, so a gradient arrives on every rank, and a tensor's gradient is the
sum over the ranks it was sent to: the backward of an all-gather is a reduce-scatter, that of an all-to-all is an
all-to-all, that of a sum over ranks is a sum over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlmcourse.parallel.counting import moving_activations


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = part.new_empty((group.size(), *part.shape))
        with moving_activations():
            dist.all_gather_single(parts.flatten(0, 1), part.contiguous(), group=group)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad_part = grads[0].new_empty(grads[0].shape[1:])
        with moving_activations():
            dist.reduce_scatter_single(grad_part, grads[0].contiguous().flatten(0, 1), group=ctx.group)
        return grad_part, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        with moving_activations():
            dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad_parts = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        with moving_activations():
            dist.all_to_all_single(grad_parts, grads[0].contiguous(), group=ctx.group)
        return grad_parts, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        with moving_activations():
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        with moving_activations():
            dist.all_reduce(total, group=ctx.group)
        return total, None


def gather_from_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks.

    Args:
        part: any shape of one dimension or more, the same on every rank.
        group: N ranks.

    Returns:
        [N, *part's shape], by rank, equal on all ranks.
    Communicates: an all-gather over `group`, (N - 1) x the bytes of `part` sent by each rank; in backward a
        reduce-scatter of as many, which sums the gradients of all ranks.
    """
    return _Gather.apply(part, group)  # type: ignore[return-value]


def exchange_with_ranks(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send each rank its own part, and return what all ranks sent here.

    Args:
        parts: [N, ...]; `parts[r]` goes to rank r.
        group: N ranks.

    Returns:
        The same shape; entry r came from rank r.
    Communicates: an all-to-all over `group`, (N - 1) / N x the bytes of `parts` sent by each rank; as many in backward.
    """
    return _Exchange.apply(parts, group)  # type: ignore[return-value]


def sum_over_group(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over the ranks of a group, equal on all of them.

    Args:
        tensor: the same shape on every rank.
        group: the ranks.
    Communicates: an all-reduce of the tensor, and in backward one of its gradient.
    """
    return _Sum.apply(tensor, group)  # type: ignore[return-value]
