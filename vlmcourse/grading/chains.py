"""Chains of unequal layers and a bound on memory: the cases of lab 4.1, their exact optimum, and the memory of a plan.

Enters: a group's name, a seed, a number of cases; or a case and segments. Leaves: cases that are the same on every
machine, and numbers. All sizes and costs are whole, so that sums are exact.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

Segments = list[tuple[int, int]]
"""Layers start .. end - 1 of each segment that is recomputed, in order."""
GROUPS = ("small", "large")
MAX_DRAWS = 60


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


# --- Cases ----------------------------------------------------------------------------------------------------------


@functools.cache
def make_chains(group: str, seed: int, num_cases: int) -> tuple[ChainCase, ...]:
    """Return the cases of a group; every case but the borders is one where common mistakes do not find the best.

    Raises:
        ValueError: for an unknown group.
    """
    if group not in GROUPS:
        raise ValueError(f"group = {group!r}: choose one of {', '.join(GROUPS)}")
    rng = random.Random(f"chains:{group}:{seed}")
    makers = SMALL if group == "small" else LARGE
    return tuple(_draw(makers[i % len(makers)], rng) for i in range(num_cases))


def _draw(maker: Callable[[random.Random], ChainCase], rng: random.Random) -> ChainCase:
    """Draw until the best plan is neither everything, nor single layers, nor what fewest layers would give."""
    case = maker(rng)
    for _ in range(0 if maker in BORDERS else MAX_DRAWS):
        if _is_telling(case):
            break
        case = maker(rng)
    return case


def _is_telling(case: ChainCase) -> bool:
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
    )


def _bounded(rng: random.Random, inputs: list[int], inside: list[int], costs: list[int], what: str = "") -> ChainCase:
    """Return a case whose limit lies between the lowest possible and that without recomputation."""
    free = ChainCase(inputs=tuple(inputs), inside=tuple(inside), costs=tuple(costs), limit=10**9, what=what)
    low, high = lowest_limit(free), sum(free.sizes)
    return dataclasses.replace(free, limit=low + round((high - low) * rng.uniform(0.12, 0.5)))


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
    return _bounded(rng, inputs, inside, costs, "two towers")


def long_noise(rng: random.Random) -> ChainCase:
    """A long chain of any layers."""
    n = rng.randrange(22, 30)
    return _bounded(
        rng,
        [rng.randrange(2, 12) for _ in range(n)],
        [rng.randrange(4, 50) for _ in range(n)],
        [rng.randrange(1, 20) for _ in range(n)],
        "a long chain",
    )


BORDERS = (enough, tightest, single)
SMALL = (uneven, narrowing, enough, uneven, tightest, narrowing, uneven, single, uneven, narrowing)
LARGE = (two_towers, long_noise)
