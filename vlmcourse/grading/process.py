"""An nbgrader process of its own: apart from the user's settings, limited in time, and gone when it is over.

Enters: nbgrader's arguments and a course folder. Leaves: exit code and log. Kernels run in sessions of their own, so
they are found through the process tree and not through the process group; and where nbgrader has crashed, so that they
hang on no tree any more, by a variable in their environment.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

from vlmcourse.notebook.starting import START_LATE

QUIET_KERNEL = ("--IPKernelApp.log_level=40",)
"""Arguments for a kernel that our own code starts on this machine: its log shows errors, but no warning that it speaks
without encryption, which would stand in the middle of a command's output."""

MAX_ROUNDS = 10
"""How often to look again for processes that were started while others were being killed."""


@dataclass(frozen=True, kw_only=True)
class ProcessResult:
    """How a process ended."""

    returncode: int
    log: str
    timed_out: bool = False


def run_nbgrader(arguments: list[str], folder: Path, time_limit_s: float) -> ProcessResult:
    """Run an nbgrader command in a course folder, apart from the user's Jupyter and IPython settings.

    Args:
        arguments: subcommand and its arguments.
        folder: the course folder.
        time_limit_s: seconds after which it is stopped with all that it started.
    """
    log_path = folder / "nbgrader.log"
    mark = f"VLMCOURSE_GRADING_{uuid.uuid4().hex}"
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vlmcourse.grading.nbgrader_process", *arguments],
            cwd=folder,
            env={**_environment(folder), mark: "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            stop_tree(process, mark)
    text = log_path.read_text(encoding="utf-8", errors="replace")
    return ProcessResult(returncode=process.returncode, log=text, timed_out=timed_out)


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of an isolated run."""
    private = folder / ".jupyter"
    # nbgrader starts `alembic` by name, which stands beside the interpreter even where that is not on the PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {
        **os.environ,
        "PATH": path,
        START_LATE: "1",
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_CONFIG_DIR": str(private / "config"),
        "JUPYTER_DATA_DIR": str(private / "data"),
        "JUPYTER_RUNTIME_DIR": str(private / "runtime"),
        "IPYTHONDIR": str(private / "ipython"),
    }


def stop_tree(process: subprocess.Popen, mark: str = "") -> None:
    """Kill a process, with every process that it started, kernels in sessions of their own included.

    Args:
        process: may have ended by itself.
        mark: an environment variable of this process and no other. What it started has inherited it, and is found by
            it when the process is gone; without it only a process that still runs is followed.
    """
    family = []
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
    for _ in range(MAX_ROUNDS):
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=5)
        family = _find_marked(mark) if mark else []
        if not family:
            return


def _find_marked(mark: str) -> list[psutil.Process]:
    """Return the processes with `mark` in their environment; those of other users cannot be asked."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def last_lines(text: str, count: int) -> str:
    """Return the last lines of a log that are no progress messages."""
    lines = [line for line in text.splitlines() if line.strip() and "| INFO]" not in line]
    return "\n".join(lines[-count:])
