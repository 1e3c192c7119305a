"""A published figure as the planner takes it, and how cells of a table are read: numbers, devices.

Enters: text of cells. Leaves: a `FigureRow`, numbers, or a `Skip` with the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from vlmcourse.planner.decoder_run import DecoderRun
from vlmcourse.planner.hardware import DEVICES, DeviceSpec


class Skip(ValueError):
    """Why a row cannot be described."""


@dataclass(frozen=True, kw_only=True)
class FigureRow:
    """One row: what was run and what was measured, or why nothing can be said."""

    group: str
    reason: str = ""
    """Why the row is not used; empty where it is."""
    choice: Hashable = None
    """Rows with the same are plans among which somebody could have chosen: a model on a number of GPUs."""
    run: DecoderRun | None = None
    device: DeviceSpec | None = None
    memory_bytes: float | None = None
    """Peak of the rank that was looked at."""
    stage: int | None = None
    """On which pipeline stage that rank stands; None is the fullest."""
    tokens_per_s: float | None = None
    """Of one GPU."""


def number_of(row: Mapping[str, str], column: str) -> float | None:
    """Return a cell's number, or None where the cell is empty.

    Raises:
        Skip: if the cell has other text, or no finite number above 0.
    """
    text = row[column]
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise Skip(f"{column} = {text!r}: is not one number") from None
    if not math.isfinite(value) or value <= 0:
        raise Skip(f"{column} = {text!r}: must be above 0")
    return value


def count_of(row: Mapping[str, str], column: str, least: int = 1, default: int | None = None) -> int:
    """Return a cell's whole number.

    Args:
        row: cells by column.
        column: to read.
        least: smallest number that makes sense.
        default: where the cell is empty.

    Raises:
        Skip: if the cell is empty without a default, or has no whole number of `least` or more.
    """
    text = row[column]
    if not text:
        if default is None:
            raise Skip(f"{column} is not stated")
        return default
    if not re.fullmatch(r"[0-9]{1,12}(\.0+)?", text) or float(text) < least:
        raise Skip(f"{column} = {text!r}: is not a whole number of {least} or more (and of 12 digits at most)")
    return int(float(text))


DEVICE_PATTERNS = (
    # The 96 GB variant computes as the other; its slower memory matters little to a roofline of products.
    (r"h100", "h100"),
    (r"h200", "h200"),
    (r"a100.*40", "a100-40"),
    (r"a100", "a100-80"),
    (r"v100", "v100-32"),
)
"""How tables write a device -> one in `DEVICES`."""


def device_of(text: str) -> DeviceSpec:
    """Return the device that a cell names.

    Raises:
        Skip: if there is none such in `DEVICES`.
    """
    for pattern, name in DEVICE_PATTERNS:
        if re.search(pattern, text.lower()):
            return DEVICES[name]
    raise Skip(f"gpu = {text!r}: there is no datasheet of it in planner/hardware.py")
