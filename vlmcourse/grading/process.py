"""An nbgrader process of its own: apart from the user's settings, limited in time, and gone when it is over.

Enters: nbgrader's arguments and a course folder. Leaves: exit code and log. Kernels run in sessions of their own, so
they are found through the process tree and not through the process group.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil


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
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vlmcourse.grading.nbgrader_process", *arguments],
            cwd=folder,
            env=_environment(folder),
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
            stop_tree(process)
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
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_CONFIG_DIR": str(private / "config"),
        "JUPYTER_DATA_DIR": str(private / "data"),
        "JUPYTER_RUNTIME_DIR": str(private / "runtime"),
        "IPYTHONDIR": str(private / "ipython"),
    }


def stop_tree(process: subprocess.Popen) -> None:
    """Kill a process that still runs, with every process that it started, kernels in sessions of their own included."""
    if process.poll() is not None:
        return
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.kill()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=5)


def last_lines(text: str, count: int) -> str:
    """Return the last lines of a log that are no progress messages."""
    lines = [line for line in text.splitlines() if line.strip() and "| INFO]" not in line]
    return "\n".join(lines[-count:])
