"""A request to end (SIGTERM: `kill`, Slurm, `docker stop`) ends a program as Ctrl-C does, with its clean-up.

Enters: nothing. Leaves: a context in which SIGTERM is an interrupt. By default it ends a process where it stands: files
that mark work in progress stay, and ranks are killed before they could remove theirs.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def end_as_interrupted() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt meanwhile; where SIGINT is ignored or held for a moment, it is, too.

    In a thread other than the main one, and where SIGTERM is ignored, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield
        return
    outside = signal.getsignal(signal.SIGINT)  # ignored from the start in the background of a shell script

    def end(number: int, frame: object) -> None:
        if signal.getsignal(signal.SIGINT) == outside:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
