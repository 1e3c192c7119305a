"""Two ways to start one rank behind its guard: as a new process, or forked from a server that has imported torch.

Enters: a command or the private folder of a cell, and an environment. Leaves: a `RankHandle`. The fork server is
started once a kernel and again when what it has read at its start has changed: the environment, or the package's files.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

import vlmcourse
from vlmcourse.notebook import guard
from vlmcourse.notebook.fork_server import BOOT as SERVER_BOOT
from vlmcourse.notebook.fork_server import NO_ROOM, NUMBER, READY
from vlmcourse.notebook.jobs import BOOT, remove_orphans

SERVER_START_S = 120.0
"""How long importing torch may take before ranks are started directly; minutes on a cold network disk."""
ANSWER_S = 30.0
"""How long a fork may take; the server may be in the middle of an import."""
GUARD_END_S = 3.0
"""How long a guard may take to end what its rank has started."""


START_LATE = "VLMCOURSE_START_LATE"
"""Set in the environment of kernels that most likely start no rank, such as those of grading: their fork server is
started by the first cell that needs it, and otherwise 6 s of a core are saved."""
RANK_ENVIRONMENT = {
    "MPLBACKEND": "module://vlmcourse.notebook.figures",
}
"""What is different in a rank's environment, whichever way it is started."""
SERVER_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONIOENCODING": "utf-8",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for GPUs in the server must not start CUDA in it
}


class RankHandle(Protocol):
    """The process of a guard: enough to signal it, to read its output, and to learn how it ended."""

    pid: int
    output_fd: int
    """Reading end of what the rank prints."""

    def poll(self) -> int | None:
        """Return the exit code (-n for signal n), or None while it runs.

        When it has ended so has everything in its process group, and the number of the group may belong to others.
        """
        ...

    def wait(self) -> int:
        """Return the exit code, when there is one."""
        ...

    def close_lifeline(self) -> None:
        """Close this end of the pipe that tells the guard that its launcher is there."""
        ...

    def close_output(self) -> None:
        """Read no more of what the rank prints."""
        ...


Starter = Callable[[Mapping[str, str]], RankHandle]
"""Starts one rank in the environment given."""


class DirectRank:
    """A rank in a new process."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], private_dir: Path) -> None:
        """Start it.

        Raises:
            OSError: if the machine refuses another process.
        """
        # Until the guard is ready for an interrupt, it waits: the process inherits what is blocked here.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(private_dir), *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(env),
                bufsize=0,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert self._popen.stdout is not None
        self.pid = self._popen.pid
        self.output_fd = self._popen.stdout.fileno()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        was_running = self._popen.returncode is None
        code = self._popen.poll()
        if was_running and code is not None:
            # The guard leaves nothing behind, unless it was killed itself. Its number has no new owner yet.
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        return code

    def wait(self) -> int:
        """Return the exit code, when there is one."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def close_lifeline(self) -> None:
        """Tell the guard to end everything."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def close_output(self) -> None:
        """Read no more of what the rank prints."""
        assert self._popen.stdout is not None
        self._popen.stdout.close()


class ForkedRank:
    """A rank that the fork server has split off; the server tells through a pipe how it ended."""

    def __init__(self, pid: int, output_fd: int, lifeline_fd: int, status_fd: int) -> None:
        self.pid = pid
        self.output_fd = output_fd
        self._lifeline_fd: int | None = lifeline_fd
        self._status_fd = status_fd
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self._code is None and select.select([self._status_fd], [], [], 0)[0]:
            self._read_code()
        return self._code

    def wait(self) -> int:
        """Return the exit code, when there is one."""
        if self._code is None:
            self._read_code()
        assert self._code is not None
        return self._code

    def _read_code(self) -> None:
        told = os.read(self._status_fd, NUMBER.size)
        os.close(self._status_fd)
        if not told:
            self._wait_for_guard()
        self._code = NUMBER.unpack(told)[0] if told else -signal.SIGKILL

    def _wait_for_guard(self) -> None:
        """The server was killed: let the guard end all that its rank started, and itself, before it is counted out."""
        self.close_lifeline()
        until_s = time.monotonic() + GUARD_END_S
        with contextlib.suppress(psutil.Error):
            guard_process = psutil.Process(self.pid)
            while guard_process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until_s:
                time.sleep(0.01)

    def close_lifeline(self) -> None:
        """Tell the guard to end everything."""
        if self._lifeline_fd is not None:
            os.close(self._lifeline_fd)
            self._lifeline_fd = None

    def close_output(self) -> None:
        """Read no more of what the rank prints."""
        os.close(self.output_fd)


class RankStarter:
    """Starts the ranks of a kernel's cells: forked where that is possible, else directly."""

    def __init__(self) -> None:
        """Start a fork server in the background, so that it is ready by the first cell (see `START_LATE`)."""
        self._server: ForkServerClient | None = None
        self._can_fork = sys.platform == "linux"
        atexit.register(self.close)
        remove_orphans()
        if START_LATE not in os.environ:
            self.prepare()

    @property
    def is_ready(self) -> bool:
        """Whether a rank would start in a blink."""
        return self._server is not None and self._server.is_ready

    def prepare(self) -> None:
        """See to it that there is a server that has read what is now true; call it before the ranks of a cell."""
        if not self._can_fork:
            self.close()
        elif self._server is None or not self._server.is_current(os.environ):
            self.close()
            self._server = ForkServerClient(os.environ)

    def wait_until_ready(self) -> None:
        """Wait for the server's imports, before a cell starts its first rank: a person may interrupt this."""
        if self._server is not None and self._can_fork:
            self._can_fork = self._server.wait_until_ready(SERVER_START_S)

    def start(self, private_dir: Path, env: Mapping[str, str]) -> RankHandle:
        """Start the rank that runs the cell in `private_dir`.

        Raises:
            OSError: if the machine refuses another process.
        """
        if self._server is not None and self._can_fork:
            forked = self._server.start_rank(private_dir, env)
            if forked is not None:
                return forked
            self._can_fork = self._server.has_died_in_use
        return DirectRank([sys.executable, "-c", BOOT, str(private_dir)], env, private_dir)

    def close(self) -> None:
        """End the server, if there is one."""
        if self._server is not None:
            self._server.close()
            self._server = None


class ForkServerClient:
    """The kernel's end of one fork server."""

    def __init__(self, env: Mapping[str, str], boot: str = SERVER_BOOT) -> None:
        """Start a server; it needs seconds before it can answer, and this does not wait for them.

        Args:
            env: its environment.
            boot: what its Python runs.
        """
        self._snapshot = snapshot(env)
        self._lock = threading.Lock()
        self._is_ready = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", boot, str(theirs.fileno()), json.dumps(readable_path())]
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**env, **SERVER_ENVIRONMENT, **RANK_ENVIRONMENT},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def is_current(self, env: Mapping[str, str]) -> bool:
        """Whether the server runs, in this environment and with the package's files as they are now."""
        return self._popen.poll() is None and self._snapshot == snapshot(env)

    @property
    def is_ready(self) -> bool:
        """Whether the server has imported torch."""
        return self.wait_until_ready(0)

    @property
    def has_died_in_use(self) -> bool:
        """Whether the server once worked and is gone, as when someone killed it; another one may work then."""
        return self._is_ready and self._popen.poll() is not None

    def wait_until_ready(self, seconds: float) -> bool:
        """Return whether the server has imported torch, waiting for at most so long."""
        with self._lock:
            if not self._is_ready:
                self._is_ready = self._receive(seconds) == READY
            return self._is_ready

    def start_rank(self, private_dir: Path, env: Mapping[str, str]) -> ForkedRank | None:
        """Split off a rank that runs the cell in `private_dir`; return None where the server cannot.

        Raises:
            OSError: if the machine allows no further process.
        """
        if not self.wait_until_ready(SERVER_START_S):
            return None
        with self._lock:
            return self._request(private_dir, env)

    def _request(self, private_dir: Path, env: Mapping[str, str]) -> ForkedRank | None:
        request = {"private_dir": str(private_dir), "env": dict(env), "cwd": os.getcwd(), "sys_path": readable_path()}
        path = private_dir / f"fork-{env['RANK']}.json"
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(request, file)
        output, output_end = os.pipe()
        lifeline_end, lifeline = os.pipe()
        status, status_end = os.pipe()
        try:
            socket.send_fds(self._control, [str(path).encode()], [output_end, lifeline_end, status_end])
            pid = self._receive(ANSWER_S)
        except OSError:
            pid = None
        finally:
            for end in (output_end, lifeline_end, status_end):
                os.close(end)
        if pid is not None and pid > 0:
            return ForkedRank(pid, output, lifeline, status)
        for end in (output, lifeline, status):
            os.close(end)
        if pid is None:
            self.close()  # it must not answer later, when something else has been started in its place
        if pid == NO_ROOM:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return None

    def _receive(self, seconds: float) -> int | None:
        """Return the server's next number; None where none comes."""
        until_s = time.monotonic() + seconds
        while not select.select([self._control], [], [], min(0.1, seconds))[0]:
            if time.monotonic() >= until_s:
                return None
        message = self._control.recv(NUMBER.size)
        return NUMBER.unpack(message)[0] if message else None

    def close(self) -> None:
        """End the server."""
        self._control.close()
        self._popen.kill()
        self._popen.wait()


def snapshot(env: Mapping[str, str]) -> tuple[object, ...]:
    """Return what a server has read at its start and cannot read again."""
    folder = Path(vlmcourse.__file__).parent
    files = set()
    for path in folder.rglob("*.py"):
        with contextlib.suppress(FileNotFoundError):  # an editor is replacing it
            found = path.stat()
            files.add((path, found.st_mtime_ns, found.st_size))
    return dict(env), files, sys.executable


def readable_path() -> list[str]:
    """Return `sys.path` without the entries that Python itself ignores, such as `Path` objects."""
    return [entry for entry in sys.path if isinstance(entry, str)]
