"""The cases of lab 4.1: chains of unequal layers with a bound, on which common mistakes do not find the best plan.

Enters: a group's name, a seed, a number of cases. Leaves: cases that are the same on every machine.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable

from vlmcourse.grading.chains import ChainCase, Counting, best_segments, cost, least_cost, lowest_limit, peak_bytes

GROUPS = ("small", "large")
MAX_DRAWS = 60
TIGHT = (0.03, 0.2)
"""Where limits of long chains lie: long segments must run again, and what is alive of them matters."""


def _alive_of_none(case: ChainCase, start: int, end: int) -> int:
    return case.inputs[start]


def _alive_of_largest(case: ChainCase, start: int, end: int) -> int:
    return case.inputs[start] + max(case.inside[start:end])


def _alive_without_inner_inputs(case: ChainCase, start: int, end: int) -> int:
    return case.inputs[start] + sum(case.inside[start:end])


SEGMENT_LEFT_OUT = Counting(alive=_alive_of_none)
LARGEST_ALONE = Counting(alive=_alive_of_largest)
WITHOUT_INNER_INPUTS = Counting(alive=_alive_without_inner_inputs)
"""What is alive of a segment that runs backward: its input alone, its largest layer, all but the inputs within. Each
counts more than the one before, so where the last is told from the truth, all are."""


@functools.cache
def make_chains(group: str, seed: int, num_cases: int) -> tuple[ChainCase, ...]:
    """Return the cases of a group; every case but the borders is one where common mistakes do not find the best.

    Args:
        group: one of `GROUPS`.
        seed: of the draws.
        num_cases: how many.

    Raises:
        ValueError: for an unknown group.
    """
    if group not in GROUPS:
        raise ValueError(f"group = {group!r}: choose one of {', '.join(GROUPS)}")
    rng = random.Random(f"chains:{group}:{seed}")
    makers = SMALL if group == "small" else LARGE
    return tuple(_draw(makers[i % len(makers)], rng) for i in range(num_cases))


def _draw(maker: Callable[[random.Random], ChainCase], rng: random.Random) -> ChainCase:
    """Draw until the case is telling, a limited number of times."""
    case = maker(rng)
    for _ in range(0 if maker in BORDERS else MAX_DRAWS):
        if _is_telling(case, WITHOUT_INNER_INPUTS if maker in LARGE else LARGEST_ALONE):
            break
        case = maker(rng)
    return case


def _is_telling(case: ChainCase, mistake: Counting) -> bool:
    """Whether the best plan is neither all, nor single layers, nor what fewest layers or a mistake would give."""
    best = best_segments(case)
    if not best:
        return False
    covered = sum(end - start for start, end in best)
    fewest = best_segments(dataclasses.replace(case, costs=(1,) * case.num_layers))
    return (
        covered < case.num_layers - 1
        and any(end - start > 1 for start, end in best)
        and fewest is not None
        and cost(case, list(fewest)) > cost(case, list(best))
        and least_cost(case, mistake) < cost(case, list(best))  # by a plan that breaks the limit
    )


def _bounded(
    rng: random.Random,
    inputs: list[int],
    inside: list[int],
    costs: list[int],
    what: str = "",
    between: tuple[float, float] = (0.12, 0.5),
) -> ChainCase:
    """Return a case with its limit between these fractions of the way from the lowest possible to no recomputation."""
    free = ChainCase(inputs=tuple(inputs), inside=tuple(inside), costs=tuple(costs), limit=10**9, what=what)
    low, high = lowest_limit(free), sum(free.sizes)
    return dataclasses.replace(free, limit=low + round((high - low) * rng.uniform(*between)))


def _tighten(case: ChainCase) -> ChainCase:
    """Lower the limit as far as the least cost allows: with one byte less it would be more, or no plan would fit."""
    while True:
        best = best_segments(case)
        assert best is not None
        exact = dataclasses.replace(case, limit=peak_bytes(case, list(best)))
        case = dataclasses.replace(exact, limit=exact.limit - 1)
        other = best_segments(case)
        if other is None or cost(case, list(other)) > cost(case, list(best)):
            return exact


def uneven(rng: random.Random) -> ChainCase:
    """Any whole numbers."""
    n = rng.randrange(6, 9)
    return _bounded(
        rng,
        [rng.randrange(1, 7) for _ in range(n)],
        [rng.randrange(2, 25) for _ in range(n)],
        [rng.randrange(1, 13) for _ in range(n)],
    )


def narrowing(rng: random.Random) -> ChainCase:
    """Large and cheap layers first, as in a vision tower; small and dear ones after."""
    n = rng.randrange(7, 9)
    return _bounded(
        rng,
        [max(1, 9 - i + rng.randrange(-1, 2)) for i in range(n)],
        [max(2, 24 - 3 * i + rng.randrange(-2, 3)) for i in range(n)],
        [2 + i + rng.randrange(0, 4) for i in range(n)],
        "large layers first",
    )


def enough(rng: random.Random) -> ChainCase:
    """Room for everything."""
    case = uneven(rng)
    return dataclasses.replace(case, limit=sum(case.sizes) + rng.randrange(0, 3), what="room for everything")


def tightest(rng: random.Random) -> ChainCase:
    """The lowest limit that can be kept."""
    case = uneven(rng)
    return dataclasses.replace(case, limit=lowest_limit(case), what="the lowest limit possible")


def single(rng: random.Random) -> ChainCase:
    """One layer, which nothing makes smaller."""
    size = rng.randrange(3, 9)
    return ChainCase(inputs=(2,), inside=(size,), costs=(3,), limit=2 + size, what="one layer")


def two_towers(rng: random.Random) -> ChainCase:
    """Many vision layers with large tensors, then decoder layers of another size and cost, and a wide output."""
    vision, language = rng.randrange(9, 13), rng.randrange(10, 15)
    a, b = rng.randrange(8, 12), rng.randrange(4, 7)
    inputs = [a] * vision + [b] * language
    inside = [a * 4 + rng.randrange(0, 3) for _ in range(vision)] + [
        b * 7 + rng.randrange(0, 4) for _ in range(language)
    ]
    costs = [rng.randrange(3, 6) for _ in range(vision)] + [rng.randrange(5, 9) for _ in range(language)]
    return _bounded(rng, inputs, inside, costs, "two towers", TIGHT)


def long_noise(rng: random.Random) -> ChainCase:
    """A long chain of any layers, whose limit is the exact peak of the best plan."""
    n = rng.randrange(22, 30)
    case = _bounded(
        rng,
        [rng.randrange(2, 12) for _ in range(n)],
        [rng.randrange(4, 50) for _ in range(n)],
        [rng.randrange(1, 20) for _ in range(n)],
        "a long chain",
        TIGHT,
    )
    return _tighten(case)


BORDERS = (enough, tightest, single)
SMALL = (uneven, narrowing, enough, uneven, tightest, narrowing, uneven, single, uneven, narrowing)
LARGE = (two_towers, long_noise)
