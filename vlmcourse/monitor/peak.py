"""The most FLOP/s that a rank's device can do: what MFU and HFU divide by.

Enters: a device and a training precision. Leaves: a `Peak` with its source in words, or None where nobody knows. For a
GPU it is the datasheet's, by the name of the card; an unknown card has none. A CPU's datasheet says little, since clock
and cores in use vary: there it is measured, as the best of a few matrix products with the threads that this rank has,
and says so. Beside busy neighbours the measured peak is lower and utilisation looks better: compare CPU runs only with
runs on the same idle machine. Chapter 6.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import torch

from vlmcourse.planner.hardware import find_peak_flop_per_s

DTYPES = {"fp32": "fp32", "bf16": "bf16", "bf16_master": "bf16", "bf16_pure": "bf16", "fp16": "fp16", "fp8": "fp8"}
"""Training precision -> the type of its matrix products. TF32 is off in all of them."""
MEASURED = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Types of which a CPU is measured; others it emulates."""
SIDE, REPEATS = 512, 6


@dataclass(frozen=True)
class Peak:
    """The most that one device does."""

    flop_per_s: float
    source: str
    """Datasheet, or what was measured."""


def find_peak(device: torch.device, precision: str) -> Peak | None:
    """Return the peak of a rank's device.

    Args:
        device: of the rank.
        precision: one of `precision_rules.PRECISIONS`.

    Returns:
        None for a GPU that is not known, or a type that the device has no hardware path for or only emulates.
    """
    dtype = DTYPES[precision]
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        flop_per_s = find_peak_flop_per_s(name, dtype)
        return None if flop_per_s is None else Peak(flop_per_s, f"datasheet: {name}, {dtype}, dense")
    if device.type != "cpu" or dtype not in MEASURED:
        return None
    return _measure_cpu(dtype, torch.get_num_threads())


@cache
def _measure_cpu(dtype: str, num_threads: int) -> Peak:
    """Time products of two square matrices, once a process and type."""
    a, b = (torch.ones(SIDE, SIDE, dtype=MEASURED[dtype]) for _ in range(2))
    seconds = []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - started_s)
    best = 2 * SIDE**3 / min(seconds)
    return Peak(
        best, f"measured: best of {REPEATS} products of {SIDE} x {SIDE} in {dtype} on {num_threads} CPU threads"
    )
