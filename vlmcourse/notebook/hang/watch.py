"""The ranks of a script find out by themselves that they hang, and one of them says why."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from vlmcourse.notebook.hang.diagnosis import diagnose
from vlmcourse.notebook.hang.observer import SAMPLE_S, Observer, record_collectives
from vlmcourse.notebook.hang.places import add_conditions
from vlmcourse.notebook.hang.rank_state import RankState, read_states, to_json
from vlmcourse.notebook.jobs import is_alive, write_private

WATCH_EVERY_S = 1.0
ANSWERS_S = 3.0
"""How long a rank that has noticed a stall waits for what the others say."""
GONE = "had ended its process without a word (os._exit(), or a signal)"


def watch(folder: str | Path, stall_s: float = 60.0) -> None:
    """Have the ranks of a script find out why they hang; one of them prints it to standard error.

    Call it on every rank before `init_process_group`. From then on a thread looks once a second. When the main thread
    has waited in one collective (or for one message) for `stall_s`, every rank writes what it does into the folder, and
    the rank that was first to notice prints the diagnosis, once for each stall. The run itself is left alone.

    Args:
        folder: the same for all ranks, such as the one for logs; a folder for this run is made in it.
        stall_s: seconds without progress that are a stall: longer than the longest step of the slowest rank.
    Raises:
        ValueError: if `stall_s` is not above 0, or RANK is not set, as launchers such as `torchrun` do.
        OSError: if the folder cannot be written.
    """
    if not stall_s > 0:
        raise ValueError(f"stall_s = {stall_s}: must be more than 0 seconds")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError("hang.watch: RANK and WORLD_SIZE are not set: start the script with torchrun")
    watcher = Watcher(Path(folder), stall_s, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    threading.Thread(target=watcher.run, name="hang watch", daemon=True).start()


class Watcher:
    """One rank's part of `watch`."""

    def __init__(self, folder: Path, stall_s: float, rank: int, world_size: int) -> None:
        record_collectives()
        run = [
            os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
        ]
        self._folder = folder / f"hang-{'-'.join(filter(None, run))}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._stall_s, self._rank, self._world_size = stall_s, rank, world_size
        self._observer = Observer(rank)
        self._error: BaseException | None = None
        self._end, self._about = self._folder / f"end-{rank}.json", self._folder / f"rank-{rank}.json"
        for path in (self._end, self._about):
            path.unlink(missing_ok=True)  # of a run that had the same name
        self._about_process = {"pid": os.getpid(), "host": socket.gethostname()}
        write_private(self._about, json.dumps(self._about_process).encode())
        self._num_answered = self._num_stalls()
        atexit.register(self._leave_end)
        self._show_exception, sys.excepthook = sys.excepthook, self._note_exception

    def run(self) -> None:
        """Look for ever; if that fails, say so for the others' sake."""
        try:
            self._look_for_ever()
        except Exception as error:
            self._about.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                problem = {"problem": f"its watcher failed with {type(error).__name__}: {error}"}
                write_private(self._about, json.dumps({**self._about_process, **problem}).encode())
            raise

    def _look_for_ever(self) -> None:
        before, since_s, told = self._observer.observe(), time.monotonic(), ""
        while True:
            time.sleep(min(WATCH_EVERY_S, self._stall_s / 4))
            now = self._observer.observe()
            is_still = now.position == before.position and now.main_cpu_s - before.main_cpu_s < self._stall_s / 100
            if now.wait is None or not is_still:
                before, since_s = now, time.monotonic()
            stalled_s, number = time.monotonic() - since_s, self._num_stalls()
            is_reporter = False
            if number == self._num_answered and stalled_s > self._stall_s and now.position != told:
                number += 1
                with contextlib.suppress(FileExistsError):  # another rank has just noticed it too
                    write_private(self._folder / f"stall-{number}", b"")
                    is_reporter = True
            if number > self._num_answered:
                self._answer(number)
                told = now.position
            if is_reporter:
                self._report(number, stalled_s)

    def _num_stalls(self) -> int:
        """Return how many stalls there have been."""
        return max((int(path.name.removeprefix("stall-")) for path in self._folder.glob("stall-*[0-9]")), default=0)

    def _answer(self, number: int) -> None:
        """Write down what this rank does."""
        self._num_answered = number
        state = self._observer.observe(SAMPLE_S)
        with contextlib.suppress(OSError):
            write_private(self._folder / f"state-{self._rank}-{number}.json", to_json(state))

    def _report(self, number: int, stalled_s: float) -> None:
        """Wait for what the others say, and print why nothing goes on."""
        end_s, ranks = time.monotonic() + ANSWERS_S, range(self._world_size)
        states: dict[int, RankState] = {}
        while len(states) < self._world_size and time.monotonic() < end_s:
            time.sleep(0.1)
            states = read_states({rank: self._folder / f"state-{rank}-{number}.json" for rank in ranks})
            states |= read_states({rank: self._folder / f"end-{rank}.json" for rank in ranks})
        silent = {rank: self._explain_silence(rank) for rank in ranks if rank not in states}
        died = {rank: text for rank, text in silent.items() if text == GONE}
        found = diagnose({rank: add_conditions(state) for rank, state in states.items()}, died, silent)
        if found is not None:
            print(f"hang.watch: no progress for {stalled_s:.0f} s: {found.text}", file=sys.stderr, flush=True)

    def _explain_silence(self, rank: int) -> str:
        """Say why a rank has not answered."""
        try:
            about = json.loads((self._folder / f"rank-{rank}.json").read_bytes())
        except OSError:
            return "it does not watch itself (hang.watch has not been called there)"
        if about["host"] == socket.gethostname() and not is_alive(about["pid"]):
            return GONE
        return about.get("problem", f"its watcher did not answer within {ANSWERS_S:g} s")

    def _note_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._error = error
        self._show_exception(kind, error, trace)

    def _leave_end(self) -> None:
        """Say, for the others' sake, how this rank ended and how far it had come."""
        state = self._observer.observe_end(self._error, self._error.__traceback__ if self._error is not None else None)
        with contextlib.suppress(OSError):
            write_private(self._end, to_json(state))
