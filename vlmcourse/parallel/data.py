"""Data parallelism with whole weights: every rank holds all weights and gradients (DDP), and all or a part of the
optimizer's state (ZeRO-1).

Enters: a plain model. Leaves: the model in `DistributedDataParallel`, which averages gradients over the ranks during
backward: an all-reduce of buckets, 2 (N - 1) / N x the gradient's bytes sent by each of N ranks. For ZeRO-1 also an
optimizer that keeps state for some parameters only, updates those, and hands the new weights to the others. Chapter 1.

Source: Rajbhandari et al. 2020 (ZeRO), section 5; torch.distributed.optim.ZeroRedundancyOptimizer documentation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vlmcourse.parallel.ranks import Ranks, answers


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
    return DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False, init_sync=answers())


def shard_optimizer(groups: Iterable[dict[str, Any]], optimizer_class: type[Optimizer], **options: Any) -> Optimizer:
    """Build an optimizer of which each rank keeps about 1/N (ZeRO-1): whole parameters, dealt out by size.

    Args:
        groups: parameter groups as for `optimizer_class`; the same parameters, in the same order, on every rank.
        optimizer_class: such as `torch.optim.AdamW`.
        **options: of `optimizer_class`.

    Returns:
        The sharded optimizer; `.optim` is this rank's own part.

    Raises:
        RuntimeError: if this rank was given every parameter although there are several ranks, which shards nothing.
    Communicates: in each step a broadcast of each rank's updated parameters: together the bytes of the weights.
    """
    # Here, and not above: the import compiles ten other optimizers, half a second in every rank of every strategy.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    # PyTorch deals whole tensors out greedily, the largest first. Unlike in the paper DDP all-reduces the gradients
    # instead of reduce-scattering them, so a step moves 3 (N - 1) / N x the weights' bytes instead of 2.
    optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=optimizer_class, **options)
    mine = sum(p.numel() for group in optimizer.optim.param_groups for p in group["params"])
    everything = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    if mine == everything:
        raise RuntimeError(
            f"rank {dist.get_rank()}: it keeps the optimizer state of all {everything} parameters: with "
            f"{dist.get_world_size()} ranks and this model ZeRO-1 shards nothing; choose 'ddp'"
        )
    return optimizer


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return what keeps the state on this rank: its own part of a sharded optimizer (ZeRO-1), else the optimizer."""
    sharding: Any = sys.modules.get("torch.distributed.optim")  # not imported where nothing is sharded
    own: Any = optimizer
    return own.optim if sharding and isinstance(own, sharding.ZeroRedundancyOptimizer) else own
