"""The same tiny model under every stage of ZeRO, measured on the ranks at hand, for chapter 5.

Enters: names of strategies. Leaves: tables of state and of traffic, each next to its formula.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.state_table import OFFLOADED, StateRow, StateTable, build_row, watch_state
from vlmcourse.monitor.traffic_table import TrafficRow, TrafficTable, Units, watch_traffic
from vlmcourse.parallel.engines import build_deepspeed_settings
from vlmcourse.parallel.fsdp import find_units
from vlmcourse.parallel.ranks import Ranks, init_ranks
from vlmcourse.parallel.sync import is_engine
from vlmcourse.planner.state_layout import Groups
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.train.optimizer import build_optimizer
from vlmcourse.train.trainer import Trainer

FREES = "deepspeed-zero3, frees weights after use"
"""ZeRO-3 with settings under which a small model too is gathered twice."""
STAGES = ("ddp", "zero1", "zero2", "fsdp", "deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")


def tiny_config(strategy: str, deepspeed_config: str = "") -> TrainConfig:
    """Return a short fp32 run of the tiny model under a strategy; with "+cpu" at its end it offloads (fsdp all)."""
    strategy, offloads = strategy.removesuffix(OFFLOADED), strategy.endswith(OFFLOADED)
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


def measure_states(strategies: Sequence[str] = STAGES, ranks: Ranks | None = None) -> StateTable:
    """Train the tiny model for three steps under each strategy and measure every rank's state; all ranks call this.

    Args:
        strategies: keys of `planner.state_layout.ZERO_STAGES`, or "deepspeed-zero2+cpu", "deepspeed-zero3+cpu" and
            the like with the optimizer's state in main memory. On one rank there is nothing to share, and every
            strategy but single is refused: a table of 'single' is returned.
        ranks: this process's place; by default what `init_ranks` finds.

    Returns:
        Rows of all ranks, on every rank.
    Communicates: what the runs do, and an all-gather of the rows.
    """
    ranks = ranks or init_ranks(timeout_s=120)
    rows: list[StateRow] = []
    for strategy in strategies if ranks.world_size > 1 else ("single",):
        config = tiny_config(strategy)
        with open_trainer(config, ranks) as trainer:
            groups, largest_layer = find_groups(config, trainer.shape)
            measured = watch_state(trainer)
        rows.append(build_row(measured, groups, strategy, ranks.world_size, ranks.rank, largest_layer))
    if ranks.world_size == 1:
        return StateTable(tuple(rows))
    everyone: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everyone, rows)
    return StateTable(tuple(row for of_strategy in zip(*everyone, strict=True) for row in of_strategy))


# --- Traffic --------------------------------------------------------------------------------------------------------


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


def find_unit_shapes(shape: VLMShape) -> Units:
    """Return what FSDP2 gathers together in a model of this shape."""
    plain = build_model(shape, device="meta", seed=0)
    others = find_units(plain)
    taken = {id(p) for unit in others for p in unit.parameters()}
    root = [tuple(p.shape) for p in plain.parameters() if id(p) not in taken]
    return Units(root, [[tuple(p.shape) for p in unit.parameters()] for unit in others])


def measure_traffic(strategies: Sequence[str] = (*STAGES, FREES), ranks: Ranks | None = None) -> TrafficTable:
    """Count what each strategy sends in a step of the tiny model, and at its start; all ranks must call this.

    Args:
        strategies: keys of `planner.state_layout.ZERO_STAGES`, or `FREES`.
        ranks: this process's place, one of 2 or more; by default what `init_ranks` finds.

    Returns:
        A row a strategy, as this rank saw it: under all of these every rank makes the same calls.
    """
    ranks = ranks or init_ranks(timeout_s=120)
    units = find_unit_shapes(get_model(tiny_config("ddp").model.preset))
    rows: list[TrafficRow] = []
    for name in strategies:
        frees, strategy = name == FREES, name.partition(",")[0]
        with write_freeing_settings() if frees else nullcontext("") as path:
            config = tiny_config(strategy, path)

            def start(config: TrainConfig = config) -> Trainer:
                return Trainer(config, ranks, show_progress=False)

            trainer, row = watch_traffic(start, units, strategy, ranks.world_size, name=name, frees=frees)
            close(trainer)
        rows.append(row)
    return TrafficTable(tuple(rows))
