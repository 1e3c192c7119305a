"""Seconds of one micro-batch on each stage of a plan, by what they are spent on.

Enters: a plan with its settings, a model, a workload, a fabric, what a rank computes with. Leaves: a `StageCost` a
stage: computing, what tensor ranks, context ranks and ZeRO-3 add to it, forward and backward; bytes of messages and of
gradients. `step_time.py` puts them on a time axis. Imports no torch. Chapter 7.

Tensor ranks wait for each other inside a layer, so nothing hides what they exchange. Ring attention hides behind
attention; the other context methods do not. ZeRO-3 gathers a layer while another computes, and scatters gradients in
the same way: see `fabric.exposed_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from vlmcourse.planner.context_traffic import estimate_attention_traffic
from vlmcourse.planner.fabric import exposed_s, group_of
from vlmcourse.planner.layer_times import (
    LayerTime,
    head_time,
    language_layer_time,
    patch_time,
    projector_time,
    vision_layer_time,
)
from vlmcourse.planner.stage_params import count_local, list_units
from vlmcourse.planner.stages import StageSplit
from vlmcourse.planner.step_settings import Ranks
from vlmcourse.recompute import plan_segments


@dataclass(frozen=True)
class StageCost:
    """Seconds of one micro-batch on one stage, and what the stage holds."""

    forward_s: float
    """Computing alone, as all that follows is without other ranks."""
    input_s: float
    """Of the backward's part for activations."""
    weight_s: float
    recompute_s: float
    """Forward computing that backward repeats."""
    tensor_s: tuple[float, float]
    """Added by tensor ranks, forward and backward."""
    context_s: tuple[float, float]
    """Added by context ranks."""
    shard_s: tuple[float, float]
    """Added by ZeRO-3's gathering, and by scattering gradients with every micro-batch."""
    num_units: int
    """Layers whose gradients and weights travel one after the other."""
    trained_params: int
    """That this rank's data-parallel group holds, before any sharding."""
    all_params: int

    overhead_s: float = 0.0
    """Of `StepSettings.micro_batch_overhead_s`, in forward."""

    @property
    def forward_total_s(self) -> float:
        """Seconds of a forward."""
        return self.overhead_s + self.forward_s + self.tensor_s[0] + self.context_s[0] + self.shard_s[0]

    @property
    def input_total_s(self) -> float:
        """Seconds of a backward without the gradients of weights."""
        return self.input_s + self.recompute_s + self.tensor_s[1] + self.context_s[1] + self.shard_s[1]


def stage_costs(ranks: Ranks, split: StageSplit) -> list[StageCost]:
    """Estimate one micro-batch on every stage.

    Args:
        ranks: plan, model, workload and what they run on.
        split: which layers stand on which stage.
    """
    known: dict[tuple[int, int, bool, bool, bool], StageCost] = {}
    found: list[StageCost] = []
    for stage in range(split.num_stages):
        of_stage = (
            len(split.vision_blocks(stage)),
            len(split.language_blocks(stage)),
            stage == 0,
            stage == split.fusion_stage,
            stage == split.num_stages - 1,
        )
        if of_stage not in known:
            units = list_units(ranks.model, split, stage)
            held = count_local(units, ranks.plan.tp, ranks.plan.vision_tp)
            known[of_stage] = _stage_cost(ranks, held, *of_stage)
        found.append(known[of_stage])
    return found


def _stage_cost(
    ranks: Ranks,
    held: dict[str, int],
    vision_blocks: int,
    language_blocks: int,
    has_patches: bool,
    has_fusion: bool,
    has_head: bool,
) -> StageCost:
    plan, model, compute = ranks.plan, ranks.model, ranks.compute
    tokens, tiles = ranks.num_tokens, ranks.num_tiles
    trains = {tower: tower not in plan.frozen for tower in ("vision", "projector", "language")}
    pairs = plan.micro_batch_size * float(ranks.workload.seq_len) ** 2 / ranks.settings.cp
    language = language_layer_time(model.language, compute, tokens, pairs, plan.tp, ranks.settings.sequence_parallel)
    vision = vision_layer_time(model.vision, compute, tiles, plan.vision_tp) if vision_blocks else LayerTime()
    parts: list[tuple[LayerTime, int, str]] = [
        (vision, vision_blocks, "vision"),
        (language, language_blocks, "language"),
    ]
    if has_patches and tiles:
        parts.append((patch_time(model.vision, compute, tiles), 1, "vision"))
    if has_fusion and tiles:
        parts.append((projector_time(model, compute, tiles), 1, "projector"))
    if has_head:
        parts.append((head_time(model.language, compute, tokens, plan.tp), 1, "language"))
    # Nothing before the first trained parameter has a backward.
    reached = {"vision": trains["vision"], "projector": trains["vision"] or trains["projector"], "language": True}
    again = {
        tower: _recomputed(plan.recompute(tower), n)
        for tower, n in (("vision", vision_blocks), ("language", language_blocks))
    }
    recompute_s = sum(
        again[tower][0] * time.forward_s + again[tower][1] * time.moved_s
        for tower, time in (("vision", vision), ("language", language))
        if reached[tower]
    )
    tensor_s = _tensor_s(ranks, vision_blocks, language_blocks, again, reached)
    context_s = _context_s(ranks, language, language_blocks, again["language"][0])
    forward_s = sum(time.forward_s * n for time, n, _ in parts)
    input_s = sum(time.input_s * n for time, n, tower in parts if reached[tower])
    weight_s = sum(time.weight_s * n for time, n, tower in parts if trains[tower])
    units = max(1, vision_blocks + language_blocks + has_fusion + has_head)
    trained = sum(num for tower, num in held.items() if trains[tower])
    beside_s = forward_s + tensor_s[0] + context_s[0], input_s + weight_s + recompute_s + tensor_s[1] + context_s[1]
    return StageCost(
        forward_s,
        input_s,
        weight_s,
        recompute_s,
        tensor_s,
        context_s,
        _shard_s(ranks, held, trained, beside_s, units),
        units,
        trained,
        sum(held.values()),
        ranks.settings.micro_batch_overhead_s,
    )


@lru_cache(maxsize=1024)
def _recomputed(policy: str, num_blocks: int) -> tuple[int, int]:
    """Return how many of a stage's blocks run again whole, and how many only in what is no product."""
    segments = plan_segments(policy, num_blocks) if num_blocks else []
    whole = sum(segment.num_blocks for segment in segments if not segment.selective)
    return whole, sum(segment.num_blocks for segment in segments if segment.selective)


def _tensor_s(
    ranks: Ranks, vision_blocks: int, language_blocks: int, again: dict[str, tuple[int, int]], reached: dict[str, bool]
) -> tuple[float, float]:
    """Two exchanges a block forward and two backward; recomputation repeats those of forward."""
    plan, model = ranks.plan, ranks.model
    forward_s = backward_s = 0.0
    towers = (
        ("language", language_blocks, plan.tp, ranks.num_tokens * model.language.hidden_size),
        (
            "vision",
            vision_blocks,
            plan.vision_tp,
            ranks.num_tiles * (1 + model.vision.num_patches) * model.vision.hidden_size,
        ),
    )
    for tower, num_blocks, degree, elements in towers:
        if degree == 1 or not num_blocks:
            continue
        one_s = 2 * _exchange_s(ranks, elements * ranks.compute.element_bytes, degree, split=tower == "language")
        forward_s += num_blocks * one_s
        backward_s += (num_blocks + again[tower][0]) * one_s if reached[tower] else 0.0
    return forward_s, backward_s


def _exchange_s(ranks: Ranks, payload_bytes: float, degree: int, *, split: bool) -> float:
    """An all-reduce or, where positions are split between layers, an all-gather and a reduce-scatter."""
    fabric, group = ranks.fabric, group_of(degree, 1, ranks.fabric.devices_per_node)
    if split and ranks.settings.sequence_parallel:
        return sum(fabric.estimate_s(kind, payload_bytes, group) for kind in ("all-gather", "reduce-scatter"))
    return fabric.estimate_s("all-reduce", payload_bytes, group)


def _context_s(ranks: Ranks, layer: LayerTime, num_blocks: int, num_again: int) -> tuple[float, float]:
    cp, plan, shape = ranks.settings.cp, ranks.plan, ranks.model.language
    if cp == 1 or not num_blocks:
        return 0.0, 0.0
    traffic = estimate_attention_traffic(
        ranks.settings.cp_method,
        num_tokens=plan.micro_batch_size * ranks.workload.seq_len,
        cp=cp,
        num_heads=shape.num_heads // plan.tp,
        num_kv_heads=max(1, shape.num_kv_heads // plan.tp),
        head_width=shape.hidden_size // shape.num_heads,
        element_bytes=ranks.compute.element_bytes,
    )
    crosses = cp * plan.tp > ranks.fabric.devices_per_node

    def seconds(sent_bytes: float, attention_s: float) -> float:
        send_s = (cp - 1) * ranks.fabric.send_s(sent_bytes / (cp - 1), crosses_nodes=crosses)
        return max(0.0, send_s - attention_s) if ranks.settings.cp_method == "ring" else send_s

    forward_s = seconds(traffic.forward, layer.attention_s)
    backward_s = seconds(traffic.backward, 2.5 * layer.attention_s)
    return num_blocks * forward_s, num_blocks * backward_s + num_again * forward_s


def _shard_s(
    ranks: Ranks, held: dict[str, int], trained: int, beside_s: tuple[float, float], num_units: int
) -> tuple[float, float]:
    """What gathering and scattering with every micro-batch adds to a forward and a backward."""
    plan, fabric, lost = ranks.plan, ranks.fabric, ranks.compute.speeds.lost_fraction
    degree = plan.dp_shard * ranks.settings.cp
    if degree == 1 or plan.zero_stage < 2:
        return 0.0, 0.0
    group = group_of(degree, plan.tp, fabric.devices_per_node)

    def seconds(kind: str, payload_bytes: float) -> float:
        return num_units * fabric.estimate_s(kind, payload_bytes / num_units, group)

    gather_s = 0.0
    if plan.zero_stage == 3:
        gather_s = seconds("all-gather", sum(held.values()) * plan.recipe.weight_bytes)
    scatter_s = 0.0
    if ranks.settings.gradient_sync == "every" and trained:
        gradient_bytes = trained * plan.recipe.gradient_bytes
        scatter_s = seconds("reduce-scatter", gradient_bytes)
        if plan.dp_replicate > 1:
            group = group_of(plan.dp_replicate, degree * plan.tp, fabric.devices_per_node)
            scatter_s += seconds("all-reduce", gradient_bytes / degree)
    forward_s = exposed_s(gather_s, beside_s[0], num_units, lost) if gather_s else 0.0
    backward_s = gather_s if beside_s[1] else 0.0
    backward_s += scatter_s
    return forward_s, exposed_s(backward_s, beside_s[1], num_units, lost) if backward_s else 0.0
