"""What a run's numbers were measured on: processor, GPUs, memory and versions, as one mapping for logs and files.

Enters: a rank's place. Leaves: names and numbers that JSON takes.
"""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch

import vlmcourse
from vlmcourse.machine import describe_machine
from vlmcourse.parallel.ranks import Ranks


def describe_hardware(ranks: Ranks) -> dict[str, Any]:
    """Return what this rank runs on. A GPU's entries are there only on a GPU.

    Args:
        ranks: this process's place.

    Returns:
        `machine` (cores, processor, system), `memory_bytes` of the machine, `world_size`, `backend`, `device`,
        `threads` of torch, versions of torch and this package; on a GPU `gpu`, `gpu_memory_bytes` and `cuda`.
    """
    found: dict[str, Any] = {
        "machine": describe_machine(),
        "memory_bytes": psutil.virtual_memory().total,
        "world_size": ranks.world_size,
        "backend": ranks.backend,
        "device": ranks.device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "vlmcourse": vlmcourse.__version__,
    }
    if ranks.device.type == "cuda":
        properties = torch.cuda.get_device_properties(ranks.device)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
        found |= {"visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "all")}
    return found
