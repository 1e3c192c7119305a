"""A rank of a cell answers the notebook's question what it is doing, from a thread of its own."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

from vlmcourse.notebook.hang.last_words import call_before_abort
from vlmcourse.notebook.hang.observer import Observer, name_error, record_collectives
from vlmcourse.notebook.hang.rank_state import RankState, to_json
from vlmcourse.notebook.jobs import write_private

STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - (3 if hasattr(signal, "SIGRTMAX") else 0)
"""Makes a rank that cannot answer write its stack; one that neither launchers nor schedulers use."""

FIRST_FREE = 3
"""The first number of an open file that is not one of the standard three."""


class Listener:
    """Answers questions about this rank, from a thread that sleeps until one comes."""

    def __init__(self, rank: int) -> None:
        """Switch the flight record on."""
        record_collectives()
        self._observer = Observer(rank)
        self._rank = rank
        self._folder: Path | None = None
        self._fifo: int | None = None
        self._stack_file: Any = None
        self._is_heard_before_abort = False

    def open(self, folder: Path) -> None:
        """Listen in the private folder of a cell; the folder before is let go.

        Raises:
            OSError: if the folder cannot be written.
        """
        self.close()
        self._folder = folder
        path = folder / f"ask-{self._rank}"
        os.mkfifo(path, 0o600)
        # For writing too: then reading waits for the next question instead of ending with the first.
        handle = os.open(path, os.O_RDWR)
        # Above standard input, output and error: a cell may have closed those, and what it prints is no question.
        self._fifo = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)
        os.close(handle)
        handle = os.open(folder / f"stack-{self._rank}.txt", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        previous, self._stack_file = self._stack_file, os.fdopen(handle, "w")
        faulthandler.register(STACK_SIGNAL, self._stack_file, all_threads=True)
        if previous is not None:
            previous.close()
        about = {"pid": os.getpid(), "main_thread": threading.main_thread().ident}
        write_private(folder / f"rank-{self._rank}.json", json.dumps(about).encode())
        threading.Thread(target=self._serve, args=(folder, self._fifo), name="hang doctor", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        if self._fifo is not None:
            os.write(self._fifo, b"\n")  # the thread closes it: nobody else may get its number before that
            self._fifo = None

    def count_from_here(self) -> None:
        """Number the collectives from now on; call it once the group is there and the cell begins."""
        self._observer.count_from_here()

    def leave_word_before_abort(self) -> None:
        """From now on, say where this rank is also when compiled code gives up; torch has to be there already."""
        if not self._is_heard_before_abort:
            self._is_heard_before_abort = call_before_abort(lambda: self._leave(self._observer.observe_abort()))

    def leave_end(self, error: BaseException | None = None) -> None:
        """Say, for the others' sake, how far this rank came in the cell."""
        self._leave(self._observer.observe_end(error, error.__traceback__ if error is not None else None))

    def _leave(self, state: RankState) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                write_private(self._folder / f"end-{self._rank}.json", to_json(state))

    def _serve(self, folder: Path, fifo: int) -> None:
        while True:
            question = os.read(fifo, 4096).splitlines()[-1]  # several at once: nobody waits for the earlier ones
            if not question:
                os.close(fifo)
                return
            number, sample_s = question.split()
            answer = self._look(float(sample_s))
            with contextlib.suppress(OSError):  # the folder has gone, or the question is asked twice
                write_private(folder / f"state-{self._rank}-{int(number)}.json", answer)

    def _look(self, sample_s: float) -> bytes:
        """Return the answer to a question; where looking fails, that and why: the next question is answered again."""
        try:
            return to_json(self._observer.observe(sample_s))
        except Exception as error:  # this thread's boundary: the cell changes meanwhile what is looked at
            return to_json(RankState(self._rank, "unseen", error=name_error(error)))
