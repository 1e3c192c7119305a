"""Cases of lab 1.2: layers with costs, to be placed on stages, and what a placement is worth.

Enters: a group's name and a seed; then layers of each stage. Leaves: cases; then a share of a case's points. The best
placement comes from the planner's dynamic programming (`planner.stages.best_cuts`), which the pipeline itself uses.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from vlmcourse.grading.placement_objectives import DEVIATION, DEVIATIONS, EXACT, SPREAD, SQUARES, misleads
from vlmcourse.planner.stages import best_cuts

NO_CREDIT_FROM = 0.2
"""A slowest stage that is this share above the best earns nothing; half the credit is lost at once, the rest evenly."""

GROUPS = ("small", "vlm", "deep")
TRAPS = (SQUARES, DEVIATIONS, DEVIATION, SPREAD)
"""Objectives that seem as good as the slowest stage; in every case that is not a border, what is best by them is not
the best."""
MAX_DRAWS = 5000
"""About one draw of 10 to 100 tells all of them from the right objective."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One case: layers to be placed on stages."""

    costs: tuple[float, ...]
    num_stages: int
    what: str = ""
    """What is special about the costs."""

    def best(self) -> float:
        """Return the cost of the slowest stage of the best placement."""
        return slowest(self.costs, best_counts(self.costs, self.num_stages))

    def __str__(self) -> str:
        costs = f"costs {[*self.costs]}" if len(self.costs) <= 9 else f"{len(self.costs)} layers"
        return f"{costs}{f' ({self.what})' if self.what else ''} on {self.num_stages} stages"


def make_placements(group: str, seed: int, num_cases: int) -> list[Placement]:
    """Draw the cases of a group in `GROUPS`.

    `small` has few layers with whole costs and the borders (one stage, a stage for each layer); `vlm` the layers of a
    vision-language model, two towers and the layers before, between and behind; `deep` so many that trying all
    placements takes hours.
    """
    return list(_make_placements(group, seed, num_cases))


@lru_cache(64)
def _make_placements(group: str, seed: int, num_cases: int) -> tuple[Placement, ...]:
    rng = random.Random(f"placements:{group}:{seed}")
    makers = {"small": SMALL, "vlm": VLM, "deep": (deep_vlm, deep_vlm, deep_noise)}[group]
    return tuple(_draw(makers[number % len(makers)], rng) for number in range(num_cases))


def _draw(maker: Callable[[random.Random], Placement], rng: random.Random) -> Placement:
    """Draw a case until every objective in `TRAPS` leads to a slower stage than need be; a border is drawn once."""
    case = maker(rng)
    for _ in range(0 if maker in BORDERS else MAX_DRAWS):
        if all(misleads(objective, case.costs, case.num_stages) for objective in TRAPS):
            break
        case = maker(rng)
    return case


# --- Costs ----------------------------------------------------------------------------------------------------------


def equal(rng: random.Random) -> Placement:
    """Equal layers, which no number of stages has to divide."""
    num_stages = rng.randrange(2, 5)
    return Placement(
        costs=(rng.randrange(2, 9),) * rng.randrange(num_stages + 1, 10), num_stages=num_stages, what="all equal"
    )


def uneven(rng: random.Random) -> Placement:
    """Any whole costs."""
    costs = tuple(rng.randrange(1, 13) for _ in range(rng.randrange(8, 10)))
    return Placement(costs=costs, num_stages=rng.randrange(4, 6))


def one_stage(rng: random.Random) -> Placement:
    """A pipeline of one."""
    return Placement(costs=tuple(rng.randrange(1, 10) for _ in range(5)), num_stages=1)


def stage_for_each(rng: random.Random) -> Placement:
    """As many stages as layers."""
    costs = tuple(rng.randrange(1, 10) for _ in range(rng.randrange(3, 6)))
    return Placement(costs=costs, num_stages=len(costs))


def one_heavy(rng: random.Random) -> Placement:
    """One layer that outweighs any two stages: the last stages are of no use, and still need a layer."""
    costs = [rng.randrange(1, 4) for _ in range(8)]
    costs[rng.randrange(1, 7)] = 20
    return Placement(costs=tuple(costs), num_stages=rng.randrange(4, 7), what="one layer outweighs the others")


def heavy_end(rng: random.Random) -> Placement:
    """A heavy last layer, as of a large vocabulary, sometimes with a heavy first."""
    costs = [rng.randrange(2, 8) for _ in range(rng.randrange(8, 10))]
    costs[-1] = rng.randrange(9, 14)
    costs[0] = rng.choice((costs[0], rng.randrange(6, 11)))
    return Placement(costs=tuple(costs), num_stages=4, what="heavy ends")


BORDERS = (equal, one_stage, stage_for_each, one_heavy)
SMALL = (equal, uneven, heavy_end, one_heavy, uneven, stage_for_each, heavy_end, one_stage, uneven, uneven)


def _vlm(rng: random.Random, vision: int, language: int, tiles: int, output: float) -> tuple[float, ...]:
    """Return milliseconds of patch embedding, vision blocks, fusion, language blocks and output, as if measured."""
    vision_ms, language_ms = 1.1 * tiles, rng.uniform(3.0, 6.0)
    exact = [0.6 * tiles, *[vision_ms] * vision, 0.9 * tiles, *[language_ms] * language, output * language_ms]
    return tuple(round(cost * rng.uniform(0.96, 1.04), 1) for cost in exact)


def heavy_vision(rng: random.Random) -> Placement:
    """Many tiles: the vision tower outweighs the language tower."""
    costs = _vlm(rng, rng.randrange(6, 10), rng.randrange(8, 13), rng.randrange(9, 13), rng.uniform(0.5, 1.5))
    return Placement(costs=costs, num_stages=rng.randrange(4, 7), what="heavy vision tower")


def heavy_output(rng: random.Random) -> Placement:
    """A large vocabulary: the output costs as much as several blocks, though not so much that it sets the pace."""
    costs = _vlm(rng, rng.randrange(4, 8), rng.randrange(9, 14), rng.randrange(1, 3), rng.uniform(2.0, 3.5))
    return Placement(costs=costs, num_stages=rng.randrange(4, 7), what="heavy output layer")


def heavy_embedding(rng: random.Random) -> Placement:
    """A slow first layer and a slow last one: pictures are decoded and cut there, and the vocabulary is large."""
    costs = list(_vlm(rng, rng.randrange(5, 8), rng.randrange(8, 12), 2, rng.uniform(3.0, 5.0)))
    costs[0] = round(rng.uniform(9, 14), 1)
    return Placement(costs=tuple(costs), num_stages=rng.randrange(4, 7), what="heavy first and last layer")


VLM = (heavy_vision, heavy_output, heavy_embedding, heavy_output)


def deep_vlm(rng: random.Random) -> Placement:
    """A model of dozens of layers on many stages."""
    costs = _vlm(rng, rng.randrange(20, 25), rng.randrange(28, 33), rng.randrange(2, 8), rng.uniform(2.0, 4.0))
    return Placement(costs=costs, num_stages=rng.randrange(8, 13), what="vision and language")


def deep_noise(rng: random.Random) -> Placement:
    """Layers that have nothing in common."""
    costs = tuple(round(rng.lognormvariate(1, 0.6), 1) for _ in range(rng.randrange(48, 57)))
    return Placement(costs=costs, num_stages=rng.randrange(8, 13), what="no two alike")


# --- One answer -----------------------------------------------------------------------------------------------------


def best_counts(costs: Sequence[float], num_stages: int, power: int | None = None) -> list[int]:
    """Return layers of each stage in the best split; see `planner.stages.best_cuts`."""
    return list(_best_counts(tuple(costs), num_stages, power))


@lru_cache(1024)  # feedback asks for the same cases again and again
def _best_counts(costs: tuple[float, ...], num_stages: int, power: int | None) -> tuple[int, ...]:
    _, cuts = best_cuts(costs, num_stages, limit=float("inf"), power=power)
    return tuple(end - start for start, end in pairwise([0, *cuts, len(costs)]))


def stage_costs(costs: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return the cost of each stage."""
    edges = [0, *accumulate(counts)]
    return [math.fsum(costs[start:end]) for start, end in pairwise(edges)]


def slowest(costs: Sequence[float], counts: Sequence[int]) -> float:
    """Return the cost of the slowest stage."""
    return max(stage_costs(costs, counts))


def credit(case: Placement, counts: Sequence[int]) -> float:
    """Return what a valid placement earns: 1 for the best, up to a half for one that is nearly as good."""
    excess = slowest(case.costs, counts) / case.best() - 1
    return 1.0 if excess <= EXACT else max(0.0, 0.5 * (1 - excess / NO_CREDIT_FROM))
