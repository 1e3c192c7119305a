"""What a learner's accumulation step keeps for backward at once, and where DDP is silent.

Enters: a model in DDP, and whatever runs inside `with RecordPasses(model)`. Leaves: the most samples whose activations
were kept at the same time, and whether a backward was silent whose forward was not. Left out: forward passes that call
parts of the model one by one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel


class RecordPasses:
    """Follows every forward pass of a model until its backward has let go of what autograd kept for it."""

    def __init__(self, model: DistributedDataParallel, on_forward: Callable[[int], None] | None = None) -> None:
        """Follow a model; `on_forward` is told the number of each forward pass, from 0, before it runs."""
        self._on_forward = on_forward
        self.most_samples = 0
        """Of all forward passes that had something kept at the same time."""
        self.forward_outside = False
        """A forward ran with the exchange on, and its backward with the exchange off."""
        self._model = model
        self._samples: list[int] = []
        """Of each forward pass so far."""
        self._kept: Counter[int] = Counter()
        """Tensors that are kept, by forward pass."""
        self._is_forward = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RecordPasses:
        plain = self._model.module
        self._stack.enter_context(saved_tensors_hooks(self._pack, _unpack))
        for handle in (
            plain.register_forward_pre_hook(self._begin),
            plain.register_forward_hook(self._end),
            self._model.register_forward_hook(self._follow),
        ):
            self._stack.callback(handle.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _begin(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._on_forward is not None:
            self._on_forward(len(self._samples))
        is_batch = bool(inputs) and isinstance(inputs[0], Tensor) and inputs[0].dim() > 1
        self._samples.append(len(inputs[0]) if is_batch else 1)
        self._is_forward = True

    def _end(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._is_forward = False
        self.most_samples = max(self.most_samples, sum(self._samples[number] for number in +self._kept))

    def _follow(self, model: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Compare DDP's switch at the end of the forward with what it is when backward comes by."""
        was_on = self._model.require_backward_grad_sync

        def compare(_: Tensor) -> None:
            self.forward_outside |= was_on and not self._model.require_backward_grad_sync

        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(compare)

    def _pack(self, tensor: Tensor) -> Any:
        if not self._is_forward or isinstance(tensor, nn.Parameter):
            return tensor
        return _Kept(self._kept, len(self._samples) - 1, tensor)


class _Kept:
    """A kept tensor; autograd drops it when its operation's backward has run."""

    def __init__(self, kept: Counter[int], number: int, tensor: Tensor) -> None:
        self.tensor = tensor
        self._kept, self._number = kept, number
        kept[number] += 1

    def __del__(self) -> None:
        self._kept[self._number] -= 1


def _unpack(kept: Any) -> Tensor:
    return kept.tensor if isinstance(kept, _Kept) else kept
