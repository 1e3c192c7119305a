"""What `strategy = "auto"` becomes: the fastest plan that fits, where the machine is one that the planner can describe.

Enters: a `TrainConfig`, a number of ranks, a shape, the environment. Leaves: a `ParallelConfig`, the reason in words.
Imports no torch. Chapters 1 and 7.

Micro-batch, accumulation and recomputation stay as the configuration has them; auto chooses how ranks share the work.
Plans are compared by predicted seconds a sample, since their batches differ with the number of data-parallel ranks.
Where the search cannot describe the machine or the run, the rule by number of ranks decides that chapter 1 teaches,
`degrees.resolve_auto`, and the reason says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from vlmcourse.config import TrainConfig
from vlmcourse.layout import ParallelConfig
from vlmcourse.planner.choice import Task, to_config
from vlmcourse.planner.degrees import settle
from vlmcourse.planner.search import Search, search_plans
from vlmcourse.planner.search_reasons import say_miss, say_search
from vlmcourse.planner.search_space import SearchSpace
from vlmcourse.planner.this_cluster import ThisCluster, find_cluster
from vlmcourse.planner.workload import Workload
from vlmcourse.presets import VLMShape

PLAN_PRECISIONS = {"fp32": "fp32", "bf16": "bf16_autocast", "bf16_master": "bf16_mixed"}
"""`train.precision` -> the recipe of a `Plan`, for those that have one."""
RANKED = 20


def settle_run(
    config: TrainConfig,
    world_size: int,
    shape: VLMShape | None,
    *,
    elsewhere: str = "",
    environ: Mapping[str, str] | None = None,
) -> tuple[ParallelConfig, str]:
    """Decide what auto leaves open and refuse what cannot run, before any rank starts or waits.

    Args:
        config: of the run.
        world_size: its ranks.
        shape: of the model; None where it is not known yet.
        elsewhere: why this machine's GPUs are not those that the ranks use; "" if they are.
        environ: of this process; by default that of the operating system.

    Returns:
        The configuration without auto, and the reason of the choice; it is empty where nothing was chosen.

    Raises:
        ValueError: as `degrees.settle`.
    """
    accumulation = config.train.accumulation_steps
    if config.parallel.strategy != "auto" or shape is None or world_size == 1:
        return settle(config.parallel, world_size, shape, accumulation)
    here = elsewhere or find_cluster(world_size, os.environ if environ is None else environ)
    why_not = here if isinstance(here, str) else find_obstacle(config)
    if not why_not and not isinstance(here, str):
        search = search_run(config, shape, here)
        for cost in search.best:
            chosen = to_config(cost.choice, config.parallel)
            if not chosen.problems() and not config.activations.contradictions(chosen, config.model.freeze):
                settle(chosen, world_size, shape, accumulation)
                return chosen, f"{say_search(search)}\n(predicted for {here.cluster.name})"
        nearest = f"; {say_miss(search.misses[0])}" if search.misses else ""
        why_not = f"none of {search.num_plans:,} plans fits by prediction{nearest}"
    chosen, reason = settle(config.parallel, world_size, shape, accumulation)
    return chosen, f"{reason} (a rule by the number of ranks, without a search: {why_not})"


def find_obstacle(config: TrainConfig) -> str:
    """Return what of a run the search does not describe; "" if it describes all."""
    parallel = config.parallel
    unknown = {
        f"train.precision = {config.train.precision!r}": config.train.precision not in PLAN_PRECISIONS,
        "[offload] moves state to main memory": not config.offload.is_plain,
        "activations.offload = true": config.activations.offload,
        f"parallel.compression = {parallel.compression!r}": parallel.compression != "none",
        f"parallel.prefetch = {parallel.prefetch}": bool(parallel.prefetch),
        "parallel.adaptive = true": parallel.adaptive,
        "parallel.sequence_parallel = false": not parallel.sequence_parallel,
        f"parallel.cp_method = {parallel.cp_method!r}": parallel.cp_method != "ring",
    }
    found = [what for what, is_set in unknown.items() if is_set]
    return f"{', '.join(found)}: the search does not describe it" if found else ""


def search_run(config: TrainConfig, shape: VLMShape, here: ThisCluster) -> Search:
    """Search the plans that a configuration leaves open.

    A sample is taken to have one picture of as many tiles as `data.max_tiles_per_image` allows, and all tokens.
    """
    tiles = config.data.max_tiles_per_image
    multiple = 2 * here.cluster.num_devices  # what no grid of so many ranks fails to divide
    task = Task(
        model=shape,
        cluster=here.cluster,
        global_batch_size=0,
        workload=Workload(
            seq_len=-(-config.data.max_seq_len // multiple) * multiple,
            tiles_per_sample=tiles + 1 if tiles > 1 else 1,  # the thumbnail
        ),
        frozen=config.model.freeze,
        precision=PLAN_PRECISIONS[config.train.precision],
        device=here.device,
    )
    space = SearchSpace(
        recompute_vision=(config.activations.vision,),
        recompute_language=(config.activations.language,),
        schedules=(config.parallel.pp_schedule,),
        gradient_syncs=(config.parallel.gradient_sync,),
        micro_batch_sizes=(config.train.micro_batch_size,),
        grad_accum_steps=(config.train.accumulation_steps,),
        runnable=True,
    )
    return search_plans(task, space, top=RANKED)
