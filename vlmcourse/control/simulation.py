"""A run on a simulated cluster under a controller: steps, checkpoints, stops, and what was trained in the end.

Enters: a `World`, a `Job`, and `observe(metrics) -> actions`. Leaves: a `RunLog`. Each step is priced by
`prices.price_step`; the controller sees what the package's monitor would give it, never the events. Chapter 7.

A step that needs more memory than a device has stops the run, as does an eviction: what was trained after the last
checkpoint is lost, and all ranks start again. Checkpoints, restarts and changes of settings take their time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmcourse.control.actions import Change, Place, Settings, read_actions
from vlmcourse.control.dealing import Dealt, deal_by_work, deal_in_order
from vlmcourse.control.prices import Load, StepPrice, price_step, rates_of
from vlmcourse.control.rates import Job, balanced_layers, checkpoint_s, restart_s
from vlmcourse.control.world import CALM_TEXT, CALM_TILES, NOTICE_S, TOKENS_PER_TILE, Conditions, Drawn, Event, World
from vlmcourse.planner.hardware import get_device
from vlmcourse.planner.network import Link

DATA_PARALLEL = Job()
"""A model of 8 billion parameters, on 8 A100 in one data-parallel group."""
PIPELINED = Job(model="internvl2-26b", device="h200", pp=4, link=Link(latency_s=20e-6, bytes_per_s=50e9))
"""One of 26 billion with a vision tower of 6, on 8 H200: two pipelines of four stages."""
SETTLE_S = 4.0
"""That a change of micro-batches, recomputation or stages costs: the allocator starts anew; an assumption."""
NEW_MACHINE_S = 30.0
"""Until another machine has come, while all wait; an assumption."""
Observe = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Row:
    """One attempt at a step, for figures and tests; a controller never sees it."""

    now_s: float
    step_s: float
    peak_bytes: float
    exposed_s: float
    settings: Settings
    stopped: str = ""
    """Why the run stopped in it: out of memory, or eviction."""


@dataclass
class RunLog:
    """What a run did."""

    rows: list[Row] = field(default_factory=list)
    actions: list[tuple[float, str]] = field(default_factory=list)
    """Seconds and what was changed."""
    asked: list[tuple[float, str]] = field(default_factory=list)
    """Seconds and name of every action that was asked for, done or not; of a balance with what it balances."""
    refused: list[str] = field(default_factory=list)
    useful_samples: int = 0
    """Trained and not lost."""
    lost_samples: int = 0
    lost_announced: int = 0
    """Of these, to evictions that had been announced."""
    num_oom: int = 0
    """Steps that ran out of memory."""
    num_evicted: int = 0
    num_restarts: int = 0
    num_saves: int = 0
    end_s: float = 0.0

    @property
    def samples_per_s(self) -> float:
        """Useful samples by the second of wall time."""
        return self.useful_samples / self.end_s if self.end_s else 0.0


class Simulation:
    """One run; `run` makes all of it."""

    def __init__(self, world: World, job: Job = DATA_PARALLEL) -> None:
        """Begin at second 0 with a checkpoint of step 0.

        Raises:
            ValueError: if the world is of another number of ranks.
        """
        if world.num_ranks != job.num_ranks:
            raise ValueError(f"num_ranks = {world.num_ranks} of the world, {job.num_ranks} of the job: make them equal")
        self.world, self.job, self.settings = world, job, first_settings(job)
        self.place = Place(
            global_batch_size=job.global_batch_size,
            dp_degree=job.dp_degree,
            num_ranks=job.num_ranks,
            num_stages=job.pp,
            num_layers=job.num_layers,
        )
        self.device_bytes = get_device(job.device).memory_bytes
        self._work_s = [
            sum(rates.forward_s[unit] + rates.backward_s[unit] for rates in rates_of(job, self.settings))
            for unit in range(3)
        ]
        self.now_s = self.running_since_s = 0.0
        self.machine_since_s = [0.0] * world.num_ranks
        self.attempt = self.num_steps = self.saved_step = 0
        self.log = RunLog()
        self._events: list[dict[str, Any]] = []

    def run(self, observe: Observe) -> RunLog:
        """Make steps to the end of the world's time, and ask the controller after each."""
        while self.now_s < self.world.horizon_s:
            metrics = self.step()
            if self.now_s < self.world.horizon_s:
                answer = observe(metrics)
                self.log.asked += [(self.now_s, name) for name in _names(answer)]
                self.change(read_actions(answer, self.settings, self.place))
        self.log.end_s, self.log.useful_samples = self.now_s, self.num_steps * self.job.global_batch_size
        return self.log

    # --- One step ---------------------------------------------------------------------------------------------------

    def conditions(self, now_s: float | None = None) -> Conditions:
        """Return the world as this run meets it."""
        at_s = self.now_s if now_s is None else now_s
        return self.world.conditions(at_s, self.running_since_s, tuple(self.machine_since_s))

    def deal(self, settings: Settings, samples: list[Drawn]) -> Dealt:
        """Deal the samples of a step out to the data-parallel ranks as the settings say."""
        num_steps = settings.accumulation_steps
        if settings.balance == "samples":
            return deal_in_order(len(samples), self.job.dp_degree, settings.micro_batch_size, num_steps)
        tile_s, token_s, pair_s = self._work_s
        work = [tile_s * one.num_tiles + (token_s + pair_s * one.num_tokens) * one.num_tokens for one in samples]
        return deal_by_work(work, settings.shares or (1.0,) * self.job.dp_degree, num_steps)

    def samples(self, attempt: int, conditions: Conditions) -> list[Drawn]:
        """Return the samples of an attempt under some conditions."""
        return self.world.samples(attempt, conditions, self.job.global_batch_size)

    def price(self, settings: Settings, conditions: Conditions, loads: list[list[Load]]) -> StepPrice:
        """Price a step of some micro-batches, see `load`."""
        slowness, link = conditions.slowness, conditions.link_fraction
        return price_step(self.job, settings, loads, slowness, link, conditions.fragmentation)

    def step(self) -> dict[str, Any]:
        """Attempt one step; return what the monitor measured of it."""
        conditions, began_s = self.conditions(), self.now_s
        samples = self.samples(self.attempt, conditions)
        dealt = self.deal(self.settings, samples)
        price = self.price(self.settings, conditions, load(samples, dealt))
        measured = self._measure(price, samples, dealt)
        step_s, peak = measured["step_s"], max(price.peak_bytes)
        eviction = self.world.next_eviction(began_s - 1e-9)
        stopped = ""
        if peak > self.device_bytes:
            stopped, self.now_s = "out of memory", began_s + 0.5 * step_s
            self.log.num_oom += 1
        elif eviction is not None and eviction.start_s <= began_s + step_s:
            stopped = "eviction"
        else:
            self.now_s += step_s
            self.num_steps += 1
        self.log.rows.append(Row(began_s, step_s, peak, price.exposed_s, self.settings, stopped))
        self.attempt += 1
        if stopped == "eviction" and eviction is not None:
            self._evict(eviction)
        elif stopped:
            self._stop(stopped)
        elif self.settings.save_every and self.num_steps - self.saved_step >= self.settings.save_every:
            self.save()
        return measured | self._facts()

    def _measure(self, price: StepPrice, samples: list[Drawn], dealt: Dealt) -> dict[str, Any]:
        """Return the monitor's numbers of a step, by rank where ranks differ, with their noise."""
        num_ranks, num_stages = self.job.num_ranks, price.num_stages
        noise = self.world.measured(self.attempt, num_ranks)
        forward_s = [seconds * factor for seconds, factor in zip(price.forward_s, noise, strict=True)]
        backward_s = [seconds * factor for seconds, factor in zip(price.backward_s, noise, strict=True)]
        passes_s = price.passes_s(forward_s, backward_s)
        # Ranks of one pipeline are given the same samples.
        of_ranks = [
            [samples[place] for places in of_rank for place in places] for of_rank in dealt for _ in range(num_stages)
        ]
        tiles = [sum(sample.num_tiles for sample in of_rank) for of_rank in of_ranks]
        tokens = [sum(sample.num_tokens for sample in of_rank) for of_rank in of_ranks]
        return {
            "step_s": passes_s + price.exposed_s + price.data_wait_s + price.update_s,
            "data_wait_s": [price.data_wait_s] * num_ranks,
            "forward_s": forward_s,
            "backward_s": backward_s,
            "communication_s": [
                passes_s - forward - backward + price.exposed_s
                for forward, backward in zip(forward_s, backward_s, strict=True)
            ],
            "optimizer_s": [price.update_s] * num_ranks,
            "samples": [len(of_rank) for of_rank in of_ranks],
            "tiles": tiles,
            "image_tokens": [TOKENS_PER_TILE * count for count in tiles],
            "text_tokens": [both - TOKENS_PER_TILE * count for both, count in zip(tokens, tiles, strict=True)],
            "state_bytes": [rates.state_bytes for rates in rates_of(self.job, self.settings)] * self.job.dp_degree,
            "peak_bytes": [min(peak, self.device_bytes) for peak in price.peak_bytes],
        }

    def _facts(self) -> dict[str, Any]:
        """Return what a controller knows besides the measurements."""
        coming = self.world.next_eviction(self.now_s)
        notice_s = coming.start_s - self.now_s if coming is not None and coming.announced else None
        events, self._events = self._events, []
        return {
            "step": self.num_steps,
            "steps_since_save": self.num_steps - self.saved_step,
            "elapsed_s": self.now_s,
            "events": events,
            "notice_s": notice_s if notice_s is not None and notice_s <= NOTICE_S else None,
            "device_bytes": self.device_bytes,
            "global_batch_size": self.job.global_batch_size,
            "dp_degree": self.job.dp_degree,
            "num_stages": self.job.pp,
            "settings": dict(vars(self.settings)),
        }

    # --- Between steps ----------------------------------------------------------------------------------------------

    def change(self, change: Change) -> None:
        """Carry out what a controller asked for; each thing takes its time."""
        self.log.refused.extend(change.refused)
        old, new = self.settings, change.settings
        if new != old:
            changed = [f"{name} = {value}" for name, value in vars(new).items() if value != getattr(old, name)]
            self.log.actions.append((self.now_s, ", ".join(changed)))
        restarts = new.zero_stage != old.zero_stage or bool(change.replace)
        if change.save or (restarts and self.num_steps > self.saved_step):
            self.save()
            if change.save:
                self.log.actions.append((self.now_s, "save"))
        self.settings = new
        if change.replace:
            self.log.actions.append((self.now_s, f"replace rank {', '.join(map(str, change.replace))}"))
        if restarts:
            self._restart(NEW_MACHINE_S if change.replace else 0.0)
            for rank in change.replace:
                self.machine_since_s[rank] = self.now_s
        elif any(
            getattr(new, name) != getattr(old, name)
            for name in ("micro_batch_size", "recompute_vision", "recompute_language", "layers_per_stage")
        ):
            self.now_s += SETTLE_S

    def save(self) -> None:
        """Write a checkpoint; an eviction in the middle of it comes first."""
        seconds = checkpoint_s(self.job)
        eviction = self.world.next_eviction(self.now_s)
        if eviction is not None and eviction.start_s <= self.now_s + seconds:
            self._evict(eviction)
            return
        self.now_s += seconds
        self.saved_step, self.log.num_saves = self.num_steps, self.log.num_saves + 1
        self._events.append({"event": "checkpoint", "seconds": seconds})

    def _evict(self, eviction: Event) -> None:
        self.now_s = max(self.now_s, eviction.start_s)
        self.log.num_evicted += 1
        lost_before = self.log.lost_samples
        self._stop("eviction", NEW_MACHINE_S)
        if eviction.announced:
            self.log.lost_announced += self.log.lost_samples - lost_before
        self.machine_since_s[eviction.rank] = self.now_s

    def _stop(self, reason: str, more_s: float = 0.0) -> None:
        """Lose what was not saved, and start again."""
        lost = self.num_steps - self.saved_step
        self.log.lost_samples += lost * self.job.global_batch_size
        self.num_steps = self.saved_step
        self._events.append({"event": "stopped", "reason": reason, "lost_steps": lost})
        self._restart(more_s)

    def _restart(self, more_s: float) -> None:
        """Wait for all ranks; a machine that is taken away meanwhile is replaced in the same wait."""
        began_s = self.now_s
        self.now_s += restart_s(self.job) + more_s
        self.log.num_restarts += 1
        event = self.world.next_eviction(began_s)
        while event is not None and event.start_s <= self.now_s:
            self.log.num_evicted += 1
            self.machine_since_s[event.rank] = self.now_s
            event = self.world.next_eviction(event.start_s)
        self.running_since_s = self.now_s


def load(samples: list[Drawn], dealt: Dealt) -> list[list[Load]]:
    """Return what the micro-batches of each data-parallel rank hold."""
    return [[_load(samples, places) for places in of_rank] for of_rank in dealt]


def _load(samples: list[Drawn], places: list[int]) -> Load:
    tiles = tokens = pairs = 0
    for place in places:
        sample = samples[place]
        tiles += sample.num_tiles
        tokens += sample.num_tokens
        pairs += sample.num_tokens * sample.num_tokens
    return Load(tiles, tokens, pairs)


def first_settings(job: Job) -> Settings:
    """Return what a run begins with, as a person chose it for the calm beginning."""
    if job.pp == 1:
        return Settings(micro_batch_size=4, accumulation_steps=2, recompute_vision="full")
    layers = balanced_layers(job, CALM_TILES, CALM_TILES * TOKENS_PER_TILE + CALM_TEXT)
    num_steps = job.global_batch_size // job.dp_degree
    return Settings(micro_batch_size=1, accumulation_steps=num_steps, zero_stage=1, layers_per_stage=layers)


def _names(answer: Any) -> list[str]:
    """Return what actions of an answer are called, as far as they are called anything."""
    actions = [answer] if isinstance(answer, Mapping) else answer if isinstance(answer, (list, tuple)) else []
    named = [action for action in actions if isinstance(action, Mapping) and isinstance(action.get("action"), str)]
    return [f"{one['action']} {one['by']}" if "by" in one else one["action"] for one in named]


def do_nothing(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Never act: the fixed baseline."""
    return []
