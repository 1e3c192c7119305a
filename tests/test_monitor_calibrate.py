from __future__ import annotations

from itertools import count

import pytest

from vlmcourse.monitor.calibrate import PRODUCTS, calibrate_cpu, fabric_of_ranks
from vlmcourse.planner import Plan, Workload, estimate_step_time
from vlmcourse.planner.fabric import Group
from vlmcourse.planner.network import Link
from vlmcourse.presets import get_cluster, get_model


def test_what_is_measured_is_what_the_clock_said() -> None:
    """With a clock that ticks a second a reading, every run takes a second."""
    ticks = count()
    found = calibrate_cpu(num_repeats=1, clock=lambda: float(next(ticks)), link=Link(latency_s=0.0, bytes_per_s=7.0))
    flops = sorted(2 * rows * inner * columns for rows, inner, columns in PRODUCTS for _ in range(2))
    rate = (flops[3] + flops[4]) / 2
    assert found.device.peak_flop_per_s("fp32") == rate
    assert found.device.memory_bytes_per_s == 3 * 32 * 2**20 and found.device.link_bytes_per_s == 7
    assert found.speeds.attention_fraction * rate == pytest.approx(3.5 * 4 * 12 * 256**2 * 64 / 2)
    assert found.speeds.launches_add and "GFLOP/s in products" in str(found)


def test_a_calibrated_cpu_predicts_a_step_of_any_plan() -> None:
    found = calibrate_cpu(num_repeats=1)
    fabric = fabric_of_ranks(Link(latency_s=1e-4, bytes_per_s=1e9), 2)
    assert fabric.estimate_s("all-reduce", 1e9, Group(2, 2)) == pytest.approx(1.0, rel=1e-3)

    def seconds(dp_shard: int = 1, tp: int = 1) -> float:
        plan = Plan(precision="fp32", activation_checkpointing=False, dp_shard=dp_shard, tp=tp, vision_tp=tp)
        step = estimate_step_time(
            plan,
            get_model("small"),
            get_cluster("h100x8"),
            Workload(seq_len=256),
            device=found.device,
            speeds=found.speeds,
            fabric=fabric,
        )
        return step.seconds

    assert 0 < seconds() < seconds(dp_shard=2) and seconds(tp=2) < 2 * seconds()


def test_counts_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="num_repeats"):
        calibrate_cpu(num_repeats=0)
