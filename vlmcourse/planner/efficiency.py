"""How much of a datasheet's peak a device reaches: matrix products by their sizes, all else by memory traffic.

Enters: a `DeviceSpec`, sizes. Leaves: seconds. Few constants, `Speeds`, each with a meaning, fitted on published runs
of MPT models on one node of 8 A100 or H100 (MosaicML's llm-foundry, 2023), with a fused attention of that year; how,
and what error they leave on rows held back, is in `bench/planner_efficiency.md`. Chapter 7.

A product of [rows, inner] with [inner, columns] runs in tiles of the result, as many at once as the device has units
(a GPU's streaming multiprocessors): the last wave may leave units idle. Each tile first loads its operands, so short
inner sizes reach less: half of it at `half_inner`. A product whose operands and result take longer to move than to
multiply takes that long.

Source: Williams et al. 2009, "Roofline: an insightful visual performance model"; NVIDIA, "Matrix Multiplication
    Background User's Guide", sections on tile and wave quantization.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from vlmcourse.planner.hardware import DeviceSpec

TILE = 128
"""Rows and columns of the result that one unit of a GPU computes at a time."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What fraction of a datasheet is reached."""

    product_fraction: float
    """Of the peak, by products that are large in every size."""
    attention_fraction: float
    """Of the peak, by fused attention, forward and backward, of those FLOPs that the mask leaves."""
    half_inner: float = 148.0
    """Inner size at which products reach half of what large ones do."""
    memory_fraction: float = 0.55
    """Of the memory's bandwidth, by everything else; how many kernels move the same bytes again is in here too."""
    launch_s: float = 6e-6
    """Between the starts of two operations that Python gives a device; assumed, no row that was fitted is so small."""
    lost_fraction: float = 0.47
    """Of the time in which a device sends beside computing, what computing loses: both use its units and its memory."""
    tile: int = TILE
    launches_add: bool = False
    """Whether launching takes turns with computing, as on a CPU, rather than running ahead of it."""


AMPERE = Speeds(product_fraction=0.77, attention_fraction=0.31)
HOPPER = Speeds(product_fraction=0.60, attention_fraction=0.185)
OTHERS = Speeds(product_fraction=0.70, attention_fraction=0.25)
"""A guess between the two: no public rows of these devices were fitted."""
SPEEDS: dict[str, Speeds] = {
    **dict.fromkeys(("a100-40", "a100-80", "a800-80"), AMPERE),
    **dict.fromkeys(("h100", "h100-96", "h100-pcie", "h200"), HOPPER),
}
"""By device: A100 40 and 80 GB and H100 SXM were fitted, the others of their generations are taken to reach as much."""


def speeds_of(device: DeviceSpec) -> Speeds:
    """Return what a device reaches of its datasheet."""
    return SPEEDS.get(device.name, OTHERS)


@lru_cache(maxsize=65536)
def product_s(
    device: DeviceSpec, speeds: Speeds, dtype: str, rows: float, inner: float, columns: float, element_bytes: int
) -> float:
    """Estimate the seconds of one product of [rows, inner] with [inner, columns].

    Args:
        device: what computes.
        speeds: what it reaches.
        dtype: of the operands; see `DeviceSpec.peak_flop_per_s`.
        rows: of the left operand and the result; 0 or less of any size takes no time.
        inner: columns of the left operand, rows of the right one.
        columns: of the right operand and the result.
        element_bytes: of operands and result.

    Raises:
        ValueError: if the device has no hardware path for the dtype.
    """
    if rows <= 0 or inner <= 0 or columns <= 0:
        return 0.0
    tiles = -(-rows // speeds.tile) * -(-columns // speeds.tile)
    waves = -(-tiles // device.num_units)
    padded_flops = 2.0 * waves * device.num_units * speeds.tile**2 * inner
    fraction = speeds.product_fraction * inner / (inner + speeds.half_inner)
    multiply_s = padded_flops / (device.peak_flop_per_s(dtype) * fraction)
    moved_bytes = element_bytes * (rows * inner + inner * columns + rows * columns)
    return max(multiply_s, move_s(device, speeds, moved_bytes))


def attention_s(device: DeviceSpec, speeds: Speeds, dtype: str, flops: float) -> float:
    """Estimate the seconds of fused attention; FLOPs are those that are executed, without what a mask hides."""
    return flops / (device.peak_flop_per_s(dtype) * speeds.attention_fraction)


def move_s(device: DeviceSpec, speeds: Speeds, num_bytes: float) -> float:
    """Estimate the seconds of an operation that only reads and writes memory."""
    return num_bytes / (device.memory_bytes_per_s * speeds.memory_fraction)


def measured_speeds(launch_s: float = 0.0) -> Speeds:
    """Return the speeds that go with a device whose numbers were measured: `hardware.calibrated_device`."""
    return Speeds(
        product_fraction=1.0, half_inner=0.0, attention_fraction=1.0, memory_fraction=1.0, launch_s=launch_s, tile=1
    )
