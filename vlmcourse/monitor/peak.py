"""The most FLOP/s that a run's devices can do: what MFU and HFU divide by.

Enters: the ranks, their devices, a training precision. Leaves: a `Peak` with its source in words, of one rank or of
all, or None where nobody knows. For a GPU it is the datasheet's, by the name of the card; an unknown card has none. A
CPU's datasheet says little, since clock and cores in use vary: there it is measured when training begins, as the best
of many matrix products within `MEASURED_S`, so that a busy moment does not lower it. Ranks that share cores cannot do
more together than the cores: the run's peak counts no core twice.

What a CPU's MFU is worth: it says which part of the time of these cores went into the model's products, as far as
products that fit into the cache run here. It compares runs on one machine, whatever their strategy and number of ranks.
Two hyperthreads count as two cores, though they share one's multipliers, and a neighbour that is busy all the time
lowers the peak: do not compare machines by it. Chapter 6.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import torch

from vlmcourse.machine import num_usable_cores
from vlmcourse.parallel.comm import gather_numbers
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.hardware import find_peak_flop_per_s

DTYPES = {"fp32": "fp32", "bf16": "bf16", "bf16_master": "bf16", "bf16_pure": "bf16", "fp16": "fp16", "fp8": "fp8"}
"""Training precision -> the type of its matrix products. TF32 is off in all of them."""
MEASURED = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Types of which a CPU is measured; others it emulates."""
SIDE = 384
"""Of the matrices for one thread: they fit into a core's cache, and a product is over before the system is likely to
give the core to another process. More threads get as much work each, and more."""
MEASURED_S, MIN_PRODUCTS = 0.2, 3
FORMULAS = {
    "performance/mfu": "FLOPs of forward and backward of the real tokens / (seconds x peak FLOP/s of all ranks)",
    "performance/hfu": "FLOPs executed, with recomputation, padding and blank tiles / (seconds x peak FLOP/s of all "
    "ranks)",
    "seconds": "in steps since the last row, of the rank with the most, as for all rates of a row; callbacks, saves, "
    "evaluations and log rows between steps are left out, and in performance/wall_tokens_per_second only",
    "FLOPs": "2 for a multiplication and an addition of matrix products, attention's counted in full "
    "(vlmcourse.planner.flops; Chowdhery et al. 2022, arXiv:2204.02311, appendix B)",
}
"""What utilisation in a row is, by its name."""


@dataclass(frozen=True)
class Peak:
    """The most that one device does, or all devices of a run."""

    flop_per_s: float
    source: str
    """Datasheet, or what was measured."""


@dataclass(frozen=True)
class RankPeak:
    """What a rank on a CPU tells the others."""

    flop_per_s: float
    num_threads: float
    num_cores: float
    """That it may use."""
    local_rank: float
    core_set: float
    """A number of the set of cores that it may use; equal sets have equal ones."""


def find_run_peak(ranks: Ranks, precision: str) -> Peak | None:
    """Return the peak of all ranks together.

    Args:
        ranks: this process's place; all ranks call this.
        precision: one of `precision_rules.PRECISIONS`.

    Returns:
        The same on every rank; None where the peak of a rank's device is not known, see `find_peak`.
    Communicates: an all-gather of 40 bytes a rank.
    """
    mine = find_peak(ranks.device, precision)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    told = RankPeak(
        mine.flop_per_s if mine is not None else math.nan,
        torch.get_num_threads(),
        num_usable_cores(),
        ranks.local_rank,
        zlib.crc32(str(cores).encode()),
    )
    everyone = [RankPeak(*numbers) for numbers in gather_numbers(list(vars(told).values()), ranks)]
    if mine is None or any(math.isnan(of_rank.flop_per_s) for of_rank in everyone):
        return None
    if ranks.device.type == "cuda":
        return Peak(math.fsum(of_rank.flop_per_s for of_rank in everyone), f"{mine.source}; {len(everyone)} rank(s)")
    flop_per_s, num_busy = add_peaks(everyone)
    return Peak(flop_per_s, f"{mine.source}; {len(everyone)} rank(s) on {num_busy:.0f} core(s)")


def add_peaks(everyone: Sequence[RankPeak]) -> tuple[float, float]:
    """Return what ranks on CPUs do together, and how many cores are busy then.

    Ranks of one machine that share cores do what those do, each at the best that any of these ranks has measured.

    Args:
        everyone: rank by rank; a machine begins at local rank 0.
    """
    machine, keys = -1, list[tuple[int, float]]()
    for of_rank in everyone:
        machine += of_rank.local_rank == 0
        keys.append((machine, of_rank.core_set))
    flop_per_s = num_busy = 0.0
    order = sorted(zip(keys, everyone, strict=True), key=lambda pair: pair[0])
    for _, pairs in groupby(order, key=lambda pair: pair[0]):
        sharing = [of_rank for _, of_rank in pairs]
        busy = min(sum(of_rank.num_threads for of_rank in sharing), max(of_rank.num_cores for of_rank in sharing))
        flop_per_s += busy * max(r.flop_per_s / min(r.num_threads, r.num_cores) for r in sharing)
        num_busy += busy
    return flop_per_s, num_busy


def describe_peak(peak: Peak | None) -> dict[str, str | float | None]:
    """Return a run's peak as `run.json` and the loggers have it."""
    why_not = "not known for this device and precision, so rows have no MFU and no HFU"
    return {
        "peak_flop_per_s": peak.flop_per_s if peak is not None else None,
        "peak_source": peak.source if peak is not None else why_not,
    }


def find_peak(device: torch.device, precision: str) -> Peak | None:
    """Return the peak of one rank's device.

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
    side = SIDE * max(1, round(math.sqrt(num_threads)))
    a, b, c = (torch.ones(side, side, dtype=MEASURED[dtype]) for _ in range(3))
    seconds, began_s = [], time.perf_counter()
    while len(seconds) < MIN_PRODUCTS or time.perf_counter() - began_s < MEASURED_S:
        started_s = time.perf_counter()
        torch.mm(a, b, out=c)
        seconds.append(time.perf_counter() - started_s)
    return Peak(
        2 * side**3 / min(seconds),
        f"measured: best of {len(seconds)} products of {side} x {side} in {dtype} on {num_threads} CPU thread(s)",
    )
