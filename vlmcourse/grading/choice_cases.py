"""Exercise 4.3's cases for part c: pairs of towers and formats of which one thing alone changes the answer.

Enters: a group's name and a seed. Leaves: pairs of cases with the right answers. Both cases of a pair have the same
formats, and differ in the headroom or in the gradients of one tower; as their answers differ too, an answer that does
not look at what differs (a constant one above all) is wrong for one of them. The rules are those of the task's text.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmcourse.grading.format_cases import spec
from vlmcourse.planner.formats import FORMATS

Towers = Mapping[str, Mapping[int, int]]
"""Number of gradients by exponent, for each tower."""
Formats = Sequence[tuple[str, int, int]]
"""Name, exponent bits, mantissa bits; in no order."""
Answer = tuple[str, int] | None
SIZES = {"vision": 10**6, "projector": 10**3, "language": 10**7}
"""Gradients of each tower: the projector's hardly show in the sum of all."""
GROUPS = ("as it is", "scaled", "wide", "impossible")
"""One case of each pair has the answer: fp16 without a scale; fp16 with one; a format of more exponent bits than fp16;
nothing of what there is."""
WIDE = ("bf16", "e7m8", "e6m9")
NARROW = ("fp16", "e5m2")
MOST_POWERS = 60
MOST_HEADROOM = 12


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Towers, formats to choose from, and what may be lost."""

    towers: Towers
    formats: Formats
    max_lost: float
    """Fraction of a tower's gradients that may become zero."""
    headroom: int
    """Powers of two that must stay free above the largest gradient."""

    @property
    def arguments(self) -> tuple[Towers, Formats, float, int]:
        """What the learner's function is called with."""
        return (
            {name: dict(counts) for name, counts in self.towers.items()},
            list(self.formats),
            self.max_lost,
            self.headroom,
        )

    def answer(self) -> Answer:
        """The right answer: the format with most digits that works, and the smallest power that makes it work."""
        return choose(self)

    def kind(self) -> str:
        """The group that the right answer belongs to; "" for a format of no group."""
        answer = self.answer()
        if answer is None:
            return "impossible"
        if answer[0] == "fp16":
            return "scaled" if answer[1] else "as it is"
        return "wide" if answer[0] in WIDE else ""

    def __str__(self) -> str:
        """Say what the case is about."""
        ranges = ", ".join(f"{name} 2^{min(c)} to 2^{max(c)}" for name, c in self.towers.items())
        names = ", ".join(f"{name} ({e}, {m})" for name, e, m in self.formats)
        return f"{ranges}; {names}; max_lost {self.max_lost}, headroom {self.headroom}"


def lost(counts: Mapping[int, int], lowest: int) -> float:
    """Return the fraction of the gradients of one tower below an exponent."""
    return sum(number for exponent, number in counts.items() if exponent < lowest) / sum(counts.values())


def _all_lose(towers: Sequence[Mapping[int, int]], lowest: int, allowed: float) -> bool:
    return all(lost(counts, lowest) <= allowed for counts in towers)


Enough = Callable[[Sequence[Mapping[int, int]], int, float], bool]
"""Whether towers keep enough, if what is below an exponent is lost and a fraction may be."""
LOST_BY: Mapping[str, Enough] = {
    "each": _all_lose,
    "together": lambda towers, lowest, allowed: lost(_merge(towers), lowest) <= allowed,
    "any": lambda towers, lowest, allowed: any(lost(t, lowest) <= allowed for t in towers),
    "mean": lambda towers, lowest, allowed: sum(lost(t, lowest) for t in towers) / len(towers) <= allowed,
    "first": lambda towers, lowest, allowed: _all_lose(towers[:1], lowest, allowed),
    "last": lambda towers, lowest, allowed: _all_lose(towers[-1:], lowest, allowed),
    "nothing": lambda towers, lowest, allowed: _all_lose(towers, lowest, 0.0),
    "less": lambda towers, lowest, allowed: all(lost(t, lowest) < allowed for t in towers),
}
"""The right rule, "each", and those of mistakes."""


def _most_digits(form: tuple[str, int, int]) -> int:
    return -form[2]


def choose(
    case: Choice,
    *,
    order: Callable[[tuple[str, int, int]], Any] = _most_digits,
    first_only: bool = False,
    headroom: bool = True,
    top: str = "largest",
    lost_by: str = "each",
    normal: bool = False,
    rounded: bool = True,
    largest: bool = False,
    powers: bool = True,
    only: str = "",
    off: int = 0,
    bias: int = 0,
) -> Answer:
    """Return the right answer, or what a learner with some mistakes would choose.

    Args:
        case: the towers and formats.
        order: the formats are tried in the order of this key.
        first_only: try no second format.
        headroom: whether it is left free.
        top: which tower's largest gradient must fit: the "largest", the "smallest", or "none".
        lost_by: how much may be lost, a key of `LOST_BY`.
        normal: count subnormal numbers as lost.
        rounded: more than half of the smallest number is kept, as it is rounded up (not with `normal`).
        largest: take the largest power that works.
        powers: try more than power 0.
        only: the one tower that is looked at.
        off: exponents too many at the top.
        bias: what is added to the bias, for both ends.
    """
    towers = [counts for name, counts in case.towers.items() if not only or name == only]
    highest = (min if top == "smallest" else max)(max(counts) for counts in towers)
    for name, exponent_bits, mantissa_bits in sorted(case.formats, key=order)[: 1 if first_only else None]:
        form = spec(exponent_bits, mantissa_bits)
        room = form.max_exponent + off + bias - case.headroom * headroom - highest
        lowest = form.min_exponent - bias - (0 if normal else mantissa_bits + rounded)
        last = (MOST_POWERS if top == "none" else room) if powers else min(room, 0)
        works = functools.partial(_works, towers, lowest, LOST_BY[lost_by], case.max_lost)
        # A larger power loses less: where the last one loses too much, all do; the first that works is bisected.
        if last >= 0 and works(last):
            tried = range(last if largest else 0, last + 1)
            return name, tried[bisect.bisect_left(tried, True, key=works)]
    return None


def _works(towers: Sequence[Mapping[int, int]], lowest: int, enough: Enough, max_lost: float, power: int) -> bool:
    """Tell whether towers keep enough under a power, if gradients below the exponent `lowest` are lost."""
    return enough(towers, lowest - power, max_lost)


def _merge(towers: Sequence[Mapping[int, int]]) -> dict[int, int]:
    merged: dict[int, int] = {}
    for counts in towers:
        for exponent, number in counts.items():
            merged[exponent] = merged.get(exponent, 0) + number
    return merged


@functools.lru_cache
def make_choices(group: str, seed: int, num_pairs: int) -> tuple[tuple[Choice, Choice], ...]:
    """Return pairs of cases; one of each pair is of the group, and their answers differ.

    Every other pair differs in the headroom alone and by one, the others in the projector's gradients alone. In every
    third pair of "wide" the wide format needs a scale, and in every fourth pair of "impossible" bf16 is offered, for
    gradients too large for it.

    Raises:
        ValueError: for an unknown group.
    """
    if group not in GROUPS:
        raise ValueError(f"group = {group!r}: choose one of {', '.join(GROUPS)}")
    draw, found = random.Random(f"{group}/{seed}"), []
    while len(found) < num_pairs:
        number = len(found)
        case = _draw_case(group, draw, exploding=group == "impossible" and number % 4 == 0)
        if case.kind() != group:
            continue
        case, other = _change_projector(case, draw) if number % 2 else _change_headroom(case)
        needs_scale = group == "wide" and number % 3 == 0
        if case.answer() != other.answer() and (not needs_scale or (case.answer() or ("", 0))[1]):
            found.append((case, other) if draw.random() < 0.5 else (other, case))
    return tuple(found)


def _change_headroom(case: Choice) -> tuple[Choice, Choice]:
    """Return two cases with neighboring headrooms, one with the case's answer, one with another if there is one."""
    answer = case.answer()
    for distance in range(1, MOST_HEADROOM + 1):
        for sign in (-1, 1):
            other = dataclasses.replace(case, headroom=case.headroom + sign * distance)
            if 0 <= other.headroom <= MOST_HEADROOM and other.answer() != answer:
                return dataclasses.replace(other, headroom=other.headroom - sign), other
    return case, case


def _change_projector(case: Choice, draw: random.Random) -> tuple[Choice, Choice]:
    """Return the case and another: the projector's gradients moved, but not beyond the largest of the others."""
    top = max(max(counts) for name, counts in case.towers.items() if name != "projector")
    counts = case.towers["projector"]
    if max(counts) > top:
        return case, case
    shift = draw.choice([s for s in range(-24, 25) if s and max(counts) + s <= top])
    moved = {e + shift: number for e, number in counts.items()}
    return case, dataclasses.replace(case, towers={**case.towers, "projector": moved})


def _draw_case(group: str, draw: random.Random, exploding: bool) -> Choice:
    """Draw towers and formats that often are of a group.

    Args:
        group: a name in `GROUPS`.
        draw: the random generator.
        exploding: gradients near the end of bf16, and bf16 among the formats.
    """
    center = {"as it is": (-8, 0), "scaled": (-24, -14), "wide": (-28, -6), "impossible": (-30, -6)}[group]
    width = {"as it is": (2, 3.5), "scaled": (2.5, 4.5), "wide": (4, 8), "impossible": (4, 8)}[group]
    if exploding:
        center, width = (106, 116), (1.5, 3)
    towers = {}
    for tower, size in SIZES.items():
        middle, wide = draw.uniform(*center), draw.uniform(*width)
        reach = round(3 * wide)
        counts = {
            e: math.exp(-(((e - middle) / wide) ** 2) / 2) for e in range(round(middle) - reach, round(middle) + reach)
        }
        total = sum(counts.values())
        towers[tower] = {e: max(1, round(size * share / total)) for e, share in counts.items()}
    wide_ones = [name for name in WIDE if draw.random() < 0.5]
    if group == "impossible":
        wide_ones = ["bf16", *wide_ones[1:]] if exploding else [name for name in wide_ones if name == "e6m9"]
    elif not wide_ones or (group != "wide" and draw.random() < 0.5):
        wide_ones = ["bf16"]
    formats = [_format(name) for name in (*wide_ones, *NARROW)]
    draw.shuffle(formats)
    return Choice(
        towers=towers, formats=formats, max_lost=draw.choice((0.001, 0.01, 0.02)), headroom=draw.choice((2, 3, 4))
    )


def _format(name: str) -> tuple[str, int, int]:
    """Return name, exponent bits and mantissa bits of a known format, or of one whose name says them, as "e6m9"."""
    if name in FORMATS:
        return name, FORMATS[name].exponent_bits, FORMATS[name].mantissa_bits
    exponent_bits, mantissa_bits = name[1:].split("m")
    return name, int(exponent_bits), int(mantissa_bits)
