"""Chains of unequal layers and a bound on memory, for lab 4.1: the memory of a plan, and the exact optimum.

Enters: a case and segments, or a way to count. Leaves: numbers. All sizes and costs are whole, so that sums are exact.
The cases of the lab are in `chain_cases`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

Segments = list[tuple[int, int]]
"""Layers start .. end - 1 of each segment that is recomputed, in order."""


@dataclass(frozen=True, kw_only=True)
class ChainCase:
    """A chain and a bound; bytes and costs may be in any unit."""

    inputs: tuple[int, ...]
    """Bytes of each layer's input."""
    inside: tuple[int, ...]
    """Bytes that each layer keeps for backward besides its input."""
    costs: tuple[int, ...]
    """Time of each layer's forward."""
    limit: int
    """Bytes that may be alive at once."""
    what: str = ""

    @property
    def num_layers(self) -> int:
        """Layers of the chain."""
        return len(self.inputs)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All that each layer keeps where it is not recomputed."""
        return tuple(a + b for a, b in zip(self.inputs, self.inside, strict=True))

    def __str__(self) -> str:
        what = f" ({self.what})" if self.what else ""
        if self.num_layers > 9:
            return f"{self.num_layers} layers, limit {self.limit}{what}"
        lists = f"inputs {list(self.inputs)}, inside {list(self.inside)}, costs {list(self.costs)}"
        return f"{lists}, limit {self.limit}{what}"


def find_units(case: ChainCase, segments: Segments) -> list[tuple[int, int, bool]]:
    """Return what runs backward as one, in order: (start, end, whether it is recomputed)."""
    units, position = [], 0
    for start, end in segments:
        units += [(i, i + 1, False) for i in range(position, start)]
        units.append((start, end, True))
        position = end
    return units + [(i, i + 1, False) for i in range(position, case.num_layers)]


def bytes_alive(case: ChainCase, segments: Segments) -> list[tuple[int, int]]:
    """Return what is alive while backward runs through each unit, last unit first: (its first layer, bytes).

    All that the units before it keep, and this one whole: made again, or never let go.
    """
    kept, alive = 0, []
    for start, end, again in find_units(case, segments):
        whole = sum(case.sizes[start:end])
        alive.append((start, kept + whole))
        kept += case.inputs[start] if again else whole
    return alive[::-1]


def kept_bytes(case: ChainCase, segments: Segments) -> int:
    """Return what is kept when forward has ended."""
    return sum(case.inputs[s] if again else sum(case.sizes[s:e]) for s, e, again in find_units(case, segments))


def peak_bytes(case: ChainCase, segments: Segments) -> int:
    """Return the most that is alive at once."""
    return max(size for _, size in bytes_alive(case, segments))


def cost(case: ChainCase, segments: Segments) -> int:
    """Return the time of all forwards that run again."""
    return sum(sum(case.costs[start:end]) for start, end in segments)


@functools.cache
def best_segments(case: ChainCase) -> tuple[tuple[int, int], ...] | None:
    """Return segments with the least recomputation within the limit, or None if there are none.

    Of all ways to treat the first layers, those are kept that no other beats in both bytes kept and cost.
    """
    n = case.num_layers
    total, costs = ([0, *itertools.accumulate(values)] for values in (case.sizes, case.costs))
    fronts: list[list[tuple[int, int, tuple[tuple[int, int], ...]]]] = [[(0, 0, ())], *([] for _ in range(n))]
    for start in range(n):
        fronts[start] = _prune(fronts[start])
        for kept, spent, segments in fronts[start]:
            if kept + case.sizes[start] <= case.limit:
                fronts[start + 1].append((kept + case.sizes[start], spent, segments))
            for end in range(start + 1, n + 1):
                if kept + total[end] - total[start] > case.limit:
                    break
                after = kept + case.inputs[start], spent + costs[end] - costs[start], (*segments, (start, end))
                fronts[end].append(after)
    found = _prune(fronts[n])
    return min(found, key=lambda way: way[1])[2] if found else None


def _prune(ways: list) -> list:
    """Keep the ways that no other beats in both bytes and cost."""
    kept, least = [], math.inf
    for way in sorted(ways, key=lambda way: way[:2]):
        if way[1] < least:
            kept.append(way)
            least = way[1]
    return kept


def lowest_limit(case: ChainCase) -> int:
    """Return the smallest limit that some plan keeps."""
    low, high = 0, sum(case.sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(case, middle) else (middle + 1, high)
    return low


def _fits(case: ChainCase, limit: int) -> bool:
    """Tell whether some plan keeps a limit: only the least that can be kept before each layer matters."""
    n, total = case.num_layers, [0, *itertools.accumulate(case.sizes)]
    least = [0.0, *[math.inf] * n]
    for start in range(n):
        if least[start] + case.sizes[start] <= limit:
            least[start + 1] = min(least[start + 1], least[start] + case.sizes[start])
        for end in range(start + 1, n + 1):
            if least[start] + total[end] - total[start] <= limit:
                least[end] = min(least[end], least[start] + case.inputs[start])
    return least[n] < math.inf


def credit(case: ChainCase, segments: Segments) -> float:
    """Return 1 for the least recomputation, up to a half for more, 0 where the limit is broken."""
    best = best_segments(case)
    if best is None or peak_bytes(case, segments) > case.limit:
        return 0.0
    least, spent = cost(case, list(best)), cost(case, segments)
    if spent <= least:
        return 1.0
    return 0.5 * max(0.0, 1 - (spent - least) / least) if least else 0.0


# --- Other ways to count --------------------------------------------------------------------------------------------


def _sum_sizes(case: ChainCase, start: int, end: int) -> int:
    return sum(case.sizes[start:end])


def _sum_costs(case: ChainCase, start: int, end: int) -> int:
    return sum(case.costs[start:end])


@dataclass(frozen=True, kw_only=True)
class Counting:
    """A way to count what a plan holds and costs; the defaults are right, a mistake is another way."""

    alive: Callable[[ChainCase, int, int], int] = _sum_sizes
    """Bytes of a segment start .. end - 1 while it runs backward, besides what the units before it keep."""
    stays: Callable[[ChainCase, int, int], int] = _sum_sizes
    """The same of a layer that stays, `end` being the next one."""
    price: Callable[[ChainCase, int, int], int] = _sum_costs
    """Cost of running a segment again."""
    spare: int = 0
    """Bytes below the limit that must stay free."""


@functools.cache
def least_cost(case: ChainCase, counting: Counting) -> float:
    """Return the least cost of a plan within the limit, both as a way of counting has them; infinite without one."""
    n, limit = case.num_layers, case.limit - counting.spare
    fronts: list[list[tuple[int, int]]] = [[(0, 0)], *([] for _ in range(n))]
    for start, (size, kept_of_segment) in enumerate(zip(case.sizes, case.inputs, strict=True)):
        units = [(start + 1, counting.stays(case, start, start + 1), size, 0)]
        for end in range(start + 1, n + 1):
            units.append((end, counting.alive(case, start, end), kept_of_segment, counting.price(case, start, end)))
        fronts[start] = _prune(fronts[start])
        for kept, spent in fronts[start]:
            for end, alive, keeps, more in units:
                if kept + alive <= limit:
                    fronts[end].append((kept + keeps, spent + more))
    return min((spent for _, spent in fronts[n]), default=math.inf)


def is_best_by(case: ChainCase, segments: Segments, counting: Counting) -> bool:
    """Tell whether a plan keeps the limit at the least cost, both as a way of counting has them."""
    kept = spent = highest = 0
    for start, end, again in find_units(case, segments):
        highest = max(highest, kept + (counting.alive if again else counting.stays)(case, start, end))
        kept += case.inputs[start] if again else case.sizes[start]
        spent += counting.price(case, start, end) if again else 0
    return highest + counting.spare <= case.limit and spent == least_cost(case, counting)
