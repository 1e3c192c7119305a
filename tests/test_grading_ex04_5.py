"""Exercise 4.5: traces of many runs; right answers in any style lose nothing, wrong ones are told what they mistook."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import pytest
from ex04_5_answers import FIX, RIGHT, WRONG, find_evidence, find_period, plain, share
from lab_cells import hidden_seeds, read_cells, reference, run_blank, stated_points

from vlmcourse import plots
from vlmcourse.grading import ex04_5
from vlmcourse.grading.trace_answers import CAUSE_MEANINGS, FIXES, RIGHT_FIXES, SYNONYMS, read_answer
from vlmcourse.grading.trace_cases import TraceCase, make_cases, make_period_cases
from vlmcourse.grading.trace_faults import CAUSES, SECONDS
from vlmcourse.grading.trace_feedback import SYMPTOM_FIXES
from vlmcourse.grading.trace_sources import HEALTHY, read_source, shape_of_phase
from vlmcourse.monitor.recorded import recorded_run
from vlmcourse.monitor.step_log import read_step_log

CHECKS: dict[str, Callable[..., float]] = {
    "cause": ex04_5.check_cause,
    "evidence": ex04_5.check_evidence,
    "fix": ex04_5.check_fix,
}
POINTS = {"cause": 7, "evidence": 4, "fix": 3}
CASES = {1: 24, 384502: 36}
"""By seed: number of traces, as the visible and the hidden tests have them."""


@pytest.fixture(scope="module")
def cases() -> list[TraceCase]:
    return make_cases(5, 4 * len(CAUSES))


def grade(part: str, answer: Any, seed: int) -> float:
    return CHECKS[part](answer, POINTS[part], seed, CASES[seed])


# --- Answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", CASES)
def test_a_right_answer_in_any_style_gets_all_points_and_no_word(seed: int, capsys: Any) -> None:
    for answer in RIGHT:
        assert {part: grade(part, answer, seed) for part in POINTS} == POINTS, answer.__name__
    assert ex04_5.check_period(find_period, 3, seed, 24) == 3
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_loses_points_where_it_is_wrong_and_is_told_its_mistake(name: str, capsys: Any) -> None:
    answer, words = WRONG[name]
    for part, said in words.items():
        points = grade(part, answer, 1)
        out, err = capsys.readouterr()
        assert points < 0.95 * POINTS[part], (points, out)
        assert said in out and not err, out


def test_constant_answers_earn_under_a_third(capsys: Any) -> None:
    for cause, quantity, fix in (
        ("healthy", None, "nothing"),
        ("queue_runs_empty", "data_wait_s", "more_workers"),
        ("slow_links", "communication_s", "overlap_communication"),
        ("frequent_saves", "between_s", "save_less_often"),
    ):
        for rank, period in ((None, None), (0, None), (None, 7)):

            def same(
                _: Any,
                given: tuple[Any, ...] = (cause, (quantity, rank, period), fix),
            ) -> Any:
                return given

            assert grade("evidence", same, 384502) < POINTS["evidence"] / 3, capsys.readouterr().out
        assert grade("cause", same, 384502) < POINTS["cause"] / 3
        assert grade("fix", same, 384502) < POINTS["fix"] / 3
    for period in (None, 5, 7, 9):
        assert ex04_5.check_period(lambda _, period=period: period, 3, 620914, 24) < 1, period


def test_wrong_periods_are_told_what_they_are(capsys: Any) -> None:
    def count(seconds: list[float]) -> float | None:
        period = find_period(seconds)
        return period and len(seconds) / period

    assert ex04_5.check_period(count, 3, 1, 24) < 2
    assert "the number of spikes was returned" in capsys.readouterr().out
    assert ex04_5.check_period(lambda _: None, 3, 1, 24) < 1
    assert "regular spikes were overlooked" in capsys.readouterr().out
    assert ex04_5.check_period(lambda seconds: find_period(seconds) or 5, 3, 1, 24) < 3
    assert "a steady wait, noise or a single spike" in capsys.readouterr().out


def test_a_blank_answer_or_another_form_earns_nothing_and_says_why(capsys: Any) -> None:
    def blank(_: Any) -> Any:
        raise NotImplementedError

    assert [check(blank, 2, 1) for check in CHECKS.values()] == [0, 0, 0]
    assert ex04_5.check_period(blank, 2, 1) == 0
    assert capsys.readouterr().out.splitlines() == ["diagnose is not solved yet"] * 3 + [
        "find_period is not solved yet"
    ]
    for part, answer, said in (
        ("cause", None, "not a function but NoneType"),
        ("cause", lambda: 1, "your function must take (trace)"),
        ("cause", lambda _: "queue_runs_empty", "return cause, evidence and fix"),
        ("evidence", lambda _: ("queue", ("data_wait_s", "rank 1"), "more_workers"), "evidence is a dict"),
        ("cause", lambda _: ("bad luck", None, "nothing"), "no cause is named 'bad luck': choose from healthy, slow_d"),
        ("fix", lambda _: ("queue", None, "buy another"), "no fix is named 'buy another': choose from nothing, more_w"),
        ("cause", lambda trace: 1 / 0, "ZeroDivisionError"),
    ):
        assert CHECKS[part](answer, 2, 1, 12) == 0
        assert said in capsys.readouterr().out


def test_a_part_that_cannot_be_read_costs_nothing_of_the_others(capsys: Any) -> None:
    spoilt = {
        "cause": lambda trace: ("bad luck", *plain(trace)[1:]),
        "evidence": lambda trace: (plain(trace)[0], ("data_wait_s", "rank 1"), plain(trace)[2]),
        "fix": lambda trace: (*plain(trace)[:2], "buy another"),
    }
    for wrong, answer in spoilt.items():
        assert {part: CHECKS[part](answer, 2, 1, 12) for part in POINTS} == {p: 2 * (p != wrong) for p in POINTS}
    capsys.readouterr()
    ex04_5.check_fix(lambda trace: (*plain(trace)[:2], "nothing"), 2, 1)
    assert "'nothing' is for healthy runs" in capsys.readouterr().out
    ex04_5.check_fix(lambda trace: (*plain(trace)[:2], "more_workers"), 2, 1)
    assert "a healthy run was given a fix: there the fix is 'nothing'" in capsys.readouterr().out
    with pytest.raises(ValueError, match="number = '7'"):
        ex04_5.graded_trace("7")  # type: ignore[arg-type]


def test_the_package_does_not_answer_for_the_learner(capsys: Any) -> None:
    from vlmcourse.monitor.diagnosis.findings import build_fix

    def asks_package(trace: Any) -> Any:
        build_fix("x", 1.0, 0.5)
        return plain(trace)

    def asks_generator(trace: Any) -> Any:
        make_cases(1, 1)
        return plain(trace)

    for answer in (asks_package, asks_generator):
        assert ex04_5.check_cause(answer, 7, 1, 12) == 0
        assert "holds the answer and is not meant here" in capsys.readouterr().out


def test_a_learner_may_change_the_trace_and_gets_the_next_one_whole() -> None:
    def eats(trace: dict[str, Any]) -> Any:
        found = plain(trace)
        trace.clear()
        return found

    for part in POINTS:
        assert CHECKS[part](eats, 2, 1, 12) == 2


def test_forms_of_an_answer_that_are_read_alike() -> None:
    for value in (
        ("queue", ("data_wait", 1, 5.0), "More workers"),
        {
            "Cause": "queue-runs-empty",
            "evidence": {"quantity": "data_wait_s", "rank": 1, "period": 5},
            "fix": "more_workers",
        },
        ["QUEUE_RUNS_EMPTY", ["data_wait_s", 1, 5], "more-workers"],
    ):
        answer, wrong = read_answer(value)
        assert answer is not None and not wrong
        assert (answer.cause, answer.quantity, answer.rank, answer.period, answer.fix) == (
            "queue_runs_empty",
            "data_wait_s",
            1,
            5.0,
            "more_workers",
        )
    answer, _ = read_answer(("healthy", None, None))
    assert answer is not None and answer.quantity is None and answer.fix == "nothing"
    answer, _ = read_answer(("straggler", "forward_s", "replace_rank"))
    assert answer is not None and (answer.cause, answer.quantity, answer.rank) == ("slow_rank", "forward_s", None)
    answer, _ = read_answer(("straggler", ("forward_s", 0.5), "replace_rank"))
    assert answer is not None and answer.rank == -1


def test_names_fit_together() -> None:
    assert CAUSES == tuple(CAUSE_MEANINGS) == tuple(RIGHT_FIXES) and set(FIX) == set(CAUSES)
    assert set(SYNONYMS.values()) <= set(CAUSES) and not set(SYNONYMS) & set(CAUSES)
    assert {fix for fixes in RIGHT_FIXES.values() for fix in fixes} < set(FIXES) > set(SYMPTOM_FIXES)
    for fix, (causes, _) in SYMPTOM_FIXES.items():
        assert not any(fix in RIGHT_FIXES[cause] for cause in causes)


# --- Traces ---------------------------------------------------------------------------------------------------------


def test_all_causes_come_equally_often_and_seeds_differ(cases: list[TraceCase]) -> None:
    assert set(Counter(case.cause for case in cases).values()) == {4}
    again = make_cases(5, 3)
    assert [case.trace for case in again] == [case.trace for case in make_cases(5, 3)]
    other = make_cases(6, 3)
    assert all(a.trace != b.trace for a, b in zip(again, other, strict=True))
    assert any(case.rank is not None and case.cause in ("slow_storage", "slow_decoder") for case in make_cases(5, 120))


def test_ranks_of_a_trace_keep_step_and_lists_are_plain(cases: list[TraceCase]) -> None:
    for case in cases:
        ranks = case.trace["ranks"]
        lengths = {len(values) for rank in ranks for values in rank.values()}
        assert len(lengths) == 1 and all(rank.keys() == ranks[0].keys() for rank in ranks)
        assert all(type(value) in (int, float) and value >= 0 for rank in ranks for v in rank.values() for value in v)
        total = [[sum(rank[key][i] for key in SECONDS) for i in range(2, *lengths)] for rank in ranks]
        for first, other in zip(total[0], total[-1], strict=True):
            assert other == pytest.approx(first, rel=0.002)  # numbers have four digits
        assert all(0 <= value <= 100 for rank in ranks for value in rank["gpu_percent"])


def test_a_cause_takes_a_fifth_of_the_time_and_nothing_else_much(cases: list[TraceCase]) -> None:
    for case in cases:
        lost = {key: share(case.trace, key) for key in SECONDS}
        own = {"data_wait_s": max(lost["data_wait_s"]), "between_s": max(lost["between_s"])}
        own["communication_s"] = min(lost["communication_s"])
        key = find_evidence(case.trace)[0]
        assert all(part < 0.12 for name, part in own.items() if name != key), (case, case.cause, own)
        if key in own:
            assert own[key] > 0.2, (case, case.cause, own)
        memory = [value / case.trace["memory_limit_gb"] for value in case.trace["ranks"][0]["memory_gb"][2:]]
        swing = max(memory) - min(memory)
        assert (swing > 0.15 and max(memory) > 0.95) if case.cause == "memory_thrash" else swing < 0.02
        assert case.quantities or case.cause == "healthy"


def test_a_gpu_idles_while_it_waits_and_evaluates_in_pauses(cases: list[TraceCase]) -> None:
    for case in cases:
        one = case.trace["ranks"][case.rank or 0]
        use = one["gpu_percent"][2:]
        if case.cause in ("queue_runs_empty", "frequent_saves"):
            assert min(use) < 45 < 70 < median(use)
        if case.cause in ("healthy", "frequent_evaluation"):
            assert median(use) > 70
        if case.cause == "tiny_micro_batches":
            assert max(use) < 50
        busy = fmean(one["loader_cpu_percent"])
        assert (busy > 90) == (case.cause in ("queue_runs_empty", "slow_decoder"))
        assert (busy < 20) == (case.cause == "slow_storage")


def test_steps_come_from_the_recorded_runs() -> None:
    logs = read_step_log(recorded_run("healthy"))
    pieces = read_source("healthy").pieces
    assert len(pieces) == len(logs[0].steps) - 2 and all(len(piece) == 2 for piece in pieces)
    computing = [piece[0]["forward_s"] + piece[0]["backward_s"] for piece in pieces]
    assert median(computing) == pytest.approx(1, abs=0.05)  # in units of itself
    waits = [record.communication_s or 0.0 for record in logs[0].steps]
    assert read_source("healthy").exposed[0] < max(waits)
    shape = shape_of_phase("slow links", "communication_s", 0)
    recorded = [record.communication_s or 0.0 for record in read_step_log(recorded_run("slow links"))[0].steps[2:]]
    assert [value * fmean(recorded) for value in shape] == pytest.approx(recorded)
    for name in HEALTHY:
        assert all(piece[0]["data_wait_s"] < 0.2 for piece in read_source(name).pieces)


def test_the_first_trace_has_the_symptoms_of_the_task() -> None:
    trace = ex04_5.first_trace()
    cause, (quantity, rank, period), _ = plain(trace)
    assert (cause, quantity, rank) == ("queue_runs_empty", "data_wait_s", None) and period
    use = trace["ranks"][0]["gpu_percent"][2:]
    assert (
        len(trace["ranks"]) == 4
        and median(use) > 90
        and min(use) < 25
        and min(trace["ranks"][0]["loader_cpu_percent"]) > 90
    )
    assert trace == ex04_5.first_trace()


def test_traces_to_practise_on_are_what_they_say() -> None:
    for cause in CAUSES:
        assert plain(ex04_5.practice_trace(cause, 3))[0] == cause
    assert ex04_5.practice_trace("healthy", 1) != ex04_5.practice_trace("healthy", 2)
    assert ex04_5.graded_trace(7) == make_cases(1, 24)[7].trace
    with pytest.raises(ValueError, match="must be one of healthy"):
        ex04_5.practice_trace("bad luck", 1)
    with pytest.raises(ValueError, match="traces 0 to 23"):
        ex04_5.graded_trace(24)


def test_period_cases_hold_both_kinds() -> None:
    found = make_period_cases(3, 40)
    assert sum(case.period is None for case in found) == 10
    assert {case.period for case in found} > {None, 5, 8}


def test_a_trace_is_drawn_with_all_of_its_seconds() -> None:
    trace = ex04_5.first_trace()
    figure = plots.plot_trace(trace, rank=1)
    use, memory, time = figure.axes
    limit: Any = memory.lines[1].get_ydata()
    assert len(use.lines) == 4 + 1 and limit[0] == trace["memory_limit_gb"]
    drawn_s = sum(bar.get_height() for bars in time.containers for bar in bars)
    assert drawn_s == pytest.approx(sum(sum(trace["ranks"][1][key]) for key in SECONDS))
    with pytest.raises(ValueError, match="ranks 0 to 3"):
        plots.plot_trace(trace, rank=4)


# --- The notebook ---------------------------------------------------------------------------------------------------

EXERCISE = "ex04_5"
SOLUTIONS = ("trace", "period", "evidence", "choose", "diagnose")


def test_the_notebook_asks_what_is_tested_here() -> None:
    assert stated_points(EXERCISE) == {
        "ex04_5_period_test": 3,
        **{f"ex04_5_{part}_test": points for part, points in POINTS.items()},
        "ex04_5_words": 3,
    }
    released = "\n".join(cell.source for cell in read_cells("chapters", EXERCISE).values())
    seeds = [re.findall(r"\d+", line)[0] for line in hidden_seeds(EXERCISE)]
    assert len(seeds) == 4 and not any(seed in released for seed in seeds)
    assert "HIDDEN" not in released and "**An answer.**" not in released and "decodes =" not in released


def test_the_reference_answers_of_the_notebook_earn_all_points() -> None:
    space = reference(EXERCISE, *(f"ex04_5_{name}" for name in SOLUTIONS))
    diagnose: Any = space["diagnose"]
    for seed in CASES:
        assert {part: grade(part, diagnose, seed) for part in POINTS} == POINTS
    assert ex04_5.check_period(space["find_period"], 3, 620914, 24) == 3
    cause, (quantity, rank, period), fix = diagnose(space["trace"])
    assert (cause, quantity, rank, fix) == (
        "queue_runs_empty",
        "data_wait_s",
        None,
        "more_workers",
    ) and 5 <= period <= 7


def test_a_blank_helper_is_named_and_costs_only_what_depends_on_it(capsys: Any) -> None:
    """Some causes are told by their spikes, so that naming these needs `find_period`."""
    said: dict[str, set[str]] = {}
    earned: dict[str, dict[str, float]] = {}
    space = reference(EXERCISE, *(f"ex04_5_{name}" for name in SOLUTIONS))
    for helper in ("choose_fix", "find_evidence", "find_period"):
        solved = space[helper]
        exec(f"def {helper}(*_):\n    raise NotImplementedError()", space)
        blank = space[helper]
        earned[helper] = {part: CHECKS[part](space["diagnose"], POINTS[part], 1, 12) for part in POINTS}
        assert space[helper] is blank  # as the learner left it
        space[helper] = solved
        out = capsys.readouterr().out
        said[helper] = set(out.splitlines())
        assert "diagnose is not solved yet" not in out and "Blank" not in out, out
    assert earned["choose_fix"] == POINTS | {"fix": 0}
    assert said["choose_fix"] == {"choose_fix is not solved yet; it is needed for fix in 12 of 12 traces"}
    assert earned["find_evidence"] == dict.fromkeys(POINTS, 0)
    assert said["find_evidence"] == {
        "find_evidence is not solved yet; it is needed for cause in 12, evidence in 12, fix in 12 of 12 traces"
    }
    (line,) = (line for line in said["find_period"] if line.startswith("find_period is not solved yet"))
    num_causes, num_evidence, num_fixes = map(int, re.findall(r" in (\d+)", line))
    assert 0 < num_causes == num_fixes < 12
    known = 1 - num_causes / 12  # of these all is right but the period
    assert earned["find_period"]["cause"] == pytest.approx(7 * known, abs=0.01)
    assert earned["find_period"]["fix"] == pytest.approx(3 * known, abs=0.01)
    assert 4 * known * 0.75 <= earned["find_period"]["evidence"] + 0.01 < 4 * known and num_evidence > num_causes
    assert any(line.endswith(": it needs find_period, which is not solved yet") for line in said["find_period"])
    assert not any("is not the period" in line or "It looks as if" in line for line in said["find_period"])


def test_the_answer_in_words_keeps_to_its_own_limit() -> None:
    cells = read_cells("solutions", EXERCISE)
    stated = re.search(r"In (\d+) to (\d+) words", cells["ex04_5_words_task"].source)
    assert stated is not None
    answer = cells["ex04_5_words"].source.split("**Rubric")[0].removeprefix("**An answer.**")
    assert int(stated[1]) <= len(answer.split()) <= int(stated[2])


@pytest.mark.notebook
def test_the_blank_release_prints_that_nothing_is_solved_and_gives_no_points() -> None:
    found = run_blank(EXERCISE)
    assert len(found) == 4
    for name, (printed, result) in found.items():
        assert "is not solved yet" in printed and float(result) == 0, name
