"""Run a worker script on several ranks, with a time limit and its output kept for the failure message."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from rank_server import ScriptStarter

from vlmcourse.notebook.failure import RankFailure
from vlmcourse.notebook.jobs import open_job_folder
from vlmcourse.notebook.launcher import RanksResult, run_ranks

CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


@cache
def script_starter() -> ScriptStarter:
    return ScriptStarter(CPU_ONLY)


def run_worker(script: str, *arguments: str, nproc: int = 2, timeout_s: float = 200) -> None:
    """Run `tests/<script>` on `nproc` CPU ranks; a failure shows what they printed."""
    lines: list[str] = []
    argv = [str(Path(__file__).parent / script), *arguments]
    with open_job_folder() as folder:
        starts_rank = partial(script_starter().start, argv, folder.path) if sys.platform == "linux" else None
        try:
            run_ranks(
                [sys.executable, *argv],
                nproc,
                timeout_s=timeout_s,
                env=CPU_ONLY,
                on_line=lambda rank, line: lines.append(f"[{rank}] {line}"),
                private_dir=folder.path,
                starter=starts_rank,
            )
        except RankFailure as error:
            raise AssertionError("\n".join([*lines[-80:], str(error)])) from error


def run_ranks_forked(argv: list[str], nproc: int, **options: Any) -> RanksResult:
    """Do as `run_ranks`, and fork the ranks from the server of worker scripts, which has imported torch.

    For `monkeypatch` in the place of `run_ranks` where a test is about what ranks find, not about how they start.
    """
    if sys.platform != "linux":
        return run_ranks(argv, nproc, **options)
    assert argv[0] == sys.executable
    with open_job_folder() as folder:
        starts_rank = partial(script_starter().start, argv[1:], folder.path)
        return run_ranks(argv, nproc, private_dir=folder.path, starter=starts_rank, **options)


def read_part(factory: pytest.TempPathFactory, script: str, part: str, nproc: int = 2) -> list[dict[str, Any]]:
    """Return what each rank found in one part of `tests/<script>`, which is run once for all test files that ask.

    The script gets a folder and writes `found<rank>.json` in it: by part, what the rank found.
    """
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / Path(script).stem
    with (shared / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker's run counts for this one too
        if not folder.exists():
            unfinished = shared / f"{folder.name}.partial"
            unfinished.mkdir(exist_ok=True)
            run_worker(script, str(unfinished), nproc=nproc)
            unfinished.rename(folder)
    found = [json.loads((folder / f"found{rank}.json").read_text(encoding="utf-8")) for rank in range(nproc)]
    return [of_rank[part] for of_rank in found]
