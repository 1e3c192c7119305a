"""Context parallelism by all-to-all (DeepSpeed-Ulysses): for attention alone, split heads instead of the sequence.

Enters: each rank's part of the sequence, all heads. An all-to-all turns that into the whole sequence of 1/cp of the
heads, ordinary attention runs, and a second all-to-all turns the result back. What a rank sends shrinks as the number
of ranks grows, but cp must divide the heads; key/value heads that are too few are written out several times.

Source: Jacobs et al. 2023 (arXiv:2309.14509), section 3.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from vlmcourse.models.decoder import attend
from vlmcourse.parallel.chunks import sort_parts, unsort_parts
from vlmcourse.parallel.differentiable import exchange_with_ranks


def check_heads(num_heads: int, cp: int) -> None:
    """Refuse heads that cannot be shared out evenly.

    Args:
        num_heads: query heads on one rank, after tensor parallelism.
        cp: ranks that share them.

    Raises:
        ValueError: if cp does not divide them.
    """
    if num_heads % cp:
        raise ValueError(
            f"cp={cp} does not divide {num_heads} query heads (those of one tensor-parallel rank): Ulysses gives each "
            "rank the same number of heads; choose another cp or tp, or the method 'ring' or 'allgather'"
        )


def count_sent_kv_heads(num_kv_heads: int, cp: int) -> int:
    """Return how many key/value heads travel: where cp does not divide them, each is copied, all equally often."""
    return math.lcm(num_kv_heads, cp)


def ulysses_attention(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, group: dist.ProcessGroup, order: str) -> Tensor:
    """Attend causally to the whole sequence.

    Args:
        q_BHSE: [batch, heads, seq / cp, head width], this rank's positions.
        k_BKSE: [batch, kv heads, seq / cp, head width], this rank's positions.
        v_BKSE: as the keys.
        group: the cp ranks that the sequence is split over.
        order: which positions a rank has; see `chunks`.

    Returns:
        [batch, heads, seq / cp, head width].

    Raises:
        ValueError: if cp does not divide the heads.
    Communicates: an all-to-all of queries, keys and values over `group`, and one of the results: (cp - 1) / cp x their
        bytes on one rank; the same in backward.
    """
    cp, num_heads = group.size(), q_BHSE.shape[1]
    check_heads(num_heads, cp)
    copies = count_sent_kv_heads(k_BKSE.shape[1], cp) // k_BKSE.shape[1]
    k_BKSE, v_BKSE = k_BKSE.repeat_interleave(copies, dim=1), v_BKSE.repeat_interleave(copies, dim=1)
    # Neighbouring query heads read the same key/value head, so equal slices of both still belong together.
    by_rank = [x.unflatten(1, (cp, -1)).movedim(1, 0) for x in (q_BHSE, k_BKSE, v_BKSE)]
    widths = [x.shape[2] for x in by_rank]
    received = exchange_with_ranks(torch.cat(by_rank, dim=2), group)  # [rank's positions, batch, my heads, ...]
    whole = sort_parts(torch.cat(received.unbind(0), dim=-2), -2, cp, order)
    q_BHSE, k_BKSE, v_BKSE = whole.split(widths, dim=1)
    mixed_BHSE = attend(q_BHSE, k_BKSE, v_BKSE, None, True)
    parts = unsort_parts(mixed_BHSE, 2, cp, order).unflatten(2, (cp, -1)).movedim(2, 0)
    returned = exchange_with_ranks(parts, group)  # [rank's heads, batch, heads / cp, my positions, head width]
    return torch.cat(returned.unbind(0), dim=1)
