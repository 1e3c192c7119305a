"""State of training in files: can this machine do it, and were the files really written?

Enters: the folder of a section [offload], and later what a DeepSpeed engine wrote there. Leaves: one sentence that says
what is missing, or the number of files and their bytes. DeepSpeed never writes a tensor below 1 MiB: a small model
under 'nvme' can stay in main memory as a whole, with the same losses. So files are counted. Chapter 5, optional lab.

Source: Rajbhandari et al. 2021 (ZeRO-Infinity); DeepSpeed 0.19.8, `runtime/swap_tensor/`.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALLEST_SWAPPED_BYTES = 1024**2
"""A tensor below this stays in main memory."""
LIBAIO_PACKAGES = "libaio-dev (Debian, Ubuntu), libaio-devel (Fedora, RHEL) or libaio (conda-forge, Arch)"
SUFFIX = ".tensor.swp"


@dataclass(frozen=True)
class SwapFiles:
    """What one rank's engine has written of its optimizer's state."""

    folder: Path
    num_files: int
    """Of weights and moments; those of gradients come and go."""
    weight_bytes: int
    moment_bytes: int

    @property
    def num_bytes(self) -> int:
        """All bytes of weights and moments in files."""
        return self.weight_bytes + self.moment_bytes

    def __str__(self) -> str:
        return f"{self.num_files} files with {self.num_bytes:,} bytes in {str(self.folder)!r}"


def count_swap_files(folder: Path) -> SwapFiles:
    """Count what lies in the folder of one rank's optimizer.

    Args:
        folder: such as `NVME_PATH/zero_stage_3/optimizer/rank0`.
    """
    sizes = {path.name: path.stat().st_size for path in folder.glob(f"*{SUFFIX}") if "_gradient_" not in path.name}
    moments = sum(size for name, size in sizes.items() if name.startswith("exp_avg"))
    return SwapFiles(folder, len(sizes), sum(sizes.values()) - moments, moments)


def check_swap_files(files: SwapFiles, rank: int) -> None:
    """Refuse a run under 'nvme' that has written nothing after its first step.

    Raises:
        RuntimeError: saying what was counted, and which tensors are never written.
    """
    if not files.weight_bytes or not files.moment_bytes:
        raise RuntimeError(
            f"rank {rank}: offload.optimizer = 'nvme', but {files} after the first step, of which "
            f"{files.moment_bytes:,} are moments: weights and moments must be there; tensors below "
            f"{SMALLEST_SWAPPED_BYTES:,} bytes are never written: take a larger model or fewer ranks, or set "
            "offload.optimizer = 'cpu'"
        )


def check_swappable(key: str, num_elements: Sequence[int], world_size: int, rank: int) -> int:
    """Refuse a model of which nothing would be written, before an engine starts.

    Args:
        key: of the section [offload]: optimizer or parameters.
        num_elements: of each tensor that is written as one, over all ranks: for the optimizer a group of weights, for
            parameters a weight.
        world_size: ranks that share each of them.
        rank: this one.

    Returns:
        How many are large enough to be written; the others stay in main memory.

    Raises:
        ValueError: if none is.
    """
    sizes = [-(-elements // world_size) * 4 for elements in num_elements]
    num_swapped = sum(size >= SMALLEST_SWAPPED_BYTES for size in sizes)
    if not num_swapped:
        what = "groups of weights" if key == "optimizer" else "weights"
        raise ValueError(
            f"rank {rank}: offload.{key} = 'nvme': the largest of {len(sizes)} {what} has {max(sizes, default=0):,} "
            f"bytes on each of {world_size} ranks, and DeepSpeed never writes less than {SMALLEST_SWAPPED_BYTES:,}: no "
            f"file would appear; take a larger model or fewer ranks, or set offload.{key} = 'cpu'"
        )
    return num_swapped


def clear_swap_folder(nvme_path: str, rank: int) -> None:
    """Remove what an earlier run of this rank left of its optimizer: it would pass for this run's."""
    shutil.rmtree(Path(nvme_path) / "zero_stage_3" / "optimizer" / f"rank{rank}", ignore_errors=True)


def find_nvme_problem(nvme_path: str, builder: Any) -> str:
    """Return in one sentence why this machine cannot keep state in files, or "" if it can.

    Args:
        nvme_path: the folder of the section [offload]; made where it is missing.
        builder: DeepSpeed's `AsyncIOBuilder`; it compiles and links a program against libaio.
    """
    if not builder.is_compatible(verbose=False):
        return (
            f"DeepSpeed's {builder.name} finds no libaio (headers and library): install {LIBAIO_PACKAGES}, or set "
            "offload.optimizer = 'cpu'"
        )
    return find_folder_problem(Path(nvme_path))


def find_folder_problem(folder: Path) -> str:
    """Return why state cannot be written to a folder past the cache of the operating system, or "" if it can.

    Args:
        folder: made where it is missing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder)
        os.close(descriptor)
    except OSError as error:
        return f"offload.nvme_path = {str(folder)!r} cannot be written to ({error.strerror}): choose another folder"
    try:
        os.close(os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0)))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return (
            f"offload.nvme_path = {str(folder)!r}: its file system takes no direct I/O (it may be in memory, as tmpfs "
            "is): choose a folder on a disk"
        )
    finally:
        os.unlink(name)
    return ""
