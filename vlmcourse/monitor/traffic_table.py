"""Bytes that each rank sends in a step under every stage of ZeRO: counted, by the formula, and why they differ.

Enters: a trainer on each rank, and what is known of its model. Leaves: a `TrafficTable`. Collectives are counted where
PyTorch dispatches them, in hooks of backward too, whoever calls them; their bytes are those of ring algorithms on both
sides of the comparison. The counter that sees them is `parallel/counting.py`. Chapter 5.

Source of the formula: Rajbhandari et al. 2020, section 7; of the differences: DeepSpeed 0.19.8 (allreduce_and_scatter
in runtime/zero/stage_1_and_2.py, partitioned_param_coordinator.py), torch 2.13 (fully_shard, ZeroRedundancyOptimizer).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmcourse.layout import align
from vlmcourse.monitor.state_table import NotRun, Updates, align_with_reasons
from vlmcourse.parallel.counting import CollectiveCall, CollectiveCount, CollectiveCounter, count_calls
from vlmcourse.planner.network import Traffic, estimate_step_traffic, ring_sent_bytes
from vlmcourse.planner.state_layout import FP32_BYTES, ZERO_STAGES, Groups, Shape, fill_group
from vlmcourse.strategies import DEEPSPEED

MB = 10**6
TOLERANCE = 0.005
"""Of the bytes sent: what may stay unexplained. Measured: 0 bytes on 1, 2 and 4 CPU ranks."""
COUNTS_BYTES = 24
"""Three counts of tokens: the largest of a step's numbers that does not grow with the model."""


@dataclass(frozen=True)
class Units:
    """What FSDP2 gathers and frees together, by the shapes of the parameters."""

    root: Sequence[Shape]
    """Of the unit that is whole from forward to backward."""
    others: Sequence[Sequence[Shape]]
    groups: Groups = ()
    """All of these again, by optimizer group: what DeepSpeed's stages 1 and 2 gather together."""

    def shapes(self) -> list[Shape]:
        """Of all parameters."""
        return [shape for unit in (self.root, *self.others) for shape in unit]

    def num_params(self) -> int:
        """Elements of all."""
        return sum(map(math.prod, self.shapes()))


@dataclass(frozen=True)
class TrafficDifference:
    """Bytes that a rank sends more than the formula says, or fewer, and why."""

    sent_bytes: float
    reason: str


def explain_traffic(units: Units, strategy: str, num_ranks: int, *, frees: bool = False) -> list[TrafficDifference]:
    """Say where a step's traffic differs from `estimate_step_traffic`, in bytes that one rank sends.

    Args:
        units: of the whole model, all of it trained in fp32.
        strategy: a key of `ZERO_STAGES`.
        num_ranks: of the run.
        frees: deepspeed-zero3 only: whether its settings let weights go after each use
            (stage3_max_live_parameters and stage3_max_reuse_distance of 0).

    Returns:
        What is not 0.
    """
    num_bytes = FP32_BYTES * units.num_params()
    once = ring_sent_bytes("all-gather", num_bytes, num_ranks)
    found: list[TrafficDifference] = []
    if strategy == "zero1" or DEEPSPEED.get(strategy) in (1, 2):
        found.append(TrafficDifference(once, "gradients are all-reduced whole: twice a reduce-scatter"))
    if DEEPSPEED.get(strategy) in (1, 2):
        filling = FP32_BYTES * sum(fill_group(group, num_ranks) for group in units.groups)
        reason = "each group's weights are filled up to a multiple of 2 x the ranks"
        found.append(TrafficDifference(ring_sent_bytes("all-gather", filling, num_ranks), reason))
    if DEEPSPEED.get(strategy) == 3:
        filling = FP32_BYTES * sum(-math.prod(shape) % num_ranks for shape in units.shapes())
        filling_sent = ring_sent_bytes("all-gather", filling, num_ranks)
        reason = "each parameter is filled up until the ranks divide it, in each of the three passes"
        found.append(TrafficDifference(3 * filling_sent, reason))
    if DEEPSPEED.get(strategy) == 3 and not frees:
        reason = (
            "weights are not gathered again for backward: they are used again within stage3_max_reuse_distance, or are "
            "fewer than stage3_max_live_parameters, and either keeps them whole"
        )
        found.append(TrafficDifference(-once - filling_sent, reason))
    if strategy in ("zero2", "fsdp"):
        root, all_units = ([units.root], [units.root, *units.others])
        passes = 3 if strategy == "fsdp" else 2
        filling = passes * (_filled_bytes(all_units, num_ranks) - num_bytes)
        reason = "every parameter's rows are filled up until the ranks divide them"
        found.append(TrafficDifference(ring_sent_bytes("all-gather", filling, num_ranks), reason))
        if strategy == "fsdp":
            kept = ring_sent_bytes("all-gather", _filled_bytes(root, num_ranks), num_ranks)
            found.append(TrafficDifference(-kept, "the root unit stays whole from forward to backward"))
    return [difference for difference in found if difference.sent_bytes]


def _filled_bytes(units: Sequence[Sequence[Shape]], num_ranks: int) -> int:
    rows = ((-(-shape[0] // num_ranks) * num_ranks, shape[1:]) for unit in units for shape in unit)
    return FP32_BYTES * sum(num_rows * math.prod(rest) for num_rows, rest in rows)


@dataclass(frozen=True)
class TrafficRow:
    """One strategy, as one rank saw it."""

    name: str
    num_ranks: int
    start: Mapping[str, CollectiveCount]
    """Collectives that built the distributed model, by kind."""
    backward: Mapping[str, CollectiveCount]
    """Of forward and backward of one step."""
    update: Mapping[str, CollectiveCount]
    """Of its update."""
    sent_bytes: float
    """In this step."""
    numbers_bytes: float
    """Of these, what is neither weights nor gradients: counts of tokens, losses, norms; see `is_number`."""
    formula: Traffic
    differences: tuple[TrafficDifference, ...]

    @property
    def expected_bytes(self) -> float:
        """The formula with the differences."""
        return self.formula.total + sum(difference.sent_bytes for difference in self.differences)

    def problems(self, tolerance: float = TOLERANCE) -> list[str]:
        """Return what is not explained, in a sentence, or nothing.

        Args:
            tolerance: fraction of the expected bytes; a part of one byte is always allowed.
        """
        sent_bytes = self.sent_bytes - self.numbers_bytes
        if abs(sent_bytes - self.expected_bytes) < max(1, tolerance * self.expected_bytes):
            return []
        return [
            f"{self.name} on {self.num_ranks} ranks: {sent_bytes:,.0f} bytes are sent in a step and "
            f"{self.expected_bytes:,.0f} should be, within {100 * tolerance:g} %: the strategy, its settings or the "
            "number of ranks is another than stated"
        ]


@dataclass(frozen=True)
class TrafficTable:
    """Rows of one or several runs."""

    rows: tuple[TrafficRow, ...]
    not_run: tuple[NotRun, ...] = ()

    def __add__(self, other: TrafficTable) -> TrafficTable:
        return TrafficTable(self.rows + other.rows, self.not_run + other.not_run)

    def problems(self, tolerance: float = TOLERANCE) -> list[str]:
        """Return what no row explains."""
        return [problem for row in self.rows for problem in row.problems(tolerance)]

    def __str__(self) -> str:
        """Show MB (10^6 bytes) that a rank sends, and the collectives of a step: calls and payload in MB.

        Counts, losses and norms are a part of what is sent, and shown beside it in bytes.
        """
        header = ["strategy", "ranks", "sent", "formula", "expected", "counts and norms (bytes)"]
        rows = [[*header, "forward and backward", "update", "at start"]]
        for row in self.rows:
            sizes = [f"{size / MB:.3f}" for size in (row.sent_bytes, row.formula.total, row.expected_bytes)]
            calls = [_describe(counts) for counts in (row.backward, row.update, row.start)]
            rows.append([row.name, str(row.num_ranks), *sizes, f"{row.numbers_bytes:.0f}", *calls])
        return align_with_reasons(rows, self.not_run, header.index("formula"))

    def reasons(self) -> str:
        """Say for each strategy why it sends something else than the formula says, a line each."""
        rows = [["strategy", "ranks", "MB sent", "reason"]]
        for row in self.rows:
            for difference in row.differences:
                size = f"{difference.sent_bytes / MB:+.3f}"
                rows.append([row.name, str(row.num_ranks), size, difference.reason])
        return align(rows)


def _describe(counts: Mapping[str, CollectiveCount]) -> str:
    """Name what moved more than a few bytes."""
    large = {kind: count for kind, count in counts.items() if count.payload_bytes >= MB / 100}
    words = [f"{count.calls} {kind} {count.payload_bytes / MB:.2f}" for kind, count in large.items()]
    return ", ".join(words) or "-"


def is_number(call: CollectiveCall, num_tensors: int) -> bool:
    """Tell whether a call of a step carries numbers about it: at most one a tensor of the model, or three counts.

    Args:
        call: of a step.
        num_tensors: of the model's parameters; FSDP2's norm is one number for each.
    """
    return call.kind == "all-reduce" and call.payload_bytes <= max(COUNTS_BYTES, FP32_BYTES * num_tensors)


def sum_numbers(calls: Sequence[CollectiveCall], units: Units) -> float:
    """Return the bytes that this rank sends for the numbers among the calls of a step of such a model."""
    num_tensors = len(units.shapes())
    return sum(call.sent_bytes for call in calls if is_number(call, num_tensors))


def watch_traffic(
    trainer: Updates,
    start: Mapping[str, CollectiveCount],
    units: Units,
    strategy: str,
    num_ranks: int,
    *,
    name: str = "",
    frees: bool = False,
) -> TrafficRow:
    """Count the collectives of one step; all ranks must call this.

    Args:
        trainer: has made two steps or more: strategies arrange their buffers and their order in these.
        start: collectives that built it, by kind.
        units: of its model.
        strategy: that it was asked for.
        num_ranks: of the run.
        name: what the row is called; by default the strategy.
        frees: as in `explain_traffic`.

    Returns:
        This rank's row.
    """
    marks: list[int] = []

    def mark(_: Any) -> None:
        marks.append(len(counter.calls))

    trainer.before_update.append(mark)
    with CollectiveCounter() as counter:
        trainer.train_step()
    trainer.before_update.remove(mark)
    return TrafficRow(
        name=name or strategy,
        num_ranks=num_ranks,
        start=start,
        backward=count_calls(counter.calls[: marks[0]]),
        update=count_calls(counter.calls[marks[0] :]),
        sent_bytes=counter.sent_bytes,
        numbers_bytes=sum_numbers(counter.calls, units),
        formula=estimate_fp32_traffic(units, strategy, num_ranks),
        differences=tuple(explain_traffic(units, strategy, num_ranks, frees=frees)),
    )


def estimate_fp32_traffic(units: Units, strategy: str, num_ranks: int) -> Traffic:
    """Return what the formula says of a step of fp32 training, in bytes that a rank sends."""
    stage = ZERO_STAGES[strategy]
    sizes = {"weight_bytes": FP32_BYTES, "gradient_bytes": FP32_BYTES}
    return estimate_step_traffic(units.num_params(), num_ranks, stage, **sizes)
