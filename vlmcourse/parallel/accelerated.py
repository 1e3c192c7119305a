"""accelerate behind the same Trainer: a plain model in, accelerate's DDP around it, and proof that it is one.

Enters: a plain model on ranks that have met. Leaves: the model in the `DistributedDataParallel` that accelerate made.
accelerate falls back silently: its launcher starts one process on CPU, and its FSDP and DeepSpeed plugins become plain
DDP there. So the number of processes, its name for what it does and the wrapper are checked. Chapter 5.

Source: documentation of accelerate's Accelerator and PartialState.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.parallel.ranks import Ranks

KINDS = {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU"}
"""What accelerate calls DDP, by the kind of device."""


def apply_accelerate(model: nn.Module, ranks: Ranks) -> DistributedDataParallel:
    """Let accelerate distribute a model by DDP.

    Args:
        model: the same architecture on every rank, on `ranks.device`; rank 0's weights win.
        ranks: this process's place, in a process group that exists, which accelerate uses.

    Returns:
        The wrapped model; the plain one is its `.module`.

    Raises:
        RuntimeError: if accelerate does something else than DDP over all ranks.
    Communicates: a broadcast of all weights from rank 0; then an all-reduce of all gradients in each backward.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=ranks.device.type == "cpu", mixed_precision="no")
    wrapped: Any = accelerator.prepare_model(model)
    found = accelerator.num_processes, accelerator.distributed_type.value, type(wrapped).__name__
    expected = ranks.world_size, KINDS[ranks.device.type], DistributedDataParallel.__name__
    if found != expected:
        raise RuntimeError(
            f"rank {ranks.rank}: accelerate runs (processes, kind, wrapper) {found} instead of {expected}: start the "
            "ranks with --nproc, %%torchrun or torchrun, and unset the ACCELERATE_ variables of the environment"
        )
    return wrapped
