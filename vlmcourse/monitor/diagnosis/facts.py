"""A run's files as the numbers that a diagnosis is made of.

Enters: the folder of a finished or live run. Leaves: `RunFacts`: the steps that all ranks have, without warm-up; for
each the time up to the next step (its *cycle*), so that work between steps counts; settings, hardware, rows. Chapter 6.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.layout import find_layout
from vlmcourse.monitor.diagnosis.completeness import check_folder, describe_gaps
from vlmcourse.monitor.diagnosis.cycles import find_cycles, latest_steps, without_profiler
from vlmcourse.monitor.diagnosis.profile_files import Profiled, find_disturbed, read_profile
from vlmcourse.monitor.diagnosis.thresholds import MIN_STEPS, WARMUP_STEPS
from vlmcourse.monitor.profile_summary import TraceSummary
from vlmcourse.monitor.step_log import EventRecord, StepRecord, common_steps, read_step_log
from vlmcourse.planner.flops import TOWERS, StepFlops, Work, count_step_flops
from vlmcourse.presets import VLMShape, get_model

COMPUTE = ("forward_s", "backward_s", "optimizer_s", "other_s")
"""Parts of a step that are a rank's own computing."""


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run."""

    folder: Path
    config: TrainConfig | None
    shape: VLMShape | None
    hardware: Mapping[str, Any]
    rows: list[dict[str, Any]]
    steps: dict[int, dict[int, StepRecord]]
    """By step, then by rank."""
    following: dict[int, dict[int, StepRecord]]
    """By one of these steps: the step after it, which may be none of them."""
    cycles_s: dict[int, dict[int, float]]
    """Of the same steps: seconds up to the rank's next step."""
    events: dict[int, list[EventRecord]]
    """By rank, those of the same steps."""
    notes: list[str]
    profiled: Profiled | None = None
    """What a profiler recorded; its steps are none of `steps` where enough others are there."""

    @property
    def profile(self) -> TraceSummary | None:
        """What the traces of a profiled run say."""
        return self.profiled.summary if self.profiled is not None else None

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order."""
        return list(next(iter(self.steps.values())))

    @cached_property
    def wall_s(self) -> float:
        """Time of all cycles together."""
        return sum(mean(of_rank.values()) for of_rank in self.cycles_s.values())

    @cached_property
    def cycle_s(self) -> float:
        """The median cycle."""
        return median(mean(of_rank.values()) for of_rank in self.cycles_s.values())

    @cached_property
    def noise(self) -> float:
        """What the ranks' computing differs by from step to step: half its 10th to 90th percentile, over the median.

        Steps of other work differ too, so it is an upper bound for equal ones.
        """
        own_s = [mean(compute_s(record) for record in ranks.values()) for ranks in self.steps.values()]
        tenths = quantiles(own_s, n=10, method="inclusive")
        return min(1.0, (tenths[-1] - tenths[0]) / 2 / median(own_s)) if median(own_s) > 0 else 0.0

    @property
    def device(self) -> str:
        """Kind of device: cpu or cuda."""
        return str(self.hardware.get("device", "cpu"))

    @cached_property
    def tells_communication(self) -> bool:
        """Whether every rank's waits for others can be told from its work."""
        return all(r.communication_s is not None for ranks in self.steps.values() for r in ranks.values())

    @cached_property
    def tokens_per_s(self) -> float:
        """Text and image tokens over all the time, samples that ranks share counted once.

        A row's `performance/wall_tokens_per_second` is the same of the steps since the last row; it has warm-up, pauses
        and profiled steps in it. `performance/tokens_per_second` leaves out what comes between steps.
        """
        tokens = sum((r.text_tokens or 0) + (r.image_tokens or 0) for _, r in self.records())
        return tokens / self.num_sharing / self.wall_s

    @property
    def num_sharing(self) -> int:
        """Ranks that are given the same samples."""
        if self.config is None or self.config.parallel.strategy == "auto":
            return 1
        parallel = self.config.parallel
        return find_layout(parallel, len(self.ranks)).world_size // find_layout(parallel, len(self.ranks)).dp_degree

    def records(self, rank: int | None = None) -> list[tuple[int, StepRecord]]:
        """Return all records as (rank, record), or those of one rank."""
        return [(r, rec) for ranks in self.steps.values() for r, rec in ranks.items() if rank is None or r == rank]

    def sums(self, value: Callable[[StepRecord], float | None]) -> dict[int, float]:
        """Return a value of the steps, added up by rank; absent values are 0."""
        return {rank: sum(value(record) or 0.0 for _, record in self.records(rank)) for rank in self.ranks}

    def event_seconds(self, kind: str) -> dict[int, float]:
        """Return seconds of one kind of event, by rank, without what it waited in them for ranks that were late."""
        return {rank: sum(self.event_s(rank, step, kind) for step in self.steps) for rank in self.ranks}

    def event_s(self, rank: int, step: int, kind: str = "") -> float:
        """Return the same of one rank after one step; of all kinds where none is named."""
        events = [event for event in self.events_after(rank, step) if kind in ("", event.event)]
        return sum(event.seconds - self.late_wait_s(event) for event in events)

    def event_waits(self) -> dict[int, float]:
        """Return the seconds that each rank waited in events for ranks that came late to them."""
        return {rank: sum(self.late_wait_s(event) for event in self.events[rank]) for rank in self.ranks}

    def late_wait_s(self, event: EventRecord) -> float:
        """Return what a rank waited in an event beyond what the rank that waited least did."""
        return max(0.0, (event.communication_s or 0.0) - self._least_waits_s.get((event.event, event.step), 0.0))

    @cached_property
    def _least_waits_s(self) -> dict[tuple[str, int], float]:
        """By event and step: what even the rank that waited least waited; 0 where a rank had no such event."""
        waits: dict[tuple[str, int], list[float]] = {}
        for rank in self.ranks:
            for event in self.events[rank]:
                waits.setdefault((event.event, event.step), []).append(event.communication_s or 0.0)
        return {which: min(found) if len(found) == len(self.ranks) else 0.0 for which, found in waits.items()}

    def gap_seconds(self) -> dict[int, float]:
        """Return the time between steps that no event explains, by rank."""
        cycles = {rank: sum(of_rank[rank] for of_rank in self.cycles_s.values()) for rank in self.ranks}
        steps = self.sums(lambda record: record.step_s)
        events = {rank: sum(event.seconds for event in self.events[rank]) for rank in self.ranks}
        return {rank: max(0.0, cycles[rank] - steps[rank] - events[rank]) for rank in self.ranks}

    def gap_s(self, rank: int, step: int) -> float:
        """Return the time between a rank's step and its next one that no event explains."""
        events_s = sum(event.seconds for event in self.events_after(rank, step))
        return max(0.0, self.cycles_s[step][rank] - self.steps[step][rank].step_s - events_s)

    def events_after(self, rank: int, step: int) -> list[EventRecord]:
        """Return a rank's events between a step and the next."""
        return self._events_by_step.get((rank, step), [])

    @cached_property
    def _events_by_step(self) -> dict[tuple[int, int], list[EventRecord]]:
        found: dict[tuple[int, int], list[EventRecord]] = {}
        for rank, events in self.events.items():
            for event in events:
                found.setdefault((rank, event.step), []).append(event)
        return found

    def count_flops(self, record: StepRecord) -> StepFlops | None:
        """Count what a rank executed in a step, padding included; None where model or work is not known."""
        if self.shape is None or self.config is None or not record.samples:
            return None
        positions = (record.text_tokens or 0) + (record.image_tokens or 0) + (record.padding_tokens or 0)
        work = Work(record.tiles or 0, positions, positions**2 / record.samples)
        trained = [tower for tower in TOWERS if tower not in self.config.model.freeze]
        activations = self.config.activations
        recompute = {"vision": activations.vision, "language": activations.language}
        return count_step_flops(self.shape, work, trained, recompute)


def compute_s(record: StepRecord) -> float:
    """Return the seconds in which a rank computed in a step."""
    return sum(getattr(record, part) or 0.0 for part in COMPUTE)


def read_run(folder: str | Path, last_steps: int | None = None) -> RunFacts:
    """Read the files of a run.

    Args:
        folder: `output_dir/name`.
        last_steps: how many steps to keep, the last ones; all if left out.

    Raises:
        FileNotFoundError: if it is no run's folder.
        ValueError: if there are too few steps, or a file holds something else than it should.
    """
    if last_steps is not None and last_steps < MIN_STEPS:
        raise ValueError(f"last_steps = {last_steps}: must be {MIN_STEPS} or greater, or left out")
    folder, notes = Path(folder), list[str]()
    check_folder(folder)
    logs = read_step_log(folder)
    written = common_steps(logs)
    gaps = describe_gaps(folder, logs)
    events = {rank: log.events for rank, log in logs.items()}
    alike = latest_steps(written, events, notes)
    steps = dict(list(alike.items())[WARMUP_STEPS:])
    left_out = list(notes)
    cycles_s = find_cycles(steps, events, notes)
    if len(cycles_s) < MIN_STEPS:
        raise ValueError(
            f"{folder}: {len(written)} steps that all ranks have written: a diagnosis needs {WARMUP_STEPS} of warm-up, "
            f"{MIN_STEPS} to look at and one that ends them; "
            + "; ".join((*left_out, *(gaps or ["wait, or make a run with train.num_steps = 20"])))
        )
    notes += gaps
    config, shape = _read_config(folder, notes)
    profiled = read_profile(folder, alike, logs, notes)
    cycles_s = without_profiler(
        cycles_s, find_disturbed(profiled, config.profile if config is not None else None, min(alike)), notes
    )
    cycles_s = dict(list(cycles_s.items())[-last_steps:]) if last_steps is not None else cycles_s
    if any(seconds <= 0 for of_rank in cycles_s.values() for seconds in of_rank.values()):
        raise ValueError(
            f"{folder}: a step begins no later than the one before it, so the clock of its machine stood still or went "
            "back; look at later steps with last_steps (--last), or make the run again"
        )
    kept = {step: steps[step] for step in cycles_s}
    ranks = next(iter(kept.values()))
    return RunFacts(
        folder=folder,
        config=config,
        shape=shape,
        hardware=_read_hardware(folder, notes),
        rows=[row for row in _read_rows(folder / "log.jsonl", notes) if row["step"] >= min(alike)],
        steps=kept,
        following={step: steps[step + 1] for step in kept},
        cycles_s=cycles_s,
        events={rank: [event for event in events[rank] if event.step in kept] for rank in ranks},
        notes=notes,
        profiled=profiled,
    )


def _read_config(folder: Path, notes: list[str]) -> tuple[TrainConfig | None, VLMShape | None]:
    table = _read_json(folder / "config.json")
    try:
        config = parse_config(table) if table else None
    except ValueError as error:
        notes.append(f"config.json cannot be used, so nothing is said of settings: {error}")
        return None, None
    if config is None:
        notes.append("there is no config.json, so nothing is said of settings")
    is_preset = config is not None and not config.model.hf_folder
    return config, get_model(config.model.preset) if is_preset and config is not None else None


def _read_json(path: Path) -> dict[str, Any]:
    """Return what a file holds; nothing where there is none, one that is being written, or no table in it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_hardware(folder: Path, notes: list[str]) -> dict[str, Any]:
    found = _read_json(folder / "run.json").get("hardware")
    if not isinstance(found, dict):
        notes.append("run.json says nothing of the hardware (an older version's run): the device is taken to be a CPU")
        return {}
    return found


def _read_rows(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the rows of a log that are whole and have a step; others are counted in a note."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]
    rows = [row for line in lines if (row := _parse_row(line)) is not None]
    if len(rows) < len(lines):
        notes.append(f"{len(lines) - len(rows)} of {len(lines)} lines of {path.name} are no rows, and left out")
    return rows


def _parse_row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), (int, float)) else None
