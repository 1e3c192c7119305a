"""The world that a simulated run lives in: what goes wrong when, and which samples come. Deterministic by seed.

Enters: a seed and the kinds of events. Leaves: a `World`, which answers for any moment and does not depend on what a
controller does: two controllers under one seed meet the same samples and the same trouble. Half an hour holds what a
real run of days would. Chapter 7.

| kind | what happens |
|---|---|
| images | more and larger images: more tiles a sample, and more unequal ones |
| memory | longer texts, and activations that fragment |
| slow_rank | a machine computes more slowly: for a while (thermal), or for good (a shared host) |
| link | bandwidth between all ranks falls |
| eviction | a machine is taken away, announced two minutes before or not; what was not saved is lost |
| quiet | nothing but noise |
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

KINDS = ("images", "memory", "slow_rank", "link", "eviction", "quiet")
HORIZON_S = 1800.0
NOTICE_S = 120.0
"""Before an announced eviction; what Amazon's spot instances give."""
MAX_TILES = 12
"""Of one sample: InternVL 2's `max_dynamic_patch`."""
TOKENS_PER_TILE = 256
POOL_SIZE = 4096
"""Samples that are drawn once; which of them a step takes depends on its number."""
CALM_TILES, CALM_SPREAD = 2.2, 0.2
CALM_TEXT, TEXT_SPREAD = 360.0, 0.25
"""Mean tiles and text tokens of a sample, and the standard deviation of their logarithms."""
CALM_FRAGMENTATION = 0.02


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that goes wrong."""

    kind: str
    start_s: float
    end_s: float = math.inf
    ramp_s: float = 1.0
    """Until it has its full size."""
    size: float = 0.0
    """images, memory: growth of tiles or text beyond 1; slow_rank: beyond 1; link: share of the bandwidth lost."""
    rank: int = 0
    announced: bool = False

    def strength(self, now_s: float) -> float:
        """Return how much of it is there at a moment: its size, or a part of it while it comes."""
        if not self.start_s <= now_s < self.end_s:
            return 0.0
        return self.size * min(1.0, (now_s - self.start_s) / self.ramp_s)

    def __str__(self) -> str:
        names = {"slow_rank": f"rank {self.rank} slow", "eviction": f"rank {self.rank} evicted"}
        return names.get(self.kind, self.kind)


@dataclass(frozen=True)
class Conditions:
    """The world at one moment."""

    mean_tiles: float
    tile_spread: float
    mean_text: float
    slowness: tuple[float, ...]
    link_fraction: float
    fragmentation: float


class Drawn(NamedTuple):
    """One sample of a step."""

    num_tiles: int
    num_tokens: int


@dataclass(frozen=True)
class World:
    """Events and samples of one seed."""

    seed: int
    kinds: tuple[str, ...]
    num_ranks: int
    events: tuple[Event, ...]
    horizon_s: float = HORIZON_S

    def conditions(self, now_s: float, running_since_s: float, machine_since_s: tuple[float, ...]) -> Conditions:
        """Return the world at a moment.

        Args:
            now_s: from the beginning.
            running_since_s: when the processes started, which begin without fragmentation.
            machine_since_s: by rank, when its machine came; an older machine's slowness went with it.
        """
        tiles, spread, text, link, fragmentation = 1.0, CALM_SPREAD, 1.0, 1.0, CALM_FRAGMENTATION
        slowness = [1.0] * self.num_ranks
        for event in self.events:
            strength = event.strength(now_s)
            if not strength:
                continue
            if event.kind == "images":
                tiles, spread = tiles + strength, spread + 0.25 * strength
            elif event.kind == "memory":
                text += strength
                fragmentation += 0.10 * min(1.0, (now_s - max(running_since_s, event.start_s)) / 300)
            elif event.kind == "link":
                link *= 1 - strength
            elif event.kind == "slow_rank" and machine_since_s[event.rank] <= event.start_s:
                slowness[event.rank] *= 1 + strength
        return Conditions(CALM_TILES * tiles, spread, CALM_TEXT * text, tuple(slowness), link, fragmentation)

    def next_eviction(self, after_s: float) -> Event | None:
        """Return the first eviction that comes after a moment."""
        coming = [event for event in self.events if event.kind == "eviction" and event.start_s > after_s]
        return min(coming, key=lambda event: event.start_s, default=None)

    def samples(self, attempt: int, conditions: Conditions, count: int) -> list[Drawn]:
        """Return the samples of one attempt at a step, in the order in which they are dealt."""
        pool = _draw_pool(self.seed)
        start = attempt * count
        found: list[Drawn] = []
        mean_tiles, spread, mean_text = conditions.mean_tiles, conditions.tile_spread, conditions.mean_text
        centre, exp = -0.5 * spread * spread, math.exp
        for at in range(start, start + count):
            tile_z, text_factor = pool[at % POOL_SIZE]
            tiles = min(MAX_TILES, max(1, int(mean_tiles * exp(spread * tile_z + centre) + 0.5)))
            found.append(Drawn(tiles, tiles * TOKENS_PER_TILE + int(mean_text * text_factor)))
        return found

    def measured(self, attempt: int, count: int) -> list[float]:
        """Return the factors by which measured seconds of an attempt are off: a few percent, rarely a whole step."""
        rng = random.Random(f"{self.seed}:noise:{attempt}")
        return [
            1 + abs(rng.gauss(0, 0.03)) + (rng.uniform(0.5, 1.5) if rng.random() < 0.004 else 0) for _ in range(count)
        ]


@lru_cache(maxsize=64)
def _draw_pool(seed: int) -> tuple[tuple[float, float], ...]:
    rng = random.Random(f"{seed}:samples")
    return tuple((rng.gauss(0, 1), math.exp(rng.gauss(0, TEXT_SPREAD))) for _ in range(POOL_SIZE))


def make_world(seed: int, kinds: tuple[str, ...], num_ranks: int = 8) -> World:
    """Draw the events of a seed.

    Args:
        seed: another one gives another world.
        kinds: of `KINDS`; each brings one event or more, at times of their own.
        num_ranks: of the run.

    Raises:
        ValueError: if there is no such kind.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"kinds = {kinds!r}: {unknown[0]!r} must be one of {', '.join(KINDS)}")
    rng = random.Random(f"{seed}:events")
    events = [event for kind in KINDS if kind in kinds for event in _draw(kind, rng, num_ranks)]
    return World(seed, tuple(kinds), num_ranks, tuple(sorted(events, key=lambda event: event.start_s)))


def _draw(kind: str, rng: random.Random, num_ranks: int) -> list[Event]:
    """Draw the events of one kind."""
    start, rank = rng.uniform(0.1, 0.4) * HORIZON_S, rng.randrange(num_ranks)
    if kind == "images":
        size, ramp = rng.uniform(0.8, 1.6), rng.uniform(100, 300)
        return [Event(kind=kind, start_s=start, end_s=start + rng.uniform(600, 1000), ramp_s=ramp, size=size)]
    if kind == "memory":
        size, ramp = rng.uniform(1.2, 2.4), rng.uniform(200, 400)
        return [Event(kind=kind, start_s=start, end_s=start + rng.uniform(600, 1000), ramp_s=ramp, size=size)]
    if kind == "slow_rank":
        short = Event(kind=kind, start_s=start, end_s=start + rng.uniform(60, 150), ramp_s=20, size=0.4, rank=rank)
        other = (rank + rng.randrange(1, num_ranks)) % num_ranks
        begins = rng.uniform(0.45, 0.6) * HORIZON_S
        return [short, Event(kind=kind, start_s=begins, ramp_s=60, size=rng.uniform(0.3, 1.0), rank=other)]
    if kind == "link":
        length, size = rng.uniform(500, 900), rng.uniform(0.6, 0.85)
        return [Event(kind=kind, start_s=start, end_s=start + length, ramp_s=10, size=size)]
    if kind == "eviction":
        first = Event(kind=kind, start_s=start, rank=rank, announced=rng.random() < 0.5)
        second = Event(
            kind=kind,
            start_s=rng.uniform(0.55, 0.9) * HORIZON_S,
            rank=rng.randrange(num_ranks),
            announced=not first.announced,
        )
        return [first, second]
    return []
