"""Bytes of one rank by owner when part of its training state lives off the device.

Enters: a `Plan`, a model shape, a workload, a level of offloading. Leaves: a `RankMemory` for each pipeline stage. Each
number is one of `memory.py`'s; here it is only decided on which side of the link it lies. Chapter 5.
"""

from __future__ import annotations

import dataclasses

from vlmcourse.planner.activations import Workload
from vlmcourse.planner.memory import RankMemory, estimate_stage, local_params, state_of, whole_bytes
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.stages import find_split
from vlmcourse.presets import VLMShape

OFFLOAD_LEVELS = ("none", "optimizer", "optimizer+parameters", "layered")
"""How much of the training state lives off the device, from nothing to nearly all; see `estimate_offloaded_memory`."""
ZERO_3_LEVELS = OFFLOAD_LEVELS[2:]


def estimate_offloaded_memory(
    plan: Plan, model: VLMShape, workload: Workload | None = None, *, level: str
) -> list[RankMemory]:
    """Estimate what a rank of each pipeline stage needs when part of its state lives off the device.

    - none: everything on the device.
    - optimizer: moments and fp32 weights leave it, as in ZeRO-Offload, and the rank updates there what it would have
      updated here. Under ZeRO-2 and 3 gradients leave as they are reduced; under ZeRO-0 and 1 they stay whole until
      the step. Where weights are fp32 themselves, those that are updated are a second copy.
    - optimizer+parameters: the rank's shards of weights, gradients and optimizer have no room on the device at all;
      units of weights come, are gathered and go, one being fetched ahead. ZeRO-3 only.
    - layered: the same, one unit at a time and none ahead; only position embeddings, norms and a tied embedding, which
      are in no unit, stay beside it. ZeRO-3 only.

    Args:
        plan: how the ranks share the work; its `offload_optimizer` is not read. With it `estimate_rank_memory` keeps
            gradients on the device under every stage, an upper bound of level optimizer.
        model: the model's shape.
        workload: tokens and tiles of a sample; the default is 2048 tokens and one tile.
        level: a name in `OFFLOAD_LEVELS`.

    Returns:
        Bytes by owner, a rank for each stage.

    Raises:
        ValueError: for an unknown level, or one that needs ZeRO-3 under another stage.
    Source: Ren et al. 2021, "ZeRO-Offload: democratizing billion-scale model training", section 3; Rajbhandari et al.
    2021, "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep learning", section 5.
    """
    if problem := find_level_problem(plan, level):
        raise ValueError(f"level = {problem}")
    held = dataclasses.replace(plan, offload_optimizer=False)
    stages = range(find_split(plan, model).num_stages)
    return [_move_off(estimate_stage(held, model, workload or Workload(), i), held, model, i, level) for i in stages]


def find_level_problem(plan: Plan, level: str) -> str:
    """Return why a plan cannot have a level, from the level's value on: what it is called there, the caller knows."""
    if level not in OFFLOAD_LEVELS:
        return f"{level!r}: choose one of {', '.join(OFFLOAD_LEVELS)}"
    if level in ZERO_3_LEVELS and plan.zero_stage < 3:
        return (
            f"{level!r} with zero_stage={plan.zero_stage}: forward reads weights where they lie, and they lie on the "
            "device; set zero_stage=3"
        )
    return ""


def _move_off(memory: RankMemory, plan: Plan, model: VLMShape, stage: int, level: str) -> RankMemory:
    """Return the memory of a stage that holds everything on the device, with what a level moves off it."""
    if level == "none":
        return memory
    if level in ZERO_3_LEVELS:
        return dataclasses.replace(
            memory,
            weights=0,
            gradients=0,
            optimizer=0,
            gathered=whole_bytes(plan, model, stage, layered=level == "layered"),
            host_weights=memory.weights,
            host_gradients=memory.gradients,
            host_optimizer=memory.optimizer,
        )
    trained = {tower: size for tower, size in local_params(plan, model, stage).items() if tower not in plan.frozen}
    # What a rank updates is split as far as the optimizer's state is, whatever the stage keeps whole on the device.
    updated = state_of(trained, plan, zero_stage=3 if plan.zero_stage else 0)
    return dataclasses.replace(
        memory,
        gradients=0 if plan.zero_stage >= 2 else memory.gradients,
        optimizer=0,
        host_gradients=updated.gradients,
        host_optimizer=updated.optimizer + (0 if plan.recipe.master_bytes else updated.weights),
    )
