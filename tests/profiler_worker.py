"""What two ranks do for `test_monitor_profiler.py`. Usage: profiler_worker.py FOLDER.

Each rank trains the tiny model with steps recorded: with a loader that sleeps on rank 1, with a rank 1 that sleeps
between forward and backward, as a pipeline, and under the engines of two other projects; then it runs a loop of its
own, once with too few steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vlmcourse.config import parse_config
from vlmcourse.monitor.profiler import profile_steps
from vlmcourse.parallel.phases import phase
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.spans import BACKWARD, FORWARD
from vlmcourse.train.trainer import Trainer

SLEEP_S, LONG_SLEEP_S = 0.05, 0.2
"""Planted once a step: in the loader, and between forward and backward, longer than another rank's backward."""
CASES: dict[str, dict[str, Any]] = {
    "slow loader": {"strategy": "fsdp"},
    "sleeping rank": {"strategy": "ddp"},
    "pipeline": {"strategy": "single", "pp": 2},
    "accelerate": {"strategy": "accelerate-ddp"},
    "deepspeed": {"strategy": "deepspeed-zero3"},
}
"""Name -> how the ranks share the work."""
FIRST_STEP, NUM_STEPS = 3, 4
"""The first recorded step of a run, and the last."""
DIAGNOSED, DIAGNOSED_STEPS = "pipeline", 11
"""The case that goes on after its profile for as many steps as a diagnosis needs."""


def sleeping(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, later."""

    def sleep_and_run(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SLEEP_S)
        return run(*args, **kwargs)

    return sleep_and_run


def train(name: str, folder: Path, ranks: Ranks) -> str:
    """Train under one case; return the run's folder."""
    config = parse_config(
        {
            "run": {"output_dir": str(folder), "name": name.replace(" ", "_")},
            "train": {
                "num_steps": DIAGNOSED_STEPS if name == DIAGNOSED else NUM_STEPS,
                "micro_batch_size": 2,
                "accumulation_steps": 2 if name == "pipeline" else 1,
            },
            "data": {"num_train_samples": 32, "num_eval_samples": 2},
            "parallel": CASES[name],
            "profile": {"wait": 1, "warmup": 1, "active": 2},
        }
    )
    trainer = Trainer(config, ranks, show_progress=False)
    if ranks.rank == 1 and name == "slow loader":
        trainer.load_step = sleeping(trainer.load_step)
    if ranks.rank == 1 and name == "sleeping rank":
        trainer.model.register_forward_hook(lambda *_: time.sleep(LONG_SLEEP_S))
    return trainer.fit().output_dir


def loop(folder: Path, ranks: Ranks, num_steps: int) -> str:
    """Run a loop without a trainer; return what it was refused with."""
    try:
        with profile_steps(folder, wait=0, warmup=1, active=1, ranks=ranks) as profiler:
            for _ in range(num_steps):
                weight = torch.ones(8, 8, requires_grad=True)
                with phase(FORWARD):
                    loss = (weight @ weight).sum()
                with phase(BACKWARD):
                    loss.backward()
                profiler.step()
    except RuntimeError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    ranks = init_ranks(60)
    found: dict[str, Any] = {name: train(name, folder, ranks) for name in CASES}
    found["loop"] = loop(folder / "loop", ranks, 2)
    found["short loop"] = loop(folder / "short", ranks, 1)
    (folder / f"found{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
