"""Training state of every rank by owner: measured, by the formula, and by DeepSpeed's estimator, in one table.

Enters: a trainer on each rank, and the shapes of its model's parameters. Leaves: a `StateTable` whose rows say what was
measured, what the formula expects and why they differ; tables of runs on other numbers of ranks are added with `+`.
The moment is between backward and update, when gradients and optimizer state both exist. Chapter 5.

Source of the estimator: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vlmcourse.layout import align
from vlmcourse.monitor.ledger import Ledger, StepLedger, measure_ledger
from vlmcourse.planner.memory import StateBytes
from vlmcourse.planner.state_layout import Difference, Groups, count_params, estimate_fp32_state, explain_state
from vlmcourse.strategies import DEEPSPEED

MB = 10**6
OWNERS = ("weights", "gradients", "optimizer")
OFFLOADED = "+cpu"
"""At the end of a strategy's name in a table: its optimizer state lies in main memory, under fsdp all state."""
TOLERANCE = 0.001
"""Of a row's total: what may stay unexplained. Measured: 0 bytes on 2 and 4 ranks."""
ASSUMPTIONS = """DeepSpeed's estimator counts 16-bit training with 18 bytes a parameter that the ranks share, and adds
2 for whole 16-bit weights in ZeRO-2, or in ZeRO-3 4 for each parameter of the largest layer. (Of its 18, 2 + 4 are
gradients in 16 bits and in fp32, 4 the fp32 copy, 8 Adam's moments, says its source.) It knows no padding, no buffers
and no activations, and has no estimate for ZeRO-0 and 1. fp32 training takes 4 + 4 + 4 + 8 = 20 bytes a parameter in
DeepSpeed: the fp32 copy is made all the same."""


class Updates(Protocol):
    """Whatever makes optimizer steps and tells when weights are about to change, such as a `Trainer`."""

    model: Any
    optimizer: Any
    before_update: list[Callable[[Any], None]]

    def train_step(self) -> object:
        """Make one optimizer step, on all ranks together."""
        ...


@dataclass(frozen=True)
class Peaks:
    """What is held for a while in a step, at its most, in bytes."""

    gradients_bytes: int
    """In backward, before whole gradients are freed."""
    gathered_bytes: int
    """Whole weights of a rank that keeps shards."""


@dataclass(frozen=True)
class StateRow:
    """One rank under one strategy."""

    strategy: str
    num_ranks: int
    rank: int
    measured: Ledger
    peaks: Peaks | None
    """None where no step was watched for them."""
    formula: StateBytes
    """16 bytes a parameter in fp32, split as the stage says."""
    differences: tuple[Difference, ...]
    """Why this rank has something else than the formula says, computed without looking at what was measured."""
    deepspeed_bytes: int | None
    """DeepSpeed's own estimate of a device's memory; None where it has none."""

    @property
    def expected(self) -> StateBytes:
        """The formula with the differences."""
        return StateBytes(**{o: getattr(self.formula, o) + self._sum(o) for o in OWNERS})

    @property
    def expected_buffers_bytes(self) -> int:
        """Of the differences."""
        return self._sum("buffers")

    def _sum(self, owner: str) -> int:
        return sum(difference.num_bytes for difference in self.differences if difference.owner == owner)

    def problems(self, tolerance: float = TOLERANCE) -> list[str]:
        """Return which owners hold something else than expected, one sentence each.

        Args:
            tolerance: fraction of the expected total.
        """
        expected = {owner: getattr(self.expected, owner) for owner in OWNERS} | {"buffers": self.expected_buffers_bytes}
        allowed = tolerance * self.expected.total
        return [
            f"{self.strategy} on {self.num_ranks} ranks, rank {self.rank}: {owner} are {found:,} bytes and should be "
            f"{size:,} within {allowed:,.0f}: the strategy, its settings or the number of ranks is another than stated"
            for owner, size in expected.items()
            if abs((found := getattr(self.measured, f"{owner}_bytes")) - size) > allowed
        ]


@dataclass(frozen=True)
class NotRun:
    """A strategy that nobody starts on this number of ranks."""

    strategy: str
    num_ranks: int
    formula_bytes: float
    """What the formula says all the same."""
    reason: str


@dataclass(frozen=True)
class StateTable:
    """Rows of one or several runs."""

    rows: tuple[StateRow, ...]
    not_run: tuple[NotRun, ...] = ()

    def __add__(self, other: StateTable) -> StateTable:
        return StateTable(self.rows + other.rows, self.not_run + other.not_run)

    def problems(self, tolerance: float = TOLERANCE) -> list[str]:
        """Return what no row explains; empty if measured and expected agree everywhere."""
        return [problem for row in self.rows for problem in row.problems(tolerance)]

    def fullest(self) -> list[StateRow]:
        """Return for each strategy and number of ranks the rank with the most state."""
        found: dict[tuple[str, int], StateRow] = {}
        for row in self.rows:
            best = found.setdefault((row.strategy, row.num_ranks), row)
            if row.measured.total_bytes > best.measured.total_bytes:
                found[row.strategy, row.num_ranks] = row
        return list(found.values())

    def ledgers(self, num_ranks: int) -> dict[str, list[Ledger]]:
        """Return what every rank measured by strategy, as `plots.plot_ledgers` takes it."""
        found: dict[str, list[Ledger]] = {}
        for row in self.rows:
            if row.num_ranks == num_ranks:
                found.setdefault(row.strategy, []).append(row.measured)
        return found

    def formulas(self, num_ranks: int) -> dict[str, StateBytes]:
        """Return the formula by strategy, as `plots.plot_ledgers` takes it."""
        return {row.strategy: row.formula for row in self.rows if row.num_ranks == num_ranks}

    def __str__(self) -> str:
        """Show the fullest rank of each strategy, in MB (10^6 bytes)."""
        header = [
            "strategy",
            "ranks",
            "weights",
            "gradients",
            "optimizer",
            "total",
            "formula",
            "expected",
            "DeepSpeed's",
        ]
        rows = [[*header, "buffers", "gradients at most", "whole weights"]]
        for row in self.fullest():
            sizes = [*(getattr(row.measured, f"{owner}_bytes") for owner in OWNERS), row.measured.total_bytes]
            sizes += [row.formula.total, row.expected.total, row.deepspeed_bytes, row.measured.buffers_bytes]
            sizes += [row.peaks.gradients_bytes, row.peaks.gathered_bytes] if row.peaks is not None else [None, None]
            words = ["-" if size is None else f"{size / MB:,.3f}" for size in sizes]
            rows.append([row.strategy, str(row.num_ranks), *words])
        return align_with_reasons(rows, self.not_run, header.index("formula"))

    def reasons(self, strategy: str, num_ranks: int) -> str:
        """Say why the fullest rank of a strategy does not hold what the formula says, a line each.

        Raises:
            ValueError: if the table has no such run.
        """
        found = [row for row in self.fullest() if (row.strategy, row.num_ranks) == (strategy, num_ranks)]
        if not found:
            known = sorted({(row.strategy, row.num_ranks) for row in self.rows})
            raise ValueError(f"strategy = {strategy!r}, num_ranks = {num_ranks}: choose one of {known}")
        rows = [["owner", "bytes", "reason"]]
        rows += [[d.owner, f"{d.num_bytes:+,}", d.reason] for d in found[0].differences]
        return align(rows)


def align_with_reasons(rows: list[list[str]], not_run: Sequence[NotRun], formula_column: int) -> str:
    """Return a table with a line for each strategy that was not run: what the formula says in MB, and the reason.

    Args:
        rows: of the others, strategy and ranks first; the first row is a header.
        not_run: what the table would lack.
        formula_column: where the formula stands.
    """
    width, rows = len(rows[0]), [*rows]
    for row in not_run:
        words = [row.strategy, str(row.num_ranks), *["-"] * (width - 2)]
        words[formula_column] = f"{row.formula_bytes / MB:,.3f}"
        rows.append(words)
    lines = align(rows).splitlines()
    first = len(lines) - len(not_run)
    told = [f"{line}  {row.reason}" for line, row in zip(lines[first:], not_run, strict=True)]
    return "\n".join([*lines[:first], *told])


def watch_state(trainer: Updates) -> Ledger:
    """Make two steps and return this rank's state between backward and update of the second; all ranks call this."""
    found: list[Ledger] = []

    def look(_: Any) -> None:
        found.append(measure_ledger(trainer.model, trainer.optimizer))

    trainer.train_step()
    trainer.before_update.append(look)
    trainer.train_step()
    trainer.before_update.remove(look)
    return found[0]


def watch_peaks(trainer: Updates) -> Peaks:
    """Make a step and return what this rank held for a while in it; all ranks call this.

    The ledger looks after every operation: the step takes as long as ten.
    """
    with StepLedger(trainer.model, trainer.optimizer) as course:
        trainer.train_step()
    sizes: list[Mapping[str, int]] = [sample.by_owner() for sample in course.samples]
    most = [max(of.get(owner, 0) for of in sizes) for owner in ("gradients", "gathered")]
    return Peaks(*most)


def build_row(
    measured: tuple[Ledger, Peaks | None], groups: Groups, strategy: str, num_ranks: int, rank: int, largest_layer: int
) -> StateRow:
    """Put what was measured next to what was to be expected.

    Args:
        measured: of this rank, by `watch_state` and, or None, `watch_peaks`.
        groups: shapes of all trained parameters, by optimizer group.
        strategy: that the run was asked for, with `OFFLOADED` at its end where the optimizer's state is offloaded.
        num_ranks: of the run.
        rank: this one.
        largest_layer: parameters of the largest module, for DeepSpeed's estimator.
    """
    estimate = estimate_by_deepspeed(count_params(groups), largest_layer, strategy, num_ranks)
    plain, offloads = strategy.removesuffix(OFFLOADED), strategy.endswith(OFFLOADED)
    formula = estimate_fp32_state(groups, plain, num_ranks)
    differences = tuple(explain_state(groups, plain, num_ranks, rank, offloads=offloads))
    return StateRow(strategy, num_ranks, rank, *measured, formula, differences, estimate)


def estimate_by_deepspeed(num_params: int, largest_layer: int, strategy: str, num_ranks: int) -> int | None:
    """Return the bytes that DeepSpeed's own estimator gives one device without offload; see `ASSUMPTIONS`.

    Args:
        num_params: of the model.
        largest_layer: parameters of its largest module, which ZeRO-3 gathers as a whole.
        strategy: of the run; it has estimates for DeepSpeed's stages 2 and 3 only.
        num_ranks: all on one node.

    Returns:
        Bytes, None for another strategy.
    """
    stage = DEEPSPEED.get(strategy)
    if stage not in (2, 3):
        return None
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # arithmetic: an import for it must not look for devices
    module = importlib.import_module(f"deepspeed.runtime.zero.{'stage_1_and_2' if stage == 2 else 'stage3'}")
    if stage == 2:
        return module.estimate_zero2_model_states_mem_needs(num_params, num_ranks, cpu_offload=False)[1]
    options = {"cpu_offload": False, "cpu_offload_params": False}
    return module.estimate_zero3_model_states_mem_needs(num_params, largest_layer, num_ranks, **options)[1]
