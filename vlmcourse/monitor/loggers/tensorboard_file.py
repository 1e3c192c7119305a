"""Write the rows of a run as a TensorBoard event file: `tensorboard --logdir runs`.

Enters: rows. Leaves: `tensorboard/events.out.tfevents.…` in the run's folder, a scalar for each number and two
texts, the configuration and the hardware. Records are written at once and by the caller's thread: the writer that
torch wraps has a thread of its own, which a full disk stops, and whoever flushes then may wait for it for ever.

Source: TensorFlow's `event.proto`. At a `SessionLog` START TensorBoard drops what earlier files have from its step on.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmcourse.monitor.loggers.files import WholeWriteFile
from vlmcourse.monitor.loggers.protocol import LoggerError, Row, RunInfo

FOLDER_NAME = "tensorboard"
PROTOS = ("event", "summary", "tensor", "tensor_shape")
"""Modules of messages that protobuf makes as they are imported."""
DT_STRING = 7
"""Of `types.proto`."""
_file_numbers = itertools.count()


class TensorBoardLogger:
    """Scalars by the names that the rows have."""

    name = "tensorboard"
    retries = True

    def __init__(self) -> None:
        self._file: WholeWriteFile | None = None

    def start(self, info: RunInfo) -> None:
        """Begin an event file; after a resume, what earlier files have of the steps to come is dropped.

        Raises:
            LoggerError: if the package tensorboard is not installed.
            OSError: if the file cannot be written.
        """
        try:
            self._event, self._summary, self._tensor, self._shape = map(_proto, PROTOS)
        except ImportError as error:
            raise LoggerError(
                f"the package tensorboard cannot be imported ({error}): pip install tensorboard"
            ) from error
        folder = info.folder / FOLDER_NAME
        folder.mkdir(exist_ok=True)
        self._file = WholeWriteFile(folder / _file_name())
        self._add(self._event.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if info.keep_until_step is not None:
            log = self._event.SessionLog(status=self._event.SessionLog.START)
            self._add(self._event.Event(wall_time=time.time(), step=info.keep_until_step + 1, session_log=log))
        for tag, value in (("config", info.config), ("hardware", info.hardware)):
            self._add_text(tag, value, info.keep_until_step or 0)

    def log(self, row: Row) -> None:
        """Write one row: an event with a scalar for each number in it."""
        values = [
            self._summary.Summary.Value(tag=name, simple_value=float(value))
            for name, value in row.items()
            if name != "step" and isinstance(value, (int, float))
        ]
        self._add(
            self._event.Event(wall_time=time.time(), step=row["step"], summary=self._summary.Summary(value=values))
        )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _add_text(self, tag: str, value: Mapping[str, Any], step: int) -> None:
        """Write a mapping as a text that TensorBoard shows as it is."""
        lines = json.dumps(value, indent=2, default=str).splitlines()
        shown = "\n".join(f"    {line}" for line in lines)  # four spaces: code, for Markdown
        shape = self._shape.TensorShapeProto(dim=[self._shape.TensorShapeProto.Dim(size=1)])
        tensor = self._tensor.TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[shown.encode()])
        plugin = self._summary.SummaryMetadata(plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text"))
        summary = self._summary.Summary(value=[self._summary.Summary.Value(tag=tag, metadata=plugin, tensor=tensor)])
        self._add(self._event.Event(wall_time=time.time(), step=step, summary=summary))

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._file is not None, "start was not called"
        RecordWriter(self._file).write(event.SerializeToString())


def _proto(name: str) -> Any:
    return importlib.import_module(f"tensorboard.compat.proto.{name}_pb2")


def _file_name() -> str:
    """Return a name that TensorBoard reads after all earlier ones of its folder."""
    host = Path(socket.gethostname()).name
    return f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{host}.{os.getpid()}.{next(_file_numbers)}"
