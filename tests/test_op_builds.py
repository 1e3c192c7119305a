"""Operations compiled at first use: announced, stale locks named, a missing compiler explained; nothing is compiled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stub_ops import StubBuilder

from vlmcourse.notebook.interrupts import hold_interrupts, ignore_interrupts
from vlmcourse.parallel import op_builds
from vlmcourse.parallel.op_builds import (
    LOCK,
    StaleLockError,
    check_lock,
    find_build_folder,
    find_build_problem,
    first_problem,
    is_built,
    load_op,
)
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.termination import end_as_interrupted

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(op_builds, "SETTLE_S", 0.05)
    return find_build_folder("stub")


def test_a_build_is_announced_and_shows_that_it_lives(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(op_builds, "BEAT_S", 0.05)
    builder = StubBuilder(folder, build_s=0.4)
    assert load_op(builder, ALONE) == "the operation"
    first, last = caplog.messages
    assert first.startswith("rank 0: DeepSpeed compiles the operation 'stub' (2 C++ files)") and str(folder) in first
    assert last.startswith("rank 0: the operation 'stub' is ready after ")
    assert "still compiling 'stub': 1 object file, 0 s" in capsys.readouterr().err
    caplog.clear()
    assert is_built("stub") and load_op(builder, ALONE) == "the operation" and builder.num_loads == 2
    assert not caplog.messages  # nothing is compiled the second time


def test_a_build_that_fails_says_so(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="error: expected ';'"):
        load_op(StubBuilder(folder, error=RuntimeError("error: expected ';'")), ALONE)
    assert not is_built("stub")


def test_a_request_to_end_reaches_the_build_as_an_interrupt(folder: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # so that a build without its own handler goes on
    try:
        with pytest.raises(KeyboardInterrupt):
            load_op(StubBuilder(folder, error=RuntimeError("not ended"), on_load=end_this_process), ALONE)
        with end_as_interrupted(), ignore_interrupts():
            end_this_process()
        with end_as_interrupted(), pytest.raises(KeyboardInterrupt), hold_interrupts():
            end_this_process()
            held = True
        assert held
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with end_as_interrupted():
            end_this_process()
    finally:
        signal.signal(signal.SIGTERM, before)


def end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stale_lock_is_named_before_anything_waits_for_it(folder: Path) -> None:
    (folder / LOCK).touch()
    builder = StubBuilder(folder)
    with pytest.raises(StaleLockError) as caught:
        load_op(builder, ALONE)
    said = str(caught.value)
    assert str(folder / LOCK) in said and " s old, and no process on this machine has it open" in said
    assert f"rm '{folder / LOCK}'" in said and isinstance(caught.value, ValueError)  # told without a traceback
    assert builder.num_loads == 0
    (folder / LOCK).unlink()
    assert load_op(builder, ALONE) == "the operation"


def test_a_lock_that_a_process_holds_is_not_stale(folder: Path) -> None:
    lock = folder / LOCK
    code = f"import os, time; os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            check_lock(folder)
            assert not is_built("stub")
        finally:
            holder.kill()
    with pytest.raises(StaleLockError):
        check_lock(folder)


def test_a_missing_compiler_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    said = find_build_problem()
    assert "there is no C++ compiler 'no-such-compiler -O2'" in said and "install g++ (Debian, Ubuntu)" in said
    assert first_problem(said, ALONE) == f"rank 0: {said}" and first_problem("", ALONE) == ""
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(op_builds.cpp_extension, "is_ninja_available", lambda: False)
    assert find_build_problem() == "there is no ninja, which runs the compiler: pip install ninja"


def test_a_folder_that_cannot_be_made_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="set TORCH_EXTENSIONS_DIR to a folder that you may write to"):
        find_build_folder("stub")
