"""What ranks do for `test_labs_ch07b.py`. Usage: ch07b_worker.py FOLDER.

Each rank fine-tunes the same model from a folder in each layout, and measures the way from naive to tuned with the tiny
model; it writes what it found to FOLDER/rank<r>.pt, and the runs to FOLDER/runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from vlmcourse.labs import ch07b
from vlmcourse.labs.tuning import measure_tuning
from vlmcourse.models.hf import LAYOUTS
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.presets import get_model
from vlmcourse.train.trainer import Trainer


def fine_tune(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Return losses and logits by layout."""
    found = {}
    for layout in LAYOUTS:
        settings = {"run__output_dir": str(folder / "runs"), "train__num_steps": 3}
        config = ch07b.finetune_config(folder / layout, folder / "set" / "chats.json", layout, **settings)
        trainer = Trainer(config, ranks, show_progress=False)
        losses = [trainer.train_step().loss for _ in range(3)]
        trainer.save()
        found[layout] = losses, ch07b.compute_logits(trainer.model, ch07b.load_batch(config))
    return found


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=100)
    found: dict[str, Any] = {"fine-tuned": fine_tune(folder, ranks)}
    found["rows"] = measure_tuning(num_turns=1, ranks=ranks, shape=get_model("tiny"))
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
