"""Forks the ranks of worker scripts from a process that has imported torch: an import costs each rank 6 s of a core.

The notebook's fork server with a script in the place of a cell. Runs beside pytest; `ranks.py` asks it.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import random
import runpy
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from vlmcourse.notebook import fork_server
from vlmcourse.notebook.starting import ForkServerClient, RankHandle

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from rank_server import main; main(int(sys.argv.pop()))"
)
ARGV = "RANK_SERVER_ARGV"
"""The variable that holds the script, or -m and a module, and its arguments, as JSON."""
MODULES = ("vlmcourse.train.trainer", "torch._dynamo", "torch.distributed.fsdp", "transformers")
"""What a script or the first step of an optimizer would import."""


def main(control_fd: int) -> None:
    """Import, then serve until pytest's end of the socket is closed."""
    for name in MODULES:
        importlib.import_module(name)
    assert "matplotlib" not in sys.modules, "an answer to lab 5.1 is to import it late"
    fork_server.IDLE_MODULES = ()
    fork_server.run_rank = run_script
    fork_server.main(control_fd)


def run_script(request: dict) -> int:
    """Run a script as `python SCRIPT ARGUMENTS` or `python -m MODULE ARGUMENTS` would; return the exit code."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv[:] = json.loads(os.environ.pop(ARGV))
    is_module = sys.argv[0] == "-m"
    if is_module:
        del sys.argv[0]
    sys.path[:] = [*([] if is_module else [str(Path(sys.argv[0]).parent)]), *request["sys_path"]]
    import numpy
    import torch

    fork_server.forget_finalizers()
    # As in new processes, which differ in these two; PyTorch's own generator begins in all of them alike.
    random.seed()
    numpy.random.seed()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter's end does
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        atexit._run_exitfuncs()
        fork_server.flush_open_files()
    return 0


class ScriptStarter:
    """Starts ranks that run scripts, from one server for all of them."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._client = ForkServerClient({**os.environ, **env}, boot=BOOT)
        atexit.register(self._client.close)

    def start(self, argv: list[str], private_dir: Path, env: Mapping[str, str]) -> RankHandle:
        rank = self._client.start_rank(private_dir, {**env, ARGV: json.dumps(argv)})
        assert rank is not None, "the fork server of the tests does not answer"
        return rank
