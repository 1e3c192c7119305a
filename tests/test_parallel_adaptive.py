"""Pipelines whose layers move while they train: the same losses, gradients, weights and moments as one process.

Four ranks are started once and run everything; the tests compare what they wrote down.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adaptive_cases import NUM_MICROBATCHES, OPTIMIZER, ROUTES, STEPS, Route, Trip, split_into, train_alone
from adaptive_worker import BUGS, SLEEP_S, deal_to
from combinations import Combination, divisible_shape
from combinations import run as run_combination
from parity import LOSS_TOLERANCE, check_gradient, check_parity, load
from pipeline_cases import Case, pipeline_shape
from pipeline_orders import torch_order
from ranks import run_worker
from torch.distributed.fsdp import FSDPModule

from vlmcourse.models.vlm import build_model
from vlmcourse.parallel import adaptive
from vlmcourse.parallel.adaptive import AdaptivePipelineScheduler
from vlmcourse.parallel.best_split import BestSplit, find_best_split
from vlmcourse.parallel.decision import Proposal
from vlmcourse.parallel.layer_times import LayerTimer, LayerTimes, _Action, _Step, typical_s
from vlmcourse.parallel.played_step import step_s
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.parallel.stages import EMBEDDING, VLMStage
from vlmcourse.parallel.timeline import makespan_s, mean_costs, replay_actions
from vlmcourse.planner.schedules import find_tied_problem, stages_of_rank
from vlmcourse.planner.stages import StageSplit, split_by_cost
from vlmcourse.train.loss import token_loss_sum

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
    measure_steps = {"gpipe": 1, "zbv": 2}[schedule]
    ranks = [of_rank["adapted"][schedule] for of_rank in found]
    first = ranks[0]
    for rank in ranks:
        for same in ("splits", "decided", "promise"):
            assert rank[same] == first[same], same
    times: LayerTimes = first["times"]
    assert all(rank["times"] == times for rank in ranks)
    assert times.num_samples == NUM_MICROBATCHES * measure_steps and times.num_microbatches == NUM_MICROBATCHES
    slow = {1: SLEEP_S, 2: SLEEP_S, 9: 2 * SLEEP_S}  # the last one on the second data-parallel copy only
    assert all(times.forward_s[layer] >= seconds for layer, seconds in slow.items())
    assert times.backward_s[8] >= SLEEP_S
    # One step is not measured, then come those that are.
    decided = [decision for decision in first["decided"] if decision]
    assert [step for step, _, _ in decided] == [1 + measure_steps] and decided[0][2]
    start, adapted = first["splits"][0], first["splits"][-1]
    before_s, after_s = first["promise"]
    assert after_s < 0.9 * before_s == pytest.approx(0.9 * step_s(times, split_into(start)))
    assert start != adapted and after_s == pytest.approx(step_s(times, split_into(adapted)))
    assert after_s == pytest.approx(min(step_s(times, split) for split in all_splits(len(start))))
    for rank in ranks:
        is_present, reason, stayed = rank["stays"]
        assert is_present and stayed and "no split beats" in reason
        assert not rank["watching"], "hooks were left behind"
    losses = [[sum(p) for p in zip(*(of["losses"][i] for of in ranks[0::2]), strict=True)] for i in range(len(STEPS))]
    for step, expected in zip(losses, alone(False, (), NUM_MICROBATCHES).losses, strict=True):
        assert step == pytest.approx(expected, rel=LOSS_TOLERANCE["fp32"], abs=LOSS_TOLERANCE["fp32"])


def test_layers_stay_where_the_gain_is_below_the_margin(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        is_present, reason, stayed = of_rank["adapted"]["gpipe"]["little gain"]
        assert stayed and not is_present
        assert "would be better, but by less than min_gain = 10 %" in reason and "a gain of 1." in reason


def test_the_adapted_split_is_within_a_tenth_of_the_best_of_all(found: list[dict[str, Any]]) -> None:
    adapted = found[1]["adapted"]["gpipe"]  # of the second data-parallel copy, which has all slow layers
    slept = adapted["slept"]
    assert slept == found[3]["adapted"]["gpipe"]["slept"] and len(slept) == 10
    # What the layers were told to sleep, played in the order that ran: no clock is read.
    seconds = {layers: makespan_s(replay_actions(ranks, mean_costs(ranks))) for layers, ranks in slept.items()}
    # All layers once, then three times the slowest forward and the slowest backward.
    assert seconds[10, 1] == pytest.approx((5 + 3 * (4 + 1)) * SLEEP_S)
    best_s = min(seconds.values())
    assert best_s == pytest.approx((5 + 3 * (2 + 1)) * SLEEP_S)
    start, split = adapted["splits"][0], adapted["splits"][-1]
    assert start == (10, 1) and seconds[start] > 1.4 * best_s
    assert seconds[split] <= 1.1 * best_s
    assert sum(value > 1.1 * best_s for value in seconds.values()) == 3  # where those that sleep are together


def test_an_lr_scheduler_goes_on_after_a_move_or_is_refused_before(found: list[dict[str, Any]]) -> None:
    for half in (found[0::2], found[1::2]):
        assert all("an LR scheduler has counted them" in of_rank["learning rates"]["refused"] for of_rank in half)
        for step in range(2):
            at = [of_rank["learning rates"]["rates"][step] for of_rank in half]
            assert len({num_groups for _, num_groups in at}) == 1, "the ranks have different groups"
            for name, rate in (pair for rates, _ in at for pair in rates.items()):
                base = getattr(OPTIMIZER, f"lr_{name.split('.')[0]}")
                assert rate == pytest.approx(base * 0.5 ** (step + 1)), name
            assert {name for rates, _ in at for name in rates} == alone(False, (), NUM_MICROBATCHES).rates.keys()


def test_a_resumed_run_starts_from_the_split_it_had_come_to(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        resumed = of_rank["resumed"]
        assert resumed["before"] != (2, 5) == resumed["after"]
        assert resumed["limits"] == (15.0, 100.0)  # the scheduler's own, which the group's bounds
        assert resumed["other splits"] == [False, False, False, True]
        went_on, again = resumed["losses"]
        assert again == pytest.approx(went_on, rel=LOSS_TOLERANCE["fp32"])


def test_a_trainer_adapts_through_its_hook_over_fsdp_and_context_parallelism(found: list[dict[str, Any]]) -> None:
    combination = Combination(4, {"strategy": "fsdp", "pp": 2, "cp": 2}, 4, num_steps=3)
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
        "no step to measure": "measure_steps = 0: must be at least 1, a whole number",
        "half a step to measure": "measure_steps = 1.5: must be at least 1, a whole number",
        "no time to search": "max_search_s = nan: must be greater than 0 seconds, and finite",
        "all time to search": "max_search_s = inf: must be greater than 0 seconds, and finite",
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


def test_measured_times_say_which_layers_of_all_ranks_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    model, split = build_model(pipeline_shape(False), seed=7), split_into((3, 3, 3, 2))
    model.requires_grad_(False)
    # The patches and the output by one parameter each, the fusion, and one block of each tower.
    for name in ("vision.class_token", "language.lm_head", "projector", "vision.blocks.2", "language.blocks.3"):
        found = model.get_parameter(name) if name == "vision.class_token" else model.get_submodule(name)
        found.requires_grad_(True)
    sent: list[torch.Tensor] = []
    monkeypatch.setattr("vlmcourse.parallel.layer_times.gather_actions", lambda order, group: [order])

    def keep(mine: torch.Tensor, *_: Any, **__: Any) -> None:
        sent.append(mine.clone())
        mine.copy_(torch.stack(sent).amax(0))  # of the ranks so far

    monkeypatch.setattr("torch.distributed.all_reduce", keep)
    for mine in ((0, 3), (1, 2)):
        stages = [VLMStage(model, split, number, token_loss_sum) for number in mine]
        timer = LayerTimer(
            SimpleNamespace(split=split, device=torch.device("cpu"), stages=stages, group=None)  # type: ignore[arg-type]
        )
        layers = [layer for number in mine for layer in split.layers(number)]
        timer._steps = [_Step((1,), 4, {n: 1.0 + n for n in layers}, {n: 20.0 + n for n in layers})]
        timer.num_steps = 1
        times = timer.share()
    assert times.forward_s == tuple(1.0 + n for n in range(11))  # the second rank's answer has all
    assert times.backward_s == tuple(20.0 + n for n in range(11))
    assert times.num_samples == 4
    assert [n for n in range(11) if times.trained[n]] == [0, 3, 5, 9, 10]
    assert sent[0].nbytes == 24 * 11 + 8


def test_rare_heavy_micro_batches_count_and_a_hiccup_does_not() -> None:
    def measure(steps: list[tuple[int, list[float]]]) -> float:
        """Return what is made of the first layer's seconds in the micro-batches of steps of some shapes."""
        timer = fake_timer((5, 6), pp_rank=0)
        for shape, seconds in steps:
            timer.pipeline.sizes = (shape,)
            for microbatch, end in enumerate(seconds):
                timer._actions.append(_Action("F", microbatch, 0, [(1, end)], 0.0, end + 1.0))
            timer.close_step()
        return typical_s([(step.sizes, step.forward_s[0]) for step in timer._steps])

    # 1, 1 and 12 tiles, in the micro-batches of a step or in three steps.
    assert measure([(12, [1.0, 1.0, 12.0])]) == pytest.approx(14 / 3)
    assert measure([(1, [1.0, 1.0]), (1, [1.0, 1.0]), (12, [12.0, 12.0])]) == pytest.approx(14 / 3)
    # Three steps of one shape, the machine busy with something else in one of them.
    assert measure([(1, [1.0, 2.0]), (1, [1.0, 90.0]), (1, [1.0, 2.0])]) == pytest.approx(1.5)


def test_heavy_micro_batches_decide_where_the_layers_go() -> None:
    # A vision block takes 1 s a tile, a language block 4 s; 1, 1 and 12 tiles. By the median, vision hardly counts.
    tiles, order = (1, 1, 12), torch_order("gpipe", 2, 3)
    of_vision = typical_s([((12,), sum(tiles) / 3)])
    times = LayerTimes((0.0, *[of_vision] * 4, 0.0, *[4.0] * 4, 0.0), (0.0,) * 11, 3, order)
    best = find_best_split(pipeline_shape(False), times, "gpipe", split_into((9, 2)))

    def seconds(split: StageSplit) -> float:
        """Return the length of the forwards with the tiles that there are, micro-batch after micro-batch."""
        ends = [0.0, 0.0]
        for num in tiles:
            costs = [0.0, *[float(num)] * 4, 0.0, *[4.0] * 4, 0.0]
            for stage in range(2):
                ends[stage] = max(ends[stage], ends[0]) + sum(costs[layer] for layer in split.layers(stage))
        return ends[1]

    by_median = LayerTimes((0.0, *[1.0] * 4, 0.0, *[4.0] * 4, 0.0), (0.0,) * 11, 3, order)
    worse = find_best_split(pipeline_shape(False), by_median, "gpipe", split_into((9, 2)))
    assert seconds(best.split) < seconds(split_into((5, 6))) * 1.001 and seconds(best.split) < seconds(worse.split)


def scheduler_of(schedule: str, layers: tuple[int, ...], tied: bool = False, **pipeline: Any) -> Any:
    """Return a scheduler that can do nothing but propose."""
    scheduler: Any = object.__new__(AdaptivePipelineScheduler)
    stages = [SimpleNamespace(shape=pipeline_shape(tied))]
    split = split_into(layers)
    defaults = {"stages": stages, "modules": [], "schedule": schedule, "num_stages": len(layers), "split": split}
    scheduler.pipeline, scheduler.max_search_s = SimpleNamespace(**defaults | pipeline), 60.0
    scheduler.everyone = None
    return scheduler


@pytest.mark.parametrize(("everyone", "limit_s"), [(None, 60.0), ("slow group", 60.0), ("fast group", 5.0)])
def test_a_search_ends_long_before_the_collective_in_which_the_others_wait(
    monkeypatch: pytest.MonkeyPatch, everyone: Any, limit_s: float
) -> None:
    timeouts = {None: math.inf, "slow group": 300.0, "fast group": 20.0}
    monkeypatch.setattr(adaptive, "group_timeout_s", timeouts.__getitem__)
    given: list[float] = []

    def find(*args: Any, max_search_s: float, **kwargs: Any) -> BestSplit:
        given.append(max_search_s)
        return find_best_split(*args, **kwargs)

    monkeypatch.setattr(adaptive, "find_best_split", find)
    scheduler, costs = scheduler_of("1f1b", (6, 5)), (1.0,) * 11
    scheduler.everyone = everyone
    scheduler.propose(LayerTimes(costs, costs, 1, torch_order("1f1b", 2, 4)))
    assert given == [limit_s]


def proposal_of(after_s: float, least_s: float) -> Proposal:
    """Return a proposal to stay, or to go where a step takes less than a second."""
    split = split_into((6, 5) if after_s == 1 else (5, 6))
    return Proposal(split_into((6, 5)), split, LayerTimes((), (), 1), 1.0, after_s, least_s)


@pytest.mark.parametrize(
    ("after_s", "least_s", "words"),
    [
        (0.8, 0.8, "a gain of 20.0 %; proven: no split has a shorter step"),
        (0.5, 0.41811, "up to 16.4 % of that, no more"),  # 16.378 %
        (1.0, 0.004, "up to 99.6 % of that, no more"),
        (1.0, 0.0, "up to 100 % of that, no more"),
        (1.0, 0.99999, "up to 0.1 % of that, no more"),
    ],
)
def test_a_proposal_says_what_another_split_could_save_at_most(after_s: float, least_s: float, words: str) -> None:
    proposal = proposal_of(after_s, least_s)
    assert str(proposal).endswith(words), str(proposal)
    assert proposal.is_exact == ("proven" in words)


@pytest.mark.parametrize(
    ("least_s", "words"), [(1.0, "no split beats [6, 5] ("), (0.9, "no split was found that beats [6, 5] (")]
)
def test_only_a_proof_lets_a_decision_say_that_no_split_is_better(
    monkeypatch: pytest.MonkeyPatch, least_s: float, words: str
) -> None:
    scheduler = scheduler_of("1f1b", (6, 5))
    scheduler.num_steps, scheduler.repeat_every, scheduler.decisions, scheduler._timer = 3, 0, [], None
    scheduler.measure, scheduler.propose = lambda: None, lambda _: proposal_of(1.0, least_s)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda found, **_: None)
    assert words in scheduler.decide().reason


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_a_tied_embedding_is_never_proposed_to_be_alone_on_the_last_stage(schedule: str) -> None:
    # Without the rule the last stage would begin with the fusion, the fourth layer and all behind it cost nothing.
    costs = (1.0, 1.0, 1.0, 1.0, 1.0, *[0.0] * 6)
    times = LayerTimes(costs, costs, 1, torch_order(schedule, 2, 4))
    for tied in (False, True):
        split = scheduler_of(schedule, (8, 1, 1, 1), tied).propose(times).split
        assert (find_tied_problem(schedule, split, tied_embeddings=True) is None) == tied


def test_fsdp_is_never_proposed_a_stage_without_a_block() -> None:
    costs = (*[1.0] * 10, 20.0)  # the output would best be alone
    times = LayerTimes(costs, costs, 1, torch_order("1f1b", 2, 4))
    for modules in ([], [object.__new__(FSDPModule)]):
        split = scheduler_of("1f1b", (6, 5), modules=modules).propose(times).split
        assert bool(split.language_blocks(1)) == bool(modules)


def test_the_first_rank_searches_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank, whose processor rounds otherwise, does not follow its own opinion."""
    costs = (4.0, *[1.0] * 10)
    times = LayerTimes(costs, costs, 1, torch_order("1f1b", 2, 4))
    first = scheduler_of("1f1b", (6, 5)).propose(times)
    mine: Any = scheduler_of("1f1b", (6, 5))
    mine.min_gain, mine.num_steps, mine.repeat_every, mine.decisions = 0.0, 3, 0, []
    other = dataclasses.replace(first, split=split_into((1, 10)))
    mine.everyone, mine._timer, mine.measure, mine.propose = None, None, lambda: times, lambda _: other
    moved_to: list[StageSplit] = []
    mine.move = moved_to.append
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda found, **_: found.__setitem__(0, first))
    assert mine.decide().proposal == first and moved_to == [first.split]


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
