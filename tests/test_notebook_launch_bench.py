"""`bench/notebook_launch.py`: a table comes out whatever a tool does, and no clean-up reaches anybody else."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from notebook_kernel import MARK

BENCH = Path(__file__).resolve().parent.parent / "bench"
pytestmark = [pytest.mark.notebook, pytest.mark.timeout(280)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("notebook_launch")


@pytest.fixture
def tools(bench: ModuleType) -> ModuleType:
    return importlib.import_module("notebook_tools")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        (
            "cell",
            {
                "warm": r"\d\.\d{3} s, \d\.\d{3} s",
                "lines": r"\d+\.\d s, all|\d+\.\d s, \d+ lines",
                "kill": r"\d+\.\d s, error: “RankFailure: rank 1 of 2 was killed by SIGKILL.*",
                "orphans": "0",
            },
        ),
        (
            "session",
            {
                "exception": r"error \(RankFailure\), names the rank, and the line",
                "interrupt": r"\d+\.\d s, ranks replaced",
            },
        ),
    ],
)
def test_a_row_of_the_package(
    bench: ModuleType, tool: str, expected: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.md"
    quick = ["--repeat", "2", "--lines", "300", "--limit", "60", "--out", str(table)]
    bench.main(["--only", tool, "--columns", *expected, *quick])
    assert table.read_text(encoding="utf-8") == capsys.readouterr().out
    machine, _, head, _, row = table.read_text(encoding="utf-8").splitlines()
    assert f"{os.cpu_count()} cores" in machine and "torch 2.13.0" in machine and f"--only {tool}" in machine
    assert head.count("|") == row.count("|") == len(expected) + 2
    for found, pattern in zip(row.strip("| ").split(" | ")[1:], expected.values(), strict=True):
        assert re.fullmatch(pattern, found), found


def test_what_a_tool_does_wrong_is_a_cell_of_the_table(bench: ModuleType, tools: ModuleType) -> None:
    limits = bench.Limits(repeat=1, lines=10, seconds=2.0)

    def row(code: str, **more: object) -> list[str]:
        tool = tools.Tool("it", "it", lambda ranks, folder: code, **more)
        return bench.measure_row(tool, ["start", "kill"], limits)

    assert row("", package="no-such-package")[1].startswith("not installed: ")
    assert row("1 / 0") == ["it", "failed: ZeroDivisionError: division by zero", ""]
    assert row("import time; time.sleep(100)") == ["it", "failed: the first cell showed nothing", ""]
    assert row("", setup=("import nothing_like_this",))[1].startswith("failed: ModuleNotFoundError")
    assert row("import os; os._exit(1)")[1].startswith("failed: ")


def test_every_tool_makes_a_cell_of_two_ranks(bench: ModuleType, tools: ModuleType, tmp_path: Path) -> None:
    for tool in tools.TOOLS:
        cell = tool.make_cell(bench.FAIL, tmp_path)
        where = (tmp_path / "script.py").read_text(encoding="utf-8") if cell.startswith("!") else cell
        assert 'raise ValueError("planted")' in where
        assert "2" in cell or tool.keeps_ranks


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen]]:
    """Two processes with the same name; the second has the mark."""
    command = [sys.executable, "-c", "import time; time.sleep(60)  # worker.py"]
    started = [subprocess.Popen(command, env=os.environ | mark) for mark in ({}, {MARK: "bench-test"})]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_a_tool_that_kills_by_name_reaches_only_marked_processes(
    tools: ModuleType, tmp_path: Path, sleepers: list[subprocess.Popen]
) -> None:
    tools.hide_pkill(tmp_path, MARK)
    subprocess.run([tmp_path / "pkill", "-f", "worker.py"], env=os.environ | {MARK: "bench-test"}, check=True)
    assert sleepers[1].wait(timeout=10) == -15
    assert sleepers[0].poll() is None
