"""Lab 5.1: ZeRO-1 optimizers on real ranks, several in one start; right ones of any style lose nothing."""

from __future__ import annotations

import gc
import re
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import lab05_1_answers
import nbformat
import numpy as np
import pytest
import torch
from lab05_1_answers import (
    ALSO_ON_THREE,
    OUT_OF_ORDER,
    RIGHT,
    WRONG,
    AllInItsClass,
    CountsCalls,
    HoldsAll,
    NotQuiteEqual,
    SendsMoments,
    ZeroesGradients,
)
from lab_cells import hidden_seeds, read_cells, run_blank, stated_points
from ranks import run_ranks_forked

from vlmcourse.grading import lab05_1, pair_ranks, zero_kept
from vlmcourse.grading.pair_ranks import AnswerReports, run_answers
from vlmcourse.grading.zero_cases import STATE_BYTES, make_params, make_zero_cases
from vlmcourse.grading.zero_truths import MISTAKES, TOLERANCE, Update, find_fits, is_same, make_paths, play

ON_TWO, ON_THREE = make_zero_cases(5, 2, 3), make_zero_cases(5, 3, 2)
CASES = [*ON_TWO, *ON_THREE]
ONLY_IN_SKIPPED = ("zeros", "zeroed", "decays_without", "calls")
"""Mistakes that a parameter without a gradient is needed to see."""

pytestmark = pytest.mark.timeout(600)  # on an idle machine the ranks of all answers take half a minute


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """What every answer came to, by its name: all are run in one start of two ranks, some in one of three."""
    found = run([*RIGHT, *WRONG], ON_TWO)
    for name, more in run([*RIGHT, *ALSO_ON_THREE], ON_THREE).items():
        found[name].cases += more.cases
    return found


def run(answers: list[Any], cases: list[Any]) -> dict[str, Any]:
    cloudpickle.register_pickle_by_value(lab05_1_answers)
    try:
        with mock.patch.object(pair_ranks, "run_ranks", run_ranks_forked):
            found = run_answers(answers, cases, worker=lab05_1.WORKER, collective_limit_s=5, run_limit_s=250)
    finally:
        cloudpickle.unregister_pickle_by_value(lab05_1_answers)
    return dict(zip((answer.__name__ for answer in answers), found, strict=True))


@pytest.mark.parametrize("answer", RIGHT, ids=lambda answer: answer.__name__)
def test_a_right_optimizer_in_any_style_gets_all_points(answer: Any, reports: dict[str, Any], capsys: Any) -> None:
    points, said = lab05_1.grade_optimizer(reports[answer.__name__], 10, len(CASES)), capsys.readouterr().out
    assert points == 10, said
    assert (
        said
        == "; ".join(
            f"{name} right in 5 of 5 cases" for name in ("weights", "state", "equal on all ranks", "bytes sent")
        )
        + "\n"
    )


@pytest.mark.parametrize("answer", WRONG, ids=lambda answer: answer.__name__)
def test_a_wrong_optimizer_is_told_its_mistake(answer: Any, reports: dict[str, Any], capsys: Any) -> None:
    num_cases = len(CASES) if answer in ALSO_ON_THREE else len(ON_TWO)
    points = lab05_1.grade_optimizer(reports[answer.__name__], 10, num_cases)
    said = capsys.readouterr()
    most, words = WRONG[answer]
    assert words in said.out and not said.err, said.out
    assert points == most, said.out


def test_plain_ddp_earns_less_than_half_and_than_zero1_with_a_slip() -> None:
    slips = min(WRONG[answer][0] for answer in (CountsCalls, ZeroesGradients, SendsMoments, NotQuiteEqual))
    assert WRONG[HoldsAll][0] == WRONG[AllInItsClass][0] < 5 < slips


def test_what_is_not_looked_at_is_not_called_wrong(reports: dict[str, Any], capsys: Any) -> None:
    for name, counts in (
        (
            "Summed",
            "weights right in 0 of 3 cases; state, equal on all ranks, bytes sent: not counted where the weights",
        ),
        (
            "CountsCalls",
            "weights right in 2 of 3 cases; state right in 2 of 2 cases; equal on all ranks right in 2 of 2",
        ),
        (
            "KeepsTheRow",
            "weights right in 3 of 3 cases; state right in 0 of 3 cases; equal on all ranks, bytes sent: not counted "
            "where the state is",
        ),
    ):
        lab05_1.grade_optimizer(reports[name], 10, len(ON_TWO))
        assert capsys.readouterr().out.splitlines()[-1].startswith(counts), name


def test_collectives_in_another_order_on_each_rank_are_told_so(capsys: Any) -> None:
    for name, reports in run(list(OUT_OF_ORDER), CASES[:1]).items():
        assert lab05_1.grade_optimizer(reports, 10, 1) == 0
        said = capsys.readouterr().out
        assert "the same collectives in the same order" in said, (name, said)


def test_after_a_case_that_fails_or_never_ends_no_other_is_run(reports: dict[str, Any]) -> None:
    for name in ("Fails", "NeverEnds"):
        assert [case.case for case in reports[name].cases] == ON_TWO[:1], name


def test_a_mistake_is_named_only_where_it_gives_the_cases_of_all_numbers_of_ranks(
    reports: dict[str, Any], capsys: Any
) -> None:
    # On two ranks half the learning rate is what averaging the weights gives too.
    cases = reports["HalfTheRate"].cases
    words = "weights are averaged over the ranks"
    lab05_1.grade_optimizer(AnswerReports(cases=cases[: len(ON_TWO)]), 10, len(ON_TWO))
    assert words in capsys.readouterr().out
    lab05_1.grade_optimizer(AnswerReports(cases=cases), 10, len(CASES))
    assert words not in capsys.readouterr().out


def test_the_update_played_right_is_that_of_torch_and_each_mistake_differs() -> None:
    for case in CASES:
        paths = make_paths(case)
        for got, right in zip(play(case, Update()), paths["right"], strict=True):
            assert (got - right).abs().max() < TOLERANCE / 2
        assert all(float(weights.abs().max()) < 1.1 for weights in paths["right"])
        assert find_fits(paths["right"], paths) == [
            "right",
            *(ONLY_IN_SKIPPED if case.kind != "skipped" else ()),
        ]
        for word in MISTAKES:
            assert word in find_fits(paths[word], paths)
            off = float((paths[word][-1] - paths["right"][-1]).abs().max())
            assert off > 5e-4 or (word in ONLY_IN_SKIPPED and case.kind != "skipped"), (word, str(case))


@pytest.mark.parametrize("seed", [1, 5, 770413])
def test_cases_are_such_that_every_rule_can_be_seen(seed: int) -> None:
    for case in (case for world_size in (2, 3) for case in make_zero_cases(seed, world_size, 3)):
        trained = case.trained_sizes
        assert sum(case.sizes) % 2 and sum(case.sizes) % 3
        assert sum(size % case.world_size > 0 for size in trained) > 4
        assert case.most_state_bytes < 0.97 * STATE_BYTES * sum(trained)
        assert (case.frozen is not None) == (case.kind == "frozen")
        assert bool(case.skipped) == (case.kind == "skipped")
        assert all(is_same(a.detach(), b.detach()) for a, b in zip(make_params(case), make_params(case), strict=True))
        for rank in range(case.world_size):  # whole parameters dealt by index keep within the bound
            dealt = [size for size, index in zip(case.sizes, range(len(case.sizes)), strict=True)]
            share = sum(dealt[rank :: case.world_size])
            assert STATE_BYTES * share < case.most_state_bytes


def test_what_only_a_thread_of_gloo_holds_is_waited_for_and_what_python_holds_is_not(monkeypatch: Any) -> None:
    monkeypatch.setattr(zero_kept, "IN_FLIGHT_LIMIT_S", 60.0)
    case, holders = ON_TWO[0], [torch.futures.Future(), torch.futures.Future()]
    gc.collect()
    gc.freeze()
    try:
        holders[0].set_result(torch.zeros(10_000))  # held in C++ alone, as a collective's tensors are
        threading.Timer(0.2, holders.pop, [0]).start()
        assert zero_kept.measure_kept(case, None, [], [], sys.modules).num_bytes < 1000
        mine = [torch.zeros(sum(case.sizes)), np.zeros(2 * sum(case.sizes), dtype=np.float32)[::2], (b"ab", 0.25)]
        kept = zero_kept.measure_kept(case, None, [], [], sys.modules)
        assert kept.num_bytes - 12 * sum(case.sizes) < 1000 and kept.copies == 3 and mine
    finally:
        gc.unfreeze()


def test_what_needs_no_ranks_starts_none(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("vlmcourse.grading.lab05_1.run_answers", None)

    class Blank:
        def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float) -> None:
            raise NotImplementedError

        def step(self) -> None:
            raise NotImplementedError

    class NoStep(Blank):
        def __init__(self, params: Any) -> None:
            self.params = params

        step = None  # type: ignore[assignment]

    class Others:
        def __init__(self, params):
            self.params = params

        def step(self):
            return None

        def zero_grad(self):
            return None

    for answer in (Blank, NoStep, Others, torch.optim.AdamW([torch.zeros(1)])):
        assert lab05_1.check_optimizer(answer, 10, seed=1) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Zero1AdamW is not solved yet",
        "Zero1AdamW lacks step() and zero_grad()",
        "your function must take (params, lr, betas, eps, weight_decay), and takes (params)",
        "Zero1AdamW must be a class, not AdamW",
    ]


# --- The notebook ---------------------------------------------------------------------------------------------------

EXERCISE = "lab05_1"


def test_the_notebook_asks_what_is_tested_here() -> None:
    assert stated_points(EXERCISE) == {"lab05_1_optimizer_test": 10}
    released = "\n".join(cell.source for cell in read_cells("chapters", EXERCISE).values())
    shares = lab05_1.SHARE_OF_WEIGHTS, lab05_1.SHARE_OF_STATE, lab05_1.SHARE_OF_EQUALITY, lab05_1.SHARE_OF_TRAFFIC
    chapter = Path(__file__).parents[1] / "chapters/ch05_zero_offload/ch05_zero_offload.ipynb"
    [table] = [cell.source for cell in nbformat.read(chapter, 4).cells if cell.get("id") == "lab05_1_points"]
    assert tuple(int(points) for points in re.findall(r"\| (\d+) \|$", table, re.M)) == shares
    assert f"plain DDP earns {WRONG[HoldsAll][0]}." in table
    seeds = [re.findall(r"\d+", line)[0] for line in hidden_seeds(EXERCISE)]
    assert len(seeds) == 1 and seeds[0] not in released
    assert "HIDDEN" not in released and "loads.index" not in released
    assert read_cells("chapters", EXERCISE).keys() == read_cells("solutions", EXERCISE).keys()


@pytest.mark.notebook
def test_the_blank_release_says_that_nothing_is_solved_and_gives_no_points() -> None:
    assert run_blank(EXERCISE) == {"lab05_1_optimizer_test": ("Zero1AdamW is not solved yet", "0.0")}
