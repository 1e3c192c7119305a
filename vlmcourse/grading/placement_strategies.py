"""The misconceptions behind placements that are not the best: a table of strategies, each with its sentence.

Enters: one placement. Leaves: whether a strategy, in one of its variants, would have given it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from vlmcourse.grading.placement_heuristics import (
    CLIMBS,
    EQUAL_BUT_ONE,
    FILLS,
    FILLS_FROM_THE_END,
    HALVES,
    LOADS,
    MERGES,
    SINGLE_STEPS,
    Variants,
    neighbors,
)
from vlmcourse.grading.placement_objectives import (
    DEVIATION,
    DEVIATIONS,
    EXACT,
    FASTEST,
    SPREAD,
    SQUARES,
    is_best,
)
from vlmcourse.grading.placements import Placement, best_counts, credit, slowest, stage_costs

Matches = Callable[[Placement, list[int]], bool]
"""Whether an answer to a case is one that a variant of a strategy gives; where it has several, each will do."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to place layers that is not the best."""

    what: str
    """What is done, said to who did it."""
    why: str
    """Why it is not the best."""
    variants: tuple[Matches, ...]


def _gives(variants: Variants) -> tuple[Matches, ...]:
    """Match the very placements of a procedure's variants."""
    return tuple(
        lambda case, counts, place=place: place(list(case.costs), case.num_stages) == counts for place in variants
    )


def _optimizes(objective: str) -> tuple[Matches, ...]:
    """Match every placement that is best by another objective."""
    return (lambda case, counts: is_best(objective, case.costs, stage_costs(case.costs, counts)),)


def _is_best_for(costs: Sequence[float], counts: list[int]) -> bool:
    return slowest(costs, counts) <= slowest(costs, best_counts(costs, len(counts))) * (1 + EXACT)


def _is_best_without(zeroed: tuple[int, ...], case: Placement, counts: list[int]) -> bool:
    costs = list(case.costs)
    for layer in zeroed:
        costs[layer] = 0.0
    return _is_best_for(costs, counts)


def _is_best_but_for_a_stage(stage: int, case: Placement, counts: list[int]) -> bool:
    """Tell whether the first (0) or last (-1) stage took all that the others could be spared."""
    num_others = case.num_stages - 1
    if not num_others:
        return True
    others = stage_costs(case.costs, counts)
    del others[stage]
    spared = case.costs[:num_others] if stage else case.costs[-num_others:]
    return max(others) <= max(spared) * (1 + EXACT)


def _is_near_best(case: Placement, counts: list[int]) -> bool:
    """Tell whether no layer moved over one cut makes the slowest stage faster."""
    cuts = [sum(counts[:stage]) for stage in range(1, len(counts))]
    around = (
        [b - a for a, b in zip([0, *near], [*near, sum(counts)], strict=True)] for near in neighbors(cuts, sum(counts))
    )
    return all(slowest(case.costs, near) >= slowest(case.costs, counts) * (1 - EXACT) for near in around)


STAGE_TIME = "what must be equal is the time of a stage, and layers differ"
EACH_DECIDES = "each stage decides alone, and what is left falls to the others"
LIKE_ANY_OTHER = "embedding and output stand on a stage like any other layer"
ONLY_SLOWEST = "only the slowest stage counts, and what the faster ones do below it costs nothing"
ALL_STAGES = "the slowest of all stages is to be made fast, first and last included"
ONE_AT_A_TIME = "a better placement may need several cuts moved at once, of which none helps alone"

STRATEGIES: tuple[Strategy, ...] = (
    Strategy(
        what="you give each stage equally many layers",
        why=STAGE_TIME,
        variants=(lambda case, counts: max(counts) - min(counts) <= 1,),
    ),
    Strategy(
        what="you give each stage equally many layers and what remains to one of them",
        why=f"{STAGE_TIME}; a remainder of several layers on one stage makes it worse",
        variants=_gives(EQUAL_BUT_ONE),
    ),
    Strategy(
        what="you return the stages in reverse order, or place the layers from the last to the first",
        why="the first number is that of the stage with the first layers",
        variants=(lambda case, counts: _is_best_for(case.costs, counts[::-1]),),
    ),
    Strategy(
        what="you sort the costs before you place them",
        why="the layers keep the model's order, each works on what the one before it returns",
        variants=(
            lambda case, counts: _is_best_for(sorted(case.costs), counts),
            lambda case, counts: _is_best_for(sorted(case.costs, reverse=True), counts),
        ),
    ),
    *(
        Strategy(
            what=f"you leave the cost of the {layers} out",
            why=LIKE_ANY_OTHER,
            variants=(partial(_is_best_without, zeroed),),
        )
        for zeroed, layers in (((-1,), "last layer"), ((0,), "first layer"), ((0, -1), "first and the last layer"))
    ),
    *(
        Strategy(
            what=f"you leave the cost of the {name} stage out",
            why=ALL_STAGES,
            variants=(partial(_is_best_but_for_a_stage, stage),),
        )
        for stage, name in ((-1, "last"), (0, "first"))
    ),
    Strategy(
        what="you make the stages as alike as possible (the least squares)",
        why=ONLY_SLOWEST,
        variants=_optimizes(SQUARES),
    ),
    Strategy(
        what="you make the difference between the slowest and the fastest stage small",
        why=f"{ONLY_SLOWEST}: a fast stage waits, which makes nobody slower",
        variants=_optimizes(SPREAD),
    ),
    Strategy(
        what="you make the largest deviation from the mean small",
        why=f"{ONLY_SLOWEST}, however far below the mean they are",
        variants=_optimizes(DEVIATION),
    ),
    Strategy(
        what="you make the sum of the deviations from the mean small",
        why=ONLY_SLOWEST,
        variants=_optimizes(DEVIATIONS),
    ),
    Strategy(
        what="you make the fastest stage as slow as possible",
        why="the slowest stage sets the pace, not the fastest",
        variants=_optimizes(FASTEST),
    ),
    Strategy(what="you fill one stage after the other up to the mean", why=EACH_DECIDES, variants=_gives(FILLS)),
    Strategy(
        what="you fill one stage after the other up to the mean, from the last layer to the first",
        why=f"it does not matter at which end one begins: {EACH_DECIDES}",
        variants=_gives(FILLS_FROM_THE_END),
    ),
    Strategy(
        what="you cut in two, and the parts in two again",
        why="the cut that is best for two parts need not be one of the best cuts for more",
        variants=_gives(HALVES),
    ),
    Strategy(
        what="you put the two cheapest neighbors together again and again",
        why="what was put together stays so, also where it fits nowhere in the end",
        variants=_gives(MERGES),
    ),
    Strategy(
        what="you give each layer to the stage with the least load so far and return how many layers each got",
        why="a stage gets neighboring layers, other ones than you counted for it",
        variants=_gives(LOADS),
    ),
    Strategy(
        what="you improve an even split by a single step, or one round of steps",
        why=ONE_AT_A_TIME,
        variants=_gives(SINGLE_STEPS),
    ),
    Strategy(
        what="you improve an even split while moving one layer over one cut helps",
        why=ONE_AT_A_TIME,
        variants=_gives(CLIMBS),
    ),
)
"""Where several explain answers equally well, the first is named."""

NEAR_BEST = Strategy(
    what="you stop where no single layer moved over one cut makes the slowest stage faster",
    why=ONE_AT_A_TIME,
    variants=(lambda case, counts: credit(case, counts) == 1 or _is_near_best(case, counts),),
)
"""What is named where nothing in the table explains the answers."""
