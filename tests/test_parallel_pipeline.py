"""Pipelines against one process: the same losses, gradients, norms and weights, whatever travels between the stages.

Two and four ranks are started once each and run everything; the tests compare what they wrote down with one process.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import LOSS_TOLERANCE, check_gradient, load
from pipeline_cases import (
    CASES_OF_2,
    CASES_OF_4,
    LOSS_SCALE,
    MAX_GRAD_NORM,
    STEPS,
    Case,
    Recording,
    build_case_model,
    make_step,
    pipeline_shape,
    split_of,
    train_single,
)
from pipeline_worker import BUGS, WRONG_IN_SILENCE
from ranks import run_worker

from vlmcourse.parallel.microbatches import stack_batches
from vlmcourse.parallel.stages import EMBEDDING, VLMStage, layer_parameters
from vlmcourse.parallel.timeline import Action, bubble_fraction
from vlmcourse.planner.schedules import SCHEDULES, ideal_bubble_fraction, stages_of_rank
from vlmcourse.train.loss import token_loss_sum

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
ALL = CASES_OF_2 | CASES_OF_4


@cache
def single(tied: bool, frozen: tuple[str, ...]) -> Recording:
    return train_single(Case("gpipe", tied=tied, frozen=frozen), 8)


@pytest.fixture(scope="module")
def of_2(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks recorded."""
    folder: Path = tmp_path_factory.mktemp("pipeline2")
    run_worker("pipeline_worker.py", str(folder), nproc=2, timeout_s=200)
    return [load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def of_4(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks recorded."""
    folder: Path = tmp_path_factory.mktemp("pipeline4")
    run_worker("pipeline_worker.py", str(folder), nproc=4, timeout_s=200)
    return [load(folder / f"rank{rank}.pt") for rank in range(4)]


def check_run(case: Case, ranks: list[Recording]) -> None:
    """Raise AssertionError at the first loss, norm, gradient or weight that differs from one process."""
    expected = single(case.tied, case.frozen)
    dp = 1 if case.dp == "single" else 2
    pipelines = [ranks[dp_rank::dp] for dp_rank in range(dp)]  # the pipeline axis is the outer one
    for step in range(len(ranks[0].losses)):
        losses: list[float] = []
        for pipe in pipelines:
            # All ranks but that of the last stage have zeros.
            losses += [sum(parts) for parts in zip(*(rank.losses[step] for rank in pipe), strict=True)]
        for found, want in zip(losses, expected.losses[step], strict=True):
            assert abs(found - want) <= LOSS_TOLERANCE["fp32"] * max(1, abs(want)), (
                f"{STEPS[step]}: loss {found}, {want}"
            )
        for rank in ranks:
            norm, want = rank.grad_norms[step], expected.grad_norms[step]
            assert abs(norm - want) <= LOSS_TOLERANCE["fp32"] * want, f"{STEPS[step]}: norm {norm} instead of {want}"
        for pipe in pipelines:
            check_tensors(
                f"{STEPS[step]}: gradient of", [rank.gradients[step] for rank in pipe], expected.gradients[step]
            )
    for pipe in pipelines if len(ranks[0].losses) == len(STEPS) else []:
        merged = merge([rank.weights for rank in pipe])
        copy = merged.pop("tied copy", merged[EMBEDDING])
        assert torch.equal(copy, merged[EMBEDDING]), "the copies of the tied embedding differ"
        assert merged.keys() == expected.weights.keys()
        for name, weight in merged.items():
            assert torch.allclose(weight, expected.weights[name], rtol=0, atol=1e-5), name


def merge(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return what all ranks of a pipeline hold; nothing may be on two of them."""
    merged: dict[str, torch.Tensor] = {}
    for part in parts:
        assert not merged.keys() & part.keys()
        merged |= part
    return merged


def check_tensors(what: str, parts: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    merged = merge(parts)
    copy = merged.pop("tied copy", None)
    assert merged.keys() == expected.keys(), f"{what} other parameters: {merged.keys() ^ expected.keys()}"
    for name, gradient in merged.items():
        check_gradient(f"{what} {name}", gradient, expected[name], "fp32")
    if copy is not None:
        assert torch.equal(copy, merged[EMBEDDING]), f"{what} the tied copy is another one"


@pytest.mark.parametrize("name", CASES_OF_2)
def test_a_pipeline_of_2_ranks_trains_as_one_process(of_2: list[dict[str, Any]], name: str) -> None:
    check_run(CASES_OF_2[name], [found["runs"][name] for found in of_2])


@pytest.mark.parametrize("name", CASES_OF_4)
def test_a_pipeline_of_4_ranks_trains_as_one_process(of_4: list[dict[str, Any]], name: str) -> None:
    check_run(CASES_OF_4[name], [found["runs"][name] for found in of_4])


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(of_2: list[dict[str, Any]], bug: str) -> None:
    recorded = [found["bugs"][bug] for found in of_2]
    assert all(len(rank.losses) == 2 for rank in recorded), "it did not train"
    with pytest.raises(AssertionError) as caught:
        check_run(BUGS[bug][0], recorded)
    print(f"{bug}: {caught.value}")


@pytest.mark.parametrize("name", WRONG_IN_SILENCE)
def test_what_torch_runs_to_wrong_gradients_is_refused(of_4: list[dict[str, Any]], name: str) -> None:
    with pytest.raises(AssertionError, match="instead of|off by|other parameters"):
        check_run(WRONG_IN_SILENCE[name][0], [found["bugs"][name] for found in of_4])
    assert all("in silence" in found["wrappers"][name] for found in of_4)


def test_the_data_was_awkward_enough() -> None:
    expected = single(False, ())
    assert all(norm > MAX_GRAD_NORM for norm in expected.grad_norms), "clipping was not active"
    assert any(loss == 0 for step in expected.losses for loss in step), "no micro-batch was without supervised tokens"
    sizes = {
        stack_batches(make_step(pipeline_shape(False), s, 8), pipeline_shape(False), torch.device("cpu")).sizes
        for s in STEPS
    }
    assert len(sizes) == 3, "steps had the same shapes"
    for name, gradient in expected.gradients[STEPS.index("text")].items():
        assert name.startswith("language") or not gradient.any(), name
    assert LOSS_SCALE != 1


def test_steps_that_cannot_run_are_refused_on_all_ranks_and_leave_the_pipeline_usable(
    of_2: list[dict[str, Any]],
) -> None:
    words = {
        "too few micro-batches": ("dualpipev needs at least 4", "dualpipev needs at least 4"),
        "no micro-batch": ("needs at least 1", "needs at least 1"),
        "uneven rounds": ("multiple of 2", "multiple of 2"),
        "an image token is missing on rank 1": ("rank 1 of this pipeline refuses", "3 image tokens but 4"),
        "other samples on rank 1": ("other micro-batches than rank 0",) * 2,
        "fewer micro-batches on rank 1": ("other micro-batches than rank 0", "needs at least"),
        "other labels on rank 1": ("other micro-batches than rank 0",) * 2,
        "another mask on rank 1": ("other micro-batches than rank 0",) * 2,
        "tiles of two sizes": ("tiles of one size",) * 2,
    }
    for rank, found in enumerate(of_2):
        assert found["refusals"].keys() == words.keys()
        for name, said in found["refusals"].items():
            assert said.startswith(f"rank {rank}: "), said
            assert words[name][rank] in said or name.startswith("fewer"), (name, said)


def test_every_stage_computes_in_the_precision_of_the_step(of_2: list[dict[str, Any]]) -> None:
    for pp_rank, found in enumerate(of_2):
        for schedule, of_steps in found["precisions"].items():
            for ran, dtype in zip(of_steps, ("float32", "bfloat16", "float32"), strict=True):
                assert ran == [(stage, f"torch.{dtype}") for stage in stages_of_rank(schedule, 2, pp_rank)]


def test_buffers_of_few_shapes_are_kept(of_2: list[dict[str, Any]]) -> None:
    assert [found["shapes kept"] for found in of_2] == [4, 4]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_action_of_a_step_is_recorded_once_and_in_order(of_2: list[dict[str, Any]], schedule: str) -> None:
    ranks = of_2[0]["timelines"][schedule]
    assert ranks == of_2[1]["timelines"][schedule]
    ends: dict[tuple[str, int, int], Action] = {}
    for pp_rank, actions in enumerate(ranks):
        assert all(a.rank == pp_rank and a.stage in stages_of_rank(schedule, 2, pp_rank) for a in actions)
        assert all(a.start_s <= a.end_s <= b.start_s for a, b in zip(actions, actions[1:], strict=False))
        ends |= {("B" if a.kind == "I" else a.kind, a.microbatch, a.stage): a for a in actions}
        done = [(a.kind, a.microbatch, a.stage) for a in actions]
        assert len(set(done)) == len(done)
    last = max(a.stage for a in ends.values())
    assert len(ends) == 16 * (last + 1) + sum(kind == "W" for kind, _, _ in ends)
    for (kind, microbatch, stage), action in ends.items():
        if kind == "F" and stage:
            assert ends["F", microbatch, stage - 1].end_s <= action.start_s
        if kind == "B" and stage < last:
            assert ends["B", microbatch, stage + 1].end_s <= action.start_s
    assert 0 < bubble_fraction(ranks) < 1


def simulate_bubble(ranks: list[list[Action]]) -> float:
    """Return the idle share of the rank with the longest way, if F, I and W of a stage take one second each."""
    queues = [[(a.kind, a.stage, a.microbatch) for a in actions] for actions in ranks]
    work, last = 3 * sum(kind == "F" for kind, _, _ in queues[0]), max(a.stage for actions in ranks for a in actions)
    done: dict[tuple[str, int, int], float] = {}
    clock: list[float] = [0.0] * len(ranks)
    starts: dict[int, float] = {}
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                kind, stage, microbatch = queue[0]
                before = ("F", stage - 1) if kind == "F" else ("B", stage + 1) if stage < last else ("F", stage)
                needs = before[0], before[1], microbatch
                if kind != "W" and needs[1] >= 0 and needs not in done:
                    break
                start = max(clock[rank], 0.0 if kind == "W" else done.get(needs, 0.0))
                starts.setdefault(rank, start)
                clock[rank] = start + (2 if kind == "B" else 1)
                done["B" if kind == "I" else kind, stage, microbatch] = clock[rank]
                queue.pop(0)
    return 1 - work / max(clock[rank] - starts[rank] for rank in starts)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_the_ideal_bubble_is_that_of_the_order_that_ran(
    of_2: list[dict[str, Any]], of_4: list[dict[str, Any]], schedule: str, pp: int
) -> None:
    ranks = (of_2 if pp == 2 else of_4)[0]["timelines"][schedule]
    assert simulate_bubble(ranks) == pytest.approx(ideal_bubble_fraction(schedule, pp, 8), abs=1e-9)


@pytest.mark.parametrize("case", [Case("gpipe", tied=True), Case("zbv", "vision apart"), Case("gpipe", "early fusion")])
def test_stages_hold_every_parameter_once_under_its_own_name(case: Case) -> None:
    split = split_of(case, 4)
    names = {id(p): n for n, p in build_case_model(case).named_parameters()}
    assert names
    model = build_case_model(case)
    whole = dict(model.named_parameters())
    per_layer = list(layer_parameters(model))
    assert len(per_layer) == split.num_layers
    seen: set[str] = set()
    for number in range(split.num_stages):
        stage = VLMStage(model, split, number, token_loss_sum)
        here = dict(stage.named_parameters())
        if stage.holds_tied_copy:
            assert torch.equal(here.pop(EMBEDDING), whole[EMBEDDING])
        assert all(whole[name] is parameter for name, parameter in here.items())
        assert not seen & here.keys()
        seen |= here.keys()
        own = {id(p) for layer in split.layers(number) for p in per_layer[layer]}
        assert {id(p) for p in here.values()} <= own
    assert seen == whole.keys()
