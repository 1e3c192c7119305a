"""What one optimizer step of a plan is predicted to take, and what follows from it.

Enters: seconds by rank and part, samples, FLOPs, all from `step_time.py`. Leaves: a `StepTime`: tokens a second, MFU,
cost and energy of a million samples, spans to draw. Imports no torch. Chapter 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vlmcourse.planner.timeline import Timeline
from vlmcourse.spans import BACKWARD, COMMUNICATION, COMPUTE, FORWARD, OPTIMIZER, Span

PARTS = (
    "forward",
    "backward",
    "recompute",
    "tensor_parallel",
    "context_parallel",
    "sharding",
    "overhead",
    "data_parallel",
    "optimizer",
    "waiting",
)
"""What the seconds of a rank are spent on: `overhead` where a host launches more slowly than its device computes or
nothing hides it, `waiting` for other stages of the pipeline and their messages."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """What one optimizer step is predicted to take."""

    seconds: float
    ranks: tuple[Mapping[str, float], ...]
    """Seconds of one rank of each pipeline rank's group by `PARTS`; each sums to `seconds`."""
    num_samples: int
    num_tokens: int
    """Positions of the language tower, all ranks together."""
    num_ranks: int
    model_flops: float
    """Of forward and backward of all ranks, without recomputation; see `flops.py`."""
    peak_flop_per_s: float
    """Of one device, dense, in the type of the products."""
    power_w: float
    """Limit of one device; 0 where it is not known."""
    pipeline: Timeline | None = None
    """Where there are several stages."""

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds by part of the rank that waits least: the one that sets the pace."""
        return min(self.ranks, key=lambda parts: parts["waiting"])

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together."""
        return self.num_tokens / self.seconds

    @property
    def tokens_per_s_per_device(self) -> float:
        """Of one device."""
        return self.tokens_per_s / self.num_ranks

    @property
    def samples_per_s(self) -> float:
        """Of all ranks together."""
        return self.num_samples / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs a second as a share of the devices' dense peak."""
        return self.model_flops / self.seconds / (self.num_ranks * self.peak_flop_per_s)

    @property
    def bubble_fraction(self) -> float:
        """Share of the step in which ranks wait for other stages, the mean over the pipeline's ranks."""
        return sum(parts["waiting"] for parts in self.ranks) / len(self.ranks) / self.seconds

    def cost_per_million_samples(self, price_per_device_hour: float) -> float:
        """Return what a million samples cost, in the unit of the price.

        Raises:
            ValueError: if the price is below 0.
        """
        if not price_per_device_hour >= 0:
            raise ValueError(f"price_per_device_hour = {price_per_device_hour}: must be 0 or greater")
        return 1e6 / self.samples_per_s * self.num_ranks * price_per_device_hour / 3600

    def energy_per_million_samples_j(self, power_w: float = 0.0) -> float:
        """Return joules for a million samples of devices that draw their limit all the time: an upper bound for them.

        Main memory, processors, network and cooling come on top.

        Args:
            power_w: of one device; 0 takes the datasheet's limit.

        Raises:
            ValueError: if neither says how much a device draws.
        """
        power_w = power_w or self.power_w
        if not power_w > 0:
            raise ValueError(f"power_w = {power_w}: the limit of this device is not known, so say what it draws")
        return 1e6 / self.samples_per_s * self.num_ranks * power_w

    def spans(self) -> list[Span]:
        """Return the step to draw it with `plots.timeline`: a rank of each pipeline rank's group.

        Without a pipeline, forwards and backwards of all micro-batches are drawn in two spans.
        """
        found: list[Span] = []
        for rank, parts in enumerate(self.ranks):
            tail_s = parts["data_parallel"] + parts["optimizer"]
            if self.pipeline is None:
                forward_s = parts["forward"]
                found.append(Span(rank, COMPUTE, FORWARD, 0.0, forward_s))
                found.append(Span(rank, COMPUTE, BACKWARD, forward_s, self.seconds - tail_s))
                busy_until_s = self.seconds - tail_s
            else:
                busy_until_s = self.pipeline.finish_s[rank]
            end_s = busy_until_s + parts["data_parallel"]
            if parts["data_parallel"]:
                found.append(Span(rank, COMMUNICATION, "all_reduce", busy_until_s, end_s))
            found.append(Span(rank, OPTIMIZER, OPTIMIZER, self.seconds - parts["optimizer"], self.seconds))
        return found + (self.pipeline.spans() if self.pipeline is not None else [])

    def __str__(self) -> str:
        """Show the step in a few lines."""
        parts = ", ".join(f"{name} {100 * s / self.seconds:.0f} %" for name, s in self.parts.items() if s)
        return (
            f"{self.seconds:.3g} s a step of {self.num_samples} samples: {self.tokens_per_s_per_device:,.0f} tokens/s "
            f"a device, MFU {100 * self.mfu:.0f} % ({parts})"
        )
