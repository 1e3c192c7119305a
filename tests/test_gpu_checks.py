"""`bench/gpu_checks.py`: a table comes out whatever the machine has and whatever a check does."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu_checks")


def rows(table: str) -> list[list[str]]:
    """The cells of each row below the head."""
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]


def test_without_a_gpu_every_row_says_skipped_and_why_and_nothing_failed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "gpu_checks.py"), "--out", str(tmp_path / "table.md")],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "table.md").read_text() == done.stdout
    assert done.stdout.startswith("Machine: no GPU, driver ") and f"torch {torch.__version__}" in done.stdout
    found = rows(done.stdout)
    assert len(found) >= 7
    for _, outcome, seen in found:
        assert outcome == "skipped"
        assert seen in ("needs 1 GPU(s), this machine has 0", "needs 2 GPU(s), this machine has 0")


def test_a_check_that_breaks_is_one_failed_row_and_the_others_still_run(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def not_here() -> str:
        raise bench.NotHereError("no bf16")

    def long_story() -> str:
        raise RuntimeError("beginning " + "x" * 5000 + "\n\x1b[31mthe | cause\x1b[0m")

    checks = {
        "key": lambda: {}["peak_bytes"],
        "json": lambda: json.loads("no JSON"),
        "timeout": lambda: subprocess.run(["sleep", "9"], timeout=0.01),
        "not here": not_here,
        "long": long_story,
        "good": lambda: "seen",
        "of two": lambda: "never run",
    }
    gpus = {"of two": 2}
    monkeypatch.setattr(bench, "CHECKS", [bench.Check(name, gpus.get(name, 1), run) for name, run in checks.items()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(bench, "describe_machine", lambda num_gpus: f"{num_gpus} x card")
    assert bench.main([]) == 1
    table = capsys.readouterr().out
    assert table.startswith("Machine: 1 x card\n")
    found = {name: (outcome, seen) for name, outcome, seen in rows(table)}
    assert list(found) == list(checks)
    assert found["key"] == ("FAILED", "KeyError: 'peak_bytes'")
    assert found["json"][0] == "FAILED" and found["json"][1].startswith("JSONDecodeError: ")
    assert found["timeout"][0] == "FAILED"
    assert found["not here"] == ("skipped", "no bf16")
    assert found["long"][0] == "FAILED" and found["long"][1].endswith("xxx the / cause") and len(found["long"][1]) < 600
    assert found["good"] == ("passed", "seen")
    assert found["of two"] == ("skipped", "needs 2 GPU(s), this machine has 1")
    monkeypatch.setattr(bench, "CHECKS", [bench.Check("good", 1, lambda: "seen")])
    assert bench.main([]) == 0


@pytest.mark.parametrize(
    ("script", "driver"),
    [
        ("#!/bin/sh\necho 570.86.15\necho 570.86.15\n", "570.86.15"),
        ("#!/bin/sh\nexit 9\n", "unknown (nvidia-smi fails)"),
        (None, "unknown (no nvidia-smi)"),
    ],
)
def test_the_table_names_the_driver(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, driver: str
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script is not None else str(tmp_path))
    assert bench.describe_machine(0).startswith(f"no GPU, driver {driver}, torch ")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(bench.nccl, "version", lambda: (2, 27, 5))
    described = bench.describe_machine(2)
    assert described.startswith(f"2 x NVIDIA H100, driver {driver}, torch ") and described.endswith("NCCL 2.27.5")


def test_a_training_run_gives_what_the_checks_read(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NUM_STEPS", 3)
    result = bench.train("single", 1)
    assert bench.largest_gap(result, result) == 0
    assert {"loss_first", "loss_last", "peak_is", "peak_bytes"} <= set(result)
    with pytest.raises(RuntimeError, match="strategy"):
        bench.train("ddp", 1)


@pytest.mark.parametrize(
    ("machine", "fit", "words"),
    [
        ("2 ranks, nccl, H100", "3 %", ""),
        ("2 ranks, gloo, 2 cores", "3 %", "not measured over NCCL"),
        ("2 ranks, nccl, H100", "40 %, poor fit", "no straight line fits all-to-all: "),
    ],
)
def test_links_count_as_measured_over_nccl_and_with_a_good_fit_only(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, machine: str, fit: str, words: str
) -> None:
    table = f"Machine: {machine}, torch 2\n\n| all-reduce | 9 | 200 | 2 % | 1 ms |\n| all-to-all | 9 | 200 | {fit} |\n"
    done = subprocess.CompletedProcess([], 0, table, "")
    monkeypatch.setattr(bench.subprocess, "run", lambda *_, **__: done)
    outcome, seen = bench.run_check(bench.Check("links", 2, bench.check_links), 2)
    assert (outcome, words in seen) == ("FAILED" if words else "passed", True)


@pytest.mark.notebook
def test_the_cell_of_the_forked_ranks_runs(bench: ModuleType) -> None:
    seen = bench.run_forked_cell()
    assert [ranks["sum"] for ranks in seen] == [[3.0] * 4] * 2
    assert all(ranks["is_forked"] == (sys.platform == "linux") for ranks in seen)


@pytest.mark.slow
@pytest.mark.gpu(1)
@pytest.mark.timeout(3000)
def test_every_check_that_this_machine_allows_passes(bench: ModuleType) -> None:
    table, all_well = bench.build_table(torch.cuda.device_count())
    assert all_well, table
