"""Data parallelism with shards: every rank holds 1/N of weights, gradients and optimizer state (FSDP2, ZeRO-3).

Enters: a plain model. Leaves: the same object, its parameters replaced by shards along dimension 0 (`DTensor`). A
block's weights are all-gathered just before it runs and freed after, its gradients are reduce-scattered in backward:
3 (N - 1) / N x the weights' bytes sent by each of N ranks. Weights that are kept from forward to backward (ZeRO-2) are
gathered once: 2 (N - 1) / N. FSDP2 is applied by calling `fully_shard` on the blocks; FSDP1's wrapping policies are
gone. With offloading, shards of weights and gradients lie in main memory, and are copied to the device to be gathered.
Chapters 1 and 5.

Source: Rajbhandari et al. 2020 (ZeRO), section 7; torch.distributed.fsdp.fully_shard documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from vlmcourse.models.vlm import VLM
from vlmcourse.parallel.comm import local_part, max_over_ranks
from vlmcourse.parallel.ranks import Ranks, share_mesh
from vlmcourse.state_offload import OffloadConfig


def apply_fsdp(
    model: nn.Module,
    ranks: Ranks,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    prefetch: int = 0,
    are_equal: bool = False,
    offload: OffloadPolicy | None = None,
    units: Sequence[nn.Module] | None = None,
) -> nn.Module:
    """Shard every parameter of `model`, one unit a transformer block and one for the rest.

    Args:
        model: the same architecture on every rank, with weights or on the meta device; rank 0's weights win, and at
            least rank 0 has some.
        ranks: this process's place.
        mesh: what to shard over: one axis, or two of which the first counts whole copies (HSDP); by default one axis of
            all ranks, named dp_shard.
        reshard_after_forward: free a block's gathered weights after its forward and gather them again in backward
            (ZeRO-3), or keep them until backward has used them (ZeRO-2: less to send, all weights in memory).
        prefetch: blocks whose weights are asked for ahead of the one that computes; 0 leaves it to PyTorch, which asks
            for one in backward and on a GPU for one in forward.
        are_equal: whether the ranks of `mesh` have the same weights already; they are then neither sent nor made.
        offload: a `CPUOffloadPolicy` keeps the shards of weights and gradients in main memory, and with them whatever
            an optimizer makes of them; by default all is on the device.
        units: what is gathered together, besides the root with all the rest; by default what `find_units` returns.

    Returns:
        `model`, changed in place: parameters are `DTensor`s sharded on dimension 0.

    Raises:
        ValueError: if there are no blocks: the model would be gathered as a whole, which saves nothing at the peak.
    Communicates: now, a broadcast of all weights from rank 0; then, per forward, an all-gather of each block, and in
        backward another all-gather (ZeRO-3) and a reduce-scatter of each block's gradients; over copies also an
        all-reduce of the shards of gradients.
    """
    units = find_units(model) if units is None else units
    is_whole_vlm = type(model) is VLM  # and no stage of one, whose input may need a gradient; sharding changes the type
    mesh = mesh or share_mesh(ranks, (ranks.world_size,), ("dp_shard",))
    whole = None if are_equal else _take_from_meta(model, ranks)
    if whole is None and not are_equal:
        broadcast_weights(model)
    offload = offload or OffloadPolicy()
    # Innermost first: a parameter belongs to the first call that sees it. The root keeps its gathered weights after
    # forward whatever is asked, because backward needs them first.
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward, offload_policy=offload)
    reshard_root = False if not reshard_after_forward else None
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_root, offload_policy=offload)
    if whole is not None:
        model.to_empty(device="cpu" if isinstance(offload, CPUOffloadPolicy) else ranks.device)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole, options=options)
    if is_whole_vlm:
        _skip_frozen_vision(cast(VLM, model))
    set_prefetch(find_blocks(model), prefetch)
    return model


def build_offload_policy(offload: OffloadConfig, ranks: Ranks) -> OffloadPolicy:
    """Return FSDP2's policy for the section [offload]; pages are locked only where a GPU copies from them."""
    if offload.is_plain:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=offload.pin_memory and ranks.device.type == "cuda")


def check_fsdp_offload(model: nn.Module, offload: OffloadConfig, ranks: Ranks) -> None:
    """Refuse a sharded model whose units move something else than the section [offload] says.

    On CPU ranks all shards lie in main memory anyway, so each unit's policy is looked at too.

    Args:
        model: as `apply_fsdp` returns it.
        offload: what was asked for.
        ranks: this process's place.

    Raises:
        RuntimeError: if a unit has another policy, or a shard lies on another device.
    """
    wanted = build_offload_policy(offload, ranks)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    wrong = [group.offload_policy for group in groups if group.offload_policy != wanted]
    where = f"rank {ranks.rank}: {offload} with parallel.strategy = 'fsdp'"
    if wrong or not groups:
        found = wrong[0] if wrong else "nothing sharded"
        raise RuntimeError(f"{where}: {len(wrong)} of {len(groups)} units have {found} instead of {wanted}")
    expected = "cpu" if isinstance(wanted, CPUOffloadPolicy) else ranks.device.type
    elsewhere = [name for name, p in model.named_parameters() if local_part(p).device.type != expected]
    if elsewhere:
        raise RuntimeError(f"{where}: {len(elsewhere)} shards are not on {expected!r}, the first is {elsewhere[0]}")


def _take_from_meta(model: nn.Module, ranks: Ranks) -> dict[str, Any] | None:
    """Where a rank has a model without weights, make it so on all and return rank 0's weights there, else nothing.

    Returns:
        None if every rank has weights. Else rank 0's state dict on rank 0 and an empty one elsewhere: no rank but that
        one ever holds more than its shards.
    """
    has_none = any(p.is_meta for p in model.parameters())
    if not max_over_ranks([has_none], ranks)[0]:
        return None
    whole = dict(model.state_dict()) if ranks.is_main else {}
    if any(tensor.is_meta for tensor in whole.values()):
        raise ValueError("rank 0's model is on the meta device: rank 0 must have the weights that all start from")
    model.to("meta")
    return whole


def _skip_frozen_vision(model: VLM) -> None:
    """Let the blocks of a frozen vision tower never be gathered for a backward pass, as none reaches them.

    Nothing trained comes before them. PyTorch would gather them ahead for the unit that comes after them in forward.
    """
    if not any(parameter.requires_grad for parameter in model.vision.parameters()):
        for block in model.vision.blocks:
            assert isinstance(block, FSDPModule)
            block.set_unshard_in_backward(False)


def set_prefetch(units: Sequence[nn.Module], ahead: int) -> None:
    """Let each unit ask for the weights of the next `ahead` units before it computes, in forward and in backward.

    Args:
        units: in the order in which forward runs them; all given to `fully_shard`. Those that no backward reaches are
            not asked for there.
        ahead: each costs the memory of one gathered unit; 0 leaves it to PyTorch.
    """
    for unit, forward, backward in _plan_prefetch(units, ahead):
        unit.set_modules_to_forward_prefetch(forward)
        unit.set_modules_to_backward_prefetch(backward)


def count_wrong_prefetch(units: Sequence[nn.Module], ahead: int) -> int:
    """Return how many of `units` do not ask for the weights of others as `set_prefetch` lets them.

    A unit that asks for its own in backward asks for no other's: see `layered.take_one_at_a_time`.
    """
    num_wrong = 0
    for unit, forward, backward in _plan_prefetch(units, ahead):
        state = unit._get_fsdp_state()
        asked = state._states_to_forward_prefetch, state._states_to_backward_prefetch
        found = tuple([other for other in others if other is not state] for others in asked)
        num_wrong += found != tuple([other._get_fsdp_state() for other in others] for others in (forward, backward))
    return num_wrong


def _plan_prefetch(
    units: Sequence[nn.Module], ahead: int
) -> Iterator[tuple[FSDPModule, list[FSDPModule], list[FSDPModule]]]:
    """Yield each unit, those that it asks for in forward, and those in backward."""
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for i, unit in enumerate(sharded):
        before = sharded[max(0, i - ahead) : i][::-1]
        yield unit, sharded[i + 1 : i + 1 + ahead], [other for other in before if _is_gathered_in_backward(other)]


def _is_gathered_in_backward(unit: FSDPModule) -> bool:
    group = unit._get_fsdp_state()._fsdp_param_group
    return group is not None and group.unshard_in_backward


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return what is gathered and freed together, besides the root unit with all the rest.

    These are the transformer blocks of all towers, the members of everything called `blocks`, and the embedding
    and output matrix (`embedding`, `lm_head`) where they are two: tied, they are one parameter of the root.

    Raises:
        ValueError: if there is no block.
    """
    blocks = find_blocks(model)
    named = [(name.split(".")[-1], module) for name, module in model.named_modules()]
    if not blocks:
        raise ValueError(
            f"FSDP finds no blocks in this {type(model).__name__}: it would gather the whole model at once. Keep the "
            "layers in a ModuleList called `blocks`, or call fully_shard on each layer and then on the model yourself"
        )
    embeddings = [part for name, part in named if name == "embedding" and isinstance(part, nn.Embedding)]
    heads = [part for name, part in named if name == "lm_head" and isinstance(part, nn.Linear)]
    tied = {id(embedding.weight) for embedding in embeddings} & {id(head.weight) for head in heads}
    return blocks + [part for part in (*embeddings, *heads) if heads and id(part.weight) not in tied]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks of all towers, in the order in which forward runs them."""
    named = [(name.split(".")[-1], part) for name, part in model.named_modules()]
    return [block for name, part in named if name == "blocks" for block in part.children()]


@torch.no_grad()
def broadcast_weights(model: nn.Module) -> None:
    """Overwrite the parameters and buffers of every rank with rank 0's: sharding alone would mix different models.

    Communicates: one broadcast a tensor from rank 0.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
