"""Count the activations that autograd keeps for the backward pass: live bytes now and at the fullest moment.

Enters: forward and backward passes inside `with ActivationMeter()`. Leaves: bytes on this rank. Parameters (whole,
gathered or split) are no activations and do not count; a tensor that several operations keep counts once. Left out:
what an operation needs for a moment only. Chapters 1 and 4.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from vlmcourse.parallel.comm import local_part


class ActivationMeter:
    """Adds a tensor's bytes when autograd keeps it, and takes them off when the last keeper lets go."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        """The most that was kept at once."""
        self._keepers: dict[int, int] = {}
        """How many operations keep a storage, by its address."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ActivationMeter:
        self._stack.enter_context(saved_tensors_hooks(self._pack, _unpack))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _pack(self, tensor: Tensor) -> Any:
        base = tensor._base if tensor._base is not None else tensor
        if isinstance(base, nn.Parameter):
            return tensor
        local = local_part(tensor)
        # What a collective returns before it has arrived wraps the memory that it will arrive in.
        storage = (local.elem if isinstance(local, AsyncCollectiveTensor) else local).untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        self._keepers[address] = self._keepers.get(address, 0) + 1
        if self._keepers[address] == 1:
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return _Kept(self, tensor, address, size)

    def _release(self, address: int, size: int) -> None:
        self._keepers[address] -= 1
        if not self._keepers[address]:
            del self._keepers[address]
            self.live_bytes -= size


class _Kept:
    """A kept tensor; autograd drops it when its operation's backward has run."""

    def __init__(self, meter: ActivationMeter, tensor: Tensor, address: int, size: int) -> None:
        self.tensor = tensor
        self._meter, self._address, self._size = meter, address, size

    def __del__(self) -> None:
        self._meter._release(self._address, self._size)


def _unpack(kept: Any) -> Tensor:
    return kept.tensor if isinstance(kept, _Kept) else kept
