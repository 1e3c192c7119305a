"""A small process between the notebook (or the command line) and one rank, so that nothing can be left running.

The launcher runs `python -I -S guard.py FOLDER COMMAND...` in a session of its own, or the fork server becomes one. The
guard starts the rank, waits for it, leaves its peak memory in FOLDER, stops whatever the rank left behind (such as data
loader workers), and ends exactly as it ended: same exit code, same signal. It holds the reading end of a pipe as its
standard input. When the other end closes, because the launcher asked for it or because the notebook's kernel was
killed, the guard kills everything below it and removes FOLDER.

Independent of the rest of the package: as a script it must start in a blink, before anything can go wrong.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIFELINE = 0
"""Standard input: readable, at end of file, once the launcher is gone."""
POLL_S = 0.5
SETTLE_S = 0.2
"""How long processes that a rank started may take to notice that it has ended."""
TERMINATE_S = 0.5
KILL_S = 2.0
CANNOT_START = 127
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""The unit in which the system counts a process's peak memory."""


def main(arguments: list[str]) -> None:
    """Run the command of one rank until it ends or its launcher does; never returns."""
    folder, *command = arguments
    if guard_rank(folder):
        replace_by(command)


def guard_rank(folder: str) -> bool:
    """Split into a guard and its rank: the rank gets True, and the guard never returns.

    Args:
        folder: private to the launcher; removed once that is gone.
    """
    launcher = os.getppid()
    adopt_orphans()
    wake = listen_for_signals()
    guard = os.getpid()
    rank = os.fork()
    if rank == 0:
        os.close(wake)
        become_rank(guard)
        return True
    if signal.SIGINT in signal.sigpending():  # it came before there was a rank
        os.kill(rank, signal.SIGINT)
    let_interrupts_come()
    ended = None
    while ended is None:
        ready, _, _ = select.select([LIFELINE, wake], [], [], POLL_S)
        if wake in ready:
            os.read(wake, 4096)
        ended = reap(rank)
        if ended is None and (LIFELINE in ready or os.getppid() != launcher):
            end_all(rank, folder)
    status, peak_bytes = ended
    write_peak(folder, peak_bytes)
    end_leftovers()
    end_like(status)
    return False


def listen_for_signals() -> int:
    """Survive the signals that are meant for the rank; return a file that becomes readable when a child ends.

    An interrupt stays blocked, as who starts a guard leaves it: guard and rank let it come when they are ready for it.
    """
    wake, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT])
    return wake


def become_rank(guard: int) -> None:
    """Turn the forked child into the rank: it dies with its guard, reads nothing, and has default signals.

    An interrupt is still blocked: `let_interrupts_come`.
    """
    call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, LIFELINE)
    os.close(nothing)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def replace_by(command: list[str]) -> None:
    """Become the command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    let_interrupts_come()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error}", flush=True)
        os._exit(CANNOT_START)


def let_interrupts_come() -> None:
    """Unblock SIGINT; one that has come since the guard was started arrives here."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def adopt_orphans() -> None:
    """Become the parent of processes below this one that lose theirs, even in another session (Linux only)."""
    call_prctl(PR_SET_CHILD_SUBREAPER, 1)


def call_prctl(option: int, value: int) -> None:
    """Set one attribute of this process on Linux; elsewhere the lifeline alone has to do."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(int(value)), 0, 0, 0)


def reap(rank: int) -> tuple[int, int] | None:
    """Collect every child that has ended; return the rank's wait status and peak bytes if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == rank:
                found = status, usage.ru_maxrss * MAXRSS_BYTES
    return found


def write_peak(folder: str, peak_bytes: int) -> None:
    """Leave the rank's peak memory where the launcher finds it."""
    with contextlib.suppress(OSError):
        file = os.open(os.path.join(folder, f"peak-{os.getpid()}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        os.write(file, str(peak_bytes).encode())
        os.close(file)


def read_peak(folder: str | os.PathLike[str], pid: int) -> int | None:
    """Return the most bytes of memory that a rank has had at a time; None where its guard could not tell.

    Args:
        folder: the launcher's private one.
        pid: of the guard, which has ended.
    """
    try:
        with open(os.path.join(folder, f"peak-{pid}"), "rb") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def is_childless(within_s: float) -> bool:
    """Wait until this process has no child, for at most `within_s` seconds."""
    end = time.monotonic() + within_s
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)


def list_children() -> list[int]:
    """Return the ids of this process's children, adopted ones included (Linux only, else empty)."""
    found = []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                if parent == os.getpid():
                    found.append(int(name))
    return found


def signal_children(number: int) -> None:
    """Send a signal to every child; children of theirs become ours as they die, and get it next."""
    for pid in list_children():
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def end_leftovers() -> None:
    """After the rank's own end: let what it started end by itself, then ask, then kill."""
    if is_childless(SETTLE_S):
        return
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGTERM)
    signal_children(signal.SIGTERM)
    if not is_childless(TERMINATE_S):
        kill_children()


def kill_children() -> None:
    """Kill generation after generation until none is left."""
    end = time.monotonic() + KILL_S
    while time.monotonic() < end:
        signal_children(signal.SIGKILL)
        if is_childless(0.02):
            return


def end_all(rank: int, folder: str) -> None:
    """Kill the rank and all that it started, remove the private folder, and end; never returns."""
    with contextlib.suppress(OSError):
        os.kill(rank, signal.SIGKILL)
    # A moment for helpers that clean up after their parent, such as multiprocessing's resource tracker.
    if not is_childless(SETTLE_S):
        kill_children()
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    # Where orphans cannot be adopted, those of the rank are still in this process's group.
    os.killpg(0, signal.SIGKILL)


def end_like(status: int) -> None:
    """End this process with the exit code or the signal of the rank, so that the launcher sees it; never returns."""
    if os.WIFSIGNALED(status):
        import resource

        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pause()
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(sys.argv[1:])
