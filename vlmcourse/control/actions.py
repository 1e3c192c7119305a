"""What a controller may change in a run, as plain dicts, and what is refused by name.

Enters: what `observe` returned, a list of dicts. Leaves: a `Change`: the new `Settings`, what is to be done once, and a
sentence for each action that was refused. The simulated cluster and a real run read the same actions. Chapter 7.

| action | keys |
|---|---|
| micro_batch | micro_batch_size, accumulation_steps: their product times the data-parallel ranks is the global batch |
| recompute | tower (vision, language), policy (none, full) |
| balance | by (samples: as dealt; tokens: equal work), shares: of the work by data-parallel rank, optional |
| compress | on (True, False): gradients of 8 bits on the wire |
| shard | zero_stage (1, 2, 3) |
| move_layers | layers_per_stage: of a pipeline, see `planner.stages.StageSplit` |
| save | a checkpoint now |
| save_every | steps |
| replace | rank: its machine is given back for another one |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmcourse.recompute import RECOMPUTING_TOWERS

POLICIES = ("none", "full")
DEALT = ("samples", "tokens")
ZERO_STAGES = (1, 2, 3)
MOST_ACTIONS = 16
"""That are read of one answer."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run works at a moment; actions change it."""

    micro_batch_size: int = 2
    """Samples of one forward pass of one rank; with `balance` tokens their mean, as large samples are spread."""
    accumulation_steps: int = 4
    recompute_vision: str = "none"
    recompute_language: str = "none"
    balance: str = "samples"
    shares: tuple[float, ...] = ()
    """Of the work, by data-parallel rank; empty: equal."""
    compress: bool = False
    zero_stage: int = 2
    layers_per_stage: tuple[int, ...] = ()
    """Of a pipeline; empty where there is none."""
    save_every: int = 60
    """Steps from one checkpoint to the next; 0: none but those asked for."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What of a run its actions are checked against."""

    global_batch_size: int
    dp_degree: int
    num_ranks: int
    num_stages: int = 1
    num_layers: int = 0
    """That the stages of a pipeline share."""
    allowed: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(ACTIONS, ""))
    """By action what this run can do; an action that is not here, or has a reason, is refused with it."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What an answer amounts to."""

    settings: Settings
    save: bool = False
    replace: tuple[int, ...] = ()
    refused: tuple[str, ...] = ()
    """A sentence each, which begins with the action's name."""


class Refused(ValueError):
    """An action that cannot be done."""


def read_actions(answer: Any, settings: Settings, place: Place) -> Change:
    """Read what `observe` returned.

    Args:
        answer: a list of dicts such as `{"action": "save"}`; None and an empty list mean nothing.
        settings: those in force.
        place: the run.

    Returns:
        What is to change. An action that is refused changes nothing; those beside it count.
    """
    save, replace, refused = False, list[int](), list[str]()
    if isinstance(answer, Mapping):
        answer = [answer]
    if answer is not None and (not isinstance(answer, Sequence) or isinstance(answer, str)):
        return Change(settings=settings, refused=(f"observe returned {answer!r:.60}: return a list of dicts",))
    for action in list(answer or ())[:MOST_ACTIONS]:
        name = action.get("action") if isinstance(action, Mapping) else None
        try:
            read = _find(name, action, place)
            if name == "save":
                save = True
            elif name == "replace":
                replace.append(_whole(action, "rank", 0, place.num_ranks - 1))
            else:
                settings = dataclasses.replace(settings, **read(action, place))
        except Refused as error:
            refused.append(f"{name if isinstance(name, str) else repr(action)[:40]}: {error}")
    return Change(settings=settings, save=save, replace=tuple(dict.fromkeys(replace)), refused=tuple(refused))


def _find(name: Any, action: Any, place: Place) -> Callable[[Mapping[str, Any], Place], dict[str, Any]]:
    """Return what reads an action of this name, if the run can do it."""
    if not isinstance(name, str) or name not in ACTIONS:
        raise Refused(f"there is no such action: give a dict whose 'action' is one of {', '.join(ACTIONS)}")
    if name not in place.allowed or place.allowed[name]:
        raise Refused(place.allowed.get(name) or "this run cannot do it")
    return ACTIONS[name]


def _micro_batch(action: Mapping[str, Any], place: Place) -> dict[str, Any]:
    size = _whole(action, "micro_batch_size", 1)
    steps = _whole(action, "accumulation_steps", 1)
    product = size * steps * place.dp_degree
    if product != place.global_batch_size:
        raise Refused(
            f"{size} samples x {steps} micro-batches x {place.dp_degree} ranks = {product}, but the global batch is "
            f"{place.global_batch_size} and must stay it: change the two together"
        )
    return {"micro_batch_size": size, "accumulation_steps": steps}


def _recompute(action: Mapping[str, Any], place: Place) -> dict[str, Any]:
    tower = _one_of(action, "tower", RECOMPUTING_TOWERS)
    return {f"recompute_{tower}": _one_of(action, "policy", POLICIES)}


def _balance(action: Mapping[str, Any], place: Place) -> dict[str, Any]:
    by, shares = _one_of(action, "by", DEALT), action.get("shares") or ()
    if not shares:
        return {"balance": by, "shares": ()}
    numbers = list(shares) if isinstance(shares, Sequence) and not isinstance(shares, str) else []
    is_right = len(numbers) == place.dp_degree and all(
        isinstance(share, (int, float)) and 0 < share < math.inf for share in numbers
    )
    if by != "tokens" or not is_right:
        raise Refused(
            f"shares = {shares!r:.60} with by = {by!r}: give {place.dp_degree} numbers above 0, one a data-parallel "
            "rank, and by = 'tokens'"
        )
    total = math.fsum(numbers)
    return {"balance": by, "shares": tuple(share / total for share in numbers)}


def _compress(action: Mapping[str, Any], place: Place) -> dict[str, Any]:
    if not isinstance(action.get("on"), bool):
        raise Refused(f"on = {action.get('on')!r}: must be True or False")
    return {"compress": action["on"]}


def _shard(action: Mapping[str, Any], place: Place) -> dict[str, Any]:
    return {"zero_stage": _one_of(action, "zero_stage", ZERO_STAGES)}


def _move_layers(action: Mapping[str, Any], place: Place) -> dict[str, Any]:
    if place.num_stages == 1:
        raise Refused("this run has no pipeline: every rank holds all layers")
    layers = action.get("layers_per_stage")
    numbers = list(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else []
    are_whole = all(isinstance(number, int) and not isinstance(number, bool) and number >= 1 for number in numbers)
    if not are_whole or len(numbers) != place.num_stages or sum(numbers) != place.num_layers:
        raise Refused(
            f"layers_per_stage = {layers!r:.60}: give {place.num_stages} whole numbers of 1 or more, together "
            f"{place.num_layers}"
        )
    return {"layers_per_stage": tuple(numbers)}


def _save_every(action: Mapping[str, Any], place: Place) -> dict[str, Any]:
    return {"save_every": _whole(action, "steps", 0)}


def _once(action: Mapping[str, Any], place: Place) -> dict[str, Any]:
    return {}


ACTIONS: dict[str, Callable[[Mapping[str, Any], Place], dict[str, Any]]] = {
    "micro_batch": _micro_batch,
    "recompute": _recompute,
    "balance": _balance,
    "compress": _compress,
    "shard": _shard,
    "move_layers": _move_layers,
    "save": _once,
    "save_every": _save_every,
    "replace": _once,
}
"""What reads each action: the settings that it changes."""


def _whole(action: Mapping[str, Any], key: str, least: int, most: float = math.inf) -> int:
    value = action.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        limits = f"of {least} or more" if most == math.inf else f"from {least} to {most:g}"
        raise Refused(f"{key} = {value!r:.40}: must be a whole number {limits}")
    return value


def _one_of(action: Mapping[str, Any], key: str, choices: Sequence[Any]) -> Any:
    value = action.get(key)
    if value not in choices:
        raise Refused(f"{key} = {value!r:.40}: must be one of {', '.join(map(repr, choices))}")
    return value
