"""Chapter 7's glue: a plan of a large model, told in the words of a `Choice` and of a run's configuration.

Enters: a model, a cluster, a workload, choices. Leaves: what towers weigh, what the planner says of a choice, and a
played step of it. The same mesh trained for real is in `quoted_mesh.py`.
"""

from __future__ import annotations

import warnings

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.dryrun import extrapolate_run
from vlmcourse.planner.choice import Choice, Task, strategy_of
from vlmcourse.planner.choice_cost import Cost, Costs
from vlmcourse.planner.flops import Work, count_tower_flops
from vlmcourse.planner.job import describe_config
from vlmcourse.planner.layer_kept import keep_tower
from vlmcourse.planner.run_peak import count_layers, estimate_run_peak
from vlmcourse.planner.shapes import count_params
from vlmcourse.plots.planning import PlayedPlan

TOWERS = ("vision", "projector", "language")
"""In the order in which a sample passes them."""


def cost_of(task: Task, choice: Choice) -> Cost:
    """Return the planner's seconds and bytes of one choice, whether it fits or not."""
    return Costs(task).find_cost(choice)


def count_towers(task: Task) -> dict[str, dict[str, float]]:
    """Return what a task's towers weigh for one sample on one rank: parameters, FLOPs and kept activations.

    Returns:
        By quantity, with its unit in the name, the amount of each tower. FLOPs are those of forward and backward, all
        towers trained; activations are what layers keep for backward without recomputation. The projector's own are not
        told apart and left out: they are below 1 % of a tower's.
    """
    params = count_params(task.model)
    work = Work.of_sequences([task.workload.seq_len], task.workload.tiles_per_sample)
    flops = count_tower_flops(task.model, work)
    layers = count_layers(task.job(Choice(dp_shard=task.cluster.num_devices, zero_stage=3)))
    depth = {"vision": task.model.vision.num_layers, "language": task.model.language.num_layers}
    kept = {tower: keep_tower("none", depth[tower], layers[tower]).stored / 1e9 for tower in depth}
    return {
        "parameters (billion)": {tower: getattr(params, tower) / 1e9 for tower in TOWERS},
        "FLOPs of a sample (trillion)": {tower: flops[tower].model / 1e12 for tower in TOWERS},
        "activations of a sample (GB)": kept,
    }


def config_of(task: Task, choice: Choice, *, played_micro_batches: int = 2) -> TrainConfig:
    """Return the run of a choice for a dry run: precision with fp32 master copies, all samples as large as allowed.

    Args:
        task: what is trained.
        choice: how; a data-parallel one of this package's strategies, with or without tensor parallelism.
        played_micro_batches: accumulation of the run; from the second micro-batch on all are alike.

    Raises:
        ValueError: if the task's precision is not bf16_mixed, this package has no such strategy, or no image has so
            many tiles.
    """
    strategy = strategy_of(choice)
    if task.precision != "bf16_mixed" or not strategy or choice.pp > 1:
        raise ValueError(
            f"{choice}, precision = {task.precision!r}: the chapter's dry runs are in bf16_mixed, without a pipeline, "
            "under a strategy of this package; choose one of these, or write the configuration yourself"
        )
    tiles = task.workload.tiles_per_sample
    if tiles < 1 or tiles == 2:
        raise ValueError(
            f"tiles_per_sample = {tiles}: one image is 1 tile, or several and a thumbnail; choose 1, or 3 or more"
        )
    parallel = {"strategy": strategy, "tp": choice.tp, "cp": choice.cp, "gradient_sync": choice.gradient_sync}
    return parse_config(
        {
            "model": {"preset": task.model.name, "freeze": list(task.frozen)},
            "data": {"max_seq_len": task.workload.seq_len, "max_tiles_per_image": max(1, tiles - 1)},
            "train": {
                "precision": "bf16_master",
                "micro_batch_size": choice.micro_batch_size,
                "accumulation_steps": played_micro_batches,
            },
            "parallel": parallel | ({"vision_tp": 1} if choice.vision_tp < choice.tp else {}),
            "activations": {"vision": choice.recompute_vision, "language": choice.recompute_language},
        }
    )


def play(task: Task, choice: Choice, *, rank: int = 0) -> PlayedPlan:
    """Play a step of one rank of a choice on fake tensors, and count the same with the planner.

    Both count what operations on a CPU keep, as the dry run cannot do otherwise, and leave the allowance out.

    Args:
        task: what is trained; its cluster's size does not count, the choice's degrees do.
        choice: how; see `config_of`.
        rank: which one, from 0.

    Raises:
        ValueError: as `config_of` does, or if there is no such rank.
    """
    config, world_size = config_of(task, choice), choice.dp_degree * choice.cp * choice.tp
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, about speed on this machine
        found = extrapolate_run(config, rank, world_size, shape=task.model)
    job = describe_config(config, world_size, task.model, task.workload, on_gpu=False)
    return PlayedPlan(found=found, predicted=estimate_run_peak(job))
