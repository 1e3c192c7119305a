"""What a rank of a session does between cells: wait for the next one, run it, tell how it went.

The names of cell folders arrive through a named pipe in the session's private folder, one JSON object a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from vlmcourse.notebook.hang.listener import Listener
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
    with open(control_path(folder.path, rank), encoding="utf-8") as control:
        tell_end(token, failed=False)
        for line in control:
            request = json.loads(line)
            if "stop" in request:
                return
            cell_folder = JobFolder(Path(request["folder"]))
            job = cell_folder.read_job()
            failed = not _run_reported(cell_folder, job, rank, run_cell, listener)
            tell_end(job.token, failed=failed)


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


def tell_end(token: str, *, failed: bool) -> None:
    """Print the mark that ends the output of a cell."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    text = CELL_END.format(token=token, content=f"{int(failed)} {last_collective()}")
    # Past whatever the cell has put in place of sys.stdout.
    os.write(1, f"{text}\n".encode())


def last_collective() -> int:
    """Return the number of the last collective of the default group that this rank began; -1 if that is not known."""
    import torch.distributed as dist

    if not dist.is_initialized() or not os.environ.get("TORCH_FR_BUFFER_SIZE"):
        return -1
    from torch._C import _distributed_c10d

    dump: Callable[[], str] = _distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]

    entries = json.loads(dump()).get("entries", [])
    return max((entry["collective_seq_id"] for entry in entries if entry["process_group"][0] == "0"), default=-1)
