"""The folder that a run writes to: whether it can be, how an earlier run is kept, which checkpoint is the latest.

Without torch, so that the command line can refuse what cannot go well before any rank starts.
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from vlmcourse.config import TrainConfig

logger = logging.getLogger(__name__)
META_NAME, POINTER_NAME = "meta.json", "latest"
"""Files of a checkpoint and of a `checkpoints` folder."""


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


def aside(folder: Path) -> Path | None:
    """Return the name under which an earlier run will be kept: the first free of `name.1`, `name.2` and so on.

    Returns:
        None where the folder is empty or not there, so that there is nothing to keep.
    """
    if not _has_content(folder):
        return None
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return target


def move_aside(folder: Path) -> None:
    """Rename a folder that has something in it as `aside` says."""
    if target := aside(folder):
        folder.rename(target)
        logger.info("kept the earlier run %s as %s", folder, target)


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `path` means: itself, or the latest in a run's or a `checkpoints` folder.

    Raises:
        FileNotFoundError: if there is none.
    """
    for folder in (path, path / "checkpoints"):
        if (folder / META_NAME).is_file():
            return folder
        pointer = folder / POINTER_NAME
        if pointer.is_file():
            named = folder / pointer.read_text(encoding="utf-8").strip()
            for whole in (named, named.with_suffix(".old")):  # .old: a kill came while the same step was saved again
                if (whole / META_NAME).is_file():
                    return whole
    raise FileNotFoundError(
        f"There is no checkpoint in {str(path)!r}: give the folder of a run that has saved one (the first is due after "
        "train.checkpoint_every steps, or with 0 at the end), or start without resuming"
    )


def read_meta(path: Path) -> dict[str, Any]:
    """Return what was kept beside a checkpoint's tensors; `step` is always there."""
    return json.loads((path / META_NAME).read_text(encoding="utf-8"))


def check_steps_left(config: TrainConfig, steps_done: int) -> None:
    """Refuse to go on with a run that has made all its steps.

    Raises:
        ValueError: saying how many were done and what to raise.
    """
    if steps_done >= config.train.num_steps:
        raise ValueError(
            f"train.num_steps = {config.train.num_steps}, but {steps_done} steps are done: nothing is left; raise it"
        )


def _has_content(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _exists(path: Path) -> bool:
    """Return whether there is something of this name, a link to nothing included."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
