"""The plans of which none needs less memory and is as fast: the Pareto front of memory and speed.

Enters: a `Task`, a `SearchSpace`. Leaves: the front, by memory. A device of any size finds its best plan there: the
fastest that needs no more than it has. Imports no torch. Drawn by `plots/pareto.py`. Chapter 7.

As `search.py`, it leaves out what a bound of both shows to be beaten by a plan that is known already.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from vlmcourse.planner.choice import Choice, Task
from vlmcourse.planner.choice_cost import Cost, Costs
from vlmcourse.planner.search import is_least, leanest
from vlmcourse.planner.search_space import SearchSpace, list_candidates

LIMIT_FACTOR = 2.0
"""Times the device's memory: plans beyond are of no interest."""


@dataclass
class Front:
    """Costs of which none is beaten by another, by memory; the more memory, the faster."""

    costs: list[Cost] = field(default_factory=list[Cost])

    def beats(self, num_bytes: float, seconds_per_sample: float) -> bool:
        """Whether a known plan needs at most so much memory and time."""
        place = bisect.bisect_right(self.costs, num_bytes, key=lambda cost: cost.peak_bytes)
        return place > 0 and self.costs[place - 1].rank_key[0] <= seconds_per_sample

    def add(self, cost: Cost) -> None:
        """Add a plan that no other beats, and drop those that it beats."""
        if self.beats(cost.peak_bytes, cost.rank_key[0]):
            return
        worse = [known for known in self.costs if known.peak_bytes >= cost.peak_bytes and _is_slower(known, cost)]
        for known in worse:
            self.costs.remove(known)
        bisect.insort(self.costs, cost, key=lambda known: known.peak_bytes)


def _is_slower(one: Cost, other: Cost) -> bool:
    return one.rank_key[0] >= other.rank_key[0]


def find_front(
    task: Task, space: SearchSpace | None = None, *, limit_bytes: float = 0.0, prune: bool = True
) -> tuple[Cost, ...]:
    """Return the front, the plan with least memory first.

    Args:
        task: model, cluster and samples of a step.
        space: what may be varied; without offloading, which moves memory elsewhere.
        limit_bytes: of a rank, beyond which no plan is looked at; 0 takes twice what the device has.
        prune: whether to leave out what is beaten for certain; without it every plan is worked out.

    Raises:
        ValueError: if the space offloads, or as `search_plans` does.
    """
    space = space or SearchSpace()
    if space.offload:
        raise ValueError("offload = True: memory moved to the node would look like memory saved; search without it")
    costs, front = Costs(task), Front()
    limit = limit_bytes or LIMIT_FACTOR * costs.limit_bytes
    bounded = sorted(
        (costs.bound_s(choice), choice, policies) for choice, policies in list_candidates(task, space).groups
    )
    for _, choice, policies in bounded:
        lean = leanest(choice, policies)
        if prune and _is_beaten(costs, front, choice, costs.bound_bytes(choice), limit):
            continue
        if prune and is_least(lean) and _is_beaten(costs, front, choice, costs.find_peak(lean)[0].total_bytes, limit):
            continue
        for vision, language in policies:
            leaf = choice._replace(recompute_vision=vision, recompute_language=language)
            num_bytes = costs.find_peak(leaf)[0].total_bytes
            if num_bytes <= limit and not (prune and _is_beaten(costs, front, leaf, num_bytes, limit)):
                front.add(costs.find_cost(leaf))
    return tuple(front.costs)


def _is_beaten(costs: Costs, front: Front, choice: Choice, num_bytes: float, limit: float) -> bool:
    """Whether a plan of at least so many bytes is out of the front for certain."""
    if num_bytes > limit:
        return True
    return front.beats(num_bytes, costs.bound_s(choice)) or front.beats(num_bytes, costs.bound_stages_s(choice))


def best_within(front: Sequence[Cost], num_bytes: float) -> Cost | None:
    """Return the fastest plan of a front that a device of so much memory holds, or None."""
    place = bisect.bisect_right(front, num_bytes, key=lambda cost: cost.peak_bytes)
    return front[place - 1] if place else None
