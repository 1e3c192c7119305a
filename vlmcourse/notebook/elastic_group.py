"""The ranks below one `torchrun` process: they announce themselves, print, end, and are started again.

Enters: a guarded `torchrun` and what its ranks say when they start (see `elastic_worker.py`). Leaves: their lines, and
how those of the last attempt ended, as far as `torchrun` tells.
"""

from __future__ import annotations

import json
import os
import re
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vlmcourse.notebook.elastic_worker import HELLO_BYTES, socket_address
from vlmcourse.notebook.failure import RankEnd
from vlmcourse.notebook.jobs import JobFolder
from vlmcourse.notebook.rank_group import CHUNK_BYTES, OnIdle, OnText, RankGroup
from vlmcourse.notebook.streams import LineSplitter

AGENT = -1
"""In place of a rank: `torchrun` itself."""
KEPT_LINES = 200

FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
LISTED = re.compile(r"exitcode\s*: (-?\d+) \(pid: (\d+)\)")
STOPPED = re.compile(r"Sending process (\d+) closing signal")
LOG_LINE = re.compile(r"^[IWEF]\d{4} \d\d:\d\d:\d\d")
"""What `torchrun` says about its ranks, and the beginning of its log lines."""


@dataclass
class Attempt:
    """The ranks of this machine between one start by `torchrun` and the next."""

    folder: JobFolder
    restart_count: int
    world_size: int
    rank_of_pid: dict[int, int] = field(default_factory=dict)
    local_ranks: set[int] = field(default_factory=set)

    @property
    def unfinished(self) -> list[int]:
        """The ranks of this machine: only `torchrun` knows which have ended, and those have said so themselves."""
        return sorted(self.rank_of_pid.values())

    @property
    def ends(self) -> tuple[RankEnd, ...]:
        """How ranks ended: not known while `torchrun` runs."""
        return ()

    @property
    def size(self) -> int:
        """How many ranks there are on all machines."""
        return self.world_size


class RankOutput:
    """The output of one rank, in the shape in which `RankGroup` reads that of its own processes."""

    def __init__(self, rank: int, output_fd: int) -> None:
        self.rank = rank
        self.splitter = LineSplitter()
        self.handle = self
        self.output_fd = output_fd

    def close_output(self) -> None:
        """Read no more of what the rank prints."""
        os.close(self.output_fd)


class AgentLog:
    """What `torchrun` printed: how ranks ended, and the rest for a failure that nothing else explains."""

    def __init__(self) -> None:
        self.exit_codes: dict[int, int] = {}
        """By process id."""
        self.stopped: set[int] = set()
        """Ranks that `torchrun` ended because another had failed."""
        self._lines: list[str] = []

    def line(self, text: str) -> None:
        """Take one line."""
        for pattern in (FAILED, LISTED):
            if found := pattern.search(text):
                self.exit_codes.setdefault(int(found[2]), int(found[1]))
        if found := STOPPED.search(text):
            self.stopped.add(int(found[1]))
        self._lines = [*self._lines, text][-KEPT_LINES:]

    @property
    def last_words(self) -> str:
        """The lines that are no log of `torchrun`: usually a traceback, whose last line says what was wrong."""
        return "\n".join(line for line in self._lines if not LOG_LINE.match(line)).strip()


class ElasticGroup(RankGroup):
    """`torchrun` as the one process of a group, and the ranks below it as they announce themselves."""

    def __init__(
        self,
        folder: JobFolder,
        on_line: OnText,
        on_progress: OnText,
        on_idle: OnIdle,
        on_attempt: Callable[[Attempt], None],
    ) -> None:
        """Listen for ranks.

        Args:
            folder: of the cell.
            on_line: as for `run_ranks`.
            on_progress: as for `run_ranks`.
            on_idle: as for `run_ranks`.
            on_attempt: called when the first rank of an attempt is there, after the last output of the one before.
        """
        self.log = AgentLog()
        self.attempts: list[Attempt] = []

        def pass_line(rank: int, text: str) -> None:
            self.log.line(text) if rank == AGENT else on_line(rank, text)

        def pass_progress(rank: int, text: str) -> None:
            if rank != AGENT:
                on_progress(rank, text)

        super().__init__(folder.path, pass_line, pass_progress, on_idle)
        self._folder = folder
        self._on_attempt = on_attempt
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with socket_address(folder.path) as address:
            self._listener.bind(address)

    def close(self) -> None:
        """Hear no further rank."""
        self._listener.close()

    def _pump(self, seconds: float) -> None:
        while select.select([self._listener], [], [], 0)[0]:
            self._accept()
        super()._pump(seconds)

    def _accept(self) -> None:
        """Take the pipe of a rank that has started, and tell it where to leave its files."""
        data, files, _, _ = socket.recv_fds(self._listener, HELLO_BYTES, 2)
        hello = json.loads(data)
        attempt = self.attempts[-1] if self.attempts else None
        key = hello["TORCHELASTIC_RESTART_COUNT"], hello["WORLD_SIZE"]
        # Machines that come or go restart the ranks without counting it.
        if (
            attempt is None
            or key != (attempt.restart_count, attempt.world_size)
            or hello["LOCAL_RANK"] in attempt.local_ranks
        ):
            self._read_to_end()
            attempt = Attempt(self._folder.add_attempt(f"attempt-{len(self.attempts)}"), *key)
            self.attempts.append(attempt)
            self._on_attempt(attempt)
        attempt.local_ranks.add(hello["LOCAL_RANK"])
        attempt.rank_of_pid[hello["PID"]] = hello["RANK"]
        self._pipes.register(files[0], selectors.EVENT_READ, RankOutput(hello["RANK"], files[0]))
        with socket.socket(fileno=files[1]) as answer:
            answer.send(str(attempt.folder.path).encode())

    def _read_to_end(self) -> None:
        """Pass on what the ranks of the last attempt have left in their pipes: `torchrun` has ended them."""
        for output in [key.data for key in self._pipes.get_map().values() if isinstance(key.data, RankOutput)]:
            while select.select([output.output_fd], [], [], 0)[0]:
                data = os.read(output.output_fd, CHUNK_BYTES)
                if not data:
                    break
                self._pass_on(output, data)  # type: ignore[arg-type]  # it has what is read of a process
            self._close(output)  # type: ignore[arg-type]


def list_ends(group: ElasticGroup, attempt: Attempt | None = None) -> Sequence[RankEnd]:
    """Return how the ranks of an attempt (by default the last) ended, as far as `torchrun` said.

    Only failures have a number there: a rank that is not among them ended well, or was stopped.
    """
    attempt = attempt or (group.attempts[-1] if group.attempts else None)
    if attempt is None:
        return ()
    now_s, done = time.monotonic(), attempt.folder.read_done()
    ends = []
    for pid, rank in sorted(attempt.rank_of_pid.items(), key=lambda item: item[1]):
        code = group.log.exit_codes.get(pid, 0)
        was_stopped = pid in group.log.stopped
        if code == 0 and rank not in done:
            code = 1 if rank in attempt.folder.read_reports() else -signal.SIGTERM
            was_stopped = was_stopped or code < 0
        ends.append(RankEnd(rank, code, now_s, was_stopped))
    return tuple(ends)
