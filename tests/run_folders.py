"""Folders as runs leave them, written by hand with times that are known: for whoever reads a run's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlmcourse.monitor.run_process import describe_process
from vlmcourse.monitor.step_log import EventRecord, StepLogWriter, StepRecord

BEGAN_S = 1_700_000_000.0
STEP_S = 0.5


class HandmadeRun:
    """Writes what a trainer writes, a step at a time."""

    def __init__(self, folder: Path, world_size: int = 2, num_steps: int = 100, **process: Any) -> None:
        """Begin a run in `folder`; `process` changes the mark of its first rank."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.world_size = folder, world_size
        start = {"hardware": {"world_size": world_size}, "process": {**describe_process(), **process}}
        (folder / "config.json").write_text(json.dumps({"train": {"num_steps": num_steps}}))
        (folder / "run.json").write_text(json.dumps(start))
        self.writers = [StepLogWriter(folder, rank) for rank in range(world_size)]

    def write_step(self, step: int, own_s: dict[int, float] | None = None, ranks: tuple[int, ...] = ()) -> None:
        """Write a step of all ranks, or of some; each ends with the others, after `own_s` of work of its own."""
        for rank in ranks or range(self.world_size):
            work_s = (own_s or {}).get(rank, 0.4)
            self.writers[rank].write(
                StepRecord(
                    step=step,
                    start_s=start_of(step),
                    step_s=STEP_S,
                    data_wait_s=0.25 * work_s,
                    forward_s=0.25 * work_s,
                    backward_s=0.5 * work_s,
                    communication_s=STEP_S - work_s,
                    world_size=self.world_size,
                    rss_bytes=10**8 * (rank + 1),
                )
            )

    def write_event(self, event: str, step: int, seconds: float, rank: int = 0) -> None:
        self.writers[rank].write(EventRecord(event=event, step=step, start_s=end_of(step), seconds=seconds))

    def write_row(self, step: int, **values: Any) -> None:
        row = {"step": step, "loss/total": 1 / step, "performance/tokens_per_second": 100.0 * step, **values}
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def finish(self) -> None:
        (self.folder / "result.json").write_text("{}")

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def start_of(step: int) -> float:
    """When a step begins, by the wall clock of a handmade run."""
    return BEGAN_S + STEP_S * (step - 1)


def end_of(step: int) -> float:
    return BEGAN_S + STEP_S * step
