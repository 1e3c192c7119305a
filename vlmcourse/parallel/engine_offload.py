"""Offloading by a DeepSpeed engine: what its settings say, which optimizer updates, and what must be compiled first.

Enters: the section [offload] and the optimizer of a run. Leaves: entries of the engine's configuration, and the
optimizer to hand over; or one line that says what this machine lacks. What the engine then does is looked at in
`engine_places`. Chapter 5.

By default PyTorch's AdamW updates in main memory: its fused kernel needs no compiler and takes a rate for each tower.
DeepSpeed's own keeps the same groups.

Source: documentation of DeepSpeed's JSON configuration (offload_optimizer, offload_param) and of DeepSpeedCPUAdam.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.optim import Optimizer

from vlmcourse.parallel.nvme import check_swappable, clear_swap_folder, find_nvme_problem
from vlmcourse.parallel.op_builds import find_build_problem, first_problem, get_builder, load_op
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.state_offload import OffloadConfig

logger = logging.getLogger(__name__)


def offload_settings(offload: OffloadConfig) -> dict[str, Any]:
    """Return what `zero_optimization` of a DeepSpeed configuration says about a section [offload]; {} for nothing."""
    pins = offload.pin_memory and torch.cuda.is_available()  # without a GPU, locked pages serve nothing
    places = {"offload_optimizer": offload.optimizer, "offload_param": offload.parameters}
    found: dict[str, Any] = {
        key: {"device": place, "pin_memory": pins} for key, place in places.items() if place != "none"
    }
    for key, place in places.items():
        if place == "nvme":
            found[key] |= {"nvme_path": offload.nvme_path, "buffer_count": offload.buffer_count}
    if offload.parameters == "nvme":
        # By default a billion elements stay in main memory: all of most models, and no file would ever be read.
        found["offload_param"] |= {"buffer_size": offload.buffer_elements, "max_in_cpu": 0}
    if offload.layered or offload.parameters == "nvme":
        # A weight keeps its buffer while it is whole. By default up to a billion elements stay whole, or are fetched
        # ahead: a model with more weights than buffers would fail in its first forward.
        found |= {f"stage3_{key}": 0 for key in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")}
    return found


def prepare_offload(optimizer: Optimizer, offload: OffloadConfig, ranks: Ranks) -> Optimizer:
    """Return the optimizer to hand to an engine, everything compiled that it and its files need.

    Args:
        optimizer: of `build_optimizer`, without state.
        offload: what was asked for.
        ranks: this process's place; all ranks must call this.

    Raises:
        ValueError: if offloading to files was asked for, and this machine or this model cannot.
        RuntimeError: if an operation cannot be compiled.
    Communicates: where something is compiled, an all-gather of texts and what `load_op` does.
    """
    check_nvme(offload, ranks)
    groups = [[_num_elements(p) for p in group["params"]] for group in optimizer.param_groups]
    if offload.optimizer == "nvme":
        check_swappable("optimizer", [sum(of_group) for of_group in groups], ranks.world_size, ranks.rank)
        clear_swap_folder(offload.nvme_path, ranks.rank)
    if offload.parameters == "nvme":
        check_swappable(
            "parameters", [elements for of_group in groups for elements in of_group], ranks.world_size, ranks.rank
        )
    if offload.adam == "torch":
        return optimizer
    problem = first_problem(find_build_problem(), ranks)
    if problem:
        if ranks.is_main:
            logger.warning(
                "offload.adam = 'deepspeed': %s; PyTorch's AdamW updates instead, with the same losses", problem
            )
        return optimizer
    load_op(get_builder("CPUAdamBuilder"), ranks)
    return as_cpu_adam(optimizer)


def check_nvme(offload: OffloadConfig, ranks: Ranks) -> None:
    """Refuse to offload to files where this machine cannot, before anything is built; compile what it needs.

    Raises:
        ValueError: in one line, what is missing.
        RuntimeError: if an operation cannot be compiled.
    Communicates: an all-gather of texts, and what `load_op` does.
    """
    if not offload.uses_nvme:
        return
    files = get_builder("AsyncIOBuilder")
    problem = first_problem(find_build_problem() or find_nvme_problem(offload.nvme_path, files), ranks)
    if problem:
        raise ValueError(f"{offload} cannot be: {problem}")
    for builder in (get_builder("PinMemoryBuilder"), files):  # the second loads the first
        load_op(builder, ranks)


def _num_elements(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())


def as_cpu_adam(optimizer: Optimizer) -> Optimizer:
    """Return DeepSpeed's AdamW for main memory with the groups of another AdamW, each with its own rate and decay.

    Args:
        optimizer: of `build_optimizer`, without state; a group keeps its keys `tower` and `base_lr`.

    Raises:
        RuntimeError: if the operation `cpu_adam` cannot be compiled or loaded; `op_builds.load_op` says more, first.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    kept = ("params", "lr", "betas", "eps", "weight_decay", "tower", "base_lr")
    groups = [{key: group[key] for key in kept if key in group} for group in optimizer.param_groups]
    first = groups[0]
    return DeepSpeedCPUAdam(groups, lr=first["lr"], betas=first["betas"], eps=first["eps"], adamw_mode=True)
