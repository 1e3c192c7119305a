"""`vlmcourse diagnose` on folders that are not as a finished run leaves them: read as far as they go, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_logs import USUAL, write_log

from vlmcourse import cli
from vlmcourse.monitor.diagnosis import diagnose
from vlmcourse.monitor.step_log import StepLogWriter, StepRecord


def without_steps(folder: Path) -> None:
    write_log(folder)
    for path in (folder / "steps").iterdir():
        path.unlink()
    (folder / "steps").rmdir()


def with_a_missing_rank(folder: Path) -> None:
    write_log(folder)
    (folder / "steps" / "rank0001.jsonl").unlink()


def with_a_cut_rank(folder: Path) -> None:
    write_log(folder)
    path = folder / "steps" / "rank0001.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4])[:-5])


def with_one_step(folder: Path) -> None:
    write_log(folder, num_steps=1)


def with_a_line_that_is_no_record(folder: Path) -> None:
    write_log(folder)
    path = folder / "steps" / "rank0001.jsonl"
    path.write_text(path.read_text() + '{"step": "three"}\n')


def with_nothing_written(folder: Path) -> None:
    write_log(folder)
    for path in (folder / "steps").iterdir():
        path.write_text("")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without_steps, "has log.jsonl, but no steps/rank0000.jsonl, .* a version before the step log made this run"),
        (with_a_missing_rank, r"0 steps .* rank\(s\) 1 of 2 have no file in .*steps \(rank0001.jsonl\): copy"),
        (with_a_cut_rank, "3 steps that all ranks .* rank 1 has written up to step 3, rank 0 up to step 23: it hangs"),
        (with_one_step, "1 steps that all ranks have written: .* wait, or make a run with train.num_steps = 20"),
        (
            with_a_line_that_is_no_record,
            r"rank0001.jsonl, line 24: .* is no record .*step = 'three'.*: remove the line",
        ),
        (with_nothing_written, "0 steps that all ranks have written"),
    ],
)
def test_what_cannot_be_diagnosed_says_what_is_missing_and_json_stays_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], said: str
) -> None:
    spoil(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        diagnose(tmp_path)
    assert cli.main(["diagnose", str(tmp_path), "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("vlmcourse diagnose: ")
    assert len(printed.err.splitlines()) == 1


def test_a_live_run_whose_ranks_are_a_step_apart_needs_no_word_and_one_that_stays_behind_does(tmp_path: Path) -> None:
    live = write_log(tmp_path / "live")
    path = live / "steps" / "rank0001.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:30])
    assert diagnose(live).last_step == 21 and not diagnose(live).notes
    path.write_text("".join(lines[:15]))
    assert diagnose(live).last_step == 14 and "rank 1 has written up to step 15" in diagnose(live).notes[0]


def test_an_older_versions_run_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """No world size, no parts of a step but forward and backward, keys of another time, no run.json, odd rows."""
    for rank in (0, 1):
        writer = StepLogWriter(tmp_path, rank)
        for step in range(1, 20):
            writer.write(StepRecord(step=step, start_s=0.1 * step, step_s=0.1, forward_s=0.03, backward_s=0.07))
        writer.close()
        path = tmp_path / "steps" / f"rank{rank:04d}.jsonl"
        path.write_text(path.read_text().replace('"step_s"', '"old_key": 3, "step_s"'))
    (tmp_path / "steps" / "rank_notes.jsonl").write_text("not a rank's\n")
    (tmp_path / "config.json").write_text(json.dumps({"train": {"steps": 20}}))
    (tmp_path / "log.jsonl").write_text('[1, 2]\n{"loss": 2.0}\nhalf a row\n{"step": 3, "loss": 2.0}\n')
    found = diagnose(tmp_path)
    assert found.is_healthy and found.world_size == 2
    notes = " ".join(found.notes)
    assert "config.json cannot be used" in notes and "run.json says nothing of the hardware" in notes
    assert "3 of 4 lines of log.jsonl are no rows" in notes


@pytest.mark.parametrize("name", ["config.json", "run.json"])
@pytest.mark.parametrize("text", ["[]", "null", '{"hardware": 3}', '{"tra', "\xff"])
def test_files_that_hold_something_else_stop_nothing(tmp_path: Path, name: str, text: str) -> None:
    folder = write_log(tmp_path)
    (folder / name).write_bytes(text.encode("latin-1"))
    found = diagnose(folder)
    assert found.is_healthy and any(name in note for note in found.notes)


def test_steps_without_any_part_and_clocks_that_stand_still_say_so(tmp_path: Path) -> None:
    def write(folder: Path, seconds_apart: float) -> Path:
        for rank in (0, 1):
            writer = StepLogWriter(folder, rank)
            for step in range(1, 20):
                writer.write(StepRecord(step=step, start_s=seconds_apart * step, step_s=0.1))
            writer.close()
        return folder

    assert diagnose(write(tmp_path / "bare", 0.1)).is_healthy
    with pytest.raises(ValueError, match="the clock of its machine stood still or went back"):
        diagnose(write(tmp_path / "still", 0.0))


def test_no_number_of_a_made_up_run_is_disturbed_by_what_is_not_there(tmp_path: Path) -> None:
    assert USUAL["forward_s"] == 0.03
    found = diagnose(write_log(tmp_path))
    assert found.profile == () and found.notes == ()
