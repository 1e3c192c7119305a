"""Run a worker script on several ranks, with a time limit and its output kept for the failure message."""

from __future__ import annotations

import sys
from pathlib import Path

from vlmcourse.notebook.failure import RankFailure
from vlmcourse.notebook.launcher import run_ranks

CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def run_worker(script: str, *arguments: str, nproc: int = 2, timeout_s: float = 200) -> None:
    """Run `tests/<script>` on `nproc` CPU ranks; a failure shows what they printed."""
    lines: list[str] = []
    argv = [sys.executable, str(Path(__file__).parent / script), *arguments]
    try:
        run_ranks(
            argv,
            nproc,
            timeout_s=timeout_s,
            env=CPU_ONLY,
            on_line=lambda rank, line: lines.append(f"[{rank}] {line}"),
        )
    except RankFailure as error:
        raise AssertionError("\n".join([*lines[-80:], str(error)])) from error
