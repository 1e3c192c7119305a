"""Bytes on this rank by owner: the training state between two steps, and all that is alive in the course of one.

Enters: a model (plain, distributed, or a DeepSpeed engine) and its optimizer. Leaves: from `measure_ledger` a `Ledger`
of weights, gradients and optimizer state, where only this rank's shards count; from `StepLedger` a sample after each
operation, activations by tower and layer among its owners. Left out on purpose: what the allocator keeps in reserve.
Chapters 1, 4 and 5.
"""

from __future__ import annotations

import contextlib
import re
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from vlmcourse.monitor.storages import GATHERED, TEMPORARY, Entry, Owner, StorageBook, storage_of
from vlmcourse.parallel.apply import plain_parts
from vlmcourse.parallel.comm import local_part
from vlmcourse.parallel.owners import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, find_state, find_torch_optimizer
from vlmcourse.parallel.sync import is_engine


@dataclass(frozen=True)
class Ledger:
    """Bytes of training state on one rank."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    """Adam's two moments, a step counter a parameter, and an engine's fp32 copies of weights."""
    buffers_bytes: int = 0
    """What an engine keeps to communicate in: no part of the training state, but memory all the same."""

    @property
    def total_bytes(self) -> int:
        """Weights, gradients and optimizer together: the training state, without buffers."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def measure_ledger(model: nn.Module, optimizer: Any = None) -> Ledger:
    """Count the bytes of weights, gradients and optimizer state that this rank stores.

    Args:
        model: plain, wrapped in DDP, sharded by FSDP2, or a DeepSpeed engine. Call it after backward to see gradients,
            and after the first optimizer step to see optimizer state: neither exists earlier. An engine forgets its
            gradients in its step.
        optimizer: the model's optimizer as a Trainer holds it, or None to leave its bytes 0.

    Returns:
        Bytes of this rank alone. Shared (tied) tensors count once; frozen weights count as weights only. An engine's
        tensors are views of flat memory, which counts once and whole, with what fills it up.
    """
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    for owner, tensor in find_state(model, optimizer):
        storage = storage_of(tensor) if is_engine(model) else None
        key = id(tensor) if storage is None else storage._cdata
        if key not in seen:
            seen.add(key)
            local = local_part(tensor)
            sizes[owner] += local.numel() * local.element_size() if storage is None else storage.nbytes()
    return Ledger(*(sizes[owner] for owner in (WEIGHTS, GRADIENTS, OPTIMIZER, BUFFERS)))


# --- A step over time -----------------------------------------------------------------------------------------------

LAYER = re.compile(r"(.*?)\.?blocks\.(\d+)(\.|$)")


@dataclass(frozen=True)
class Sample:
    """Bytes alive after one operation."""

    time_s: float
    """Since the ledger began."""
    phase: str
    """forward, backward or update."""
    live_bytes: Mapping[Owner, int]
    """By owner and layer; owners that hold nothing are left out."""

    @property
    def total_bytes(self) -> int:
        """All owners together."""
        return sum(self.live_bytes.values())

    def by_owner(self) -> dict[str, int]:
        """Return bytes by owner, layers added up."""
        found: Counter[str] = Counter()
        for (owner, _), size in self.live_bytes.items():
            found[owner] += size
        return dict(found)

    def by_layer(self, *owners: str) -> dict[str, int]:
        """Return the bytes of some owners by layer, in the order of the layers' first operations."""
        found: Counter[str] = Counter()
        for (owner, layer), size in self.live_bytes.items():
            if owner in owners:
                found[layer] += size
        return dict(found)


class StepLedger:
    """Bytes alive in a training step, by owner, after each of its operations.

    Owners are weights, gradients, optimizer, activations (by layer: what autograd keeps there, and what outlives the
    layer's forward otherwise, as under selective checkpointing), recomputed (by layer: what backward makes again),
    gathered (whole weights under FSDP), other (there before: the batch) and temporary (everything else, such as the
    gradient on its way from layer to layer).

    Use it as a context around whole steps; `samples` has the course of them.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any = None, *, device_type: str = "", of_fakes: bool = False
    ) -> None:
        """Name the owners.

        Args:
            model: plain or under any strategy. Its layers are the members of lists called `blocks`; anything else
                counts under the name of the child of the model that it is in.
            optimizer: of the model, if steps are to be seen.
            device_type: cpu or cuda: where bytes are counted; by default where the weights are. Under offloading
                weights lie in main memory, and what passes through a GPU is seen with cuda only.
            of_fakes: count fake tensors, of a dry run.

        Raises:
            ValueError: if the model has no parameter on this rank.
        """
        self.samples: list[Sample] = []
        self._model, self._parts = model, plain_parts(model)
        self._optimizer = optimizer
        self._parameters = list(model.parameters())
        if not self._parameters:
            raise ValueError(
                f"{type(model).__name__} has 0 parameters here: a ledger needs 1 or more, which tell it the device and "
                "have gradients; give it the model that this layer is a part of"
            )
        device_type = device_type or local_part(self._parameters[0]).device.type
        self._book = StorageBook(device_type, self._after_operation, of_fakes=of_fakes)
        self._layers: list[str] = []
        """Layers whose forward is at work, outermost first."""
        self._latest = ""
        self._made: dict[str, list[Entry]] = {}
        self._seen_gradients: dict[int, tuple[weakref.ref[Tensor], Entry]] = {}
        """By the parameter's number: what was its gradient when looked at last."""
        self._in_update = False
        self._stack = contextlib.ExitStack()
        self._started_s = 0.0

    def __enter__(self) -> StepLedger:
        for tensor in (*self._parameters, *(b for part in self._parts for b in part.buffers())):
            self._book.give(tensor, (WEIGHTS, ""))
        self._find_state()
        for part in self._parts:
            for name, module in part.named_modules():
                layer, is_block = _layer_of(name)
                pre = module.register_forward_pre_hook(partial(self._enter_layer, layer))
                # Called after an error too: recomputation ends with one when it has all that is needed.
                post = module.register_forward_hook(partial(self._leave_layer, layer, is_block), always_call=True)
                self._stack.callback(pre.remove)
                self._stack.callback(post.remove)
        updates = find_torch_optimizer(self._model, self._optimizer)
        if updates is not None:
            self._stack.callback(updates.register_step_pre_hook(self._begin_update).remove)
            self._stack.callback(updates.register_step_post_hook(self._end_update).remove)
        self._stack.enter_context(saved_tensors_hooks(self._pack, _unpack))
        self._started_s = time.perf_counter()
        self._stack.enter_context(self._book)
        self._sample()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._find_gradients()
        self._sample()
        self._stack.close()

    def peak(self) -> Sample:
        """Return the sample with the most bytes alive.

        Raises:
            ValueError: if no step was watched yet.
        """
        if not self.samples:
            raise ValueError("this ledger saw no operation: run a step inside it, in a `with` block")
        return max(self.samples, key=lambda sample: sample.total_bytes)

    def end_of_forward(self) -> Sample:
        """Return the last sample before backward, where all activations are alive.

        Raises:
            ValueError: if there was no backward pass.
        """
        phases = [sample.phase for sample in self.samples]
        if "backward" not in phases:
            raise ValueError("this ledger saw no backward pass: run loss.backward() inside it")
        return self.samples[max(0, phases.index("backward") - 1)]

    def _enter_layer(self, layer: str, module: nn.Module, *_: Any) -> None:
        self._layers.append(layer)
        self._latest = layer
        for parameter in module.parameters(recurse=False):  # under FSDP whole ones, for as long as the layer needs them
            entry = self._book.find(parameter)
            if entry is None or entry.owner[0] not in ("weights", "gathered"):
                self._book.give(parameter, GATHERED)

    def _leave_layer(self, layer: str, is_block: bool, module: nn.Module, args: Any, result: Any) -> None:
        self._layers.pop()
        if not is_block or _in_backward() or not torch.is_grad_enabled():
            return
        outputs = {id(self._book.find(leaf)) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        for entry in self._made.pop(layer, []):
            if entry.owner == TEMPORARY and entry.storage() is not None and id(entry) not in outputs:
                self._book.pass_on(entry, ("activations", layer))

    def _after_operation(self, added: list[Entry]) -> None:
        in_backward = _in_backward()
        layer = self._layers[-1] if self._layers else ""
        # Autograd runs without recording; what is recorded inside it is a forward that runs again.
        if in_backward and torch.is_grad_enabled():
            for entry in added:
                self._book.pass_on(entry, ("recomputed", layer or self._latest))
        elif in_backward:
            self._find_gradients()
        elif layer:
            self._made.setdefault(layer, []).extend(added)
        self._sample()

    @property
    def phase(self) -> str:
        """What the step is at: forward, backward or update."""
        return "update" if self._in_update else "backward" if _in_backward() else "forward"

    def _sample(self) -> None:
        live = {owner: size for owner, size in self._book.live_bytes.items() if size}
        self.samples.append(Sample(time.perf_counter() - self._started_s, self.phase, live))

    def _find_gradients(self) -> None:
        if is_engine(self._model):
            for owner, tensor in find_state(self._model):
                if owner in (GRADIENTS, BUFFERS):
                    self._book.give(tensor, (owner, ""))
            return
        # After every operation of backward: without a walk through the modules, and past what was found before.
        for number, parameter in enumerate(self._parameters):
            if (gradient := parameter.grad) is None or self._is_seen(number, gradient):
                continue
            if (entry := self._book.give(gradient, (GRADIENTS, ""))) is not None:
                self._seen_gradients[number] = (weakref.ref(gradient), entry)

    def _is_seen(self, number: int, gradient: Tensor) -> bool:
        if number not in self._seen_gradients:
            return False
        seen, entry = self._seen_gradients[number]
        return seen() is gradient and entry.owner[0] == GRADIENTS and entry.storage() is not None

    def _find_state(self) -> None:
        for owner, tensor in find_state(self._model, self._optimizer):
            self._book.give(tensor, (owner, ""))

    def _begin_update(self, *_: Any) -> None:
        self._find_gradients()
        self._in_update = True

    def _end_update(self, *_: Any) -> None:
        self._find_state()
        self._in_update = False

    def _pack(self, tensor: Tensor) -> Any:
        base = tensor._base if tensor._base is not None else tensor
        entry = None if isinstance(base, nn.Parameter) else self._book.find(tensor)
        if entry is None or entry.owner[0] in ("weights", "gathered", "other"):
            return tensor
        if entry.owner[0] != "activations":
            self._book.pass_on(entry, ("activations", self._layers[-1] if self._layers else ""))
        return _Kept(self._book, tensor, entry)


class _Kept:
    """A tensor that autograd keeps; when the last keeper lets go, its storage is temporary again."""

    def __init__(self, book: StorageBook, tensor: Tensor, entry: Entry) -> None:
        self.tensor, self._book, self._entry = tensor, book, entry
        entry.num_keepers += 1

    def __del__(self) -> None:
        self._entry.num_keepers -= 1
        if not self._entry.num_keepers and self._entry.storage() is not None:
            self._book.pass_on(self._entry, TEMPORARY)


def _unpack(kept: Any) -> Tensor:
    return kept.tensor if isinstance(kept, _Kept) else kept


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _layer_of(name: str) -> tuple[str, bool]:
    """Return the layer that a module counts under, and whether the module is that layer, a block."""
    match = LAYER.match(name)
    if match is None:
        return name.partition(".")[0], False
    tower = f"{match[1]}." if match[1] else ""
    return f"{tower}blocks.{match[2]}", not match[3]
