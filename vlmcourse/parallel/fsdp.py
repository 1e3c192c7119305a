"""Data parallelism with shards: every rank holds 1/N of weights, gradients and optimizer state (FSDP2, ZeRO-3).

Enters: a plain model. Leaves: the same object, its parameters replaced by shards along dimension 0 (`DTensor`). A
block's weights are all-gathered just before it runs and freed after, its gradients are reduce-scattered in backward:
3 (N - 1) / N x the weights' bytes sent by each of N ranks. FSDP2 is applied by calling `fully_shard` on the blocks;
FSDP1's wrapping policies are gone. Chapter 1.

Source: Rajbhandari et al. 2020 (ZeRO), section 7; torch.distributed.fsdp.fully_shard documentation.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from vlmcourse.parallel.ranks import Ranks


def apply_fsdp(model: nn.Module, ranks: Ranks, *, mesh: DeviceMesh | None = None) -> nn.Module:
    """Shard every parameter of `model` over all ranks, one unit a transformer block and one for the rest.

    Args:
        model: the same architecture on every rank; weights may differ, rank 0's win.
        ranks: this process's place.
        mesh: a one-axis mesh to shard over; by default one of all ranks, its axis named dp_shard.

    Returns:
        `model`, changed in place: parameters are `DTensor`s sharded on dimension 0.

    Raises:
        ValueError: if there are no blocks: the model would be gathered as a whole, which saves nothing at the peak.
    Communicates: now, a broadcast of all weights from rank 0; then, per forward, an all-gather of each block, and in
        backward another all-gather and a reduce-scatter of each block's gradients.
    """
    units = find_units(model)
    broadcast_weights(model)
    mesh = mesh or init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("dp_shard",))
    # Innermost first: a parameter belongs to the first call that sees it. The default `reshard_after_forward` frees a
    # unit's gathered weights after forward and keeps the root's, which backward needs first anyway.
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return what is gathered and freed together, besides the root unit with all the rest.

    These are the transformer blocks of all towers, the members of every `ModuleList` called `blocks`, and the embedding
    and output matrix (`embedding`, `lm_head`) where they are two: tied, they are one parameter of the root.

    Raises:
        ValueError: if there is no block.
    """
    named = [(name.split(".")[-1], module) for name, module in model.named_modules()]
    blocks = [block for name, part in named if name == "blocks" and isinstance(part, nn.ModuleList) for block in part]
    if not blocks:
        raise ValueError(
            f"FSDP finds no blocks in this {type(model).__name__}: it would gather the whole model at once. Keep the "
            "layers in a ModuleList called `blocks`, or call fully_shard on each layer and then on the model yourself"
        )
    embeddings = [part for name, part in named if name == "embedding" and isinstance(part, nn.Embedding)]
    heads = [part for name, part in named if name == "lm_head" and isinstance(part, nn.Linear)]
    tied = {id(embedding.weight) for embedding in embeddings} & {id(head.weight) for head in heads}
    return blocks + [part for part in (*embeddings, *heads) if heads and id(part.weight) not in tied]


@torch.no_grad()
def broadcast_weights(model: nn.Module) -> None:
    """Overwrite the parameters and buffers of every rank with rank 0's: sharding alone would mix different models.

    Communicates: one broadcast a tensor from rank 0.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
