"""What a logger of a run is: it starts with what the run is, takes rows, and is closed.

Enters: nothing. Leaves: the types that the other modules of this package share. Only rank 0 of a run logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]
"""Metric name -> number, or None where the step has no such value; `step` is always there."""


class LoggerError(RuntimeError):
    """A logger cannot go on; the message says why and what to change."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a logger is told when it starts."""

    name: str
    """The run's."""
    folder: Path
    """The run's, where files of a logger go."""
    config: Mapping[str, Any]
    """The whole configuration, by section."""
    hardware: Mapping[str, Any]
    """What the run's numbers were measured on, see `monitor.hardware.describe_hardware`."""
    keep_until_step: int | None = None
    """The step that the run goes on from: rows up to it stay, and none is logged twice. None for a new run."""


class RowLogger(Protocol):
    """What takes the rows of a run. Any method may raise: `RunLoggers` keeps that away from training."""

    name: str
    retries: bool
    """Whether a row may be written after one that could not be; otherwise the first failure ends the logger."""

    def start(self, info: RunInfo) -> None:
        """Record what the run is, and be ready for rows."""
        ...

    def log(self, row: Row) -> None:
        """Take one row."""
        ...

    def close(self) -> None:
        """Finish; no row may follow. Safe to call where `start` failed or was not called."""
        ...
