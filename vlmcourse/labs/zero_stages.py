"""The same tiny model under every stage of ZeRO, measured on the ranks at hand, for chapter 5.

Enters: names of strategies. Leaves: tables of state and of traffic, each next to its formula. On one rank the stages of
torch are not run, since they would be 'single', and the tables say so; DeepSpeed's engines run there and do not hold
what 'single' holds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.labs.lone_engine import LoneEngine
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.state_table import OFFLOADED, NotRun, StateRow, StateTable, build_row, watch_peaks, watch_state
from vlmcourse.monitor.traffic_table import TrafficRow, TrafficTable, Units, estimate_fp32_traffic, watch_traffic
from vlmcourse.parallel.counting import CollectiveCounter
from vlmcourse.parallel.engines import build_deepspeed_settings
from vlmcourse.parallel.fsdp import find_units
from vlmcourse.parallel.ranks import Ranks, init_ranks
from vlmcourse.parallel.sync import is_engine
from vlmcourse.planner.state_layout import ZERO_STAGES, Groups, estimate_fp32_state
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.strategies import DEEPSPEED, PAPER_NAMES
from vlmcourse.train.optimizer import build_optimizer
from vlmcourse.train.trainer import Trainer

FREES = "deepspeed-zero3, frees weights after use"
"""ZeRO-3 with settings under which a small model too is gathered twice."""
STAGES = ("ddp", "zero1", "zero2", "fsdp", "deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")
EVERY_STAGE = tuple(name for name in ZERO_STAGES if name != "single")
"""These, ZeRO-0, and what accelerate starts."""


def tiny_config(strategy: str, deepspeed_config: str = "") -> TrainConfig:
    """Return a short fp32 run of the tiny model under a strategy; with "+cpu" at its end it offloads (fsdp all)."""
    strategy, offloads = _strategy_of(strategy), strategy.endswith(OFFLOADED)
    offload = {"optimizer": "cpu", "parameters": "cpu" if strategy == "fsdp" else "none"} if offloads else {}
    parallel = {"strategy": strategy} | ({"deepspeed_config": deepspeed_config} if deepspeed_config else {})
    train = {"num_steps": 100, "micro_batch_size": 2}
    return parse_config({"train": train, "parallel": parallel, "offload": offload})


@contextmanager
def open_trainer(config: TrainConfig, ranks: Ranks) -> Iterator[Trainer]:
    """Give a trainer, and let an engine go at the end: its hooks would keep its buffers alive."""
    trainer = Trainer(config, ranks, show_progress=False)
    try:
        yield trainer
    finally:
        close(trainer)


@contextmanager
def show_running(ranks: Ranks) -> Iterator[Callable[[str], None]]:
    """Give what puts a text into one line on rank 0, in place of the text before: what a long cell is at."""
    with tqdm(file=sys.stdout, disable=not ranks.is_main, bar_format="{desc} ({elapsed})") as line:
        yield line.set_description_str


def in_turn(names: Sequence[str], ranks: Ranks, doing: str = "running") -> Iterator[str]:
    """Yield names one after the other and show on rank 0 which of them it is."""
    with show_running(ranks) as show:
        for number, name in enumerate(names, 1):
            show(f"{doing} {name}, {number} of {len(names)}")
            yield name


def close(trainer: Any) -> None:
    """Let a trainer's engine go, if it has one."""
    if is_engine(trainer.model):
        trainer.model.destroy()


def find_groups(config: TrainConfig, shape: VLMShape) -> tuple[Groups, int]:
    """Return the shapes of a model's trained parameters by optimizer group, and the size of its largest module."""
    plain = build_model(shape, device="meta", seed=0)
    groups = build_optimizer(plain, config.optimizer).param_groups
    return [[tuple(p.shape) for p in group["params"]] for group in groups], max(map(_own_params, plain.modules()))


def _own_params(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters(recurse=False))


def find_unit_shapes(shape: VLMShape) -> Units:
    """Return what FSDP2, and what DeepSpeed, gathers together in a model of this shape."""
    plain = build_model(shape, device="meta", seed=0)
    others = find_units(plain)
    taken = {id(p) for unit in others for p in unit.parameters()}
    root = [tuple(p.shape) for p in plain.parameters() if id(p) not in taken]
    groups = find_groups(tiny_config("ddp"), shape)[0]
    return Units(root, [[tuple(p.shape) for p in unit.parameters()] for unit in others], groups)


@contextmanager
def write_freeing_settings() -> Iterator[str]:
    """Give the path of a ds_config.json of ZeRO-3 that keeps no gathered weights, and remove it at the end."""
    settings = build_deepspeed_settings(tiny_config("deepspeed-zero3"))
    zero = settings["zero_optimization"]
    settings["zero_optimization"] = zero | {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        yield str(path)


# --- Measuring ------------------------------------------------------------------------------------------------------


def measure_stages(
    strategies: Sequence[str] = (*STAGES, FREES), ranks: Ranks | None = None, *, with_peaks: bool = True
) -> tuple[StateTable, TrafficTable]:
    """Train the tiny model for some steps under each strategy and measure its state and traffic; all ranks call this.

    Args:
        strategies: keys of `planner.state_layout.ZERO_STAGES`; `FREES`, for its traffic alone; "deepspeed-zero2+cpu",
            "deepspeed-zero3+cpu" and the like with the optimizer's state in main memory, for their state alone. On one
            rank 'single' comes first by itself; a strategy that would be the same there is not run, and the tables say
            why.
        ranks: this process's place; by default what `init_ranks` finds.
        with_peaks: whether to see what is held for a while in a step too, in a step that takes as long as ten.

    Returns:
        State of all ranks, on every rank; traffic as this rank saw it: under all of these every rank makes the same
        calls.

    Raises:
        ValueError: if 'single' is asked for on several ranks, or the formula does not know a strategy.
    Communicates: what the runs do, and an all-gather of the rows.
    """
    ranks = ranks or init_ranks(timeout_s=120)
    units = find_unit_shapes(get_model(tiny_config("ddp").model.preset))
    states: list[StateRow] = []
    traffic: list[TrafficRow] = []
    skipped: list[NotRun] = []
    names = strategies if ranks.world_size > 1 else ("single", *(name for name in strategies if name != "single"))
    for name in in_turn(names, ranks):
        if reason := _say_why_not(name, ranks):
            skipped.append(NotRun(name, ranks.world_size, 0.0, reason))
            continue
        held, sent = _measure_stage(name, units, ranks, with_peaks=with_peaks)
        states += [held] if name != FREES else []
        traffic += [sent] if not name.endswith(OFFLOADED) else []
    return _gather_states(states, skipped, units, ranks), _table_traffic(traffic, skipped, units)


def measure_states(strategies: Sequence[str] = STAGES, ranks: Ranks | None = None) -> StateTable:
    """Measure every rank's state under each strategy, next to the formula; arguments and errors of `measure_stages`."""
    return measure_stages(strategies, ranks)[0]


def measure_traffic(strategies: Sequence[str] = (*STAGES, FREES), ranks: Ranks | None = None) -> TrafficTable:
    """Count what each strategy sends in a step, and at its start; arguments and errors of `measure_stages`."""
    return measure_stages(strategies, ranks, with_peaks=False)[1]


def _say_why_not(name: str, ranks: Ranks) -> str:
    """Say why nobody starts a strategy on one rank; empty if it is run."""
    if ranks.world_size > 1 or name == "single":
        return ""
    if _strategy_of(name) not in DEEPSPEED:
        return "not run: with one rank there is nothing to share, and it would be 'single'"
    if ranks.backend == "none":
        return "not run: an engine needs a process group, of one rank too: start it with %%torchrun -n 1"
    return ""


def _strategy_of(name: str) -> str:
    """Return what the configuration calls it."""
    plain = name.partition(",")[0].removesuffix(OFFLOADED)
    return PAPER_NAMES.get(plain, plain)


def _measure_stage(name: str, units: Units, ranks: Ranks, *, with_peaks: bool) -> tuple[StateRow, TrafficRow]:
    """Start one strategy, measure this rank, and let it go."""
    strategy, frees, num_ranks = _strategy_of(name), name == FREES, ranks.world_size
    with write_freeing_settings() if frees else nullcontext("") as path:
        config = tiny_config(name.partition(",")[0], path)
        with CollectiveCounter() as at_start:
            is_lone = num_ranks == 1 and strategy in DEEPSPEED
            trainer = LoneEngine(config, ranks) if is_lone else Trainer(config, ranks, show_progress=False)
        try:
            groups, largest_layer = find_groups(config, trainer.shape)
            measured = watch_state(trainer), watch_peaks(trainer) if with_peaks else None
            sent = watch_traffic(trainer, at_start.counts, units, strategy, num_ranks, name=name, frees=frees)
        finally:
            close(trainer)
    held_as = strategy if frees else name
    return build_row(measured, groups, held_as, num_ranks, ranks.rank, largest_layer), sent


def _gather_states(rows: list[StateRow], skipped: list[NotRun], units: Units, ranks: Ranks) -> StateTable:
    """Put the rows of all ranks together, those of one strategy next to each other."""
    formulas = [
        replace(row, formula_bytes=estimate_fp32_state(units.groups, _strategy_of(row.strategy), row.num_ranks).total)
        for row in skipped
        if row.strategy != FREES
    ]
    if ranks.world_size == 1:
        return StateTable(tuple(rows), tuple(formulas))
    everyone: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everyone, rows)
    by_strategy = zip(*everyone, strict=True)
    return StateTable(tuple(row for of_strategy in by_strategy for row in of_strategy), tuple(formulas))


def _table_traffic(rows: list[TrafficRow], skipped: list[NotRun], units: Units) -> TrafficTable:
    formulas = [
        replace(row, formula_bytes=estimate_fp32_traffic(units, _strategy_of(row.strategy), row.num_ranks).total)
        for row in skipped
        if not row.strategy.endswith(OFFLOADED)
    ]
    return TrafficTable(tuple(rows), tuple(formulas))
