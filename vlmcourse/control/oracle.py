"""What could have been reached: a controller that sees the world's events and samples before they come.

Enters: the `Simulation` that it steers. Leaves: actions, of the same kinds at the same prices as anybody's. It is no
proof of an optimum: it changes one setting at a time, looks a few steps ahead, and its saves and replacements follow
rules. A controller could beat it in a run; none here does on the whole. Chapter 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from vlmcourse.control.actions import POLICIES, ZERO_STAGES, Settings
from vlmcourse.control.prices import Load, StepPrice
from vlmcourse.control.rates import checkpoint_s, restart_s
from vlmcourse.control.simulation import NEW_MACHINE_S, SETTLE_S, Simulation, load
from vlmcourse.control.world import Conditions

LOOK_AHEAD = (0, 4)
"""Attempts from the next one on that it prices before it chooses settings."""
EVERY = 8
"""Steps from choice to choice, if the present settings stay within memory."""
SAFE_FRACTION = 0.97
"""Of a device's memory that it plans with; between its choices it looks at each step in full."""
TOO_LONG_S = 1e4
"""Of a step that does not fit: the search takes what fits over any of these, and else the one that lacks least."""
MIN_GAIN = 0.004
"""Share of a step's time below which a change is not worth its name."""
PAYS_WITHIN_S = 120.0
"""A change that settles for some seconds must pay within so many; one that restarts, within the rest of the run."""


class Oracle:
    """One run's; call it as `observe`."""

    def __init__(self, simulation: Simulation) -> None:
        """Look at a simulation that has not begun."""
        self.simulation = simulation
        self._next_choice = 0
        self._last_limit: tuple[Any, ...] = ()
        self._loads: dict[tuple[Any, ...], list[list[Load]]] = {}

    def __call__(self, metrics: dict[str, Any]) -> list[dict[str, Any]]:
        """Return actions for the moment."""
        sim = self.simulation
        actions: list[dict[str, Any]] = []
        if sim.settings.save_every:
            actions.append({"action": "save_every", "steps": 0})
        conditions = sim.conditions()
        self._loads.clear()
        coming = self._price(sim.settings, 0, conditions)
        fits = max(coming.peak_bytes) <= sim.device_bytes
        settings = sim.settings
        if not fits or sim.attempt >= self._next_choice or self._is_new(conditions):
            settings = self._choose(coming.step_s)
            self._next_choice = sim.attempt + EVERY
            actions += _express(sim.settings, settings)
        eviction = sim.world.next_eviction(sim.now_s)
        until_s = eviction.start_s - sim.now_s if eviction is not None else float("inf")
        # The last moment at which a checkpoint and no further step fit before the machine goes.
        save_s = checkpoint_s(sim.job)
        if sim.num_steps > sim.saved_step and save_s < until_s < 1.5 * coming.step_s + 1.2 * save_s:
            actions.append({"action": "save"})
        return actions + self._replace(settings)

    def _is_new(self, conditions: Conditions) -> bool:
        """Whether the link or a rank's speed has changed since this was last asked."""
        limit = (round(conditions.link_fraction, 1), tuple(round(slow, 1) for slow in conditions.slowness))
        changed, self._last_limit = limit != self._last_limit, limit
        return changed

    def _price(self, settings: Settings, ahead: int, conditions: Conditions) -> StepPrice:
        """Price an attempt; those of the same samples, dealt alike, share their micro-batches."""
        sim = self.simulation
        drawn = (ahead, conditions.mean_tiles, conditions.tile_spread, conditions.mean_text)
        dealing = (settings.micro_batch_size, settings.accumulation_steps, settings.balance, settings.shares)
        key = (*drawn, *dealing)
        if key not in self._loads:
            samples = sim.samples(sim.attempt + ahead, conditions)
            self._loads[key] = load(samples, sim.deal(settings, samples))
        return sim.price(settings, conditions, self._loads[key])

    def _choose(self, step_s: float) -> Settings:
        """Improve the present settings, one at a time."""
        sim = self.simulation
        stop_s = restart_s(sim.job) + checkpoint_s(sim.job)
        ahead = {
            (count, later_s): sim.conditions(sim.now_s + later_s + count * step_s)
            for later_s in (0.0, stop_s)
            for count in LOOK_AHEAD
        }
        best = sim.settings
        best_s = self._cost(best, ahead)
        for _ in range(2):
            before = best
            for settings in self._neighbours(best):
                seconds = self._cost(settings, ahead)
                if seconds < (1 - MIN_GAIN) * best_s:
                    best, best_s = settings, seconds
            if best == before:
                break
        return best

    def _neighbours(self, present: Settings) -> Iterator[Settings]:
        """Yield settings that differ from the present ones in a thing or two."""
        job = self.simulation.job
        of_rank = job.global_batch_size // job.dp_degree
        sizes = [size for size in (1, 2, 4, 8) if of_rank % size == 0 and of_rank // size >= job.pp]
        micro = {size: {"micro_batch_size": size, "accumulation_steps": of_rank // size} for size in sizes}
        shares = self._shares()
        for size in sizes:
            for policy in POLICIES:
                yield dataclasses.replace(present, **micro[size], recompute_language=policy)
        for policy in POLICIES:
            yield dataclasses.replace(present, recompute_vision=policy)
        yield dataclasses.replace(present, balance="tokens", shares=shares)
        yield dataclasses.replace(present, balance="tokens", shares=())
        yield dataclasses.replace(present, balance="samples", shares=())
        yield dataclasses.replace(present, compress=not present.compress)
        for stage in ZERO_STAGES:
            yield dataclasses.replace(present, zero_stage=stage)
            yield dataclasses.replace(present, zero_stage=stage, **micro[sizes[-1]], recompute_vision="full")
        yield from _moved(present)

    def _shares(self) -> tuple[float, ...]:
        """Return the true speeds of the data-parallel ranks, a pipeline's being that of all its stages together."""
        sim, slowness = self.simulation, self.simulation.conditions().slowness
        stages = sim.job.pp
        speeds = [
            sum(1 / slow for slow in slowness[at : at + stages]) / stages for at in range(0, len(slowness), stages)
        ]
        return () if max(speeds) < 1.02 * min(speeds) else tuple(speed / sum(speeds) for speed in speeds)

    def _cost(self, settings: Settings, ahead: dict[tuple[int, float], Conditions]) -> float:
        """Return the mean seconds of the coming steps, what the change costs added; over memory, how much it lacks.

        After a restart the world has changed further: such settings must fit then too.
        """
        sim, present = self.simulation, self.simulation.settings
        seconds: list[float] = []
        for (count, later_s), conditions in ahead.items():
            if later_s and settings.zero_stage == present.zero_stage:
                continue
            price = self._price(settings, count, conditions)
            lacks = max(price.peak_bytes) / (SAFE_FRACTION * sim.device_bytes)
            if lacks > 1:
                return TOO_LONG_S * lacks
            if not later_s:
                seconds.append(price.step_s)
        mean_s = fmean(seconds)
        if settings.zero_stage != present.zero_stage:
            left_s = max(1.0, min(900.0, sim.world.horizon_s - sim.now_s))
            return mean_s * (1 + (restart_s(sim.job) + checkpoint_s(sim.job)) / left_s)
        free = {"balance": present.balance, "shares": present.shares, "compress": present.compress}
        settles = dataclasses.replace(settings, **free) != present
        return mean_s * (1 + (SETTLE_S / PAYS_WITHIN_S if settles else 0.0))

    def _replace(self, settings: Settings) -> list[dict[str, Any]]:
        """Replace a machine that stays slow for so long that the wait for another pays."""
        sim, conditions = self.simulation, self.simulation.conditions()
        slowest = max(range(sim.job.num_ranks), key=lambda rank: conditions.slowness[rank])
        if conditions.slowness[slowest] < 1.1:
            return []
        slow = [event for event in sim.world.events if event.kind == "slow_rank" and event.rank == slowest]
        ends_s = max((event.end_s for event in slow if event.start_s <= sim.now_s), default=0.0)
        lasts_s = min(ends_s, sim.world.horizon_s) - sim.now_s
        healthy = dataclasses.replace(conditions, slowness=(1.0,) * sim.job.num_ranks)
        now_s = self._price(settings, 0, conditions).step_s
        then_s = self._price(dataclasses.replace(settings, shares=()), 0, healthy).step_s
        price_s = restart_s(sim.job) + checkpoint_s(sim.job) + NEW_MACHINE_S
        pays = lasts_s * (1 - then_s / now_s) > 1.2 * price_s
        return [{"action": "replace", "rank": slowest}] if pays else []


def _moved(present: Settings) -> Iterator[Settings]:
    """Yield the settings with some layers moved over one boundary of the pipeline."""
    layers = present.layers_per_stage
    for at in range(len(layers) - 1):
        for count in (-6, -3, -1, 1, 3, 6):
            moved = [*layers]
            moved[at], moved[at + 1] = moved[at] + count, moved[at + 1] - count
            if min(moved) >= 1:
                yield dataclasses.replace(present, layers_per_stage=tuple(moved))


def _express(old: Settings, new: Settings) -> list[dict[str, Any]]:
    """Return the actions that lead from some settings to others."""
    found: list[dict[str, Any]] = []
    if new.micro_batch_size != old.micro_batch_size:
        sizes = {"micro_batch_size": new.micro_batch_size, "accumulation_steps": new.accumulation_steps}
        found.append({"action": "micro_batch", **sizes})
    for tower in ("vision", "language"):
        policy = getattr(new, f"recompute_{tower}")
        if policy != getattr(old, f"recompute_{tower}"):
            found.append({"action": "recompute", "tower": tower, "policy": policy})
    if (new.balance, new.shares) != (old.balance, old.shares):
        found.append({"action": "balance", "by": new.balance, "shares": list(new.shares)})
    if new.compress != old.compress:
        found.append({"action": "compress", "on": new.compress})
    if new.zero_stage != old.zero_stage:
        found.append({"action": "shard", "zero_stage": new.zero_stage})
    if new.layers_per_stage != old.layers_per_stage:
        found.append({"action": "move_layers", "layers_per_stage": list(new.layers_per_stage)})
    return found
