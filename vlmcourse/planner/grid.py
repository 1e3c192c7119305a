"""Which samples, positions and weights each rank will hold, before any rank starts.

Enters: a `ParallelConfig`, a number of ranks and a model's shape. Leaves: one `RankShare` a rank, and a table of them;
`vlmcourse train -v` prints it. Imports no torch. What live ranks really hold is measured in `parallel/holdings.py`.
Chapter 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.layout import Layout, ParallelConfig, align, check_usable, find_layout
from vlmcourse.planner.degrees import check_shape_divides, choose_split
from vlmcourse.planner.schedules import stages_of_rank
from vlmcourse.planner.stages import StageSplit
from vlmcourse.presets import VLMShape
from vlmcourse.strategies import DEEPSPEED, SHARDED


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What one rank will hold."""

    rank: int
    coordinates: dict[str, int]
    """On every axis of the grid."""
    samples: str
    positions: str
    """Of each sample's sequence."""
    layers: str
    weights: str
    """How much of these layers. Under tensor parallelism matrices of blocks, projector, embedding and output are in
    parts; norms and the patch embedding are whole on every rank."""


def list_shares(config: ParallelConfig, world_size: int, shape: VLMShape) -> list[RankShare]:
    """Return what each rank will hold, in words.

    Args:
        config: how the ranks share the work, without auto (see `planner.degrees.settle`).
        world_size: ranks of the run.
        shape: of the model.

    Raises:
        ValueError: if strategy, degrees, ranks and model do not fit together.
    """
    check_usable(config)
    layout = find_layout(config, world_size)
    check_shape_divides(config, shape)
    split = choose_split(config, shape) if config.pp > 1 else None
    return [_describe_rank(rank, config, layout, split) for rank in range(world_size)]


def share_table(config: ParallelConfig, world_size: int, shape: VLMShape, max_ranks: int = 32) -> str:
    """Return a table of who holds what: a line for each rank, up to `max_ranks`; arguments as in `list_shares`."""
    shares = list_shares(config, world_size, shape)
    layout = find_layout(config, world_size)
    axes = layout.used_axes
    rows = [["rank", *axes, "samples", *(["positions"] if layout.cp > 1 else []), "layers", "weights"]]
    for share in shares[:max_ranks]:
        at = [str(share.coordinates[axis]) for axis in axes]
        positions = [share.positions] if layout.cp > 1 else []
        rows.append([str(share.rank), *at, share.samples, *positions, share.layers, share.weights])
    more = f"\n... and {len(shares) - max_ranks:,} ranks more" if len(shares) > max_ranks else ""
    return align(rows) + more


def _describe_rank(rank: int, config: ParallelConfig, layout: Layout, split: StageSplit | None) -> RankShare:
    at = layout.coordinates(rank)
    stages = stages_of_rank(config.pp_schedule, config.pp, at["pp"]) if split is not None else ()
    layers = "; ".join(split.describe(stage) for stage in stages) if split is not None else "all"
    has_vision = split is None or any(split.vision_blocks(stage) for stage in stages)
    has_language = split is None or any(split.layers(stage)[-1] >= split.fusion_layer for stage in stages)
    parts = _describe_matrices(config, has_vision=has_vision, has_language=has_language)
    if config.strategy in SHARDED:
        until = " between steps" if config.strategy == "zero2" else ""
        parts.append(f"in shards of 1/{layout.dp_shard * layout.cp}{until}")
    stage = DEEPSPEED.get(config.strategy, 0)
    if stage == 3:
        parts.append(f"in shards of 1/{layout.dp_shard}")
    if config.strategy == "zero1" or stage in (1, 2):
        parts.append(f"1/{layout.summed_degree} of the optimizer's state")
    return RankShare(
        rank=rank,
        coordinates=at,
        samples=layout.describe_samples(rank),
        positions=_describe_positions(config, at["cp"]),
        layers=layers,
        weights=", ".join(parts),
    )


def _describe_matrices(config: ParallelConfig, *, has_vision: bool, has_language: bool) -> list[str]:
    """Say what tensor parallelism leaves a rank of its layers."""
    if config.tp == 1:
        return ["whole"]
    part = f"1/{config.tp} of each matrix"
    exception = {"replicate": "the vision tower", "mlp_only": "vision attention"}.get(config.vision_plan)
    if exception is None or not has_vision:
        return [part]
    if not has_language and config.vision_plan == "replicate":
        return ["whole"]
    return [part, f"{exception} whole"]


def _describe_positions(config: ParallelConfig, cp_rank: int) -> str:
    if config.cp == 1:
        return "all"
    if config.cp_order == "contiguous":
        return f"chunk {cp_rank} of {config.cp}"
    return f"chunks {cp_rank} and {2 * config.cp - 1 - cp_rank} of {2 * config.cp}"
