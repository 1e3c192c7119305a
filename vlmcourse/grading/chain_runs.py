"""Real chains of layers under a learner's recomputation: what they return, keep, and run again.

Enters: a function `run_chain(layers, x, segments)`. Leaves: a `RunRecord`, measured: outputs and gradients, calls of
each layer, bytes alive when forward has ended and at most in backward, and the generator's state afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import checkpoint as library

from vlmcourse.grading.chains import Segments
from vlmcourse.monitor.storages import OTHER, Entry, StorageBook

NUM_ROWS = 256
WIDTH = 32
GRADIENTS = ("gradients", "")
INPUT_BYTES = NUM_ROWS * WIDTH * 4
"""Of every layer's input: more than an answer may keep besides what the library keeps."""


class ChainLayer(nn.Module):
    """A residual layer with a hidden width and dropout of its own, which counts its calls and remembers their masks."""

    def __init__(self, hidden: int, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, hidden, generator=generator) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(hidden, WIDTH, generator=generator) / hidden**0.5)
        self.dropout, self.num_calls = dropout, 0
        self.masks: list[bytes] = []
        """Which hidden numbers dropout let through, call by call; not a tensor, so that it counts as no bytes."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, width]."""
        self.num_calls += 1
        hidden = F.dropout(torch.tanh(x @ self.up), self.dropout, training=self.dropout > 0)
        if self.dropout:
            self.masks.append((hidden.detach() != 0).numpy().tobytes())
        return x + hidden @ self.down


@dataclass(frozen=True, kw_only=True)
class RunCase:
    """A chain to run."""

    hidden: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]
    dropout: float = 0.0
    needs_input_gradient: bool = False
    has_gradients: bool = False
    """Whether weights have gradients already, as from the micro-batch before."""
    seed: int = 0

    def __str__(self) -> str:
        kinds = ["dropout"] if self.dropout else []
        kinds += [] if self.needs_input_gradient else ["an input without gradient"]
        kinds += ["weights that have gradients already"] if self.has_gradients else []
        return f"{len(self.hidden)} layers, segments {list(self.segments)}" + (f", {', '.join(kinds)}" if kinds else "")

    def build(self) -> tuple[list[ChainLayer], Tensor, Tensor]:
        """Return layers, input and the gradient of the output, always the same ones."""
        generator = torch.Generator().manual_seed(self.seed)
        layers = [ChainLayer(hidden, self.dropout, generator) for hidden in self.hidden]
        x = torch.randn(NUM_ROWS, WIDTH, generator=generator).requires_grad_(self.needs_input_gradient)
        for weight in (p for layer in layers if self.has_gradients for p in layer.parameters()):
            weight.grad = torch.randn(weight.shape, generator=generator)
        return layers, x, torch.randn(NUM_ROWS, WIDTH, generator=generator)

    @property
    def covered(self) -> set[int]:
        """Layers in segments."""
        return {i for start, end in self.segments for i in range(start, end)}


@dataclass
class RunRecord:
    """What one run did."""

    output: Any = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """As they are afterwards; None where backward brought none."""
    earlier: dict[str, Tensor] = field(default_factory=dict)
    """The gradients that were there before."""
    calls_forward: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    kept: int = 0
    """Bytes alive when forward has ended, besides what was there before and is no gradient."""
    peak: int = 0
    """Bytes alive at most in backward, besides what was there before and is no gradient."""
    other_masks: list[int] = field(default_factory=list)
    """Layers that ran again with another dropout mask than in forward."""
    draw: float = 0.0
    """What the generator gave afterwards."""
    used_library: bool = False
    backward_error: str = ""


def make_runs(seed: int) -> list[RunCase]:
    """Return four cases: with earlier gradients, the first layers covered, with dropout and gaps, and nothing covered.

    In each that is covered some segment has three layers or more: one by one they would keep two inputs more.
    """
    rng = random.Random(f"runs:{seed}")

    def hidden(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(24, 120) for _ in range(count))

    first = rng.randrange(3, 5)
    gap = rng.randrange(1, 3)
    return [
        RunCase(
            hidden=hidden(8),
            segments=((1, 4), (4, 7)),
            needs_input_gradient=True,
            has_gradients=True,
            seed=rng.randrange(10**6),
        ),
        RunCase(hidden=hidden(5), segments=((0, first),), seed=rng.randrange(10**6)),
        RunCase(
            hidden=hidden(6 + gap),
            segments=((0, 2), (2 + gap, 5 + gap)),
            dropout=0.3,
            needs_input_gradient=True,
            seed=rng.randrange(10**6),
        ),
        RunCase(hidden=hidden(3), segments=(), dropout=0.3, seed=rng.randrange(10**6)),
    ]


def record_run(function: Any, case: RunCase, *, allow_library: bool = False) -> RunRecord:
    """Run a chain forward and backward, and write down what happened; what the function raises goes on.

    Args:
        function: takes layers, an input and segments, and returns the output.
        case: what to run.
        allow_library: whether `torch.utils.checkpoint` may run.
    """
    layers, x, gradient = case.build()
    record, sizes = RunRecord(), [0]
    torch.manual_seed(case.seed)

    def after_operation(_: list[Entry]) -> None:
        sizes.append(sum(size for owner, size in book.live_bytes.items() if owner != OTHER))

    book = StorageBook("cpu", after_operation)
    weights = {f"layer {i}: {name}": p for i, layer in enumerate(layers) for name, p in layer.named_parameters()}
    record.earlier = {name: p.grad.clone() for name, p in weights.items() if p.grad is not None}
    for tensor in (x, gradient, *weights.values()):
        book.enter(tensor, OTHER)
    for tensor in (p.grad for p in weights.values() if p.grad is not None):
        book.enter(tensor, GRADIENTS)  # counted, so that adding in place and p.grad = p.grad + more are alike
    with _watch_library(record, allow_library), book:
        output = function(list(layers), x, list(case.segments))  # lists of its own, which it may use up
        record.kept = sum(size for owner, size in book.live_bytes.items() if owner != OTHER)
        record.calls_forward = [layer.num_calls for layer in layers]
        record.output = output.detach().clone() if isinstance(output, Tensor) else output
        del sizes[:-1]
        if isinstance(output, Tensor) and output.shape == gradient.shape:
            _go_back(output, gradient, record)
    record.peak = max(sizes)
    record.calls = [layer.num_calls for layer in layers]
    record.other_masks = [i for i, layer in enumerate(layers) if len(set(layer.masks)) > 1]
    record.gradients = {name: _unless_as_before(p.grad, record.earlier.get(name)) for name, p in weights.items()}
    if case.needs_input_gradient:
        record.gradients["the input"] = x.grad
    record.draw = float(torch.rand(()))
    return record


def _unless_as_before(gradient: Tensor | None, earlier: Tensor | None) -> Tensor | None:
    """Return a gradient, or None where it is still the one that was there before."""
    is_same = gradient is not None and earlier is not None and torch.equal(gradient, earlier)
    return None if is_same else gradient


def _go_back(output: Tensor, gradient: Tensor, record: RunRecord) -> None:
    """Run backward; an output without a graph is what a run may have instead."""
    if not output.requires_grad:
        record.backward_error = "the output needs no gradient, so backward has nothing to go through"
        return
    output.backward(gradient)


def _watch_library(record: RunRecord, allow: bool) -> Any:
    """Notice whether the library's checkpointing is called, under whatever name it was imported."""
    if allow:
        return mock.patch.object(record, "used_library", False)
    inner = library._checkpoint_without_reentrant_generator

    def noticed(*args: Any, **kwargs: Any) -> Any:
        record.used_library = True
        return inner(*args, **kwargs)

    class Noticed(library.CheckpointFunction):
        @staticmethod
        def forward(*args: Any) -> Any:
            record.used_library = True
            return library.CheckpointFunction.forward(*args)

    return _Both(
        mock.patch.object(library, "_checkpoint_without_reentrant_generator", noticed),
        mock.patch.object(library, "CheckpointFunction", Noticed),
    )


class _Both:
    """Two contexts as one."""

    def __init__(self, *contexts: Any) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)


def run_reference(layers: Sequence[nn.Module], x: Tensor, segments: Segments) -> Tensor:
    """Run a chain with the library's checkpointing: what an answer is compared with."""
    ends, position = dict(segments), 0
    while position < len(layers):
        end = ends.get(position, position + 1)
        part = layers[position:end]
        run = nn.Sequential(*part)
        x = library.checkpoint(run, x, use_reentrant=False) if position in ends else run(x)
        position = end
    return x
