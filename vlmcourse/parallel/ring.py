"""Context parallelism by a ring: keys and values travel from rank to rank while each attends to what it holds.

Enters: each rank's part of the sequence. Leaves: the mixed values of its own queries. In step t of cp, rank r holds the
keys and values of rank r - t, has already begun to send them on to rank r + 1, and merges what its queries find in them
by log-sum-exp. Besides its own, a rank holds one block in use and one that arrives, however many ranks there are. In
backward they go round once more, and one step behind them go the gradients of each block, to which every rank adds its
contribution until they are home.

Source: Liu et al. 2023, Ring Attention (arXiv:2310.01889).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlmcourse.parallel.attention_block import attend_block, attend_block_backward, merge_blocks
from vlmcourse.parallel.chunks import chunks_of_rank, visible_meetings
from vlmcourse.parallel.comm import at_least_fp32

KV_TAG, GRADIENT_TAG = 0, 1
"""Two messages are under way between the same two ranks at once: gloo tells them apart by these."""


class PassedOn:
    """A tensor on its way to the next rank, and another coming from the one before."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        """Start both transfers; neither side waits for the other, so a ring of ranks cannot lock up.

        Args:
            tensor: contiguous, the same shape on all ranks; not to be changed before `wait`.
            group: the ring, in the order of its ranks.
            tag: tells this message from others that are under way.
        Communicates: the bytes of `tensor` to the next rank of `group`.
        """
        rank, size = group.rank(), group.size()
        self._sent = tensor  # alive until it has left
        self._received = torch.empty_like(tensor)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, group_peer=(rank + 1) % size, tag=tag),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=(rank - 1) % size, tag=tag),
            ]
        )

    def wait(self) -> Tensor:
        """Return what the rank before has sent."""
        for work in self._works:
            work.wait()
        return self._received


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, group: dist.ProcessGroup, order: str
    ) -> Tensor:
        rank, cp = group.rank(), group.size()
        kv = torch.stack((k_BKSE, v_BKSE))
        out_BHSE = at_least_fp32(torch.zeros_like(q_BHSE, memory_format=torch.contiguous_format))
        lse_BHS = out_BHSE.new_full(q_BHSE.shape[:-1], -math.inf)
        for step in range(cp):
            under_way = PassedOn(kv, group, KV_TAG) if step < cp - 1 else None
            for rows, keys, is_causal in _visible_slices(rank, (rank - step) % cp, cp, order, q_BHSE.shape[2]):
                block = attend_block(q_BHSE[:, :, rows], kv[0, :, :, keys], kv[1, :, :, keys], is_causal)
                merged = merge_blocks(out_BHSE[:, :, rows], lse_BHS[:, :, rows], *block)
                out_BHSE[:, :, rows], lse_BHS[:, :, rows] = merged
            if under_way is not None:
                kv = under_way.wait()
        out_BHSE = out_BHSE.to(q_BHSE.dtype)
        ctx.save_for_backward(q_BHSE, k_BKSE, v_BKSE, out_BHSE, lse_BHS)
        ctx.group, ctx.order = group, order
        return out_BHSE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_BHSE, k_BKSE, v_BKSE, out_BHSE, lse_BHS = ctx.saved_tensors
        rank, cp = ctx.group.rank(), ctx.group.size()
        kv = torch.stack((k_BKSE, v_BKSE))
        # Contributions add up in fp32: in bf16, each rank that a gradient passes would round it once more.
        grad_q_BHSE = at_least_fp32(torch.zeros_like(q_BHSE))
        own_grad_kv, gradient_under_way = at_least_fp32(torch.zeros_like(kv)), None
        for step in range(cp):
            under_way = PassedOn(kv, ctx.group, KV_TAG) if step < cp - 1 else None
            grad_kv = torch.zeros_like(own_grad_kv)
            for rows, keys, is_causal in _visible_slices(rank, (rank - step) % cp, cp, ctx.order, q_BHSE.shape[2]):
                grad_q, grad_k, grad_v = attend_block_backward(
                    grads[0][:, :, rows],
                    q_BHSE[:, :, rows],
                    kv[0, :, :, keys],
                    kv[1, :, :, keys],
                    out_BHSE[:, :, rows],
                    lse_BHS[:, :, rows],
                    is_causal,
                )
                grad_q_BHSE[:, :, rows] += grad_q
                grad_kv[0, :, :, keys] += grad_k
                grad_kv[1, :, :, keys] += grad_v
            if step == 0:
                own_grad_kv = grad_kv  # this rank's own block: its contribution need not travel
            else:
                if gradient_under_way is not None:
                    grad_kv += gradient_under_way.wait()  # what earlier ranks found for the block held now
                gradient_under_way = PassedOn(grad_kv, ctx.group, GRADIENT_TAG)
            if under_way is not None:
                kv = under_way.wait()
        if gradient_under_way is not None:
            own_grad_kv += gradient_under_way.wait()  # home, one rank after the last that used it
        grad_kv = own_grad_kv.to(k_BKSE.dtype)
        return grad_q_BHSE.to(q_BHSE.dtype), grad_kv[0], grad_kv[1], None, None


def ring_attention(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, group: dist.ProcessGroup, order: str) -> Tensor:
    """Attend causally to the whole sequence.

    Args:
        q_BHSE: [batch, heads, seq / cp, head width], this rank's positions.
        k_BKSE: [batch, kv heads, seq / cp, head width], this rank's positions.
        v_BKSE: as the keys.
        group: the cp ranks that the sequence is split over.
        order: which positions a rank has; see `chunks`.

    Returns:
        [batch, heads, seq / cp, head width].
    Communicates: to the next rank of `group`, (cp - 1) x the bytes of one rank's keys and values; in backward as many
        again, and (cp - 1) x the bytes of their gradients in fp32.
    """
    return _RingAttention.apply(q_BHSE, k_BKSE, v_BKSE, group, order)  # type: ignore[return-value]


def _visible_slices(
    query_rank: int, key_rank: int, cp: int, order: str, part_len: int
) -> list[tuple[slice, slice, bool]]:
    """Return the positions, counted inside each rank's part, of queries and keys that meet, and whether half is masked.

    Pairs of chunks that are masked as a whole are left out, so they cost nothing.
    """
    length = part_len // len(chunks_of_rank(query_rank, cp, order))
    return [
        (
            slice(meeting.query * length, (meeting.query + 1) * length),
            slice(meeting.key * length, (meeting.key + 1) * length),
            meeting.is_causal,
        )
        for meeting in visible_meetings(query_rank, key_rank, cp, order)
    ]
