"""Work that the ranks wait for between their steps: a logger that writes over a slow connection, a callback.

Enters: a logger of a run, or a `Trainer`. Leaves: the same, with a wait in every row or after every step. Chapter 6.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from vlmcourse.monitor.loggers import JsonlLogger, Row
from vlmcourse.train.trainer import Trainer


@contextmanager
def slow_logger(seconds: float) -> Iterator[None]:
    """Let the JSONL logger of this process wait with each row, as one that sends it over a network.

    Args:
        seconds: of one row.
    """
    log = JsonlLogger.log

    def log_late(self: JsonlLogger, row: Row) -> None:
        time.sleep(seconds)
        log(self, row)

    with mock.patch.object(JsonlLogger, "log", log_late):
        yield


@contextmanager
def slow_callback(trainer: Trainer, seconds: float, every: int = 1) -> Iterator[None]:
    """Let a callback after every step take long.

    Args:
        trainer: of this rank.
        seconds: of one call that does something.
        every: how many steps lie between two such calls.
    """

    def callback(*_: Any) -> None:
        if trainer.step % every == 0:
            time.sleep(seconds)

    trainer.after_step.append(callback)
    try:
        yield
    finally:
        trainer.after_step.remove(callback)
