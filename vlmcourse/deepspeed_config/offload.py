"""What a ds_config.json moves off the device, said as a run says it: as a section [offload].

Enters: values of a file. Leaves: an `OffloadConfig`, so that an engine is held to a file as it is to a section: what it
says is asserted after the start and after the first step. What a section cannot say is refused by name.

Source: DeepSpeed 0.19.8, `runtime/zero/offload_config.py`; `zero_force_ds_cpu_optimizer` in `runtime/engine.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmcourse.deepspeed_config.auto import Run
from vlmcourse.deepspeed_config.names import read_keys
from vlmcourse.deepspeed_config.rules import ZERO, Values
from vlmcourse.layout import ParallelConfig
from vlmcourse.state_offload import OffloadConfig

AHEAD = tuple(f"{ZERO}.stage3_{key}" for key in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance"))


def read_offload(settings: Mapping[str, Any], run: Run | None = None) -> OffloadConfig:
    """Return what the tables of a file move off the device.

    Args:
        settings: nested tables of names and values that are known, as `find_deepspeed_problems` lets them pass.
        run: fills in 'auto'; without one it is DeepSpeed's default.
    """
    values = Values(read_keys(settings), run)
    optimizer, parameters = (values[f"{ZERO}.{part}.device"] for part in ("offload_optimizer", "offload_param"))
    if optimizer == parameters == "none":
        return OffloadConfig()
    parts = {"offload_optimizer": optimizer, "offload_param": parameters}
    moved = [f"{ZERO}.{part}" for part, place in parts.items() if place != "none"]
    in_files: dict[str, Any] = {}
    if "nvme" in parts.values():
        part = next(f"{ZERO}.{part}" for part, place in parts.items() if place == "nvme")
        in_files = {"nvme_path": values[f"{part}.nvme_path"] or "", "buffer_count": values[f"{part}.buffer_count"]}
        if parameters == "nvme":
            in_files["buffer_elements"] = values[f"{ZERO}.offload_param.buffer_size"]
    keeps_ours = values["optimizer.params.torch_adam"] is True or values["zero_force_ds_cpu_optimizer"] is False
    return OffloadConfig(
        optimizer=optimizer,
        parameters=parameters,
        layered=parameters != "none" and not any(values[name] for name in AHEAD),
        pin_memory=all(values[f"{part}.pin_memory"] for part in moved),
        adam="torch" if keeps_ours or optimizer == "none" else "deepspeed",
        **in_files,
    )


def find_offload_problems(settings: Mapping[str, Any], run: Run) -> list[str]:
    """Return what a file moves off the device that a run would not, or could not prove, one sentence each."""
    values = Values(read_keys(settings), run)
    offload = read_offload(settings, run)
    if offload.is_plain:
        return []
    found = []
    ratio = values[f"{ZERO}.offload_optimizer.ratio"]
    if ratio < 1:
        found.append(
            f"{ZERO}.offload_optimizer.ratio = {ratio}: a run moves all of the optimizer's state, or none, and proves "
            "it; leave it out"
        )
    paths = {values[f"{ZERO}.{part}.nvme_path"] for part in ("offload_optimizer", "offload_param")} - {None}
    if len(paths) > 1:
        found.append(f"{ZERO}: offload_optimizer.nvme_path and offload_param.nvme_path differ: name one folder in both")
    if run.config.offload.is_plain:  # both together are refused elsewhere
        alone = ParallelConfig(strategy=run.config.parallel.strategy)
        problems = offload.problems() or offload.contradictions(alone, run.config.train.precision)
        found += [f"{ZERO}, in the words of [offload]: {problem}" for problem in problems]
    return found
