"""Runs that controllers are compared on, and how: a baseline that never acts is 0, an oracle that knows all is 1.

Enters: a seed. Leaves: `Episode`s, what baseline and oracle make of each, and a controller's `Result`s. Chapter 7.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

from vlmcourse.control.oracle import Oracle
from vlmcourse.control.rates import Job
from vlmcourse.control.simulation import DATA_PARALLEL, PIPELINED, RunLog, Simulation, do_nothing
from vlmcourse.control.world import World, make_world

ROTA = (
    ("images",),
    ("slow_rank",),
    ("link",),
    ("memory",),
    ("eviction",),
    ("quiet",),
    ("images", "slow_rank"),
    ("link", "eviction"),
    ("memory", "images"),
    ("images", "slow_rank", "link", "eviction"),
)
"""Kinds of trouble, one run after the other: each alone, then several at once."""


@dataclass(frozen=True)
class Episode:
    """One run: a world and a job."""

    number: int
    world: World
    job: Job

    @property
    def kind(self) -> str:
        """Its kind of trouble, or several."""
        return " + ".join(self.world.kinds)

    def simulation(self) -> Simulation:
        """Return the run before its first step."""
        return Simulation(self.world, self.job)

    def __str__(self) -> str:
        shape = "pipelined" if self.job.pp > 1 else "data parallel"
        return f"run {self.number} ({self.kind}, {shape})"


@dataclass(frozen=True)
class Result:
    """What a controller made of an episode, beside baseline and oracle."""

    episode: Episode
    log: RunLog
    baseline: RunLog
    oracle: RunLog


def make_episodes(seed: int, count: int = len(ROTA)) -> list[Episode]:
    """Draw runs of all kinds; about a third of them are pipelined.

    Args:
        seed: another one gives other runs of the same kinds.
        count: of runs, each kind of `ROTA` in turn.
    """
    rng = random.Random(f"{seed}:episodes")
    found: list[Episode] = []
    for number in range(count):
        job = PIPELINED if (number + number // len(ROTA)) % 3 == 2 else DATA_PARALLEL
        found.append(Episode(number, make_world(rng.randrange(2**31), ROTA[number % len(ROTA)], job.num_ranks), job))
    return found


@lru_cache(maxsize=128)
def find_bounds(episode: Episode) -> tuple[RunLog, RunLog]:
    """Return what the baseline and the oracle make of an episode."""
    simulation = episode.simulation()
    return episode.simulation().run(do_nothing), simulation.run(Oracle(simulation))


def run_episode(episode: Episode, make_observe: Callable[[], Callable[[dict[str, Any]], Any]]) -> Result:
    """Run a new controller on an episode."""
    return Result(episode, episode.simulation().run(make_observe()), *find_bounds(episode))


def score_speed(results: Sequence[Result]) -> float:
    """Return useful samples a second of wall time: 0 is the baseline's, 1 the oracle's, over all runs together.

    Speeds are taken relative to the oracle's of each run, so that all runs count alike. Below 0 is worse than nothing.
    """
    found = fmean(result.log.samples_per_s / result.oracle.samples_per_s for result in results)
    baseline = fmean(result.baseline.samples_per_s / result.oracle.samples_per_s for result in results)
    return (found - baseline) / (1 - baseline) if baseline < 1 else 0.0
