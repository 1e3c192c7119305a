"""Keep the rows of a run in files: CSV for spreadsheets and plots, JSON lines for programs.

Enters: one mapping a row, each with a `step`. Leaves: a file that is complete up to the last row at any moment, so that
a killed run can be read; a row that does not fit on the disk is taken back whole. On resume, rows that are newer than
the checkpoint are dropped: those steps run again. Configuration and hardware are in `config.json` and `run.json` of the
same folder.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vlmcourse.monitor.loggers.protocol import Row, RunInfo
from vlmcourse.monitor.whole_file import replace_file

JSONL_NAME, CSV_NAME = "log.jsonl", "log.csv"


class WholeWriteFile:
    """A file that grows by whole records: one that cannot be written is taken back, so that the next one can follow."""

    def __init__(self, path: Path) -> None:
        """Open `path` to append to it.

        Raises:
            OSError: if it cannot be opened.
        """
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def write(self, record: bytes) -> None:
        """Append one record.

        Raises:
            OSError: if the disk did not take all of it; then the file is as it was before.
        """
        before_bytes = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(record) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(before_bytes)
            raise

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()


class JsonlLogger:
    """One JSON object a line, in `log.jsonl`."""

    name = "jsonl"
    retries = True

    def __init__(self) -> None:
        self._file: WholeWriteFile | None = None

    def start(self, info: RunInfo) -> None:
        """Open the file: new, or going on after step `info.keep_until_step` of what is there."""
        path = info.folder / JSONL_NAME
        _keep_lines(path, info.keep_until_step, lambda line: int(json.loads(line)["step"]), num_header_lines=0)
        self._file = WholeWriteFile(path)

    def log(self, row: Row) -> None:
        """Write one row."""
        assert self._file is not None, "start was not called"
        self._file.write((json.dumps(row) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class CsvLogger:
    """One line a row under a header, in `log.csv`; values that a row lacks stay empty.

    A value whose name is new adds a column: the file is written anew under the longer header.
    """

    name = "csv"
    retries = True

    def __init__(self, columns: Sequence[str] = ("step",)) -> None:
        """Take the columns that the file has from the first row on, `step` among them."""
        self._columns = list(columns)
        self._path = Path()
        self._file: WholeWriteFile | None = None

    def start(self, info: RunInfo) -> None:
        """Open the file: new, or going on after step `info.keep_until_step` of what is there."""
        self._path = info.folder / CSV_NAME
        there = _read_header(self._path) if info.keep_until_step is not None else []
        position = there.index("step") if "step" in there else 0
        _keep_lines(self._path, info.keep_until_step, lambda line: int(line.split(",")[position]), num_header_lines=1)
        if there:
            self._columns = there + [name for name in self._columns if name not in there]
            self._rewrite()
        self._file = WholeWriteFile(self._path)
        if not there:
            self._file.write(self._format([self._columns]))

    def log(self, row: Row) -> None:
        """Write one row."""
        assert self._file is not None, "start was not called"
        new = [name for name in row if name not in self._columns]
        if new:
            had = self._columns
            self._columns = had + new
            try:
                self._rewrite()
            except OSError:
                self._columns = had
                raise
            self._file.close()
            self._file = WholeWriteFile(self._path)
        self._file.write(self._format([[row.get(name) for name in self._columns]]))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _rewrite(self) -> None:
        """Write the file's rows anew, filled up to all columns."""
        with open(self._path, encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))[1:]
        filled = [row + [""] * (len(self._columns) - len(row)) for row in rows]
        replace_file(self._path, self._format([self._columns, *filled]))

    @staticmethod
    def _format(rows: Sequence[Sequence[Any]]) -> bytes:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue().encode()


def read_rows(folder: Path, until_step: int) -> list[dict[str, Any]]:
    """Return the rows up to a step that a run has in its `log.jsonl`; none where it keeps none."""
    path = folder / JSONL_NAME
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["step"] <= until_step]


def _read_header(path: Path) -> list[str]:
    """Return the columns of a CSV file; none where there is no whole header."""
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        line = file.readline()
    return next(csv.reader([line]), []) if line.endswith("\n") else []


def _keep_lines(path: Path, until_step: int | None, step_of: Callable[[str], int], num_header_lines: int) -> None:
    """Cut a log file after the last row of `until_step`; remove it where that is None."""
    if not path.exists():
        return
    if until_step is None:
        path.unlink()
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one
    header, rows = whole[:num_header_lines], whole[num_header_lines:]
    replace_file(path, "".join(header + [line for line in rows if step_of(line) <= until_step]).encode())
