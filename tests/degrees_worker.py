"""What four ranks do for `test_train_degrees.py`: whole runs under several degrees. Usage: degrees_worker.py FOLDER."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from combinations import Combination, config_of, divisible_shape
from parity import AwkwardTrainer, awkward_samples

from vlmcourse.config import TrainConfig
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.layout import ParallelConfig
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.apply import apply_strategy, check_strategy
from vlmcourse.parallel.mesh import find_place
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks

NUM_STEPS = 6
SAVED_STEP = 3
RUNS = {
    "zero1": Combination(4, {"strategy": "zero1"}),
    "fsdp-tp": Combination(4, {"strategy": "fsdp", "tp": 2}, 2),
    "ddp-cp": Combination(4, {"strategy": "ddp", "cp": 2}),
    "pp-fsdp": Combination(4, {"strategy": "fsdp", "pp": 2}, 2),
    "pp-tp-dualpipev-tied": Combination(4, {"pp": 2, "tp": 2, "pp_schedule": "dualpipev"}, 4, tied=True),
}
"""Each goes on from one process's checkpoint, and one process goes on from its own."""


def build(combination: Combination, ranks: Ranks, folder: Path, name: str, seed: int) -> AwkwardTrainer:
    """Return a trainer that writes to `folder/name`; `seed` is of weights that a resumed run replaces."""
    config: TrainConfig = config_of(combination, alone=ranks.world_size == 1)
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, output_dir=str(folder), name=name),
        train=dataclasses.replace(config.train, num_steps=NUM_STEPS, checkpoint_every=SAVED_STEP, keep_checkpoints=3),
    )
    model = build_model(divisible_shape(combination.heads, combination.tied), seed=seed)
    questions = DigitsDataset(5, 0, "heldout")[:5]
    return AwkwardTrainer(
        config, ranks, model=model, train_data=awkward_samples(), eval_data=questions, show_progress=False
    )


def collect_refusals(ranks: Ranks) -> dict[str, str]:
    """Ask for what cannot be; every rank must be told at once, none may wait."""
    found = {}
    shape = divisible_shape()
    for name, combination in {
        "schedule over fsdp": Combination(4, {"strategy": "fsdp", "pp": 2, "pp_schedule": "zbv"}, 4),
        "too few micro-batches": Combination(4, {"strategy": "fsdp", "pp": 2, "pp_schedule": "dualpipev"}, 2),
        "odd heads": Combination(4, {"strategy": "fsdp", "tp": 2}, heads=3),
        "too many stages": Combination(4, {"pp": 4, "pp_schedule": "interleaved"}, 8),
    }.items():
        try:
            build(combination, ranks, Path("unused"), "unused", seed=0)
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)
    config = config_of(Combination(4, {"strategy": "fsdp", "tp": 2})).parallel
    try:
        apply_strategy(torch.nn.Linear(4, 4), config, ranks, find_place(config, ranks, shape))
    except ValueError as error:
        found["another model"] = str(error)
    auto = ParallelConfig(strategy="auto")
    place = find_place(ParallelConfig(strategy="ddp"), ranks)
    for name, attempt in {
        "unresolved": lambda: apply_strategy(build_model(shape, seed=0), auto, ranks),
        "unresolved, in a place": lambda: apply_strategy(build_model(shape, seed=0), auto, ranks, place),
        "unresolved, checked": lambda: check_strategy(build_model(shape, seed=0), auto, ranks, place),
        "unresolved place": lambda: find_place(auto, ranks),
        "another model in a pipeline": lambda: apply_strategy(torch.nn.Linear(4, 4), ParallelConfig(pp=4), ranks),
    }.items():
        try:
            attempt()
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)
    pipeline = config_of(Combination(4, {"pp": 4}, 4)).parallel
    try:
        apply_strategy(build_model(shape, seed=0), pipeline, ranks)
    except ValueError as error:
        found["no loss"] = str(error)
    return found


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    found: dict[str, Any] = {"refusals": collect_refusals(ranks)}
    for name, combination in RUNS.items():
        trainer = build(combination, ranks, folder, name, seed=50 + ranks.rank)
        trainer.resume(folder / ("tied" if combination.tied else "plain") / "checkpoints" / f"step_{SAVED_STEP:06d}")
        result = trainer.fit()
        found[name] = {"losses": result.losses, "exact": [result.exact_match, result.num_questions]}
    crossed = build(RUNS["pp-fsdp"], ranks, folder, "crossed", seed=0)
    crossed.resume(folder / "fsdp-tp" / "checkpoints" / f"step_{NUM_STEPS:06d}")
    found["crossed"] = crossed.train_step().loss
    (folder / f"found{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    del trainer, crossed
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
