"""Which tensors of training state this rank keeps, and what each is: under any strategy, DeepSpeed's engines included.

Enters: a model as a Trainer holds it, and its optimizer. Leaves: tensors with the name of their owner; several may be
views of one storage, which a ledger counts once. An engine keeps flat copies of its own, which are found by the names
of its attributes, without importing DeepSpeed. Chapter 5.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from vlmcourse.parallel.data import local_optimizer
from vlmcourse.parallel.sync import is_engine

WEIGHTS, GRADIENTS, OPTIMIZER, BUFFERS = "weights", "gradients", "optimizer", "buffers"
TO_MAIN_MEMORY = (
    *("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload"),
    "temp_grad_buffer_for_gpu_offload",
)
"""Where stages 1 and 2 keep what is on its way to main memory and back, with offloading."""
Owned = tuple[str, Tensor]
"""What the bytes are, and a tensor that holds some of them."""


def find_state(model: nn.Module, optimizer: Any = None) -> Iterator[Owned]:
    """Yield every tensor of training state that this rank keeps at this moment.

    Args:
        model: plain, in DDP, sharded by FSDP2, or a DeepSpeed engine.
        optimizer: the model's, as a Trainer holds it (an `EngineOptimizer` and a `ZeroRedundancyOptimizer` too); None
            leaves its state out.

    Returns:
        Owner and tensor. weights: what forward reads, shards where they are shards; beside its shard the whole of a
        parameter that ZeRO-3 does not let go (stage3_param_persistence_threshold), from its first use on. gradients:
        whole ones, or this rank's part once they are exchanged. optimizer: moments, step counters, and fp32 master
        copies. buffers: what an engine keeps to communicate in.
    """
    if is_engine(model):
        yield from _find_in_engine(model, has_optimizer=optimizer is not None)
        return
    parameters = list(model.parameters())
    yield from ((WEIGHTS, parameter) for parameter in parameters)
    yield from _gradients(parameters)
    if optimizer is not None:
        yield from _optimizer_state(local_optimizer(optimizer))


def find_torch_optimizer(model: nn.Module, optimizer: Any) -> Any:
    """Return PyTorch's optimizer that updates this rank's part, and whose step hooks run; None if there is none."""
    if optimizer is None:
        return None
    if not is_engine(model):
        return local_optimizer(optimizer)
    engine: Any = model
    return getattr(engine.optimizer, "optimizer", engine.optimizer)  # without ZeRO it is PyTorch's already


def _find_in_engine(engine: Any, *, has_optimizer: bool) -> Iterator[Owned]:
    """Yield what an engine keeps.

    Parameters of stages 1 and 2 are views of flat weights; of stage 3 they are empty where they are not kept whole.
    """
    parameters = list(engine.module.parameters())
    zero = engine.optimizer
    flat = getattr(zero, "bit16_groups_flat", ())
    """Weights of stages 1 and 2, in their own type in spite of the name, filled up until the ranks divide them."""
    yield from ((WEIGHTS, tensor) for tensor in flat)
    yield from ((WEIGHTS, getattr(parameter, "ds_tensor", parameter)) for parameter in parameters)
    kept_whole = (p.data for p in parameters if getattr(p, "ds_persist", False))
    yield from ((WEIGHTS, whole) for whole in kept_whole if whole.numel())
    yield from _gradients(parameters)
    yield from ((GRADIENTS, part) for part in _tensors(getattr(zero, "averaged_gradients", None)))
    yield from ((GRADIENTS, part) for part in _tensors(getattr(zero, "grad_partitions_flat_buffer", None)))
    for bucket in _values(getattr(zero, "ipg_buckets", None)):
        yield from ((BUFFERS, tensor) for tensor in _tensors(getattr(bucket, "buffer", None)))
    yield from ((BUFFERS, tensor) for name in TO_MAIN_MEMORY for tensor in _tensors(getattr(zero, name, None)))
    masters = _tensors(
        [getattr(zero, name, None) for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")]
    )
    yield from _gradients(masters)
    if has_optimizer:
        yield from ((OPTIMIZER, master) for master in masters)
        yield from _optimizer_state(find_torch_optimizer(engine, zero))


def _gradients(parameters: Iterable[Tensor]) -> Iterator[Owned]:
    return ((GRADIENTS, parameter.grad) for parameter in parameters if parameter.grad is not None)


def _optimizer_state(optimizer: Optimizer) -> Iterator[Owned]:
    for values in optimizer.state.values():
        yield from ((OPTIMIZER, value) for value in values.values() if isinstance(value, Tensor))


def _values(collection: Any) -> list[Any]:
    return list(collection.values()) if isinstance(collection, dict) else []


def _tensors(found: Any) -> list[Tensor]:
    """Return the tensors in lists and dicts inside each other; there may be None in the place of any."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, dict):
        found = list(found.values())
    return [tensor for part in found for tensor in _tensors(part)] if isinstance(found, (list, tuple)) else []
