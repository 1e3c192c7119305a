"""Faults that look like others: under other strategies, two at once, together with rows or evaluations, a resume.

Enters: a name. Leaves: a `Fault` as in `catalog.py`, with the rank that a diagnosis must name and the causes that it
must name as well. They are apart from the catalogue, since no step logs of them are kept in the package. Chapter 6.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MappingProxyType
from typing import Any

from vlmcourse.faults.catalog import Fault, plant_large_images
from vlmcourse.faults.sleeping_rank import slow_forward
from vlmcourse.faults.slow_callbacks import slow_callback
from vlmcourse.faults.slow_links import slow_links
from vlmcourse.train.trainer import Trainer

Plant = Callable[[Trainer], AbstractContextManager[Any]]
PIPELINE = {"parallel.strategy": "single", "parallel.pp": 2, "train.micro_batch_size": 4}


def plant_on(rank: int, plant: Plant) -> Plant:
    """Return what plants something on one rank only."""
    return lambda trainer: plant(trainer) if trainer.ranks.rank == rank else nullcontext()


def plant_both(*plants: Plant) -> Plant:
    """Return what plants several things."""

    def plant(trainer: Trainer) -> AbstractContextManager[Any]:
        with ExitStack() as stack:
            for each in plants:
                stack.enter_context(each(trainer))
            return stack.pop_all()

    return plant


def _sleep(seconds: float) -> Plant:
    return lambda trainer: slow_forward(trainer.model, seconds)


def _slow_update(seconds: float) -> Plant:
    """Return what waits before each update, which a pipeline has once a step and not once a micro-batch."""
    return lambda trainer: _slow_before_update(trainer, seconds)


def _slow_before_update(trainer: Trainer, seconds: float) -> AbstractContextManager[Any]:
    handle = trainer.optimizer.register_step_pre_hook(lambda *_: time.sleep(seconds))
    stack = ExitStack()
    stack.callback(handle.remove)
    return stack


def _callback(seconds: float) -> Plant:
    return lambda trainer: slow_callback(trainer, seconds)


def _links(seconds: float) -> Plant:
    return lambda trainer: slow_links(trainer.model, seconds)


LOOKALIKES: Mapping[str, Fault] = MappingProxyType(
    {
        "callback and rows": Fault(
            "callbacks",
            "a callback of 0.35 s on rank 1, for which rank 0 waits in a row after each step",
            {"train.log_every": 1},
            plant_on(1, _callback(0.35)),
            rank=1,
        ),
        "callback and evaluations": Fault(
            "callbacks",
            "a callback of 0.35 s on rank 1, for which rank 0 waits in an evaluation after each step",
            {"train.eval_every": 1},
            plant_on(1, _callback(0.35)),
            rank=1,
        ),
        "slow messages": Fault(
            "communication",
            "messages between two stages take 30 ms longer, with micro-batches enough",
            {**PIPELINE, "train.accumulation_steps": 4},
            _links(0.03),
        ),
        "two late ranks": Fault(
            "callbacks",
            "a callback of 0.4 s on rank 0, and rank 1 takes 0.3 s longer in forward: at different exchanges",
            {},
            plant_both(plant_on(0, _callback(0.4)), plant_on(1, _sleep(0.3))),
            rank=0,
            also=("slow_rank",),
        ),
        "late rank 0": Fault(
            "slow_rank", "rank 0 takes 0.35 s longer for the same work", {}, plant_on(0, _sleep(0.35)), rank=0
        ),
        "late rank under fsdp": Fault(
            "slow_rank",
            "rank 1 takes 0.35 s longer for the same work",
            {"parallel.strategy": "fsdp"},
            plant_on(1, _sleep(0.35)),
            rank=1,
        ),
        "slow links under tp": Fault(
            "communication",
            "each collective inside the layers takes 10 ms longer",
            {"parallel.strategy": "single", "parallel.tp": 2, "train.micro_batch_size": 8},
            _links(0.01),
        ),
        "large images on a slow machine": Fault(
            "slow_rank",
            "the pictures of rank 1 are twelve tiles wide, and it takes 0.25 s longer besides",
            {"data.max_tiles_per_image": 12},
            plant_both(plant_large_images({1: 12}), plant_on(1, _sleep(0.25))),
            rank=1,
            also=("imbalance",),
        ),
        "late rank of a stage": Fault(
            "slow_rank",
            "rank 3, one of two that hold the second stage, takes 0.8 s longer in a step",
            {**PIPELINE, "parallel.strategy": "fsdp", "train.accumulation_steps": 4},
            plant_on(3, _slow_update(0.8)),
            rank=3,
            num_ranks=4,
        ),
        "healthy, resumed": Fault("healthy", "stopped after half of its steps, and resumed", {}, resumes=True),
    }
)
"""Name -> what is planted."""
