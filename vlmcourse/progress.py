"""A sign of life while something takes long: a line to stderr every few seconds.

Enters: a function that says how far the work is. Leaves: lines; stdout stays free for results.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

EVERY_S = 10.0


def say(text: str) -> None:
    """Print one line to stderr."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def heartbeat(state: Callable[[], str], every_s: float = EVERY_S) -> Iterator[None]:
    """Print what `state` returns, and the seconds so far, every few seconds while the body runs.

    Args:
        state: called in a thread of its own.
        every_s: seconds between two lines.
    """
    started_s = time.monotonic()
    done = threading.Event()

    def beat() -> None:
        while not done.wait(every_s):
            say(f"  {state()}, {time.monotonic() - started_s:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
