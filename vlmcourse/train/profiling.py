"""Profile the first steps of a run as its `[profile]` section says, and say what was seen.

Enters: a trainer whose configuration asks for it (`profile.active` above 0). Leaves: in the folder `profile` of the
run, a trace a rank, `all_ranks.json` (all of them on one clock), `summary.txt` and `summary.json`. Chapter 6.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from vlmcourse.config import TrainConfig
from vlmcourse.monitor.profile_summary import PROFILE_FOLDER, SUMMARY_JSON
from vlmcourse.monitor.profiler import profile_steps
from vlmcourse.monitor.trace_merge import MERGED_NAME
from vlmcourse.monitor.trace_summary import summarise_folder
from vlmcourse.monitor.whole_file import replace_file
from vlmcourse.parallel.comm import wait_for_all
from vlmcourse.train.folder import run_folder
from vlmcourse.values import ConfigError

logger = logging.getLogger(__name__)
SUMMARY_NAME = "summary.txt"
"""In `PROFILE_FOLDER`, for people; `summary.json` beside it is for `monitor.diagnosis`."""
P = ParamSpec("P")
R = TypeVar("R")


def profile_folder(config: TrainConfig) -> Path:
    """Return where a run's traces lie."""
    return run_folder(config) / PROFILE_FOLDER


def profiled(fit: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let a trainer's `fit` record the steps that its configuration asks for; without any it runs as it is."""

    @wraps(fit)
    def run(trainer: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        if not trainer.config.profile.active:
            return fit(trainer, *args, **kwargs)
        with profile_training(trainer):
            return fit(trainer, *args, **kwargs)

    return run


@contextmanager
def profile_training(trainer: Any) -> Iterator[None]:
    """Record steps of the `fit` inside; at its end rank 0 merges the traces and writes what they say.

    Args:
        trainer: a `Trainer`; its configuration's `profile` says which steps, counted from the next.

    Raises:
        ConfigError: if fewer steps are left than that takes.
    Communicates: barriers, see `StepProfiler.step`, and one at the end.
    """
    config: TrainConfig = trainer.config
    profile = config.profile
    if found := profile.contradictions(config.train.num_steps, trainer.step):
        raise ConfigError("This run cannot be profiled", found)
    folder = profile_folder(config)
    counts = {"wait": profile.wait, "warmup": profile.warmup, "active": profile.active}
    with profile_steps(folder, **counts, ranks=trainer.ranks, first_step=trainer.step + 1) as profiler:
        trainer.after_step.append(profiler.after_step)
        has_ended = False
        try:
            yield
            has_ended = True
        finally:
            trainer.after_step.remove(profiler.after_step)
            if not has_ended and profiler.trace_path is not None and trainer.ranks.is_main:
                logger.warning(
                    "the run ended before its traces were merged; they lie in %s, and "
                    "vlmcourse.monitor.trace_summary.summarise_folder(%r) merges them",
                    folder,
                    str(folder),
                )
    wait_for_all(trainer.ranks)  # all traces are written
    if trainer.ranks.is_main:
        _write_summary(folder, is_written=profiler.trace_path is not None)


def _write_summary(folder: Path, *, is_written: bool) -> None:
    """Merge and summarise; a run whose traces cannot be merged has still trained.

    Args:
        folder: of the traces.
        is_written: whether this rank's trace is there; where not, that has been said.
    """
    try:
        for name in (SUMMARY_NAME, SUMMARY_JSON, MERGED_NAME):  # of an earlier profile: not to be taken for this one's
            (folder / name).unlink(missing_ok=True)
        if is_written:
            replace_file(folder / SUMMARY_NAME, f"{summarise_folder(folder)}\n")
    except (OSError, ValueError) as error:
        logger.warning("the traces in %s were not merged: %s", folder, error)
