"""What ranks do for `test_zero_tables.py`. Usage: zero_tables_worker.py FOLDER.

Each rank measures the tiny model under every stage of ZeRO, and on two ranks also a model of odd sizes, the traffic and
the two engines side by side; it writes all that to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlmcourse.labs.engine_table import compare_engines
from vlmcourse.labs.zero_stages import STAGES, measure_states, measure_traffic
from vlmcourse.monitor.ledger import Ledger, measure_ledger
from vlmcourse.monitor.state_table import Peaks, build_row
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks

OFFLOADED = ("deepspeed-zero2+cpu", "deepspeed-zero3+cpu")
SOME = ("zero1", "fsdp", "deepspeed-zero2", "deepspeed-zero3")


def measure_odd_sizes(ranks: Ranks) -> dict[int, tuple[Any, Ledger]]:
    """Return by stage a row and the ledger after the step, of a model that no number of ranks divides."""
    import deepspeed

    found = {}
    for stage in (1, 2, 3):
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        matrices, biases = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
        shapes = [[tuple(p.shape) for p in group] for group in (matrices, biases)]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": biases}])
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 7)).sum())
            before = measure_ledger(engine, engine.optimizer)
            engine.step()
        after = measure_ledger(engine, engine.optimizer)
        row = build_row((before, Peaks(0, 0)), shapes, f"deepspeed-zero{stage}", ranks.world_size, ranks.rank, 40)
        found[stage] = row, after
        engine.destroy()
    return found


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=100)
    is_pair = ranks.world_size == 2
    found: dict[str, Any] = {"states": measure_states((*STAGES, *OFFLOADED) if is_pair else SOME, ranks)}
    if is_pair:
        found["odd"] = measure_odd_sizes(ranks)
        found["traffic"] = measure_traffic(ranks=ranks)
        found["engines"] = compare_engines(num_rounds=3, ranks=ranks)
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
