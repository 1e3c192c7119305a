"""What two ranks do for `test_monitor_loop_log.py`: a loop without `Trainer` in which rank 1 sleeps in forward.

Usage: loop_log_worker.py FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.monitor.loop_log import log_loop
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks

SLEEP_S = 0.1
PAUSE_S = 0.03
"""Of all ranks between backward and the optimizer: time of their own."""
NUM_STEPS = 9


class Sleepy(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(64, 64), seconds

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        time.sleep(self.seconds)
        return {"loss": self.layer(x).square().mean()}


def train(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Sleepy(SLEEP_S if ranks.rank == 1 else 0.0))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in log_loop([torch.ones(4, 64)] * NUM_STEPS, folder, model, count_tokens=len):
        model(x)["loss"].backward()
        time.sleep(PAUSE_S)
        sgd.step()
        sgd.zero_grad()


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    train(ranks, folder)  # what it has wrapped is gone before the ranks part
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
