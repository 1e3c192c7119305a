"""accelerate behind the same Trainer: a plain model in; its DDP, or a DeepSpeed engine that it starts, and proof of it.

Enters: a plain model on ranks that have met; for DeepSpeed its optimizer and settings too. Leaves: the model in the
`DistributedDataParallel` or `DeepSpeedEngine` that accelerate made. accelerate falls back silently: its launcher starts
one process on CPU, and with `cpu=True` its FSDP and DeepSpeed plugins become plain DDP. So the number of processes, its
name for what it does, the device and the wrapper are checked.

accelerate is a set of singletons that read the environment once. Here they are made for one call: variables that would
change what it does are taken away, and its state of before is put back, so that several runs fit into one process and
a person's own `Accelerator` is left alone. Chapter 5.

Source: documentation of accelerate's Accelerator, PartialState and DeepSpeedPlugin.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vlmcourse.parallel.ranks import Ranks

logger = logging.getLogger(__name__)
KINDS = {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU"}
"""What accelerate calls DDP, by the kind of device."""
PREFIX = "ACCELERATE_"
"""What the names of the variables begin with by which accelerate is configured from outside."""


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

    with own_accelerate({}, ranks):
        accelerator = Accelerator(cpu=ranks.device.type == "cpu", mixed_precision="no")
        wrapped: Any = accelerator.prepare_model(model)
        _check(accelerator, wrapped, KINDS[ranks.device.type], DistributedDataParallel, ranks)
    return wrapped


def start_through_accelerate(model: nn.Module, optimizer: Optimizer, settings: Mapping[str, Any], ranks: Ranks) -> Any:
    """Let accelerate start a DeepSpeed engine.

    The engine is what accelerate would drive by `accelerator.backward`, which also makes the optimizer's step. A
    Trainer drives it itself, because the loss is divided by the tokens of the whole step and gradients are looked at
    before the update.

    Args:
        model: plain, on `ranks.device`; rank 0's weights win.
        optimizer: over its parameters, without state.
        settings: DeepSpeed's configuration, no value of it 'auto' and without the sections optimizer and scheduler.
        ranks: this process's place, in a process group that DeepSpeed knows already.

    Returns:
        The `DeepSpeedEngine`.

    Raises:
        RuntimeError: if accelerate does something else than DeepSpeed over all ranks.
    Communicates: a broadcast of all weights from rank 0.
    """
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
    from deepspeed import DeepSpeedEngine

    # Never `cpu=True`: it would be plain DDP. Without it, this variable alone decides that it is DeepSpeed.
    with own_accelerate({"ACCELERATE_USE_DEEPSPEED": "true"}, ranks):
        # zero3_init_flag would build every later model of this process in shards.
        plugin = DeepSpeedPlugin(hf_ds_config=dict(settings), zero3_init_flag=False)
        group = InitProcessGroupKwargs(backend=ranks.backend)
        accelerator = Accelerator(
            mixed_precision="no",
            gradient_accumulation_steps=settings["gradient_accumulation_steps"],
            deepspeed_plugin=plugin,
            kwargs_handlers=[group],
        )
        engine = accelerator.prepare(model, optimizer)[0]
        _check(accelerator, engine, "DEEPSPEED", DeepSpeedEngine, ranks)
    return engine


def _check(accelerator: Any, wrapped: nn.Module, kind: str, wrapper: type[nn.Module], ranks: Ranks) -> None:
    """Refuse an accelerator that does something else than what was asked of it: equal losses would not show it."""
    found = (
        accelerator.num_processes,
        accelerator.distributed_type.value,
        type(wrapped).__name__,
        accelerator.device.type,
    )
    expected = ranks.world_size, kind, wrapper.__name__, ranks.device.type
    if found != expected:
        raise RuntimeError(
            f"rank {ranks.rank}: accelerate runs (processes, kind, wrapper, device) {found} instead of {expected}: "
            "start the ranks with --nproc, %%torchrun or torchrun; ranks on CPU of a machine with GPUs need "
            "CUDA_VISIBLE_DEVICES='' before they start"
        )


@contextmanager
def own_accelerate(variables: Mapping[str, str], ranks: Ranks) -> Iterator[None]:
    """Let accelerate begin anew inside: with these variables of its own and no others, and with no state.

    On leaving, the environment, the number of threads and accelerate's state are what they were.

    Args:
        variables: those that begin with `PREFIX`.
        ranks: rank 0 says which variables of the environment are not read.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    singletons: list[Any] = [AcceleratorState, PartialState, GradientState]
    states = [dict(each._shared_state) for each in singletons]
    environment, num_threads = dict(os.environ), torch.get_num_threads()
    unread = sorted(name for name in environment if name.startswith(PREFIX))
    if unread and ranks.is_main:
        logger.warning("accelerate does as the run's configuration says, and not as %s", ", ".join(unread))
    for name in unread:
        del os.environ[name]
    for each in singletons:
        each._shared_state.clear()
    os.environ.update(variables)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))  # otherwise accelerate sets a number, and warns of it
    try:
        yield
    finally:
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        torch.set_num_threads(num_threads)
        for each, state in zip(singletons, states, strict=True):
            each._shared_state.clear()
            each._shared_state.update(state)
