"""A training run of this package as the planner takes it: shape, grid, recipe, policies; no matter who describes it.

Enters: a `TrainConfig` with a number of ranks, or a `Plan`. Leaves: a `Job`, which `run_peak.py` turns into bytes. What
cannot be counted is refused by name. Chapter 7.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from vlmcourse.config import TrainConfig
from vlmcourse.layout import Layout, ParallelConfig, find_layout
from vlmcourse.planner.degrees import choose_split, settle
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.recipes import OPTIMIZERS, TRAINED, Precision
from vlmcourse.planner.schedules import SCHEDULES
from vlmcourse.planner.stages import StageSplit, find_split, split_evenly
from vlmcourse.planner.workload import Workload
from vlmcourse.presets import VLMShape
from vlmcourse.strategies import ENGINES, SHARDED

STAGE_OF = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 3, "fsdp": 3, "hsdp": 3}
"""Strategy -> the stage of ZeRO by which its state lies between steps; zero2 keeps shards of weights there too."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What decides how many bytes a rank needs."""

    shape: VLMShape
    recipe: Precision
    """Its `moment_bytes` are those of the optimizer that is used."""
    workload: Workload
    """Tokens and tiles of a sample; of a packed row, those of all that is packed into it."""
    layout: Layout
    split: StageSplit
    """Of the pipeline's stages, of which a rank may have two."""
    zero_stage: int = 0
    """What is split between steps: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""
    shard_degree: int = 1
    """Ranks that split it."""
    whole_weights: bool = False
    """Whether sharded weights are whole from forward to backward (ZeRO-2 by FSDP2), or gathered unit by unit."""
    whole_gradients: bool = False
    """Whether sharded gradients are whole until the last micro-batch exchanges them."""
    gradients_stay: bool = False
    """Whether gradients are there before the first backward: in DDP's buckets, or from an earlier micro-batch."""
    gradient_copies: int = 1
    """Of a unit's whole gradient, while it is exchanged: FSDP2 copies it into one flat tensor."""
    prefetch: int = 1
    """Units gathered ahead of the one at work."""
    vision_tp: int = 1
    vision_plan: str = "replicate"
    """One of `layout.VISION_PLANS`."""
    sequence_parallel: bool = False
    cp_method: str = "ring"
    schedule: str = "1f1b"
    frozen: tuple[str, ...] = ()
    recompute_vision: str = "none"
    """A policy of the section [activations]; so is the next."""
    recompute_language: str = "none"
    micro_batch_size: int = 1
    grad_accum_steps: int = 1
    fused_norms: bool = True
    """Whether norms are a GPU's kernels."""
    autocast: bool = False
    """Whether weights are fp32 and products in 16 bits, counted as on a CPU."""
    fixed_bytes: int = 0
    """Kept free for what is not counted: context, workspaces, fragmentation."""

    @property
    def caveats(self) -> tuple[str, ...]:
        """What is known to take more bytes than are counted, in sentences; empty where nothing is."""
        if self.layout.pp == 1 or not SCHEDULES[self.schedule].splits_backward:
            return ()
        return (
            f"{self.schedule}: counted is what its order of forwards and backwards asks for; PyTorch 2.13 was measured "
            "to hold up to 1.9 times as many bytes of activations (bench/planner_vs_ledger.md)",
        )

    def recompute(self, tower: str) -> str:
        """Return the policy for the activations of a tower, vision or language."""
        return self.recompute_vision if tower == "vision" else self.recompute_language


def describe_config(
    config: TrainConfig,
    world_size: int,
    shape: VLMShape,
    workload: Workload,
    *,
    on_gpu: bool = True,
    fixed_bytes: int = 0,
) -> Job:
    """Return the job that a configuration starts.

    Args:
        config: of the run; with strategy auto, what that chooses.
        world_size: ranks of the run.
        shape: of the model.
        workload: of each sample, padded alike.
        on_gpu: whether kernels are a GPU's; on a CPU norms are computed in single steps and keep more.
        fixed_bytes: kept free for what is not counted.

    Raises:
        ValueError: if degrees, ranks and model do not fit together; for an engine of another project, for offloading,
            for compressed gradients and for fp8: their bytes are not counted here.
    """
    parallel, _ = settle(config.parallel, world_size, shape, config.train.accumulation_steps)
    _check_counted(config, parallel)
    layout, precision = find_layout(parallel, world_size), config.train.precision
    accumulation, is_sharded = config.train.accumulation_steps, parallel.strategy in SHARDED
    recipe = TRAINED[precision]
    shards = {"zero1": layout.world_size}.get(parallel.strategy, layout.dp_shard * layout.cp if is_sharded else 1)
    return Job(
        shape=shape,
        recipe=recipe,
        workload=workload,
        layout=layout,
        split=choose_split(parallel, shape) if parallel.pp > 1 else split_evenly(shape, 1),
        zero_stage=STAGE_OF[parallel.strategy],
        shard_degree=shards,
        whole_weights=parallel.strategy == "zero2",
        whole_gradients=is_sharded and accumulation > 1 and parallel.gradient_sync == "last",
        gradients_stay=parallel.strategy in ("ddp", "zero1") or (accumulation > 1 and parallel.pp == 1),
        gradient_copies=2 if is_sharded else 1,
        prefetch=max(parallel.prefetch, int(on_gpu)) if is_sharded else 0,
        vision_tp=parallel.vision_degree,
        vision_plan=parallel.vision_plan,
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        cp_method=parallel.cp_method,
        schedule=parallel.pp_schedule,
        frozen=tuple(config.model.freeze),
        recompute_vision=config.activations.vision,
        recompute_language=config.activations.language,
        micro_batch_size=config.train.micro_batch_size,
        grad_accum_steps=accumulation,
        fused_norms=on_gpu,
        autocast=not on_gpu and recipe.weight_bytes == 4 and recipe.compute_bytes == 2,
        fixed_bytes=fixed_bytes,
    )


def _check_counted(config: TrainConfig, parallel: ParallelConfig) -> None:
    """Refuse what keeps bytes that are not counted here; see `describe_config`."""
    refused = {
        f"parallel.strategy = {parallel.strategy!r}: what its engine keeps": parallel.strategy in ENGINES,
        "[offload]: what lies in main memory": not config.offload.is_plain or config.activations.offload,
        f"parallel.compression = {parallel.compression!r}: its copies of gradients": parallel.compression != "none",
        "train.precision = 'fp8': its copies of weights and their scales": config.train.precision == "fp8",
    }
    if found := [f"{what} is not counted" for what, is_asked in refused.items() if is_asked]:
        raise ValueError("; ".join(found) + ": plan without it, or measure it (monitor.ledger.StepLedger)")


def describe_plan(plan: Plan, model: VLMShape, workload: Workload, *, fixed_bytes: int = 0) -> Job:
    """Return the job of a plan: on GPUs, a pipeline in 1F1B with enough micro-batches, gradients there all the time."""
    recipe = dataclasses.replace(plan.recipe, moment_bytes=OPTIMIZERS[plan.optimizer])
    split = find_split(plan, model)
    layout = Layout(pp=split.num_stages, dp_replicate=plan.dp_replicate, dp_shard=plan.dp_shard, tp=plan.tp)
    return Job(
        shape=model,
        recipe=recipe,
        workload=workload,
        layout=layout,
        split=split,
        zero_stage=plan.zero_stage,
        shard_degree=plan.dp_shard,
        gradients_stay=True,
        vision_tp=plan.vision_tp,
        vision_plan="split" if plan.vision_tp > 1 else "replicate",
        frozen=plan.frozen,
        recompute_vision=plan.recompute("vision"),
        recompute_language=plan.recompute("language"),
        micro_batch_size=plan.micro_batch_size,
        grad_accum_steps=split.num_stages,
        fixed_bytes=fixed_bytes,
    )
