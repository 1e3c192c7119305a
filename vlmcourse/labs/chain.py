"""A chain of equal cheap layers under segments of several lengths, and how times that are compared are taken.

Enters: lengths, or things to run. Leaves: measurements as plain data. Times are seconds on a GPU, and on a CPU the
processor seconds of this process: waiting for other programs does not count, caches shared with them do. What is
compared takes turns, and the least and the greatest of the repeats are both told. Chapters 2 and 4.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlmcourse.monitor.ledger import StepLedger
from vlmcourse.recompute import split_segments
from vlmcourse.train.activations import cover_blocks
from vlmcourse.values import check_counts

# --- Time -----------------------------------------------------------------------------------------------------------

FORWARD = "forward alone"
"""Name of the run that makes no backward pass."""


@dataclasses.dataclass(frozen=True)
class Repeats:
    """Times of one thing measured several times, in the unit of the plain run's least."""

    least: float
    greatest: float

    @classmethod
    def of(cls, seconds: Sequence[float], unit_s: float) -> Repeats:
        """Return the least and the greatest of some seconds as multiples of `unit_s`."""
        return cls(min(seconds) / unit_s, max(seconds) / unit_s)


def seconds_of(run: Callable[[], Any]) -> float:
    """Return how long a run takes: processor seconds on a CPU, seconds until the GPU is done where there is one."""
    clock = time.process_time
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        clock = time.perf_counter
    gc.collect()
    gc.disable()
    started_s = clock()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = clock() - started_s
    gc.enable()
    return seconds


def seconds_in_turns(
    runs: Mapping[Any, tuple[Callable[[], Any], Callable[[], Any]]], num_runs: int
) -> dict[Any, list[float]]:
    """Time several things in turns, so that a slow minute of the machine falls on all of them.

    Args:
        runs: by name, what is done before, untimed, and what is timed.
        num_runs: of each.

    Returns:
        Seconds of each run, by name; see `seconds_of`.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(num_runs):
        for name, (prepare, run) in runs.items():
            prepare()
            seconds[name].append(seconds_of(run))
    return seconds


# --- The chain ------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Equal layers, each of which keeps one tensor as large as its input: what the square-root rule assumes."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        check_counts(1, num_layers=num_layers, width=width)
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(ReluLayer(width, generator) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers."""
        for block in self.blocks:
            x = block(x)
        return x


class ReluLayer(nn.Module):
    """relu(x W): backward needs x for the weight, and the result, which is the next layer's x."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator) * math.sqrt(2 / width))

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, width]."""
        return torch.relu(x @ self.weight)


@dataclasses.dataclass(frozen=True)
class ChainResult:
    """What one length of segments costs."""

    length: int
    kept: float
    """Inputs kept when forward has ended, in units of one layer's activation."""
    peak: float
    """Activations alive at most, in the same unit."""
    time: Repeats
    """Of a forward and backward pass, as multiples of the plain one's least."""


@dataclasses.dataclass(frozen=True)
class PlainChain:
    """The chain with nothing recomputed."""

    peak: float
    """Activations alive at most, in units of one layer's."""
    time: Repeats
    """Of a forward and backward pass; its least is the unit."""
    forward_share: float
    """Of the time of a forward and backward pass."""


def measure_chain(
    lengths: Sequence[int], num_layers: int, num_rows: int = 640, width: int = 224, num_runs: int = 3
) -> tuple[PlainChain, list[ChainResult]]:
    """Measure a chain under segments of several lengths.

    Args:
        lengths: layers in a segment.
        num_layers: of the chain.
        num_rows: rows of its input.
        width: of its layers.
        num_runs: of each length, taken in turns.

    Returns:
        What the plain chain takes, and a result for each length.

    Raises:
        ValueError: if a size is not a whole number of 1 or more, or a segment is longer than the chain.
    """
    check_counts(1, num_layers=num_layers, num_rows=num_rows, width=width, num_runs=num_runs)
    check_counts(1, **{f"lengths[{i}]": length for i, length in enumerate(lengths)})
    if lengths and max(lengths) > num_layers:
        raise ValueError(f"lengths = {tuple(lengths)}: a segment of {num_layers} layers has at most all; shorten it")
    chain, x = Chain(num_layers, width), torch.randn(num_rows, width)
    plans = {0: [], **{length: split_segments(num_layers, length) for length in lengths}}
    peaks, kept = {}, {}

    def run() -> None:
        chain(x).sum().backward()

    for length, plan in plans.items():
        cover_blocks(chain, plan)
        chain.zero_grad()
        with StepLedger(chain) as ledger:
            run()
        of_sample = [s.by_owner().get("activations", 0) + s.by_owner().get("recomputed", 0) for s in ledger.samples]
        peaks[length] = max(of_sample) / x.nbytes
        kept[length] = ledger.end_of_forward().by_owner().get("activations", 0) / x.nbytes
    turns: dict[Any, Any] = {n: (lambda plan=plan: cover_blocks(chain, plan), run) for n, plan in plans.items()}
    turns[FORWARD] = (turns[0][0], lambda: chain(x).sum())
    seconds = seconds_in_turns(turns, num_runs)
    unit_s = min(seconds[0])
    results = [ChainResult(n, kept[n], peaks[n], Repeats.of(seconds[n], unit_s)) for n in lengths]
    return PlainChain(peaks[0], Repeats.of(seconds[0], unit_s), min(seconds[FORWARD]) / unit_s), results


def theory_peak(num_layers: int, length: float) -> float:
    """Return inputs kept and one segment alive, in layers: L / k + k; between whole lengths k too, for a curve.

    Raises:
        ValueError: if `num_layers` is below 1, or `length` not above 0.
    Source: Chen et al. 2016 (arXiv:1604.06174), section 4.
    """
    check_counts(1, num_layers=num_layers)
    if not 0 < length < math.inf:
        raise ValueError(f"length = {length}: a segment must be longer than 0 layers; raise it")
    return num_layers / length + length
