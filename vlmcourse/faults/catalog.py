"""Every fault that can be planted in a short run on CPU ranks, and healthy runs to compare with.

Enters: a name. Leaves: a `Fault`: what is wrong, the cause that `monitor.diagnosis` must name first, the settings that
differ from `BASE`, and what is done to a `Trainer`. Some are settings alone, as they are in life. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vlmcourse.faults.large_images import LargeImages
from vlmcourse.faults.sleeping_rank import slow_forward
from vlmcourse.faults.slow_callbacks import slow_callback, slow_logger
from vlmcourse.faults.slow_links import slow_links
from vlmcourse.faults.slow_samples import SlowSamples, decode_for, wait_for_storage
from vlmcourse.train.trainer import Trainer

BASE: Mapping[str, Any] = MappingProxyType(
    {
        "data.num_train_samples": 2048,
        "data.num_eval_samples": 2,
        "train.num_steps": 13,
        "train.micro_batch_size": 16,
        "train.log_every": 1000,
        "parallel.strategy": "ddp",
        "logging.loggers": ("jsonl",),
        "logging.hardware_every_s": 0.0,
    }
)
"""Settings of a short run of the tiny model; on two ranks nothing of it is worth a mention."""
SLOW_RANK = 1


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a run."""

    cause: str
    """What a diagnosis must put first; one of `monitor.diagnosis.CAUSES`, or "healthy"."""
    what: str
    """In words."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from `BASE`, by dotted name."""
    plant: Callable[[Trainer], AbstractContextManager[Any]] = lambda _: nullcontext()
    """Opens the context in which the run must be made; called on every rank."""
    rank: int | None = None
    """The rank that it must name, where it is one."""
    also: tuple[str, ...] = ()
    """Causes that it must name too, after the first."""
    num_ranks: int = 2
    """Of the run."""
    resumes: bool = False
    """Whether the run stops after half of its steps and is resumed."""


def plant_samples(before_each: Callable[[], Callable[[], None]]) -> Callable[[Trainer], AbstractContextManager[Any]]:
    """Return what puts a wait in front of each sample; `before_each` makes the wait, once a rank."""

    def plant(trainer: Trainer) -> AbstractContextManager[Any]:
        trainer.train_data = SlowSamples(trainer.train_data, before_each())
        return nullcontext()

    return plant


def plant_large_images(num_tiles: Mapping[int, int]) -> Callable[[Trainer], AbstractContextManager[Any]]:
    """Return what makes the pictures of some ranks so many tiles wide, by rank."""

    def plant(trainer: Trainer) -> AbstractContextManager[Any]:
        if trainer.ranks.rank in num_tiles:
            trainer.train_data = LargeImages(trainer.train_data, num_tiles=num_tiles[trainer.ranks.rank])
        return nullcontext()

    return plant


def _sleeping_rank(trainer: Trainer) -> AbstractContextManager[Any]:
    return slow_forward(trainer.model, 0.35) if trainer.ranks.rank == SLOW_RANK else nullcontext()


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "healthy": Fault("healthy", "nothing"),
        "healthy, accumulation": Fault("healthy", "nothing", {"train.accumulation_steps": 2}),
        "healthy, large micro-batch": Fault("healthy", "nothing", {"train.micro_batch_size": 32}),
        "slow decoder": Fault(
            "data_loading", "decoding a sample takes 6 ms of CPU", plant=plant_samples(lambda: decode_for(0.006))
        ),
        "slow storage": Fault(
            "data_loading", "each sample waits 15 ms for the disk", plant=plant_samples(lambda: wait_for_storage(0.015))
        ),
        "queue that runs empty": Fault(
            "data_loading",
            "every fifth step waits 1.2 s for samples",
            plant=plant_samples(lambda: wait_for_storage(1.2, every=5 * 16)),
        ),
        "sleeping rank": Fault("slow_rank", "rank 1 takes 0.35 s longer for the same work", plant=_sleeping_rank),
        "large images": Fault(
            "imbalance",
            "the pictures of rank 1 are twelve tiles wide",
            {"data.max_tiles_per_image": 12},
            plant_large_images({SLOW_RANK: 12}),
        ),
        "slow links": Fault(
            "communication",
            "each collective takes 60 ms longer",
            plant=lambda trainer: slow_links(trainer.model, 0.06),
        ),
        "logging every step": Fault(
            "logging",
            "a row a step, each with 0.18 s of network",
            {"train.log_every": 1},
            lambda _: slow_logger(0.18),
        ),
        "slow callback": Fault(
            "callbacks", "a callback of 0.18 s after each step", plant=lambda trainer: slow_callback(trainer, 0.18)
        ),
        "frequent saves": Fault("checkpoints", "a checkpoint every second step", {"train.checkpoint_every": 2}),
        "frequent evaluation": Fault(
            "evaluations",
            "an evaluation every second step",
            {"train.eval_every": 2, "data.num_eval_samples": 192},
        ),
        "tiny micro-batches": Fault(
            "small_kernels",
            "micro-batches of one sample, 16 of them",
            {"train.micro_batch_size": 1, "train.accumulation_steps": 16},
        ),
        "few micro-batches": Fault(
            "pipeline_bubble",
            "a pipeline of 2 stages with 1 micro-batch",
            {"parallel.strategy": "single", "parallel.pp": 2, "parallel.pp_schedule": "gpipe"},
        ),
        "needless recomputation": Fault(
            "recomputation",
            "every block is run again in backward, with memory free",
            {"activations.vision": "full", "activations.language": "full", "train.micro_batch_size": 32},
        ),
    }
)
"""Name -> what is planted."""
