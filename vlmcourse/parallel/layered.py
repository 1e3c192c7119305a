"""One layer at a time: FSDP2 whose weights come from main memory when their layer computes, and none ahead of it.

Enters: a model that `apply_fsdp` has sharded with the units of `find_layers`. Leaves: the same model, in which no unit
asks for another's weights, and in which gradients on their way to other ranks are gone before the next unit comes. Of
weights a device then holds one unit (a block, the embedding, the output matrix or the projector) and what belongs to
none: position embeddings and norms, and a tied embedding. It is the slowest way, because nothing overlaps. What layers
keep for backward is another matter: recompute them ([activations]). Chapter 5.

Source: Rajbhandari et al. 2021 (ZeRO-Infinity), section 5; torch 2.13.0, `distributed/fsdp/_fully_shard/`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from vlmcourse.models.vlm import VLM
from vlmcourse.parallel.fsdp import find_units
from vlmcourse.parallel.ranks import Ranks


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return what is gathered and freed together where one layer at a time comes: the usual units and the projector.

    Raises:
        ValueError: if there is no block.
    """
    return find_units(model) + ([model.projector] if isinstance(model, VLM) else [])


def take_one_at_a_time(model: nn.Module) -> None:
    """Let no unit of a sharded model be gathered ahead, and none be followed by the gradients of the one before.

    Args:
        model: as `apply_fsdp` returns it, with `units=find_layers(model)` and without prefetching.
    """
    for unit in _units(model):
        unit.set_modules_to_forward_prefetch([])
        # An empty list means PyTorch's own order, in which the next unit is gathered ahead; itself is there already.
        unit.set_modules_to_backward_prefetch([unit])
        unit._set_unshard_async_op(True)  # on a GPU: gathered in the stream that computes, so never early
        module: Any = unit
        # Before the hook by which FSDP gathers a unit for backward.
        module.register_forward_hook(partial(_forget_when_needed, model), prepend=True)
        if isinstance(unit, nn.Embedding):
            module.set_unshard_in_backward(False)  # its backward reads ids alone


def check_one_at_a_time(model: nn.Module, ranks: Ranks) -> None:
    """Refuse a sharded model of which more than one unit would be whole at a time.

    Args:
        model: as `take_one_at_a_time` leaves it.
        ranks: this process's place.

    Raises:
        RuntimeError: naming how many units are kept after forward, or ask for another one's weights.
    """
    where = f"rank {ranks.rank}: offload.layered with parallel.strategy = 'fsdp'"
    units = _units(model)
    kept = [group for unit in units if unit is not model for group in _groups(unit) if not group._reshard_after_forward]
    if kept:
        raise RuntimeError(f"{where}: {len(kept)} of {len(units)} units stay whole after forward: none may")
    asking = 0
    for unit in units:
        state: Any = unit._get_fsdp_state()
        asking += state._states_to_backward_prefetch != [state] or bool(state._states_to_forward_prefetch)
    missing = [name for name, part in model.named_modules() if _is_layer(part, model) and part not in units]
    if asking or missing:
        raise RuntimeError(
            f"{where}: {asking} of {len(units)} units ask for the weights of others, and {len(missing)} layers are no "
            "units: one unit at a time may be whole"
        )


def _is_layer(part: nn.Module, model: nn.Module) -> bool:
    return any(part is layer for layer in find_layers(model))


def _units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _root(model: nn.Module) -> Any:
    assert isinstance(model, FSDPModule)
    return model


def _groups(unit: Any) -> list[Any]:
    return list(unit._get_fsdp_state()._fsdp_param_groups)


def _forget_when_needed(model: nn.Module, module: nn.Module, args: Any, output: Any) -> None:
    """Before a unit is gathered for backward, let go of what the unit before it has sent."""
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda gradient: _forget_sent(model))


def _forget_sent(model: nn.Module) -> None:
    """Wait for gradients on their way to other ranks and free their buffers, which FSDP keeps for one unit more."""
    communication = _root(model)._get_fsdp_state()._comm_ctx
    for sent in communication.reduce_scatter_states:
        if sent.event is not None:
            torch.cuda.current_stream().wait_event(sent.event)
    communication.reduce_scatter_states.clear()
