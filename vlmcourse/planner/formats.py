"""Floating-point formats as arithmetic: what a number of exponent and mantissa bits can hold, and what survives in it.

Enters: two numbers of bits. Leaves: a `FloatFormat` that derives its largest number, its smallest ones, its step and
its digits, and rounds any number as hardware does. No torch; `torch.finfo` must agree, and a test says so. Chapter 3.

Source: IEEE 754-2019, section 3.3; Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv:2209.05433),
table 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlmcourse.values import check_counts


@dataclass(frozen=True, kw_only=True)
class FloatFormat:
    """A sign bit, `exponent_bits` and `mantissa_bits`; a normal number is (1 + mantissa / 2^m) x 2^exponent."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    """Stored bits of the fraction; the leading 1 of a normal number is not stored."""
    has_infinity: bool = True
    """Whether the highest exponent is kept for infinities and NaN, as in IEEE 754. e4m3fn keeps one pattern only, NaN,
    and uses the rest of that exponent for numbers."""

    def __post_init__(self) -> None:
        """Refuse what has no normal numbers, no NaN beside an infinity, or more than a Python float can hold.

        Raises:
            ValueError: naming the number of bits to change.
        """
        most_exponent_bits = 10 + self.has_infinity  # without infinities, 11 bits reach 2^1024, which fp64 does not
        for name, least, most in (("exponent_bits", 2, most_exponent_bits), ("mantissa_bits", 1, 52)):
            check_counts(least, **{name: getattr(self, name)})
            if getattr(self, name) > most:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at most {most}, as in fp64; change it")

    @property
    def bits(self) -> int:
        """Bits of one number."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is subtracted from a stored exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return 2**self.exponent_bits - 1 - self.has_infinity - self.bias

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max(self) -> float:
        """The largest finite number."""
        steps_below_2 = 1 if self.has_infinity else 2  # without infinities the last pattern is NaN
        return (2 - steps_below_2 * self.epsilon) * 2.0**self.max_exponent

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with all its digits."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number: one step of the subnormal ones."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """From 1 to the next larger number."""
        return 2.0**-self.mantissa_bits

    @property
    def significant_bits(self) -> int:
        """Bits of a normal number's fraction, the leading 1 included."""
        return self.mantissa_bits + 1

    @property
    def decimal_digits(self) -> float:
        """Significant bits in decimal digits."""
        return self.significant_bits * math.log10(2)

    def step_at(self, value: float) -> float:
        """Return the distance between neighbors around a finite number."""
        exponent = max(math.frexp(value)[1] - 1, self.min_exponent) if value else self.min_exponent
        return 2.0 ** (exponent - self.mantissa_bits)

    def round(self, value: float) -> float:
        """Round to the nearest number of this format, ties to the even one; beyond half a step over `max` is infinite.

        A format without infinities gives NaN there.
        """
        if not math.isfinite(value) or value == 0:
            return value if self.has_infinity or not math.isinf(value) else math.nan
        step = self.step_at(value)
        rounded = math.copysign(round(abs(value) / step) * step, value)  # Python's round: ties to even
        if abs(rounded) <= self.max:
            return rounded
        return math.copysign(math.inf, value) if self.has_infinity else math.nan

    def fate(self, value: float) -> str:
        """Say what becomes of a finite number: "zero", "subnormal", "normal" or "overflow"."""
        rounded = abs(self.round(value))
        if math.isinf(rounded) or math.isnan(rounded):
            return "overflow"
        if rounded == 0:
            return "zero"
        return "subnormal" if rounded < self.smallest_normal else "normal"


FORMATS: dict[str, FloatFormat] = {
    spec.name: spec
    for spec in (
        FloatFormat(name="fp32", exponent_bits=8, mantissa_bits=23),
        FloatFormat(name="tf32", exponent_bits=8, mantissa_bits=10),
        FloatFormat(name="bf16", exponent_bits=8, mantissa_bits=7),
        FloatFormat(name="fp16", exponent_bits=5, mantissa_bits=10),
        FloatFormat(name="e5m2", exponent_bits=5, mantissa_bits=2),
        FloatFormat(name="e4m3fn", exponent_bits=4, mantissa_bits=3, has_infinity=False),
    )
}
"""The formats of this course by name. tf32 is a way to read fp32 in a matrix product, stored in 32 bits."""
