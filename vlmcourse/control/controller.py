"""The course's own controller: monitor, decide, act, from nothing but what a run's monitor measures.

Enters: the metrics of each step. Leaves: actions (`actions.py`). It steers the simulated cluster and, through
`train/controlled.py`, a real run. Chapter 7; exercise 4.7 asks for one like it.

Four rules carry it: it decides on medians of a window of steps, never on one; it relieves memory before it runs out,
from the trend; it undoes nothing before it has seen that the reason is gone by a margin; and it tries what it cannot
predict for some steps, and keeps it if it was faster. It saves when a machine's end is announced, otherwise in the
interval sqrt(2 x cost x time between stops) of Young 1974, "A first order approximation to the optimum checkpoint
interval".
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

Metrics = dict[str, Any]
Actions = list[dict[str, Any]]

WINDOW = 10
"""Steps that a decision looks at."""
FULL, ROOMY = 0.94, 0.86
"""Shares of a device's memory: what a forecast may reach, and what it must stay below for relief to be undone."""
MIN_IMBALANCE, MIN_SLOWNESS = 1.04, 1.08
"""By how much the busiest rank exceeds the mean, and a rank's seconds a token the others', to be acted on."""
MIN_EXPOSED = 0.12
"""Share of a step that communication must take, beyond a pipeline's bubble, for a remedy to be tried."""
MIN_GAIN = 0.02
"""Share of speed that something tried must bring to be kept."""
PATIENCE_S = 60.0
"""From a relief of memory to its end, for the first one."""
MIN_MOVE_GAIN = 0.08
"""Share of the slowest stage's time that moving layers must save by its estimate, which takes layers to be alike."""
RETRY_S = 300.0
"""From one trial of a thing to the next."""
PRIOR_S = 1200.0
"""Between stops, before any was seen."""
SAVE_S = 30.0
"""Of a checkpoint, before one was seen."""


@dataclass
class Relief:
    """One relief of memory that was carried out."""

    undo: dict[str, Any]
    before: float
    """Share of memory that was needed last before it, and the most in the first window `after` it."""
    until_s: float
    """When it may be undone; each relief is kept twice as long as the one before, so that they do not alternate."""
    after: float | None = None


class ReferenceController:
    """One run's controller; `observe` is called after every step."""

    def __init__(self) -> None:
        """Begin without having seen anything."""
        self.window: deque[Metrics] = deque(maxlen=WINDOW)
        self.reliefs: list[Relief] = []
        """Of memory, the last one last."""
        self.patience_s = PATIENCE_S
        self.num_stops, self.save_s = 0, SAVE_S
        self.trial: tuple[Actions, float] | None = None
        """What undoes the trial that is running, and the samples a second before it."""
        self.tried_s: dict[str, float] = {}
        """By name of what was tried, when: it is not tried again soon."""

    def observe(self, metrics: Metrics) -> Actions:
        """Return what to do after this step.

        Args:
            metrics: of the step, see `Simulation.step`.
        """
        reasons = [event["reason"] for event in metrics["events"] if event["event"] == "stopped"]
        saves_s = [event["seconds"] for event in metrics["events"] if event["event"] == "checkpoint"]
        self.num_stops += len(reasons)
        self.save_s = saves_s[-1] if saves_s else self.save_s
        if reasons:
            self.window.clear()
            self.trial = None
            return self._relieve(metrics) if "out of memory" in reasons else []
        self.window.append(metrics)
        actions, change = self._save(metrics), self._guard_memory(metrics)
        if len(self.window) == WINDOW:
            actions += self._save_interval(metrics)
            change = change or self._end_trial() or self._level(metrics) or self._undo_relief() or self._try(metrics)
        if change:
            self.window.clear()
        return actions + change

    # --- Checkpoints ------------------------------------------------------------------------------------------------

    def _save(self, metrics: Metrics) -> Actions:
        """Save when a machine is about to go: as late as is safe, so that little is lost."""
        notice_s = metrics.get("notice_s")
        late_s = 1.5 * self.save_s + 2.5 * metrics["step_s"]
        is_due = notice_s is not None and notice_s < late_s and metrics["steps_since_save"]
        return [{"action": "save"}] if is_due else []

    def _save_interval(self, metrics: Metrics) -> Actions:
        """Keep to Young's interval."""
        between_s = (PRIOR_S + metrics["elapsed_s"]) / (1 + self.num_stops)
        step_s = median(seen["step_s"] for seen in self.window)
        steps = max(1, round(math.sqrt(2 * self.save_s * between_s) / step_s))
        present = metrics["settings"]["save_every"]
        is_near = present and 0.7 < steps / present < 1.4
        return [] if is_near else [{"action": "save_every", "steps": steps}]

    # --- Memory -----------------------------------------------------------------------------------------------------

    def _forecast(self) -> float:
        """Return the share of memory needed soon: the highest peak, and the growth of two windows."""
        peaks = [_fullness(seen) for seen in self.window]
        half = len(peaks) // 2
        growth = fmean(peaks[half:]) - fmean(peaks[:half]) if half >= 3 else 0.0
        return max(peaks) + max(0.0, 2 * growth)

    def _guard_memory(self, metrics: Metrics) -> Actions:
        """Relieve memory before it runs out."""
        is_tight = metrics["device_bytes"] and self._forecast() > FULL
        return self._relieve(metrics) if is_tight else []

    def _relieve(self, metrics: Metrics) -> Actions:
        """Return the cheapest relief that is left: equal micro-batches, then what costs computing."""
        if self.trial is not None:  # what is tried is the first to go
            undo, self.trial = self.trial[0], None
            return undo
        settings = metrics["settings"]
        size, steps = settings["micro_batch_size"], settings["accumulation_steps"]
        if settings["balance"] != "tokens" and metrics["dp_degree"] * steps > 1:
            return [{"action": "balance", "by": "tokens"}]
        if settings["recompute_vision"] == "none":
            do, undo = _recompute("vision", "full"), _recompute("vision", "none")
        elif size > 1:
            do, undo = _micro_batch(size // 2, steps * 2), _micro_batch(size, steps)
        elif settings["recompute_language"] == "none":
            do, undo = _recompute("language", "full"), _recompute("language", "none")
        else:
            return []
        self.reliefs.append(Relief(undo, _fullness(metrics), metrics["elapsed_s"] + self.patience_s))
        self.patience_s *= 2
        return [do]

    def _undo_relief(self) -> Actions:
        """Take the last relief back once what it would need then stays well within memory."""
        if not self.reliefs or not self.window[-1]["device_bytes"]:
            return []
        relief, peak = self.reliefs[-1], max(_fullness(seen) for seen in self.window)
        if relief.after is None:
            relief.after = peak
        is_early = self.window[-1]["elapsed_s"] < relief.until_s
        if is_early or self._forecast() * relief.before / relief.after > ROOMY:
            return []
        self.reliefs.pop()
        return [relief.undo]

    # --- Work of the ranks ------------------------------------------------------------------------------------------

    def _level(self, metrics: Metrics) -> Actions:
        """Give ranks, and stages, the work that fits their speed."""
        settings, stages = metrics["settings"], metrics["num_stages"]
        if stages > 1 and (layers := self._better_layers(settings["layers_per_stage"])):
            return [{"action": "move_layers", "layers_per_stage": layers}]
        if metrics["dp_degree"] == 1:
            return []
        if settings["balance"] != "tokens":
            busy = [_own_s(seen) for seen in self.window]
            imbalance = median(max(own) / fmean(own) for own in busy) if stages == 1 else MIN_IMBALANCE
            return [{"action": "balance", "by": "tokens"}] if imbalance >= MIN_IMBALANCE else []
        speeds = self._speeds(stages)
        present = list(settings["shares"]) or [1 / len(speeds)] * len(speeds)
        wanted = [speed / sum(speeds) for speed in speeds]
        if max(speeds) < MIN_SLOWNESS * min(speeds):
            wanted = [1 / len(speeds)] * len(speeds)
        off = max(abs(new / old - 1) for new, old in zip(wanted, present, strict=True))
        return [{"action": "balance", "by": "tokens", "shares": wanted}] if off > MIN_SLOWNESS - 1 else []

    def _speeds(self, stages: int) -> list[float]:
        """Return the tokens a second of each data-parallel rank's own work, of a pipeline its slowest stage's."""
        num_ranks = len(self.window[-1]["tiles"])
        speeds = [
            median(_tokens(seen)[rank] / max(1e-9, _own_s(seen)[rank]) for seen in self.window)
            for rank in range(num_ranks)
        ]
        return [min(speeds[at : at + stages]) for at in range(0, num_ranks, stages)]

    def _better_layers(self, layers: Any) -> list[int]:
        """Return the split that levels the stages, if it is better by enough; stages' layers are taken to be alike."""
        stages = len(layers)
        own = [[_own_s(seen)[rank] for seen in self.window] for rank in range(len(self.window[-1]["tiles"]))]
        seconds = [max(median(own[rank]) for rank in range(stage, len(own), stages)) for stage in range(stages)]
        each = [spent / count for spent, count in zip(seconds, layers, strict=True) for _ in range(count)]
        wanted, found, spent = sum(each) / stages, [0], 0.0
        for cost in each:
            if spent + cost / 2 > wanted * len(found) and len(found) < stages:
                found.append(0)
            found[-1] += 1
            spent += cost
        ends = [sum(found[:stage]) for stage in range(len(found) + 1)]
        slowest = max(sum(each[start:end]) for start, end in zip(ends, ends[1:], strict=False))
        if len(found) < stages or slowest > (1 - MIN_MOVE_GAIN) * max(seconds):
            return []
        return found if self._would_fit(layers, found) else []

    def _would_fit(self, layers: Any, wanted: list[int]) -> bool:
        """Tell whether stages stay within memory if each layer that comes needs as much as the greediest of all."""
        stages = len(layers)
        for seen in self.window:
            peaks, states = seen["peak_bytes"][:stages], seen["state_bytes"][:stages]
            kept = [
                (peak - state) / (count * (stages - stage))  # of one layer and one of the micro-batches in flight
                for stage, (peak, state, count) in enumerate(zip(peaks, states, layers, strict=True))
            ]
            state = max(bytes_ / count for bytes_, count in zip(states, layers, strict=True))
            for stage, (old, new) in enumerate(zip(layers, wanted, strict=True)):
                more = max(0, new - old) * (max(kept) * (stages - stage) + state)
                if more and seen["device_bytes"] and peaks[stage] + more > ROOMY * seen["device_bytes"]:
                    return False
        return True

    # --- What is tried ----------------------------------------------------------------------------------------------

    def _rate(self) -> float:
        """Return samples a second over the window; the median step, so that a single slow one does not count."""
        return self.window[-1]["global_batch_size"] / median(seen["step_s"] for seen in self.window)

    def _try(self, metrics: Metrics) -> Actions:
        """Try remedies for communication that nothing hides, and larger micro-batches where there is room for them."""
        settings, stages = metrics["settings"], metrics["num_stages"]
        size, steps = settings["micro_batch_size"], settings["accumulation_steps"]
        bubble = (stages - 1) / (steps + stages - 1)
        exposed = median(min(seen["communication_s"]) / seen["step_s"] for seen in self.window) - bubble
        compress, plain = [{"action": "compress", "on": True}], [{"action": "compress", "on": False}]
        larger, present = _micro_batch(size * 2, steps // 2), _micro_batch(size, steps)
        can_grow = steps % 2 == 0 and steps // 2 >= stages
        if settings["compress"] and exposed < MIN_EXPOSED / 4:
            return self._begin_trial("plain", plain, compress)
        if exposed > MIN_EXPOSED and not settings["compress"]:
            return self._begin_trial("compress", compress, plain)
        exchanges_each = settings["zero_stage"] > 1  # ZeRO-1 exchanges once a step, whatever the micro-batches
        if exposed > MIN_EXPOSED and can_grow and exchanges_each and settings["recompute_language"] == "none":
            # Half as many exchanges; recomputing the language tower saves more than twice the samples need.
            do = [_recompute("language", "full"), larger]
            return self._begin_trial("fewer exchanges", do, [present, _recompute("language", "none")])
        if can_grow and not self.reliefs and metrics["device_bytes"] and self._doubled() < FULL:
            return self._begin_trial(f"micro-batch {size * 2}", [larger], [present])
        return []

    def _doubled(self) -> float:
        """Return the share of memory that micro-batches of twice the samples would need."""
        return max(
            (2 * peak - state) / seen["device_bytes"]
            for seen in self.window
            for peak, state in zip(seen["peak_bytes"], seen["state_bytes"], strict=True)
        )

    def _begin_trial(self, name: str, do: Actions, undo: Actions) -> Actions:
        now_s = self.window[-1]["elapsed_s"]
        if now_s < self.tried_s.get(name, -math.inf) + RETRY_S:
            return []
        self.tried_s[name], self.trial = now_s, (undo, self._rate())
        return do

    def _end_trial(self) -> Actions:
        """Judge the trial by a whole window of steps under it."""
        if self.trial is None:
            return []
        undo, rate_before = self.trial
        self.trial = None
        return [] if self._rate() > (1 + MIN_GAIN) * rate_before else undo


def _fullness(metrics: Metrics) -> float:
    """Return the share of memory that the fullest rank needed."""
    return max(metrics["peak_bytes"]) / metrics["device_bytes"]


def _recompute(tower: str, policy: str) -> dict[str, Any]:
    return {"action": "recompute", "tower": tower, "policy": policy}


def _own_s(metrics: Metrics) -> list[float]:
    """Return each rank's own work in a step, waits for others left out."""
    return [forward + backward for forward, backward in zip(metrics["forward_s"], metrics["backward_s"], strict=True)]


def _tokens(metrics: Metrics) -> list[int]:
    return [image + text for image, text in zip(metrics["image_tokens"], metrics["text_tokens"], strict=True)]


def _micro_batch(size: int, steps: int) -> dict[str, Any]:
    return {"action": "micro_batch", "micro_batch_size": size, "accumulation_steps": steps}
