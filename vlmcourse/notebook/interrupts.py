"""Keeps a Ctrl-C from cutting short what must be done as a whole: a clean-up, or the start of a rank."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Let SIGINT do nothing meanwhile; in a thread other than the main one it never does anything."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Let a SIGINT that comes meanwhile take effect at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
