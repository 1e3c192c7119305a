"""Do the degrees of a layout fit a model, and which suit a number of ranks?

Enters: a `ParallelConfig` and a model's shape. Leaves: one error that lists what does not divide, or a choice with its
reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from vlmcourse.layout import VISION_PLANS, ParallelConfig, find_layout
from vlmcourse.planner.schedules import SCHEDULES, check_schedule, find_schedule_problems
from vlmcourse.planner.stages import StageSplit, split_evenly, vision_apart
from vlmcourse.presets import VLMShape
from vlmcourse.strategies import SHARDED


def settle(
    config: ParallelConfig, world_size: int, shape: VLMShape | None, accumulation_steps: int
) -> tuple[ParallelConfig, str]:
    """Decide what auto leaves open and refuse what cannot run, before any rank starts or waits.

    Args:
        config: how the ranks share the work.
        world_size: ranks of the run.
        shape: of the model; None where it is not known yet.
        accumulation_steps: micro-batches of an optimizer step.

    Returns:
        The configuration without auto, and the reason of the choice; it is empty where nothing was chosen.

    Raises:
        ValueError: if degrees, ranks, model and micro-batches do not fit together.
    """
    find_layout(config, world_size)
    reason = ""
    if shape is not None:
        config, reason = resolve_auto(config, world_size, shape, accumulation_steps)
        check_shape_divides(config, shape)
    check_step(config, accumulation_steps)
    return config, reason


def check_shape_divides(config: ParallelConfig, shape: VLMShape) -> None:
    """Refuse degrees that do not divide what they split, or leave a pipeline stage without a layer.

    Raises:
        ValueError: listing all that does not divide.
    """
    found = find_shape_problems(config, shape)
    if found:
        listed = "\n".join(f"  - {problem}" for problem in found)
        raise ValueError(f"The model {shape.name!r} cannot be split as [parallel] says:\n{listed}")


def find_shape_problems(config: ParallelConfig, shape: VLMShape) -> list[str]:
    """Return what `check_shape_divides` refuses, one sentence each: what is wrong, a colon, and what to change."""
    found = tensor_problems(shape, config.tp, config.vision_plan)
    if config.cp_method == "ulysses":
        per_rank = shape.language.num_heads // config.tp
        if per_rank % config.cp:
            found.append(
                f"cp={config.cp} does not divide the {per_rank} query heads of a rank, which ulysses deals out: "
                "set cp_method to 'ring' or 'allgather'"
            )
    if config.pp > 1:
        try:
            choose_split(config, shape)
        except ValueError as error:
            found.append(f"{error}; lower pp = {config.pp}")
    return found


def tensor_problems(shape: VLMShape, tp: int, vision_plan: str) -> list[str]:
    """Return what keeps a model from being split by tensor parallelism, each with what to change.

    Args:
        shape: the model.
        tp: ranks that split each matrix.
        vision_plan: one of `VISION_PLANS`, for the vision tower.
    """
    if vision_plan not in VISION_PLANS:
        return [f"vision = {vision_plan!r}: choose one of {', '.join(map(repr, VISION_PLANS))}"]
    found = []
    for code, message, advice in find_indivisible(shape, tp, 1 if vision_plan == "replicate" else tp):
        if vision_plan == "split" and code == "vision_heads":
            found.append(f"{message}: {advice}, or vision_heads to 'mlp_only' or 'pad_heads'")
        elif vision_plan == "split" or code not in ("vision_heads", "vision_hidden"):
            found.append(f"{message}: {advice}")
    return found


def choose_split(config: ParallelConfig, shape: VLMShape) -> StageSplit:
    """Return which layers stand on which stage of a pipeline.

    Raises:
        ValueError: if there are fewer layers than stages.
    """
    num_stages = config.pp * SCHEDULES[config.pp_schedule].stages_per_rank
    if config.vision_stages:
        return vision_apart(shape, num_stages, config.vision_stages)
    return split_evenly(shape, num_stages)


def check_step(config: ParallelConfig, accumulation_steps: int) -> None:
    """Refuse a number of micro-batches, or a data strategy, that a pipeline cannot use.

    Raises:
        ValueError: naming everything that is wrong.
    """
    if config.pp > 1:
        check_schedule(num_microbatches=accumulation_steps, **_schedule_options(config))


def _step_problems(config: ParallelConfig, accumulation_steps: int) -> list[str]:
    """Return what `check_step` refuses."""
    if config.pp == 1:
        return []
    return find_schedule_problems(num_microbatches=accumulation_steps, **_schedule_options(config))


def _schedule_options(config: ParallelConfig) -> dict[str, Any]:
    return {
        "schedule": config.pp_schedule,
        "pp": config.pp,
        "data_strategy": "fsdp" if config.strategy in SHARDED else config.strategy,
        "reshard_after_forward": config.strategy != "zero2",
    }


def find_indivisible(shape: VLMShape, tp: int, vision_tp: int) -> Iterator[tuple[str, str, str]]:
    """Yield what a tensor-parallel degree does not divide: a code, a sentence, and what to change.

    Args:
        shape: the model.
        tp: ranks that split each matrix of the language tower.
        vision_tp: the same of the vision tower.
    """
    language, vision = shape.language, shape.vision
    set_one = "set vision_tp=1"
    checks = (
        ("heads", "tp", tp, language.num_heads, "query heads", "lower tp"),
        ("kv_heads", "tp", tp, language.num_kv_heads, "key/value heads", "lower tp"),
        ("hidden", "tp", tp, language.hidden_size, "as the language width", "lower tp"),
        ("mlp", "tp", tp, language.mlp_size, "as the language MLP width", "lower tp"),
        ("vision_heads", "vision_tp", vision_tp, vision.num_heads, "vision heads", set_one),
        ("vision_hidden", "vision_tp", vision_tp, vision.hidden_size, "as the vision width", set_one),
        ("vision_mlp", "vision_tp", vision_tp, vision.mlp_size, "as the vision MLP width", set_one),
    )
    for code, name, degree, size, what, advice in checks:
        if size % degree:
            yield code, f"{name}={degree} does not divide {size} {what}", advice


def resolve_auto(
    config: ParallelConfig, world_size: int, shape: VLMShape, accumulation_steps: int | None = None
) -> tuple[ParallelConfig, str]:
    """Replace the strategy auto by one that suits the number of ranks, and say why; others stay as they are.

    The rule: DDP up to 4 ranks; FSDP with tensor parallelism of degree 2 for the language tower and none for the vision
    tower up to 16; 4 pipeline stages x tensor parallelism of degree 4 x FSDP beyond. Where a degree does not divide the
    ranks or the model, or the pipeline cannot run, FSDP alone.

    Args:
        config: how the ranks share the work; a pipeline that is chosen runs its `pp_schedule`.
        world_size: ranks of the run.
        shape: of the model.
        accumulation_steps: micro-batches of an optimizer step; None where they are not known yet, which counts as
            enough.

    Returns:
        The configuration, and the reason; the reason is empty where nothing was chosen.
    """
    if config.strategy != "auto":
        return config, ""
    chosen, reason = _choose(config, world_size, shape, accumulation_steps)
    if chosen.pp_schedule != config.pp_schedule:
        reason += f"; parallel.pp_schedule = {config.pp_schedule!r} is not used, since there is no pipeline"
    return chosen, reason


def _choose(
    config: ParallelConfig, world_size: int, shape: VLMShape, accumulation_steps: int | None
) -> tuple[ParallelConfig, str]:
    """Apply the rule of `resolve_auto`."""
    alone = dataclasses.replace(config, pp_schedule=ParallelConfig.pp_schedule)
    if world_size == 1:
        return dataclasses.replace(alone, strategy="single"), "one rank: there is nothing to share"
    if world_size <= 4:
        reason = f"{world_size} ranks, at most 4: whole copies (ddp) communicate least"
        return dataclasses.replace(alone, strategy="ddp"), reason
    if world_size <= 16:
        wanted = dataclasses.replace(alone, strategy="fsdp", tp=2, vision_tp=1)
        reason = f"{world_size} ranks, at most 16: shards (fsdp), and the language tower's matrices split by tp = 2"
    else:
        wanted = dataclasses.replace(config, strategy="fsdp", tp=4, pp=4, vision_heads="mlp_only")
        reason = (
            f"{world_size:,} ranks, more than 16: pp = 4 stages, matrices split by tp = 4, shards (fsdp) over the rest"
        )
    obstacle = _find_obstacle(wanted, world_size, shape, accumulation_steps)
    if obstacle:
        return dataclasses.replace(alone, strategy="fsdp"), f"{reason}; but {obstacle}, so shards (fsdp) alone"
    return wanted, reason


def _find_obstacle(wanted: ParallelConfig, world_size: int, shape: VLMShape, accumulation_steps: int | None) -> str:
    """Return the first thing that keeps a choice from running, without advice; empty where nothing does."""
    model_ranks = wanted.tp * wanted.cp * wanted.pp
    if world_size % model_ranks:
        return f"{model_ranks} does not divide {world_size:,}"
    if world_size < 2 * model_ranks:
        return f"{model_ranks} ranks leave none of {world_size:,} over to share samples with"
    steps = 4 * wanted.pp if accumulation_steps is None else accumulation_steps
    for problem in [*find_shape_problems(wanted, shape), *_step_problems(wanted, steps)]:
        return problem.partition(":")[0]
    return ""
