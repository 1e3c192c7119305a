"""Whole answers to exercise 4.7: right ones, and wrong ones with the words that they should be told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

Metrics = dict[str, Any]
Actions = list[dict[str, Any]]

# --- Right ----------------------------------------------------------------------------------------------------------


class Controller:
    """The answer in the notebook."""

    def __init__(self):
        self.seen = deque(maxlen=8)
        self.wait_until = 0

    def observe(self, metrics):
        settings, actions = metrics["settings"], []
        stopped = [event for event in metrics["events"] if event["event"] == "stopped"]
        out_of_memory = any(event["reason"] == "out of memory" for event in stopped)
        if stopped:
            self.seen.clear()
        else:
            self.seen.append(metrics)
        if metrics["notice_s"] is not None and metrics["notice_s"] < 90 and metrics["steps_since_save"]:
            actions.append({"action": "save"})
        fullness = [max(seen["peak_bytes"]) / seen["device_bytes"] for seen in self.seen]
        grows = max(0, fmean(fullness[4:]) - fmean(fullness[:4])) if len(fullness) == 8 else 0
        if out_of_memory or (fullness and max(fullness) + 2 * grows > 0.93):
            return actions + self.relieve(metrics)
        if len(self.seen) < 8 or metrics["step"] < self.wait_until:
            return actions
        own = [[f + b for f, b in zip(seen["forward_s"], seen["backward_s"], strict=True)] for seen in self.seen]
        ranks, stages = range(len(own[0])), metrics["num_stages"]
        change = []
        if settings["balance"] != "tokens":
            change = [{"action": "balance", "by": "tokens"}]
        elif stages == 1:
            image, text = ([seen[f"{kind}_tokens"] for seen in self.seen] for kind in ("image", "text"))
            speed = [median((image[i][r] + text[i][r]) / own[i][r] for i in range(8)) for r in ranks]
            shares = [one / sum(speed) for one in speed]
            present = settings["shares"] or [1 / len(shares)] * len(shares)
            if max(abs(new / old - 1) for new, old in zip(shares, present, strict=True)) > 0.08:
                change = [{"action": "balance", "by": "tokens", "shares": shares}]
        exposed = median(min(seen["communication_s"]) / seen["step_s"] for seen in self.seen)
        if stages == 1 and not change and (exposed > 0.15) != settings["compress"] and not 0.03 < exposed < 0.15:
            change = [{"action": "compress", "on": exposed > 0.15}]
        if change:
            self.seen.clear()
        return actions + change

    def relieve(self, metrics):
        settings = metrics["settings"]
        size, steps = settings["micro_batch_size"], settings["accumulation_steps"]
        self.seen.clear()
        if settings["balance"] != "tokens":
            return [{"action": "balance", "by": "tokens"}]
        if settings["recompute_vision"] == "none":
            return [{"action": "recompute", "tower": "vision", "policy": "full"}]
        if size > 1:
            return [{"action": "micro_batch", "micro_batch_size": size // 2, "accumulation_steps": steps * 2}]
        return [{"action": "recompute", "tower": "language", "policy": "full"}]


class SavesByYoung(Controller):
    """Sets the interval of checkpoints from how often the run stopped."""

    def __init__(self):
        super().__init__()
        self.stops = 0

    def observe(self, metrics):
        actions = super().observe(metrics)
        stopped = sum(event["event"] == "stopped" for event in metrics["events"])
        self.stops += stopped
        if stopped:
            steps = (2 * 20 * (1200 + metrics["elapsed_s"]) / (1 + self.stops)) ** 0.5 / metrics["step_s"]
            actions.append({"action": "save_every", "steps": max(1, int(steps))})
        return actions


def _functions() -> Callable[[Metrics], Any]:
    state: dict[str, Any] = {}

    def observe(metrics):
        if metrics["step"] <= 1 and metrics["elapsed_s"] < 60:
            state["controller"] = Controller()
        return tuple(state["controller"].observe(metrics))

    return observe


RIGHT: dict[str, Callable[[], Any]] = {
    "a class": lambda: Controller,
    "a class with a rule of its own for saving": lambda: SavesByYoung,
    "a function with state": _functions,
}

# --- Wrong ----------------------------------------------------------------------------------------------------------


class Base:
    """Something that is called after each step."""

    def __init__(self):
        self.steps = []

    def observe(self, metrics):
        self.steps.append(metrics)
        return []


class NeverActs(Base):
    pass


class OneNoisyStep(Base):
    """Does something about each step that is slower than the one before."""

    def observe(self, metrics):
        before = self.steps[-1]["step_s"] if self.steps else metrics["step_s"]
        self.steps.append(metrics)
        if metrics["step_s"] > 1.2 * before:
            return [{"action": "compress", "on": not metrics["settings"]["compress"]}]
        return []


class Oscillates(Base):
    """One threshold to do and to undo, at what the last step was."""

    def observe(self, metrics):
        self.steps.append(metrics)
        full = max(metrics["peak_bytes"]) / metrics["device_bytes"] > 0.75
        wanted = "full" if full else "none"
        if wanted == metrics["settings"]["recompute_language"]:
            return []
        return [{"action": "recompute", "tower": "language", "policy": wanted}]


class ToTheBrim(Base):
    """Takes all the memory that the last step left."""

    def observe(self, metrics):
        settings = metrics["settings"]
        if len(self.steps) % 6 == 5 and max(metrics["peak_bytes"]) < 0.9 * metrics["device_bytes"]:
            self.steps = []
            if settings["recompute_vision"] == "full":
                return [{"action": "recompute", "tower": "vision", "policy": "none"}]
            size, steps = settings["micro_batch_size"], settings["accumulation_steps"]
            if steps % 2 == 0:
                return [{"action": "micro_batch", "micro_batch_size": 2 * size, "accumulation_steps": steps // 2}]
        return super().observe(metrics)


class OnlyAfterwards(Controller):
    """Relieves memory when it has run out, by what helps least."""

    def observe(self, metrics):
        stopped = any(event["event"] == "stopped" for event in metrics["events"])
        settings = metrics["settings"]
        if stopped and settings["balance"] != "tokens":
            return [{"action": "balance", "by": "tokens"}]
        return []


class BySamples(Base):
    def observe(self, metrics):
        self.steps.append(metrics)
        return [{"action": "balance", "by": "samples"}] if len(self.steps) == 5 else []


class NeverSaves(Controller):
    def observe(self, metrics):
        return [action for action in super().observe(metrics) if action["action"] != "save"]


class SavesAlways(Base):
    def observe(self, metrics):
        return [{"action": "save"}]


class Replaces(Base):
    """Wants another machine whenever one is slow."""

    def observe(self, metrics):
        own = [f + b for f, b in zip(metrics["forward_s"], metrics["backward_s"], strict=True)]
        slow = max(own) > 1.25 * median(own)
        return [{"action": "replace", "rank": own.index(max(own))}] if slow and metrics["num_stages"] == 1 else []


class Timid(Base):
    """Recomputes all from the beginning, to be safe."""

    def observe(self, metrics):
        self.steps.append(metrics)
        if len(self.steps) != 1:
            return []
        return [{"action": "recompute", "tower": tower, "policy": "full"} for tower in ("vision", "language")]


class OtherBatch(Controller):
    """Halves the micro-batch and forgets the accumulation."""

    def relieve(self, metrics):
        settings = metrics["settings"]
        self.seen.clear()
        size, steps = settings["micro_batch_size"], settings["accumulation_steps"]
        return [{"action": "micro_batch", "micro_batch_size": max(1, size // 2), "accumulation_steps": steps}]


WRONG: dict[str, tuple[type, tuple[int, ...], str]] = {
    "never acts": (NeverActs, (0, 4), "never acts"),
    "one noisy step": (OneNoisyStep, (1, 4), "acts on one noisy step"),
    "oscillates": (Oscillates, (0, 3), "oscillates"),
    "to the brim": (ToTheBrim, (1, 3), "fills memory up to the brim"),
    "only afterwards": (OnlyAfterwards, (0, 3), "acts on memory only when it has run out"),
    "by samples": (BySamples, (0, 1), "balances by samples"),
    "never saves": (NeverSaves, (4, 7), "never saves"),
    "saves always": (SavesAlways, (4, 5), "saves too often"),
    "replaces": (Replaces, (1, 4), "replaces ranks"),
    "timid": (Timid, (5, 2), "gives speed away for memory that nobody needs"),
}
"""By name: a controller, the runs of seed 1 that show it, and what it is told."""
