"""`vlmcourse watch`: the numbers of a run's files in a terminal, until the run ends, with exit codes and JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from run_folders import HandmadeRun, end_of

from vlmcourse import cli
from vlmcourse.colours import PHASE_COLOURS
from vlmcourse.commands import watch
from vlmcourse.monitor.live_run import LiveRun
from vlmcourse.monitor.run_view import PHASES

NO_SUCH_PID = 2**22 + 1


@pytest.fixture
def run(tmp_path: Path) -> HandmadeRun:
    run = HandmadeRun(tmp_path / "tiny", num_steps=9)
    for step in range(1, 6):
        run.write_step(step, {0: 0.4, 1: 0.2})
        run.write_row(step)
    return run


def test_a_finished_run_is_shown_rank_by_rank(run: HandmadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.write_event("checkpoint", 5, 0.5)
    run.finish()
    assert cli.main(["watch", str(run.folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "finished, step 5 of 9, loss 0.2000, 500 tokens/s, 3 s, last checkpoint after step 5: 0.5 s",
        "0 slowest 5 500 ms dddddddfffffffbbbbbbbbbbbbbbbwwwwwww 0.10 GB",
        "1 5 500 ms ddddfff",
        "means of 4 steps",
        "slowest rank: 0, whose own work takes 2.00 times the other rank's",
    ):
        assert words in shown
    assert "ago" not in shown


def test_bars_are_as_long_as_their_steps() -> None:
    assert set(watch.LETTERS) == set(PHASES) == set(PHASE_COLOURS)
    assert all(f"{letter} " in watch.LEGEND for letter in watch.LETTERS.values())


def test_a_run_that_goes_on_is_watched_until_it_ends(run: HandmadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    watcher = threading.Thread(target=lambda: codes.append(cli.main(["watch", str(run.folder)])), daemon=True)
    watcher.start()
    time.sleep(1.2 * watch.EVERY_S)
    assert watcher.is_alive()
    run.write_step(6)
    run.finish()
    watcher.join(30)
    assert codes == [0] and "finished, step 6 of 9" in " ".join(capsys.readouterr().out.split())


def test_once_names_a_rank_that_is_silent(run: HandmadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.write_step(6, ranks=(1,))
    assert cli.main(["watch", str(run.folder), "--once"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "running, step 6 of 9" in shown and "s ago silent" in shown
    assert "rank 0 is behind: it has ended step 5, others step 6" in shown


def test_json_is_one_object_with_what_the_table_has(run: HandmadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", str(run.folder), "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["num_steps"], found["slowest_rank"]) == ("running", 5, 9, 0)
    assert (found["loss"], found["tokens_per_s"]) == (pytest.approx(0.2), 500.0)
    assert found["ranks"][1]["phases_s"]["communication"] == pytest.approx(0.3)
    run.finish()
    assert cli.main(["watch", str(run.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_a_run_that_was_killed_ends_with_1_but_for_a_look(run: HandmadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    killed = HandmadeRun(run.folder, pid=NO_SUCH_PID)
    killed.write_step(3)
    assert cli.main(["watch", str(run.folder)]) == 1
    assert "has stopped after step 3 without a result" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["watch", str(run.folder), "--once"]) == 0


def test_a_run_without_a_step_is_shown_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    HandmadeRun(tmp_path)
    assert cli.main(["watch", str(tmp_path), "--once"]) == 0
    assert "waiting for its first step" in " ".join(capsys.readouterr().out.split())


def test_a_folder_that_is_none_says_what_to_give(run: HandmadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", str(run.folder.parent)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("vlmcourse watch: ") and f"runs are in {run.folder}" in message


def test_the_command_needs_no_torch_and_a_pipe_gets_plain_text(run: HandmadeRun) -> None:
    code = "import sys; sys.modules['torch'] = None; from vlmcourse.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "watch", str(run.folder), "--once"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "\x1b" not in done.stdout and "slowest rank: 0" in done.stdout, done.stderr
    view = LiveRun(run.folder, lambda: end_of(5)).read()
    assert view.summary()["remarks"] == ["slowest rank: 0, whose own work takes 2.00 times the other rank's"]
