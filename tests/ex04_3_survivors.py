"""Answers to exercise 4.3, part b: right ones in other styles, wrong ones with words of their feedback."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from ex04_3_facts import bias_of


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


def tie_below_normal(value, tiny, normal, *rest):
    return "subnormal" if abs(value) == normal - tiny / 2 else right(value, tiny, normal, *rest)


def early_normal(value, tiny, normal, *rest):
    return "normal" if normal - tiny < abs(value) < normal else right(value, tiny, normal, *rest)


def with_exponents(low, top):
    """Return the right answer but for powers of 2 at three borders: smallest subnormal and normal number, and max."""

    def survivors(values, exponent_bits, mantissa_bits):
        tiny, normal, largest, step = limits(exponent_bits, mantissa_bits)
        subnormal_by, normal_by, top_by = (2.0 ** power(exponent_bits) for power in (*low, top))
        return [right(x, tiny * subnormal_by, normal * normal_by, largest * top_by, step * top_by) for x in values]

    return survivors


def off_by(power):
    return lambda exponent_bits: power


STORED_0, RIGHT_BIAS = "stored exponent 0 is kept for subnormal", "the bias is 2^(e-1) - 1, not "
SURVIVORS_BIASED = [
    (with_exponents((off_by(-1), off_by(-1)), off_by(1)), RIGHT_BIAS + "2^(e-1):"),
    (with_exponents((off_by(-1), off_by(-1)), off_by(-1)), RIGHT_BIAS + "2^(e-1):"),
    (with_exponents((off_by(1), off_by(1)), off_by(-1)), RIGHT_BIAS + "2^(e-1) - 2:"),
    (with_exponents((off_by(1), off_by(1)), off_by(1)), RIGHT_BIAS + "2^(e-1) - 2:"),
    (with_exponents((lambda e: -(2 ** (e - 1)),) * 2, lambda e: 2 ** (e - 1)), RIGHT_BIAS + "2^e - 1:"),
    (with_exponents((off_by(-1), off_by(-1)), off_by(0)), STORED_0),
    (with_exponents((off_by(0), off_by(-1)), off_by(0)), STORED_0),
]
"""Answers with a wrong bias, or with 2^-bias for the smallest normal number, and words of the only reason."""


LOW_TIE, HIGH_TIE = "half of the smallest number lies between", "half a step above max lies between"
NORMAL_TIE = "half a step below the smallest normal number lies between"
SURVIVORS_BY_REGION = [
    (judged(tie_below_normal), [NORMAL_TIE]),
    (judged(early_normal), ["more than half a step below the smallest normal number is rounded to the largest"]),
    (
        judged(lambda x, t, n, top, s: "normal" if abs(x) == top + s / 2 else tie_below_normal(x, t, n, top, s)),
        [NORMAL_TIE, HIGH_TIE],
    ),
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
