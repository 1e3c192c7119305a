"""The best plans for a model, a cluster and a batch: all there are are looked at, most of them through a bound alone.

Enters: a `Task`, a `SearchSpace`. Leaves: a `Search`: the fastest plans that fit, ranked; how many broke which rule;
the nearest misses. Reasons in words are in `search_reasons.py`. Imports no torch. Chapter 7.

In the order in which choices are cheap to refuse: rules of divisibility (`search_space.py`), then groups by a lower
bound of their time, the most promising first, until no group can be among the best any more. In each group first a
lower bound of memory, then the memory of full recomputation, then each policy. No choice is dropped that could be among
the best: a bound is never above what it bounds. `prune=False` works out every choice instead, for comparison.

Source: Land and Doig 1960, "An automatic method of solving discrete programming problems", for branch and bound.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from vlmcourse.planner.choice import Choice, Task
from vlmcourse.planner.choice_cost import Cost, Costs
from vlmcourse.planner.search_space import Candidates, SearchSpace, list_candidates

NUM_MISSES = 3
MISSES_TIMED = 60
"""Of the choices that do not fit and may be faster than the best, those nearest to fitting whose time is worked out."""


@dataclass(frozen=True, kw_only=True)
class Miss:
    """A plan that does not fit, and how near it is."""

    cost: Cost
    needed_bytes: int
    available_bytes: int
    is_host: bool = False
    """Whether it is a node's main memory that is too small."""
    remedy: Choice | None = None
    """The same with one thing changed, which fits."""

    @property
    def excess_bytes(self) -> int:
        """What is too much."""
        return self.needed_bytes - self.available_bytes


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search found."""

    task: Task
    best: tuple[Cost, ...]
    """The fastest plans that fit, fastest first; empty if none fits."""
    rejected: Mapping[str, int]
    """Rule -> plans that break it, each under the first it was found to break: codes of `validate.CODES`,
    `search_space.RULES`, and slower for plans whose bound says that they are not among the best."""
    examples: Mapping[str, str]
    """Rule -> what is wrong with one of its plans."""
    misses: tuple[Miss, ...]
    """Of those that do not fit, the nearest; such that would be faster than the best, where there are any."""
    num_plans: int
    """All that were looked at."""
    num_costed: int
    """Of them, those whose time was worked out."""


@dataclass
class _Walk:
    """What a search knows so far."""

    costs: Costs
    top: int
    prune: bool
    rejected: Counter[str]
    examples: dict[str, str]
    best: list[Cost] = field(default_factory=list[Cost])
    missed: list[tuple[float, Choice]] = field(default_factory=list[tuple[float, Choice]])
    """Bytes too much, at least, and what does not fit; of a group refused as a whole, its leanest choice."""
    num_costed: int = 0

    def is_beaten(self, bound_s: float) -> bool:
        """Whether nothing of this bound can be among the best."""
        return self.prune and len(self.best) == self.top and bound_s > 1 / self.best[-1].samples_per_s

    def look_at(self, choice: Choice) -> None:
        """Work out a choice, and keep it where it is among the best."""
        if not self.fits(choice):
            return
        cost = self.costs.find_cost(choice)
        self.num_costed += 1
        bisect.insort(self.best, cost, key=lambda known: known.rank_key)
        if len(self.best) > self.top:
            self.best.pop()
            self.reject("slower", 1)

    def fits(self, choice: Choice, num_plans: int = 1) -> bool:
        """Whether memory does for a choice; if not, count it with all others for which it does not either."""
        rule, excess = self.costs.find_excess(choice)
        if not rule:
            return True
        self.miss(rule, choice, excess, num_plans)
        return False

    def miss(self, rule: str, choice: Choice, excess: float, num_plans: int) -> None:
        """Count plans that do not fit, and remember the one nearest to fitting."""
        self.reject(rule, num_plans)
        self.missed.append((excess, choice))

    def reject(self, rule: str, num_plans: int) -> None:
        if num_plans:
            self.rejected[rule] += num_plans


def search_plans(task: Task, space: SearchSpace | None = None, *, top: int = 5, prune: bool = True) -> Search:
    """Find the fastest plans that fit.

    Args:
        task: model, cluster and samples of a step.
        space: what may be varied; by default everything but offloading.
        top: how many plans to return.
        prune: whether to leave out what cannot be among them; without it every plan is worked out.

    Raises:
        ValueError: if task and space do not go together, `top` is below 1, or the cluster has several nodes and no
            network.
    """
    if top < 1:
        raise ValueError(f"top = {top}: ask for 1 plan or more")
    if task.cluster.num_nodes > 1 and task.used_fabric.network is None:
        raise ValueError(
            f"cluster {task.cluster.name!r} has {task.cluster.num_nodes} nodes and no network between them: set "
            "network_bytes_per_s"
        )
    candidates = list_candidates(task, space or SearchSpace())
    walk = _Walk(Costs(task), top, prune, Counter(candidates.broken), candidates.examples)
    _walk_groups(walk, candidates)
    num_plans = sum(walk.rejected.values()) + len(walk.best)
    return Search(
        task=task,
        best=tuple(walk.best),
        rejected=dict(walk.rejected),
        examples=walk.examples,
        misses=_find_misses(walk),
        num_plans=num_plans,
        num_costed=walk.num_costed,
    )


def _walk_groups(walk: _Walk, candidates: Candidates) -> None:
    """Look at groups of choices, those with the lowest bound first."""
    costs = walk.costs
    bounded = sorted((costs.bound_s(choice), choice, policies) for choice, policies in candidates.groups)
    for place, (bound_s, choice, policies) in enumerate(bounded):
        if walk.is_beaten(bound_s):
            walk.reject("slower", sum(len(policies) for _, _, policies in bounded[place:]))
            return
        if walk.prune:
            if walk.is_beaten(costs.bound_stages_s(choice)):
                walk.reject("slower", len(policies))
                continue
            if (excess := costs.bound_bytes(choice) - costs.limit_bytes) > 0:
                walk.miss("memory", leanest(choice, policies), excess, len(policies))
                continue
            # No policy keeps less than full recomputation, if that is among them.
            lean = leanest(choice, policies)
            if is_least(lean) and not walk.fits(lean, len(policies)):
                continue
        _walk_policies(walk, choice, policies)


def _walk_policies(walk: _Walk, choice: Choice, policies: tuple[tuple[str, str], ...]) -> None:
    leaves = [choice._replace(recompute_vision=vision, recompute_language=language) for vision, language in policies]
    bounded = sorted((walk.costs.bound_s(leaf), leaf) for leaf in leaves)
    for place, (bound_s, leaf) in enumerate(bounded):
        if walk.is_beaten(bound_s):
            walk.reject("slower", len(bounded) - place)
            return
        if walk.is_beaten(walk.costs.bound_stages_s(leaf)):
            walk.reject("slower", 1)
            continue
        walk.look_at(leaf)


def leanest(choice: Choice, policies: tuple[tuple[str, str], ...]) -> Choice:
    """Return a choice with that of its policies which recomputes most: full where it may."""
    vision, language = max(policies, key=lambda pair: (pair[1] == "full", pair[0] == "full"))
    return choice._replace(recompute_vision=vision, recompute_language=language)


def is_least(choice: Choice) -> bool:
    """Whether no other policy of the same choice needs less memory."""
    return choice.recompute_language == "full" and choice.recompute_vision in ("full", "none")


def _find_misses(walk: _Walk) -> tuple[Miss, ...]:
    """Return the plans nearest to fitting; of them, those that would be faster than the best, where there are any."""
    costs, missed = walk.costs, sorted(walk.missed)
    best_s = 1 / walk.best[0].samples_per_s if walk.best else 0.0
    promising = [(excess, choice) for excess, choice in missed if costs.bound_stages_s(choice) < best_s]
    fastest = sorted((costs.bound_s(choice), choice) for _, choice in promising)
    near: list[Miss] = []
    for choices in (promising, fastest):  # those nearest to fitting, or, if none of them is faster, the fastest
        if not near:
            timed = (_build_miss(costs, choice) for _, choice in choices[:MISSES_TIMED])
            near = [miss for miss in timed if 1 / miss.cost.samples_per_s < best_s]
    if not near:
        of_grids = {choice[:7]: choice for _, choice in reversed(missed)}  # the nearest of each grid of ranks and ZeRO
        near = [_build_miss(costs, choice) for choice in of_grids.values()]
    near.sort(key=lambda miss: (miss.excess_bytes, miss.cost.rank_key))
    found: list[Miss] = []
    for miss in near:
        if not any(miss.cost.choice[:7] == known.cost.choice[:7] for known in found):
            found.append(miss)
    return tuple(found[:NUM_MISSES])


def _build_miss(costs: Costs, choice: Choice) -> Miss:
    cost, is_host = costs.find_cost(choice), costs.find_excess(choice)[0] == "host_memory"
    cluster = costs.task.cluster
    return Miss(
        cost=cost,
        needed_bytes=cost.host_bytes * cluster.devices_per_node if is_host else cost.peak_bytes,
        available_bytes=cluster.host_memory_bytes if is_host else costs.limit_bytes,
        is_host=is_host,
        remedy=find_remedy(costs, choice),
    )


def find_remedy(costs: Costs, choice: Choice) -> Choice | None:
    """Return the first change of one thing with which a choice fits."""
    changes: list[dict[str, object]] = [{"recompute_language": "full"}, {"recompute_vision": "full"}]
    changes.append({"recompute_language": "full", "recompute_vision": "full"})
    if "vision" in costs.task.frozen:
        changes = changes[:1]
    if choice.micro_batch_size % 2 == 0:
        half = {"micro_batch_size": choice.micro_batch_size // 2, "grad_accum_steps": 2 * choice.grad_accum_steps}
        changes.append(dict[str, object](half))
    if choice.zero_stage in (1, 2) and choice.schedule not in ("zbv", "dualpipev"):
        changes.append({"zero_stage": 3})
    if choice.gradient_sync == "last" and choice.pp == 1:
        changes.append({"gradient_sync": "every"})
    for change in changes:
        changed = Choice(**{**choice._asdict(), **change})
        if changed != choice and not costs.find_excess(changed)[0]:
            return changed
    return None
