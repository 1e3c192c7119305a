"""Exercise 4.3's cases for parts a and b: formats, and gradients to be sent through them.

Enters: a seed. Leaves: cases with the right answers. The rules are those of the task's text. Part c: `choice_cases.py`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from vlmcourse.planner.formats import FORMATS, FloatFormat

FACTS = ("max", "smallest_normal", "smallest_subnormal", "epsilon", "decimal_digits")
"""What `format_facts` returns, each worth a part of the points."""


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
    """Return numbers of each of the four ranges that rounding does not carry into another, and zero.

    Some lie in the octaves next to a border, so that a border which is off by a factor of 2 is wrong in every format.
    """
    low, normal, high = (math.log2(x) for x in (form.smallest_subnormal, form.smallest_normal, form.max))
    found = [2 ** draw.uniform(low - 12, low - 2) for _ in range(2)]
    found += [2 ** draw.uniform(low + 0.1, normal - 0.6)]
    found += [2 ** draw.uniform(normal + 0.1, high - 0.6) for _ in range(3)]
    found += [2 ** draw.uniform(high + 1, high + 6), 0.0]
    for border, below, above in (
        (form.smallest_subnormal, (0.3, 0.45), (1.1, 1.7)),
        (form.smallest_normal, (0.55, 0.8), (1.1, 1.7)),
        (2.0 ** (form.max_exponent + 1), (0.55, 0.8), (1.1, 1.7)),
    ):
        found += [border * draw.uniform(*below), border * draw.uniform(*above)]
    draw.shuffle(found)
    return found


def _edge_numbers(form: FloatFormat, draw: random.Random) -> list[float]:
    """Return numbers that only rounding decides about."""
    step, top = form.smallest_subnormal, form.step_at(form.max)
    below = form.smallest_normal - step
    found = [step * draw.uniform(0.55, 0.95), step * draw.uniform(0.1, 0.45), step * 0.5, step]
    found += [form.smallest_normal, below, below + step * 0.5]
    found += [below + step * draw.uniform(0.1, 0.4), below + step * draw.uniform(0.6, 0.9)]
    found += [form.max, form.max + top * draw.uniform(0.1, 0.4), form.max + top * 0.5, form.max + top]
    draw.shuffle(found)
    return found
