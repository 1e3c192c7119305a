"""What is missing in a run's folder, in words: files of ranks, steps of a rank that is behind, an older version's.

Enters: the folder and what its step log holds. Leaves: sentences for an error, or for a note. Chapter 6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from vlmcourse.monitor.step_log import FOLDER, RankLog, step_log_path

BEHIND_STEPS = 2
"""Ranks of a live run may be so many steps apart, as they write one after the other; more is worth a sentence."""


def check_folder(folder: Path) -> None:
    """Refuse a folder that is none, or that has a log of rows and no step log.

    Raises:
        FileNotFoundError: saying which.
    """
    if folder.is_dir() and not any((folder / FOLDER).glob("rank*.jsonl")):
        logs = [name for name in ("log.jsonl", "log.csv", "result.json") if (folder / name).exists()]
        if logs:
            raise FileNotFoundError(
                f"{folder} has {' and '.join(logs)}, but no {FOLDER}/rank0000.jsonl, which says where the time of each "
                "step went: a version before the step log made this run; make it again, 20 steps are enough"
            )


def describe_gaps(folder: Path, logs: Mapping[int, RankLog]) -> list[str]:
    """Return which ranks have no file, or are behind the others; nothing where all have written alike."""
    last = {rank: log.steps[-1].step if log.steps else 0 for rank, log in logs.items()}
    # By time: ranks that a resumed run has lost may have got further than it is now.
    newest = max(logs, key=lambda rank: logs[rank].steps[-1].start_s if logs[rank].steps else -math.inf)
    records = logs[newest].steps
    world_size = (records[-1].world_size if records else None) or len(logs)
    found = []
    if absent := [rank for rank in range(world_size) if rank not in logs]:
        paths = ", ".join(step_log_path(folder, rank).name for rank in absent[:4])
        found.append(
            f"rank(s) {', '.join(map(str, absent))} of {world_size} have no file in {folder / FOLDER} ({paths}): copy "
            "what each machine wrote into one folder"
        )
    for rank in range(world_size):
        if rank in last and last[rank] < last[newest] - BEHIND_STEPS:
            found.append(
                f"rank {rank} has written up to step {last[rank]}, rank {newest} up to step {last[newest]}: it "
                "hangs or "
                "has ended, or its file was cut; steps that it has not written are not looked at"
            )
    return found
