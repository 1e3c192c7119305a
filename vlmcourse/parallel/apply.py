"""Turn a plain model into one that trains on all ranks, and prove that it is what its strategy's name says.

Enters: a plain model with no word of ranks in it, and `ParallelConfig`. Leaves: the wrapped model. A new strategy gets
a file of its own, a line in `apply_strategy`, and a check in `check_strategy`: equal losses do not show that a strategy
silently did something simpler, so wrapper, sizes and shards are checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.config import ParallelConfig, check_world_size
from vlmcourse.parallel.comm import local_part, sum_over_ranks
from vlmcourse.parallel.data import apply_ddp
from vlmcourse.parallel.fsdp import apply_fsdp, find_units
from vlmcourse.parallel.ranks import Ranks


def apply_strategy(model: nn.Module, config: ParallelConfig, ranks: Ranks) -> nn.Module:
    """Distribute `model` over the ranks as `config.strategy` says, and check that it happened.

    Args:
        model: a plain model on CPU or `ranks.device`, its towers already frozen where wanted.
        config: the strategy.
        ranks: this process's place.

    Returns:
        `single`: the model itself. `ddp`: it in `DistributedDataParallel`. `fsdp`: itself, its parameters sharded.

    Raises:
        ValueError: if the strategy cannot use this number of ranks.
        RuntimeError: if the result is not what the strategy's name says.
    Communicates: a broadcast of all weights from rank 0 where there are several ranks, and a few bytes of checks.
    """
    check_world_size(config.strategy, ranks.world_size)
    if config.strategy == "ddp":
        wrapped = apply_ddp(model.to(ranks.device), ranks)
    elif config.strategy == "fsdp":
        wrapped = apply_fsdp(model, ranks)  # moves to the device block by block, as it shards
    else:
        wrapped = model.to(ranks.device)
    check_strategy(wrapped, config.strategy, ranks)
    return wrapped


def check_strategy(model: nn.Module, strategy: str, ranks: Ranks) -> None:
    """Refuse a model that is not distributed as `strategy` says.

    Raises:
        ValueError: if the strategy cannot use this number of ranks.
        RuntimeError: if the wrapper, the group's size, the shards or the equality of weights over ranks is wrong.
    Communicates: ddp: an all-gather of 8 bytes a parameter; fsdp: an all-reduce of 8 bytes.
    """
    check_world_size(strategy, ranks.world_size)
    where = f"rank {ranks.rank}: strategy {strategy!r}"
    if strategy != "single":
        group_size = dist.get_world_size() if dist.is_initialized() else 0
        if group_size != ranks.world_size:
            raise RuntimeError(f"{where}: the process group has {group_size} ranks instead of {ranks.world_size}")
    if strategy == "ddp":
        if not isinstance(model, DistributedDataParallel):
            raise RuntimeError(f"{where}: the model is a {type(model).__name__}, not a DistributedDataParallel")
        check_equal_weights(model.module, ranks)
    elif strategy == "fsdp":
        _check_sharding(model, ranks, where)
    elif isinstance(model, (DistributedDataParallel, FSDPModule)):
        raise RuntimeError(f"{where}: the model is wrapped as {type(model).__name__}, which waits for other ranks")


def _check_sharding(model: nn.Module, ranks: Ranks, where: str) -> None:
    plain = [type(part).__name__ for part in (model, *find_units(model)) if not isinstance(part, FSDPModule)]
    if plain:
        raise RuntimeError(f"{where}: {len(plain)} parts are not wrapped by fully_shard, the first a {plain[0]}")
    whole = [
        name for name, p in model.named_parameters() if not (isinstance(p, DTensor) and p.placements[0].is_shard())
    ]
    if whole:
        raise RuntimeError(f"{where}: {len(whole)} parameters are not sharded, the first is {whole[0]}")
    num_local = sum(local_part(p).numel() for p in model.parameters())
    num_full = sum(p.numel() for p in model.parameters())
    num_stored = round(sum_over_ranks([num_local], ranks)[0])
    if num_local >= num_full or num_stored != num_full:
        raise RuntimeError(
            f"{where}: this rank stores {num_local} elements and all {ranks.world_size} ranks {num_stored}, of a "
            f"model of {num_full}: each element must be on exactly one rank"
        )


def check_equal_weights(model: nn.Module, ranks: Ranks) -> None:
    """Refuse ranks whose copies of the weights differ in any bit.

    Args:
        model: a plain model with whole parameters.
        ranks: this process's place.

    Raises:
        RuntimeError: naming the first parameter that differs from rank 0's.
    Communicates: one all-gather, 8 bytes a parameter and rank.
    """
    names = [name for name, _ in model.named_parameters()]
    mine = torch.tensor([fingerprint(p) for p in model.parameters()], dtype=torch.int64, device=ranks.device)
    everyone = [torch.empty_like(mine) for _ in range(ranks.world_size)]
    dist.all_gather(everyone, mine)
    for rank, theirs in enumerate(everyone):
        differing = (theirs != everyone[0]).nonzero().flatten().tolist()
        if differing:
            raise RuntimeError(
                f"rank {ranks.rank}: {len(differing)} weights of rank {rank} differ from rank 0's, the first is "
                f"{names[differing[0]]}: all ranks must start from rank 0's weights"
            )


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a 63-bit hash of a tensor's bytes; equal tensors have equal ones."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return int.from_bytes(hashlib.blake2b(raw.numpy().tobytes(), digest_size=8).digest(), "big") >> 1


def unwrap(model: nn.Module) -> nn.Module:
    """Return the plain model inside a DDP wrapper; any other model as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Run forward and backward of one micro-batch with gradients exchanged (`enabled`) or only added up locally.

    All but the last micro-batch of an optimizer step leave them local: one exchange a step is enough, since sums can be
    added in any order. Under fsdp the gradients kept meanwhile are whole, not shards.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        yield
    elif isinstance(model, DistributedDataParallel) and not enabled:
        with model.no_sync():
            yield
    else:
        yield
