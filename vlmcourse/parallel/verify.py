"""Checks of what lies where: weights that are whole and equal on all ranks, or sharded over them.

Enters: a distributed model and what it should be. Leaves: nothing, or an error that names what is otherwise. Used by
`apply.check_strategy`.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from vlmcourse.config import ParallelConfig
from vlmcourse.layout import Layout
from vlmcourse.parallel.comm import local_part, sum_over_ranks
from vlmcourse.parallel.fsdp import count_wrong_prefetch, find_blocks, find_units
from vlmcourse.parallel.ranks import Ranks, answers


def check_sharding(model: nn.Module, config: ParallelConfig, layout: Layout, ranks: Ranks, where: str) -> None:
    """Refuse weights that are not sharded as a configuration says; `where` begins the message.

    Raises:
        RuntimeError: naming the first part or parameter that is not.
    Communicates: an all-reduce of 16 bytes.
    """
    parts = (model, *find_units(model))
    plain = [type(part).__name__ for part in parts if not isinstance(part, FSDPModule)]
    if plain:
        raise RuntimeError(f"{where}: {len(plain)} parts are not wrapped by fully_shard, the first a {plain[0]}")
    wrong = [type(part).__name__ for part in parts[1:] if keeps_weights(part) != (config.strategy == "zero2")]
    if wrong:
        does = "free" if config.strategy == "zero2" else "keep"
        raise RuntimeError(f"{where}: {len(wrong)} units {does} their gathered weights after forward, as {wrong[0]}")
    num_wrong = count_wrong_prefetch(find_blocks(model), config.prefetch)
    if num_wrong:
        raise RuntimeError(f"{where}: {num_wrong} blocks do not ask for weights as prefetch={config.prefetch} says")
    num_shards = layout.dp_shard * layout.cp
    whole = [name for name, p in model.named_parameters() if _num_parts(p, but="tp") != num_shards]
    if whole:
        raise RuntimeError(
            f"{where}: {len(whole)} parameters are not sharded over {num_shards} ranks, the first is {whole[0]}"
        )
    num_local = sum(local_part(p).numel() for p in model.parameters())
    num_full = sum(p.numel() for p in model.parameters())
    num_mine = sum(p.numel() / _num_parts(p) for p in model.parameters())
    if not answers():
        return  # what the ranks store together, none of them can say
    num_stored, num_expected = (round(n) for n in sum_over_ranks([num_local, num_mine], ranks))
    if num_local >= num_full or num_stored != num_expected:
        raise RuntimeError(
            f"{where}: this rank stores {num_local} elements of a model of {num_full}, and all {ranks.world_size} "
            f"ranks {num_stored} instead of {num_expected}: each must be on exactly one rank of a group that shards"
        )


def keeps_weights(unit: nn.Module) -> bool:
    """Whether an FSDP unit keeps its gathered weights between forward and backward (ZeRO-2)."""
    assert isinstance(unit, FSDPModule)
    group = unit._get_fsdp_state()._fsdp_param_group
    return group is not None and group.post_forward_mesh_info is None


def _num_parts(parameter: Tensor, but: str = "") -> int:
    """Return into how many pieces a parameter is cut, over all axes of its mesh except the one called `but`."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
    return math.prod(size for name, size, placement in sizes if name != but and not placement.is_replicate())


def check_equal_weights(model: nn.Module, ranks: Ranks) -> None:
    """Refuse ranks whose copies of the weights differ in any bit.

    Args:
        model: a plain model with whole parameters.
        ranks: this process's place.

    Raises:
        RuntimeError: naming the first parameter that differs from rank 0's.
    Communicates: one all-gather, 8 bytes a parameter and rank.
    """
    if not answers():
        return
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
