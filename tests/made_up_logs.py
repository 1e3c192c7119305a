"""Step logs of runs that never were, with times that are known: for what says why a run is slow."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlmcourse.monitor.diagnosis import Diagnosis, Finding
from vlmcourse.monitor.step_log import EventRecord, StepLogWriter, StepRecord

GIB = 2**30
USUAL: dict[str, Any] = {
    "data_wait_s": 0.002,
    "forward_s": 0.03,
    "backward_s": 0.06,
    "communication_s": 0.004,
    "optimizer_s": 0.004,
}


def write_log(
    folder: Path,
    change: Callable[[int, int], Mapping[str, Any]] = lambda rank, step: {},
    *,
    world_size: int = 2,
    num_steps: int = 23,
    config: Mapping[str, Any] | None = None,
    hardware: Mapping[str, Any] | None = None,
    rows: list[dict[str, Any]] | None = None,
    between: Callable[[int, int], tuple[str, float] | None] = lambda rank, step: None,
) -> Path:
    """Write a made-up run: each step is `USUAL` with what `change(rank, step)` says; the ranks wait for the longest."""
    starts_s = 0.0
    writers = [StepLogWriter(folder, rank) for rank in range(world_size)]
    for step in range(1, num_steps + 1):
        parts = [USUAL | {"other_s": 0.0} | dict(change(rank, step)) for rank in range(world_size)]
        events = [between(rank, step) for rank in range(world_size)]
        own_s = [
            sum(v for name, v in p.items() if name.endswith("_s") and name not in ("data_cpu_s", "waits_s"))
            for p in parts
        ]
        for rank, writer in enumerate(writers):
            fields: dict[str, Any] = {
                "samples": 8,
                "tiles": 8,
                "text_tokens": 400,
                "image_tokens": 32,
                "padding_tokens": 16,
            }
            fields |= {"micro_batches": 1, "world_size": world_size} | parts[rank]
            fields["communication_s"] += max(own_s) - own_s[rank]
            writer.write(StepRecord(step=step, start_s=starts_s, step_s=max(own_s), **fields))
            if (event := events[rank]) is not None and event[0] != "nothing":
                writer.write(EventRecord(event=event[0], step=step, start_s=starts_s + max(own_s), seconds=event[1]))
        starts_s += max(own_s) + max(event[1] if event else 0.0 for event in events)
    for writer in writers:
        writer.close()
    (folder / "config.json").write_text(json.dumps({"parallel": {"strategy": "ddp"}} | dict(config or {})))
    known = {"device": "cpu", "threads": 1, "memory_bytes": 16 * GIB} | dict(hardware or {})
    (folder / "run.json").write_text(json.dumps({"hardware": known}))
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or []))
    return folder


def only(found: Diagnosis) -> Finding:
    assert len(found.findings) == 1, [(finding.cause, finding.share) for finding in found.findings]
    return found.findings[0]
