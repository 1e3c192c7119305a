"""Exercise 4.3's cases: formats, gradients to be sent through them, and towers to choose a format and a scale for.

Enters: a seed. Leaves: cases with the right answers. The rules are those of the task's text.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmcourse.planner.formats import FORMATS, FloatFormat

FACTS = ("max", "smallest_normal", "smallest_subnormal", "epsilon", "decimal_digits")
"""What `format_facts` returns, each worth a part of the points."""
Towers = Mapping[str, Mapping[int, int]]
"""Number of gradients by exponent, for each tower."""
Formats = Sequence[tuple[str, int, int]]
"""Name, exponent bits, mantissa bits; in no order."""


def spec(exponent_bits: int, mantissa_bits: int, has_infinity: bool = True) -> FloatFormat:
    """Return a format without a name of its own."""
    name = f"e{exponent_bits}m{mantissa_bits}"
    return FloatFormat(
        name=name, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits, has_infinity=has_infinity
    )  # fmt: skip


def facts_of(form: FloatFormat) -> dict[str, float]:
    """Return the right answer of part a."""
    return {name: getattr(form, name) for name in FACTS}


def make_formats(seed: int, num_cases: int) -> list[FloatFormat]:
    """Return formats: the well-known ones first, then any; every third keeps no infinities."""
    draw = random.Random(seed)
    known = [FORMATS[name] for name in ("fp16", "e4m3fn", "bf16", "e5m2")]
    drawn = []
    for number in range(num_cases):
        finite_only = number % 3 == 2
        drawn.append(spec(draw.randint(3, 8), draw.randint(2, 7 if finite_only else 20), not finite_only))
    return [*known, *drawn][:num_cases]


# --- b: what survives -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Numbers for one format."""

    form: FloatFormat
    values: tuple[float, ...]

    @property
    def fates(self) -> list[str]:
        """The right answer: what becomes of each."""
        return [self.form.fate(value) for value in self.values]


def make_gradients(seed: int, num_cases: int, edges: bool) -> list[Gradients]:
    """Return formats with numbers of all sizes, or with numbers around the edges of the format."""
    draw = random.Random(seed)
    cases = []
    for number in range(num_cases):
        known = FORMATS[("fp16", "bf16", "e5m2")[number % 3]]
        form = known if number < 3 else spec(draw.randint(3, 8), draw.randint(2, 10))
        sizes = _edge_numbers(form, draw) if edges else _plain_numbers(form, draw)
        cases.append(Gradients(form=form, values=tuple(draw.choice((-1, 1)) * size for size in sizes)))
    return cases


def _plain_numbers(form: FloatFormat, draw: random.Random) -> list[float]:
    """Return numbers well inside each of the four ranges, and zero."""
    low, normal, high = (math.log2(x) for x in (form.smallest_subnormal, form.smallest_normal, form.max))
    found = [2 ** draw.uniform(low - 12, low - 2) for _ in range(3)]
    found += [2 ** draw.uniform(low + 0.1, normal - 0.6) for _ in range(3)]
    found += [2 ** draw.uniform(normal + 0.1, high - 0.6) for _ in range(5)]
    found += [2 ** draw.uniform(high + 1, high + 6) for _ in range(2)] + [0.0]
    draw.shuffle(found)
    return found


def _edge_numbers(form: FloatFormat, draw: random.Random) -> list[float]:
    """Return numbers that only rounding decides about."""
    step, top = form.smallest_subnormal, form.step_at(form.max)
    below = form.smallest_normal - step
    found = [step * draw.uniform(0.55, 0.95), step * draw.uniform(0.1, 0.45), step * 0.5, step]
    found += [form.smallest_normal, below, below + step * draw.uniform(0.6, 0.9)]
    found += [form.max, form.max + top * draw.uniform(0.1, 0.4), form.max + top * 0.5, form.max + top]
    draw.shuffle(found)
    return found


# --- c: a format and a scale ----------------------------------------------------------------------------------------


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

    def answer(self) -> tuple[str, int] | None:
        """The right answer: the format with most digits that works, and the smallest power that makes it work."""
        for name, exponent_bits, mantissa_bits in sorted(self.formats, key=lambda form: -form[2]):
            form = spec(exponent_bits, mantissa_bits)
            largest = max(max(counts) for counts in self.towers.values())
            lowest = round(math.log2(form.smallest_subnormal))
            for power in range(form.max_exponent - self.headroom - largest + 1):
                if all(lost(counts, lowest - power) <= self.max_lost for counts in self.towers.values()):
                    return name, power
        return None

    def __str__(self) -> str:
        """Say what the case is about."""
        ranges = ", ".join(f"{name} 2^{min(c)} to 2^{max(c)}" for name, c in self.towers.items())
        names = ", ".join(f"{name} ({e}, {m})" for name, e, m in self.formats)
        return f"{ranges}; {names}; max_lost {self.max_lost}, headroom {self.headroom}"


def lost(counts: Mapping[int, int], lowest: int) -> float:
    """Return the fraction of the gradients of one tower below an exponent."""
    return sum(number for exponent, number in counts.items() if exponent < lowest) / sum(counts.values())


KNOWN = [(name, FORMATS[name].exponent_bits, FORMATS[name].mantissa_bits) for name in ("bf16", "fp16", "e5m2")]
GROUPS = ("as it is", "scaled", "wide", "impossible")
"""fp16 without a scale; fp16 with one; bf16, because no scale saves fp16; nothing of what there is."""


def make_choices(group: str, seed: int, num_cases: int) -> list[Choice]:
    """Return cases of one group.

    Raises:
        ValueError: for an unknown group.
    """
    if group not in GROUPS:
        raise ValueError(f"group = {group!r}: choose one of {', '.join(GROUPS)}")
    draw, found = random.Random(f"{group}/{seed}"), []
    while len(found) < num_cases:
        case = _draw_choice(group, draw)
        answer = case.answer()
        if answer is None:
            kind = "impossible"
        else:
            kind = {"bf16": "wide", "fp16": "scaled" if answer[1] else "as it is"}.get(answer[0], "")
        # In every other wide case it is the headroom alone that rules fp16 out.
        decides = dataclasses.replace(case, headroom=0).answer() != answer
        if kind == group and (group != "wide" or decides == bool(len(found) % 2)):
            found.append(case)
    return found


def _draw_choice(group: str, draw: random.Random) -> Choice:
    center = {"as it is": (-12, -4), "scaled": (-26, -18), "wide": (-22, -8), "impossible": (-30, -10)}[group]
    width = {"as it is": (2, 3.0), "scaled": (2, 3.5), "wide": (6, 9), "impossible": (6, 9)}[group]
    towers = {}
    for tower, size in (("vision", 10**6), ("projector", 10**3), ("language", 10**7)):
        middle, wide = draw.uniform(*center), draw.uniform(*width)
        reach = round(3 * wide)
        counts = {
            e: math.exp(-(((e - middle) / wide) ** 2) / 2) for e in range(round(middle) - reach, round(middle) + reach)
        }
        total = sum(counts.values())
        towers[tower] = {e: max(1, round(size * share / total)) for e, share in counts.items()}
    formats = [form for form in KNOWN if group != "impossible" or form[0] != "bf16"]
    draw.shuffle(formats)
    return Choice(
        towers=towers, formats=formats, max_lost=draw.choice((0.001, 0.01, 0.02)), headroom=draw.choice((2, 3, 4))
    )
