"""Record what training steps ask of an allocator, on any device: sizes, owners and order, as an `AllocTrace`.

Enters: a model and its optimizer, and whole steps inside `with AllocRecorder(...)`. Leaves: the trace, to be replayed
in the simulator of PyTorch's CUDA allocator (`planner.fragmentation`). Built on `StepLedger`, which follows storages.

On CPU ranks it is the tensors of the real step, in their real order, that are recorded. What a GPU would add is not in
it: workspaces that a CUDA kernel takes and returns within one operation, and tensors that its attention kernels keep in
other shapes than those of the CPU. Chapter 5.
"""

from __future__ import annotations

from types import TracebackType

from torch import Tensor, nn
from torch.optim import Optimizer

from vlmcourse.monitor.ledger import StepLedger
from vlmcourse.monitor.storages import Entry
from vlmcourse.planner.alloc_trace import ALLOC, FREED, GIVE, MARK, AllocEvent, AllocTrace


class AllocRecorder(StepLedger):
    """A ledger that keeps every allocation and every free, and no samples.

    What lives before the first step (weights, and state and gradients if there are any) comes first, as it does in a
    program that builds its model before it trains.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Name the owners, see `StepLedger`.

        Raises:
            ValueError: if the model has no parameter on this rank.
        """
        super().__init__(model, optimizer)
        self._events: list[AllocEvent] = []
        self._keys: dict[int, int] = {}
        """Of each live entry, by its identity."""
        self._num_keys = 0
        self._in_steps = False

    def __enter__(self) -> AllocRecorder:
        self._book.on_change = self._record
        super().__enter__()
        for parameter in self._parameters:
            if parameter.requires_grad:  # at once and only once, where a ledger looks after each operation
                hook = parameter.register_post_accumulate_grad_hook(self._give_gradient)
                self._stack.callback(hook.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._book.on_change = None

    def _find_gradients(self) -> None:
        if self.phase != "backward":
            super()._find_gradients()

    def _give_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._book.give(parameter.grad, ("gradients", ""))

    def _sample(self) -> None:
        """Keep no samples: the trace says more, and a sample after each operation costs time."""

    def mark(self, name: str) -> None:
        """Note that a step begins; replays and figures show its name."""
        self._in_steps = True
        self._events.append(AllocEvent(MARK, label=name))

    @property
    def trace(self) -> AllocTrace:
        """What was recorded up to now."""
        return AllocTrace(tuple(self._events))

    def _record(self, change: str, entry: Entry) -> None:
        owner, identity = entry.owner[0], id(entry)
        if change == "alloc":
            if not entry.size_bytes:  # no allocator gives a block for nothing
                return
            self._keys[identity] = self._num_keys
            self._num_keys += 1
            phase = self.phase if self._in_steps else ""
            self._events.append(AllocEvent(ALLOC, self._keys[identity], entry.size_bytes, owner, phase))
        elif identity in self._keys:
            key = self._keys[identity] if change == "give" else self._keys.pop(identity)
            self._events.append(AllocEvent(GIVE, key, label=owner) if change == "give" else AllocEvent(FREED, key))
