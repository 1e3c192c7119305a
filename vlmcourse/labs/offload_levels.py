"""What each level of offloading holds and costs, under FSDP2 and under DeepSpeed: the same model on the ranks at hand.

Enters: a budget for what each rank may hold on its "device". Leaves: an `OffloadTable`, a row a strategy and level:
bytes predicted and measured, whether they keep the budget, losses, and the time of a step measured in turns next to the
sign of the predicted cost. On a CPU the device is the account of `ch05.py`, and the time is that of the engines' extra
work alone: no link is crossed. Chapter 5.

DeepSpeed's sizes (what it gathers ahead, what it sends at once) are meant for large models; here they are given in a
ds_config.json of units of this one, or a bucket of 2 GB would be all that is seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vlmcourse.config import ConfigError, TrainConfig
from vlmcourse.labs.ch05 import (
    MAIN_MEMORY,
    ONE_LAYER,
    Account,
    budget_config,
    budget_plan,
    decide_for_budget,
    longest_sequence,
    measure_account,
    needed_bytes,
)
from vlmcourse.labs.zero_stages import find_unit_shapes, open_trainer
from vlmcourse.layout import align
from vlmcourse.monitor.step_cost import measure_step_costs
from vlmcourse.parallel.engines import build_deepspeed_settings
from vlmcourse.parallel.ranks import Ranks, init_ranks
from vlmcourse.planner import Decision, Plan
from vlmcourse.planner.offload_cost import estimate_offload_cost
from vlmcourse.planner.offload_memory import OFFLOAD_LEVELS
from vlmcourse.planner.state_layout import count_params
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.state_offload import OffloadConfig
from vlmcourse.strategies import DEEPSPEED
from vlmcourse.train.trainer import Trainer

FP32_BYTES = 4
MB = 10**6
BY_LEVEL = {
    "none": OffloadConfig(),
    "optimizer": OffloadConfig(optimizer="cpu"),
    "optimizer+parameters": MAIN_MEMORY,
    "layered": ONE_LAYER,
}
"""Level of the tree -> section [offload]."""
PAIR = ("fsdp", "deepspeed-zero3")
RECOMPUTE = {"fsdp": "full", "deepspeed-zero3": "none"}
"""What each strategy does with activations here: inside a DeepSpeed engine recomputing is refused (`engine_rules`)."""


@dataclass(frozen=True)
class LevelRow:
    """One level under one strategy."""

    strategy: str
    level: str
    predicted_bytes: int
    """That a rank needs on its device, by the planner; under DeepSpeed with its bucket and second copy of weights."""
    budget_bytes: int
    refused: str = ""
    """Why this strategy cannot run the level; the rest is then not there."""
    account: Account | None = None
    predicted_s: float = 0.0
    """By which a step gets longer, with the speeds of an imagined link: only its sign means something here."""
    ratios: tuple[float, ...] = ()
    """Seconds of a step over those of level none in the same round."""

    @property
    def fits(self) -> bool | None:
        """Whether the measured bytes keep the budget; None where nothing was run."""
        return None if self.account is None else self.account.held_bytes <= self.budget_bytes

    @property
    def verdict(self) -> str:
        """What becomes of the level under this budget."""
        if self.account is None:
            return "cannot be run"
        return "fits" if self.fits else "over it: refused"

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        measured = ["-"] * 4
        if self.account is not None:
            ratios = sorted(self.ratios)
            measured = [f"{size / MB:.3f}" for size in (self.account.held_bytes, self.account.gathered_bytes)]
            measured += ["longer" if self.predicted_s > 0 else "the same"]
            measured += [f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"]
        predicted, budget = (f"{size / MB:.3f}" for size in (self.predicted_bytes, self.budget_bytes))
        return [self.strategy, self.level, predicted, *measured, budget, self.verdict]


@dataclass(frozen=True)
class OffloadTable:
    """All levels under all strategies, as one rank saw them."""

    rows: tuple[LevelRow, ...]
    num_ranks: int

    @property
    def loss_gap(self) -> float:
        """Largest difference between the losses of a step: all rows train the same model."""
        ran = [row.account.losses for row in self.rows if row.account is not None]
        return max(max(step) - min(step) for step in zip(*ran, strict=True))

    def row(self, strategy: str, level: str) -> LevelRow:
        """Return one row.

        Raises:
            ValueError: if there is none.
        """
        for row in self.rows:
            if (row.strategy, row.level) == (strategy, level):
                return row
        raise ValueError(
            f"no row for {strategy!r} and {level!r}: there are {[(r.strategy, r.level) for r in self.rows]}"
        )

    def __str__(self) -> str:
        """Show budget and losses, a line a level, and why some were not run."""
        head = ["strategy", "off the device", "predicted MB", "measured MB", "whole weights MB", "predicted step"]
        head += ["x time of none", "budget MB", "verdict"]
        why = [f"{row.strategy}, {row.level}: {row.refused}" for row in self.rows if row.refused]
        lines = [
            f"{self.num_ranks} ranks; bytes of the fullest rank's device; losses differ by {self.loss_gap:.0e} at most",
            *("", align([head, *(row.cells() for row in self.rows)])),
            *([""] if why else []),
        ]
        return "\n".join([*lines, *why])


def compare_offload_levels(
    budget_bytes: int | None = None,
    *,
    strategies: Sequence[str] = PAIR,
    levels: Sequence[str] = OFFLOAD_LEVELS,
    micro_batch_size: int = 1,
    num_rounds: int = 5,
    ranks: Ranks | None = None,
) -> OffloadTable:
    """Train the tiny model at every level under every strategy, in turns; all ranks must call this.

    Args:
        budget_bytes: of each rank's device; by default, for each strategy, halfway between what the planner predicts
            for the last two levels: the last alone keeps that.
        strategies: of `PAIR`.
        levels: of `BY_LEVEL`, least first; none among them, which the others' times are set against.
        micro_batch_size: samples of a rank's forward pass.
        num_rounds: timed steps of each row, 1 or more.
        ranks: this process's place, one of 2 or more; by default what `init_ranks` finds.

    Returns:
        The table.

    Raises:
        ValueError: if there is one rank, no round, no level none, or an unknown name.
    Communicates: what the runs do, and an all-reduce of a few numbers for each.
    """
    unknown = {*strategies} - {*PAIR} | {*levels} - {*BY_LEVEL}
    if unknown or "none" not in levels or num_rounds < 1:
        raise ValueError(
            f"strategies = {tuple(strategies)}, levels = {tuple(levels)}, num_rounds = {num_rounds}: choose of {PAIR} "
            f"and {tuple(BY_LEVEL)}, none among them, and 1 or more rounds"
        )
    ranks = ranks or init_ranks(timeout_s=120)
    if ranks.world_size < 2:
        raise ValueError(f"world_size = {ranks.world_size}: ZeRO-3 splits over 2 ranks or more; start more")
    rows: list[LevelRow] = []
    for strategy in strategies:
        found = _measure_strategy(strategy, levels, micro_batch_size, num_rounds, ranks)
        least = [row.predicted_bytes for row in found[-2:]]
        budget = budget_bytes if budget_bytes is not None else sum(least) // len(least)
        rows += [dataclasses.replace(row, budget_bytes=budget) for row in found]
    return OffloadTable(tuple(rows), ranks.world_size)


def _measure_strategy(
    strategy: str, levels: Sequence[str], micro_batch_size: int, num_rounds: int, ranks: Ranks
) -> list[LevelRow]:
    """Return a row a level: first each alone for its bytes, then all in turns for their times."""
    trainers: dict[str, Trainer] = {}
    accounts: dict[str, Account] = {}
    refused: dict[str, str] = {}
    with ExitStack() as stack:
        for level in levels:
            try:
                config = budget_config(
                    BY_LEVEL[level], micro_batch_size, strategy=strategy, recompute=RECOMPUTE[strategy]
                )
            except ConfigError as error:
                refused[level] = "; ".join(error.problems)
                continue
            if strategy in DEEPSPEED:
                config = stack.enter_context(_sized(config))
            trainers[level] = stack.enter_context(open_trainer(config, ranks))
            accounts[level] = measure_account(trainers[level], BY_LEVEL[level], ranks)
        seconds = {name: cost.seconds for name, cost in measure_step_costs(trainers, 1, num_rounds).items()}
        first = trainers["none"]
        seq_len = longest_sequence(first, ranks)
        shape = first.shape
    decision = decide_for_budget(10**12, ranks.world_size, micro_batch_size, seq_len, RECOMPUTE[strategy])
    plan = budget_plan(ranks.world_size, micro_batch_size, RECOMPUTE[strategy])
    return [
        LevelRow(
            strategy=strategy,
            level=level,
            predicted_bytes=needed_bytes(decision)[level] + _extra_bytes(strategy, level, shape, ranks.world_size),
            budget_bytes=0,
            refused=refused.get(level, ""),
            account=accounts.get(level),
            predicted_s=_added_s(decision, plan, level),
            ratios=tuple(a / b for a, b in zip(seconds.get(level, ()), seconds["none"], strict=False)),
        )
        for level in levels
    ]


def _largest_unit(shape: VLMShape) -> int:
    """Return the elements of the largest unit, of which DeepSpeed's sizes are made here."""
    units = find_unit_shapes(shape)
    return max(count_params([unit]) for unit in units.others)


@contextlib.contextmanager
def _sized(config: TrainConfig) -> Iterator[TrainConfig]:
    """Give the same run with a ds_config.json that says all of it, in sizes of this model."""
    unit = _largest_unit(get_model(config.model.preset))
    settings = build_deepspeed_settings(config)
    zero = settings["zero_optimization"]
    zero["reduce_bucket_size"] = unit
    if not config.offload.layered:
        zero |= {"stage3_prefetch_bucket_size": unit, "stage3_max_live_parameters": 2 * unit}
        zero["stage3_max_reuse_distance"] = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        parallel = dataclasses.replace(config.parallel, deepspeed_config=str(path))
        yield dataclasses.replace(config, parallel=parallel, offload=OffloadConfig())


def _extra_bytes(strategy: str, level: str, shape: VLMShape, num_ranks: int) -> int:
    """Return what DeepSpeed has on the device beside what the formula says of fp32 training."""
    if strategy not in DEEPSPEED:
        return 0
    units = find_unit_shapes(shape)
    copies = -(-units.num_params() // num_ranks) if level == "none" else 0  # a second copy of the shards is updated
    return FP32_BYTES * (_largest_unit(shape) + copies)  # and the bucket that gradients are sent from


def _added_s(decision: Decision, plan: Plan, level: str) -> float:
    """Return the seconds by which the planner lets a step get longer at a level."""
    memory = next(asked.memory for asked in decision.levels if asked.name == level)
    assert memory is not None  # under ZeRO-3 every level is possible
    return estimate_offload_cost(memory, plan, decision.machine, level=level).added_s()
