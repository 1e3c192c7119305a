"""Move what autograd keeps for backward to the host's memory, and back when backward needs it.

Enters: a forward pass inside `Offloading().hooks()`. Leaves: the same gradients; between the passes the device holds
none of the tensors that were kept inside. Weights are not moved (`torch.autograd.graph.save_on_cpu` would copy them
once for each use), nor are autocast's casts of them, which backward makes again from the weights; only the cast of a
frozen weight bears no trace of where it came from and is moved like an activation. A tensor that several operations
keep is moved once. On a GPU copies go to pinned memory on a stream of their own while the next block computes; on a CPU
they are plain copies in the same memory, which shows the mechanism and saves nothing. Chapter 4.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST_BYTES = 1024
"""Smaller tensors stay: a copy has a latency of its own."""


class _HostCopy:
    """A tensor's memory on the host, and the copy back once it has been asked for."""

    def __init__(self, source: Tensor, stream: Any) -> None:
        """Begin to copy all of the memory behind `source`."""
        storage = source.untyped_storage()
        self.device, self.size_bytes = source.device, storage.nbytes()
        self._source, self._version = weakref.ref(storage), source._version
        self._event: Any = None
        whole = _as_bytes(source)
        if stream is None:
            self._host = whole.clone()
            return
        self._host = torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            self._host.copy_(whole, non_blocking=True)
        whole.record_stream(stream)  # the memory is not given to others before the copy has ended
        self._event = stream.record_event()
        self._back: weakref.ref[Tensor] | None = None

    def is_of(self, tensor: Tensor) -> bool:
        """Tell whether this is a copy of what a tensor holds now: its memory may since have been given to another."""
        return self._source() is tensor.untyped_storage() and self._version == tensor._version

    def fetch(self) -> Tensor:
        """Return the bytes on the device they came from."""
        if self._event is None:
            return self._host
        back = self._back() if self._back is not None else None
        if back is None:
            torch.cuda.current_stream(self.device).wait_event(self._event)
            back = self._host.to(self.device, non_blocking=True)
            self._back = weakref.ref(back)
        return back


class _Moved:
    """One tensor that was kept: which view of which host copy."""

    def __init__(self, tensor: Tensor, copy: _HostCopy) -> None:
        self.copy, self.dtype = copy, tensor.dtype
        self.layout = tensor.shape, tensor.stride(), tensor.storage_offset()

    def restore(self) -> Tensor:
        return self.copy.fetch().view(self.dtype).as_strided(*self.layout)


class _Cast:
    """A weight in autocast's format, of which nothing is kept but how to make it."""

    def __init__(self, weight: nn.Parameter, tensor: Tensor) -> None:
        self.weight, self.version, self.dtype = weight, weight._version, tensor.dtype
        self.layout = tensor.shape, tensor.stride(), tensor.storage_offset()

    def restore(self) -> Tensor:
        if self.weight._version != self.version:
            raise RuntimeError(
                f"a weight of {list(self.weight.shape)} was changed between forward and backward, and its "
                f"{self.dtype} cast is made again from it: run backward before the optimizer steps"
            )
        return self.weight.detach().to(self.dtype).as_strided(*self.layout)


class Offloading:
    """Counts and moves what is kept inside its hooks."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        """All that was copied to the host so far."""
        self._copies: weakref.WeakValueDictionary[int, _HostCopy] = weakref.WeakValueDictionary()
        self._streams: dict[torch.device, Any] = {}

    def hooks(self) -> AbstractContextManager[None]:
        """Return the context in which what autograd keeps is moved."""
        return saved_tensors_hooks(self._pack, _unpack)  # type: ignore[return-value]

    def _pack(self, tensor: Tensor) -> Any:
        base = tensor._base if tensor._base is not None else tensor
        # A strided view of a plain storage is moved; weights stay, and so does what has no plain storage.
        movable = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not movable or isinstance(base, nn.Parameter) or tensor.untyped_storage().nbytes() < SMALLEST_BYTES:
            return tensor
        weight = _weight_of_cast(base)
        if weight is not None:
            return _Cast(weight, tensor)
        address = tensor.untyped_storage().data_ptr()
        copy = self._copies.get(address)
        if copy is None or not copy.is_of(tensor):
            copy = self._copies[address] = _HostCopy(tensor, self._stream(tensor.device))
            self.moved_bytes += copy.size_bytes
        return _Moved(tensor, copy)

    def _stream(self, device: torch.device) -> Any:
        """Return the stream for copies from a device, None for a CPU."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _unpack(kept: Any) -> Tensor:
    return kept.restore() if isinstance(kept, (_Moved, _Cast)) else kept


def _weight_of_cast(tensor: Tensor) -> nn.Parameter | None:
    """Return the trained weight of which a tensor is a copy in another format; None for all others."""
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    source = getattr(node.next_functions[0][0], "variable", None)  # of the node that adds to a leaf's gradient
    if not isinstance(source, nn.Parameter) or source.device != tensor.device or source.shape != tensor.shape:
        return None
    return source


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return all of the memory behind a tensor as uint8, without a copy."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
