"""What four ranks do for `test_monitor_scaling.py`: measure scaling, and regroup. Usage: scaling_worker.py FOLDER."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vlmcourse.labs.scaling import measure_scaling
from vlmcourse.parallel.fewer_ranks import Regrouping
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks


def add_up() -> float:
    numbers = torch.ones(1)
    dist.all_reduce(numbers)
    return numbers.item()


def regroup(ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = {"sums": {}}
    with Regrouping(ranks) as regrouping:
        for size in (2, 1, 3):
            with regrouping.only(size) as few:
                if few is not None:
                    alone = not dist.is_initialized()
                    found["sums"][size] = (few.rank, few.world_size, few.backend, 0 if alone else add_up())
        try:
            with regrouping.only(2) as few:
                if few is not None and few.rank == 1:
                    raise OSError("planted")
        except (OSError, RuntimeError) as error:
            found["failure"] = f"{type(error).__name__}: {error}"
        try:
            with regrouping.only(5):
                pass
        except ValueError as error:
            found["refusal"] = str(error)
    found["after"] = add_up(), dist.get_world_size()
    return found


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    found: dict[str, Any] = {"reports": measure_scaling(num_turns=2, num_steps=2, ranks=ranks)}
    found["regrouped"] = regroup(ranks)
    try:
        measure_scaling(sizes=(1, 3, 4), ranks=ranks)
    except ValueError as error:
        found["refusal"] = str(error)
    (folder / f"rank{ranks.rank}.pkl").write_bytes(pickle.dumps(found))
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
