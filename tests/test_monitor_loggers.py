"""Loggers of a run: what each keeps, that a resume logs no step twice, and that no failure reaches training."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from vlmcourse.config import ConfigError, parse_config
from vlmcourse.monitor.loggers import (
    ConsoleLogger,
    CsvLogger,
    JsonlLogger,
    ProcessLogger,
    RowLogger,
    RunInfo,
    RunLoggers,
    TensorBoardLogger,
    build_loggers,
    files,
    read_rows,
)
from vlmcourse.monitor.loggers import package_worker as worker

ROW = {"step": 1, "loss/total": 2.5, "gradients/norm": None}


def info_of(folder: Path, keep_until_step: int | None = None) -> RunInfo:
    return RunInfo(
        name="r",
        folder=folder,
        config={"train": {"num_steps": 4}},
        hardware={"machine": "2 cores"},
        keep_until_step=keep_until_step,
    )


def run_through(loggers: list[Any], info: RunInfo, *rows: dict[str, Any]) -> list[str]:
    """Log rows through `RunLoggers` and return what it said."""
    said: list[str] = []
    together = RunLoggers(loggers, said.append)
    together.start(info)
    for row in rows:
        together.log(row)
    together.close()
    return said


def test_files_are_complete_after_each_row_and_readable(tmp_path: Path) -> None:
    loggers: list[RowLogger] = [CsvLogger(["step", "loss/total", "eval/exact_match"]), JsonlLogger()]
    for logger in loggers:
        logger.start(info_of(tmp_path))
        logger.log({"step": 1, "loss/total": 2.5})
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))  # before the files are closed
    assert rows == [{"step": "1", "loss/total": "2.5", "eval/exact_match": ""}]
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 1, "loss/total": 2.5}


def test_csv_gives_a_new_name_a_column_and_fills_up_the_rows_before(tmp_path: Path) -> None:
    said = run_through([CsvLogger()], info_of(tmp_path), {"step": 1}, {"step": 2, "a": None, 'b"': 0.5}, {"step": 3})
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert rows == [
        {"step": "1", "a": "", 'b"': ""},
        {"step": "2", "a": "", 'b"': "0.5"},
        {"step": "3", "a": "", 'b"': ""},
    ]
    assert not said


def test_resumed_files_drop_rows_after_the_checkpoint_and_a_line_cut_by_a_kill(tmp_path: Path) -> None:
    rows = [{"step": step, "loss/total": 0.5} for step in (1, 2, 3)]
    run_through([CsvLogger(["loss/total", "step"]), JsonlLogger()], info_of(tmp_path), *rows)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert [row["step"] for row in read_rows(tmp_path, 2)] == [1, 2]
    again = {"step": 3, "loss/total": 0.25, "more": 1}
    run_through([CsvLogger(["step", "loss/total"]), JsonlLogger()], info_of(tmp_path, 2), again)
    kept = [(r["step"], r["loss/total"], r["more"]) for r in csv.DictReader((tmp_path / "log.csv").open())]
    assert kept == [("1", "0.5", ""), ("2", "0.5", ""), ("3", "0.25", "1")]
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_a_new_run_starts_empty_files_and_one_without_files_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 9}\n', encoding="utf-8")
    run_through([JsonlLogger()], info_of(tmp_path))
    assert (tmp_path / "log.jsonl").read_text() == ""
    assert read_rows(tmp_path / "nowhere", 9) == []


def test_tensorboard_shows_scalars_texts_and_after_a_resume_each_step_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rows = [{"step": step, "loss/total": float(step), "gradients/norm": None} for step in (1, 2, 3)]
    assert not run_through([TensorBoardLogger()], info_of(tmp_path), *rows)
    assert not run_through([TensorBoardLogger()], info_of(tmp_path, 2), {"step": 3, "loss/total": 9.0})
    seen = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    assert [(event.step, event.value) for event in seen.Scalars("loss/total")] == [(1, 1.0), (2, 2.0), (3, 9.0)]
    assert seen.Tags()["scalars"] == ["loss/total"]
    for tag, word in (("config", "num_steps"), ("hardware", "2 cores")):
        assert word in seen.Tensors(tag)[0].tensor_proto.string_val[0].decode()


def test_the_console_shows_what_a_row_has(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    logger = ConsoleLogger(lines.append, is_terminal=False)
    run_through([logger], info_of(Path("runs/r")), {**ROW, "performance/tokens_per_second": 1234.5})
    assert "2 cores" in lines[0] and "runs/r" in lines[0]
    assert lines[1].split() == ["step", "1", "loss", "2.5000", "tokens/s", "1,234"]
    assert capsys.readouterr() == ("", "")


class FullDisk:
    """A disk that takes `room` bytes, as the file object that a logger opens."""

    def __init__(self, room: int) -> None:
        self.room, self.content = room, b""

    def seek(self, offset: int, whence: int) -> int:
        return len(self.content)

    def write(self, data: bytes) -> int:
        if len(self.content) >= self.room:
            raise OSError(28, "No space left on device")
        taken = data[: self.room - len(self.content)]
        self.content += taken
        return len(taken)

    def truncate(self, size: int) -> None:
        self.content = self.content[:size]

    def close(self) -> None:
        pass


def test_a_full_disk_loses_whole_rows_says_so_once_and_takes_rows_again_when_there_is_room(tmp_path: Path) -> None:
    said: list[str] = []
    full, well = JsonlLogger(), CsvLogger()
    loggers = RunLoggers([full, well], said.append)
    loggers.start(info_of(tmp_path))
    disk = FullDisk(room=20)
    full._file._file = disk  # type: ignore[union-attr, assignment]
    for step in (1, 2, 3):  # 12 bytes each: the second is cut
        loggers.log({"step": step})
    assert disk.content == b'{"step": 1}\n'
    disk.room = 100
    loggers.log({"step": 4})
    loggers.close()
    assert [json.loads(line)["step"] for line in disk.content.splitlines()] == [1, 4]
    assert said == [
        "Logger jsonl lost the row of step 2 (No space left on device); the run goes on, and it tries again with the "
        "next row",
        "Logger jsonl lost 2 row(s) of the run, of steps 2 to 3",
    ]
    assert [row["step"] for row in csv.DictReader((tmp_path / "log.csv").open())] == ["1", "2", "3", "4"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
@pytest.mark.parametrize("name", ["log.jsonl", "log.csv"])
def test_a_device_that_is_always_full_stops_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    (tmp_path / "run").mkdir()
    file = files.WholeWriteFile(tmp_path / name)
    with pytest.raises(OSError, match="No space left"):
        file.write(b"x")
    file.close()


class Broken:
    """A logger that raises in one of its methods."""

    name, retries = "broken", False

    def __init__(self, where: str, error: Exception) -> None:
        self._where, self._error = where, error

    def _meet(self, where: str) -> None:
        if where == self._where:
            raise self._error

    def start(self, info: RunInfo) -> None:
        self._meet("start")

    def log(self, row: Any) -> None:
        self._meet("log")

    def close(self) -> None:
        self._meet("close")


@pytest.mark.parametrize(
    ("where", "words"), [("start", "could not start"), ("log", "stopped at step 1"), ("close", "could not finish")]
)
def test_a_logger_that_fails_says_so_in_one_line_and_the_others_go_on(tmp_path: Path, where: str, words: str) -> None:
    said = run_through([Broken(where, KeyError("a\nb")), JsonlLogger()], info_of(tmp_path), {"step": 1}, {"step": 2})
    assert len(said) == 1 and words in said[0] and "\n" not in said[0]
    assert len(read_rows(tmp_path, 9)) == 2


def test_a_listener_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    def gone(line: str) -> None:
        raise BrokenPipeError

    loggers = RunLoggers([Broken("log", ValueError("x")), JsonlLogger()], gone)
    loggers.start(info_of(tmp_path))
    loggers.log({"step": 1})
    loggers.close()
    assert len(read_rows(tmp_path, 1)) == 1


def test_what_hangs_cannot_be_written_or_is_not_installed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "no_folder"
    file.touch()
    loggers: list[Any] = [ProcessLogger("wandb", project="p", mode="offline", timeout_s=1), JsonlLogger()]
    said = run_through(loggers, info_of(file), {"step": 1})
    assert "package wandb is not installed: pip install wandb" in said[0]
    assert said[1].startswith("Logger jsonl could not start (Not a directory)") and len(said) == 2


HANGS = "import sys, time; [sys.stdin.readline() for _ in range({lines})]; {tell}; time.sleep(600)"
STARTED = "print('{\"started\": 1}', flush=True)"


def fake_worker(code: str, timeout_s: float = 0.5) -> ProcessLogger:
    return ProcessLogger(
        "wandb", project="p", mode="offline", timeout_s=timeout_s, command=[sys.executable, "-c", code]
    )


@pytest.mark.parametrize(
    ("code", "timeout_s", "words"),
    [
        (HANGS.format(lines=0, tell="0"), 0.5, "stopped at step 2 (it did not start within 0.5 s"),
        (HANGS.format(lines=3, tell=STARTED), 2, "could not finish (it was ended after 2 s"),
        ("import sys; sys.exit(3)", 60, "stopped at step 2 (its process ended with code 3)"),
        ('print(\'{"failed": "no login"}\')', 5, "stopped at step 2 (no login)"),
        ("import sys; print('noise', file=sys.stderr); sys.stdin.read(); print('{\"finished\": 1}')", 60, ""),
    ],
)
def test_a_process_that_hangs_or_fails_is_ended_within_its_limit_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str, timeout_s: float, words: str
) -> None:
    said: list[str] = []
    logger = fake_worker(code, timeout_s)
    loggers = RunLoggers([logger], said.append)
    loggers.start(info_of(tmp_path))
    process = logger._process
    assert process is not None
    loggers.log({"step": 1})
    if "step 2" in words:
        _wait_until(lambda: process.poll() is not None or time.monotonic() - logger._started_s > timeout_s)
        loggers.log({"step": 2})
    loggers.close()
    assert not psutil.pid_exists(process.pid) or process.poll() is not None
    assert [words in line for line in said] == ([True] if words else [])
    assert capfd.readouterr() == ("", "")


def _wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30
    while not is_so() and time.monotonic() < until_s:
        time.sleep(0.02)
    assert is_so()


@pytest.mark.slow
def test_wandb_logs_offline_in_silence_goes_on_after_a_resume_and_online_without_login_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    config = parse_config({"logging": {"loggers": ["wandb"], "timeout_s": 60}}).logging
    said: list[str] = []

    def log(keep: int | None, *steps: int) -> None:
        loggers = build_loggers(config, ("step",), said.append)
        loggers.start(info_of(tmp_path, keep))
        for step in steps:
            loggers.log({"step": step, "loss/total": 0.5, "eval/exact_match": None})
        loggers.close()

    (tmp_path / "online").mkdir()
    online = RunLoggers([ProcessLogger("wandb", project="p", mode="online", timeout_s=60)], said.append)
    online.start(info_of(tmp_path / "online"))  # beside the others: each start takes seconds
    log(None, 1, 2)
    run_id = json.loads((tmp_path / "wandb_run.json").read_text())["run_id"]
    log(1, 2, 3)
    kept = json.loads((tmp_path / "wandb_run.json").read_text())
    assert not said and kept == {"run_id": run_id, "last_step": 3}
    written = list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))
    assert len(written) == 2 and all(b"loss/total" in path.read_bytes() for path in written)
    assert any(b"2 cores" in path.read_bytes() for path in written)
    online.close()
    assert len(said) == 1 and "wandb login" in said[0]
    assert capfd.readouterr() == ("", "")


def serve(backend: Any, folder: Path, keep: int | None, *messages: Any) -> list[dict[str, Any]]:
    """Run the worker's loop on messages and return what it told."""
    run = {"name": "r", "folder": str(folder), "config": {"train": {}}, "hardware": {"gpu": "x"}}
    options = {"project": "p", "mode": "offline", "timeout_s": 5}
    waiting = worker.queue.Queue()
    for message in ({"run": run | {"keep_until_step": keep}, "options": options}, *messages):
        waiting.put(message)
    told: list[dict[str, Any]] = []
    worker.serve(backend, "trackio", waiting, lambda **said: told.append(said))
    return told


def test_trackio_is_called_as_its_signatures_say_and_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    fake: Any = ModuleType("trackio")

    def init(
        project: str,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str = "never",
        embed: bool = True,
        auto_log_gpu: bool | None = None,
    ) -> None:
        calls.append(("init", project, name, config, resume, embed))

    fake.init, fake.finish = init, lambda: calls.append(("finish",))
    fake.log = lambda metrics, step=None: calls.append(("log", metrics, step))
    monkeypatch.setitem(sys.modules, "trackio", fake)
    rows = [{"row": {"step": step, "loss/total": 0.5, "gradients/norm": None}} for step in (1, 2)]
    serve(worker.TrackioBackend(), tmp_path, None, *rows, {"close": True})
    told = serve(worker.TrackioBackend(), tmp_path, 1, rows[1], {"row": {"step": 3, "loss/total": 0.25}}, None)
    inits = [call for call in calls if call[0] == "init"]
    assert inits[0] == inits[1] and inits[0][1] == "p" and inits[0][2].startswith("r-")
    assert inits[0][3] == {"train": {}, "hardware": {"gpu": "x"}} and inits[0][4:] == ("allow", False)
    logged = [call[1:] for call in calls if call[0] == "log"]
    assert logged == [({"loss/total": 0.5}, 1), ({"loss/total": 0.5}, 2), ({"loss/total": 0.25}, 3)]
    assert calls.count(("finish",)) == 2 and told[-1] == {"finished": True}


READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
found = []
for name in SQLiteStorage.get_runs("p"):
    found.append([name, SQLiteStorage.get_logs("p", name), SQLiteStorage.get_run_config("p", name)])
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None, reason="trackio is not installed; CONTRIBUTING.md says how to"
)
def test_trackio_keeps_rows_in_its_own_store_and_goes_on_after_a_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = parse_config({"logging": {"loggers": ["trackio"], "project": "p", "timeout_s": 60}}).logging
    said: list[str] = []
    for keep, steps in ((None, (1, 2)), (1, (2, 3))):
        loggers = build_loggers(config, ("step",), said.append)
        loggers.start(info_of(tmp_path, keep))
        for step in steps:
            loggers.log({"step": step, "loss/total": step / 2, "loss/count": 0.1, "eval/exact_match": None, "why": "?"})
        loggers.close()
    assert not said and capfd.readouterr() == ("", "")
    # In a process of its own: trackio chooses its folder as it is imported.
    found = subprocess.run([sys.executable, "-c", READ_TRACKIO], capture_output=True, text=True, timeout=60, check=True)
    [[name, logs, kept]] = json.loads(found.stdout.splitlines()[-1])
    assert name == "r-" + json.loads((tmp_path / "trackio_run.json").read_text())["run_id"]
    assert [log.pop("timestamp") is not None for log in logs] == [True] * 3
    assert logs == [{"step": step, "loss/total": step / 2, "loss/count": 0.1} for step in (1, 2, 3)]
    assert kept["train"] == {"num_steps": 4} and kept["hardware"] == {"machine": "2 cores"}


def test_a_run_that_was_killed_is_finished_as_one_that_failed(tmp_path: Path) -> None:
    codes: list[int] = []

    class Backend:
        def start(self, run: Any, options: Any, run_id: str) -> str:
            return "here"

        def log(self, values: Any, step: int) -> None:
            pass

        def finish(self, exit_code: int) -> None:
            codes.append(exit_code)

    serve(Backend(), tmp_path, None, {"row": ROW}, None)
    serve(Backend(), tmp_path, None, {"row": ROW}, {"close": True})
    assert codes == [1, 0]


def test_the_section_is_checked() -> None:
    with pytest.raises(ConfigError) as caught:
        wrong = {"loggers": ["wanbd", "csv", "csv"], "mode": "onlin", "project": "a/b", "timeout_s": 0}
        parse_config({"logging": wrong})
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "logging.loggers names 'wanbd'",
        "logging.loggers names 'csv' twice",
        "logging.mode = 'onlin'",
        "logging.project = 'a/b'",
        "logging.timeout_s = 0.0",
    ]
    names = ["console", "jsonl", "csv", "tensorboard", "wandb", "trackio"]
    built = build_loggers(parse_config({"logging": {"loggers": names}}).logging, ("step",), print)
    assert built.names == names
