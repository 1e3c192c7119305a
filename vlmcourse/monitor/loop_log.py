"""One line around any training loop, and `vlmcourse diagnose` can read what it did.

Enters: whatever the loop goes through (a DataLoader, a list of batches), the model, a folder. Leaves: the same batches,
and this rank's step log in the folder. A step lasts from the request for a batch to the next request; hooks tell its
phases: waiting for the batch, forward (the model's call), backward (from the gradient of the model's output on),
communication (waits in torch.distributed, and DDP's wait at backward's end), optimizer (its step); what is left is
"other". Nothing is sent, and the numbers of the training do not change.

Left out: what a run of this package knows of itself, its settings and FLOPs, so a diagnosis says nothing of those;
saves and evaluations inside the loop are "other". FSDP's and DeepSpeed's waits on a GPU are in no phase of their own
(see `step_clock`). Reentrant activation checkpointing ends "backward" early. Chapter 6.

Source: PyTorch's documentation of hooks; its autograd engine runs a callback that a callback asks for after all others.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from vlmcourse.machine import describe_machine
from vlmcourse.monitor.step_clock import StepClock
from vlmcourse.monitor.step_log import StepLogWriter, StepRecord
from vlmcourse.monitor.waits import watch_waits

T = TypeVar("T")
END: Any = object()


class _LoopEnds(Exception):
    """There is no further batch; the step that asked for it is forgotten."""


def log_loop(
    batches: Iterable[T],
    run_folder: str | Path,
    model: nn.Module,
    *,
    count_tokens: Callable[[T], int] | None = None,
) -> Generator[T]:
    """Yield what a training loop goes through, and write a log of its steps.

    Around a loop over `loader`: `for batch in log_loop(loader, "runs/mine", model):`.

    On several ranks every rank calls it with the same folder; each writes its own file.

    Args:
        batches: what the loop goes through, one item a step.
        run_folder: new, or that of an earlier loop, whose step log is replaced.
        model: that the loop calls; wrapped in DDP, if it is.
        count_tokens: of an item on this rank; without it the diagnosis speaks of no tokens.

    Raises:
        OSError: if the folder cannot be written to.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    is_plain = world_size == 1 or isinstance(model, DistributedDataParallel)
    clock = StepClock(device, tells_communication=device.type != "cuda" or is_plain)
    writer = StepLogWriter(run_folder, rank)
    if rank == 0:
        _describe(Path(run_folder), device, world_size)
    try:
        with _watch_passes(clock, model):
            yield from _time_steps(iter(batches), clock, writer, world_size, count_tokens)
    finally:
        writer.close()


def _time_steps(
    batches: Iterator[T],
    clock: StepClock,
    writer: StepLogWriter,
    world_size: int,
    count_tokens: Callable[[T], int] | None,
) -> Generator[T]:
    process, untimed = psutil.Process(), list[dict[str, Any]]()

    def write(*, wait: bool = False) -> None:
        for times in clock.take(wait=wait):
            writer.write(StepRecord(**untimed.pop(0), **dataclasses.asdict(times)))

    try:
        for step in range(1, 1 << 62):
            start_s, steady_s, cpu_s = time.time(), time.perf_counter(), time.process_time()
            with clock.step(), watch_waits(clock):
                with clock.phase("data_wait"):
                    batch = next(batches, END)
                if batch is END:
                    raise _LoopEnds
                loading_cpu_s = time.process_time() - cpu_s
                yield batch
            wall_s = time.perf_counter() - steady_s
            record: dict[str, Any] = {"step": step, "start_s": start_s, "world_size": world_size}
            record |= {"data_cpu_s": loading_cpu_s, "rss_bytes": process.memory_info().rss}
            record["cpu_percent"] = 100 * (time.process_time() - cpu_s) / wall_s
            record["text_tokens"] = None if count_tokens is None else count_tokens(batch)
            if clock.device.type == "cuda":
                record["allocated_bytes"] = torch.cuda.memory_allocated(clock.device)
                record["reserved_bytes"] = torch.cuda.memory_reserved(clock.device)
            untimed.append(record)
            write()
    except _LoopEnds:
        pass
    finally:
        write(wait=True)


@contextmanager
def _watch_passes(clock: StepClock, model: nn.Module) -> Iterator[None]:
    """Turn the clock to forward, backward and optimizer by hooks, while the context is open."""
    engine: Any = Variable._execution_engine
    waits_at_end = isinstance(model, DistributedDataParallel) and clock.tells_communication
    in_backward = False

    def begin_forward(module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            clock.turn("forward")

    def end_forward(module: nn.Module, _: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            clock.turn("other")
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(begin_backward)

    def begin_backward(_: Tensor) -> None:
        nonlocal in_backward
        if not in_backward and clock.is_running:
            in_backward = True
            clock.turn("backward")
            engine.queue_callback(end_backward)

    def end_backward() -> None:
        """All gradients are computed; what DDP asked for later than this runs now, and then what is asked for here."""
        nonlocal in_backward
        in_backward = False
        clock.turn("communication" if waits_at_end else "other")
        if waits_at_end:
            engine.queue_callback(lambda: clock.turn("other"))

    with ExitStack() as stack:
        for handle in (
            model.register_forward_pre_hook(begin_forward),
            model.register_forward_hook(end_forward),
            register_optimizer_step_pre_hook(lambda *_: clock.turn("optimizer")),
            register_optimizer_step_post_hook(lambda *_: clock.turn("other")),
        ):
            stack.callback(handle.remove)
        yield


def _describe(run_folder: Path, device: torch.device, world_size: int) -> None:
    """Write what a diagnosis has to know of the machine."""
    hardware = {
        "machine": describe_machine(),
        "world_size": world_size,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    (run_folder / "run.json").write_text(json.dumps({"hardware": hardware}), encoding="utf-8")
