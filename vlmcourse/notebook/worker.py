"""What one rank runs: read the cell from the private folder, join the group, run the cell, report, leave.

Started by the magic as a process of its own. Everything it prints is shown in the notebook with its rank in front.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import io
import linecache
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vlmcourse.notebook.failure import RankReport
from vlmcourse.notebook.hang.listener import Listener
from vlmcourse.notebook.jobs import FILE_NAME, Job, JobFolder, write_private

if TYPE_CHECKING:
    from vlmcourse.notebook.rank_shell import RankShell

GROUP_TIMEOUT_FRACTION = 0.5
"""A collective may wait for this part of the cell's time: it then fails, with a line number, before the cell does."""


def main(folder: str) -> None:
    """Run the cell that `folder` describes; on failure leave a report there and end the process with code 1."""
    rank = int(os.environ["RANK"])
    job_folder = JobFolder(Path(folder))
    listener = Listener(rank)
    try:
        listener.open(job_folder.path)
        run_job(job_folder, listener)
    except BaseException as error:  # the rank's boundary: whatever it was, the notebook shows it
        # The launcher may be stopping this rank already, because of another: that must not cut the report short.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        listener.leave_end(error)
        report = build_report(rank, error, time.monotonic())
        try:
            job_folder.write_report(report)
        except OSError as disk_error:
            print(f"{report.traceback}\n(no report could be written: {disk_error})")
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: the normal end of the interpreter can wait for threads and for ranks that wait for this one.
        os._exit(1)


def run_job(folder: JobFolder, listener: Listener) -> None:
    """Run the cell between joining and leaving the process group; `listener` says meanwhile what this rank does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    job = folder.read_job()

    # These import torch, which takes seconds: an interrupt meanwhile is reported like one in the cell.
    from vlmcourse.notebook.process_group import join_group, leave_group, limit_collectives
    from vlmcourse.notebook.rank_shell import connect_shell, get_shell
    from vlmcourse.notebook.session_worker import serve_cells
    from vlmcourse.notebook.spawning import send_definitions_by_value
    from vlmcourse.notebook.variables import load_variables

    ranks = join_group(job.timeout_s * GROUP_TIMEOUT_FRACTION)
    listener.count_from_here()
    listener.leave_word_before_abort()
    builtins.input = sys.breakpointhook = refuse_keyboard
    send_definitions_by_value()
    shell = get_shell()
    # What the cell defines is in `__main__`, where pickle and multiprocessing look for it.
    sys.modules["__main__"] = shell.user_module
    namespace = shell.user_ns

    def run_one(folder: JobFolder, job: Job) -> None:
        # Rank 0, unless `torchrun` runs on several machines: each shows its own first.
        is_main, is_shown = ranks.local_rank == job.main_rank, ranks.local_rank == job.shown_rank
        linecache.cache[FILE_NAME] = (0, None, [f"{line}\n" for line in job.shown_lines], FILE_NAME)
        connect_shell(shell, folder if is_shown else None, job.token)
        namespace.update(load_variables(folder.inputs.read_bytes()))
        namespace.update(rank=ranks.rank, local_rank=ranks.local_rank, world_size=ranks.world_size, device=ranks.device)
        limit_collectives(job.timeout_s * GROUP_TIMEOUT_FRACTION)
        try:
            run_cell(job, shell, shows_pictures=is_shown)
        except Exception:
            show_figures()
            raise
        show_figures()
        if is_main:
            write_outputs(folder, job, namespace)

    if job.stays:
        serve_cells(folder, ranks.rank, job.token, run_one, listener)
    else:
        run_one(folder, job)
        listener.leave_end()
    leave_group(ranks, folder)


def refuse_keyboard(*_: object, **__: object) -> NoReturn:
    """Stand in for what asks a person: `input()` and `breakpoint()`."""
    raise EOFError("a rank has no keyboard: print what you want to see, or send a value with --in")


def run_cell(job: Job, shell: RankShell, shows_pictures: bool) -> None:
    """Run the code of the cell in the shell's variables, and show the value of its last expression.

    Every rank shows a value that is text; of pictures and tables one is enough.

    `await` is allowed at the top level; `exit(0)` ends the cell, not the rank.
    """
    from vlmcourse.notebook.rank_shell import show_value

    tree = ast.parse(job.source, FILE_NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with asyncio.Runner() as runner:

        def run(node: ast.Module | ast.Expression, mode: str) -> object:
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            code = compile(node, FILE_NAME, mode, flags=flags, dont_inherit=True)
            value = eval(code, shell.user_ns)
            if code.co_flags & inspect.CO_COROUTINE:
                value = runner.run(value)  # type: ignore[arg-type]
            return value

        try:
            run(tree, "exec")
            if isinstance(last, ast.Expr):
                value = run(ast.Expression(last.value), "eval")
                if job.shows_last_value:
                    show_value(shell, value, text_only=not shows_pictures)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise


def show_figures() -> None:
    """Show the figures that the cell has left open, if it drew any."""
    if "matplotlib.pyplot" in sys.modules:
        from vlmcourse.notebook.figures import show_unseen

        show_unseen()


def write_outputs(folder: JobFolder, job: Job, namespace: Mapping[str, object]) -> None:
    """Leave the variables of `--out` for the notebook, or say why they cannot be had."""
    from vlmcourse.notebook.variables import CannotTravelError, dump_variables

    missing = [name for name in job.out_names if name not in namespace]
    if missing:
        where = f"on rank {job.main_rank}"
        problem = f"--out {missing[0]}: the cell ended without a variable {missing[0]!r} {where}: assign it there"
        write_private(folder.output_problem, problem.encode())
        return
    try:
        data = dump_variables("--out", {name: namespace[name] for name in job.out_names})
    except CannotTravelError as error:
        write_private(folder.output_problem, str(error).encode())
    else:
        write_private(folder.outputs, data)


def read_message(error: BaseException) -> str:
    """Return what an exception says; what Python says of it where its `__str__` fails."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def build_report(rank: int, error: BaseException, failed_at_s: float) -> RankReport:
    """Describe an exception, with its traceback beginning at the cell's own line."""
    frames = list(traceback.walk_tb(error.__traceback__))
    cell_lines = [line for frame, line in frames if frame.f_code.co_filename == FILE_NAME]
    trace = error.__traceback__
    while cell_lines and trace is not None and trace.tb_frame.f_code.co_filename != FILE_NAME:
        trace = trace.tb_next
    return RankReport(
        rank=rank,
        failed_at_s=failed_at_s,
        error_type=type(error).__name__,
        error_message=read_message(error),
        traceback="".join(traceback.format_exception(error.with_traceback(trace))),
        where=f"{FILE_NAME}, line {cell_lines[-1]}" if cell_lines else "",
    )
