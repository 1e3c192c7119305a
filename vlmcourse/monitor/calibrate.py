"""Measure in a few seconds what a CPU rank reaches, so that the planner can predict its steps.

Enters: nothing but the process at hand, with as many threads as PyTorch uses in it. Leaves: a `Calibration`, a device
and speeds for `planner.step_time.estimate_step_time`. A GPU has a datasheet and fitted speeds (`planner.efficiency`),
so it is not measured here. Links between ranks are measured in `parallel/links.py`. Chapter 7.

- Products: the median rate over sizes as a small model has them, forward and for gradients of weights.
- Attention: the rate of PyTorch's fused attention, of those FLOPs that the causal mask leaves.
- Memory: adding two arrays larger than caches. Half of it is taken to be reached, since a CPU computes norms, rotations
  and gates in single steps, which move about twice the bytes that `planner.layer_times` counts for fused kernels.
- Operations: a block with next to nothing to compute, forward and backward. What it takes is Python and PyTorch, and on
  a CPU it comes on top of computing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmcourse.models.vlm import build_model
from vlmcourse.planner.efficiency import Speeds, measured_speeds
from vlmcourse.planner.fabric import Fabric
from vlmcourse.planner.hardware import DeviceSpec, calibrated_device
from vlmcourse.planner.layer_times import ATTENTION_BACKWARD, BACKWARD_LAUNCHES, CAUSAL_FRACTION, FORWARD_LAUNCHES
from vlmcourse.planner.network import Link
from vlmcourse.presets import get_model
from vlmcourse.values import check_counts

PRODUCTS = ((512, 384, 384), (512, 384, 1152), (512, 128, 512), (256, 768, 768))
"""Rows, inner, columns."""
ATTENTION_POSITIONS = 256
ARRAY_BYTES = 32 * 2**20
UNFUSED_FRACTION = 0.5
"""Of the memory's bandwidth, what layers reach of the bytes that are counted for fused kernels."""
MEMORY_BYTES = 2 * 2**30
"""Of the device made up: a plan's memory is not judged by it."""
Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What one CPU rank reaches."""

    device: DeviceSpec
    speeds: Speeds

    def __str__(self) -> str:
        """Show the numbers in a line."""
        rate, block_s = self.device.dense_flop_per_s["fp32"], FORWARD_LAUNCHES * self.speeds.launch_s
        return (
            f"{rate / 1e9:.0f} GFLOP/s in products, {rate * self.speeds.attention_fraction / 1e9:.0f} in attention, "
            f"memory {self.device.memory_bytes_per_s / 1e9:.0f} GB/s, {1e6 * block_s:.0f} us for an empty block"
        )


def calibrate_cpu(
    *,
    num_repeats: int = 7,
    clock: Clock = time.perf_counter,
    link: Link | None = None,
    head_width: int = 64,
) -> Calibration:
    """Measure this process on its CPU.

    Args:
        num_repeats: timed runs of each kind, of which the median counts.
        clock: seconds; `time.process_time` counts this process's own where others keep the machine busy, and is right
            with one thread only.
        link: to other ranks, which the device's link is taken from; None makes one that takes no time.
        head_width: channels of an attention head of the model that is to be predicted; narrow ones are slower.

    Raises:
        ValueError: if a count is below 1.
    """
    check_counts(1, num_repeats=num_repeats, head_width=head_width)

    def seconds(run: Callable[[], object]) -> float:
        run()  # the first call sets up buffers
        times = []
        for _ in range(num_repeats):
            start = clock()
            run()
            times.append(clock() - start)
        return max(median(times), 1e-9)

    rate = median(_product_rates(seconds))
    device = calibrated_device(
        "this CPU",
        memory_bytes=MEMORY_BYTES,
        flop_per_s=rate,
        memory_bytes_per_s=_memory_bytes_per_s(seconds),
        link_bytes_per_s=min(1e30, link.bytes_per_s) if link else 1e30,
    )
    speeds = dataclasses.replace(
        measured_speeds(_empty_block_s(seconds) / (FORWARD_LAUNCHES + BACKWARD_LAUNCHES)),
        attention_fraction=_attention_rate(seconds, head_width) / rate,
        memory_fraction=UNFUSED_FRACTION,
        launches_add=True,
    )
    return Calibration(device=device, speeds=speeds)


def fabric_of_ranks(link: Link, num_ranks: int) -> Fabric:
    """Return the fabric of ranks of one machine with a link as `parallel.links.measure_links` fits it."""
    return Fabric(node=link, devices_per_node=num_ranks, call_s=0.0)


Timer = Callable[[Callable[[], object]], float]


def _product_rates(seconds: Timer) -> list[float]:
    rates: list[float] = []
    for rows, inner, columns in PRODUCTS:
        x, weight, gradient = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(rows, columns)
        flops = 2 * rows * inner * columns
        rates.append(flops / seconds(lambda x=x, weight=weight: F.linear(x, weight)))
        rates.append(flops / seconds(lambda x=x, gradient=gradient: gradient.T @ x))
    return rates


def _attention_rate(seconds: Timer, head_width: int) -> float:
    """Measure forward and backward; backward is counted as `layer_times.ATTENTION_BACKWARD` forwards."""
    q = torch.randn(2, 6, ATTENTION_POSITIONS, head_width, requires_grad=True)
    flops = (1 + ATTENTION_BACKWARD) * 4 * 12 * ATTENTION_POSITIONS**2 * head_width * CAUSAL_FRACTION

    def run() -> None:
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    return flops / seconds(run)


def _memory_bytes_per_s(seconds: Timer) -> float:
    x = torch.ones(ARRAY_BYTES // 4)
    out = torch.empty_like(x)
    return 3 * ARRAY_BYTES / seconds(lambda: torch.add(x, x, out=out))


def _empty_block_s(seconds: Timer) -> float:
    """Time a block forward and backward where products are next to nothing: models of 2 and 10 layers differ by 8."""
    shape = get_model("tiny")
    language = dataclasses.replace(
        shape.language, hidden_size=16, num_heads=2, num_kv_heads=1, mlp_size=16, vocab_size=8
    )

    def step_s(num_layers: int) -> float:
        deep = dataclasses.replace(shape, language=dataclasses.replace(language, num_layers=num_layers))
        model = build_model(dataclasses.replace(deep, image_token_id=7), seed=0)
        ids = torch.zeros(1, 4, dtype=torch.int64)

        def step() -> Tensor:
            loss = model(ids).sum()
            loss.backward()
            return loss

        return seconds(step)

    return max(1e-9, (step_s(10) - step_s(2)) / 8)
