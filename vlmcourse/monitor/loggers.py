"""Keep the rows of a run in files: CSV for spreadsheets and plots, JSON lines for programs.

Enters: one mapping a row, each with a `step`. Leaves: a file that is complete up to the last row at any moment, so that
a killed run can be read. On resume, rows that are newer than the checkpoint are dropped: those steps run again.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]


class RowLogger(Protocol):
    """What takes the rows of a run."""

    def log(self, row: Row) -> None:
        """Write one row."""
        ...

    def close(self) -> None:
        """Finish; no row may follow."""
        ...


class JsonlLogger:
    """One JSON object a line."""

    def __init__(self, path: str | Path, *, keep_until_step: int | None = None) -> None:
        """Open the file: new, or going on after step `keep_until_step` of what is there."""
        _keep_lines(Path(path), keep_until_step, lambda line: int(json.loads(line)["step"]), num_header_lines=0)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def log(self, row: Row) -> None:
        """Write one row."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvLogger:
    """One line a row under a header; values that a row lacks stay empty."""

    def __init__(self, path: str | Path, columns: Sequence[str], *, keep_until_step: int | None = None) -> None:
        """Open the file: new, or going on after step `keep_until_step` of what is there.

        Args:
            path: the file.
            columns: names of all values that rows may have, `step` among them.
            keep_until_step: rows up to this step stay; None starts an empty file.
        """
        position = list(columns).index("step")
        _keep_lines(Path(path), keep_until_step, lambda line: int(line.split(",")[position]), num_header_lines=1)
        self._file = open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115 (closed by close)
        self._writer = csv.DictWriter(self._file, list(columns), restval="", lineterminator="\n")
        if self._file.tell() == 0:
            self._writer.writeheader()
            self._file.flush()

    def log(self, row: Row) -> None:
        """Write one row.

        Raises:
            ValueError: if it has a value whose column was not announced.
        """
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
    kept = [line for line in rows if step_of(line) <= until_step]
    part = path.with_name(path.name + ".part")
    part.write_text("".join(header + kept), encoding="utf-8")
    os.replace(part, path)
