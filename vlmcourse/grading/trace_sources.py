"""What the recorded runs say of a step, in units of one step's computing: the matter that exercise 4.5's traces are of.

Enters: names of recorded runs. Leaves: their steps without warm-up, as seconds by phase over the run's usual forward
and backward, and how a fault's seconds vary from step to step, on the mean 1. The recordings' ranks shared 2 cores,
which a GPU does not; so a phase is drawn towards its median.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import fmean, median

from vlmcourse.monitor.recorded import recorded_run
from vlmcourse.monitor.step_log import RankLog, StepRecord, read_step_log

OWN_PHASES = ("data_wait_s", "forward_s", "backward_s", "optimizer_s", "other_s")
"""What a rank does itself; all else of a step is a wait for other ranks."""
WARMUP_STEPS = 2
KEPT_NOISE = 0.3
"""Part of the difference from the median that is kept."""
HEALTHY = ("healthy", "healthy, accumulation", "healthy, large micro-batch")
SPIKE_FACTOR = 4.0
"""A wait for data of so many times the median is one for an empty queue."""

Piece = tuple[dict[str, float], ...]
"""One recorded step: each rank's own phases, in units of computing, with `tokens` and `tiles` relative to the usual."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One recorded run."""

    pieces: tuple[Piece, ...]
    exposed: tuple[float, ...]
    """By step, the wait for other ranks of the rank that waited least, in units of computing."""


@cache
def read_source(name: str) -> Source:
    """Read a recorded run.

    Args:
        name: of the fault, as `recorded_causes()` has it.
    """
    logs = _read(name)
    unit_s = _unit_s(logs)
    usual = {
        (rank, key): median(_value(record, key) for record in log.steps)
        for rank, log in logs.items()
        for key in OWN_PHASES
    }
    pieces = tuple(
        tuple(
            {
                key: (m + KEPT_NOISE * (_value(record, key) - m)) / unit_s
                for key in OWN_PHASES
                for m in [usual[rank, key]]
            }
            | {
                "tokens": _tokens(record) / _tokens(logs[0].steps[0]),
                "tiles": _tiles(record) / _tiles(logs[0].steps[0]),
            }
            for rank, record in enumerate(ranks)
        )
        for ranks in _steps(logs)
    )
    exposed = [min(_value(record, "communication_s") for record in ranks) / unit_s for ranks in _steps(logs)]
    return Source(pieces=pieces, exposed=tuple(exposed))


def _read(name: str) -> dict[int, RankLog]:
    logs = read_step_log(recorded_run(name))
    return {rank: RankLog(steps=log.steps[WARMUP_STEPS:], events=log.events) for rank, log in logs.items()}


def _steps(logs: dict[int, RankLog]) -> list[tuple[StepRecord, ...]]:
    return list(zip(*(log.steps for log in logs.values()), strict=False))


def _unit_s(logs: dict[int, RankLog]) -> float:
    return median(_value(record, "forward_s") + _value(record, "backward_s") for record in logs[0].steps)


def _value(record: StepRecord, key: str) -> float:
    return getattr(record, key) or 0.0


def _tokens(record: StepRecord) -> int:
    return (record.text_tokens or 0) + (record.image_tokens or 0)


def _tiles(record: StepRecord) -> int:
    return record.tiles or 1


# --- How a fault's seconds vary -------------------------------------------------------------------------------------


@cache
def shape_of_phase(name: str, key: str, rank: int) -> tuple[float, ...]:
    """Return one phase of one rank of a recorded run by step, on the mean 1."""
    return _on_mean([_value(record, key) for record in _read(name)[rank].steps])


@cache
def shape_of_spikes(name: str) -> tuple[float, ...]:
    """Return the waits for data that stand out of a recorded run, on the mean 1."""
    waits = [_value(record, "data_wait_s") for log in _read(name).values() for record in log.steps]
    least = SPIKE_FACTOR * median(waits)
    return _on_mean([wait for wait in waits if wait > least])


@cache
def shape_of_events(name: str, kind: str) -> tuple[float, ...]:
    """Return the seconds of rank 0's events of one kind, but for the first and those at the end, on the mean 1."""
    log = _read(name)[0]
    return _on_mean(
        [event.seconds for event in log.events if event.event == kind and event.step < log.steps[-1].step][1:]
    )


@cache
def split_of_images() -> tuple[float, float, float]:
    """Return what the rank with large images has more: the forward part of its seconds, and tokens and tiles a unit.

    Returns:
        The part of the extra seconds that is in forward; extra tokens and extra tiles, each relative to the usual and
        for one unit of extra computing.
    """
    pieces = read_source("large images").pieces
    more = {
        key: fmean(large[key] - usual[key] for usual, large in pieces)
        for key in ("forward_s", "backward_s", "tokens", "tiles")
    }
    units = more["forward_s"] + more["backward_s"]
    return more["forward_s"] / units, more["tokens"] / units, more["tiles"] / units


def _on_mean(values: list[float]) -> tuple[float, ...]:
    mean = fmean(values)
    return tuple(value / mean for value in values)
