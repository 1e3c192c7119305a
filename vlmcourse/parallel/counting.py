"""Count the collectives of a training step: kind, payload and group of every call that one rank makes.

Enters: whatever runs inside `with CollectiveCounter()`. Leaves: a list of `CollectiveCall`, and sums by kind. DDP's
reducer, FSDP2, DTensor, functional collectives, pipelines' sends and plain `torch.distributed` calls are all seen,
since each ends in an operation that PyTorch dispatches. What a collective sends is then the ring formula's answer
(`planner/network.py`), not a measurement: NCCL and gloo may choose another algorithm. Chapter 1.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from vlmcourse.planner.network import RING_PASSES, Traffic, ring_sent_bytes

SEND = "send"
RECEIVE = "receive"
KINDS = {
    "c10d.allreduce_": "all-reduce",
    "c10d.allreduce_coalesced_": "all-reduce",
    "c10d.allgather_": "all-gather",
    "c10d.allgather_coalesced_": "all-gather",
    "c10d.allgather_into_tensor_coalesced_": "all-gather",
    "c10d._allgather_base_": "all-gather",
    "c10d.reduce_scatter_": "reduce-scatter",
    "c10d.reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "c10d._reduce_scatter_base_": "reduce-scatter",
    "c10d.alltoall_": "all-to-all",
    "c10d.alltoall_base_": "all-to-all",
    "c10d.broadcast_": "broadcast",
    "c10d.reduce_": "reduce",
    "c10d.gather_": "gather",
    "c10d.scatter_": "scatter",
    "c10d.send": SEND,
    "c10d.recv_": RECEIVE,
    "c10d.recv_any_source_": RECEIVE,
    "c10d.barrier": "barrier",
    "c10d.monitored_barrier_": "barrier",
    "_c10d_functional.all_reduce": "all-reduce",
    "_c10d_functional.all_reduce_": "all-reduce",
    "_c10d_functional.all_reduce_coalesced": "all-reduce",
    "_c10d_functional.all_reduce_coalesced_": "all-reduce",
    "_c10d_functional.all_gather_into_tensor": "all-gather",
    "_c10d_functional.all_gather_into_tensor_out": "all-gather",
    "_c10d_functional.all_gather_into_tensor_coalesced": "all-gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional.reduce_scatter_tensor_out": "reduce-scatter",
    "_c10d_functional.reduce_scatter_tensor_coalesced": "reduce-scatter",
    "_c10d_functional.all_to_all_single": "all-to-all",
    "_c10d_functional.broadcast": "broadcast",
    "_c10d_functional.broadcast_": "broadcast",
}
"""PyTorch's operation -> the collective that it is. What is not in here but in these namespaces keeps its own name."""
FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
NOT_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")
FROM_OTHER_THREADS = ("all_reduce", "all_gather_single", "reduce_scatter_single", "broadcast", "all_to_all_single")
"""Functions of `torch.distributed` that communication hooks call from a thread of the backend, which no dispatch mode
of the training thread reaches."""


_thread = threading.local()
"""`moves_activations`: whether this thread is inside `moving_activations`."""


@contextlib.contextmanager
def moving_activations() -> Iterator[None]:
    """Mark the collectives that this thread calls inside as those of activations and their gradients.

    Context parallelism's own reduce-scatters run in the group in which FSDP reduces gradients: kind and group do not
    tell one from the other.
    """
    before = getattr(_thread, "moves_activations", False)
    _thread.moves_activations = True
    try:
        yield
    finally:
        _thread.moves_activations = before


@dataclass(frozen=True)
class CollectiveCall:
    """One collective, as one rank called it."""

    kind: str
    """Such as all-reduce; send and receive for one message between two ranks."""
    payload_bytes: int
    """The whole tensor, counted once; see `planner.network.ring_sent_bytes`."""
    group_name: str
    """Of the process group, as PyTorch calls it."""
    num_ranks: int
    """Ranks of that group."""
    of_activations: bool = False
    """It was called inside `moving_activations`: it is a part of forward or backward, and exchanges no weights'
    gradients."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank sends if the collective runs as a ring; 0 for what only receives or has no formula."""
        if self.kind == SEND:
            return float(self.payload_bytes)
        return ring_sent_bytes(self.kind, self.payload_bytes, self.num_ranks) if self.kind in RING_PASSES else 0.0


@dataclass(frozen=True)
class CollectiveCount:
    """What the collectives of one kind moved on one rank."""

    calls: int = 0
    payload_bytes: int = 0
    """Whole tensors that were reduced or gathered, each counted once."""

    def __add__(self, other: CollectiveCount) -> CollectiveCount:
        return CollectiveCount(self.calls + other.calls, self.payload_bytes + other.payload_bytes)


class CollectiveCounter:
    """Notes every collective that is called inside `with`, on whichever thread of this process.

    A collective that a communication hook calls later, when its first one has arrived, counts as long as the `with` is
    still open: leave it after the step.
    """

    def __init__(self) -> None:
        self.calls: list[CollectiveCall] = []
        """In the order in which they were called."""
        self._stack = contextlib.ExitStack()

    @property
    def counts(self) -> dict[str, CollectiveCount]:
        """Calls and payload bytes by kind."""
        return count_calls(self.calls)

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank sends in all, if every collective runs as a ring in its own group."""
        return sum(call.sent_bytes for call in self.calls)

    def in_group(self, name: str) -> list[CollectiveCall]:
        """Return the calls in one process group: `mesh["tp"].get_group().group_name`, for example."""
        return [call for call in self.calls if call.group_name == name]

    def __enter__(self) -> CollectiveCounter:
        self._stack.enter_context(_seen_in_other_threads(self.calls))
        self._stack.enter_context(_CountingMode(self.calls))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()


class _CountingMode(TorchDispatchMode):
    """Sees the operations of the thread that it is entered on, and of the backward passes that this thread starts."""

    def __init__(self, calls: list[CollectiveCall]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the operation if it is a collective, and run it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first turns it into operations on shards, collectives among them
        if getattr(func, "namespace", "") in ("c10d", *FUNCTIONAL):
            call = describe_call(func, args)
            if call is not None:
                self.calls.append(call)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _seen_in_other_threads(calls: list[CollectiveCall]) -> Iterator[None]:
    """While this lasts, calls of `torch.distributed` from threads without a mode of `calls` get one."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            modes = _get_current_dispatch_mode_stack()
            is_seen = any(isinstance(mode, _CountingMode) and mode.calls is calls for mode in modes)
            with contextlib.nullcontext() if is_seen else _CountingMode(calls):
                return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in FROM_OTHER_THREADS:
            stack.enter_context(mock.patch.object(dist, name, counted(getattr(dist, name))))
        yield


def describe_call(func: Any, args: tuple[Any, ...]) -> CollectiveCall | None:
    """Return what a dispatched operation moves; None where it is no collective.

    Args:
        func: an operation of the namespace c10d or of a functional one.
        args: its positional arguments, in the order of its schema.
    """
    name = func.overloadpacket.__name__
    if name in NOT_COLLECTIVES:
        return None
    is_functional = func.namespace in FUNCTIONAL
    kind: str = KINDS.get(f"{'_c10d_functional' if is_functional else 'c10d'}.{name}") or name.strip("_")
    group = _find_group(func, args)
    num_ranks = group.size() if group is not None else 1
    # Of inputs and outputs, the larger one is the whole tensor; functional operations show only their input.
    payload_bytes = 0 if kind == "barrier" else max((_num_bytes(argument) for argument in args), default=0)
    if is_functional and kind == "all-gather":
        payload_bytes = _num_bytes(args[0]) * num_ranks
    if kind == "all-to-all" and name == "alltoall_base_":
        payload_bytes = _num_bytes(args[1])  # what this rank gives; it may get another amount
    group_name = group.group_name if group is not None else ""
    return CollectiveCall(kind, payload_bytes, group_name, num_ranks, getattr(_thread, "moves_activations", False))


def _find_group(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments: an object in c10d's operations, a name in functional ones."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "group_name":
            return resolve_group(value)
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value)
    return None


def _num_bytes(argument: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(argument) if isinstance(t, Tensor))


def count_calls(calls: Iterable[CollectiveCall]) -> dict[str, CollectiveCount]:
    """Return how many calls there are of each kind, and their payload."""
    counts: dict[str, CollectiveCount] = {}
    for call in calls:
        counts[call.kind] = counts.get(call.kind, CollectiveCount()) + CollectiveCount(1, call.payload_bytes)
    return counts


def ring_bytes(counts: Mapping[str, CollectiveCount], num_ranks: int) -> dict[str, float]:
    """Return what each rank sends if every collective runs as a ring of all ranks, by kind.

    Args:
        counts: as a `CollectiveCounter` collected them.
        num_ranks: ranks that took part in each.
    """
    return {
        kind: ring_sent_bytes(kind, count.payload_bytes, num_ranks)
        for kind, count in counts.items()
        if kind in RING_PASSES
    }


def sum_traffic(calls: Iterable[CollectiveCall]) -> Traffic:
    """Return the bytes that this rank sends, in the planner's terms, to compare with `estimate_step_traffic`."""
    sums = dict.fromkeys(("all-reduce", "reduce-scatter", "all-gather"), 0.0)
    for call in calls:
        if call.kind in sums:
            sums[call.kind] += call.sent_bytes
    return Traffic(all_reduce=sums["all-reduce"], reduce_scatter=sums["reduce-scatter"], all_gather=sums["all-gather"])
