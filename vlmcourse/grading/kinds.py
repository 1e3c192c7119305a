"""Kinds of plan, from the cheapest to the dearest, and which is the cheapest that is possible.

Enters: a model shape and a cluster. Leaves: a `Need`, found by checking the plans that need least memory. What "dear"
means is the exercise's rule: bytes sent first, then speed or precision of the optimizer.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator

from vlmcourse.planner import (
    Plan,
    check_plan,
    count_params,
    estimate_rank_memory,
    estimate_state_bytes,
    get_device,
)
from vlmcourse.presets import Cluster, VLMShape


class Need(enum.IntEnum):
    """Kinds of plan, from the cheapest to the dearest."""

    PLAIN = 0
    """Sends no more than DDP and keeps everything on the devices: DDP, ZeRO-1, ZeRO-2."""
    SHARDED = 1
    """Splits the weights too, and sends more for it: ZeRO-3, tensor or pipeline parallelism."""
    REMEDY = 2
    """Pays in speed or in precision of the optimizer: offloading, 8-bit Adam."""
    IMPOSSIBLE = 3
    """No plan trains this model on this cluster."""


def kind_of(plan: Plan | None) -> Need:
    """Return what kind of plan this is; `None` says that there is none."""
    if plan is None:
        return Need.IMPOSSIBLE
    if plan.offload_optimizer or plan.optimizer == "adamw_8bit":
        return Need.REMEDY
    if plan.zero_stage == 3 or plan.tp > 1 or plan.pp > 1:
        return Need.SHARDED
    return Need.PLAIN


def find_need(model: VLMShape, cluster: Cluster) -> Need:
    """Return the cheapest kind of plan that is possible, by trying them.

    Where DDP does not fit but ZeRO-1 or ZeRO-2 does, `SHARDED` is returned: ZeRO-3 is accepted there as well.
    """
    if check_plan(plain_plan(cluster), model, cluster).ok:
        return Need.PLAIN
    for kind in (Need.SHARDED, Need.REMEDY):
        if any(check_plan(plan, model, cluster).ok for plan in plans_of_kind(kind, cluster)):
            return kind
    return Need.IMPOSSIBLE


def plain_plan(cluster: Cluster) -> Plan:
    """Return DDP on every device of the cluster."""
    return Plan(dp_replicate=cluster.num_devices, precision=precision_for(cluster))


def zero_plan(cluster: Cluster, stage: int, **changes: bool | str) -> Plan:
    """Return ZeRO over every device of the cluster; on a single device there is nothing to split."""
    num, precision = cluster.num_devices, precision_for(cluster)
    if num == 1:
        return Plan(precision=precision, **changes)  # type: ignore[arg-type]
    return Plan(dp_shard=num, zero_stage=stage, precision=precision, **changes)  # type: ignore[arg-type]


def precision_for(cluster: Cluster) -> str:
    """Return the mixed-precision recipe that the cluster's device computes natively."""
    return "bf16_mixed" if get_device(cluster.device).supports("bf16") else "fp16_mixed"


def plans_of_kind(kind: Need, cluster: Cluster) -> Iterator[Plan]:
    """Yield the plans of a kind that need least memory, for every split of the ranks; `SHARDED` includes ZeRO-1 and 2.

    Groups of replicas are left out: they never need less memory than one group that splits over all of them.
    """
    num, precision = cluster.num_devices, precision_for(cluster)
    remedies = [("adamw", True), ("adamw_8bit", False), ("adamw_8bit", True)]
    optimizers = remedies if kind == Need.REMEDY else [("adamw", False)]
    for tp, pp in itertools.product(divisors(cluster.devices_per_node), divisors(num)):
        if num % (tp * pp):
            continue
        dp_shard = num // (tp * pp)
        for stage in (3, 2, 1) if dp_shard > 1 else (0,):
            for (optimizer, offload), vision_tp in itertools.product(optimizers, sorted({1, tp})):
                yield Plan(
                    dp_shard=dp_shard,
                    tp=tp,
                    pp=pp,
                    vision_tp=vision_tp,
                    zero_stage=stage,
                    optimizer=optimizer,
                    offload_optimizer=offload,
                    precision=precision,
                )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, smallest first."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def fill_fraction(plan: Plan, model: VLMShape, cluster: Cluster, *, state_only: bool = False) -> float:
    """Return what the fullest rank needs over what its device has.

    Args:
        plan: how the ranks share the work.
        model: the model's shape.
        cluster: the machines.
        state_only: leave out activations, gathered layers and the allowance.
    """
    memory = estimate_rank_memory(plan, model)
    needed = memory.state if state_only else memory.device_total
    return needed / get_device(cluster.device).memory_bytes


def vision_state_bytes(plan: Plan, model: VLMShape) -> int:
    """Return the bytes of training state that the vision tower takes on the device of a rank that holds it."""
    state = estimate_state_bytes(
        -(-count_params(model).vision // plan.vision_tp),
        precision=plan.precision,
        optimizer=plan.optimizer,
        zero_stage=plan.zero_stage,
        shard_degree=plan.dp_shard,
    )
    return state.weights + state.gradients + (0 if plan.offload_optimizer else state.optimizer)
