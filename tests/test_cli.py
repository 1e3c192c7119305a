"""The `vlmcourse` command: messages a person can act on, exit codes, ranks that start and end together."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from vlmcourse import cli
from vlmcourse.commands import train
from vlmcourse.commands.train import JSON_KEYS, parse_overrides
from vlmcourse.config import ConfigError, load_config
from vlmcourse.monitor.energy import read_energy
from vlmcourse.notebook.failure import RankEnd, RankFailure
from vlmcourse.planner.hf_config import hf_config_from_shape
from vlmcourse.presets import get_model

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "configs" / "tiny.toml")
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
SHORT = {
    "train.num_steps": 4,
    "train.micro_batch_size": 4,
    "train.log_every": 2,
    "train.eval_every": 0,
    "optimizer.warmup_steps": 2,
    "data.num_train_samples": 64,
    "data.num_eval_samples": 6,
}


def arguments(folder: Path, **changes: object) -> list[str]:
    """Return the arguments of a run of a few steps; changes are written `section__key=value`."""
    values = SHORT | {key.replace("__", "."): value for key, value in changes.items()} | {"run.output_dir": str(folder)}
    return ["train", TINY, *(part for key, value in values.items() for part in ("--set", f"{key}={value}"))]


def vlmcourse(
    *argv: str, timeout_s: float = 120, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vlmcourse.cli", *argv]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=ENVIRONMENT, preexec_fn=before
    )


def test_help_lists_the_commands_without_importing_torch() -> None:
    code = "import sys; from vlmcourse.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for name in cli.COMMANDS:
        assert f"  {name} " in done.stdout
    assert done.stdout.rstrip().endswith("False")


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "vlmcourse", "trian"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: vlmcourse [") and "did you mean 'train'?" in done.stderr


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_its_arguments(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: vlmcourse {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "required: command"),
        (["trian"], "invalid choice: 'trian': did you mean 'train'?"),
        (["xyz"], "invalid choice: 'xyz': choose one of train, doctor"),
        (["train"], "required: config"),
        (["train", TINY, "--procs", "2"], "unrecognized arguments: --procs 2; --procs: did you mean '--nproc'?"),
        (["train", TINY, "--jsn=1"], "unrecognized arguments: --jsn=1; --jsn: did you mean '--json'?"),
        (
            ["train", TINY, "--nproc", "2", "--foo"],
            "--foo: choose one of --help, --verbose, --set, --deepspeed, --nproc",
        ),
        (["train", TINY, "other.toml"], "unrecognized arguments: other.toml\n"),
        (["--foo", "train", TINY], "--foo: choose one of --help, --version"),
        (["train", TINY, "--nproc", "two"], "invalid int value: 'two'"),
        (["train", TINY, "--deepspeed", ""], "--deepspeed: the path is empty: name a ds_config.json"),
    ],
)
def test_wrong_arguments_are_explained(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.startswith("usage: vlmcourse train " if argv[:1] == ["train"] else "usage: vlmcourse [")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train", "no.toml"], "There is no configuration file 'no.toml'"),
        (["train", TINY, "--set", "steps=3"], "'steps=3': write section.key=value"),
        (["train", TINY, "--set", "train.num_step=3"], "did you mean 'num_steps'?"),
        (["train", TINY], "--nproc 2"),
        (["train", TINY, "--nproc", "1"], "'ddp' with 1 rank"),
        (["train", TINY, "--nproc", "0"], "0 ranks: must be from 1 to 64"),
        (["train", TINY, "--nproc", "2", "--set", "parallel.strategy=single"], "'single' with 2 ranks"),
        (["train", TINY, "--nproc", "9999"], "must be from 1 to 64"),
        (
            ["train", TINY, "--nproc", "2", "--set", "data.num_train_samples=8"],
            "data.num_train_samples = 8: one optimizer step takes 16 x 1 x 2 = 32 samples",
        ),
        (["train", TINY, "--nproc", "2", "--resume", "nowhere"], "There is no checkpoint in 'nowhere'"),
        (
            ["train", TINY, "--nproc", "2", "--set", "data.dataset=llava", "--set", "data.path=nix.json"]
            + ["--set", "data.image_dir=nix", "--set", "model.hf_folder=nix", "--set", "data.tokenizer=nix"],
            "model.hf_folder = 'nix': there is no config.json in it; give a Hugging Face folder\n"
            "  - data.tokenizer = 'nix': there is no such folder; give one, or 'builtin'\n"
            "  - data.path = 'nix.json': there is no such conversation file\n"
            "  - data.image_dir = 'nix': there is no such folder",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_any_rank_starts(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert cli.main(argv) == 2
    message = capsys.readouterr().err
    assert message.startswith("vlmcourse train: ")
    assert words in message
    assert "Traceback" not in message


@pytest.mark.parametrize("command", ["train", "launch"])
def test_a_model_in_a_folder_is_looked_at_before_any_rank_starts(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "_start_ranks", lambda args, config: 0)
    shape = dataclasses.replace(get_model("tiny"), vision=dataclasses.replace(get_model("tiny").vision, num_heads=1))
    (tmp_path / "config.json").write_text(json.dumps(hf_config_from_shape(shape, "float32")), encoding="utf-8")
    ranks = ["--target", "slurm", "--nproc-per-node", "2"] if command == "launch" else ["--nproc", "2"]
    argv = [command, TINY, *ranks, "--set", f"model.hf_folder={tmp_path}", "--set", f"run.output_dir={tmp_path}"]
    split = ["--set", "parallel.strategy=single", "--set", "parallel.tp=2"]
    assert cli.main([*argv, *split]) == 2
    assert f"The model '{tmp_path.name}' cannot be split" in (said := capsys.readouterr().err)
    assert "vision_tp=2 does not divide 1 vision heads" in said
    if command == "train":  # where a cluster's weights are, only the cluster knows
        assert cli.main(argv) == 2
        assert "it has neither model.safetensors nor model.safetensors.index.json" in capsys.readouterr().err
        index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        (tmp_path / "1.safetensors").touch()
        assert cli.main(argv) == 2
        assert "1 of 2 files of weights are not there, the first is 2.safetensors" in capsys.readouterr().err
        (tmp_path / "2.safetensors").touch()
    assert cli.main(argv) == 0
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert cli.main(argv) == 2 and "config.json is not JSON" in capsys.readouterr().err


def test_a_verbose_start_says_which_rank_will_hold_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "_start_ranks", lambda args, config: 0)
    argv = [*arguments(tmp_path, parallel__strategy="auto"), "--nproc", "2"]
    assert cli.main(argv) == 0 and capsys.readouterr().out == ""
    assert cli.main([*argv, "-v"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["rank", "dp_replicate", "samples", "layers", "weights"],
        ["0", "0", "part", "0", "of", "2", "all", "whole"],
        ["1", "1", "part", "1", "of", "2", "all", "whole"],
    ]


@pytest.mark.parametrize("ranks", [["--nproc", "2"], ["--set", "parallel.strategy=single"]])
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_starts(
    ranks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "_train_here", None)
    monkeypatch.setattr(train, "_start_ranks", None)
    (tmp_path / "file").touch()
    assert cli.main([*arguments(tmp_path / "file"), *ranks]) == 2
    assert capsys.readouterr().err == (
        f"vlmcourse train: run.output_dir = '{tmp_path}/file' cannot be written to (Not a directory): "
        "choose another folder with --set run.output_dir=...\n"
    )


def test_of_ranks_that_another_launcher_started_the_first_alone_checks_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_train_here", lambda args, config: 0)
    (tmp_path / "file").touch()
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for rank, code in (("0", 2), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(arguments(tmp_path / "file")) == code
    assert capsys.readouterr().err.count("cannot be written to") == 1


@pytest.mark.parametrize(
    ("ranks", "stopped", "words"),
    [
        (["--nproc", "2"], "run_ranks", "interrupted; all 2 ranks have ended."),
        (["--set", "parallel.strategy=single"], "_train_here", "interrupted."),
    ],
)
def test_an_interrupted_run_says_how_to_go_on(
    ranks: list[str],
    stopped: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pointer = tmp_path / "tiny" / "checkpoints" / "latest"

    def interrupt(*args: object, **kwargs: object) -> int:
        raise KeyboardInterrupt

    def save_and_interrupt(*args: object, **kwargs: object) -> int:
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.write_text("step_000002\n", encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, stopped, interrupt)
    assert cli.main([*arguments(tmp_path), *ranks]) == 130
    shown = capsys.readouterr()
    none = f"vlmcourse train: {words} This run has saved no checkpoint to go on from"
    assert none in shown.err
    assert shown.out.startswith("starting 2 ranks;" if "--nproc" in ranks else "")
    assert "train.checkpoint_every saves some" in shown.err
    assert cli.main([*arguments(tmp_path), *ranks, "--set", "train.checkpoint_every=1"]) == 130
    shown = capsys.readouterr()
    assert f"{none}: train.checkpoint_every = 1 saves one with every step, and none was done yet; start" in shown.err
    assert cli.main([*arguments(tmp_path), *ranks, "--set", "train.checkpoint_every=5"]) == 130
    assert "= 5 saves one every 5 steps, and that many were not done yet; start" in capsys.readouterr().err
    monkeypatch.setattr(train, stopped, save_and_interrupt)
    assert cli.main([*arguments(tmp_path), *ranks]) == 130
    assert f"{words} Go on from the last checkpoint with --resume." in capsys.readouterr().err
    monkeypatch.setattr(train, stopped, interrupt)
    assert cli.main([*arguments(tmp_path), *ranks]) == 130
    assert none in capsys.readouterr().err, "the checkpoint is an earlier run's, and --resume would go on with that run"
    (pointer.parent / "step_000002").mkdir()
    (pointer.parent / "step_000002" / "meta.json").write_text('{"step": 2}', encoding="utf-8")
    assert cli.main([*arguments(tmp_path), *ranks, "--resume"]) == 130
    assert f"{words} Go on from the last checkpoint with --resume." in capsys.readouterr().err


def test_a_request_to_end_is_an_interrupt_except_for_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*args: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "_start_ranks", end)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    ours = signal.getsignal(signal.SIGTERM)
    try:
        assert cli.main([*arguments(tmp_path), "--nproc", "2"]) == 130
        assert "interrupted; all 2 ranks have ended" in capsys.readouterr().err
        assert signal.getsignal(signal.SIGTERM) is ours
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setattr(train, "run", end)
        assert cli.main(["train", TINY]) == 0  # a rank ends as it did
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("argv", [["train", "--help"], ["explain", "ds.json"], ["explain", "ds.json", "--json"]])
def test_a_reader_that_has_left_gets_no_traceback(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text("{}", encoding="utf-8")
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(argv) == 141
    assert capsys.readouterr().err == ""


def test_a_pipe_that_broke_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise BrokenPipeError("of a socket")

    monkeypatch.setattr(train, "run", fail)
    read_end, write_end = os.pipe()
    with open(read_end), open(write_end, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(BrokenPipeError, match="of a socket"):
            cli.main(["train", TINY])


@pytest.mark.parametrize(("code", "rank"), [(2, 1), (1, 0), (1, None)])
def test_what_a_user_can_correct_on_the_rank_that_failed_first_ends_the_run_with_2(
    code: int, rank: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RankFailure("stale", rank=rank, ends=[RankEnd(0, 1, 0.0, False), RankEnd(1, 2, 0.0, False)])

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "run_ranks", fail)
    assert cli.main([*arguments(tmp_path), "--nproc", "2"]) == code


def test_an_interrupt_while_modules_are_imported_gets_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupt)
    assert cli.main(["train", TINY]) == 130
    assert capsys.readouterr().err == "\nvlmcourse train: interrupted\n"


def test_a_closed_stdout_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise BrokenPipeError("of a socket")

    monkeypatch.setattr(sys, "stdout", None)  # as Python sets it for `vlmcourse ... >&-`
    monkeypatch.setattr(train, "run", lambda args: 0)
    assert cli.main(["train", TINY]) == 0
    monkeypatch.setattr(train, "run", fail)
    with pytest.raises(BrokenPipeError, match="of a socket"):
        cli.main(["train", TINY])


def test_overrides_are_typed_as_toml_types_them() -> None:
    texts = ["a.i=3", "a.f = 2e-3", "a.b=true", "a.l=['x', 'y']", 'a.s="text"', "a.word=fsdp", "a.path=/tmp/a=b"]
    assert parse_overrides(texts) == {
        "a.i": 3,
        "a.f": 2e-3,
        "a.b": True,
        "a.l": ["x", "y"],
        "a.s": "text",
        "a.word": "fsdp",
        "a.path": "/tmp/a=b",
    }
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["a=3", "a.b"])
    assert len(caught.value.problems) == 2


def test_one_process_trains_and_prints_its_outcome(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    argv = arguments(tmp_path, parallel__strategy="single")
    assert cli.main(argv) == 0
    assert "single on 1 rank(s), 4 steps" in capsys.readouterr().out
    assert cli.main([*argv, "--json", "--set", "train.num_steps=6", "--resume"]) == 0
    outcome = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(outcome)[: len(JSON_KEYS)] == list(JSON_KEYS)
    assert (outcome["strategy"], outcome["world_size"], outcome["num_steps"]) == ("single", 1, 6)
    steps = [json.loads(line)["step"] for line in (tmp_path / "tiny" / "log.jsonl").read_text().splitlines()]
    assert steps == [2, 4, 6]


def test_a_first_step_that_cannot_be_made_leaves_an_earlier_run_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "log.csv").touch()
    assert cli.main(arguments(tmp_path, parallel__strategy="single", data__max_seq_len=20)) == 2
    assert "more than the 20 of data.max_seq_len: raise it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["log.csv"]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_log_plot_and_end_with_one_json_line(tmp_path: Path, strategy: str) -> None:
    done = vlmcourse(*arguments(tmp_path, parallel__strategy=strategy), "--nproc", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("starting 2 ranks;")
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (outcome["strategy"], outcome["world_size"], outcome["num_questions"]) == (strategy, 2, 6)
    assert outcome["loss_first"] > outcome["loss_last"] > 0
    assert 0 <= outcome["exact_match"] <= 1
    assert outcome["seconds"] > 0 and outcome["tokens_per_s"] > 0 and outcome["peak_bytes"] > 0
    folder = tmp_path / "tiny"
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    logs = {"log.csv", "log.jsonl", "energy", "steps"}
    assert {path.name for path in folder.iterdir()} == logs | {
        *("checkpoints", "config.json", "result.json", "run.json", "training.png"),
    }
    assert done.stdout.count("step/s") + done.stdout.count("s/step") >= 1  # the bar of rank 0
    assert "[1]" not in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_adaptive_pipeline_tells_what_it_decided(tmp_path: Path) -> None:
    changes = {"parallel__strategy": "single", "parallel__pp": 2, "parallel__vision_stages": 1}
    argv = arguments(tmp_path, **changes, parallel__adaptive="true", train__num_steps=7, train__accumulation_steps=2)
    done = vlmcourse(*argv, "--nproc", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    # Two steps to warm up and three to measure; what is decided depends on the times.
    assert re.search(r"step 5: layers (move|stay): .*\(a step \S+ ms -> \S+ ms by the measured times", done.stdout)
    assert "single on 2 rank(s) (pp 2), 7 steps" in done.stdout


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run on two ranks that has made its first steps and would go on for hours."""
    argv = arguments(tmp_path, train__num_steps=10**6, train__log_every=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "vlmcourse.cli", *argv, "--nproc", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    log = tmp_path / "tiny" / "log.jsonl"
    end_s = time.monotonic() + 90
    try:
        while not (log.exists() and len(log.read_text().splitlines()) >= 2):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end_s, "the run did not make its first steps"
            time.sleep(0.2)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process], within_s: float = 10) -> bool:
    return not psutil.wait_procs(processes, timeout=within_s)[1]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_interrupt_ends_all_ranks_with_a_short_message(long_run: subprocess.Popen[str]) -> None:
    ranks = descendants(long_run)
    assert len(ranks) >= 2
    long_run.send_signal(signal.SIGINT)
    _, errors = long_run.communicate(timeout=30)
    assert long_run.returncode == 130
    assert "interrupted; all 2 ranks have ended" in errors
    assert "Traceback" not in errors
    assert all_gone(ranks)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_rank_ends_the_run_is_named_and_has_kept_its_energy(
    long_run: subprocess.Popen[str], tmp_path: Path
) -> None:
    ranks = descendants(long_run)
    kept = [tmp_path / "tiny" / "energy" / f"rank000{rank}.json" for rank in (0, 1)]
    end_s = time.monotonic() + 30
    while not all(path.exists() for path in kept) and time.monotonic() < end_s:
        time.sleep(0.1)
    victim = next(rank for rank in ranks if rank.environ().get("RANK") == "1" and not rank.children())
    victim.kill()
    _, errors = long_run.communicate(timeout=60)
    assert long_run.returncode == 1
    assert (
        "rank 1 of 2 was killed by SIGKILL (the machine probably ran out of memory, or someone killed it); " in errors
    )
    assert re.search(r"it had used \d\S* [MG]iB at most$", errors, re.MULTILINE)
    assert all_gone(ranks)
    energy = read_energy(tmp_path / "tiny")
    assert energy.num_ranks == 2 and all(json.loads(path.read_text())["joules_high"] > 0 for path in kept)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_failing_rank_shows_its_traceback(tmp_path: Path) -> None:
    def allow_small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))

    # Rank 0 cannot write config.json, rank 1 waits for it.
    done = vlmcourse(*arguments(tmp_path), "--nproc", "2", before=allow_small_files_only)
    assert done.returncode == 1
    assert "Traceback" in done.stdout and "File too large" in done.stdout
    assert "rank 0 of 2 exited with code 1\n  rank 1: stopped" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_what_a_user_can_correct_is_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "chats.json").write_text("[{}]", encoding="utf-8")  # which only a rank reads
    llava = {"data__dataset": "llava", "data__path": str(tmp_path / "chats.json"), "data__image_dir": str(tmp_path)}
    done = vlmcourse(*arguments(tmp_path, **llava), "--nproc", "2")
    assert done.returncode == 2
    assert f"vlmcourse train: {tmp_path}/chats.json has 1 bad row" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_run_that_has_made_all_its_steps_is_not_resumed_and_a_new_one_says_where_it_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "_start_ranks", lambda args, config: 0)
    argv = [*arguments(tmp_path), "--nproc", "2"]
    assert cli.main(argv) == 0 and capsys.readouterr().out == ""
    checkpoint = tmp_path / "tiny" / "checkpoints"
    checkpoint.mkdir(parents=True)
    num_steps = load_config(TINY).train.num_steps
    (checkpoint / "meta.json").write_text(json.dumps({"step": num_steps}), encoding="utf-8")
    assert cli.main([*argv, "--set", f"train.num_steps={num_steps}", "--resume"]) == 2
    assert f"but {num_steps} steps are done: nothing is left; raise it" in capsys.readouterr().err
    assert cli.main([*argv, "--set", f"train.num_steps={num_steps + 1}", "--resume"]) == 0
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == f"the earlier run in {tmp_path}/tiny will be kept as {tmp_path}/tiny.1\n"
