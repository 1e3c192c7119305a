"""Record a few steps of a training loop with PyTorch's profiler, one trace a rank, by one line around the loop.

    with profile_steps("runs/profile", wait=1, warmup=1, active=2) as profiler:
        for batch in loader:
            ...
            profiler.step()

Leaves: `rank0000.<time>.pt.trace.json` a rank, as TensorBoard's profiler plugin (torch-tb-profiler) and Perfetto read
them. In it stand, besides operators and kernels, `step 12` around each recorded step, the phases that
`parallel.phases.phase` marks, and barriers by which `monitor.trace_merge` puts the ranks on one clock. A trace that
cannot be written, on a full disk, does not stop the loop: a warning says so once, and why. Chapter 6.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

from vlmcourse.monitor.trace_files import CLOCK_MARK, STEP_PREFIX, TRACE_ENDING, rank_name
from vlmcourse.parallel.ranks import Ranks, init_ranks
from vlmcourse.planner.offload_cost import show_bytes
from vlmcourse.values import check_counts

logger = logging.getLogger(__name__)
UNFINISHED = ".tmp"
"""torch's ending of a trace that it has not yet written to its end."""
CLOCK_ROUNDS = 8
"""Barriers before the first recorded step, and as many after the last: each narrows how far clocks may be apart."""


class StepProfiler:
    """Counts the steps of a loop and records those that its schedule names; `profile_steps` makes one."""

    def __init__(self, folder: Path, ranks: Ranks, wait: int, warmup: int, active: int, first_step: int) -> None:
        self.ranks = ranks
        self.trace_path: Path | None = None
        """This rank's trace, once it is written; None for good where it could not be, which a warning says."""
        self._folder, self._first_step = folder, first_step
        self._begin, self._end = wait + warmup, wait + warmup + active
        self._num_done = 0
        self._open_step: Any = None
        self._profiler = profile(
            activities=_activities(ranks.device),
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
        )

    def step(self) -> None:
        """Say that a step of the loop has ended; every rank must call this, equally often.

        What stands between two calls counts to the step that the second one ends.

        Communicates: before the first and after the last recorded step `CLOCK_ROUNDS` barriers; else nothing.
        """
        if self._open_step is not None:
            if self._num_done == self._end - 1:
                _wait_for_device(self.ranks.device)  # the kernels of the last step belong to it
            self._open_step.__exit__(None, None, None)
            self._open_step = None
            if self._num_done == self._end - 1:
                self._mark_clocks()
        self._profiler.step()
        self._num_done += 1
        if self._num_done == self._begin:
            self._remove_earlier()
            self._mark_clocks()
        if self._begin <= self._num_done < self._end:
            self._open_step = record_function(f"{STEP_PREFIX}{self._first_step + self._num_done}")
            self._open_step.__enter__()

    def after_step(self, *_: object) -> None:
        """Do the same as `step`, for `Trainer.after_step`: `trainer.after_step.append(profiler.after_step)`."""
        self.step()

    def start(self) -> None:
        """Begin; `profile_steps` does it."""
        self._profiler.start()

    def stop(self, *, failed: bool) -> None:
        """End; `profile_steps` does it.

        Args:
            failed: whether the loop raised: then what was recorded so far is thrown away, and a warning says so, since
                a trace without its last barriers cannot be put on the other ranks' clock.

        Raises:
            RuntimeError: if the loop made fewer steps than the schedule takes, so that there is no whole trace.
        """
        is_short = self._num_done < self._end
        if is_short and failed:  # before the profiler is stopped: an interrupted rank may not live so long
            logger.warning(
                "no trace was written to %s: the loop ended after %d of the %d steps that the schedule takes (the last "
                "%d are recorded), and what was recorded is thrown away; a lower wait or active has one sooner",
                self._folder,
                self._num_done,
                self._end,
                self._end - self._begin,
            )
        if is_short:
            self._profiler.on_trace_ready = None
        if self._open_step is not None:
            self._open_step.__exit__(None, None, None)
            self._open_step = None
        self._profiler.stop()
        if is_short and not failed:
            raise RuntimeError(
                f"rank {self.ranks.rank}: the loop called profiler.step() {self._num_done} times, and the schedule "
                f"takes {self._end} steps (the last {self._end - self._begin} are recorded): no trace was written; "
                "lower wait, warmup or active, or make more steps"
            )

    def _mark_clocks(self) -> None:
        """Put moments into the trace that all ranks share: none leaves a barrier before the last has reached it."""
        if self.ranks.world_size == 1:
            return
        device = self.ranks.device
        ids = [device.index or 0] if self.ranks.backend == "nccl" else None
        for _ in range(CLOCK_ROUNDS):
            with record_function(CLOCK_MARK):
                dist.barrier(device_ids=ids)
                _wait_for_device(device)

    def _remove_earlier(self) -> None:
        """Take away an earlier profile's files, before the barriers behind which ranks write new ones."""
        if self.ranks.is_main and self._folder.is_dir():
            for path in [*self._folder.glob(f"*{TRACE_ENDING}"), *self._folder.glob(f"*{TRACE_ENDING}{UNFINISHED}")]:
                path.unlink()

    def _write(self, profiler: profile) -> None:
        """Write the trace; a loop whose trace cannot be written goes on."""
        try:
            self.trace_path = _write_trace(self._folder, rank_name(self.ranks.rank), profiler)
        except (OSError, RuntimeError) as error:  # RuntimeError is what torch makes of an OSError
            logger.warning("rank %d: no trace of this rank was written: %s", self.ranks.rank, error)
            return
        logger.info("rank %d: wrote %s", self.ranks.rank, self.trace_path)


@contextmanager
def profile_steps(
    folder: str | Path,
    *,
    wait: int = 1,
    warmup: int = 1,
    active: int = 2,
    ranks: Ranks | None = None,
    first_step: int = 0,
) -> Iterator[StepProfiler]:
    """Record some steps of the loop inside; all ranks must enter it.

    Args:
        folder: where each rank writes its trace; the same on every rank. Traces that are there are removed when the
            first recorded step begins.
        wait: steps before anything is done; the first ones of a run allocate memory and start threads.
        warmup: steps after these in which the profiler is on and what it sees is thrown away.
        active: steps after these that are recorded.
        ranks: this process's place; by default what `init_ranks` finds.
        first_step: number of the loop's first step; recorded steps are numbered from there.

    Yields:
        The profiler; call its `step` at the end of every step of the loop.

    Raises:
        ValueError: if a count is not a whole number, wait is below 0, or warmup or active are below 1.
        RuntimeError: at the end, if the loop made fewer steps than wait + warmup + active; at the start, if this
            PyTorch cannot record a GPU's kernels although there is one.
    Communicates: barriers, see `StepProfiler.step`.
    """
    check_counts(0, wait=wait, first_step=first_step)
    check_counts(1, warmup=warmup, active=active)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else each start and stop prints a line of its own
    profiler = StepProfiler(
        Path(folder), ranks if ranks is not None else init_ranks(), wait, warmup, active, first_step
    )
    profiler.start()
    failed = True
    try:
        yield profiler
        failed = False
    finally:
        profiler.stop(failed=failed)


def _write_trace(folder: Path, name: str, profiler: profile) -> Path:
    """Write what was recorded; return the file.

    torch says nothing when it cannot write: it leaves `<file>.tmp`, or a file that ends in the middle.

    Raises:
        OSError: if it was not written whole; then nothing of it is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = set(folder.glob(f"{name}.*"))
    tensorboard_trace_handler(str(folder), worker_name=name)(profiler)
    made = sorted(set(folder.glob(f"{name}.*")) - earlier)
    if len(made) == 1 and made[0].name.endswith(TRACE_ENDING) and _is_whole(made[0]):
        return made[0]
    written_bytes = sum(path.stat().st_size for path in made)
    for path in made:
        path.unlink()
    raise OSError(
        f"torch wrote {show_bytes(written_bytes)} of it into {folder} and no more, without a reason; with that removed "
        f"the disk has {show_bytes(shutil.disk_usage(folder).free)} free: make room there, or lower profile.active"
    )


def _is_whole(path: Path) -> bool:
    """Return whether a trace ends as it should: a disk that is full cuts it off."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")


def _activities(device: torch.device) -> list[ProfilerActivity]:
    """Return what to record: operators, and on a GPU its kernels and copies."""
    if device.type != "cuda":
        return [ProfilerActivity.CPU]
    if ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        raise RuntimeError(
            f"torch {torch.__version__} records no GPU kernels (it was built without CUPTI), so a trace of {device} "
            "would show no computation: install PyTorch's own CUDA wheels"
        )
    return [ProfilerActivity.CPU, ProfilerActivity.CUDA]


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
