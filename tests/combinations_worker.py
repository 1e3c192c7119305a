"""Trains every combination of `combinations.py` that needs as many ranks as this is started on.

Usage: combinations_worker.py FOLDER [PART OF A NAME]. Each rank writes its recordings to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch
from combinations import COMBINATIONS, WEIGHT_SEED, run
from parity import Recording

from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks


def main(folder: Path, part: str = "") -> None:
    ranks = init_ranks(timeout_s=60)
    found: dict[str, Recording | str] = {}
    for name, combination in COMBINATIONS.items():
        if combination.world_size == ranks.world_size and part in name:
            try:
                found[name] = run(combination, ranks, WEIGHT_SEED + ranks.rank)  # every rank another seed
            except (ValueError, AssertionError):
                found[name] = traceback.format_exc()
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
