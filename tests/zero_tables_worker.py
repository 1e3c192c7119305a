"""What ranks do for `test_zero_tables.py`. Usage: zero_tables_worker.py FOLDER.

Each rank measures state and traffic of the tiny model under every stage of ZeRO, on several ranks also of a model of
odd sizes, and on two the engines side by side and what ZeRO-3 keeps whole; it writes all that to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlmcourse.labs.engine_table import compare_engines
from vlmcourse.labs.zero_stages import EVERY_STAGE, FREES, STAGES, measure_stages
from vlmcourse.monitor.ledger import Ledger, measure_ledger
from vlmcourse.monitor.state_table import Peaks, build_row
from vlmcourse.monitor.traffic_table import Units, sum_numbers
from vlmcourse.parallel.counting import CollectiveCounter
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks

OFFLOADED = ("deepspeed-zero2+cpu", "deepspeed-zero3+cpu")
OTHERS = tuple(name for name in EVERY_STAGE if name not in STAGES)
"""ZeRO-0, and what accelerate starts."""
WITHOUT_ACCELERATE = tuple(name for name in EVERY_STAGE if not name.startswith("accelerate"))
STRATEGIES = {
    1: (*WITHOUT_ACCELERATE, OFFLOADED[0]),
    2: (*STAGES, FREES, *OFFLOADED, *OTHERS),
    4: (*WITHOUT_ACCELERATE, FREES),
}
"""What is run, by the number of ranks; through accelerate an engine is the same one, once it has been started."""


def start_odd_sizes(stage: int, threshold: int = 0) -> tuple[Any, list[list[tuple[int, ...]]]]:
    """Return an engine whose model the ranks do not divide, and the shapes of its parameters by group."""
    import deepspeed

    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    matrices, biases = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
    shapes = [[tuple(p.shape) for p in group] for group in (matrices, biases)]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": biases}])
    zero = {"stage": stage, "stage3_param_persistence_threshold": threshold}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0], shapes


def measure_kept_whole() -> list[tuple[int, int]]:
    """Return the ledger's weights at the start, after backward and after the step, and the elements that are whole.

    Biases are below ZeRO-3's threshold.
    """
    engine, _ = start_odd_sizes(3, threshold=5)

    def look() -> tuple[int, int]:
        whole = sum(p.data.numel() for p in engine.module.parameters())
        return measure_ledger(engine, engine.optimizer).weights_bytes, whole

    found = [look()]
    engine.backward(engine(torch.ones(1, 7)).sum())
    found.append(look())
    engine.step()
    found.append(look())
    engine.destroy()
    return found


def measure_odd_sizes(ranks: Ranks) -> dict[int, tuple[Any, Ledger, float]]:
    """Return by stage a row, the ledger after the step and the bytes sent, of a model that the ranks do not divide."""
    found = {}
    for stage in (1, 2, 3):
        engine, shapes = start_odd_sizes(stage)
        for _ in range(3):  # with the second, ZeRO-3 still exchanges in which order it needs what
            with CollectiveCounter() as counter:
                engine.backward(engine(torch.ones(1, 7)).sum())
                before = measure_ledger(engine, engine.optimizer)
                engine.step()
        after = measure_ledger(engine, engine.optimizer)
        row = build_row((before, Peaks(0, 0)), shapes, f"deepspeed-zero{stage}", ranks.world_size, ranks.rank, 40)
        found[stage] = row, after, counter.sent_bytes - sum_numbers(counter.calls, Units([], shapes))
        engine.destroy()
    return found


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=100)
    is_pair, names = ranks.world_size == 2, STRATEGIES[ranks.world_size]
    found: dict[str, Any] = {}
    if is_pair:
        states, traffic = measure_stages(names[: -len(OTHERS)], ranks)
        more_states, more_traffic = measure_stages(OTHERS, ranks, with_peaks=False)
        found["tables"] = states + more_states, traffic + more_traffic
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            found["engines"] = compare_engines(num_rounds=3, ranks=ranks)
        found["shown"], found["kept whole"] = shown.getvalue(), measure_kept_whole()
    else:
        found["tables"] = measure_stages(names, ranks, with_peaks=False)
    if ranks.world_size > 1:
        found["odd"] = measure_odd_sizes(ranks)
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
