"""A process that has imported torch and then waits to split into ranks: a start costs milliseconds instead of seconds.

Runs beside the notebook's kernel, one a kernel. It never touches CUDA and runs no code of a cell, so every rank starts
as if it were new. Enters through a private socket: the description of a rank and three open files. Leaves: a guard with
its rank (see `guard.py`), and later how it ended. When the kernel closes its end of the socket, even by being killed,
this process ends, and every guard with it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from pathlib import Path

from vlmcourse.notebook import guard

FIRST_MODULES = (
    "torch",
    *(f"vlmcourse.notebook.{name}" for name in ("worker", "process_group", "rank_shell", "spawning", "variables")),
)
"""Imported before the first rank: what every cell needs."""
IDLE_MODULES = ("torch.distributed.fsdp", "vlmcourse.train.trainer", "torch._dynamo", "matplotlib.pyplot")
"""Imported one by one while nothing else is to do: what most cells need sooner or later."""
QUIET_S = 0.3
"""How long nothing must have been asked before an import begins: a first cell that waits asks at once."""
READY = -1
REFUSED = -2
"""Sent in place of a process id: this process cannot be split any more, because CUDA is in use in it."""
NO_ROOM = -3
"""Sent in place of a process id: the machine allows no further process or open file."""
NUMBER = struct.Struct("=q")
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from vlmcourse.notebook.fork_server import main; main(int(sys.argv.pop()))"
)
"""Run with `python -c BOOT SOCKET SYS_PATH`."""


def main(control_fd: int) -> None:
    """Serve until the other end of the socket is closed; in a forked rank, run its cell and end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard.adopt_orphans()
    control = socket.socket(fileno=control_fd)
    for name in FIRST_MODULES:
        importlib.import_module(name)
    sys.modules["vlmcourse.notebook.rank_shell"].get_shell()
    with contextlib.suppress(BrokenPipeError):
        control.send(NUMBER.pack(READY))
        ForkServer(control).serve()
    os._exit(0)


class ForkServer:
    """The loop of the server: import, fork, and tell how ranks ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._wake, write_end = os.pipe()
        os.set_blocking(write_end, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._write_end = write_end
        self._status_files: dict[int, int] = {}
        """Where to tell how a guard ended, by its process id."""
        self._to_import = list(IDLE_MODULES)

    def serve(self) -> None:
        """Answer requests; returns when the kernel has gone."""
        while True:
            idle = self._to_import and not self._status_files
            ready, _, _ = select.select([self._control, self._wake], [], [], QUIET_S if idle else None)
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._report_ends()
            if self._control in ready:
                message, files, _, _ = socket.recv_fds(self._control, 4096, 3)
                if not message:
                    return
                self._answer(message.decode(), files)
            elif not ready and idle:
                importlib.import_module(self._to_import.pop(0))

    def _answer(self, request_path: str, files: list[int]) -> None:
        output, lifeline, status = files
        if not can_fork():
            os.close(status)
            self._control.send(NUMBER.pack(REFUSED))
        else:
            try:
                pid = self._fork(request_path, output, lifeline, status)
            except OSError:
                os.close(status)
                pid = NO_ROOM
            else:
                self._status_files[pid] = status
            self._control.send(NUMBER.pack(pid))
        os.close(output)
        os.close(lifeline)

    def _fork(self, request_path: str, output: int, lifeline: int, status: int) -> int:
        """Split off a guard, which leads a session of its own when this returns, so that it can be signalled."""
        gc.freeze()  # a collection in a child would write to, and so copy, every page that it shares with this one
        is_up, says_up = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_rank(request_path, output, lifeline, (output, lifeline, status, is_up, says_up))
        finally:
            os.close(says_up)
        os.read(is_up, 1)
        os.close(is_up)
        return pid

    def _become_rank(self, request_path: str, output: int, lifeline: int, inherited: tuple[int, ...]) -> None:
        """Continue as a guard and, below it, as a rank that runs its cell; never returns."""
        code = 1
        try:
            os.setsid()
            os.dup2(lifeline, guard.LIFELINE)
            os.dup2(output, 1)
            os.dup2(output, 2)
            self._control.close()
            signal.set_wakeup_fd(-1)
            for file in (*inherited, self._wake, self._write_end, *self._status_files.values()):
                os.close(file)
            request = json.loads(Path(request_path).read_bytes())
            if guard.guard_rank(request["private_dir"]):
                guard.let_interrupts_come()
                code = run_rank(request)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code)

    def _report_ends(self) -> None:
        """Collect guards that have ended and tell how."""
        for pid, status_file in list(self._status_files.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                # The guard leaves nothing behind, unless it was killed itself. Its number is its own until it is
                # collected; the kernel may hear of the end much later, when the number has a new owner.
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if code == -signal.SIGKILL:
                    self._end_orphans()
                with contextlib.suppress(BrokenPipeError):
                    os.write(status_file, NUMBER.pack(code))
                os.close(status_file)
                del self._status_files[pid]

    def _end_orphans(self) -> None:
        """Kill what a guard that was killed itself has left behind: it is a child of this process then."""
        until_s = time.monotonic() + guard.KILL_S
        while time.monotonic() < until_s:
            orphans = [pid for pid in guard.list_children() if pid not in self._status_files]
            if not orphans:
                return
            for pid in orphans:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.005)


def can_fork() -> bool:
    """Whether ranks forked from here can use CUDA: not once this process has, for whatever reason."""
    import torch

    return not torch.cuda.is_initialized()


def run_rank(request: dict) -> int:
    """Run the cell as a process of its own would; return the exit code."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[:] = request["sys_path"]
    sys.argv[:] = ["-c"]
    import numpy
    import torch

    forget_finalizers()
    # New processes differ in their random numbers; forked ones would all draw the same.
    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # read from the environment only when torch is imported
    from vlmcourse.notebook.worker import main as run_cell

    try:
        run_cell(request["private_dir"])
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the cell's threads, as the interpreter's end does
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        atexit._run_exitfuncs()
        flush_open_files()
    return 0


def forget_finalizers() -> None:
    """Undo nothing at the end of what the imports have set up: 0.1 s, nearly all of it for PyTorch's operators."""
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False


def flush_open_files() -> None:
    """Write what the cell has left in the buffers of files that it did not close, as the interpreter's end does."""
    for file in gc.get_objects():
        if isinstance(file, io.IOBase):
            with contextlib.suppress(Exception):  # closed, read-only, or a class of the cell's own
                file.flush()
