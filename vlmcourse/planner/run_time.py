"""Seconds of a decoder's run: a `DecoderRun` as the plan, model, cluster and settings that `step_time.py` takes.

Enters: a `DecoderRun`, a device. Leaves: a `StepTime`. There is one model of time; this only says the same run in its
words. A GELU MLP of two matrices is described as a gated one of the same FLOPs and bytes. Chapter 7.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from vlmcourse.planner.decoder_run import DecoderRun
from vlmcourse.planner.efficiency import Speeds
from vlmcourse.planner.fabric import fabric_of
from vlmcourse.planner.hardware import DeviceSpec
from vlmcourse.planner.network import Link
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.recipes import PRECISIONS
from vlmcourse.planner.stages import StageSplit
from vlmcourse.planner.step_result import StepTime
from vlmcourse.planner.step_settings import StepSettings
from vlmcourse.planner.step_time import decoder_alone, estimate_step_time
from vlmcourse.planner.workload import Workload
from vlmcourse.presets import Cluster

RANKS_PER_NODE = 8
NETWORK_BYTES_PER_S = {"h100": 50e9, "h100-96": 50e9, "h200": 50e9}
"""Between nodes, for each device: 400 Gbit/s with Hopper's; 200 with all before."""


def estimate_run_time(
    run: DecoderRun, device: DeviceSpec, network: Link | None = None, speeds: Speeds | None = None
) -> StepTime:
    """Estimate one optimizer step of a run.

    Args:
        run: the training run.
        device: each rank's.
        network: between nodes, for each device; None takes what collectives reach of `NETWORK_BYTES_PER_S`.
        speeds: what the device reaches of its datasheet; None takes what was fitted for it.

    Raises:
        ValueError: if the device has no hardware path for the run's type, or no plan describes its recipe.
    """
    plan = Plan(
        dp_shard=run.dp,
        tp=run.tp,
        pp=run.pp,
        zero_stage=run.zero_stage,
        precision=_recipe_of(run),
        activation_checkpointing=run.recompute == "full",
        recompute_language="selective" if run.recompute == "selective" else "",
        micro_batch_size=run.micro_batch_size,
    )
    settings = StepSettings(
        grad_accum_steps=run.grad_accum_steps,
        schedule=run.schedule,
        sequence_parallel=run.sequence_parallel,
        cp=run.cp,
        host_layer_s=run.software.host_layer_s,
        host_step_layer_s=run.software.host_step_layer_s,
        shard_copies_per_layer=run.software.shard_copies_per_layer,
        fused_attention=run.software.fused_attention,
        blocking_messages=run.software.blocking_messages,
    )
    shape = run.shape
    if run.mlp == "gelu":
        shape = dataclasses.replace(shape, mlp_size=round(2 * shape.mlp_size / 3))
    split = None
    if run.pp > 1:
        layers = list(run.layers_of_stages())
        layers[0] += 2
        layers[-1] += 1
        split = StageSplit(
            num_vision_layers=0,
            num_language_layers=run.shape.num_layers,
            layers_per_stage=tuple(layers),
            may_be_empty=True,
        )
    workload = Workload(seq_len=run.seq_len, tiles_per_sample=0)
    model = decoder_alone(shape)
    cluster = _nodes(device.name, run.num_ranks)
    fabric = fabric_of(cluster)
    if network is not None:
        fabric = dataclasses.replace(fabric, network=network)
    return estimate_step_time(
        plan, model, cluster, workload, settings, split=split, device=device, speeds=speeds, fabric=fabric
    )


def _recipe_of(run: DecoderRun) -> str:
    """Return the plan's precision of the same bytes and type."""
    wanted = run.precision
    for recipe in PRECISIONS.values():
        if (recipe.weight_bytes, recipe.gradient_bytes, recipe.compute_dtype) == (
            wanted.weight_bytes,
            wanted.gradient_bytes,
            wanted.compute_dtype,
        ):
            return recipe.name
    raise ValueError(f"no plan has the recipe {wanted.name}: choose one of {', '.join(PRECISIONS)}")


@lru_cache(maxsize=256)
def _nodes(device: str, num_ranks: int) -> Cluster:
    return Cluster(
        name=f"{device}x{num_ranks}",
        device=device,
        num_nodes=max(1, -(-num_ranks // RANKS_PER_NODE)),
        devices_per_node=min(RANKS_PER_NODE, num_ranks),
        host_memory_bytes=1,
        network_bytes_per_s=NETWORK_BYTES_PER_S.get(device, 25e9),
    )
