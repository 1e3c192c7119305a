"""What a search is asked, and one complete answer to it: everything that decides bytes and seconds of a step.

Enters: a model, a cluster, samples of a step (`Task`); degrees, stages, recomputation, batches (`Choice`). Leaves: the
same as the `Plan` with `StepSettings` that `step_time.py` takes, as the `Job` that `run_peak.py` takes, and as the
`ParallelConfig` that this package trains with. What is searched is in `search_space.py`. Imports no torch. Chapter 7.

ZeRO-2 and 3 are FSDP2's, as in `parallel/`: ZeRO-2 keeps shards of weights between steps and whole ones within a step.
Tensor parallelism splits sequences between layers too; context parallelism is a ring in zigzag order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from vlmcourse.layout import Layout, ParallelConfig
from vlmcourse.planner.efficiency import Speeds, speeds_of
from vlmcourse.planner.fabric import Fabric, fabric_of
from vlmcourse.planner.hardware import DeviceSpec, get_device
from vlmcourse.planner.job import Job
from vlmcourse.planner.memory import ALLOWANCE_BYTES
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.recipes import OPTIMIZERS, Precision
from vlmcourse.planner.schedules import SCHEDULES
from vlmcourse.planner.stages import StageSplit, split_evenly, vision_apart
from vlmcourse.planner.step_settings import StepSettings
from vlmcourse.planner.workload import Workload
from vlmcourse.presets import Cluster, VLMShape


class Choice(NamedTuple):
    """One way to train; a field not named here is the same for all that a search compares."""

    dp_replicate: int = 1
    """Groups of ranks that each hold the whole training state of their stage."""
    dp_shard: int = 1
    """Ranks that split it, together with those of `cp`, as far as `zero_stage` says."""
    cp: int = 1
    tp: int = 1
    pp: int = 1
    vision_tp: int = 1
    """1 or `tp`."""
    zero_stage: int = 0
    schedule: str = "1f1b"
    """Of the pipeline, where there is one."""
    vision_stages: int = 0
    """Stages for the vision tower alone; 0 lets it share stages with language layers."""
    micro_batch_size: int = 1
    grad_accum_steps: int = 1
    gradient_sync: str = "every"
    """With which micro-batches ZeRO-2 and 3 scatter gradients: every, or last, which keeps them whole until then."""
    offload_optimizer: bool = False
    recompute_vision: str = "none"
    recompute_language: str = "none"

    @property
    def dp_degree(self) -> int:
        """Ranks with samples of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, of which a rank may have two."""
        return self.pp * SCHEDULES[self.schedule].stages_per_rank if self.pp > 1 else 1

    def __str__(self) -> str:
        """Show the degrees above 1, and what is not as it is by itself."""
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        words = [f"{axis} {getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        words += [f"vision_tp {self.vision_tp}"] if self.tp > 1 else []
        words += [f"ZeRO-{self.zero_stage}"] if self.zero_stage else []
        if self.zero_stage >= 2 and self.grad_accum_steps > 1:
            words.append(f"gradients exchanged with {self.gradient_sync} micro-batch")
        words += ["optimizer in main memory"] if self.offload_optimizer else []
        if self.pp > 1:
            words.append(self.schedule)
            words += [f"vision on {self.vision_stages} stage(s) of its own"] if self.vision_stages else []
        words.append(f"micro-batch {self.micro_batch_size} x {self.grad_accum_steps}")
        recomputed = {"vision": self.recompute_vision, "language": self.recompute_language}
        words += [f"recompute {tower} {policy}" for tower, policy in recomputed.items() if policy != "none"]
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a plan is looked for."""

    model: VLMShape
    cluster: Cluster
    global_batch_size: int
    """Samples of one optimizer step; 0 leaves it to micro-batch and accumulation (`SearchSpace` must name both)."""
    workload: Workload = Workload()
    """Of a usual sample; with `tile_counts`, its tiles are their mean, rounded up."""
    tile_counts: tuple[int, ...] = ()
    """Tiles of some typical samples, each as likely as any other; empty if all have as many as `workload` says.
    Memory must do for a micro-batch of the largest."""
    frozen: tuple[str, ...] = ()
    """Towers that are not trained."""
    precision: str = "bf16_mixed"
    """A name in `recipes.PRECISIONS`."""
    optimizer: str = "adamw"
    device: DeviceSpec | None = None
    """To take instead of the cluster's, such as a calibrated one."""
    speeds: Speeds | None = None
    fabric: Fabric | None = None
    fixed_bytes: int = ALLOWANCE_BYTES
    """Of each device's memory, what no plan may use."""

    def __post_init__(self) -> None:
        if not isinstance(self.global_batch_size, int) or self.global_batch_size < 0:
            raise ValueError(
                f"global_batch_size = {self.global_batch_size!r}: must be a whole number, samples of a step; 0 where "
                "micro-batch and accumulation are given"
            )
        if self.tile_counts and not (min(self.tile_counts) >= 0 < max(self.tile_counts)):
            raise ValueError(
                f"tile_counts from {min(self.tile_counts)} to {max(self.tile_counts)}: tiles of typical samples must "
                "be 0 or more, and some 1 or more; leave it empty if all have as many as workload says"
            )
        if self.tile_counts and self.workload.tiles_per_sample != self.mean_tiles:
            changed = dataclasses.replace(self.workload, tiles_per_sample=self.mean_tiles)
            object.__setattr__(self, "workload", changed)
        self.plan(Choice())  # says what is wrong with frozen, precision and optimizer
        if not self.used_device.supports(self.recipe.compute_dtype):
            raise ValueError(
                f"precision = {self.precision!r} computes in {self.recipe.compute_dtype}, for which "
                f"{self.used_device.name} has no hardware: choose 'fp16_mixed' or 'fp32'"
            )

    @property
    def mean_tiles(self) -> int:
        """The mean of `tile_counts`, rounded up."""
        return -(-sum(self.tile_counts) // len(self.tile_counts))

    @cached_property
    def used_device(self) -> DeviceSpec:
        """What a rank computes with."""
        return self.device or get_device(self.cluster.device)

    @cached_property
    def used_speeds(self) -> Speeds:
        """What that reaches of its datasheet."""
        return self.speeds or speeds_of(self.used_device)

    @cached_property
    def used_fabric(self) -> Fabric:
        """The links."""
        return self.fabric or fabric_of(self.cluster)

    @cached_property
    def recipe(self) -> Precision:
        """Bytes of a parameter, the optimizer's moments included."""
        return dataclasses.replace(self.plan(Choice()).recipe, moment_bytes=OPTIMIZERS[self.optimizer])

    @cached_property
    def fullest(self) -> Workload:
        """What a micro-batch may be made of at worst."""
        tiles = max(self.tile_counts, default=self.workload.tiles_per_sample)
        return dataclasses.replace(self.workload, tiles_per_sample=tiles)

    def plan(self, choice: Choice) -> Plan:
        """Return a choice as a `Plan`; what a plan has no word for is in `settings` and `split`."""
        return Plan(
            dp_replicate=choice.dp_replicate,
            dp_shard=choice.dp_shard,
            tp=choice.tp,
            pp=choice.pp,
            vision_tp=choice.vision_tp,
            zero_stage=choice.zero_stage,
            optimizer=self.optimizer,
            offload_optimizer=choice.offload_optimizer,
            precision=self.precision,
            frozen=self.frozen,
            recompute_vision=choice.recompute_vision,
            recompute_language=choice.recompute_language,
            micro_batch_size=choice.micro_batch_size,
        )

    def settings(self, choice: Choice) -> StepSettings:
        """Return the rest of what a step's time depends on."""
        return StepSettings(
            grad_accum_steps=choice.grad_accum_steps,
            schedule=choice.schedule,
            cp=choice.cp,
            gradient_sync=choice.gradient_sync,
        )

    def split(self, choice: Choice) -> StageSplit:
        """Return which layers stand on which stage.

        Raises:
            ValueError: if there are fewer layers than stages.
        """
        if choice.vision_stages:
            return vision_apart(self.model, choice.num_stages, choice.vision_stages)
        return split_evenly(self.model, choice.num_stages)

    def job(self, choice: Choice) -> Job:
        """Return a choice as the run whose bytes `run_peak.py` counts; an offloaded optimizer is counted as if not.

        `job.describe_config` says the same of `to_config`, where there is one; a test compares them.
        """
        sharded, accumulates = choice.zero_stage >= 2, choice.grad_accum_steps > 1
        return Job(
            shape=self.model,
            recipe=self.recipe,
            workload=self.fullest,
            layout=Layout(
                pp=choice.pp,
                dp_replicate=choice.dp_replicate if sharded else choice.dp_degree,
                dp_shard=choice.dp_shard if sharded else 1,
                cp=choice.cp,
                tp=choice.tp,
            ),
            split=self.split(choice),
            zero_stage=3 if sharded else choice.zero_stage,
            shard_degree=choice.dp_shard * choice.cp if choice.zero_stage else 1,
            whole_weights=choice.zero_stage == 2,
            whole_gradients=sharded and accumulates and choice.gradient_sync == "last",
            gradients_stay=(not sharded and choice.dp_degree * choice.cp > 1) or (accumulates and choice.pp == 1),
            gradient_copies=2 if sharded else 1,
            prefetch=1 if sharded else 0,
            vision_tp=choice.vision_tp,
            vision_plan="split" if choice.vision_tp > 1 else "replicate",
            sequence_parallel=choice.tp > 1,
            schedule=choice.schedule,
            frozen=self.frozen,
            recompute_vision=choice.recompute_vision,
            recompute_language=choice.recompute_language,
            micro_batch_size=choice.micro_batch_size,
            grad_accum_steps=choice.grad_accum_steps,
            fixed_bytes=self.fixed_bytes,
        )


def strategy_of(choice: Choice) -> str:
    """Return the `parallel.strategy` that shares the state as a choice says, or "" where this package has none."""
    ranks = choice.dp_degree * choice.cp
    if ranks == 1:
        return "" if choice.zero_stage else "single"
    if choice.dp_replicate > 1 and choice.dp_shard * choice.cp > 1 and choice.zero_stage:
        return "hsdp" if choice.zero_stage == 3 else ""
    return ("ddp", "zero1", "zero2", "fsdp")[choice.zero_stage]


def to_config(choice: Choice, base: ParallelConfig | None = None) -> ParallelConfig:
    """Return a choice as what this package trains with.

    Args:
        choice: of a search in `SearchSpace(runnable=True)`; recomputation and micro-batches stand in other sections.
        base: where to take fields from that no search chooses, such as `timeout_s`.

    Raises:
        ValueError: if this package has no such strategy.
    """
    strategy = strategy_of(choice)
    if not strategy or choice.offload_optimizer:
        raise ValueError(
            f"{choice}: this package has no strategy for it; search in SearchSpace(runnable=True) for one that it has"
        )
    is_pipeline, sharded = choice.pp > 1, choice.zero_stage >= 2
    gradient_sync = choice.gradient_sync if sharded and choice.grad_accum_steps > 1 else "last"
    return dataclasses.replace(
        base or ParallelConfig(),
        strategy=strategy,
        dp_replicate=choice.dp_replicate if strategy == "hsdp" else 0,
        dp_shard=choice.dp_shard if strategy == "hsdp" else 0,
        tp=choice.tp,
        cp=choice.cp,
        pp=choice.pp,
        vision_tp=1 if choice.tp > 1 and choice.vision_tp == 1 else 0,
        pp_schedule=choice.schedule if is_pipeline else ParallelConfig.pp_schedule,
        vision_stages=choice.vision_stages if is_pipeline else 0,
        gradient_sync=gradient_sync,
    )
