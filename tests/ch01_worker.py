"""What two ranks do for `test_labs_ch01.py`: count and watch a model of known size. Usage: ch01_worker.py FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from vlmcourse.config import ParallelConfig
from vlmcourse.labs import by_hand, ch01
from vlmcourse.parallel.apply import apply_strategy
from vlmcourse.parallel.counting import CollectiveCounter, ring_bytes
from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks

WIDTH, NUM_BLOCKS = 6, 3


class Stack(nn.Module):
    """Three blocks of 6 x 6 weights, and a vector of one row, which cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS))
        self.row = nn.Parameter(torch.ones(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar that every parameter has a gradient of."""
        for block in self.blocks:
            x = block(x)
        return x.sum() + self.row.sum()


def main(folder: Path) -> None:
    """Write what this rank saw to `found<rank>.json`."""
    ranks = init_ranks(timeout_s=60)
    mine = torch.tensor([1.0, 2.0]) + 10 * ranks.rank
    found: dict[str, object] = {
        "exchange": by_hand.exchange(mine).tolist(),
        "every": by_hand.from_every_rank(ranks.rank),
    }
    for strategy in ("ddp", "fsdp"):
        model = apply_strategy(Stack(), ParallelConfig(strategy=strategy), ranks)
        x = torch.ones(2, WIDTH, requires_grad=True)  # as the first block of a model has it
        model(x).backward()  # DDP arranges its buckets in the first passes
        model(x).backward()
        with CollectiveCounter() as counter:
            model(x).backward()
            dist.all_reduce(torch.ones(3, dtype=torch.float64))
        found[strategy] = {kind: (t.calls, t.payload_bytes) for kind, t in counter.counts.items()}
        found[f"{strategy} ring"] = ring_bytes(counter.counts, ranks.world_size)
        if strategy == "fsdp":
            found["uneven"] = ch01.uneven_shards(model)
            with ch01.watch_gathered_weights(model) as events:
                model(x).backward()
            found["events"] = events
            num_events = len(events)
            model(x).backward()
            found["events after"] = len(events) - num_events
    (folder / f"found{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
