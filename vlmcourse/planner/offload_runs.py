"""Which strategy of this package runs a plan at a level of offloading, and what it would ask to be changed.

Enters: a `Plan` and a level. Leaves: names of strategies, or a sentence. A plan is arithmetic and may be of a run
elsewhere; what a run here accepts, its configuration alone says, and this asks it. Chapter 5.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

from vlmcourse.config import parse_config
from vlmcourse.planner.offload_memory import ZERO_3_LEVELS
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.recipes import TRAINED
from vlmcourse.state_offload import OFFLOADING
from vlmcourse.values import ConfigError

STAGES = {name: 3 if name == "fsdp" else int(name[-1]) for name in OFFLOADING}
"""Strategies that offload -> the ZeRO stage that each runs."""


@functools.cache
def find_strategies(plan: Plan, level: str, *, in_files: bool = False) -> tuple[str, ...]:
    """Return the strategies here that run a plan with part of its state off the device; () where none does.

    Args:
        plan: how the ranks share the work; its `optimizer` is not read (a run has AdamW), nor is `offload_optimizer`.
        level: a name in `OFFLOAD_LEVELS`, but none.
        in_files: whether the state lies in files, and not in main memory.
    """
    precisions = [name for name, recipe in TRAINED.items() if recipe == plan.recipe]
    if plan.num_ranks < 2 or not precisions:  # what offloads shares its state between ranks
        return ()
    if plan.dp_replicate > 1:  # 'hsdp' alone has groups that each hold a copy, and moves nothing
        return ()
    place = "nvme" if in_files else "cpu"
    tables: dict[str, dict[str, Any]] = {
        "train": {"precision": precisions[0]},
        "activations": {tower: plan.recompute(tower) for tower in ("vision", "language")},
        "offload": {
            "optimizer": place,
            "parameters": place if level in ZERO_3_LEVELS else "none",
            "layered": level == "layered",
            "nvme_path": "files" if in_files else "",
        },
    }
    degrees = {"tp": plan.tp, "pp": plan.pp}
    of_stage = [name for name, stage in STAGES.items() if stage == plan.zero_stage]
    return tuple(name for name in of_stage if _is_run({**tables, "parallel": {"strategy": name, **degrees}}))


def _is_run(tables: dict[str, dict[str, Any]]) -> bool:
    try:
        parse_config(tables)
    except ConfigError:
        return False
    return True


def describe_runs(plan: Plan, level: str, *, in_files: bool = False) -> str:
    """Return "" if a strategy here runs a plan at a level, else a sentence: which one would, with what changed.

    Args:
        plan: how the ranks share the work.
        level: a name in `OFFLOAD_LEVELS`.
        in_files: whether the state lies in files.
    """
    if level == "none" or find_strategies(plan, level, in_files=in_files):
        return ""
    if plan.num_ranks < 2:
        return "No strategy here offloads on one rank: each of them shares the state between 2 or more."
    flat = {"tp": 1, "pp": 1, "vision_tp": 1, "dp_replicate": 1, "dp_shard": plan.num_ranks}
    whole = {"activation_checkpointing": False, "recompute_vision": "", "recompute_language": ""}
    precisions = ({}, {"precision": "bf16_autocast"}, {"precision": "fp32"})
    ways = sorted(itertools.product(({}, flat), precisions, ({}, whole)), key=lambda way: sum(map(bool, way)))
    for degrees, precision, kept in ways:  # the fewest changes first
        other = dataclasses.replace(plan, **degrees, **precision, **kept)
        if found := find_strategies(other, level, in_files=in_files):
            new = {name: value for name, value in (degrees | precision).items() if value != getattr(plan, name)}
            changed = [f"{name}={value!r}" for name, value in new.items()] + ["no recomputation"] * bool(kept)
            return (
                f"No strategy here offloads this plan; {found[0]!r} would with {', '.join(changed)}: another plan, "
                "whose bytes are to be asked for anew."
            )
    return f"No strategy here offloads a plan with zero_stage={plan.zero_stage}: choose 1 to 3."
