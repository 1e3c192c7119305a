"""What settings of a run cost by the planner, with all that does not depend on a step's samples already in it.

Enters: a `Job` and settings. Leaves: `StageRates`: seconds a tile, a token and a pair of tokens; bytes of state, and of
activations a token and a tile; bytes of traffic. All of these counts are linear, so a handful of questions to the
planner answers thousands of steps. Its own assumptions stand as constants here. Chapter 7.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from vlmcourse.planner.activations import Workload, list_activations
from vlmcourse.planner.flops import TOWERS, StepFlops, Work, count_patch_flops, count_tower_flops
from vlmcourse.planner.hardware import DeviceSpec, get_device
from vlmcourse.planner.job import describe_plan
from vlmcourse.planner.memory import estimate_stage, local_params
from vlmcourse.planner.network import Link, estimate_step_traffic
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.run_peak import build_run_load
from vlmcourse.planner.stages import StageSplit, find_split, split_by_cost
from vlmcourse.presets import VLMShape, get_model

PEAK_FRACTION = 0.5
"""Of the dense peak that the matrix products of a large micro-batch reach; an assumption of this cluster."""
COMPRESSION_PASSES = 6
"""Times that gradients are read or written in device memory to make 8 bits of 16, with an error kept, and back."""
UNITS = (Work(1, 0, 0), Work(0, 1, 0), Work(0, 0, 1))
"""A tile, a token, a pair of tokens."""
PROBE = 10**6
"""Tokens, and tiles, of the micro-batches that the planner is asked about."""
ByUnit = tuple[float, float, float]
"""Seconds of each of `UNITS`; of bytes see `StageRates.activation_bytes`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained where."""

    model: str = "internvl2-8b"
    device: str = "a100-80"
    num_ranks: int = 8
    pp: int = 1
    """Stages of a pipeline (1f1b); the ranks are shared out over pipelines."""
    global_batch_size: int = 64
    link: Link = Link(latency_s=20e-6, bytes_per_s=25e9)
    """Between machines of one device each: a 200 Gb/s network card."""
    storage_bytes_per_s: float = 1e9
    """That one rank writes to, or reads from, the storage of checkpoints; an assumption."""
    start_s: float = 60.0
    """From a stop to the first step, reading the checkpoint apart; an assumption."""

    @property
    def dp_degree(self) -> int:
        """Ranks, or pipelines, with samples of their own."""
        return self.num_ranks // self.pp

    @property
    def num_layers(self) -> int:
        """That the stages of a pipeline share, see `StageSplit`; 0 without one."""
        shape = get_model(self.model)
        return shape.vision.num_layers + shape.language.num_layers + 3 if self.pp > 1 else 0


@dataclass(frozen=True)
class StageRates:
    """What the rank of one stage pays; without a pipeline there is one stage."""

    forward_s: ByUnit
    """Seconds of the whole model's part on this stage, forward."""
    backward_s: ByUnit
    """Recomputation included."""
    state_bytes: float
    """Weights, gradients, optimizer: what is there between steps too."""
    constant_bytes: float
    """The same, with what ZeRO-3 gathers and the allowance: all but activations."""
    activation_bytes: tuple[ByUnit, ...]
    """By moment of a step: bytes at any load, a token, and a tile. The largest sum is the planner's estimate."""
    reduce_bytes: float
    """Sent by a rank for one exchange of gradients."""
    gather_bytes: float
    """Sent by a rank for the weights once: at the end of a step, or in each pass of ZeRO-3."""
    encode_s: float
    """For one exchange of compressed gradients."""
    update_s: float


def checkpoint_s(job: Job) -> float:
    """Return the seconds in which all ranks write, or read, a checkpoint: weights, master weights and moments."""
    plan, model = Plan(dp_shard=job.num_ranks, zero_stage=3), get_model(job.model)
    memory = estimate_stage(plan, model, Workload(), 0)
    return (memory.weights + memory.optimizer) / job.storage_bytes_per_s


def restart_s(job: Job) -> float:
    """Return the seconds from a stop to the next step."""
    return job.start_s + checkpoint_s(job)


def balanced_layers(job: Job, num_tiles: float, num_tokens: float) -> tuple[int, ...]:
    """Return the split of a pipeline whose slowest stage is fastest for such samples; empty without a pipeline."""
    if job.pp == 1:
        return ()
    model = get_model(job.model)
    work = Work(num_tiles, num_tokens, num_tokens**2)
    vision, projector, block, head = (flops.model for flops in _count_blocks(model, work, "none", "full"))
    costs = [0.0, *[vision] * model.vision.num_layers, projector, *[block] * model.language.num_layers, head]
    return split_by_cost(model, costs, job.pp).layers_per_stage


@lru_cache(maxsize=512)
def find_rates(
    job: Job, zero_stage: int, vision: str, language: str, compress: bool, layers_per_stage: tuple[int, ...]
) -> tuple[StageRates, ...]:
    """Ask the planner what these settings cost, stage by stage.

    Args:
        job: the run.
        zero_stage: 1, 2 or 3, over the data-parallel ranks.
        vision: policy of recomputation, none or full.
        language: the same.
        compress: whether gradients have 8 bits on the wire.
        layers_per_stage: of a pipeline.
    """
    model, device = get_model(job.model), get_device(job.device)
    plan = Plan(
        dp_shard=job.dp_degree,
        pp=job.pp,
        layers_per_stage=layers_per_stage,
        zero_stage=zero_stage,
        recompute_vision=vision,
        recompute_language=language,
    )
    split = find_split(plan, model)
    return tuple(_find_stage(plan, model, device, split, stage, compress) for stage in range(split.num_stages))


def _find_stage(
    plan: Plan, model: VLMShape, device: DeviceSpec, split: StageSplit, stage: int, compress: bool
) -> StageRates:
    flop_per_s = PEAK_FRACTION * device.peak_flop_per_s("bf16")
    flops = [_count_stage(plan, model, split, stage, work) for work in UNITS]
    num_params, recipe = sum(local_params(plan, model, stage).values()), plan.recipe
    traffic = estimate_step_traffic(
        num_params, plan.dp_shard, plan.zero_stage, gradient_bytes=1 if compress else recipe.gradient_bytes
    )
    memory = estimate_stage(plan, model, Workload(), stage)
    passes = COMPRESSION_PASSES if compress else 0
    # The update reads and writes moments and master weights, reads gradients, writes weights.
    update_bytes = num_params / plan.dp_shard * (2 * 12 + recipe.gradient_bytes + recipe.weight_bytes)
    forward_s = [found.forward / flop_per_s for found in flops]
    backward_s = [(found.hardware - found.forward) / flop_per_s for found in flops]
    return StageRates(
        forward_s=(forward_s[0], forward_s[1], forward_s[2]),
        backward_s=(backward_s[0], backward_s[1], backward_s[2]),
        state_bytes=memory.state,
        constant_bytes=memory.device_total - memory.activations,
        activation_bytes=_probe_activations(plan, model, stage),
        reduce_bytes=traffic.reduce_scatter,
        gather_bytes=traffic.all_gather / (2 if plan.zero_stage == 3 else 1),
        encode_s=passes * num_params * recipe.gradient_bytes / device.memory_bytes_per_s,
        update_s=update_bytes / device.memory_bytes_per_s,
    )


def _count_blocks(model: VLMShape, work: Work, vision: str, language: str) -> tuple[StepFlops, ...]:
    """Count one vision block, projector, one language block and the output, for some work.

    A tower's count is linear in its blocks (policies none and full), so two depths give both of its parts.
    """

    def count(num_vision: int, num_language: int) -> dict[str, StepFlops]:
        shape = dataclasses.replace(
            model,
            vision=dataclasses.replace(model.vision, num_layers=num_vision),
            language=dataclasses.replace(model.language, num_layers=num_language),
        )
        return count_tower_flops(shape, work, TOWERS, {"vision": vision, "language": language})

    shallow, deep = count(1, 1), count(2, 2)
    vision_block, block = _less(deep["vision"], shallow["vision"]), _less(deep["language"], shallow["language"])
    return vision_block, shallow["projector"], block, _less(shallow["language"], block)


def _less(one: StepFlops, other: StepFlops) -> StepFlops:
    return StepFlops(*(a - b for a, b in zip(vars(one).values(), vars(other).values(), strict=True)))


def _count_stage(plan: Plan, model: VLMShape, split: StageSplit, stage: int, work: Work) -> StepFlops:
    """Count what stands on a stage."""
    vision, projector, block, output = _count_blocks(model, work, plan.recompute("vision"), plan.recompute("language"))
    patches = work.num_tiles * count_patch_flops(model.vision) if stage == 0 else 0.0
    found = StepFlops(forward=patches, weight_gradients=patches)
    parts = [vision] * len(split.vision_blocks(stage)) + [block] * len(split.language_blocks(stage))
    parts += [projector] if stage == split.fusion_stage else []
    parts += [output] if stage == split.num_stages - 1 else []
    return sum(parts, found)


def _probe_activations(plan: Plan, model: VLMShape, stage: int) -> tuple[ByUnit, ...]:
    """Return the planner's estimate as sums of which the largest counts, found by asking it three times.

    A step's memory has several moments that may be the fullest (see `rank_peak.py`); the bytes of each are linear in
    tokens and tiles. Moments that another one exceeds at any load are left out.
    """

    def ask(num_tokens: int, num_tiles: int) -> list[int]:
        workload = Workload(seq_len=num_tokens, tiles_per_sample=num_tiles)
        return list_activations(build_run_load(describe_plan(plan, model, workload), stage))

    found: list[ByUnit] = []
    for least, of_tokens, of_tiles in zip(ask(1, 1), ask(1 + PROBE, 1), ask(1, 1 + PROBE), strict=True):
        token, tile = (of_tokens - least) / PROBE, (of_tiles - least) / PROBE
        found.append((least - token - tile, token, tile))
    return tuple(one for one in dict.fromkeys(found) if not any(_exceeds(other, one) for other in found))


def _exceeds(one: ByUnit, other: ByUnit) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))
