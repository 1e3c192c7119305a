"""Runs watched through their files: each line is read once, and what happens to a folder is seen as what it is."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_folders import HandmadeRun, end_of, start_of

from vlmcourse.monitor.line_tail import LineTail
from vlmcourse.monitor.live_run import LAST_BYTES, LiveRun, find_run_problem
from vlmcourse.monitor.run_process import describe_process, is_process_alive
from vlmcourse.monitor.run_view import FINISHED, RUNNING, STOPPED, WAITING, RunView, list_facts, list_remarks
from vlmcourse.monitor.step_log import RESUME, EventRecord, StepLogWriter, StepRecord, step_log_path


class Clock:
    """A wall clock that a test sets."""

    now_s = end_of(0)

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def dead_pid() -> Iterator[dict[str, Any]]:
    """The mark of a process that has ended."""
    code = "import json; from vlmcourse.monitor.run_process import describe_process as d; print(json.dumps(d()))"
    yield json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout)


def test_a_tail_reads_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LineTail(path)
    assert tail.read() == ([], False)
    path.write_text("a\nb\nc")
    assert tail.read() == (["a", "b"], False)
    with open(path, "r+") as file:
        file.write("X")  # what was read is not read again
        file.seek(0, os.SEEK_END)
        file.write("c\nd\n")
    assert tail.read() == (["cc", "d"], False)
    assert tail.read() == ([], False)


@pytest.mark.parametrize("what", ["cut", "replaced", "moved", "removed"])
def test_a_tail_says_when_a_file_is_another_one(tmp_path: Path, what: str) -> None:
    path = tmp_path / "run" / "log"
    path.parent.mkdir()
    path.write_text("a\nb\n")
    tail = LineTail(path)
    tail.read()
    if what == "cut":
        path.write_text("n\n")
    elif what == "replaced":
        (tmp_path / "part").write_text("n\nb\nc\n")
        os.replace(tmp_path / "part", path)
        assert tail.read() == (["n", "b", "c"], True)
        return
    elif what == "moved":
        path.parent.rename(tmp_path / "run.1")
        path.parent.mkdir()
        path.write_text("n\n")
    else:
        path.unlink()
        assert tail.read() == ([], True)
        path.write_text("n\n")
        assert tail.read() == (["n"], False)
        return
    assert tail.read() == (["n"], True)


def test_a_long_file_is_read_from_near_its_end_and_from_a_whole_line_on(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {number}\n" for number in range(1000)))
    lines = LineTail(tmp_path / "log", last_bytes=30).read().lines
    assert lines == ["line 997", "line 998", "line 999"]
    run = HandmadeRun(tmp_path / "long", world_size=1)
    run.write_step(1)
    path = step_log_path(run.folder, 0)
    line = path.read_text()
    path.write_text("nonsense\n" + line * (2 * LAST_BYTES // len(line)) + line.replace('"step": 1,', '"step": 7,'))
    view = LiveRun(run.folder).read()
    assert (view.step, view.problem) == (7, "")


def test_the_life_of_a_run(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "tiny"
    live = LiveRun(folder, clock)
    assert live.read() == RunView(folder=str(folder), state=WAITING)
    run = HandmadeRun(folder, num_steps=4)
    assert (live.read().state, live.read().num_steps, live.read().world_size) == (WAITING, 4, 2)
    step_log_path(folder, 1).rename(tmp_path / "later")
    assert LiveRun(folder, clock).read().world_size == 2  # as run.json says, though a rank has no file yet
    (tmp_path / "later").rename(step_log_path(folder, 1))
    for step in (1, 2, 3):
        run.write_step(step)
    run.write_row(2)
    clock.now_s = end_of(3) + 0.25
    view = live.read()
    assert (view.state, view.step, view.losses, view.tokens_per_s) == (RUNNING, 3, [(2, 0.5)], [(2, 200.0)])
    assert [rank.since_step_s for rank in view.ranks] == [pytest.approx(0.25)] * 2
    assert view.running_s == pytest.approx(1.75)
    run.write_step(4)
    run.write_event("evaluation", 4, 2.0)
    run.finish()
    clock.now_s += 1000
    view = live.read()
    assert (view.state, view.step, view.last_event) == (FINISHED, 4, "evaluation after step 4: 2.0 s")
    assert view.running_s == pytest.approx(4.0) and not any(rank.problem for rank in view.ranks)

    folder.rename(tmp_path / "tiny.1")
    assert live.read() == RunView(folder=str(folder), state=WAITING)
    run = HandmadeRun(folder, world_size=1)
    run.write_step(1)
    view = live.read()
    assert (view.state, view.step, view.world_size, view.losses) == (RUNNING, 1, 1, [])


def test_a_run_that_is_resumed_on_fewer_ranks_has_these_and_no_result_yet(tmp_path: Path, clock: Clock) -> None:
    run = HandmadeRun(tmp_path, world_size=4)
    run.write_step(1)
    run.finish()
    live = LiveRun(tmp_path, clock)
    assert live.read().state == FINISHED
    os.utime(tmp_path / "result.json", (0, 0))
    resumed = HandmadeRun(tmp_path, world_size=2)
    resumed.write_step(2)
    view = live.read()
    assert (view.state, [rank.rank for rank in view.ranks], view.step) == (RUNNING, [0, 1], 2)
    os.utime(tmp_path / "result.json")
    assert live.read().state == FINISHED


@pytest.mark.parametrize("early", [0, 1])
def test_the_time_of_a_resumed_run_begins_where_it_went_on(tmp_path: Path, clock: Clock, early: int) -> None:
    run = HandmadeRun(tmp_path, world_size=2)
    run.write_step(1)
    run.write_event("evaluation", 1, 0.1)
    for rank in (1, 0):
        run.writers[rank].write(
            EventRecord(event=RESUME, step=1, start_s=start_of(200) - 10 * (rank == early), seconds=0.0)
        )
    run.write_step(200)
    clock.now_s = end_of(200)
    for view in (LiveRun(tmp_path, clock).read(), LiveRun(tmp_path, clock).read()):
        assert (view.running_s, view.resumed_step) == (pytest.approx(0.5), 1)
        assert "0 s since it went on after step 1" in list_facts(view)  # not 100 s
        assert view.last_event == "evaluation after step 1: 0.1 s"


def test_a_process_that_has_ended_stops_the_run_and_one_of_another_machine_cannot_be_seen(
    tmp_path: Path, dead_pid: dict[str, Any]
) -> None:
    own = describe_process()
    marks: list[tuple[dict[str, Any], str]] = [
        (dead_pid, STOPPED),
        (own, RUNNING),
        ({"started_s": own["started_s"] - 1000}, STOPPED),  # the number was given to another process
        ({**dead_pid, "host": "another"}, RUNNING),
        ({**dead_pid, "pid_namespace": "pid:[1]"}, RUNNING),
        ({"pid": "broken"}, RUNNING),
    ]
    for mark, state in marks:
        HandmadeRun(tmp_path, **mark).write_step(1)
        view = LiveRun(tmp_path).read()
        assert view.state == state, mark
        assert any("stopped after step 1 without a result" in said for said in list_remarks(view)) == (state == STOPPED)
    HandmadeRun(tmp_path, **dead_pid).finish()
    assert LiveRun(tmp_path).read().state == FINISHED
    assert is_process_alive({}) is None


def test_the_slowest_rank_is_the_one_with_the_most_work_of_its_own(tmp_path: Path, clock: Clock) -> None:
    run = HandmadeRun(tmp_path, world_size=3)
    run.write_step(1, {0: 0.5})  # a run's first step is no measure
    for step in range(2, 7):
        run.write_step(step, {0: 0.2, 1: 0.32, 2: 0.2})
    run.write_step(7, {0: 0.2, 1: 0.2, 2: 0.2})  # one step is no measure either
    clock.now_s = end_of(7)
    view = LiveRun(tmp_path, clock).read()
    assert (view.slowest_rank, view.rank_spread, view.window_steps) == (1, pytest.approx(1.5), 6)
    assert list_remarks(view) == ["slowest rank: 1, whose own work takes 1.50 times the median of the others'"]
    shown = view.ranks[1].phases_s
    assert shown["backward"] == pytest.approx(0.15) and shown["communication"] == pytest.approx(0.2)
    assert "optimizer" not in shown


def test_who_is_slowest_is_not_guessed_where_waits_are_not_seen(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = StepLogWriter(tmp_path, rank)
        writer.write(StepRecord(step=1, start_s=0.0, step_s=1.0 + rank, world_size=2))
    view = LiveRun(tmp_path, lambda: 2.0).read()
    assert view.slowest_rank is None and "cannot be told" in list_remarks(view)[-1]


def test_ranks_that_are_behind_or_silent_are_named(tmp_path: Path, clock: Clock) -> None:
    run = HandmadeRun(tmp_path, world_size=3)
    for step in (1, 2, 3):
        run.write_step(step)
    run.write_step(4, ranks=(0, 1))
    live = LiveRun(tmp_path, clock)

    def problems(after_s: float) -> list[str]:
        clock.now_s = end_of(4) + after_s
        return [rank.problem for rank in live.read().ranks]

    assert problems(0.5) == ["", "", ""]  # it may be about to end the step
    assert problems(2.0) == ["", "", "behind"]
    assert "rank 2 is behind: it has ended step 3, others step 4" in list_remarks(live.read())
    run.write_event("evaluation", 4, 9.0, rank=0)
    assert problems(12.0) == ["", "silent", "silent"]  # rank 0 has shown since that it is alive
    assert "rank 2 is silent: no step for 12 s; its steps take 0.50 s" in list_remarks(live.read())
    assert problems(30.0) == ["silent"] * 3
    assert list_remarks(live.read())[:2] == [
        "no rank has ended a step for 30 s",
        "rank 2 is behind: it has ended step 3, others step 4",
    ]
    run.write_step(4, ranks=(2,))
    assert problems(30.0) == ["silent"] * 3
    assert list_remarks(live.read())[0].startswith("no rank has ended a step for 30 s: an evaluation, a checkpoint,")
    for step in range(5, 70):
        run.write_step(step)
    clock.now_s = end_of(69)
    assert not any(rank.problem for rank in live.read().ranks)


def test_a_rank_that_has_not_begun_is_named(tmp_path: Path, clock: Clock) -> None:
    run = HandmadeRun(tmp_path, world_size=2)
    step_log_path(tmp_path, 1).unlink()
    run.write_step(1, ranks=(0,))
    clock.now_s = end_of(1) + 5
    view = LiveRun(tmp_path, clock).read()
    assert [(rank.step, rank.since_step_s, rank.problem) for rank in view.ranks] == [(1, 5.0, ""), (0, None, "behind")]
    clock.now_s = end_of(1) + 15
    run.write_event("evaluation", 1, 14.0)
    assert "rank 1 is silent: it has ended no step" in list_remarks(LiveRun(tmp_path, clock).read())
    clock.now_s = end_of(1) + 217
    remarks = list_remarks(LiveRun(tmp_path, clock).read())
    assert remarks[0] == "no rank has ended a step for 217 s", "a rank without any does not count as one of just now"


def test_lines_that_are_none_are_passed_over_and_named(tmp_path: Path, clock: Clock) -> None:
    run = HandmadeRun(tmp_path, world_size=1)
    run.write_step(1)
    with open(step_log_path(tmp_path, 0), "a") as file:
        file.write('{"step": "two"}\nnonsense\n')
    run.write_step(2)
    (tmp_path / "log.jsonl").write_text('[]\n{"step": 1, "loss/total": "high"}\n{"step": 2, "loss/total": NaN}\n')
    run.write_row(3)
    view = LiveRun(tmp_path, clock).read()
    assert (view.step, view.losses) == (2, [(3, pytest.approx(1 / 3))])
    assert "rank0000.jsonl: 'nonsense' is no record" in view.problem


def test_bytes_by_owner_come_from_the_last_row_that_has_them(tmp_path: Path, clock: Clock) -> None:
    run = HandmadeRun(tmp_path, world_size=1)
    peak = {"memory/peak_rss_gib": 3.0}
    run.write_row(1, **peak)
    assert LiveRun(tmp_path, clock).read().owners_bytes == {}
    run.write_row(2, **peak, **{"memory/weights_gib": 1.0, "memory/optimizer_gib": 2.0})
    assert LiveRun(tmp_path, clock).read().owners_bytes == {"weights": 2**30, "optimizer": 2**31}


def test_looking_often_shows_what_looking_once_shows(tmp_path: Path, clock: Clock) -> None:
    rng = random.Random(3)
    for trial in range(3):
        folder = tmp_path / f"run{trial}"
        live = LiveRun(folder, clock)
        run, step = HandmadeRun(folder), 0
        for _ in range(40):
            what = rng.random()
            if what < 0.6:
                step += 1
                run.write_step(step, {0: rng.choice([0.1, 0.4])}, ranks=rng.choice([(), (), (0,)]))
            elif what < 0.75:
                run.write_row(max(step, 1))
            elif what < 0.8:
                folder.rename(tmp_path / f"run{trial}.{rng.random()}")
                run, step = HandmadeRun(folder), 0
            elif what < 0.85:
                run.finish()
            clock.now_s = end_of(step) + rng.choice([0.0, 3.0, 20.0])
            if rng.random() < 0.5:
                assert live.read() == LiveRun(folder, clock).read()


def test_a_folder_that_is_none_is_refused_and_the_runs_nearby_are_named(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path / "runs" / "tiny")
    assert find_run_problem(run.folder) == ""
    for folder, words in (
        (tmp_path / "runs", "has neither run.json nor steps/ in it: give the folder that a run writes to"),
        (tmp_path / "runs" / "tin", "is not there"),
        (run.folder / "run.json", "is a file"),
    ):
        problem = find_run_problem(folder)
        assert words in problem
        assert (f"runs are in {run.folder}" in problem) == (folder.name != "run.json")
    assert find_run_problem(tmp_path / "no" / "where").endswith("start one with vlmcourse train")
