"""How long one optimizer step of a plan takes: computing, exchanging and waiting of every rank of a pipeline.

Enters: a `Plan`, a model, a cluster, a workload, `StepSettings`. Leaves: a `StepTime`: seconds, by part and by rank,
tokens a second, MFU, cost and energy of a million samples, a timeline to draw. Imports no torch. Chapter 7.

All is arithmetic and a simulation of the pipeline's order (`timeline.py`); what is reached of datasheets is in
`efficiency.py` and `fabric.py`. Taken to be so: ranks of one stage are equally fast and have equal samples; loading
samples is never waited for, a host only if settings say how long it takes; computing is not slowed down by what is sent
meanwhile; gradients of ZeRO-0 and 1 travel beside the last micro-batch's backward, in buckets; then the optimizer
steps, and where it is sharded with whole weights (ZeRO-1 and 2) these are gathered; nothing hides these two.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate

from vlmcourse.planner.activations import Workload
from vlmcourse.planner.efficiency import Speeds, move_s, speeds_of
from vlmcourse.planner.fabric import Fabric, exposed_s, fabric_of, group_of
from vlmcourse.planner.flops import TOWERS, Work, count_step_flops
from vlmcourse.planner.hardware import DeviceSpec, get_device
from vlmcourse.planner.layer_times import Compute
from vlmcourse.planner.offload_cost import Machine, estimate_offload_cost, machine_of
from vlmcourse.planner.offload_memory import estimate_offloaded_memory
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.recipes import OPTIMIZERS
from vlmcourse.planner.schedules import SCHEDULES, stages_of_rank
from vlmcourse.planner.stage_times import StageCost, stage_costs
from vlmcourse.planner.stages import StageSplit, split_evenly
from vlmcourse.planner.step_result import PARTS, StepTime
from vlmcourse.planner.step_settings import Ranks, StepSettings
from vlmcourse.planner.timeline import StageTimes, Timeline, simulate_timeline
from vlmcourse.presets import Cluster, LanguageShape, VisionShape, VLMShape

BUCKET_BYTES = 25 * 2**20
"""DDP's default; see `step_timeline.py`."""


def estimate_step_time(
    plan: Plan,
    model: VLMShape,
    cluster: Cluster,
    workload: Workload | None = None,
    settings: StepSettings | None = None,
    *,
    split: StageSplit | None = None,
    device: DeviceSpec | None = None,
    speeds: Speeds | None = None,
    fabric: Fabric | None = None,
) -> StepTime:
    """Estimate one optimizer step.

    Args:
        plan: how the ranks share the work.
        model: its shape; a decoder alone is one whose vision tower has no layers, with 0 tiles a sample.
        cluster: the machines; its device must be a name in `hardware.DEVICES` unless `device` is given.
        workload: tokens and tiles of a sample; the default is 2048 tokens and one tile.
        settings: accumulation, schedule, sequence and context parallelism.
        split: which layers stand on which stage; None splits evenly.
        device: to take instead of the cluster's, such as a calibrated one.
        speeds: what it reaches of its datasheet; None takes what was fitted for it.
        fabric: links to take instead of the cluster's.

    Raises:
        ValueError: if the device or the schedule is not known, the device has no hardware path for the plan's type, the
            plan needs a network that the cluster does not have, a pipeline has no order for so many micro-batches, or
            the optimizer is offloaded in a pipeline, which is not described.
    """
    workload, settings = workload or Workload(), settings or StepSettings()
    device = device or get_device(cluster.device)
    compute = _compute(device, speeds or speeds_of(device), plan.recipe.compute_dtype, plan.recipe.compute_bytes)
    machine = _machine_of(plan, cluster) if plan.offload_optimizer else None
    ranks = Ranks(plan, settings, model, workload, fabric or fabric_of(cluster), compute, machine)
    if plan.pp == 1:
        costs = stage_costs(ranks, split_whole(model))
        timeline = None
    else:
        split = split or split_evenly(model, plan.pp * SCHEDULES[_known(settings.schedule)].stages_per_rank)
        costs = stage_costs(ranks, split)
        timeline = _play(ranks, costs, split)
    samples = plan.global_batch_size(settings.grad_accum_steps)
    by_rank = _ranks_parts(ranks, costs, timeline)
    return StepTime(
        seconds=sum(by_rank[0].values()),
        ranks=by_rank,
        num_samples=samples,
        num_tokens=samples * workload.seq_len,
        num_ranks=plan.num_ranks * settings.cp,
        model_flops=samples * sample_flops(model, workload, plan.frozen),
        peak_flop_per_s=device.peak_flop_per_s(plan.recipe.compute_dtype),
        power_w=device.power_w,
        pipeline=timeline,
    )


def _machine_of(plan: Plan, cluster: Cluster) -> Machine:
    if plan.pp > 1:
        raise ValueError(f"offload_optimizer with pp = {plan.pp}: its time is not described; set pp = 1, or leave it")
    return machine_of(cluster)


@lru_cache(maxsize=256)
def _compute(device: DeviceSpec, speeds: Speeds, dtype: str, element_bytes: int) -> Compute:
    return Compute(device, speeds, dtype, element_bytes)


def decoder_alone(language: LanguageShape, name: str = "decoder") -> VLMShape:
    """Return a shape with a language tower alone: no vision layers, no projector; use it with 0 tiles a sample."""
    nothing = VisionShape(image_size_px=1, patch_size_px=1, num_layers=0, hidden_size=1, num_heads=1, mlp_size=1)
    return VLMShape(name=name, vision=nothing, language=language, image_token_id=0)


@lru_cache(maxsize=256)
def split_whole(model: VLMShape) -> StageSplit:
    """Return the split of one stage."""
    return split_evenly(model, 1)


@lru_cache(maxsize=1024)
def sample_flops(model: VLMShape, workload: Workload, frozen: tuple[str, ...]) -> float:
    """Return the model FLOPs of one sample, forward and backward."""
    trained = [tower for tower in TOWERS if tower not in frozen]
    work = Work.of_sequences([workload.seq_len], workload.tiles_per_sample)
    return count_step_flops(model, work, trained).model


def _known(schedule: str) -> str:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is unknown: choose one of {', '.join(SCHEDULES)}")
    return schedule


def _play(ranks: Ranks, costs: list[StageCost], split: StageSplit) -> Timeline:
    """Play the pipeline's order with the times of its stages and the messages between them."""
    plan, settings, model = ranks.plan, ranks.settings, ranks.model
    # The pipeline is the outermost axis: its ranks are this many ranks apart.
    apart, of_node = plan.dp_degree * settings.cp * plan.tp, ranks.fabric.devices_per_node
    owner = {stage: r for r in range(plan.pp) for stage in stages_of_rank(settings.schedule, plan.pp, r)}
    node = [owner[stage] * apart // of_node for stage in range(split.num_stages)]
    text = ranks.num_tokens * model.language.hidden_size / (plan.tp if settings.sequence_parallel else 1)
    images = ranks.num_tiles * (1 + model.vision.num_patches) * model.vision.hidden_size
    fusion = split.fusion_stage
    messages_s = [
        ranks.fabric.send_s(
            ranks.compute.element_bytes * (text if stage >= fusion else images),
            crosses_nodes=node[stage] != node[stage + 1],
        )
        for stage in range(split.num_stages - 1)
    ]
    # Nothing before the first trained parameter has a backward, so no gradient is sent there.
    has_backward = list(accumulate((cost.input_s > 0 or cost.weight_s > 0 for cost in costs), operator.or_))
    back_s = [s if has_backward[stage] else 0.0 for stage, s in enumerate(messages_s)]
    times = [StageTimes(cost.forward_total_s, cost.input_total_s, cost.weight_s) for cost in costs]
    if settings.blocking_messages:
        times = _with_messages(times, messages_s, back_s)
        messages_s = back_s = [0.0] * len(messages_s)
    return simulate_timeline(settings.schedule, plan.pp, settings.grad_accum_steps, times, messages_s, back_s)


def _with_messages(times: list[StageTimes], messages_s: list[float], back_s: list[float]) -> list[StageTimes]:
    """Add to each stage's forward and backward what it receives before and sends after.

    While a pipeline fills and empties, a message is counted at both its ends though both wait at the same time.
    """
    ends_s, back_ends_s = [0.0, *messages_s, 0.0], [0.0, *back_s, 0.0]
    return [
        StageTimes(
            time.forward_s + ends_s[stage] + ends_s[stage + 1],
            time.backward_input_s + back_ends_s[stage] + back_ends_s[stage + 1],
            time.backward_weight_s,
        )
        for stage, time in enumerate(times)
    ]


def _ranks_parts(ranks: Ranks, costs: list[StageCost], timeline: Timeline | None) -> tuple[Mapping[str, float], ...]:
    """Add up what each rank of the pipeline does, and what it waits for the slowest."""
    num = ranks.settings.grad_accum_steps
    pp, schedule = ranks.plan.pp, ranks.settings.schedule
    found: list[dict[str, float]] = []
    before_end_s, after_end_s = 0.0, 0.0
    for rank in range(pp):
        mine = costs if timeline is None else [costs[stage] for stage in stages_of_rank(schedule, pp, rank)]
        parts = {
            "forward": num * sum(cost.forward_s for cost in mine),
            "backward": num * sum(cost.input_s + cost.weight_s for cost in mine),
            "recompute": num * sum(cost.recompute_s for cost in mine),
            "tensor_parallel": num * sum(sum(cost.tensor_s) for cost in mine),
            "context_parallel": num * sum(sum(cost.context_s) for cost in mine),
            "sharding": num * sum(sum(cost.shard_s) for cost in mine),
            "overhead": num * sum(sum(cost.overhead_s) for cost in mine),
        }
        finish_s = sum(parts.values()) if timeline is None else timeline.finish_s[rank]
        before_s, after_s = _data_parallel_s(ranks, mine)
        optimizer_s = _optimizer_s(ranks, sum(cost.trained_params for cost in mine), sum(parts.values()))
        optimizer_s = max(optimizer_s, ranks.settings.host_step_layer_s * sum(cost.num_units for cost in mine))
        parts |= {"data_parallel": before_s + after_s, "optimizer": optimizer_s}
        before_end_s = max(before_end_s, finish_s + before_s)
        after_end_s = max(after_end_s, optimizer_s + after_s)
        found.append(parts)
    # Gradients are clipped by the norm of all of them, so all ranks step together.
    step_s = before_end_s + after_end_s
    for parts in found:
        parts["waiting"] = max(0.0, step_s - sum(parts.values()))
    return tuple({name: parts[name] for name in PARTS} for parts in found)


def _data_parallel_s(ranks: Ranks, mine: list[StageCost]) -> tuple[float, float]:
    """Return what exchanging gradients adds after a rank's last backward, and gathering weights after the optimizer."""
    plan, settings, fabric = ranks.plan, ranks.settings, ranks.fabric
    trained = sum(cost.trained_params for cost in mine)
    shards, inside = plan.dp_shard * settings.cp, plan.tp
    gradient_bytes = trained * plan.recipe.gradient_bytes
    exchanges: list[float] = []
    after_s = 0.0
    if plan.zero_stage == 0 and shards * plan.dp_replicate > 1:
        group = group_of(shards * plan.dp_replicate, inside, fabric.devices_per_node)
        exchanges.append(fabric.estimate_s("all-reduce", gradient_bytes, group))
    elif plan.zero_stage:
        if shards > 1:
            group = group_of(shards, inside, fabric.devices_per_node)
            if plan.zero_stage == 1 or settings.gradient_sync == "last":
                exchanges.append(fabric.estimate_s("reduce-scatter", gradient_bytes, group))
            if plan.zero_stage < 3:
                after_s = fabric.estimate_s("all-gather", trained * plan.recipe.weight_bytes, group)
                copies = settings.shard_copies_per_layer * sum(cost.num_units for cost in mine) * shards
                after_s += copies * ranks.compute.speeds.launch_s
        if plan.dp_replicate > 1 and (plan.zero_stage == 1 or settings.gradient_sync == "last"):
            group = group_of(plan.dp_replicate, inside * shards, fabric.devices_per_node)
            exchanges.append(fabric.estimate_s("all-reduce", gradient_bytes / shards, group))
    if not trained or not exchanges:
        return 0.0, after_s if trained else 0.0
    beside_s = sum(cost.input_total_s + cost.weight_s for cost in mine)
    num_buckets = max(1, round(gradient_bytes / BUCKET_BYTES))
    return exposed_s(sum(exchanges), beside_s, num_buckets, ranks.compute.speeds.lost_fraction), after_s


def _optimizer_s(ranks: Ranks, num_trained: int, compute_s: float) -> float:
    """Read and write what the optimizer keeps of this rank's share, and gradients twice more: for norm and zero.

    What an offloaded one adds instead is `offload_cost.py`'s answer; copies hide behind `compute_s`.
    """
    plan = ranks.plan
    if plan.offload_optimizer:
        assert ranks.machine is not None
        memory = estimate_offloaded_memory(plan, ranks.model, ranks.workload, level="optimizer")[0]
        num = ranks.settings.grad_accum_steps
        cost = estimate_offload_cost(memory, plan, ranks.machine, level="optimizer", grad_accum_steps=num)
        return cost.added_s(compute_s)
    recipe, kept = plan.recipe, plan.recipe.master_bytes + OPTIMIZERS[plan.optimizer]
    share = num_trained / (plan.dp_shard * ranks.settings.cp if plan.zero_stage else 1)
    weights = recipe.weight_bytes * (1 if recipe.master_bytes else 2)
    num_bytes = share * (2 * kept + weights + 3 * recipe.gradient_bytes)
    return move_s(ranks.compute.device, ranks.compute.speeds, num_bytes)
