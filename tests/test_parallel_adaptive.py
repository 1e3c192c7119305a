"""Pipelines whose layers move while they train: the same losses, gradients, weights and moments as one process.

Four ranks are started once and run everything; the tests compare what they wrote down.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adaptive_cases import NUM_MICROBATCHES, ROUTES, STEPS, Route, Trip, split_into, train_alone
from adaptive_worker import BUGS, SLEEP_S, deal_to
from combinations import Combination, divisible_shape
from combinations import run as run_combination
from parity import LOSS_TOLERANCE, check_gradient, check_parity, load
from pipeline_cases import Case, pipeline_shape
from ranks import run_worker

from vlmcourse.parallel.layer_times import LayerTimer, LayerTimes, _Action
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.parallel.stages import EMBEDDING
from vlmcourse.planner.schedules import stages_of_rank
from vlmcourse.planner.stages import StageSplit, split_by_cost

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@cache
def alone(tied: bool, frozen: tuple[str, ...], num_microbatches: int) -> Trip:
    return train_alone(Case("gpipe", tied=tied, frozen=frozen), num_microbatches)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks recorded."""
    folder: Path = tmp_path_factory.mktemp("adaptive")
    run_worker("adaptive_worker.py", str(folder), nproc=4, timeout_s=240)
    return [load(folder / f"rank{rank}.pt") for rank in range(4)]


def pipelines(found: list[dict[str, Any]], part: str, name: str, route: Route) -> list[list[Trip]]:
    """Return the ranks of each pipeline that ran something."""
    if route.pp == 4:
        return [[of_rank[part][name] for of_rank in found]]
    halves = [found[0::2], found[1::2]]  # the pipeline axis is the outer one
    ran = [half for half in halves if name in half[0][part]]
    assert len(ran) == (1 if route.case.dp == "single" else 2)
    return [[of_rank[part][name] for of_rank in half] for half in ran]


def check_trip(route: Route, pipes: list[list[Trip]]) -> None:
    """Raise AssertionError at the first loss, gradient, norm, weight or moment that differs from one process."""
    case = route.case
    expected = alone(case.tied, case.frozen, NUM_MICROBATCHES * len(pipes))
    for pipe in pipes:
        assert not any(trip.refused for trip in pipe), f"refused: {pipe[0].refused}"
        assert not any(left for trip in pipe for left in trip.gradients_left), "gradients were left after a move"
    for step, name in enumerate(STEPS):
        losses: list[float] = []
        for pipe in pipes:
            losses += [sum(parts) for parts in zip(*(trip.losses[step] for trip in pipe), strict=True)]
        for loss, want in zip(losses, expected.losses[step], strict=True):
            assert abs(loss - want) <= LOSS_TOLERANCE["fp32"] * max(1, abs(want)), f"{name}: loss {loss}, {want}"
        for pipe in pipes:
            for trip in pipe:
                norm, want = trip.grad_norms[step], expected.grad_norms[step]
                assert abs(norm - want) <= LOSS_TOLERANCE["fp32"] * want, f"{name}: norm {norm} instead of {want}"
            check_gradients(f"{name}: gradient of", [trip.gradients[step] for trip in pipe], expected.gradients[step])
    for pipe in pipes:
        check_end(pipe, expected)


def check_gradients(what: str, parts: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    merged = {name: gradient for part in parts for name, gradient in part.items()}
    copy = merged.pop("tied copy", None)
    assert merged.keys() == expected.keys(), f"{what} other parameters: {merged.keys() ^ expected.keys()}"
    for name, gradient in merged.items():
        check_gradient(f"{what} {name}", gradient, expected[name], "fp32")
    assert copy is None or torch.equal(copy, merged[EMBEDDING]), f"{what} the tied copy is another one"


def check_end(pipe: list[Trip], expected: Trip) -> None:
    """Compare weights, optimizer state, rates and decays at the end."""
    state = {name: tensors for trip in pipe for name, tensors in trip.state.items()}
    assert state.keys() == expected.state.keys()
    for name, tensors in state.items():
        want = expected.state[name]
        assert tensors.keys() == want.keys(), f"{name}: state {tensors.keys()} instead of {want.keys()}"
        for key, tensor in tensors.items():
            assert tensor.dtype == want[key].dtype and tensor.shape == want[key].shape, (name, key)
            assert torch.allclose(tensor, want[key], rtol=1e-4 * (key != "weight"), atol=1e-5), f"{key} of {name}"
    assert {name: rates for trip in pipe for name, rates in trip.rates.items()} == expected.rates


@pytest.mark.parametrize("name", ROUTES)
def test_layers_on_the_move_train_as_in_one_process(found: list[dict[str, Any]], name: str) -> None:
    check_trip(ROUTES[name], pipelines(found, "trips", name, ROUTES[name]))


@pytest.mark.parametrize("name", ROUTES)
def test_a_move_changes_no_bit_of_weights_and_moments_and_sends_only_what_moves(
    found: list[dict[str, Any]], name: str
) -> None:
    route = ROUTES[name]
    owner = {s: r for r in range(route.pp) for s in stages_of_rank(route.case.schedule, route.pp, r)}
    for pipe in pipelines(found, "trips", name, route):
        assert all(differing == [] for trip in pipe for differing in trip.differing)
        assert all(len(trip.differing) == len(STEPS) for trip in pipe)
        num_sent = 0
        for number in range(len(STEPS) - 1):
            for rank, trip in enumerate(pipe):
                before, after = set(trip.held[number]), set(trip.held[number + 1])
                assert set(trip.received[number]) == after - before
                assert not set(trip.sent[number]) - before
                num_sent += len(trip.sent[number])
                layers = {n for s in owner if owner[s] == rank for n in split_into(route.splits[number + 1]).layers(s)}
                assert any(".blocks." in held for held in after) or not layers & {1, 2, 3, 4, 6, 7, 8, 9}
        assert num_sent
        for number in range(len(STEPS)):
            sent = sorted(n for trip in pipe for n in trip.sent[number])
            assert sent == sorted(n for trip in pipe for n in trip.received[number])


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(found: list[dict[str, Any]], bug: str) -> None:
    route = ROUTES[BUGS[bug][0]]
    pipes = pipelines(found, "bugs", bug, route)
    with pytest.raises(AssertionError) as caught:
        check_trip(route, pipes)
    print(f"{bug}: {caught.value}")


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_a_pipeline_with_slow_layers_adapts_and_then_stays(found: list[dict[str, Any]], schedule: str) -> None:
    ranks = [of_rank["adapted"][schedule] for of_rank in found]
    first = ranks[0]
    for rank in ranks:
        for same in ("splits", "decided", "times", "promise"):
            assert rank[same] == first[same], same
    times: LayerTimes = first["times"]
    assert times.num_samples == NUM_MICROBATCHES
    slow = {1: SLEEP_S, 2: SLEEP_S, 9: 2 * SLEEP_S}  # the last one on the second data-parallel copy only
    for layer, seconds in enumerate(times.forward_s):
        assert seconds >= slow.get(layer, 0.0) and (layer in slow) == (seconds > SLEEP_S), (layer, seconds)
    assert times.backward_s[8] >= SLEEP_S
    before_s, after_s = first["promise"]
    assert after_s < 0.7 * before_s
    start, adapted = first["splits"][0], first["splits"][1]
    assert (
        start
        != adapted
        == split_by_cost(pipeline_shape(False), times.total_s, len(start), output_apart=False).layers_per_stage
    )
    assert first["decided"][0] is None and first["decided"][1][0] == 2 and first["decided"][1][2]
    # Between the blocks that sleep now stands a cut.
    stage_of = {n: s for s in range(len(adapted)) for n in split_into(adapted).layers(s)}
    assert stage_of[2] < stage_of[9]
    for rank in ranks:
        is_best, reason, stayed = rank["stays"]
        assert is_best and stayed and "no split beats" in reason
        assert not rank["watching"], "hooks were left behind"
    losses = [[sum(p) for p in zip(*(of["losses"][i] for of in ranks[0::2]), strict=True)] for i in range(len(STEPS))]
    for step, expected in zip(losses, alone(False, (), NUM_MICROBATCHES).losses, strict=True):
        assert step == pytest.approx(expected, rel=LOSS_TOLERANCE["fp32"], abs=LOSS_TOLERANCE["fp32"])


def test_a_trainer_adapts_through_its_hook_over_fsdp_and_context_parallelism(found: list[dict[str, Any]]) -> None:
    combination = Combination(4, {"strategy": "fsdp", "pp": 2, "cp": 2}, 4)
    reference = run_combination(
        combination, Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none"), seed=100
    )
    for of_rank in found:
        recording, reasons, splits = of_rank["trainer"]
        check_parity(reference, recording, "fp32")
        assert len(reasons) >= 2 and all("layers" in reason for reason in reasons)
        assert len(splits) == len(recording.losses) == 3
        for name, weight in recording.weights.items():
            assert torch.allclose(weight, reference.weights[name], rtol=0, atol=1e-5), name
    assert divisible_shape().vision.num_layers == 2


def test_what_cannot_be_moved_is_refused_on_all_ranks(found: list[dict[str, Any]]) -> None:
    words = {
        "one rank wants another split": "rank 0 wants layers_per_stage = (6, 5) and rank 1 (5, 6)",
        "other stages": "only the cuts may change",
        "another model": "only the cuts may change",
        "no margin": "min_gain = 1.5",
        "no step to measure": "measure_steps = 0: must be at least 1",
        "an optimizer of something else": "not the pipeline's",
        "zero1": "ZeroRedundancyOptimizer",
        "fsdp without a block": "stage 1 would be norm and output alone",
        "tied, zbv": "gradient of a matrix that one stage uses at both ends",
        "ddp": "a stage is in a DDP",
        "tp": "is split by tensor parallelism",
    }
    for of_rank in found:
        assert of_rank["refusals"].keys() == words.keys()
        for name, said in of_rank["refusals"].items():
            assert words[name] in said, (name, said)


def fake_timer(layers: tuple[int, ...], **stages: Any) -> LayerTimer:
    return LayerTimer(SimpleNamespace(split=split_into(layers), device=torch.device("cpu"), **stages))  # type: ignore


def test_the_times_of_layers_add_up_to_that_of_their_stage() -> None:
    timer = fake_timer((5, 6))
    # Stage 1: fusion, 4 language blocks, output.
    forward = _Action("F", 0, 1, [(6, 3.0), (7, 4.0), (8, 6.0), (9, 7.0), (10, 9.0)], 1.0, 12.0)
    assert timer._split_forward(forward) == {5: 2.0, 6: 1.0, 7: 2.0, 8: 1.0, 9: 2.0, 10: 3.0}
    backward = _Action("B", 0, 1, [(10, 2.0), (9, 4.0), (8, 5.0), (7, 7.0), (6, 8.0)], 1.0, 11.0)
    assert timer._split_backward(backward, {}) == {10: 1.0, 9: 2.0, 8: 1.0, 7: 2.0, 6: 1.0, 5: 3.0}
    # A frozen vision tower: nothing below the fusion has a backward, the fusion has the rest.
    timer = fake_timer((8, 3))
    backward = _Action("B", 0, 0, [(7, 3.0), (6, 4.0)], 1.0, 6.0)
    assert timer._split_backward(backward, {}) == {7: 2.0, 6: 1.0, 5: 2.0}
    # Stage 0 begins with the patches; the first block's mark ends them.
    forward = _Action("F", 0, 0, [(1, 2.0), (2, 4.0)], 1.5, 5.0)
    assert timer._split_forward(forward) == {0: 0.5, 1: 2.0, 2: 1.0}


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_split_of_costs_keeps_to_what_a_stage_may_be(num_stages: int) -> None:
    shape = pipeline_shape(True)
    costs = [9.0, 1, 1, 1, 1, 9.0, 1, 1, 1, 1, 9.0]
    free = split_by_cost(shape, costs, num_stages)
    with_blocks = split_by_cost(shape, costs, num_stages, block_each=True)
    assert all(with_blocks.vision_blocks(s) or with_blocks.language_blocks(s) for s in range(num_stages))
    apart = split_by_cost(shape, [0.0] * 10 + [1.0], num_stages, output_apart=True)
    assert apart.fusion_stage < num_stages - 1

    def slowest(split: StageSplit) -> float:
        return max(sum(costs[n] for n in split.layers(s)) for s in range(num_stages))

    splits = [split for split in all_splits(num_stages)]
    assert slowest(free) == min(map(slowest, splits))
    allowed = [s for s in splits if all(s.vision_blocks(i) or s.language_blocks(i) for i in range(num_stages))]
    assert slowest(with_blocks) == min(map(slowest, allowed))


def all_splits(num_stages: int, num_layers: int = 11) -> list[StageSplit]:
    """Return every split of the small model."""

    def cut(left: int, stages: int) -> list[tuple[int, ...]]:
        if stages == 1:
            return [(left,)]
        return [(n, *rest) for n in range(1, left - stages + 2) for rest in cut(left - n, stages - 1)]

    return [split_into(layers) for layers in cut(num_layers, num_stages)]


def test_every_route_and_bug_runs_on_some_ranks() -> None:
    for names in (list(ROUTES), list(BUGS)):
        assert set(deal_to(0, names)) | set(deal_to(1, names)) == set(names)
