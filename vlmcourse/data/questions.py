"""Questions and answers about a picture of one to four digits.

Enters: what is in a picture (`Scene`) and a source of random numbers. Leaves: a question and its only right answer.
Answers are one to six tokens long on purpose: with equal lengths, a wrong weighting of the loss would not show.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")

PLURALS = ("zeros", "ones", "twos", "threes", "fours", "fives", "sixes", "sevens", "eights", "nines")


class Draws:
    """Random choices that depend on the key alone and stay the same on every Python version.

    Only `random.Random.random` is used: it and the seeding by string are the parts that Python promises to keep.
    """

    def __init__(self, key: str) -> None:
        self._random = random.Random(key).random

    def below(self, limit: int) -> int:
        """Return an integer from 0 to `limit` - 1."""
        return int(self._random() * limit)

    def pick(self, items: Sequence[Item]) -> Item:
        """Return one of `items`."""
        return items[self.below(len(items))]

    def chance(self, fraction: float) -> bool:
        """Return True in `fraction` of all calls."""
        return self._random() < fraction

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """Return the items in random order."""
        keys = [self._random() for _ in items]
        return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__)]


@dataclass(frozen=True)
class Scene:
    """What a picture shows, in reading order: the upper row from left to right, then the lower row."""

    digits: tuple[int, ...]
    places: tuple[str, ...]
    """`left` and `right` of two digits, `top left` and so on of three or four, `` of a single one."""


@dataclass(frozen=True)
class Kind:
    """One kind of question."""

    name: str
    counts: tuple[int, ...]
    """Numbers of digits in a picture that it can be asked about."""
    ask: Callable[[Scene, Draws], tuple[str, str]]
    """Returns a question and its answer."""


def _read(scene: Scene, draws: Draws) -> tuple[str, str]:
    return "read them", "".join(map(str, scene.digits))


def _place(scene: Scene, draws: Draws) -> tuple[str, str]:
    i = draws.below(len(scene.digits))
    preposition = "at" if " " in scene.places[i] else "on"
    return f"which digit is {preposition} the {scene.places[i]}?", str(scene.digits[i])


def _sum(scene: Scene, draws: Draws) -> tuple[str, str]:
    first, second = scene.digits
    return "what is their sum?", f"{first}+{second}={first + second}"


def _count(scene: Scene, draws: Draws) -> tuple[str, str]:
    wanted = draws.pick(scene.digits) if draws.chance(0.6) else draws.below(10)
    return f"how many {PLURALS[wanted]}?", str(scene.digits.count(wanted))


KINDS: tuple[Kind, ...] = (
    Kind("read", (1, 2, 3, 4), _read),
    Kind("place", (2, 3, 4), _place),
    Kind("sum", (2,), _sum),
    Kind("count", (1, 2, 3, 4), _count),
)
"""Every kind of question; held-out questions are spread evenly over them."""
