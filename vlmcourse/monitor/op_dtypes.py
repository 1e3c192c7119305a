"""Which number format each operation of a step reads and writes, seen while it runs.

Enters: code that runs inside `with OpRecorder()`, such as one training step. Leaves: an `OpCall` for every operation on
floating-point tensors, in order, with the module it belongs to. `measure_autocast_policy` runs single operations under
autocast and reports what came out. Nothing is typed in: CPU and GPU have different lists. Chapter 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

SHORT = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
"""Names of formats in reports and figures."""
PHASES = ("forward", "loss", "backward", "update")


@dataclass(frozen=True)
class OpCall:
    """One operation."""

    phase: str
    """forward (inside a module), loss (outside of all modules), backward, or update (what needs no gradient:
    unscaling, clipping, the optimizer)."""
    module: str
    """Path of the innermost module, such as "language.blocks.0.mlp"; empty outside of all."""
    op: str
    """Such as "mm" or "_fused_adamw_"."""
    inputs: tuple[str, ...]
    """Formats of the floating-point inputs, each once, in order."""
    output: str
    """Format of the first floating-point output."""
    num_elements: int
    """Of all floating-point outputs."""


class OpRecorder(TorchDispatchMode):
    """Writes down every operation on floating-point tensors while it is entered; autocast's casts are such too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OpCall] = []
        self._modules = ModuleTracker()

    def __enter__(self) -> OpRecorder:
        self._modules.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._modules.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and write it down."""
        out = func(*args, **(kwargs or {}))
        written = _floats(out) or _floats(args[:1])  # an operation in place may return nothing
        if written:
            module = innermost(self._modules)
            self.calls.append(
                OpCall(
                    phase=_phase(module),
                    module=module,
                    op=func.overloadpacket.__name__,
                    inputs=tuple(dict.fromkeys(SHORT[t.dtype] for t in _floats((args, kwargs)))),
                    output=SHORT[written[0].dtype],
                    num_elements=sum(t.numel() for t in written),
                )
            )
        return out


def innermost(tracker: ModuleTracker) -> str:
    """Return the path of the module that runs now, without the name of the root; "" outside of all."""
    longest = max((name for name in tracker.parents if name != "Global"), key=len, default="")
    return longest.partition(".")[2]


def _phase(module: str) -> str:
    if torch._C._current_autograd_node() is not None:
        return "backward"
    if not torch.is_grad_enabled():
        return "update"
    return "forward" if module else "loss"


def _floats(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dtype in SHORT]


@dataclass(frozen=True)
class OpPolicy:
    """What autocast makes of one operation."""

    op: str
    from_fp32: str
    """Format of the result for fp32 inputs."""
    from_low: str
    """Format of the result for inputs in the lower format."""

    @property
    def policy(self) -> str:
        """Lowers (fp32 in, less out), raises (less in, fp32 out), or keeps (what came in)."""
        if self.from_fp32 != "fp32":
            return "lowers"
        return "raises" if self.from_low == "fp32" else "keeps"


def measure_autocast_policy(dtype: torch.dtype, device: torch.device | str = "cpu") -> list[OpPolicy]:
    """Run the operations of a vision-language model under autocast and report the formats of their results.

    Args:
        dtype: what autocast lowers to: float16 or bfloat16.
        device: where; the lists of CPU and GPU differ.

    Returns:
        One row an operation, matrix products first.
    """
    rows = []
    for name, run in _operations():
        formats = []
        for given in (torch.float32, dtype):
            with torch.no_grad(), torch.autocast(torch.device(device).type, dtype=dtype):
                formats.append(SHORT[run(given, device).dtype])
        rows.append(OpPolicy(name, *formats))
    return rows


def _attend_itself(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def _operations() -> Iterator[tuple[str, Callable[[torch.dtype, torch.device | str], Tensor]]]:
    """Yield operations of the course's models by name, each called with a format and a device."""

    def ones(*shape: int) -> Callable[[torch.dtype, torch.device | str], Tensor]:
        return lambda dtype, device: torch.ones(shape, dtype=dtype, device=device)

    matrix, heads, tile, labels = ones(4, 4), ones(1, 2, 4, 4), ones(1, 3, 4, 4), torch.zeros(4, dtype=torch.int64)
    two: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"linear": F.linear, "matmul": torch.matmul, "add": torch.add}
    one: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "layer_norm": lambda x: F.layer_norm(x, (4,)),
        "rms_norm": lambda x: F.rms_norm(x, (4,)),
        "gelu": F.gelu,
        "silu": F.silu,
        "exp": torch.exp,
        "log": torch.log,
        "sum": torch.sum,
        "norm": torch.linalg.vector_norm,
    }
    for name in ("linear", "matmul"):
        yield name, lambda dtype, device, f=two[name]: f(matrix(dtype, device), matrix(dtype, device))
    yield "conv2d", lambda dtype, device: F.conv2d(tile(dtype, device), ones(2, 3, 2, 2)(dtype, device))
    yield "attention", lambda dtype, device: _attend_itself(heads(dtype, device))
    yield "add", lambda dtype, device: two["add"](matrix(dtype, device), matrix(dtype, device))
    for name, run in one.items():
        yield name, lambda dtype, device, f=run: f(matrix(dtype, device))
    yield "cross_entropy", lambda dtype, device: F.cross_entropy(matrix(dtype, device), labels.to(device))
