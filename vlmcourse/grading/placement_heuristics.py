"""Ways to place layers that look reasonable and are not the best: filling, halving, improving, merging.

Enters: costs of layers and a number of stages. Leaves: layers of each stage. Each way comes in the variants in which it
is usually written (`Variants`); `placement_strategies` compares a learner's answers with them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

Costs = Sequence[float]
Variants = Sequence[Callable[[Costs, int], list[int]]]


def _counts(cuts: Sequence[int], num_layers: int) -> list[int]:
    return [end - start for start, end in pairwise([0, *cuts, num_layers])]


def _slowest(costs: Costs, cuts: Sequence[int]) -> float:
    return max(math.fsum(costs[start:end]) for start, end in pairwise([0, *cuts, len(costs)]))


# --- One stage after the other --------------------------------------------------------------------------------------


def fill_to_mean(costs: Costs, num_stages: int, rule: str, renew: bool) -> list[int]:
    """Place layers greedily: close a stage at the mean.

    Args:
        costs: of every layer.
        num_stages: how many stages.
        rule: close "before" a layer that would exceed the mean, "after" the one that reaches it, or at the "nearest".
        renew: whether the mean is that of the layers and stages still left.
    """
    counts, start, left = [], 0, num_stages
    mean = math.fsum(costs) / left
    while left > 1:
        mean = math.fsum(costs[start:]) / left if renew else mean
        end, total = start + 1, costs[start]
        while end < len(costs) - (left - 1):
            over = total + costs[end] - mean
            if (
                (rule == "before" and over > 1e-9)
                or (rule == "after" and total >= mean - 1e-9)
                or (rule == "nearest" and over > mean - total)
            ):
                break
            total, end = total + costs[end], end + 1
        counts.append(end - start)
        start, left = end, left - 1
    return [*counts, len(costs) - start]


def cut_at_multiples(costs: Costs, num_stages: int, nearest: bool) -> list[int]:
    """Place layers by cutting where the running sum reaches, or comes nearest to, each multiple of the mean."""
    total = list(accumulate(costs))
    cuts = [0]
    for stage in range(1, num_stages):
        goal = total[-1] * stage / num_stages
        cut = bisect_left(total, goal - 1e-9) + 1
        if nearest and cut > 1 and goal - total[cut - 2] <= total[cut - 1] - goal:
            cut -= 1
        cuts.append(min(max(cut, cuts[-1] + 1), len(total) - (num_stages - stage)))
    return _counts(cuts[1:], len(total))


def from_the_end(fill: Callable[[Costs, int], list[int]], costs: Costs, num_stages: int) -> list[int]:
    """Place layers as `fill` does, beginning with the last."""
    return fill(costs[::-1], num_stages)[::-1]


FILLS: Variants = (
    *(
        partial(fill_to_mean, rule=rule, renew=renew)
        for rule in ("before", "after", "nearest")
        for renew in (False, True)
    ),
    partial(cut_at_multiples, nearest=False),
    partial(cut_at_multiples, nearest=True),
)
FILLS_FROM_THE_END: Variants = tuple(partial(from_the_end, fill) for fill in FILLS)

# --- Cut in two, again and again ------------------------------------------------------------------------------------


def halve(costs: Costs, num_stages: int, smaller_left: bool, balance: str) -> list[int]:
    """Cut in two, for half of the stages each, and cut the parts in the same way.

    Args:
        costs: of every layer.
        num_stages: how many stages.
        smaller_left: whether the left part gets the smaller half of an odd number of stages.
        balance: make equal the "mean" of a stage on both sides, or the sides' "total"; or make small the larger "mean".
    """
    if num_stages == 1:
        return [len(costs)]
    left = num_stages // 2 if smaller_left else (num_stages + 1) // 2
    right = num_stages - left

    def badness(cut: int) -> float:
        before, after = math.fsum(costs[:cut]), math.fsum(costs[cut:])
        if balance == "total":
            return abs(before - after)
        means = before / left, after / right
        return max(means) if balance == "larger mean" else abs(means[0] - means[1])

    cut = min(range(left, len(costs) - right + 1), key=badness)
    rest = partial(halve, smaller_left=smaller_left, balance=balance)
    return [*rest(costs[:cut], left), *rest(costs[cut:], right)]


def split_slowest(costs: Costs, num_stages: int) -> list[int]:
    """Cut the slowest stage in two at its best place, until there are enough."""
    cuts: list[int] = []
    while len(cuts) < num_stages - 1:
        stages = [stage for stage in pairwise([0, *cuts, len(costs)]) if stage[1] - stage[0] > 1]
        start, end = max(stages, key=lambda stage: math.fsum(costs[stage[0] : stage[1]]))
        middle = min(
            range(start + 1, end),
            key=lambda cut: max(math.fsum(costs[start:cut]), math.fsum(costs[cut:end])),
        )
        cuts = sorted([*cuts, middle])
    return _counts(cuts, len(costs))


HALVES: Variants = (
    *(
        partial(halve, smaller_left=smaller_left, balance=balance)
        for smaller_left in (True, False)
        for balance in ("mean", "larger mean", "total")
    ),
    split_slowest,
)

# --- An even split, improved ----------------------------------------------------------------------------------------


def even_cuts(num_layers: int, num_stages: int, rest: str) -> list[int]:
    """Cut into equally many layers; the `rest` goes to the "first" stages, to the "last", or is "spread"."""
    each, more = divmod(num_layers, num_stages)
    if rest == "first":
        return [stage * each + min(stage, more) for stage in range(1, num_stages)]
    return [stage * each if rest == "last" else num_layers * stage // num_stages for stage in range(1, num_stages)]


def neighbors(cuts: Sequence[int], num_layers: int) -> Iterator[list[int]]:
    """Give the placements with one layer moved over one cut."""
    edges = [0, *cuts, num_layers]
    for number in range(len(cuts)):
        for step in (-1, 1):
            if edges[number] < cuts[number] + step < edges[number + 2]:
                yield [*cuts[:number], cuts[number] + step, *cuts[number + 1 :]]


def climb(costs: Costs, num_stages: int, rest: str, sweep: bool, once: bool) -> list[int]:
    """Begin with an even split and move single layers over a cut while the slowest stage gets faster.

    Args:
        costs: of every layer.
        num_stages: how many stages.
        rest: see `even_cuts`.
        sweep: take each move that helps, cut after cut; else the best of all moves.
        once: stop after one move, or one sweep.
    """
    cuts = even_cuts(len(costs), num_stages, rest)
    value, better = _slowest(costs, cuts), True
    while better:
        before = value
        if sweep:
            for number in range(len(cuts)):
                for step in (-1, 1):
                    moved = [*cuts[:number], cuts[number] + step, *cuts[number + 1 :]]
                    if moved in neighbors(cuts, len(costs)) and _slowest(costs, moved) < value - 1e-12:
                        cuts, value = moved, _slowest(costs, moved)
        else:
            moved = min(neighbors(cuts, len(costs)), key=partial(_slowest, costs), default=cuts)
            cuts = moved if _slowest(costs, moved) < value - 1e-12 else cuts
            value = _slowest(costs, cuts)
        better = value < before and not once
    return _counts(cuts, len(costs))


def _climbs(once: bool) -> Variants:
    return tuple(
        partial(climb, rest=rest, sweep=sweep, once=once)
        for rest in ("first", "last", "spread")
        for sweep in (False, True)
    )


CLIMBS, SINGLE_STEPS = _climbs(once=False), _climbs(once=True)

# --- Without a view of neighbors, or of nothing else ----------------------------------------------------------------


def merge_cheapest(costs: Costs, num_stages: int, last: bool) -> list[int]:
    """Begin with a stage for each layer and put the two neighbors together that cost least, of equal ones the last."""
    stages = [(cost, 1) for cost in costs]
    while len(stages) > num_stages:
        numbers = range(len(stages) - 1)
        number = min(reversed(numbers) if last else numbers, key=lambda at: stages[at][0] + stages[at + 1][0])
        (cost, count), (other_cost, other_count) = stages[number : number + 2]
        stages[number : number + 2] = [(cost + other_cost, count + other_count)]
    return [count for _, count in stages]


def fill_least_loaded(costs: Costs, num_stages: int, order: str) -> list[int]:
    """Give each layer to the stage with the least load, the "largest" first, or in the model's "order"."""
    load, counts = [0.0] * num_stages, [0] * num_stages
    for cost in costs if order == "order" else sorted(costs, reverse=order == "largest"):
        stage = load.index(min(load))
        load[stage] += cost
        counts[stage] += 1
    return counts


MERGES: Variants = (partial(merge_cheapest, last=False), partial(merge_cheapest, last=True))
LOADS: Variants = tuple(partial(fill_least_loaded, order=order) for order in ("largest", "order", "smallest"))
EQUAL_BUT_ONE: Variants = (
    lambda costs, num_stages: _counts(even_cuts(len(costs), num_stages, "last"), len(costs)),
    lambda costs, num_stages: _counts(even_cuts(len(costs), num_stages, "last"), len(costs))[::-1],
)
"""n // k layers each, and the rest on the last stage or on the first."""
