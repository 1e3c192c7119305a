"""Bytes by owner at every moment of a step, with the place in the model where the step was, and its FLOPs.

Enters: a model under any strategy and its optimizer, fake or real. Leaves: a `StepRecord` of `Moment`s. It is the
`StepLedger` of `monitor/ledger.py` with two more owners that a large model needs: `gathered` also has what FSDP gathers
into and the whole gradients that it is about to reduce, and `loss` has what exists between logits and the gradient of
logits only. The same class watches real steps, so that both can be compared.

FLOPs are counted by the formulas of `torch.utils.flop_counter`, of the operations that this rank runs, recomputation
included. CPU attention, which these leave out, counts as in `planner/flops.py`: backward is twice forward, and that
the kernel computes scores again is its own business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from vlmcourse.monitor.ledger import StepLedger
from vlmcourse.monitor.storages import GATHERED, OTHER, TEMPORARY, Entry
from vlmcourse.parallel.apply import plain_parts
from vlmcourse.parallel.counting import FUNCTIONAL, CollectiveCall, describe_call
from vlmcourse.parallel.owners import GRADIENTS

LOSS = ("loss", "")
LOOKS = 30
"""After how many operations since the last layer or collective began nobody assigns gradients or resizes storages: FSDP
does both between layers, around its collectives."""
OWNERS = (
    "weights", "gradients", "optimizer", "gathered", "activations", "recomputed", "loss", "temporary", "other",
)  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """Bytes alive after one operation that changed them."""

    phase: str
    """forward, loss, backward, clip or update."""
    layer: str
    """Where the step was: a block such as language.blocks.3, another child of the model, or "" outside of it."""
    micro_batch: int
    """Which one of those that were played, from 0."""
    live_bytes: Mapping[str, int]
    """By owner of `OWNERS`; owners that hold nothing are left out."""

    @property
    def total_bytes(self) -> int:
        """All owners together."""
        return sum(self.live_bytes.values())


@dataclass
class StepRecord:
    """What was seen of one step."""

    moments: list[Moment] = field(default_factory=list)
    calls: list[tuple[int, CollectiveCall]] = field(default_factory=list)
    """Micro-batch and collective, of this thread."""
    flops: list[int] = field(default_factory=list)
    """Of each micro-batch."""

    def peak(self) -> Moment:
        """Return the first moment with the most bytes alive."""
        return max(self.moments, key=lambda moment: moment.total_bytes)


class PlaceLedger(StepLedger):
    """Watches one step; `record` has what was seen."""

    def __init__(self, model: nn.Module, optimizer: Any, *, of_fakes: bool) -> None:
        """Name the owners.

        Args:
            model: of a `VLM`, under any strategy without a pipeline.
            optimizer: of the model.
            of_fakes: whether the step is made of fake tensors.
        """
        super().__init__(model, optimizer, of_fakes=of_fakes)
        self.record = StepRecord()
        self._stage = ""
        self._in_loss = False
        self._looks = LOOKS
        self._backward_layer = ""
        self._latest_block = ""
        """Whose forward has ended last."""
        self._has_changed = True
        self._hooked: set[int] = set()
        self._is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        self._bucket_bytes = 0
        if isinstance(model, DistributedDataParallel):
            trained = [p for p in model.parameters() if p.requires_grad]
            self._bucket_bytes = sum(p.numel() * p.element_size() for p in trained)
        self._book.on_change = self._note_change
        self._book.on_operation = self._see_operation

    def __enter__(self) -> PlaceLedger:
        part: Any = plain_parts(self._model)[0]
        # Before the ledger's own: a pass has begun when its first layer enters.
        self._stack.callback(part.register_forward_pre_hook(self._begin_pass).remove)
        super().__enter__()
        for name in ("projector", "language"):
            self._stack.callback(getattr(part, name).register_forward_hook(partial(self._leave_part, name)).remove)
        return self

    # --- Where the step is ------------------------------------------------------------------------------------------

    def _begin_pass(self, *_: Any) -> None:
        self.record.flops.append(0)
        self._latest_block = ""

    def _leave_part(self, name: str, module: nn.Module, args: Any, result: Tensor) -> None:
        if name == "language":
            self._in_loss = True
        if result.requires_grad:
            result.register_hook(partial(self._reach, name))

    def _leave_layer(self, layer: str, is_block: bool, module: nn.Module, args: Any, result: Any) -> None:
        super()._leave_layer(layer, is_block, module, args, result)
        self._looks = LOOKS
        if is_block and torch._C._current_graph_task_id() == -1:
            self._latest_block = layer
        if is_block and torch._C._current_graph_task_id() == -1 and isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(partial(self._reach, layer))

    def _reach(self, layer: str, _: Tensor) -> None:
        """Backward has the gradient of what a layer gave: it is that layer's turn."""
        self._in_loss, self._backward_layer = False, layer
        self._looks = LOOKS

    def _find_phase(self) -> tuple[str, str]:
        if self._stage:
            return self._stage, ""
        phase = "loss" if self._in_loss else self.phase
        if phase != "forward" or not self._layers:
            return phase, self._backward_layer if phase == "backward" else ""
        # Between two blocks the tower runs alone; what is made there is for the block before.
        tower = self._layers[-1]
        between = self._layers.count(tower) == 1 and self._latest_block.startswith(f"{tower}.blocks.")
        return phase, self._latest_block if between else tower

    def _end_update(self, *_: Any) -> None:
        self._in_update = False  # a step in the middle of a run makes no new state to look for

    # --- Who owns what ----------------------------------------------------------------------------------------------

    def _enter_layer(self, layer: str, module: nn.Module, *args: Any) -> None:
        super()._enter_layer(layer, module, *args)
        self._looks = LOOKS
        if not self._is_sharded:
            return
        for parameter in module.parameters(recurse=False):  # whole ones, see there
            if id(parameter) not in self._hooked and parameter.requires_grad:
                self._hooked.add(id(parameter))
                hook = parameter.register_post_accumulate_grad_hook(self._see_whole_gradient)
                self._stack.callback(hook.remove)

    def _see_whole_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._book.give(parameter.grad, GATHERED)

    def _find_gradients(self) -> None:
        # A large model has too many parameters to look at each after each operation of backward.
        if self._looks > 0 or torch._C._current_graph_task_id() == -1:
            super()._find_gradients()

    def enter_stage(self, name: str) -> None:
        """Say that no pass runs any more, and what the step is at: clip or update."""
        self._find_gradients()
        self._stage = name

    def _after_operation(self, added: list[Entry]) -> None:
        if self._in_loss:
            for entry in added:
                if entry.owner == TEMPORARY:
                    self._book.pass_on(entry, LOSS)
        super()._after_operation(added)

    def _see_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._looks = LOOKS if func.namespace in ("fsdp", "c10d") else self._looks - 1
        self._book.may_resize = self._looks > 0
        if func.namespace == "fsdp":  # copies into and out of the flat tensors that are gathered and reduced
            for leaf in tree_leaves((kwargs.get("out"), result)):
                if isinstance(leaf, Tensor):
                    self._book.give(leaf, GATHERED)
        elif func.namespace in ("c10d", *FUNCTIONAL):
            if (call := describe_call(func, args)) is not None:
                self.record.calls.append((max(0, len(self.record.flops) - 1), call))
        elif self.record.flops and (count := _flop_formula(func)) is not None:
            self.record.flops[-1] += count(*args, **kwargs, out_val=result)

    def _note_change(self, change: str, entry: Entry) -> None:
        self._has_changed = True
        if self._bucket_bytes and change == "alloc" and entry.owner == OTHER and self.phase == "backward":
            self._book.pass_on(entry, (GRADIENTS, ""))  # the only old storages that DDP's backward meets first

    def _sample(self) -> None:
        if not self._has_changed:
            return
        self._has_changed = False
        live: Counter[str] = Counter()
        for (owner, layer), size in self._book.live_bytes.items():
            if size:  # what autograd keeps outside of every layer, it keeps for the loss
                live["loss" if owner == "activations" and not layer else owner] += size
        if self._bucket_bytes > live["gradients"]:  # DDP's buckets stay from step to step; the book sees them when used
            live["gradients"] = self._bucket_bytes
        phase, layer = self._find_phase()
        self.record.moments.append(Moment(phase, layer, max(0, len(self.record.flops) - 1), live))


def _flop_formula(func: Any) -> Callable[..., int] | None:
    packet = func.overloadpacket if hasattr(func, "overloadpacket") else None
    return flop_registry.get(packet) or CPU_ATTENTION.get(packet)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, out_val: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward_flops(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return 2 * sdpa_flop_count(query.shape, key.shape, value.shape)


CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
"""Operations that `flop_registry` has no formula for."""
