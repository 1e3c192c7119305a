"""When ranks exchange gradients: with the last micro-batch of a step, or with every one.

Enters: a distributed model and one micro-batch's place in its step. Leaves: a context for its forward and backward, and
a check that communication really was off. What each strategy can do, and what waiting costs in memory:

- whole weights (DDP, ZeRO-1): `no_sync`; nothing, since gradients are whole anyway.
- shards (FSDP2): `set_requires_gradient_sync`; each rank then keeps whole gradients until the last micro-batch. Where
  these do not fit, exchange with every micro-batch: a reduce-scatter each, and only shards are kept.
- shards in several copies (HSDP): the same choice. With every micro-batch, only the reduce-scatter inside a copy is
  made (fast links), and `set_requires_all_reduce` leaves the all-reduce between copies (slow links) to the last.
- a pipeline: torch.distributed.pipelining does it, always with the last micro-batch.
- a DeepSpeed engine: `set_gradient_accumulation_boundary`; from ZeRO-2 on it exchanges with every micro-batch all the
  same, because it keeps no whole gradients.

Chapter 2. Source: documentation of DistributedDataParallel.no_sync, FSDPModule and DeepSpeedEngine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.parallel.comm import local_part
from vlmcourse.parallel.counting import CollectiveCall, CollectiveCounter

ENGINE_METHODS = (
    *("backward", "step", "set_gradient_accumulation_boundary", "is_gradient_accumulation_boundary"),
    "zero_optimization_partition_gradients",
)
"""What a DeepSpeed engine is known by: the package need not be installed to tell."""


def is_engine(model: nn.Module) -> bool:
    """Whether a model is a DeepSpeed engine, which wants to run backward and the step itself."""
    return all(callable(getattr(model, name, None)) for name in ENGINE_METHODS)


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool, every: bool = False) -> Iterator[None]:
    """Run forward and backward of one micro-batch with gradients exchanged (`enabled`) or only added up locally.

    All but the last micro-batch of an optimizer step leave them local: one exchange a step is enough, since sums can be
    added in any order.

    Args:
        model: as `apply_strategy` returns it, a DeepSpeed engine, or a plain model, for which nothing is to be done; no
            `PipelinedModel`.
        enabled: whether this is the last micro-batch of the step.
        every: for shards only: reduce-scatter gradients with every micro-batch, and keep shards of them instead of
            whole ones. Between copies (HSDP) they are still all-reduced once, with the last.
    Communicates: nothing by itself; the backward inside exchanges gradients or does not.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled or every)
        model.set_requires_all_reduce(enabled)  # after the line before, which sets both
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif isinstance(model, DistributedDataParallel) and not enabled:
        with model.no_sync():
            yield
    elif is_engine(model):
        engine: Any = model
        engine.set_gradient_accumulation_boundary(enabled)
        yield
    else:
        yield


def run_backward(model: nn.Module, loss: Tensor) -> None:
    """Add a loss's gradients to `.grad`; an engine does it itself, and must not divide by its accumulation steps."""
    if is_engine(model):
        engine: Any = model
        engine.backward(loss, scale_wrt_gas=False)  # the loss is a part of the whole step's mean already
    else:
        loss.backward()


# --- What waiting costs ---------------------------------------------------------------------------------------------


def estimate_waiting_bytes(model: nn.Module, every: bool = False) -> int:
    """Return the bytes of gradients that this rank holds between two micro-batches of a step, from shapes alone.

    Args:
        model: as `apply_strategy` returns it; a pipeline's stages one by one.
        every: as in `gradient_sync`.

    Returns:
        Bytes, in the type of the weights: whole gradients, or shards where FSDP exchanges with `every` micro-batch;
        those that wait for the other copies (HSDP) have rows of zeros, as many as make all shards equal. Parts that
        tensor parallelism makes stay parts.
    """
    whole = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            num_elements = parameter.numel() if isinstance(model, FSDPModule) else local_part(parameter).numel()
            if isinstance(parameter, DTensor) and isinstance(model, FSDPModule):
                num_elements = _num_shard_elements(parameter) if every else num_elements // _tp_degree(parameter)
            whole += num_elements * parameter.element_size()
    return whole


def _num_shard_elements(parameter: DTensor) -> int:
    """Return the elements of what a rank keeps of a parameter's gradient after a reduce-scatter."""
    mesh, placements = parameter.device_mesh, parameter.placements
    names = mesh.mesh_dim_names or ()
    axes = list(zip(names, mesh.shape, placements, strict=True))
    if not any(name == "dp_replicate" for name, _, _ in axes):
        return parameter.to_local().numel()
    num_shards = math.prod(size for name, size, placement in axes if name != "tp" and not placement.is_replicate())
    num_whole = parameter.numel() // _tp_degree(parameter)
    is_cut_by_rows = any(name == "tp" and placement.is_shard(0) for name, _, placement in axes)
    num_rows = parameter.shape[0] // (_tp_degree(parameter) if is_cut_by_rows else 1)
    return -(-num_rows // num_shards) * (num_whole // num_rows)


def _tp_degree(parameter: DTensor) -> int:
    """Return into how many parts tensor parallelism cuts a parameter."""
    mesh = parameter.device_mesh
    axes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
    return next((size for name, size, placement in axes if name == "tp" and not placement.is_replicate()), 1)


def measure_waiting_bytes(model: nn.Module) -> int:
    """Return the bytes of gradients that this rank holds now.

    They are in `.grad`; where FSDP keeps them whole, apart from it; and, under HSDP, in sums over the ranks of this
    copy alone, one for each unit, which wait for those of the other copies.
    """
    held = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    for group in _param_groups(model):
        held += [group._partial_reduce_output] if group._partial_reduce_output is not None else []
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            whole = (parameter.unsharded_accumulated_grad, unsharded.grad if unsharded is not None else None)
            held += [local_part(gradient) for gradient in whole if gradient is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _param_groups(model: nn.Module) -> list[Any]:
    """Return what FSDP2 gathers and reduces together, all units of a model."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]


# --- Was it really off? ---------------------------------------------------------------------------------------------


@contextmanager
def refuse_exchange(model: nn.Module, where: str) -> Iterator[None]:
    """Run a micro-batch whose gradients must stay on their rank, and refuse it if they did not.

    Counting takes time, so one micro-batch of a run is enough.

    Args:
        model: as in `gradient_sync`, without `every`.
        where: how the error names the micro-batch.

    Raises:
        RuntimeError: if gradients were exchanged.
    """
    with CollectiveCounter() as counter:
        yield
    loud = find_exchanges(model, counter.calls)
    if loud:
        size = sum(call.payload_bytes for call in loud)
        raise RuntimeError(
            f"{where}: gradients were exchanged ({len(loud)} x {loud[0].kind}, {size:,} bytes), but only the last "
            "micro-batch of a step should: run forward and backward of the others inside gradient_sync(model, False)"
        )


def find_exchanges(model: nn.Module, calls: list[CollectiveCall]) -> list[CollectiveCall]:
    """Return those calls of a forward and backward that exchanged gradients.

    Args:
        model: as in `gradient_sync`.
        calls: what a `CollectiveCounter` saw.

    Returns:
        DDP's all-reduces, FSDP's reduce-scatters and all-reduces, and all of these of a DeepSpeed engine of ZeRO-0 or
        1; none of an engine that keeps no whole gradients (ZeRO-2 and 3): it must exchange with every micro-batch.
        Context parallelism and SyncBatchNorm call some of the same kind in the same groups, for activations; these say
        so, and are left out.
    """
    if isinstance(model, DistributedDataParallel):
        group: Any = model.process_group
        wanted = {("all-reduce", group.group_name)}
    elif is_engine(model):
        engine: Any = model
        name = engine.seq_data_parallel_group.group_name
        keeps_whole = not engine.zero_optimization_partition_gradients()
        wanted = {(kind, name) for kind in ("all-reduce", "reduce", "reduce-scatter") if keeps_whole}
    else:
        wanted = set()
        for group in _param_groups(model):
            info = group.mesh_info
            wanted |= {("reduce-scatter", info.shard_process_group.group_name)}
            copies = getattr(info, "replicate_process_group", None)
            wanted |= {("all-reduce", copies.group_name)} if copies is not None else set()
    return [call for call in calls if (call.kind, call.group_name) in wanted and not call.of_activations]
