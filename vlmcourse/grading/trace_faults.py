"""The causes of exercise 4.5 planted into the steps of a trace, with the quantities in which each shows.

Enters: a `Plan`, with each rank's steps in units of computing. Leaves: the same steps, longer where the cause takes
time; how the seconds vary comes from the fault's recorded run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vlmcourse.grading.trace_sources import (
    OWN_PHASES,
    WARMUP_STEPS,
    shape_of_events,
    shape_of_phase,
    shape_of_spikes,
    split_of_images,
)

HEALTHY = "healthy"
SECONDS = (*OWN_PHASES, "communication_s", "between_s")
"""Keys of a rank in seconds; they add up to the time from a step's beginning to that of the next."""
ONE_RANK = ("slow_decoder", "slow_storage", "queue_runs_empty")
"""Causes that are those of all ranks or of one."""
DRIFT = 0.12
"""How often a queue runs empty, or memory out, a step earlier or later than usual: each."""
SHOWING = 0.3
"""Part of the extra seconds from which on they show in a key."""


@dataclass(kw_only=True)
class Plan:
    """What a trace is to become."""

    rng: random.Random
    cause: str
    rank: int | None
    """The rank that causes it; None where all do alike."""
    period: int | None
    """Steps between two times that the cause takes time; None where it does in every step."""
    share: float
    """Part of the time that the cause is to take."""
    ranks: list[dict[str, list[float]]]
    """By rank and key, what each step has, in units of computing."""
    spikes: set[int] = field(default_factory=set)
    """Steps in which a periodic cause takes time."""
    idle: dict[tuple[int, int], float] = field(default_factory=dict)
    """By rank and step, units of computing in which the GPU does none."""
    memory: list[float] = field(default_factory=list)
    """By step, memory over its limit, where it is not steady."""

    @property
    def steps(self) -> range:
        """All steps, without warm-up."""
        return range(WARMUP_STEPS, len(self.ranks[0]["forward_s"]))

    @property
    def culprits(self) -> list[int]:
        """Ranks that cause it."""
        return list(range(len(self.ranks))) if self.rank is None else [self.rank]

    def mean_extra(self) -> float:
        """Return what a step has to get more of on the mean, so that the cause takes its share."""
        total = sum(max(sum(rank[key][i] for key in SECONDS) for rank in self.ranks) for i in self.steps)
        return self.share / (1 - self.share) * total / len(self.steps)

    def add_each_step(self, key: str, shape: Sequence[float], mean: float) -> None:
        """Lengthen one key of the culprits in every step, all by one part of the shape; links are shared."""
        wobble = 0.0 if key == "communication_s" else 0.03
        for step in self.steps:
            value = self.rng.choice(shape)
            for number in self.culprits:
                self.ranks[number][key][step] += mean * value * self.rng.uniform(1 - wobble, 1 + wobble)

    def add_spikes(self, key: str, shape: Sequence[float], drift: float = 0.0) -> None:
        """Lengthen one key of the culprits every `period` steps."""
        period = self.period or 1
        step, extra = WARMUP_STEPS + self.rng.randrange(1, period + 1), self.mean_extra() * period
        while step < self.steps.stop:
            moved = step + (self.rng.choice((-1, 1)) if self.rng.random() < 2 * drift else 0)
            if moved < self.steps.stop:
                self.spikes.add(moved)
                value = extra * self.rng.choice(shape)
                for number in self.culprits:
                    self.ranks[number][key][moved] += value * self.rng.uniform(0.97, 1.03)
            step += period


def _plant_nothing(plan: Plan) -> tuple[str, ...]:
    return ()


def _plant_slow_decoder(plan: Plan) -> tuple[str, ...]:
    plan.add_each_step("data_wait_s", shape_of_phase("slow decoder", "data_wait_s", 1), plan.mean_extra())
    return ("data_wait_s",)


def _plant_slow_storage(plan: Plan) -> tuple[str, ...]:
    plan.add_each_step("data_wait_s", shape_of_phase("slow storage", "data_wait_s", 0), plan.mean_extra())
    return ("data_wait_s",)


def _plant_empty_queue(plan: Plan) -> tuple[str, ...]:
    plan.add_spikes("data_wait_s", shape_of_spikes("queue that runs empty"), DRIFT)
    return ("data_wait_s",)


def _plant_slow_rank(plan: Plan) -> tuple[str, ...]:
    shape, extra = shape_of_phase("sleeping rank", "forward_s", 1), plan.mean_extra()
    in_forward = plan.rng.choice((1.0, 0.5, 0.0))
    parts = {"forward_s": in_forward, "backward_s": 1 - in_forward}
    for key, part in parts.items():
        if part:
            plan.add_each_step(key, shape, part * extra)
    return tuple(key for key, part in parts.items() if part)


def _plant_imbalance(plan: Plan) -> tuple[str, ...]:
    in_forward, tokens, tiles = split_of_images()
    extra = plan.mean_extra()
    plan.add_each_step("forward_s", shape_of_phase("large images", "forward_s", 1), in_forward * extra)
    plan.add_each_step("backward_s", shape_of_phase("large images", "backward_s", 1), (1 - in_forward) * extra)
    rank = plan.ranks[plan.culprits[0]]
    for step in range(len(rank["tokens"])):
        rank["tokens"][step] *= 1 + tokens * extra
        rank["tiles"][step] *= 1 + tiles * extra
    shown = [key for key, part in (("forward_s", in_forward), ("backward_s", 1 - in_forward)) if part >= SHOWING]
    return ("tokens", "tiles", *shown)


def _plant_slow_links(plan: Plan) -> tuple[str, ...]:
    plan.add_each_step("communication_s", shape_of_phase("slow links", "communication_s", 0), plan.mean_extra())
    return ("communication_s",)


def _plant_saves(plan: Plan) -> tuple[str, ...]:
    plan.add_spikes("between_s", shape_of_events("frequent saves", "checkpoint"))
    return ("between_s", "disk_write_mb")


def _plant_evaluation(plan: Plan) -> tuple[str, ...]:
    plan.add_spikes("between_s", shape_of_events("frequent evaluation", "evaluation"))
    return ("between_s",)


def _plant_logging(plan: Plan) -> tuple[str, ...]:
    plan.add_each_step("between_s", shape_of_events("logging every step", "log"), plan.mean_extra())
    return ("between_s",)


def _plant_tiny(plan: Plan) -> tuple[str, ...]:
    return ("gpu_percent", "micro_batches")


def _plant_thrash(plan: Plan) -> tuple[str, ...]:
    before = [list(rank["forward_s"]) for rank in plan.ranks]
    plan.add_spikes("forward_s", (0.85, 1.0, 1.15), DRIFT)
    level, full = 0.0, plan.rng.uniform(0.975, 0.995)
    given_back = plan.rng.uniform(0.2, 0.35)
    gaps = sorted(plan.spikes)
    for step in range(plan.steps.stop):
        last = max((spike for spike in gaps if spike <= step), default=gaps[0] - (plan.period or 1))
        following = min((spike for spike in gaps if spike > step), default=last + (plan.period or 1))
        level = full - given_back * (1 - (step - last) / max(1, following - 1 - last))
        plan.memory.append(min(full, level))
    for number, rank in enumerate(plan.ranks):
        for step in plan.spikes:
            plan.idle[number, step] = rank["forward_s"][step] - before[number][step]
    return ("memory_gb", "forward_s")


PLANTS: dict[str, Callable[[Plan], tuple[str, ...]]] = {
    HEALTHY: _plant_nothing,
    "slow_decoder": _plant_slow_decoder,
    "slow_storage": _plant_slow_storage,
    "queue_runs_empty": _plant_empty_queue,
    "slow_rank": _plant_slow_rank,
    "imbalance": _plant_imbalance,
    "slow_links": _plant_slow_links,
    "frequent_saves": _plant_saves,
    "frequent_evaluation": _plant_evaluation,
    "logging_every_step": _plant_logging,
    "tiny_micro_batches": _plant_tiny,
    "memory_thrash": _plant_thrash,
}
"""By cause what is done to the steps; each returns the keys in which it shows."""
CAUSES = tuple(PLANTS)


def plant(plan: Plan) -> tuple[str, ...]:
    """Plant a plan's cause into its steps, and return the keys in which it shows."""
    return PLANTS[plan.cause](plan)
