"""Loggers of a run: console, JSON lines, CSV, TensorBoard, Weights & Biases and trackio behind one protocol.

Enters: a `LoggingConfig`. Leaves: `RunLoggers`, which rank 0 starts, gives rows to and closes; a logger that fails says
so once and never stops the run. See `protocol.py` for what a logger is and `fan_out.py` for how failures are kept away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlmcourse.log_config import LoggingConfig
from vlmcourse.monitor.loggers.console import ConsoleLogger
from vlmcourse.monitor.loggers.fan_out import RunLoggers
from vlmcourse.monitor.loggers.files import CSV_NAME, JSONL_NAME, CsvLogger, JsonlLogger, read_rows
from vlmcourse.monitor.loggers.process_logger import ProcessLogger
from vlmcourse.monitor.loggers.protocol import LoggerError, Row, RowLogger, RunInfo
from vlmcourse.monitor.loggers.tensorboard_file import TensorBoardLogger

__all__ = [
    "CSV_NAME",
    "JSONL_NAME",
    "ConsoleLogger",
    "CsvLogger",
    "JsonlLogger",
    "LoggerError",
    "ProcessLogger",
    "Row",
    "RowLogger",
    "RunInfo",
    "RunLoggers",
    "TensorBoardLogger",
    "build_loggers",
    "read_rows",
]


def build_loggers(config: LoggingConfig, columns: Sequence[str], say: Callable[[str], None]) -> RunLoggers:
    """Build what a `[logging]` section names; nothing is opened before `RunLoggers.start`.

    Args:
        config: the section.
        columns: names of the values that rows are known to have, for the CSV file; others add columns as they come.
        say: prints one line for people, above a progress bar where there is one.
    """
    return RunLoggers([_build_one(name, config, columns, say) for name in config.loggers], say)


def _build_one(name: str, config: LoggingConfig, columns: Sequence[str], say: Callable[[str], None]) -> RowLogger:
    if name == "console":
        return ConsoleLogger(say)
    if name == "jsonl":
        return JsonlLogger()
    if name == "csv":
        return CsvLogger(columns)
    if name == "tensorboard":
        return TensorBoardLogger()
    return ProcessLogger(name, project=config.project, mode=config.mode, timeout_s=config.timeout_s)
