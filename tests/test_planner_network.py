"""Bytes that a rank sends in a step, against the ring formulas (F3)."""

from __future__ import annotations

import pytest

from vlmcourse.planner import Link, estimate_step_traffic
from vlmcourse.planner.network import RING_PASSES, ring_messages, ring_sent_bytes

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


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    assert ring_sent_bytes("all-reduce", 800, 4) == 1200
    assert ring_sent_bytes("reduce-scatter", 800, 4) == ring_sent_bytes("all-gather", 800, 4) == 600
    # In an all-to-all a rank keeps its own quarter; in a broadcast the last of four sends nothing.
    assert ring_sent_bytes("all-to-all", 800, 4) == ring_sent_bytes("broadcast", 800, 4) == 600
    assert (ring_messages("all-reduce", 4), ring_messages("all-gather", 4)) == (6, 3)


def test_a_link_takes_a_latency_for_each_message_and_the_bytes_at_its_bandwidth():
    link = Link(latency_s=1e-5, bytes_per_s=1e9)
    assert link.estimate_s("all-reduce", 800_000_000, 4) == pytest.approx(6e-5 + 1.2)
    assert link.estimate_s("all-gather", 0, 4) == pytest.approx(3e-5)
    assert all(link.estimate_s(kind, 10**9, 1) == 0 for kind in RING_PASSES), "one rank sends nothing"


def test_unknown_collectives_and_bad_links_are_refused():
    with pytest.raises(ValueError, match="kind 'allreduce': choose one of"):
        ring_sent_bytes("allreduce", 1, 2)
    with pytest.raises(ValueError, match="num_ranks = 0"):
        ring_messages("all-reduce", 0)
    for latency_s, bytes_per_s in ((-1, 1), (float("inf"), 1), (0, 0)):
        with pytest.raises(ValueError, match="need a number of 0 or more, and one greater than 0"):
            Link(latency_s=latency_s, bytes_per_s=bytes_per_s)
