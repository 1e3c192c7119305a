"""What a rank of a session does between cells: wait for the next one, run it, tell how it went.

The names of cell folders arrive through a named pipe in the session's private folder, one JSON object a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from vlmcourse.notebook.hang.listener import Listener
from vlmcourse.notebook.hang.observer import read_begun, read_groups, read_record
from vlmcourse.notebook.jobs import CELL_END, Job, JobFolder, control_path

RunCell = Callable[[JobFolder, Job], None]
"""Runs one cell in this rank's variables."""


def serve_cells(folder: JobFolder, rank: int, token: str, run_cell: RunCell, listener: Listener) -> None:
    """Run cells until the session is stopped.

    Args:
        folder: the session's.
        rank: this process's.
        token: of the empty cell with which the session began; its end says that this rank is ready.
        run_cell: runs one cell; what it raises is reported, and the rank goes on.
        listener: says meanwhile what this rank does.
    """
    # Between cells an interrupt is meant for the kernel alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    marks = os.dup(1)  # a cell may put another file in its place
    with open(control_path(folder.path, rank), encoding="utf-8") as control:
        tell_end(marks, token, failed=False, groups={})
        _, recorded = read_begun(0)
        for line in control:
            request = json.loads(line)
            if "stop" in request:
                return
            cell_folder = JobFolder(Path(request["folder"]))
            job = cell_folder.read_job()
            before = {group.name: group.num_begun or 0 for group in read_groups({})}
            failed = not _run_reported(cell_folder, job, rank, run_cell, listener)
            collectives, recorded = read_begun(recorded)
            tell_end(marks, job.token, failed=failed, groups=count_begun(before), collectives=collectives)


def count_begun(before: Mapping[str, int]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return what a cell has begun in each group (collectives and messages), with the group's ranks; {} for nothing."""
    return {
        group.name: (begun, group.ranks)
        for group in read_groups({})
        if (begun := (group.num_begun or 0) - before.get(group.name, 0))
    }


def _run_reported(folder: JobFolder, job: Job, rank: int, run_cell: RunCell, listener: Listener) -> bool:
    """Run one cell; return whether it succeeded, and leave a report if it did not."""
    from vlmcourse.notebook.worker import build_report

    listener.open(folder.path)
    listener.count_from_here()
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            run_cell(folder, job)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except BaseException as error:  # whatever it was, the notebook shows it and the session goes on
        listener.leave_end(error)
        folder.write_report(build_report(rank, error, time.monotonic()))
        return False
    listener.leave_end()
    return True


def tell_end(
    marks: int,
    token: str,
    *,
    failed: bool,
    groups: Mapping[str, tuple[int, tuple[int, ...]]],
    collectives: Mapping[str, list[str]] | None = None,
) -> None:
    """Print the mark that ends the output of a cell.

    Args:
        marks: the open file that the rank's output goes to.
        token: the cell's secret word.
        failed: whether the cell failed.
        groups: see `count_begun`.
        collectives: see `read_begun`.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # whatever the cell has put there
            stream.flush()
    has_pending = failed and any(not each.is_done for each in read_record()[0])
    end = {"failed": failed, "groups": groups, "has_pending": has_pending, "collectives": collectives}
    content = json.dumps(end)
    os.write(marks, f"{CELL_END.format(token=token, content=content)}\n".encode())
