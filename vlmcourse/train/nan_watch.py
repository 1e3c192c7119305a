"""Watch every operation of a forward and backward pass for the first that makes an infinity or NaN.

Enters: code that runs inside `with NonFiniteWatch()`. Leaves: the place of that operation. Masks write infinities on
purpose, so an operation counts only if it makes a kind of non-number (inf, -inf, nan) that none of its inputs has: the
softmax of a row that is masked everywhere makes NaN of -inf. Only the operations in `TOLD` are known to write them so:
a mask that overflows in a sum or a cast, or is the log of zero, is told as a first place. `nan_finder` is built on it.
Chapter 3.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from vlmcourse.monitor.op_dtypes import SHORT, innermost

UNWRITTEN = ("empty", "new_empty")
"""Operations, by how their names begin, that return memory that nobody has written to yet."""
TOLD = ("masked_fill", "full", "where", "scalar_tensor", "fill", "new_full", "index_fill", "constant_pad_nd", "scatter")
"""Operations that write an infinity because they were told to: masks."""
DIVISORS = {"log": 0, "log2": 0, "log10": 0, "reciprocal": 0, "rsqrt": 0, "div": 1}
"""Operations that a zero breaks, and which of their arguments it must be in; log_softmax and the like are others."""
KINDS = {"nan": torch.isnan, "inf": torch.isposinf, "-inf": torch.isneginf}


class NonFiniteWatch(TorchDispatchMode):
    """Remembers the first operation with an output of a kind of non-number that its inputs do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first: tuple[str, str, str, str] | None = None
        """Its phase (forward, loss or backward), module, name, and what came out of what."""
        self.failed: list[str] = []
        """What came out of the whole pass and is not finite, in words; whoever runs the pass writes it here."""
        self._told = ""
        """The first operation that wrote an infinity as it was told."""
        self._modules = ModuleTracker()
        self._made_by: dict[Any, str] = {}
        """Path of the innermost module that returned a tensor, by the tensor's node in the graph of autograd."""

    def __enter__(self) -> NonFiniteWatch:
        # Before the tracker enters: its own hook takes the module off the list of those that run.
        self._hook = register_module_forward_hook(self._remember)
        self._modules.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._modules.__exit__(*error)
        self._hook.remove()
        self._made_by.clear()

    def say_what_failed(self) -> tuple[str, str, str, str]:
        """Return phase, module, operation and a sentence, as `first`, of a pass that failed where none was first."""
        phase = "loss" if self.failed[0] == "the loss" else "backward"
        told = f", and {self._told} wrote an infinity as it was told" if self._told else ""
        return phase, "", "", f"{self.failed[0]} is not finite, though no operation was seen to make it so{told}"

    def _remember(self, module: nn.Module, inputs: Any, output: Any) -> None:
        path = innermost(self._modules)
        for tensor in tree_leaves(output):
            if path and isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                self._made_by.setdefault(tensor.grad_fn, path)

    def _nearest(self, node: Any) -> str:
        """Return the module whose result is nearest to a node, on the way that gradients take; "" if there is none."""
        queue, seen = deque([node]), set()
        while queue:
            if (node := queue.popleft()) in self._made_by:
                return self._made_by[node]
            if node not in seen:
                seen.add(node)
                queue.extend(after for after, _ in node.next_functions if after is not None)
        return ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what comes out."""
        if self.first is not None:
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        largest, before = _look((args, kwargs))  # now: an operation in place overwrites them
        zero = _name_zero(name.strip("_"), args)
        out = func(*args, **(kwargs or {}))
        written = next((t for t in _floats(out) if _look(t)[1] - before), None)
        if written is not None and name.strip("_").startswith(TOLD):
            module = innermost(self._modules)
            self._told = self._told or name + f" in {module}" * bool(module)
        elif written is not None and not name.strip("_").startswith(UNWRITTEN):
            new = [kind for kind in KINDS if kind in _look(written)[1] - before]
            masks = "".join(f" and {kind}" for kind in KINDS if kind in before)
            what = f"{new[0]} in {SHORT[written.dtype]} from numbers up to {largest:.3g}{zero}{masks}"
            self.first = *self._place(), name, what
        return out

    def _place(self) -> tuple[str, str]:
        """Return phase and module of the operation that runs now."""
        node, module = torch._C._current_autograd_node(), innermost(self._modules)  # no node outside of backward
        if node is not None:
            return "backward", module or self._nearest(node)
        return ("forward" if module else "loss"), module


def _look(tree: Any) -> tuple[float, set[str]]:
    """Return the largest finite absolute value of all tensors of floating-point numbers, and their kinds of others."""
    largest, kinds = 0.0, set[str]()
    for tensor in _floats(tree):
        found = float(tensor.detach().abs().amax())
        if not math.isfinite(found):
            kinds |= {kind for kind, is_kind in KINDS.items() if bool(is_kind(tensor).any())}
            found = float(tensor.detach().abs().nan_to_num(0.0, 0.0).amax())
        largest = max(largest, found)
    return largest, kinds


def _name_zero(name: str, args: Any) -> str:
    """Say that a zero is where it breaks an operation; "" where none is. A divisor may be a count, a whole number."""
    place = DIVISORS.get(name, len(args))
    if place >= len(args) or bool(torch.as_tensor(args[place]).all()):
        return ""
    return ", with a zero to divide by" if place else ", a zero among them"


def _floats(tree: Any) -> list[Tensor]:
    """Return the tensors of floating-point numbers; those of 8 bits were made from others that count."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]
    return [leaf for leaf in leaves if leaf.dtype in SHORT and leaf.itemsize > 1]
