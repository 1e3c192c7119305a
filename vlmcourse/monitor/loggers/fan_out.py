"""All loggers of a run as one, none of which can stop the run or another logger.

Enters: loggers, what the run is, rows. Leaves: the rows in every logger that works, and one line for each that does
not: what it is called, why, and since which step. An exception of any kind ends here: what a logger's package raises is
not known beforehand, and training does not depend on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from vlmcourse.monitor.loggers.protocol import Row, RowLogger, RunInfo


class RunLoggers:
    """The loggers of one run, on rank 0."""

    def __init__(self, loggers: Sequence[RowLogger], say: Callable[[str], None]) -> None:
        """Take the loggers.

        Args:
            loggers: not yet started.
            say: prints one line for people.
        """
        self._loggers = list(loggers)
        self._say_line = say
        self._lost: dict[str, list[int]] = {}
        """By logger: the steps of the rows that it could not write."""

    @property
    def names(self) -> list[str]:
        """The loggers that still work."""
        return [logger.name for logger in self._loggers]

    def start(self, info: RunInfo) -> None:
        """Start every logger; leave out those that cannot."""
        for logger in list(self._loggers):
            try:
                logger.start(info)
            except Exception as error:
                self._leave_out(logger, f"could not start ({_cause(error)}); the run goes on without it")

    def log(self, row: Row) -> None:
        """Give a row to every logger."""
        for logger in list(self._loggers):
            try:
                logger.log(row)
            except Exception as error:
                self._note_lost(logger, row["step"], error)

    def close(self) -> None:
        """Finish every logger, each within its own time limit; safe to call twice."""
        for logger in list(self._loggers):
            try:
                logger.close()
            except Exception as error:
                self._say(f"Logger {logger.name} could not finish ({_cause(error)})")
            if lost := self._lost.get(logger.name):
                self._say(f"Logger {logger.name} lost {len(lost)} row(s) of the run, of steps {lost[0]} to {lost[-1]}")
        self._loggers = []

    def _note_lost(self, logger: RowLogger, step: int, error: Exception) -> None:
        """Say that a row could not be written, the first time; leave the logger out if it cannot go on."""
        if not logger.retries:
            self._leave_out(logger, f"stopped at step {step} ({_cause(error)}); the run goes on without it")
            return
        steps = self._lost.setdefault(logger.name, [])
        steps.append(step)
        if len(steps) == 1:
            self._say(
                f"Logger {logger.name} lost the row of step {step} ({_cause(error)}); the run goes on, and it tries "
                "again with the next row"
            )

    def _leave_out(self, logger: RowLogger, why: str) -> None:
        self._loggers.remove(logger)
        self._say(f"Logger {logger.name} {why}")
        with contextlib.suppress(Exception):
            logger.close()

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody listens: the pipe is gone, or stdout is closed
            self._say_line(line)


def _cause(error: Exception) -> str:
    """Return an error in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
