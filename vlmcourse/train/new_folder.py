"""A folder that is new, fits on its disk and gets its name when it is complete.

Enters: the folder and what fills it. Leaves: the whole folder, or one error and nothing.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError

from vlmcourse.planner.offload_cost import show_bytes


def check_new_folder(folder: Path) -> None:
    """Refuse a folder that has something in it: nothing of a person's is overwritten.

    Raises:
        ValueError: if it has, or is a file.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{str(folder)!r} is not empty: give a new folder with --out, or empty this one")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is a file: give a new folder with --out")


def check_room(folder: Path, needed_bytes: int) -> None:
    """Refuse a disk without room for the weights, before anything is written.

    Raises:
        ValueError: if fewer bytes are free.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needed_bytes:
        raise ValueError(
            f"{str(folder)!r}: the weights take {show_bytes(needed_bytes)} and its disk has {show_bytes(free_bytes)} "
            "free: free some, choose another disk with --out, or write half the bytes with --dtype bf16"
        )


def write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside this one, which gets its name when it is complete.

    Raises:
        ValueError: if the disk is full, or the place cannot be written to.
    """
    naming = {"prefix": f"{folder.name}.", "suffix": ".partial", "dir": folder.parent}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(**naming, ignore_cleanup_errors=True) as beside:  # a name that nobody has
            partial = Path(beside) / folder.name  # inside, since only its owner can open a temporary folder
            partial.mkdir()
            write(partial)
            partial.rename(folder)  # replaces an empty folder
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        remedy = "free some space, or choose another disk" if full else "choose another folder"
        raise ValueError(f"{str(folder)!r} cannot be written ({error}): {remedy}") from error
