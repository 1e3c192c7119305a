"""A dry run beside the planner's closed formulas: bytes by owner, and why the two differ.

Enters: a `DryRun` and its configuration. Leaves: a `Row` an owner. The formulas are those of `planner/memory.py`, which
a person can check on paper; the dry run ran the step. Chapter 7.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.config import TrainConfig
from vlmcourse.dryrun.result import DryRun
from vlmcourse.layout import ParallelConfig
from vlmcourse.planner.activations import Workload
from vlmcourse.planner.memory import estimate_rank_memory
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.recipes import PRECISIONS, TRAINED
from vlmcourse.presets import VLMShape

ZERO_STAGES = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 3, "fsdp": 3, "hsdp": 3}
"""Strategy -> what is split between two steps. FSDP2 keeps shards there under zero2 too."""
REASONS = {
    "weights": "the formula splits all of a tower over tp; norms and some biases stay whole, shards round up",
    "gradients": "the formula has all gradients; at the peak, backward may not have made them yet",
    "optimizer": "the formula has moments and masters; a step counter a parameter, and whole parameters dealt out by "
    "zero1, come on top",
    "gathered": "the formula has the root unit, and two copies and the gradient of the largest unit; FSDP's flat "
    "buffers for gathering and reducing come on top, and less may be gathered at the peak",
    "activations": "the formula is of a layer whose norms are one operation each, and has logits and fp32 copies; "
    "the dry run has what PyTorch's CPU operations keep, norms in single steps among it",
}


@dataclass(frozen=True)
class Row:
    """One owner in both."""

    owner: str
    dry_run_bytes: int
    """At the peak; of weights and optimizer the same at any moment."""
    formula_bytes: int
    reason: str
    """What may explain a difference."""


def compare_with_planner(found: DryRun, config: TrainConfig, parallel: ParallelConfig, shape: VLMShape) -> list[Row]:
    """Return both answers by owner; nothing where the planner has no such plan.

    Args:
        found: a dry run.
        config: that it played.
        parallel: as settled, no longer auto.
        shape: of the whole model.

    Returns:
        weights, gradients, optimizer, gathered, activations; the last one with what is recomputed, the loss and
        temporary tensors, which the formula does not tell apart. Empty under context parallelism and for recipes of
        precision that a `Plan` cannot name (bf16_pure).
    """
    names = [name for name, recipe in PRECISIONS.items() if recipe is TRAINED[config.train.precision]]
    if not names or parallel.cp > 1:
        return []
    copies = max(1, parallel.dp_replicate)
    num_data = found.world_size // parallel.tp
    stage = ZERO_STAGES[parallel.strategy]
    shards = num_data // copies if stage else 1
    plan = Plan(
        dp_replicate=num_data // shards,
        dp_shard=shards,
        tp=parallel.tp,
        vision_tp=parallel.vision_degree,
        zero_stage=stage,
        precision=names[0],
        frozen=config.model.freeze,
        recompute_vision=config.activations.vision,
        recompute_language=config.activations.language,
        micro_batch_size=found.size.num_samples,
    )
    tiles = -(-found.size.num_tiles // found.size.num_samples)
    formula = estimate_rank_memory(plan, shape, Workload(seq_len=found.size.seq_len, tiles_per_sample=tiles))
    live = found.peak.live_bytes
    of_pass = sum(live.get(owner, 0) for owner in ("activations", "recomputed", "loss", "temporary"))
    seen = {name: live.get(name, 0) for name in ("weights", "gradients", "optimizer", "gathered")}
    by_owner = formula.by_owner()
    return [
        Row(owner, size, by_owner[owner], REASONS[owner]) for owner, size in {**seen, "activations": of_pass}.items()
    ]
