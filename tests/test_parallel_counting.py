"""Every collective of a step is seen, once, with the bytes that the formulas say (F3)."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import read_part

from vlmcourse.parallel.counting import CollectiveCall, CollectiveCount, CollectiveCounter, ring_bytes, sum_traffic
from vlmcourse.planner import estimate_step_traffic

NUM_PARAMS = 3 * 64 * 64
WEIGHTS_BYTES = 4 * NUM_PARAMS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first, second = read_part(tmp_path_factory, "communication_worker.py", "counting")
    assert first["strategies"] == second["strategies"], "all ranks send alike"
    return first


@pytest.mark.parametrize(("strategy", "zero_stage"), [("ddp", 0), ("fsdp kept", 2), ("fsdp", 3)])
def test_a_step_sends_what_the_formula_says(found: dict[str, Any], strategy: str, zero_stage: int) -> None:
    estimated = estimate_step_traffic(NUM_PARAMS, 2, zero_stage, weight_bytes=4, gradient_bytes=4)
    assert found["strategies"][strategy]["traffic"] == vars(estimated)
    assert found["strategies"][strategy]["sent"] == estimated.total
    assert estimated.total == (3 if zero_stage == 3 else 2) * WEIGHTS_BYTES / 2


def test_the_calls_are_as_many_as_the_units(found: dict[str, Any]) -> None:
    strategies = {name: counted["counts"] for name, counted in found["strategies"].items()}
    assert strategies["ddp"] == {"all-reduce": [1, WEIGHTS_BYTES]}
    assert strategies["fsdp"] == {"all-gather": [6, 2 * WEIGHTS_BYTES], "reduce-scatter": [3, WEIGHTS_BYTES]}
    assert strategies["fsdp kept"] == {"all-gather": [3, WEIGHTS_BYTES], "reduce-scatter": [3, WEIGHTS_BYTES]}


def test_torchs_zero_1_sends_half_as_much_again_as_the_paper(found: dict[str, Any]) -> None:
    """It all-reduces whole gradients as DDP does and then broadcasts weights, where ZeRO-1 reduce-scatters."""
    counted = found["strategies"]["zero-1 of torch"]
    assert counted["counts"] == {"all-reduce": [1, WEIGHTS_BYTES], "broadcast": [3, WEIGHTS_BYTES]}
    ideal = estimate_step_traffic(NUM_PARAMS, 2, 1, weight_bytes=4, gradient_bytes=4)
    assert counted["sent"] == 1.5 * ideal.total


def test_tensor_parallel_pairs_reduce_once_each_way_in_their_own_group(found: dict[str, Any]) -> None:
    activations_bytes = 5 * 64 * 4
    assert found["tensor parallel"] == {
        "inside an operation": [["all-gather", 4 * 6 * 4]],
        "forward": [["all-reduce", activations_bytes]],
        "backward": [["all-reduce", activations_bytes]],
        "others": 0,
    }


def test_what_moves_activations_is_told_from_what_exchanges_gradients(found: dict[str, Any]) -> None:
    assert found["marked"] == {
        "gather_from_ranks": [["all-gather", True], ["reduce-scatter", True]],
        "exchange_with_ranks": [["all-to-all", True]] * 2,
        "sum_over_group": [["all-reduce", True]] * 2,
        "ddp": [["all-reduce", True], ["all-reduce", False]],  # as SyncBatchNorm's, and the gradients' own
    }


def test_functional_collectives_count_in_forward_and_backward(found: dict[str, Any]) -> None:
    forward = [["all-reduce", 24], ["broadcast", 24], ["all-gather", 48], ["reduce-scatter", 48], ["all-to-all", 24]]
    backward = [["all-to-all", 24], ["all-gather", 48], ["reduce-scatter", 48]]
    assert found["functional"] == forward + backward


def test_plain_calls_and_messages_count_and_what_comes_after_does_not(found: dict[str, Any]) -> None:
    assert found["plain"] == [
        ["all-gather", 32, 2],
        ["reduce-scatter", 16, 2],
        ["all-to-all", 16, 2],
        ["broadcast", 16, 2],
        ["reduce", 16, 2],
        ["gather", 32, 2],
        ["scatter", 16, 2],
        ["barrier", 0, 2],
        ["all-reduce", 16, 1],
        ["send", 16, 2],
        ["send", 16, 2],
        ["receive", 16, 2],
    ]


def test_a_hook_that_goes_on_in_another_thread_counts_in_every_step(found: dict[str, Any]) -> None:
    assert found["hook"] == [{"all-reduce": [2, WEIGHTS_BYTES + 5 * 4]}] * 5


def test_sums_use_each_calls_own_group() -> None:
    calls = [
        CollectiveCall("all-reduce", 80, "dp", 4),
        CollectiveCall("all-reduce", 80, "tp", 2),
        CollectiveCall("send", 10, "pp", 2),
        CollectiveCall("receive", 10, "pp", 2),
        CollectiveCall("barrier", 0, "dp", 4),
    ]
    assert [call.sent_bytes for call in calls] == [120, 80, 10, 0, 0]
    assert sum_traffic(calls).all_reduce == sum_traffic(calls).total == 200
    counter = CollectiveCounter()
    counter.calls += calls
    assert counter.sent_bytes == 210
    assert counter.counts["all-reduce"] == CollectiveCount(2, 160)
    assert counter.in_group("tp") == [calls[1]]
    assert ring_bytes(counter.counts, 2) == {"all-reduce": 160}
