"""Step logs of real short runs, one a fault, that come with the package: something to look at without making a run.

Enters: the name of a fault of `faults.catalog`. Leaves: a run's folder that `read_step_log` and `diagnosis.diagnose`
read like any other. They were made on two CPU ranks by `bench/diagnosis_runs.py`, which also shortens them: numbers
have four digits, and only settings that differ from the defaults are kept. Exercise 4.5.
"""

from __future__ import annotations

import json
from pathlib import Path

from vlmcourse.values import suggest_choice

FOLDER = Path(__file__).parent / "recorded_runs"
INDEX_NAME = "causes.json"
"""In that folder: name of the fault -> its cause and its run's folder."""


def recorded_causes() -> dict[str, str]:
    """Return what is recorded: name of the fault -> the cause to find, or "healthy"."""
    return {name: entry["cause"] for name, entry in _read_index().items()}


def recorded_run(name: str) -> Path:
    """Return the folder of a recorded run.

    Args:
        name: one of `recorded_causes()`.

    Raises:
        ValueError: if there is no such run.
    """
    index = _read_index()
    if name not in index:
        raise ValueError(f"recorded run {name!r}: {suggest_choice(name, tuple(index))}")
    return FOLDER / index[name]["folder"]


def _read_index() -> dict[str, dict[str, str]]:
    return json.loads((FOLDER / INDEX_NAME).read_text(encoding="utf-8"))
