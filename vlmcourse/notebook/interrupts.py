"""Keeps an impatient Ctrl-C from cutting a clean-up short."""

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
