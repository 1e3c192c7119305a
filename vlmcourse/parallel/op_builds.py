"""Operations that DeepSpeed compiles at first use: announced, never waited for in vain, explained where they cannot be.

Enters: one of DeepSpeed's builders, from `get_builder`. Leaves: the compiled operation, loaded on every rank; or
one sentence that says what is missing. Left to itself, a build says nothing for a minute, and the file `lock` of one
that was killed lets every later run wait for ever: PyTorch waits until the file is gone. Chapter 5.

Source: torch 2.13.0, `utils/cpp_extension.py` and `utils/file_baton.py`; DeepSpeed 0.19.8, `ops/op_builder/builder.py`.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch.utils import cpp_extension

from vlmcourse.parallel.ranks import Ranks
from vlmcourse.progress import heartbeat
from vlmcourse.termination import end_as_interrupted

logger = logging.getLogger(__name__)
LOCK = "lock"
"""What PyTorch calls the file that exists while a folder is being built in."""
SETTLE_S = 0.5
"""A process closes its lock a moment before it removes it; a lock without a holder is looked at twice."""
BEAT_S = 5.0
POLL_S = 0.2
COMPILER_PACKAGES = "g++ (Debian, Ubuntu), gcc-c++ (Fedora, RHEL), gxx (conda-forge) or xcode-select --install (macOS)"


class StaleLockError(ValueError):
    """A lock of a build that is no longer running, which PyTorch would wait for without end; a person can delete it."""


def find_build_problem() -> str:
    """Return in one sentence why nothing can be compiled on this machine, or "" if it can."""
    compiler = os.environ.get("CXX") or ("clang++" if shutil.which("clang++") and not shutil.which("c++") else "c++")
    if shutil.which(compiler.split()[0]) is None:
        return f"there is no C++ compiler {compiler!r}: install {COMPILER_PACKAGES}"
    if not cpp_extension.is_ninja_available():
        return "there is no ninja, which runs the compiler: pip install ninja"
    return ""


def get_builder(name: str) -> Any:
    """Return one of DeepSpeed's builders for the kind of device it runs on, such as "CPUAdamBuilder"."""
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    return accelerator.create_op_builder(name)


def find_build_folder(name: str) -> Path:
    """Return the folder in which PyTorch builds the operation `name`, in TORCH_EXTENSIONS_DIR or the user's cache.

    Raises:
        RuntimeError: if the folder cannot be made.
    """
    try:
        return Path(cpp_extension._get_build_directory(name, verbose=False))
    except OSError as error:
        raise RuntimeError(
            f"the folder for the compiled operation {name!r} cannot be made ({error}): set TORCH_EXTENSIONS_DIR to a "
            "folder that you may write to"
        ) from error


def is_built(name: str) -> bool:
    """Whether the operation `name` lies in its folder, and nobody is building it."""
    folder = find_build_folder(name)
    return (folder / f"{name}.so").is_file() and not (folder / LOCK).exists()


def check_lock(folder: Path) -> None:
    """Refuse a lock that no running process holds.

    Args:
        folder: of one operation, as `find_build_folder` returns it.

    Raises:
        StaleLockError: naming the file, its age, and what to do.
    """
    lock = folder / LOCK
    if not lock.exists() or _has_holder(lock):
        return
    time.sleep(SETTLE_S)
    try:
        age_s = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return  # its build has just ended
    if not _has_holder(lock):
        raise StaleLockError(
            f"a build that was killed left the file {str(lock)!r}: it is {age_s:,.0f} s old, and no process on this "
            f"machine has it open; every later run would wait for it without end. Delete it: rm '{lock}' (if the "
            "folder is shared with other machines, see first that none of them builds there)"
        )


def load_op(builder: Any, ranks: Ranks) -> Any:
    """Compile and load one operation: one rank of each machine builds it, and says so, the others wait for that one.

    Args:
        builder: of `get_builder`; it has `name`, `sources()` and `load()`.
        ranks: this process's place; all ranks must call this.

    Returns:
        The loaded operation.

    Raises:
        StaleLockError: on every rank, if a killed build's lock would let one wait without end.
        RuntimeError: if the build fails, on the rank that builds with what the compiler said; on the others with its
            last line.
    Communicates: two all-gathers of a few bytes, and a few through the ranks' store, which waits longer than that.
    """
    if problem := first_problem(_find_stale_lock(builder.name) if ranks.local_rank == 0 else "", ranks):
        raise StaleLockError(problem)
    if ranks.world_size == 1:
        return _build(builder, ranks.rank)
    store: Any = dist.distributed_c10d._get_default_store()
    names: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(names, uuid.uuid4().hex)  # of this attempt: a rank may still read of the one before
    key = f"vlmcourse/{builder.name}/{names[ranks.rank - ranks.local_rank]}"
    if ranks.local_rank != 0:
        said = _wait_for_build(store, key, ranks)
        if said:
            raise RuntimeError(f"rank {ranks.rank}: the rank that builds {builder.name!r} failed: {said}")
        return builder.load(verbose=False)
    said = "see there"
    try:
        loaded, said = _build(builder, ranks.rank), ""
    except (RuntimeError, ImportError, OSError, subprocess.SubprocessError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise
    finally:
        store.set(key, said)
    return loaded


def first_problem(mine: str, ranks: Ranks) -> str:
    """Return the first problem that any rank has, with its number, or "" if none has; the same text on every rank.

    Args:
        mine: this rank's problem, or "".
        ranks: this process's place; all ranks must call this.
    Communicates: an all-gather of the texts.
    """
    everyone: list[Any] = [mine]
    if ranks.world_size > 1:
        everyone *= ranks.world_size
        dist.all_gather_object(everyone, mine)
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(everyone) if problem), "")


def _build(builder: Any, rank: int) -> Any:
    """Load an operation on the rank that compiles it where it is not there yet."""
    folder = find_build_folder(builder.name)
    if is_built(builder.name):
        return builder.load(verbose=False)
    num_files = len(builder.sources())
    what = (
        f"rank {rank}: DeepSpeed compiles the operation {builder.name!r} ({num_files} C++ files) into {str(folder)!r}"
    )
    logger.warning("%s, once on this machine: a minute or more", what)
    started_s = time.monotonic()
    progress = heartbeat(lambda: _describe_progress(builder.name, folder), every_s=BEAT_S)
    with progress, end_as_interrupted():  # an interrupted build removes its lock
        loaded = builder.load(verbose=False)
    seconds = time.monotonic() - started_s
    logger.warning(
        "rank %d: the operation %r is ready after %.0f s; the next run loads it", rank, builder.name, seconds
    )
    return loaded


def _find_stale_lock(name: str) -> str:
    """Return what `check_lock` says of an operation's folder, or "" where it says nothing or there is no folder."""
    try:
        check_lock(find_build_folder(name))
    except StaleLockError as error:
        return str(error)
    except RuntimeError:
        return ""  # said by who builds there
    return ""


def _describe_progress(name: str, folder: Path) -> str:
    num_objects = len(list(folder.glob("*.o")))
    return f"still compiling {name!r}: {num_objects} object file{'' if num_objects == 1 else 's'}"


def _wait_for_build(store: Any, key: str, ranks: Ranks) -> str:
    """Return what the building rank says: "" for success, else its last line.

    The launcher ends this rank if the one that builds dies; then the store of rank 0 is gone, too.
    """
    with heartbeat(lambda: f"rank {ranks.rank} waits for the rank that compiles", every_s=4 * BEAT_S):
        while not store.check([key]):
            time.sleep(POLL_S)
    return store.get(key).decode()


def _has_holder(lock: Path) -> bool:
    """Whether some process that may be looked at has the file open, as PyTorch has while it builds."""
    return any(_same_file(path, lock) for path in _open_files())


def _open_files() -> Iterator[str]:
    """Yield what processes have open, as far as this one may see; others belong to other people, or have just ended."""
    for process in psutil.process_iter():
        with suppress(psutil.AccessDenied, psutil.NoSuchProcess):
            yield from (file.path for file in process.open_files())


def _same_file(path: str, lock: Path) -> bool:
    return path == str(lock) or path == os.path.realpath(lock)
