"""Measure how fast the ranks at hand exchange data, and describe it by two numbers: latency and bandwidth.

Enters: the live process group, or one of its subgroups, and some sizes. Leaves: a `LinkFit` for each collective: what
was measured, a `planner.network.Link`, and how far the two are apart. A backend that changes its algorithm with the
size, or a busy machine, is no straight line: `residual_fraction` says so. Chapter 1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.network import Link, ring_messages, ring_sent_bytes
from vlmcourse.values import suggest_choice

MEASURED_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
KIB = 2**10
DEFAULT_SIZES = tuple(4**n * KIB for n in range(8))
"""1 KiB to 16 MiB."""
NUM_WARMUPS = 3
"""The first calls set up connections and buffers."""
NUM_REPEATS = 9
ELEMENT_BYTES = 4
"""fp32, which every backend reduces."""
GOOD_FIT_FRACTION = 0.25
"""A fit whose typical error is above this is called poor: predictions from it are guesses."""


@dataclass(frozen=True, kw_only=True)
class LinkSample:
    """One collective of one size, measured."""

    payload_bytes: int
    """The whole tensor, counted once; see `planner.network.ring_sent_bytes`."""
    seconds: float
    """Median over the repeats of the slowest rank's time."""


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """One kind of collective on one group: measured times, and the line through them."""

    kind: str
    num_ranks: int
    samples: tuple[LinkSample, ...]
    link: Link
    residual_fraction: float
    """Root mean square of (predicted - measured) / measured over the samples."""

    @property
    def is_good(self) -> bool:
        """Whether the line describes the samples."""
        return self.residual_fraction <= GOOD_FIT_FRACTION

    def predict_s(self, payload_bytes: float) -> float:
        """Predict the seconds of one collective of this kind on this group."""
        return self.link.estimate_s(self.kind, payload_bytes, self.num_ranks)

    def __str__(self) -> str:
        """Show the fit in one line, in microseconds a message and GB/s."""
        verdict = "" if self.is_good else ": a poor fit, do not predict from it"
        return (
            f"{self.kind} over {self.num_ranks} ranks: {1e6 * self.link.latency_s:.0f} us a message, "
            f"{self.link.bytes_per_s / 1e9:.3g} GB/s, off by {100 * self.residual_fraction:.0f} %{verdict}"
        )


def measure_links(
    ranks: Ranks,
    kinds: Sequence[str] = MEASURED_KINDS,
    sizes: Sequence[int] = DEFAULT_SIZES,
    *,
    num_repeats: int = NUM_REPEATS,
    group: dist.ProcessGroup | None = None,
) -> dict[str, LinkFit]:
    """Time collectives over a range of sizes and fit a line through the times of each kind.

    Args:
        ranks: this process's place.
        kinds: which collectives, of `MEASURED_KINDS`.
        sizes: payloads in bytes, at least two different ones; each is rounded up to what divides among the ranks.
        num_repeats: timed calls of each size, after `NUM_WARMUPS` others.
        group: who takes part; every rank of it must call this. By default all ranks.

    Returns:
        By kind; equal on all ranks of the group.

    Raises:
        ValueError: on every rank alike, if there is one rank only, or an argument cannot be used.
    Communicates: (`NUM_WARMUPS` + `num_repeats`) collectives and barriers of each kind and size, and one all-reduce of
        8 bytes a repeat.
    """
    num_ranks = dist.get_world_size(group) if ranks.world_size > 1 else 1
    _check_request(num_ranks, kinds, sizes, num_repeats)
    fits = {}
    for kind in kinds:
        samples = []
        for size in sorted(set(sizes)):
            payload_bytes = -(-size // (num_ranks * ELEMENT_BYTES)) * num_ranks * ELEMENT_BYTES
            collective = build_collective(kind, payload_bytes, ranks.device, group)
            times_s = _time_repeats(collective, num_repeats, ranks.device, group)
            samples.append(LinkSample(payload_bytes=payload_bytes, seconds=statistics.median(times_s)))
        fits[kind] = fit_link(kind, num_ranks, samples)
    return fits


def _check_request(num_ranks: int, kinds: Sequence[str], sizes: Sequence[int], num_repeats: int) -> None:
    if num_ranks < 2:
        raise ValueError("measure_links on 1 rank: nothing is sent; start at least 2, as with %%torchrun -n 2")
    for kind in kinds:
        if kind not in MEASURED_KINDS:
            raise ValueError(f"measure_links: there is no kind {kind!r}: {suggest_choice(kind, MEASURED_KINDS)}")
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise ValueError(f"measure_links: sizes = {list(sizes)}: a line needs two different sizes of 1 byte or more")
    if num_repeats < 1:
        raise ValueError(f"measure_links: num_repeats = {num_repeats}: must be 1 or greater")


def build_collective(
    kind: str, payload_bytes: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> Callable[[], object]:
    """Return a function that runs one collective on buffers of its own.

    Args:
        kind: one of `MEASURED_KINDS`.
        payload_bytes: a multiple of 4 x the group's ranks.
        device: of the buffers.
        group: who takes part; by default all ranks.
    """
    whole = torch.ones(payload_bytes // ELEMENT_BYTES, device=device)
    part = torch.ones(whole.numel() // dist.get_world_size(group), device=device)
    other = torch.empty_like(whole) if kind == "all-to-all" else whole
    collectives: dict[str, Callable[[], object]] = {
        # The largest value instead of the sum: the buffer is used again and again, and sums would grow beyond fp32.
        "all-reduce": lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group),
        "all-gather": lambda: dist.all_gather_single(whole, part, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_single(part, whole, group=group),
        "all-to-all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return collectives[kind]


def _time_repeats(
    collective: Callable[[], object], num_repeats: int, device: torch.device, group: dist.ProcessGroup | None
) -> list[float]:
    """Return for each repeat the seconds of the slowest rank."""
    for _ in range(NUM_WARMUPS):
        collective()
    time_once = _time_on_gpu if device.type == "cuda" else _time_on_cpu
    mine: list[float] = []
    for _ in range(num_repeats):
        dist.barrier(group, device_ids=[device.index] if device.type == "cuda" else None)
        mine.append(time_once(collective))
    times: Tensor = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return times.tolist()


def _time_on_cpu(collective: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    collective()
    return time.perf_counter() - started_s


def _time_on_gpu(collective: Callable[[], object]) -> float:
    """Time on the device's own clock: the call returns before the work is done."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    collective()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def fit_link(kind: str, num_ranks: int, samples: Sequence[LinkSample]) -> LinkFit:
    """Find the latency and bandwidth whose predictions are nearest to the samples, by least squares of relative errors.

    Relative, because the times span several orders of magnitude: the largest size alone would decide otherwise. Both
    numbers are kept physical: where the best line has a negative latency, the best one through 0 is taken; where time
    does not grow with the size, the bandwidth is infinite.

    Args:
        kind: a key of `planner.network.RING_PASSES`.
        num_ranks: of the group, 2 or more.
        samples: of two different sizes at least; times above 0.

    Raises:
        ValueError: if there are too few samples, or a time is not above 0.
    """
    if num_ranks < 2 or len({sample.payload_bytes for sample in samples}) < 2:
        raise ValueError(f"fit_link: {len(samples)} samples of {num_ranks} ranks: need 2 different sizes, and 2 ranks")
    if any(sample.seconds <= 0 for sample in samples):
        raise ValueError("fit_link: a measured time is 0 s or less: measure larger sizes")
    messages = ring_messages(kind, num_ranks)
    # Each sample says: u x latency + v x (seconds a byte) = 1, with u and v over its time.
    rows = [(messages / s.seconds, ring_sent_bytes(kind, s.payload_bytes, num_ranks) / s.seconds) for s in samples]
    uu, uv, vv = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = uu * vv - uv * uv
    latency_s, s_per_byte = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
    if latency_s < 0:
        latency_s, s_per_byte = 0.0, v / vv
    elif s_per_byte <= 0:
        latency_s, s_per_byte = u / uu, 0.0
    errors = [latency_s * row[0] + s_per_byte * row[1] - 1 for row in rows]
    return LinkFit(
        kind=kind,
        num_ranks=num_ranks,
        samples=tuple(samples),
        link=Link(latency_s=latency_s, bytes_per_s=1 / s_per_byte if s_per_byte else float("inf")),
        residual_fraction=(sum(error**2 for error in errors) / len(errors)) ** 0.5,
    )
