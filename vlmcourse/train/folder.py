"""The folder that a run writes to: where it is, whether it can be written to, how an earlier run is kept.

Without torch, so that the command line can refuse a folder before any rank starts.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from vlmcourse.config import TrainConfig

logger = logging.getLogger(__name__)


def run_folder(config: TrainConfig) -> Path:
    """Return where a run writes."""
    return Path(config.run.output_dir) / config.run.name


def check_run_folder(config: TrainConfig, *, is_resumed: bool) -> None:
    """Refuse a run's folder that could not be made or written to; leaves nothing behind.

    Args:
        config: the run.
        is_resumed: whether the run goes on in its folder; a new run moves an earlier one aside.

    Raises:
        ValueError: if nothing can be written there; the message says why and what to change.
    """
    place = run_folder(config)
    try:
        if not is_resumed and _has_content(place):
            place = place.parent  # in which the earlier run is renamed
        while not _exists(place):
            place = place.parent
        with tempfile.TemporaryDirectory(dir=place, prefix=".vlmcourse_"):
            pass
    except OSError as error:
        output_dir = config.run.output_dir
        where = "" if place == Path(output_dir) else f"{str(place)!r}: "
        raise ValueError(
            f"run.output_dir = {output_dir!r} cannot be written to ({where}{error.strerror}): choose another folder "
            "with --set run.output_dir=..."
        ) from error


def move_aside(folder: Path) -> None:
    """Rename a folder that has something in it to the first free of `name.1`, `name.2` and so on."""
    if not _has_content(folder):
        return
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
    logger.info("kept the earlier run %s as %s", folder, target)


def _has_content(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _exists(path: Path) -> bool:
    """Return whether there is something of this name, a link to nothing included."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
