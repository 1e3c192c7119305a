"""A real Jupyter kernel for tests: run a cell, see what a notebook would show, find every process it left."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

MARK = "VLMCOURSE_TEST_MARK"
START_S = 180
"""Two ranks import torch in about 4 s; machines that also do other things take much longer."""


@dataclass
class Shown:
    """What a notebook shows under a cell."""

    stdout: str = ""
    stderr: str = ""
    outputs: list[tuple[str, Any]] = field(default_factory=list)
    """Everything in order: ("text", str), ("display", {mime: data}), ("update", ...), ("error", name)."""
    error: str = ""
    """`Name: message`; empty where the cell succeeded."""
    traceback: str = ""
    seconds_from_first_text: float = 0.0

    def lines(self, rank: int) -> list[str]:
        """Return what the rank printed, alone or with others."""
        tagged = re.findall(r"^\[([\d,-]+)\] (.*)$", self.stdout, re.MULTILINE)
        return [text for tag, text in tagged if rank in ranks_of(tag)]

    def pictures(self) -> list[str]:
        return [data["image/png"] for kind, data in self.outputs if kind == "display" and "image/png" in data]


def ranks_of(tag: str) -> list[int]:
    """Return the ranks that `0,2-4` names."""
    runs = (part.partition("-") for part in tag.split(","))
    return [rank for first, _, last in runs for rank in range(int(first), int(last or first) + 1)]


class Kernel:
    """One kernel with the course's extension loaded; nothing is shared with the test process but files."""

    def __init__(self, cwd: str | None = None, env: Mapping[str, str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        self.manager = KernelManager()
        environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", **(env or {})}
        quiet = ["--Application.log_level=40"]  # it would warn about its ports at every start
        self.manager.start_kernel(env=environment, cwd=cwd, extra_arguments=quiet)
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid  # type: ignore[union-attr]

    def run(self, code: str, timeout_s: float = START_S, on_text: Callable[[str], None] | None = None) -> Shown:
        """Run a cell; `on_text` is called with all of its text so far, whenever some arrives."""
        shown = Shown()
        first_text_s: list[float] = []

        def see(message: dict[str, Any]) -> None:
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                setattr(shown, content["name"], getattr(shown, content["name"]) + content["text"])
                shown.outputs.append(("text", content["text"]))
                first_text_s.append(time.monotonic())
                if on_text is not None:
                    on_text(shown.stdout)
            elif kind in ("display_data", "execute_result"):
                shown.outputs.append(("display", content["data"]))
            elif kind == "update_display_data":
                shown.outputs.append(("update", content["data"]))
            elif kind == "clear_output":
                shown.outputs.append(("clear", content["wait"]))
            elif kind == "error":
                shown.outputs.append(("error", content["ename"]))
                shown.error = f"{content['ename']}: {content['evalue']}"
                shown.traceback = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))

        self.client.execute_interactive(code, timeout=timeout_s, output_hook=see, allow_stdin=False)
        shown.seconds_from_first_text = time.monotonic() - first_text_s[0] if first_text_s else 0.0
        return shown

    def start(self, code: str) -> None:
        """Send a cell and do not wait for it."""
        self.client.execute(code)

    def wait_for_text(self, text: str) -> None:
        """Wait until a cell that was sent has printed `text`."""
        seen, end_s = "", time.monotonic() + START_S
        while text not in seen:
            assert time.monotonic() < end_s, f"{text!r} is not in {seen!r}"
            message = self.client.get_iopub_msg(timeout=START_S)
            seen += message["content"].get("text", "")

    def wait_until_idle(self) -> None:
        """Wait until a cell that was sent has ended; what is sent before an error is shown would not be run."""
        while self.client.get_iopub_msg(timeout=START_S)["content"].get("execution_state") != "idle":
            pass

    def processes(self, with_server: bool = False) -> list[psutil.Process]:
        """Return what runs with this kernel's mark in its environment, except the kernel and its idle fork server."""
        others = [found for found in marked_processes(self.mark) if found.pid != self.pid]
        return [found for found in others if with_server or not is_server(found, self.pid)]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        for process in self.processes(with_server=True):
            process.kill()


@contextmanager
def loaded_kernel(cwd: Path | None = None) -> Iterator[Kernel]:
    """A kernel with the course's extension loaded, in `cwd` or the tests' own folder; ended on leaving."""
    kernel = Kernel(cwd=str(cwd)) if cwd is not None else Kernel()
    try:
        assert kernel.run("%load_ext vlmcourse").error == ""
        yield kernel
    finally:
        kernel.close()


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return what runs with this mark in its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def is_server(process: psutil.Process, kernel_pid: int) -> bool:
    """Whether it is the fork server itself; its children, the guards, have the same command line."""
    try:
        return process.ppid() == kernel_pid and "vlmcourse.notebook.fork_server" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def wait_until(is_true: Callable[[], bool], within_s: float) -> bool:
    """Return whether it became true in time."""
    end_s = time.monotonic() + within_s
    while not is_true():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True
