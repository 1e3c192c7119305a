"""What a rank measures of its own run while it trains: phases of each step, what it worked on, work between steps.

Enters: steps as they begin and end, with their micro-batches. Leaves: lines of this rank's step log, while there is
one, the times of the last step, and the same steps handed to a `RowMeter`. Nothing here communicates. Chapter 6.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from vlmcourse.config import TrainConfig
from vlmcourse.data.samples import Batch
from vlmcourse.layout import Layout
from vlmcourse.monitor.step_clock import StepClock, StepTimes, tells_communication
from vlmcourse.monitor.step_log import EventRecord, StepLogWriter, StepRecord
from vlmcourse.monitor.waits import watch_waits
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.presets import VLMShape
from vlmcourse.train.row_meter import RowMeter

logger = logging.getLogger(__name__)


class RunMonitor:
    """One rank's clock and step log."""

    def __init__(self, config: TrainConfig, strategy: str, shape: VLMShape, layout: Layout, ranks: Ranks) -> None:
        """Make a clock for this rank; `open` begins a log.

        Args:
            config: the run.
            strategy: as it was settled; it decides whether waiting can be told from work.
            shape: of the plain model.
            layout: which ranks share samples.
            ranks: this process's place.
        """
        self.config, self.ranks = config, ranks
        self.meter = RowMeter(config, shape, layout, ranks)
        """For the rows of the run."""
        tells = tells_communication(strategy, ranks.device)
        self.clock = StepClock(ranks.device, tells_communication=tells)
        self._event_clock = StepClock(ranks.device, tells_communication=tells)
        self.last_times: StepTimes | None = None
        """Of the last step whose times are known; on a GPU that is the one before, or earlier."""
        self.last_contents: dict[str, int] = {}
        """What this rank worked on in the last step, by the names of `StepRecord`, and the memory it then held."""
        self._writer: StepLogWriter | None = None
        self._is_open = False
        self.changed = ""
        """Settings that make other steps than those before a resume: `step_settings.name_changes`."""
        self._process = psutil.Process()
        self._untimed: deque[dict[str, Any]] = deque()
        self._began = (0.0, 0.0, 0.0)
        self._loading_cpu_s = 0.0

    def open(self, run_folder: Path, start_step: int) -> None:
        """Begin the step log of a run, or go on with it after step `start_step`; a rank that cannot says so once."""
        self._is_open = True
        self.meter.restart()
        try:
            kept, changed = start_step or None, self.changed
            self._writer = StepLogWriter(run_folder, self.ranks.rank, keep_until_step=kept, changed=changed)
            self.changed = ""
        except OSError as error:
            logger.warning("rank %d: no step log in %s: %s", self.ranks.rank, run_folder, error.strerror)

    def close(self) -> None:
        """Write what is not yet written and end the log; safe to call twice."""
        self._is_open = False
        if self._writer is not None:
            self._write_known(wait=True)
            self._writer.close()
            self._writer = None

    def is_row_due(self, step: int) -> bool:
        """Whether a row is logged after optimizer step `step`, the first being 1; outside of `fit` none is."""
        train = self.config.train
        every = [number for number in (train.log_every, train.eval_every) if number]
        return self._is_open and (step == train.num_steps or any(step % number == 0 for number in every))

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Time what runs inside as optimizer step `step`, the first being 1."""
        self.meter.begin(is_due=self.is_row_due(step))
        self._began = (time.time(), time.perf_counter(), time.process_time())
        with self.clock.step(), watch_waits(self.clock):
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count what runs inside to phase data_wait, and note its CPU seconds."""
        began_s = time.process_time()
        with self.clock.phase("data_wait"):
            yield
        self._loading_cpu_s = time.process_time() - began_s

    def step_done(self, step: int, batches: Sequence[Batch]) -> None:
        """Note what the step just timed was.

        Args:
            step: optimizer steps done, this one included.
            batches: this rank's micro-batches of it, on CPU.
        """
        start_s, steady_s, cpu_s = self._began
        wall_s = time.perf_counter() - steady_s
        self.meter.add_step(batches, wall_s)
        record: dict[str, Any] = {"step": step, "start_s": start_s, "world_size": self.ranks.world_size}
        record["data_cpu_s"] = self._loading_cpu_s
        record["cpu_percent"] = 100 * (time.process_time() - cpu_s) / wall_s if wall_s > 0 else None
        self.last_contents = count_contents(batches) | self._memory()
        self._untimed.append(record | self.last_contents)
        self._write_known()

    @contextmanager
    def event(self, kind: str, step: int) -> Iterator[None]:
        """Note how long work between two steps takes, and for how much of it this rank waits for others.

        Args:
            kind: one of `step_log.EVENTS`.
            step: optimizer steps done.
        """
        start_s, steady_s = time.time(), time.perf_counter()
        with self._event_clock.step(), watch_waits(self._event_clock):
            yield
        seconds = time.perf_counter() - steady_s
        (times,) = self._event_clock.take(wait=True)
        if self._writer is not None:
            waited_s = times.communication_s
            self._writer.write(
                EventRecord(event=kind, step=step, start_s=start_s, seconds=seconds, communication_s=waited_s)
            )

    def _write_known(self, *, wait: bool = False) -> None:
        for times in self.clock.take(wait=wait):
            self.last_times = times
            self.meter.add_times(times)
            record = self._untimed.popleft()
            if self._writer is not None:
                self._writer.write(StepRecord(**record, **vars(times)))

    def _memory(self) -> dict[str, int]:
        """Return what this process holds now; the GPU's numbers are PyTorch's own counts, which it is not asked for."""
        major_faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        found = {"rss_bytes": self._process.memory_info().rss, "major_faults": major_faults}
        if self.ranks.device.type == "cuda":
            found["allocated_bytes"] = torch.cuda.memory_allocated(self.ranks.device)
            found["reserved_bytes"] = torch.cuda.memory_reserved(self.ranks.device)
            found["alloc_retries"] = int(torch.cuda.memory_stats(self.ranks.device).get("num_alloc_retries", 0))
        return found


def count_contents(batches: Sequence[Batch]) -> dict[str, int]:
    """Return what micro-batches on CPU hold, by the names of `StepRecord`; mute ones hold padding only."""
    heard = [batch for batch in batches if not batch.is_mute]
    image = sum(batch.num_visual_tokens for batch in heard)
    real = sum(batch.num_tokens for batch in heard)
    return {
        "micro_batches": len(batches),
        "text_tokens": real - image,
        "image_tokens": image,
        "padding_tokens": sum(batch.input_ids_BS.numel() for batch in batches) - real,
        "samples": sum(len(batch.sample_ids) for batch in heard),
        "tiles": sum(sum(batch.tiles_per_sample) for batch in heard),
    }
