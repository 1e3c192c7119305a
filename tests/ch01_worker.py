"""What two ranks do for `test_labs_ch01.py`: count and watch a model of known size. Usage: ch01_worker.py FOLDER."""

from __future__ import annotations

import contextlib
import io
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
MECHANISMS = ("s10_by_hand", "s10_backward", "s10_library", "s12_by_hand")
"""Cells of chapter 1b that compare a mechanism by hand with one process, in their order."""


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


def run_mechanisms(rank: int, world_size: int) -> dict[str, str]:
    """Run cells of chapter 1b as the notebook does, on this rank, and return what each prints."""
    path = Path(__file__).parents[1] / "solutions/ch01b_model_parallelism/ch01b_model_parallelism.ipynb"
    cells = {cell["id"]: cell["source"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}
    printed: dict[str, str] = {}
    handed_on: dict[str, object] = {"my_collectives": 2}
    for name in MECHANISMS:
        magic, *lines = cells[name]
        assert magic.startswith("%%torchrun -n 2"), magic
        names = {"rank": rank, "world_size": world_size, "device": torch.device("cpu"), **handed_on}
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec("".join(lines), names)
        printed[name] = out.getvalue()
        handed_on |= {"by_hand": names["by_hand"]} if "by_hand" in names else {}
    return printed


def main(folder: Path) -> None:
    """Write what this rank saw to `found<rank>.json`."""
    ranks = init_ranks(timeout_s=60)
    mine = torch.tensor([1.0, 2.0]) + 10 * ranks.rank
    found: dict[str, object] = {
        "exchange": by_hand.exchange(mine).tolist(),
        "every": by_hand.from_every_rank(ranks.rank),
        "mechanisms": run_mechanisms(ranks.rank, ranks.world_size),
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
