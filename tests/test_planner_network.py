"""Bytes that a rank sends in a step, against the ring formulas (F3)."""

from __future__ import annotations

import pytest

from vlmcourse.planner import estimate_step_traffic

P, N = 10**9, 8
RING = P * (N - 1) / N


def test_ddp_all_reduces_the_gradients():
    traffic = estimate_step_traffic(P, N, 0)
    assert traffic.all_reduce == 2 * RING * 2 == traffic.total


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_send_as_much_as_ddp(stage):
    traffic = estimate_step_traffic(P, N, stage)
    assert (traffic.reduce_scatter, traffic.all_gather, traffic.all_reduce) == (2 * RING, 2 * RING, 0)
    assert traffic.total == estimate_step_traffic(P, N, 0).total


def test_zero_3_sends_one_and_a_half_times_as_much():
    traffic = estimate_step_traffic(P, N, 3)
    assert (traffic.reduce_scatter, traffic.all_gather) == (2 * RING, 4 * RING)
    assert traffic.total == 1.5 * estimate_step_traffic(P, N, 0).total


def test_fp32_gradients_double_their_share_only():
    traffic = estimate_step_traffic(P, N, 3, gradient_bytes=4)
    assert (traffic.reduce_scatter, traffic.all_gather) == (4 * RING, 4 * RING)


def test_one_rank_sends_nothing_and_bad_numbers_are_refused():
    assert all(estimate_step_traffic(P, 1, stage).total == 0 for stage in range(4))
    with pytest.raises(ValueError, match="zero_stage = 5"):
        estimate_step_traffic(P, N, 5)
    with pytest.raises(ValueError, match="num_ranks = 0"):
        estimate_step_traffic(P, 0, 1)
