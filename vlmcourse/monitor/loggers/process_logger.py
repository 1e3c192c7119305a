"""Log through a package that may hang, ask or print: it runs in a process of its own, under time limits.

Enters: rows. Leaves: the rows as JSON lines on the standard input of `package_worker.py`, which imports the package
(wandb, trackio) and gives them to it. So its import and its network cost the training process nothing, what it prints
on stderr (which fails a graded notebook cell) goes nowhere, it has no terminal to ask for a login, and where it hangs,
at its start or at the end, it is ended. If this process is killed, the worker sees the end of its input and finishes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

import vlmcourse
from vlmcourse.monitor.loggers.protocol import LoggerError, Row, RunInfo

MAX_WAITING_ROWS = 10_000
"""Rows that may wait for a worker; more means that it takes none."""
HOW_TO_INSTALL = {
    "wandb": "pip install wandb",
    "trackio": "pip install -e '.[trackio]' without -c constraints.txt, which puts a pillow older than 13 in the place "
    "of the course's",
}
WORKER = "vlmcourse.monitor.loggers.package_worker"


class ProcessLogger:
    """A logger of a package, in a process of its own. Its start and its rows never wait; `close` does, to its limit."""

    retries = False

    def __init__(
        self, name: str, *, project: str, mode: str, timeout_s: float, command: Sequence[str] | None = None
    ) -> None:
        """Describe the logger; `start` starts its process.

        Args:
            name: of the package, one that `package_worker.BACKENDS` knows.
            project: what it files the run under.
            mode: offline or online.
            timeout_s: seconds that it may take to start, and again to finish.
            command: what to start instead of the worker, which must talk as the worker does.
        """
        self.name = name
        self._options = {"project": project, "mode": mode, "timeout_s": timeout_s}
        self._timeout_s = timeout_s
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING_ROWS)
        self._failed = ""
        self._is_started, self._is_finished = threading.Event(), threading.Event()
        self._started_s = 0.0
        self._reader: threading.Thread | None = None

    def start(self, info: RunInfo) -> None:
        """Start the process and return at once; rows wait until it is ready.

        Raises:
            LoggerError: if the package is not installed.
            OSError: if no process can be started.
        """
        if self._command is None and importlib.util.find_spec(self.name) is None:
            raise LoggerError(f"the package {self.name} is not installed: {HOW_TO_INSTALL[self.name]}")
        command = self._command or [sys.executable, "-m", WORKER, self.name]
        package_root = str(Path(vlmcourse.__file__).resolve().parent.parent)
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._started_s = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        told = {
            "name": info.name,
            "folder": str(info.folder.resolve()),
            "config": info.config,
            "hardware": info.hardware,
            "keep_until_step": info.keep_until_step,
        }
        self._lines.put(_encode({"run": told, "options": self._options}))
        threading.Thread(target=self._write_lines, args=[self._process], daemon=True).start()
        self._reader = threading.Thread(target=self._read_answers, args=[self._process], daemon=True)
        self._reader.start()

    def log(self, row: Row) -> None:
        """Hand one row over, without waiting for what becomes of it.

        Raises:
            LoggerError: if the process has failed, or has not started within its time.
        """
        self._check()
        try:
            self._lines.put_nowait(_encode({"row": dict(row)}))
        except queue.Full as error:
            self._end()
            raise LoggerError(f"it took none of {MAX_WAITING_ROWS} rows") from error

    def close(self) -> None:
        """Wait until the package has finished, but no longer than the time limit; then end it.

        Raises:
            LoggerError: if it has failed, or had to be ended.
        """
        process, self._process = self._process, None
        if process is None:
            return
        try:
            self._lines.put_nowait(_encode({"close": True}))
            self._lines.put_nowait(None)
            process.wait(self._timeout_s)
        except (queue.Full, subprocess.TimeoutExpired) as error:
            raise LoggerError(f"it was ended after {self._timeout_s:g} s; see logging.timeout_s") from error
        finally:
            _kill(process)
            if self._reader is not None:
                self._reader.join(1)
        if self._failed or not self._is_finished.is_set():
            raise LoggerError(self._failed or f"its process ended with code {process.returncode}")

    def _check(self) -> None:
        """Raise the reason for which the process takes no more rows, if there is one."""
        process = self._process
        if process is None:
            raise LoggerError("it is closed")
        if process.poll() is not None and self._reader is not None:
            self._reader.join(1)  # its last words may be on their way
        if self._failed or process.poll() is not None:
            self._end()
            raise LoggerError(self._failed or f"its process ended with code {process.returncode}")
        if not self._is_started.is_set() and time.monotonic() - self._started_s > self._timeout_s:
            self._end()
            raise LoggerError(f"it did not start within {self._timeout_s:g} s; see logging.timeout_s")

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process = None

    def _write_lines(self, process: subprocess.Popen[bytes]) -> None:
        """Pass lines on as the process takes them; run by a thread, as a pipe may be full."""
        assert process.stdin is not None
        try:
            while (line := self._lines.get()) is not None:
                process.stdin.write(line)
                process.stdin.flush()
            process.stdin.close()
        except OSError:
            return  # the process is gone; why, it has said itself

    def _read_answers(self, process: subprocess.Popen[bytes]) -> None:
        """Note what the process says about itself; run by a thread."""
        assert process.stdout is not None
        for line in process.stdout:
            try:
                answer = json.loads(line)
            except ValueError:
                continue
            if "started" in answer:
                self._is_started.set()
            elif "finished" in answer:
                self._is_finished.set()
            else:
                self._failed = str(answer.get("failed", answer))


def _encode(message: dict[str, Any]) -> bytes:
    return (json.dumps(message, default=str) + "\n").encode()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started; nothing where it has ended."""
    try:
        group = [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
    except psutil.NoSuchProcess:
        group = []
    process.kill()
    process.wait()
    for child in group:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
