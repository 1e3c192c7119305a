"""Answers to exercise 4.3, parts a and b: right ones in other styles, wrong ones with words of their feedback."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

NAMES = ("max", "smallest_normal", "smallest_subnormal", "epsilon", "decimal_digits")

# --- a: right -------------------------------------------------------------------------------------------------------


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
    ("bits", changed(decimal_digits=lambda e, m, i: m + 1), "decimal_digits", "multiply by log10(2)"),
    ("natural log", changed(decimal_digits=lambda e, m, i: (m + 1) * math.log(2)), "decimal_digits", "not ln"),
]
"""Name, answer, the one fact that is wrong, and words of the feedback."""

# --- b --------------------------------------------------------------------------------------------------------------


def limits(e, m):
    bias = bias_of(e)
    return 2.0 ** (1 - bias - m), 2.0 ** (1 - bias), (2 - 2.0**-m) * 2.0**bias, 2.0 ** (bias - m)


def by_limits(values, exponent_bits, mantissa_bits):
    tiny, normal, largest, step = limits(exponent_bits, mantissa_bits)
    found = []
    for value in map(abs, values):
        if value <= tiny / 2:
            found.append("zero")
        elif value < normal - tiny / 2:
            found.append("subnormal")
        else:
            found.append("normal" if value < largest + step / 2 else "overflow")
    return found


def by_rounding(values, exponent_bits, mantissa_bits):
    tiny, normal, largest, _ = limits(exponent_bits, mantissa_bits)

    def fate(value):
        exponent = max(math.frexp(value)[1] - 1, 1 - bias_of(exponent_bits))
        step = Fraction(2) ** (exponent - mantissa_bits)
        size = abs(round(Fraction(value) / step) * step)
        return "zero" if not size else "overflow" if size > largest else "subnormal" if size < normal else "normal"

    return tuple(fate(value) for value in values)


def by_numpy(values, exponent_bits, mantissa_bits):
    tiny, normal, largest, step = limits(exponent_bits, mantissa_bits)
    size = np.abs(np.array(values))
    edges = [size <= tiny / 2, size < normal - tiny / 2, size < largest + step / 2]
    return np.select(edges, ["zero", "subnormal", "normal"], "overflow").tolist()


def by_steps(values, exponent_bits, mantissa_bits):
    tiny, normal, largest, _ = limits(exponent_bits, mantissa_bits)
    out = []
    for value in values:
        size = abs(value)
        if size < normal:
            units = round(size / tiny)
            out.append("zero" if units == 0 else "subnormal" if units * tiny < normal else "normal")
        else:
            step = 2.0 ** (math.floor(math.log2(size)) - mantissa_bits)
            out.append("normal" if round(size / step) * step <= largest else "overflow")
    return out


SURVIVORS_RIGHT = [by_limits, by_rounding, by_numpy, by_steps]


def judged(judge):
    """Return an answer that judges each number by (value, tiny, normal, largest, step)."""
    return lambda values, e, m: [judge(value, *limits(e, m)) for value in values]


def right(value, tiny, normal, largest, step):
    size = abs(value)
    if size <= tiny / 2:
        return "zero"
    if size < normal - tiny / 2:
        return "subnormal"
    return "normal" if size < largest + step / 2 else "overflow"


def cut_off(value, tiny, normal, largest, step):
    size = abs(value)
    return "zero" if size < tiny else "subnormal" if size < normal else "normal" if size <= largest else "overflow"


def flushed(value, *limits):
    fate = right(value, *limits)
    return "zero" if fate == "subnormal" else fate


SURVIVORS_WRONG = [
    ("cut off", judged(cut_off), "rounded to the nearest, not cut off"),
    ("flushed", judged(flushed), "come the subnormal ones"),
    ("signed", judged(lambda x, *lim: right(x, *lim) if x > 0 else "zero"), "negative gradients survive"),
    (
        "cut off below",
        judged(lambda x, tiny, *lim: "zero" if abs(x) < tiny else right(x, tiny, *lim)),
        "at the bottom numbers are rounded too",
    ),
    (
        "cut off above",
        judged(lambda x, t, n, top, s: "overflow" if abs(x) > top else right(x, t, n, top, s)),
        "at the top numbers are rounded too",
    ),
    (
        "ties up",
        judged(lambda x, t, n, top, s: right(x * (1 + 1e-12) if abs(x) < n else x, t, n, top, s)
               if abs(x) != top + s / 2 else "normal"),
        "a tie goes to the even neighbor",
    ),
    ("swapped", lambda values, e, m: by_rounding(values, m, e), "the first number of bits is the exponent's"),
    ("held at max", judged(lambda x, *lim: right(x, *lim).replace("overflow", "normal")), "it is not held at max"),
    (
        "late normal",
        judged(lambda x, t, n, top, s: "subnormal" if n - t / 2 <= abs(x) < n else right(x, t, n, top, s)),
        "within half a step of the smallest normal one",
    ),
]  # fmt: skip


def exponents_only(values, exponent_bits, mantissa_bits):
    bias, found = bias_of(exponent_bits), []
    for value in values:
        exponent = math.floor(math.log2(abs(value))) if value else -math.inf
        if exponent < 1 - bias - mantissa_bits:
            found.append("zero")
        else:
            found.append("subnormal" if exponent < 1 - bias else "normal" if exponent <= bias else "overflow")
    return found


def half_and_max(value, tiny, normal, largest, step):
    size = abs(value)
    return "zero" if size < tiny / 2 else "subnormal" if size < normal else "normal" if size < largest else "overflow"


def no_subnormals(value, tiny, normal, largest, step):
    return "zero" if abs(value) < normal else "normal" if abs(value) <= largest else "overflow"


LOW_TIE, HIGH_TIE = "half of the smallest number lies between", "half a step above max lies between"
SURVIVORS_BY_REGION = [
    (exponents_only, ["the exponent of the number itself does not decide"]),
    (
        judged(half_and_max),
        [LOW_TIE, "within half a step of the smallest normal one", "max itself is a number of the format"],
    ),
    (
        judged(lambda x, t, n, top, s: "normal" if abs(x) == top + s / 2 else right(x, t, n, top, s)),
        [HIGH_TIE],
    ),
    (
        judged(no_subnormals),
        ["smallest subnormal number is no zero", "come the subnormal ones", "at the top numbers are rounded too"],
    ),
    (
        judged(lambda x, t, n, top, s: "subnormal" if abs(x) == t / 2 else cut_off(x, t, n, top, s)),
        ["at the bottom numbers are rounded too", LOW_TIE, "half a step of the smallest normal", "at the top numbers"],
    ),
]
"""Answers that are wrong in some parts of the range, and words of the sentences that name them, in their order."""
