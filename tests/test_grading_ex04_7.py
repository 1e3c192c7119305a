"""Exercise 4.7: a plain controller has all points from the automatic part, wrong ones are named and have less."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from ex04_7_answers import RIGHT, WRONG, Controller, NeverActs, OtherBatch
from lab_cells import hidden_seeds, read_cells, reference, run_blank, stated_points

from vlmcourse.control.episodes import Result, make_episodes, run_episode, score_speed
from vlmcourse.grading import ex04_7
from vlmcourse.grading.control_feedback import explain_controller
from vlmcourse.plots import plot_run

POINTS = {"speed": 8, "safety": 6, "calm": 2}
CHECKS: dict[str, Callable[..., float]] = {
    "speed": ex04_7.check_speed,
    "safety": ex04_7.check_safety,
    "calm": ex04_7.check_calm,
}
VISIBLE = {"seed": 1, "num_runs": 6}


@cache
def runs(kind: type, numbers: tuple[int, ...]) -> list[Result]:
    episodes = make_episodes(1, 8)
    return [run_episode(episodes[number], lambda: kind().observe) for number in numbers]


def test_a_plain_controller_gets_all_points_of_the_automatic_part(capsys: Any) -> None:
    for part, points in POINTS.items():
        assert CHECKS[part](Controller, points, **VISIBLE) == points, (part, capsys.readouterr().out)
    assert "It looks as if" not in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "a class"])
def test_another_style_of_answer_is_run_as_well(name: str) -> None:
    result = ex04_7.play_run(RIGHT[name](), number=0)
    assert result.log.samples_per_s > 1.3 * result.baseline.samples_per_s
    assert result.log.num_oom == 0 and not result.log.refused


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_controller_is_told_its_mistake_and_is_slower_than_a_plain_one(name: str) -> None:
    kind, numbers, words = WRONG[name]
    results = runs(kind, numbers)
    said = explain_controller(results)
    assert any(sentence.startswith(words) for sentence in said), said
    assert score_speed(results) < 0.9 * score_speed(runs(Controller, numbers))


def test_nobody_is_told_a_mistake_that_the_plain_controller_does_not_make() -> None:
    assert explain_controller(runs(Controller, (0, 1, 2, 3, 4, 5))) == []


def test_doing_nothing_has_no_points_and_is_told_why(capsys: Any) -> None:
    for part, points in POINTS.items():
        assert CHECKS[part](NeverActs, points, seed=1, num_runs=6) == 0
    out = capsys.readouterr().out
    assert "never acts" in out and "points for calm are only for a controller that is faster" in out


def test_an_action_that_breaks_the_global_batch_is_refused_counted_and_named() -> None:
    log = ex04_7.play_run(OtherBatch, number=0).log
    assert log.refused and all("the global batch is 64 and must stay it" in sentence for sentence in log.refused)
    assert {row.settings.micro_batch_size * row.settings.accumulation_steps for row in log.rows} == {8}


class Blank:
    def observe(self, metrics: Any) -> Any:
        raise NotImplementedError


class Fails:
    def observe(self, metrics: Any) -> Any:
        return metrics["temperature"]


class Asks:
    def observe(self, metrics: Any) -> Any:
        from vlmcourse.control.controller import ReferenceController

        return ReferenceController().observe(metrics)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Blank, "observe is not solved yet"),
        (Fails, "KeyError: 'temperature'"),
        (Asks, "holds the answer and is not meant here"),
        (3, "this is neither a class with a method observe nor a function, but int"),
        (type("Empty", (), {}), "Empty has no method observe(self, metrics)"),
        (lambda: [], "your function must take (metrics)"),
    ],
)
def test_what_cannot_be_run_gets_no_points_and_one_line(answer: Any, words: str, capsys: Any) -> None:
    assert ex04_7.check_speed(answer, 8, seed=1, num_runs=1) == 0
    out, err = capsys.readouterr()
    assert words in out and not err and len(out.strip().splitlines()) == 1


def test_the_picture_of_a_run_has_its_events_and_its_actions() -> None:
    figure = plot_run(runs(Controller, (0, 1, 2, 3, 4, 5))[0])
    steps, memory, below = figure.axes
    labels = [label.get_text() for label in below.get_yticklabels()]
    assert labels[0] == "images" and {"balance", "micro-batch"} <= set(labels)
    assert "oracle" in steps.get_title() and memory.get_ylabel() == "peak (GiB)"
    assert any("out of memory" in str(line.get_label()) for line in memory.get_lines())


def test_runs_differ_by_seed_and_hold_every_kind() -> None:
    assert make_episodes(1, 6) == make_episodes(1, 6)
    assert [one.world.events for one in make_episodes(1, 6)] != [one.world.events for one in make_episodes(2, 6)]
    kinds = {kind for one in make_episodes(5, 10) for kind in one.world.kinds}
    assert kinds == {"images", "memory", "slow_rank", "link", "eviction", "quiet"}
    assert {one.job.pp for one in make_episodes(5, 10)} == {1, 4}


# --- The notebook ---------------------------------------------------------------------------------------------------

EXERCISE = "ex04_7"


def test_the_notebook_asks_what_is_tested_here() -> None:
    assert stated_points(EXERCISE) == {f"ex04_7_{part}_test": points for part, points in POINTS.items()} | {
        "ex04_7_design": 6
    }
    released = "\n".join(cell.source for cell in read_cells("chapters", EXERCISE).values())
    seeds = [re.findall(r"\d+", line)[0] for line in hidden_seeds(EXERCISE)]
    assert len(seeds) == 3 and not any(seed in released for seed in seeds)
    assert "HIDDEN" not in released and "**An answer.**" not in released and "def relieve" not in released


def test_the_reference_answer_of_the_notebook_is_the_one_tested_here() -> None:
    answer = reference(EXERCISE, "ex04_7_controller")["Controller"]
    for number in (0, 2, 4):
        mine, other = (ex04_7.play_run(kind, number).log for kind in (answer, Controller))
        assert mine.useful_samples == other.useful_samples


def test_the_answer_in_words_keeps_to_its_own_limit() -> None:
    cells = read_cells("solutions", EXERCISE)
    stated = re.search(r"In (\d+) to (\d+) words", cells["ex04_7_design_task"].source)
    assert stated is not None
    answer = cells["ex04_7_design"].source.split("**Rubric")[0].removeprefix("**An answer.**")
    assert int(stated[1]) <= len(answer.split()) <= int(stated[2])


@pytest.mark.notebook
def test_the_blank_release_prints_that_nothing_is_solved_and_gives_no_points() -> None:
    found = run_blank(EXERCISE)
    assert len(found) == 3
    for name, (printed, result) in found.items():
        assert "is not solved yet" in printed and float(result) == 0, name
