"""Where the state of a DeepSpeed engine lies: measured, and refused where it is not what the run asked for.

Enters: an engine after its start or its first step. Leaves: bytes by place, or an error where DeepSpeed accepted a
setting and left the state where it was. On CPU ranks the device is main memory too, and equal losses show nothing: so
the classes, flags and swappers that move state are looked at, and on a GPU also where each tensor lies. Chapter 5.

Source: DeepSpeed 0.19.8, `runtime/zero/stage3.py`, `stage_1_and_2.py` and `partition_parameters.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vlmcourse.parallel.nvme import SwapFiles, check_swap_files, count_swap_files
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.state_offload import OffloadConfig


@dataclass(frozen=True, kw_only=True)
class StatePlaces:
    """Where the state of one rank's engine lies between steps: bytes by cpu, cuda or nvme."""

    parameters: dict[str, int]
    """Shards of the weights (ZeRO-3) or all weights (ZeRO-1, 2), as forward and backward use them."""
    updated: dict[str, int]
    """This rank's fp32 weights in the optimizer."""
    moments: dict[str, int]
    """Adam's two moments; empty before the first step."""
    updated_by: str
    """Class of the optimizer that updates."""
    moved_by: str
    """What DeepSpeed moves state with, or "" for nothing."""


def measure_state_places(engine: Any) -> StatePlaces:
    """Return where the state of this rank's engine lies.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 1, 2 or 3.
    """
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    is_sharded = engine.zero_optimization_stage() == 3
    base: Any = optimizer.optimizer
    moments = [value for state in base.state.values() for key, value in state.items() if key.startswith("exp_avg")]
    swapper = getattr(optimizer, "optimizer_swapper", None)
    updated = _bytes_by_place(updated_tensors(engine))
    moment_bytes = _bytes_by_place(moments)
    if swapper is not None:
        files = count_swap_files(Path(swapper.swap_folder))
        moment_bytes["nvme"], updated["nvme"] = files.moment_bytes, files.weight_bytes
    found = _bytes_by_place([p.ds_tensor for p in parameters] if is_sharded else parameters)
    if is_sharded:
        found["nvme"] = sum(p.ds_tensor.ds_numel * p.element_size() for p in parameters if _is_in_file(p))
    return StatePlaces(
        parameters=_without_empty(found),
        updated=_without_empty(updated),
        moments=_without_empty(moment_bytes),
        updated_by=type(base).__name__,
        moved_by=_moved_by(engine),
    )


def updated_tensors(engine: Any) -> list[Tensor]:
    """Return this rank's fp32 weights that the engine's optimizer updates; those in files are empty."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def check_engine_offload(engine: Any, offload: OffloadConfig, updated_by: str, ranks: Ranks) -> None:
    """Refuse an engine that, after its start, does not offload what was asked for, or offloads something else.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 1, 2 or 3.
        offload: what was asked for.
        updated_by: class of the optimizer that was handed over.
        ranks: this process's place.

    Raises:
        RuntimeError: naming the first difference: which place, class, flag or swapper was found.
    """
    where = f"rank {ranks.rank}: deepspeed-zero{engine.zero_optimization_stage()} with {offload}"
    found = [f"{key} {was!r} instead of {wanted!r}" for key, was, wanted in _facts(engine, offload) if was != wanted]
    places = measure_state_places(engine)
    if places.updated_by != updated_by:
        found.append(f"updates by {places.updated_by!r} instead of {updated_by!r}")
    for what, held, wanted in (
        ("weights in the optimizer", places.updated, offload.optimizer),
        ("parameters", places.parameters, offload.parameters),
    ):
        allowed = {"cpu", "nvme"} if wanted == "nvme" else {"cpu"} if wanted == "cpu" else {ranks.device.type}
        found += [f"{size:,} bytes of {what} on {at!r}" for at, size in held.items() if at not in allowed]
    if offload.pin_memory and not offload.is_plain and ranks.device.type == "cuda":
        found += ["unlocked pages in main memory"] * (not all(_is_locked(tensor) for tensor in _locked_tensors(engine)))
    if found:
        raise RuntimeError(
            f"{where}: the engine has {'; '.join(found)}: DeepSpeed took the setting and did something else; look at "
            "zero_optimization in the engine's settings"
        )


def check_after_step(engine: Any, offload: OffloadConfig, ranks: Ranks) -> None:
    """Refuse moments that the first step made in another place than was asked for: they exist only now.

    Raises:
        RuntimeError: naming the place and the bytes, or what is missing among the files.
    """
    moments = measure_state_places(engine).moments
    allowed = {"none": {ranks.device.type}, "cpu": {"cpu"}, "nvme": {"cpu", "nvme"}}[offload.optimizer]
    wrong = [f"{size:,} bytes on {at!r}" for at, size in moments.items() if at not in allowed]
    if wrong or not moments:
        raise RuntimeError(
            f"rank {ranks.rank}: {offload}: the first step made moments of {', '.join(wrong) or 'no bytes'}, and they "
            f"must lie on {' or '.join(sorted(allowed))}"
        )
    if offload.optimizer == "nvme":
        check_swap_files(swap_files(engine), ranks.rank)


def swap_files(engine: Any) -> SwapFiles:
    """Return the files that this rank's engine has written of its optimizer's state.

    Raises:
        ValueError: if the engine's optimizer state does not go to files.
    """
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is None:
        raise ValueError("the engine writes no files: set offload.optimizer = 'nvme' and offload.nvme_path")
    return count_swap_files(Path(swapper.swap_folder))


def _facts(engine: Any, offload: OffloadConfig) -> list[tuple[str, object, object]]:
    """Return what the engine's classes say about offloading: name, found, expected."""
    optimizer = engine.optimizer
    moves_optimizer, moves_parameters = offload.optimizer != "none", offload.parameters != "none"
    if engine.zero_optimization_stage() < 3:
        return [("cpu_offload", optimizer.cpu_offload, moves_optimizer)]
    parameters = list(engine.module.parameters())
    return [
        ("offload_optimizer", optimizer.offload_optimizer, moves_optimizer),
        ("groups updated in main memory", _groups_in_memory(optimizer), moves_optimizer),
        ("a swapper of the optimizer", optimizer.optimizer_swapper is not None, offload.optimizer == "nvme"),
        ("offload_param", optimizer.offload_param, moves_parameters),
        ("shards made for", _home(parameters), offload.parameters),
        *([("elements kept or fetched ahead", _elements_ahead(optimizer), 0)] if offload.layered else []),
    ]


def _elements_ahead(optimizer: Any) -> int:
    """Return how many elements of weights ZeRO-3 may fetch ahead, keep for later, or have whole beside a layer."""
    moves = optimizer.parameter_offload
    limits = moves._prefetch_bucket_sz, moves._max_reuse_distance_in_numel, moves._max_available_parameters_in_numel
    return sum(int(limit) for limit in limits)


def _groups_in_memory(optimizer: Any) -> object:
    """Whether all groups of a ZeRO-3 optimizer are updated in main memory, or none; else how many are."""
    places = list(getattr(optimizer, "subgroup_to_device", {}).values())
    num_moved = sum(place == "cpu" for place in places)
    return bool(places) if num_moved == len(places) else f"{num_moved} of {len(places)}"


def _home(parameters: Iterable[Any]) -> str:
    """Return where DeepSpeed keeps the shards of parameters, by the marks that it puts on those that are trained."""
    trained = [p for p in parameters if p.requires_grad]
    if any(_is_in_file(p) for p in trained):
        return "nvme"  # those below 1 MiB stay in main memory
    marks = {"cpu" if p.ds_tensor.final_location is not None else "none" for p in trained}
    return marks.pop() if len(marks) == 1 else "some of both"


def _is_in_file(parameter: Any) -> bool:
    place = parameter.ds_tensor.final_location
    return getattr(place, "value", place) == "nvme"


def _moved_by(engine: Any) -> str:
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        return type(optimizer).__name__ if optimizer.cpu_offload else ""
    movers = [optimizer.optimizer_swapper, optimizer.parameter_offload if optimizer.offload_param else None]
    named = [type(mover).__name__ for mover in movers if mover is not None]
    return " and ".join(named) or (type(optimizer).__name__ if optimizer.offload_optimizer else "")


def _bytes_by_place(tensors: Iterable[Tensor]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        found[tensor.device.type] += tensor.numel() * tensor.element_size()
    return found


def _without_empty(places: dict[str, int]) -> dict[str, int]:
    return {place: size for place, size in places.items() if size}


def _locked_tensors(engine: Any) -> list[Tensor]:
    """Return what DeepSpeed copies between a GPU and locked pages: fp32 weights (ZeRO-1, 2) or gradients (ZeRO-3)."""
    is_sharded = engine.zero_optimization_stage() == 3
    return [engine.optimizer.grad_partitions_flat_buffer] if is_sharded else updated_tensors(engine)


def _is_locked(tensor: Tensor) -> bool:
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    return accelerator.is_pinned(tensor)
