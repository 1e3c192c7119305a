"""What two ranks do for `test_engine_nvme.py`: state in files, by DeepSpeed's compiled async_io.

Usage: nvme_worker.py FOLDER. Each rank trains with its optimizer in files, and with its weights too, and
writes what it found to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from offload_worker import LargeTrainer, swap
from parity import awkward_samples, parity_config

from vlmcourse.parallel.engine_places import swap_files
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.state_offload import OffloadConfig


def swap_the_optimizer(strategy: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Train with the optimizer's state alone in files."""
    config = dataclasses.replace(
        parity_config(strategy, 2, ranks.world_size, "all towers"),
        offload=OffloadConfig(optimizer="nvme", nvme_path=str(folder)),
    )
    samples = awkward_samples()
    trainer = LargeTrainer(config, ranks, train_data=samples, eval_data=samples[:1], show_progress=False)
    losses = [trainer.train_step().loss for _ in range(2)]
    files = swap_files(trainer.model)
    return {
        "losses": losses,
        "num_files": files.num_files,
        "weights": files.weight_bytes,
        "moments": files.moment_bytes,
    }


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=900)  # one rank may compile
    found = {
        "both": swap(ranks, folder, nullcontext),
        "optimizer": swap_the_optimizer("deepspeed-zero3", ranks, folder / "optimizer"),
        "through accelerate": swap_the_optimizer("accelerate-deepspeed-zero3", ranks, folder / "accelerate"),
    }
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
