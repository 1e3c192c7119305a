"""What ranks report for `test_parallel_holdings.py`. Usage: holdings_worker.py FOLDER; 2 or 4 ranks."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlmcourse.config import parse_config
from vlmcourse.labs import ch01
from vlmcourse.monitor.activations import ActivationMeter
from vlmcourse.monitor.step_cost import measure_step_costs
from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks
from vlmcourse.train.trainer import Trainer

CASES: dict[int, dict[str, tuple[int, int, dict[str, Any]]]] = {
    2: {
        "ddp": (4, 1, {"strategy": "ddp"}),
        "zero1": (4, 1, {"strategy": "zero1"}),
        "fsdp": (4, 1, {"strategy": "fsdp"}),
        "tp": (8, 1, {"tp": 2}),
        "cp": (8, 1, {"strategy": "ddp", "cp": 2}),
        "pp": (4, 2, {"pp": 2}),
    },
    4: {"fsdp x tp": (4, 1, {"strategy": "fsdp", "tp": 2})},
}


def kept_by_squares() -> dict[str, int]:
    """Return what the meter counts for x -> (x w)^2 -> sum, with x of 8 numbers and w a parameter of 4."""
    x, weight = torch.ones(2, 4, requires_grad=True), nn.Parameter(torch.ones(4, 4))
    with ActivationMeter() as meter:
        loss = (x @ weight).square().sum()
        found = {"forward": meter.live_bytes}
        loss.backward()
        del loss
    return found | {"after": meter.live_bytes, "peak": meter.peak_bytes}


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    found: dict[str, Any] = {"kept": kept_by_squares()}
    trainers = {}
    for name, (micro_batch, steps, parallel) in CASES[ranks.world_size].items():
        table = {"parallel": parallel, "data": {"num_train_samples": 64, "num_eval_samples": 8}}
        sizes = {"train.micro_batch_size": micro_batch, "train.accumulation_steps": steps}
        trainers[name] = Trainer(parse_config(table, sizes), ranks, show_progress=False)
        found[name] = dataclasses.asdict(ch01.report_holdings(trainers[name]))
    if ranks.world_size == 2:
        costs = measure_step_costs(trainers, num_warmup=1, num_timed=1)
        found["costs"] = {name: dataclasses.asdict(cost) for name, cost in costs.items()}
        actions, kept_bytes = ch01.record_schedule(trainers["pp"], num_steps=1)
        found["schedule"], found["schedule kept"] = actions, kept_bytes
    (folder / f"found{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
