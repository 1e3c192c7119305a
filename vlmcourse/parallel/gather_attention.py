"""Context parallelism by all-gather: every rank fetches all keys and values, and attends with its own queries.

Enters: each rank's part of the sequence as queries, keys and values. Leaves: the mixed values of its own queries.
Queries and results never travel, which suits grouped heads (few keys and values); the price is that every rank holds
the keys and values of the whole sequence while a layer runs, and in every layer's backward their whole gradient.

Source: the Llama 3 paper (arXiv:2407.21783), section 3.3.2.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vlmcourse.models.decoder import attend
from vlmcourse.parallel.chunks import chunks_of_rank, sort_parts
from vlmcourse.parallel.differentiable import gather_from_ranks


def gather_attention(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, group: dist.ProcessGroup, order: str) -> Tensor:
    """Attend causally to the whole sequence.

    Args:
        q_BHSE: [batch, heads, seq / cp, head width], this rank's positions.
        k_BKSE: [batch, kv heads, seq / cp, head width], this rank's positions.
        v_BKSE: as the keys.
        group: the cp ranks that the sequence is split over.
        order: which positions a rank has; see `chunks`.

    Returns:
        [batch, heads, seq / cp, head width].
    Communicates: an all-gather of keys and values over `group`, (cp - 1) x their bytes on one rank; in backward a
        reduce-scatter of their gradients, as many bytes.
    """
    cp, rank = group.size(), group.rank()
    parts = gather_from_ranks(torch.stack((k_BKSE, v_BKSE)), group)  # one message instead of two
    whole = sort_parts(torch.cat(parts.unbind(0), dim=-2), -2, cp, order)
    chunks = chunks_of_rank(rank, cp, order)
    mixed = [
        _attend_to_earlier(queries, whole[0], whole[1], chunk)
        for queries, chunk in zip(q_BHSE.chunk(len(chunks), dim=2), chunks, strict=True)
    ]
    return torch.cat(mixed, dim=2)


def _attend_to_earlier(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, chunk: int) -> Tensor:
    """Attend with the queries of one chunk to its own keys and all earlier ones; later ones are not even computed."""
    length = q_BHSE.shape[2]
    end = (chunk + 1) * length
    k_BKSE, v_BKSE = k_BKSE[:, :, :end], v_BKSE[:, :, :end]
    if chunk == 0:
        return attend(q_BHSE, k_BKSE, v_BKSE, None, True)
    visible_SS = torch.ones(length, end, dtype=torch.bool, device=q_BHSE.device).tril(end - length)
    return attend(q_BHSE, k_BKSE, v_BKSE, visible_SS, False)
