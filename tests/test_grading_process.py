"""An nbgrader process leaves nothing behind, however it ends."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from vlmcourse.grading.process import run_nbgrader

pytestmark = pytest.mark.timeout(120)

START_A_KERNEL = """
import os, signal, subprocess, sys
kernel = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
with open("pid", "w") as file:
    file.write(str(kernel.pid))
"""
"""nbgrader runs it as its configuration; like a kernel, the process is in a session of its own."""


@pytest.mark.parametrize(
    ("then", "returncode"), [("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("os._exit(3)", 3)]
)
def test_the_kernels_of_an_nbgrader_that_has_crashed_are_killed(tmp_path: Path, then: str, returncode: int) -> None:
    (tmp_path / "nbgrader_config.py").write_text(START_A_KERNEL + then, encoding="utf-8")
    started_s = time.monotonic()
    result = run_nbgrader(["list"], tmp_path, time_limit_s=60)
    assert (result.returncode, result.timed_out) == (returncode, False), result.log
    kernel_pid = int((tmp_path / "pid").read_text())
    try:
        is_gone = psutil.Process(kernel_pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        is_gone = True
    assert is_gone and time.monotonic() - started_s < 55
