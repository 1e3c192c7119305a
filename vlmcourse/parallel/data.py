"""Data parallelism with whole copies: every rank holds all weights, gradients and optimizer state (DDP).

Enters: a plain model. Leaves: the model in `DistributedDataParallel`, which averages gradients over the ranks during
backward: an all-reduce of buckets, 2 (N - 1) / N x the gradient's bytes sent by each of N ranks. Chapter 1.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.parallel.ranks import Ranks


def apply_ddp(model: nn.Module, ranks: Ranks) -> DistributedDataParallel:
    """Give every rank rank 0's weights, and average gradients over all ranks in every backward.

    Args:
        model: the same architecture on every rank, on `ranks.device`; weights may differ, rank 0's win.
        ranks: this process's place.

    Returns:
        The wrapped model; the plain one is its `.module`.
    Communicates: now, a broadcast of all weights from rank 0; then an all-reduce of all gradients in each backward.
    """
    # Gradients live inside the buckets that are reduced (no second copy of them), and buffers are constants that every
    # rank computed alike.
    return DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
