"""The processes of one run: each rank behind its guard, what they print, and how all of them are brought to an end.

Single-threaded: whoever calls `RankGroup.wait` reads the pipes meanwhile, and gets every callback in its own thread.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from vlmcourse.notebook.failure import RankEnd
from vlmcourse.notebook.guard import read_peak
from vlmcourse.notebook.interrupts import hold_interrupts, ignore_interrupts
from vlmcourse.notebook.starting import RankHandle, Starter
from vlmcourse.notebook.streams import LineSplitter

POLL_S = 0.02
"""How often the ranks' ends, and lines that are held back, are looked at where nothing is printed."""
STOP_STEPS = ((signal.SIGINT, 1.0), (signal.SIGTERM, 0.5))
"""How ranks are asked to end, and how many seconds each request is given before the next; then they are killed."""
KILL_S = 5.0
DRAIN_S = 1.0
"""How long output is read after every rank has ended, where a process that got away still holds the pipe."""
CHUNK_BYTES = 1 << 16

OnText = Callable[[int, str], None]
OnIdle = Callable[[], None]


class RankProcess:
    """One rank: its guard's process, its output so far, and how it ended."""

    def __init__(self, rank: int, handle: RankHandle, private_dir: Path) -> None:
        self.rank = rank
        self.handle = handle
        self.private_dir = private_dir
        self.splitter = LineSplitter()
        self.signals_sent: set[int] = set()
        self.end: RankEnd | None = None

    def poll(self) -> bool:
        """Return whether the process has ended, and remember how."""
        if self.end is None and (code := self.handle.poll()) is not None:
            was_stopped = bool(self.signals_sent) and (code >= 0 or -code in self.signals_sent)
            peak_bytes = read_peak(self.private_dir, self.handle.pid)
            self.end = RankEnd(self.rank, code, time.monotonic(), was_stopped, peak_bytes)
        return self.end is not None

    def send(self, number: int) -> None:
        """Send a signal to the rank and to what it started in its session."""
        if not self.poll():
            self.signals_sent.add(number)
            self.signal_group(number)

    def cut_lifeline(self) -> None:
        """Have the guard kill the rank and everything below it."""
        self.signals_sent.add(signal.SIGKILL)
        self.handle.close_lifeline()

    def signal_group(self, number: int) -> None:
        """Send a signal to everything in the rank's session, without counting it as a stop; never once it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.handle.pid, number)


class RankGroup:
    """The ranks of one run."""

    def __init__(
        self, private_dir: Path, on_line: OnText | None, on_progress: OnText | None, on_idle: OnIdle | None
    ) -> None:
        self._private_dir = private_dir
        self._on_line = on_line or (lambda rank, text: None)
        self._on_progress = on_progress or (lambda rank, text: None)
        self._on_idle = on_idle or (lambda: None)
        self._ranks: list[RankProcess] = []
        self.last_output_s = time.monotonic()
        """When a rank last printed something, on the monotonic clock; at first, when the run began."""
        self._pipes = selectors.DefaultSelector()

    @property
    def unfinished(self) -> list[int]:
        """The ranks that are running."""
        return [process.rank for process in self._ranks if not process.poll()]

    @property
    def ends(self) -> list[RankEnd]:
        """How the ranks ended, those that have, in rank order."""
        return [process.end for process in self._ranks if process.end is not None]

    @property
    def size(self) -> int:
        """How many ranks were started."""
        return len(self._ranks)

    def start(self, rank: int, starter: Starter, env: Mapping[str, str]) -> None:
        """Start one rank behind its guard.

        Raises:
            RuntimeError: if the machine refuses another process.
        """
        with hold_interrupts():  # a rank that was started but is not known here would go on for ever
            try:
                handle = starter(env)
            except OSError as error:
                raise RuntimeError(f"rank {rank} could not be started ({error}): run fewer ranks") from error
            process = RankProcess(rank, handle, self._private_dir)
            self._ranks.append(process)
            self._pipes.register(handle.output_fd, selectors.EVENT_READ, process)

    @property
    def pids(self) -> list[int]:
        """The process ids of the guards, which lead the ranks' sessions, in rank order."""
        return [process.handle.pid for process in self._ranks]

    def interrupt(self, ranks: Collection[int]) -> None:
        """Interrupt what these ranks run; they may go on afterwards."""
        for process in self._ranks:
            if process.rank in ranks and not process.poll():
                process.signal_group(signal.SIGINT)

    def wait(self, until_s: float, is_done: Callable[[], bool] = lambda: False) -> None:
        """Pass output on until every rank has ended, one has failed, `is_done`, or the clock reads `until_s`."""
        while self.unfinished and not any(end.exit_code for end in self.ends) and not is_done():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            self._pump(min(POLL_S, left_s))

    def stop(self, at_once: bool = False) -> None:
        """End every rank that is still running: ask twice, then kill. A second interrupt kills `at_once`."""
        try:
            for number, patience_s in () if at_once else STOP_STEPS:
                for process in self._ranks:
                    process.send(number)
                end_s = time.monotonic() + patience_s
                while self.unfinished and time.monotonic() < end_s:
                    self._pump(POLL_S)
        finally:
            self._kill()

    def drain(self) -> None:
        """Pass on what is left in the pipes after every rank has ended, and close them; safe to call twice."""
        if self._pipes.get_map() is None:
            return
        end_s = time.monotonic() + DRAIN_S
        while self._pipes.get_map() and time.monotonic() < end_s:
            self._pump(POLL_S)
        for key in list(self._pipes.get_map().values()):
            self._close(key.data)
        self._pipes.close()

    def _kill(self) -> None:
        with ignore_interrupts():
            for process in self._ranks:
                if not process.poll():
                    process.cut_lifeline()
            end_s = time.monotonic() + KILL_S
            while self.unfinished and time.monotonic() < end_s:
                time.sleep(0.01)
            for process in self._ranks:
                process.send(signal.SIGKILL)
                process.handle.wait()
                process.poll()
                process.handle.close_lifeline()

    def _pump(self, seconds: float) -> None:
        """Pass on what arrives within `seconds`; returns early once something did."""
        if not self._pipes.get_map():
            time.sleep(min(seconds, 0.01))
        for key, _ in self._pipes.select(seconds) if self._pipes.get_map() else ():
            process: RankProcess = key.data
            data = os.read(key.fd, CHUNK_BYTES)
            self.last_output_s = time.monotonic()
            if data:
                self._pass_on(process, data)
            else:
                self._close(process)
        self._on_idle()

    def _close(self, process: RankProcess) -> None:
        self._pass_on(process, b"")
        self._pipes.unregister(process.handle.output_fd)
        process.handle.close_output()

    def _pass_on(self, process: RankProcess, data: bytes) -> None:
        lines, progress = process.splitter.feed(data)
        for line in lines:
            self._on_line(process.rank, line)
        if progress is not None:
            self._on_progress(process.rank, progress)
