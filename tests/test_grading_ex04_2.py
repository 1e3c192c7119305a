"""Exercise 4.2: sizes of batches on generated clusters, and steps on real ranks; right ones lose nothing."""

from __future__ import annotations

from typing import Any
from unittest import mock

import cloudpickle
import ex04_2_answers
import pytest
import torch
from ex04_2_answers import (
    RIGHT_BATCHES,
    RIGHT_CHOICES,
    RIGHT_STEPS,
    WRONG_BATCHES,
    WRONG_CHOICES,
    WRONG_STEPS,
)
from ranks import run_ranks_forked

from vlmcourse.grading import ex04_2, pair_ranks
from vlmcourse.grading.pair_ranks import AnswerReports, CaseReports, run_answers
from vlmcourse.grading.pair_worker import describe_error
from vlmcourse.grading.step_cases import make_step_cases
from vlmcourse.grading.step_feedback import find_common_mistake
from vlmcourse.grading.step_truths import make_truths
from vlmcourse.notebook.failure import RankEnd, RankFailure

pytestmark = pytest.mark.timeout(300)
CASES = make_step_cases(5, 5)
OTHER_COLLECTIVES = ("all_gather", "reduce and broadcast", "objects")
NO_GRADIENT_POINTS = {
    "objects each time": 4.4,
    "loss on one rank": 5,
    "never silent": 4.4,
    "forward outside": 4.4,
    "one large forward": 1.2,
    "losses added up": 1.2,
    "own loss returned": 5,
    "last loss returned": 5.2,
    "returns nothing": 5,
}
"""Points of the steps whose gradient is right; all others earn less than half."""
SMALL_SLIPS = {
    "twice where exact": 2.9,
    "twice or zero": 2.8,
    "twice everywhere": 2.8,
    "twice below": 3.8,
    "nothing below": 3.8,
    "two everywhere": 2.8,
    "zero micro-batches": 3.8,
    "nearest two": 3.8,
    "neighbors besides": 3.2,
}
"""Points of choices that are wrong in few cases by their nature; all others earn half at most."""

# --- a. and b. ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", RIGHT_BATCHES, ids=lambda function: function.__name__)
def test_a_right_batch_size_in_any_style_gets_all_points(function: Any, capsys: Any) -> None:
    for seed in (1, 2, 97531):
        assert ex04_2.check_batch_size(function, 3, seed) == 3
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_a_wrong_batch_size_is_told_its_mistake(name: str, capsys: Any) -> None:
    function, words = WRONG_BATCHES[name]
    for seed in (1, 97531):
        points = ex04_2.check_batch_size(function, 3, seed)
        assert points < (3 if "refus" in name else 1.7)
        said = capsys.readouterr()
        assert words in said.out and not said.err, said.out


@pytest.mark.parametrize("function", RIGHT_CHOICES, ids=lambda function: function.__name__)
def test_right_choices_in_any_style_get_all_points(function: Any, capsys: Any) -> None:
    for seed in (1, 2, 97531):
        assert ex04_2.check_accumulation(function, 4, seed) == 4
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", WRONG_CHOICES)
def test_wrong_choices_are_told_their_mistake(name: str, capsys: Any) -> None:
    function, words = WRONG_CHOICES[name]
    for seed in (1, 97531):
        assert ex04_2.check_accumulation(function, 4, seed) <= SMALL_SLIPS.get(name, 2)
        said = capsys.readouterr()
        assert words in said.out and not said.err, said.out


@pytest.mark.parametrize(("seed", "num_cases"), [(1, 8), (97531, 16)])
@pytest.mark.parametrize("name", ["no cp", "no pp", "no tp", "world size"])
def test_a_forgotten_degree_costs_half_the_points_in_the_notebooks_cases(name: str, seed: int, num_cases: int) -> None:
    points = ex04_2.check_batch_size(WRONG_BATCHES[name][0], 3, seed, num_cases)
    assert points <= 1.7


@pytest.mark.parametrize(("seed", "num_cases"), [(3, 8), (97533, 20)])
@pytest.mark.parametrize("name", ["smaller only", "larger only", "nearer only", "nothing"])
def test_a_single_choice_costs_half_the_points_in_the_notebooks_cases(name: str, seed: int, num_cases: int) -> None:
    assert ex04_2.check_accumulation(WRONG_CHOICES[name][0], 4, seed, num_cases) <= 2


def test_the_teams_numbers_are_graded_one_by_one(capsys: Any) -> None:
    assert ex04_2.check_v100(lambda: (128, 16), 2) == 2
    assert capsys.readouterr().out == ""
    wrong = {(128, 2): "not by what factor", (16, 16): "one rank's", (128, 128): "all 8 GPUs", (64, 16): "multiply"}
    for answer, words in wrong.items():
        assert ex04_2.check_v100(lambda answer=answer: answer, 2) == 1
        assert words in capsys.readouterr().out
    assert ex04_2.check_v100(lambda: (16, 128), 2) == 0
    assert capsys.readouterr().out == ("the two are turned round: first the samples of a step, then the accumulation\n")
    for answer in (128, None, (128,), ("many", 16)):
        assert ex04_2.check_v100(lambda answer=answer: answer, 2) == 0
        assert "return two numbers" in capsys.readouterr().out


def test_clusters_are_of_every_kind() -> None:
    for seed in (1, 2, 97531):
        cases = ex04_2.make_batch_cases(seed, 14)
        exact = [case.target % (case.micro_batch * case.dp_degree) == 0 for case in cases]
        assert 3 <= sum(exact) <= 5
        assert any(case.target < case.micro_batch * case.dp_degree for case in cases)
        for axis in ("tp", "pp", "cp"):
            assert sum(getattr(case, axis) > 1 for case in cases[:12]) > 6, axis
        alone = ex04_2.make_batch_cases(seed, 16)
        for axis in ("tp", "pp", "cp"):
            assert any(case.num_gpus // case.dp_degree == getattr(case, axis) > 1 for case in alone), axis
    assert ex04_2.make_batch_cases(1, 3)[0] == ex04_2.V100


# --- c. -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """What every answer came to, by its name; all are run in one start of two ranks."""
    cloudpickle.register_pickle_by_value(ex04_2_answers)
    answers: dict[str, Any] = {function.__name__: function for function in RIGHT_STEPS}
    answers["right"] = ex04_2_answers._make_step()
    answers |= {way: ex04_2_answers._by_hand(way) for way in OTHER_COLLECTIVES}
    answers |= {name: function for name, (function, _) in WRONG_STEPS.items()}
    try:
        with mock.patch.object(pair_ranks, "run_ranks", run_ranks_forked):
            found = run_answers(
                list(answers.values()), CASES, worker=ex04_2.WORKER, collective_limit_s=5, run_limit_s=250
            )
    finally:
        cloudpickle.unregister_pickle_by_value(ex04_2_answers)
    return dict(zip(answers, found, strict=True))


@pytest.mark.parametrize("name", ["right", *OTHER_COLLECTIVES, *(function.__name__ for function in RIGHT_STEPS)])
def test_a_right_step_in_any_style_gets_all_points(name: str, reports: dict[str, Any], capsys: Any) -> None:
    assert ex04_2.grade_steps(reports[name], 6, len(CASES)) == 6, capsys.readouterr().out
    assert (
        capsys.readouterr().out
        == "gradient right in 5 of 5 cases; exchange right in 5 of 5 cases; loss right in 5 of 5 cases\n"
    )


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_step_is_told_its_mistake(name: str, reports: dict[str, Any], capsys: Any) -> None:
    points = ex04_2.grade_steps(reports[name], 6, len(CASES))
    said = capsys.readouterr()
    assert WRONG_STEPS[name][1] in said.out and not said.err, said.out
    assert points <= NO_GRADIENT_POINTS.get(name, 4.8), said.out


@pytest.mark.parametrize(
    ("name", "num_cases"),
    {"own tokens": 5, "mean of means": 5, "labels shifted": 5, "clipped before the exchange": 2}.items(),
)
def test_one_mistake_behind_all_cases_is_the_only_one_named(
    name: str, num_cases: int, reports: dict[str, Any], capsys: Any
) -> None:
    ex04_2.grade_steps(reports[name], 6, len(CASES))
    first, *others = capsys.readouterr().out.splitlines()
    assert WRONG_STEPS[name][1] in first and first.endswith(f"(and {num_cases - 1} more like it)")
    assert len(others) == 1 and others[0].startswith(f"gradient right in {5 - num_cases} of 5 cases")


def test_a_mistake_is_named_only_where_it_gives_all_cases(reports: dict[str, Any], capsys: Any) -> None:
    # Twice the norm, where clipping is to an eighth of it and there are four micro-batches, is a division by four too.
    wrong = reports["clipped to twice the norm"].cases
    assert {case.case.kind for case in wrong if not ex04_2.is_right(case, "gradient")} == {"clipped", "mute last"}
    assert any(
        "over_steps_not_clipped" in step["fits"] for case in wrong for step in case.by_rank[0]["values"]["steps"]
    )
    assert find_common_mistake(wrong) == find_common_mistake(wrong, "loss") == ""
    ex04_2.grade_steps(reports["clipped to twice the norm"], 6, len(CASES))
    assert "divided" not in capsys.readouterr().out
    assert find_common_mistake(reports["own loss returned"].cases, "loss") == "own_part"


def test_a_mistake_that_would_spoil_a_right_case_is_not_named() -> None:
    def found(*steps: tuple[str, list[str]]) -> CaseReports:
        values = {"steps": [{"gradient": word, "fits": fits} for word, fits in steps]}
        return CaseReports(case=CASES[0], by_rank={rank: {"status": "done", "values": values} for rank in (0, 1)})

    wrong = found(("scaled", ["over_steps", "summed"]))
    assert find_common_mistake([wrong]) == "over_steps"
    assert find_common_mistake([wrong, found(("right", ["right"]))]) == ""
    assert find_common_mistake([wrong, found(("right", ["right", "summed"]))]) == "summed"
    assert find_common_mistake([wrong, found(("nan", []))]) == "over_steps"
    assert (
        find_common_mistake([found(("right", ["right", "kept"]), ("other", ["kept"])), found(("right", ["kept"]))])
        == "kept"
    )
    # What follows a wrong step began with spoilt weights.
    assert find_common_mistake([found(("scaled", ["summed"]), ("other", []))]) == "summed"
    assert find_common_mistake([found(("right", ["right", "summed"]))]) == ""


NOT_CLIPPED = ("right_not_clipped", "clipped_by_value", "clipped_by_largest", "clipped_by_parameter")


def test_every_known_mistake_differs_from_what_is_right() -> None:
    for seed in (1, 5, 97531):
        for case in make_step_cases(seed, 5):
            clips = case.kind in ("clipped", "mute last")
            for is_second, truth in ((step, t) for step, of_step in enumerate(make_truths(case)) for t in of_step):
                right = truth.gradients["right"]
                off = {
                    name: float((truth.gradients[name] - right).norm() / right.norm())
                    for name in ("mean_of_means", "kept", "clipped_each_time", "shifted", "times_ranks", *NOT_CLIPPED)
                }
                assert off["mean_of_means"] > 1e-3 or case.kind == "single", str(case)
                assert off["shifted"] > 1e-3, str(case)
                assert (off["kept"] > 1e-3) == (is_second or case.kind in ("ragged", "mute rank")), str(case)
                for name in (*NOT_CLIPPED, "clipped_each_time"):
                    assert (off[name] > 1e-3) == (clips and not is_second) or is_second, (str(case), name)
                # A clipped gradient hides a wrong factor: one of the two steps must show it.
                assert off["times_ranks"] > 1e-3 or (clips and not is_second), str(case)


def test_what_needs_no_ranks_starts_none(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("vlmcourse.grading.ex04_2.run_answers", None)

    def blank(model, optimizer, micro_batches, max_norm):
        raise NotImplementedError

    assert ex04_2.check_step(blank, 6, seed=1) == 0
    assert ex04_2.check_step(lambda model, batches: 0, 6, seed=1) == 0
    assert capsys.readouterr().out == (
        "accumulation_step is not solved yet\n"
        "your function must take (model, optimizer, micro_batches, max_norm), and takes (model, batches)\n"
    )


def test_ranks_that_end_too_early_are_explained(monkeypatch: Any, capsys: Any) -> None:
    def abort(*_: Any, **__: Any) -> None:
        ends = [
            RankEnd(rank=rank, exit_code=code, ended_at_s=1, was_stopped=code == -15)
            for rank, code in enumerate((-6, -15))
        ]
        raise RankFailure("rank 0 of 2 was killed by SIGABRT (its reason is in the rank's output above)", ends=ends)

    for run_ranks, words in (
        (abort, "rank 0 was ended by SIGABRT, as gloo does where ranks call different collectives"),
        (lambda *_, **__: None, "their processes had ended when 0 of 5 cases were done"),  # os._exit(0)
    ):
        monkeypatch.setattr("vlmcourse.grading.pair_ranks.run_ranks", run_ranks)
        (found,) = run_answers([ex04_2_answers.returns_nothing], CASES, worker=ex04_2.WORKER)
        assert ex04_2.grade_steps(found, 6, len(CASES)) == 0
        said = capsys.readouterr().out
        assert f"The ranks did not come to an end: {words}" in said and "5 more cases were not run" in said
        assert "above" not in said


def test_an_error_on_one_rank_is_named_and_not_the_wait_of_the_other(capsys: Any) -> None:
    # Without ranks: gloo sometimes hangs where a group follows one that broke, as it would in `reports`.
    by_rank = {0: describe_error(RuntimeError("Timed out waiting 5000ms")), 1: describe_error(KeyError("inputs"))}
    ex04_2.grade_steps(AnswerReports(cases=[CaseReports(case=CASES[0], by_rank=by_rank)]), 6, len(CASES))
    said = capsys.readouterr().out
    assert "rank 1 failed with KeyError: 'inputs'" in said and "waited" not in said and "4 more cases" in said
    tensor = torch.nn.Parameter(torch.zeros(3, 4))  # as a key of a dictionary; its numbers would fill the page
    assert describe_error(KeyError(tensor))["error"] == "KeyError: a Parameter of shape [3, 4]"
    said = describe_error(RuntimeError("bad parameter", tensor))["error"]
    assert said == "RuntimeError: bad parameter, a Parameter of shape [3, 4]"
    by_rank[1] = describe_error(RuntimeError("Connection closed by peer [127.0.0.1]:5"))
    ex04_2.grade_steps(AnswerReports(cases=[CaseReports(case=CASES[0], by_rank=by_rank)]), 6, len(CASES))
    assert "ranks 0, 1 waited for the other in vain" in capsys.readouterr().out


def test_a_process_that_breaks_off_within_a_case_is_explained_there_too(capsys: Any) -> None:
    lost = CaseReports(case=CASES[0], by_rank={1: {"status": "lost", "error": "", "printed": ""}})
    ex04_2.grade_steps(AnswerReports(cases=[lost], failure="rank 0 was ended by SIGABRT"), 6, len(CASES))
    assert "rank 0 was ended by SIGABRT" in capsys.readouterr().out


def test_an_exchange_that_no_collective_shows_is_not_passed_over_in_silence(capsys: Any) -> None:
    step = {"gradient": "right", "fits": ["right"], "num_steps": 1, "loss": "right", "loss_fits": ["right"]}
    step |= {"exchanges": 0.25, "kept_samples": 1, "largest": 1, "forward_outside": False}
    by_rank = {rank: {"status": "done", "values": {"steps": [step, step]}} for rank in (0, 1)}
    assert ex04_2.grade_steps(AnswerReports(cases=[CaseReports(case=CASES[0], by_rank=by_rank)]), 6, 1) == 4
    assert "the collectives of the step carry 25% of its numbers" in capsys.readouterr().out
