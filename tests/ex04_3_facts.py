"""Answers to exercise 4.3, part a: right ones in other styles, wrong ones with words of their feedback."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

NAMES = ("max", "smallest_normal", "smallest_subnormal", "epsilon", "decimal_digits")

# --- right ----------------------------------------------------------------------------------------------------------


def by_formula(exponent_bits, mantissa_bits, has_infinity=True):
    bias = 2 ** (exponent_bits - 1) - 1
    top = 2**exponent_bits - (2 if has_infinity else 1) - bias
    epsilon = 2.0**-mantissa_bits
    return {
        "max": (2 - epsilon * (1 if has_infinity else 2)) * 2.0**top,
        "smallest_normal": 2.0 ** (1 - bias),
        "smallest_subnormal": 2.0 ** (1 - bias - mantissa_bits),
        "epsilon": epsilon,
        "decimal_digits": (mantissa_bits + 1) * math.log10(2),
    }


def by_listing(exponent_bits, mantissa_bits, has_infinity=True):
    """All positive numbers of the format, decoded one by one (fractions, so that nothing is rounded)."""
    bias, size = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits

    def decode(exponent, mantissa):
        if exponent == 0:
            return Fraction(mantissa, size) * Fraction(2) ** (1 - bias)
        return (1 + Fraction(mantissa, size)) * Fraction(2) ** (exponent - bias)

    last = (2**exponent_bits - 2, size - 1) if has_infinity else (2**exponent_bits - 1, size - 2)
    return {
        "max": decode(*last),
        "smallest_normal": decode(1, 0),
        "smallest_subnormal": decode(0, 1),
        "epsilon": decode(bias, 1) - 1,
        "decimal_digits": math.log10(2 * size),
    }


def with_numpy(exponent_bits, mantissa_bits, has_infinity=True):
    bias = (1 << (exponent_bits - 1)) - 1
    significand = np.float64(2) - np.ldexp(1.0, -mantissa_bits) * (1 if has_infinity else 2)
    return {
        "max": np.ldexp(significand, (1 << exponent_bits) - 1 - int(has_infinity) - bias),
        "smallest_normal": np.ldexp(1.0, 1 - bias),
        "smallest_subnormal": np.ldexp(1.0, 1 - bias - mantissa_bits),
        "epsilon": np.ldexp(1.0, -mantissa_bits),
        "decimal_digits": np.log10(2.0 ** (mantissa_bits + 1)),
    }


def with_torch(exponent_bits, mantissa_bits, has_infinity=True):
    two = torch.tensor(2.0, dtype=torch.float64)
    bias = 2 ** (exponent_bits - 1) - 1
    step = two**-mantissa_bits
    top = two ** (2**exponent_bits - 1 - has_infinity - bias)
    normal = two ** (1 - bias)
    return dict(
        max=top * (2 - step - (0 if has_infinity else step)),
        smallest_normal=normal,
        smallest_subnormal=normal * step,
        epsilon=step,
        decimal_digits=math.log10(2) * (mantissa_bits + 1),
    )


def with_float32(exponent_bits, mantissa_bits, has_infinity=True):
    exact = by_formula(exponent_bits, mantissa_bits, has_infinity)
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in exact.items()}


FACTS_RIGHT = [by_formula, by_listing, with_numpy, with_torch, with_float32]


def changed(**facts):
    """Return the right answer with some facts replaced by functions of (e, m, has_infinity)."""

    def answer(exponent_bits, mantissa_bits, has_infinity=True):
        right = by_formula(exponent_bits, mantissa_bits, has_infinity)
        return right | {name: f(exponent_bits, mantissa_bits, has_infinity) for name, f in facts.items()}

    return answer


def bias_of(e):
    return 2 ** (e - 1) - 1


FACTS_WRONG = [
    ("top exponent used", changed(max=lambda e, m, i: (2 - 2.0**-m) * 2.0 ** (2**e - 1 - bias_of(e))), "max", ""),
    ("no nan", changed(max=lambda e, m, i: (2 - 2.0**-m) * 2.0 ** (2**e - 1 - i - bias_of(e))), "max", "for NaN"),
    ("ieee only", changed(max=lambda e, m, i: by_formula(e, m)["max"]), "max", "has_infinity=False was ignored"),
    ("power of two", changed(max=lambda e, m, i: 2.0 ** (2**e - i - bias_of(e))), "max", "one step below 2"),
    ("no mantissa", changed(max=lambda e, m, i: 2.0 ** (2**e - 1 - i - bias_of(e))), "max", "left the mantissa out"),
    (
        "stored 0 normal",
        changed(smallest_normal=lambda e, m, i: 2.0 ** -bias_of(e)),
        "smallest_normal",
        "kept for subnormal numbers",
    ),
    (
        "bias 2^(e-1)",
        changed(smallest_normal=lambda e, m, i: 2.0 ** (2 - bias_of(e))),
        "smallest_normal",
        "the bias is",
    ),
    (
        "subnormal is normal",
        changed(smallest_subnormal=lambda e, m, i: 2.0 ** (1 - bias_of(e))),
        "smallest_subnormal",
        "go on below it",
    ),
    (
        "one exponent too low",
        changed(smallest_subnormal=lambda e, m, i: 2.0 ** (-bias_of(e) - m)),
        "smallest_subnormal",
        "have the exponent of the smallest normal one",
    ),
    (
        "power of two, ieee only",
        changed(max=lambda e, m, i: 2.0 ** (1 + bias_of(e))),
        "max",
        "one step below 2, so max = (2 - 2^-m) x 2^exponent; and has_infinity=False was ignored",
    ),
    (
        "no mantissa, ieee only",
        changed(max=lambda e, m, i: 2.0 ** bias_of(e)),
        "max",
        "left the mantissa out: with all its bits set it is nearly 2, not 1; and has_infinity=False was ignored",
    ),
    (
        "max halved",
        changed(max=lambda e, m, i: by_formula(e, m, i)["max"] / 2),
        "max",
        "exponent is one too low",
    ),
    (
        "half of the smallest normal",
        changed(smallest_subnormal=lambda e, m, i: 2.0 ** -bias_of(e)),
        "smallest_subnormal",
        "half of the smallest normal number is subnormal, but not the smallest",
    ),
    ("half a step", changed(epsilon=lambda e, m, i: 2.0 ** -(m + 1)), "epsilon", "the largest rounding error"),
    ("epsilon at zero", changed(epsilon=lambda e, m, i: 2.0 ** (1 - bias_of(e) - m)), "epsilon", "the step at 1"),
    ("no leading 1", changed(decimal_digits=lambda e, m, i: m * math.log10(2)), "decimal_digits", "the leading 1"),
    ("floored", changed(decimal_digits=lambda e, m, i: int((m + 1) * math.log10(2))), "decimal_digits", "round down"),
    (
        "one decimal",
        changed(decimal_digits=lambda e, m, i: round((m + 1) * math.log10(2), 1)),
        "decimal_digits",
        "do not round to one decimal",
    ),
    (
        "round trip",
        changed(decimal_digits=lambda e, m, i: math.floor(m * math.log10(2))),
        "decimal_digits",
        "survive a round trip",
    ),
    ("digit for the 1", changed(decimal_digits=lambda e, m, i: 1 + m * math.log10(2)), "decimal_digits", "a bit more"),
    (
        "digits of all bits",
        changed(decimal_digits=lambda e, m, i: (1 + e + m) * math.log10(2)),
        "decimal_digits",
        "sign and exponent bits say nothing about digits",
    ),
    (
        "digits of unsigned bits",
        changed(decimal_digits=lambda e, m, i: (e + m) * math.log10(2)),
        "decimal_digits",
        ": exponent bits say nothing about digits",
    ),
    ("no bias", changed(max=lambda e, m, i: (2 - 2.0**-m) * 2.0 ** (2**e - 2)), "max", "subtract the bias"),
    ("no bias, power of two", changed(max=lambda e, m, i: 2.0 ** (2**e - 1)), "max", "subtract the bias"),
    (
        "epsilon at max",
        changed(epsilon=lambda e, m, i: 2.0 ** (bias_of(e) + (not i) - m)),
        "epsilon",
        "the step at max",
    ),
    ("epsilon at the bias", changed(epsilon=lambda e, m, i: 2.0 ** (bias_of(e) - m)), "epsilon", "step at the largest"),
    (
        "epsilon for the smallest",
        changed(smallest_subnormal=lambda e, m, i: 2.0**-m),
        "smallest_subnormal",
        "this is epsilon, the step at 1",
    ),
    ("bits", changed(decimal_digits=lambda e, m, i: m + 1), "decimal_digits", "multiply by log10(2)"),
    ("natural log", changed(decimal_digits=lambda e, m, i: (m + 1) * math.log(2)), "decimal_digits", "not ln"),
]
"""Name, answer, the one fact that is wrong, and words of the feedback."""


def with_bias(bias):
    """Return an answer that is right but for the bias, a function of the exponent bits."""

    def answer(exponent_bits, mantissa_bits, has_infinity=True):
        right = by_formula(exponent_bits, mantissa_bits, has_infinity)
        factor = 2.0 ** (bias_of(exponent_bits) - bias(exponent_bits))
        return right | {name: right[name] * factor for name in NAMES[:3]}

    return answer


def bias_and_no_nan(exponent_bits, mantissa_bits, has_infinity=True):
    """The bias is one too large, and has_infinity is not looked at."""
    return with_bias(lambda e: 2 ** (e - 1))(exponent_bits, mantissa_bits)


WRONG_BIASES = [
    (bias_and_no_nan, "not 2^(e-1):"),
    (with_bias(lambda e: 2 ** (e - 1)), "not 2^(e-1):"),
    (with_bias(lambda e: 2 ** (e - 1) - 2), "not 2^(e-1) - 2:"),
    (with_bias(lambda e: 2**e - 1), "not 2^e - 1:"),
    (with_bias(lambda e: 2**e - 2), "not 2^e - 2:"),
]
