"""Exercise 4.3's misconceptions in part b: each is a function that gives the answer of the mistake.

Enters: answers with their cases. Leaves: one sentence, or one for each part of a format's range in which the answers
are wrong. Part a: `fact_feedback.py`; part c: `choice_feedback.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlmcourse.grading.fact_feedback import BIASES
from vlmcourse.grading.format_cases import Gradients, spec
from vlmcourse.planner.formats import FloatFormat

Judge = Callable[[FloatFormat, float], str]
"""What becomes of a number in a format, right or by a mistake."""


def _sign_kept(form: FloatFormat, value: float) -> str:
    return form.fate(value) if value > 0 else "zero"


def _bits_swapped(form: FloatFormat, value: float) -> str:
    return spec(form.mantissa_bits, form.exponent_bits).fate(value)


def _cut_off(form: FloatFormat, value: float, top: float = 0.0) -> str:
    """Judge the number itself, not the rounded one; `top` is the largest that is kept, usually max."""
    if abs(value) > (top or form.max):
        return "overflow"
    if abs(value) < form.smallest_subnormal:
        return "zero"
    return "subnormal" if abs(value) < form.smallest_normal else "normal"


def _exponent_only(form: FloatFormat, value: float) -> str:
    return _cut_off(form, value, math.nextafter(2.0 ** (form.max_exponent + 1), 0.0))


def _with_exponents(form: FloatFormat, value: float, tiny: int, normal: int, largest: int) -> str:
    """Judge rightly but for the exponents of the smallest subnormal, the smallest normal and the largest number."""
    size, half = abs(value), 2.0 ** (tiny - 1)
    if size <= half or size < 2.0**normal - half:
        return "zero" if size <= half else "subnormal"
    return "normal" if size < (2 - form.epsilon / 2) * 2.0**largest else "overflow"


def _with_bias(bias: Callable[[int], int], top_by_bias: bool) -> Judge:
    """Judge by a wrong bias, from which the largest exponent either is taken or is counted down to."""

    def judge(form: FloatFormat, value: float) -> str:
        wrong = bias(form.exponent_bits)
        top = wrong if top_by_bias else 2**form.exponent_bits - 2 - wrong
        return _with_exponents(form, value, 1 - wrong - form.mantissa_bits, 1 - wrong, top)

    return judge


def _stored_0_normal(form: FloatFormat, value: float, below: int = 1) -> str:
    """Take 2^-bias for the smallest normal number, and that of exponent `below` less than 1 - bias for subnormal."""
    lowest = form.min_exponent
    return _with_exponents(form, value, lowest - below - form.mantissa_bits, lowest - 1, form.max_exponent)


def _instead(wrong: str, *, of: str) -> Judge:
    """Judge rightly, but for one fate."""
    return lambda f, x: wrong if f.fate(x) == of else f.fate(x)


_STORED_0 = (
    "stored exponent 0 is kept for subnormal numbers: the smallest normal number is 2^(1 - bias), not 2^-bias, and the "
    "smallest subnormal one 2^(1 - bias - m)"
)
WHOLE_MISTAKES: Sequence[tuple[str, Judge]] = (
    *(
        (f"the bias is 2^(e-1) - 1, not {written}: all borders between the ranges follow from it", judge)
        for written, bias in BIASES
        for judge in (_with_bias(bias, True), _with_bias(bias, False))
    ),
    (_STORED_0, _stored_0_normal),
    (_STORED_0, lambda f, x: _stored_0_normal(f, x, below=0)),
    ("take the size of a number: negative gradients survive like positive ones", _sign_kept),
    ("the first number of bits is the exponent's, the second the mantissa's", _bits_swapped),
    (
        "numbers are rounded to the nearest, not cut off: more than half of the smallest number becomes that number, "
        "and less than half a step above max becomes max",
        _cut_off,
    ),
    (
        "the exponent of the number itself does not decide: round it first, then look where the rounded number lies; "
        "more than half of the smallest number becomes that number, and from half a step above max on it overflows",
        _exponent_only,
    ),
)
"""Tried on all numbers."""

REGION_MISTAKES: Mapping[str, Sequence[tuple[str, Judge]]] = {
    "0": (
        ("0 is zero in every format", lambda f, x: "subnormal"),
        ("0 is zero in every format", lambda f, x: "normal"),
    ),
    "bottom": (
        (
            "at the bottom numbers are rounded too: more than half of the smallest number becomes that number",
            lambda f, x: "zero" if abs(x) < f.smallest_subnormal else "subnormal",
        ),
        (
            "the smallest subnormal number is no zero, and more than half of it becomes that number",
            lambda f, x: "zero",
        ),
        ("less than half of the smallest number is rounded to 0", lambda f, x: "subnormal"),
        ("there are subnormal numbers below the smallest normal one", lambda f, x: "normal"),
    ),
    "bottom tie": (
        (
            "a tie goes to the even neighbor: half of the smallest number lies between it and 0, which is even",
            lambda f, x: "subnormal",
        ),
    ),
    "normal": (
        (
            "below the smallest normal number come the subnormal ones, down to 2^-m times smaller; only below them is "
            "zero",
            _instead("zero", of="subnormal"),
        ),
        (
            "below the smallest normal number come the subnormal ones, down to 2^-m times smaller; only below them is "
            "zero",
            lambda f, x: "zero" if abs(x) < f.smallest_normal else "normal",
        ),
        (
            "a number within half a step of the smallest normal one is rounded to it, and is normal then",
            lambda f, x: "subnormal" if abs(x) < f.smallest_normal else "normal",
        ),
        (
            "a tie goes to the even neighbor: half a step below the smallest normal number lies between that one, "
            "whose last bit is 0, and the largest subnormal one, whose last bit is 1",
            lambda f, x: "subnormal" if abs(x) == f.smallest_normal - f.smallest_subnormal / 2 else f.fate(x),
        ),
        ("the smallest normal number, and what is rounded to it, is normal", lambda f, x: "subnormal"),
        ("a rounded number below the smallest normal one is subnormal", lambda f, x: "normal"),
        (
            "more than half a step below the smallest normal number is rounded to the largest subnormal one",
            lambda f, x: "normal" if abs(x) > f.smallest_normal - f.smallest_subnormal else "subnormal",
        ),
    ),
    "top": (
        (
            "at the top numbers are rounded too: less than half a step above max becomes max",
            lambda f, x: "overflow" if abs(x) > f.max else "normal",
        ),
        (
            "max itself is a number of the format, and less than half a step above it becomes max",
            lambda f, x: "overflow" if abs(x) >= f.max else "normal",
        ),
        ("what overflows becomes infinite, it is not held at max", lambda f, x: "normal"),
        (
            "the exponent 2^e - 1 is kept for infinities: numbers overflow from half that size on",
            lambda f, x: f.fate(x / 2) if abs(x) > f.max / 2 else f.fate(x),
        ),
    ),
    "top tie": (
        (
            "a tie goes to the even neighbor: half a step above max lies between max, whose last bit is 1, and "
            "2^(bias + 1), which overflows",
            lambda f, x: "normal",
        ),
    ),
}
"""By part of the range: tried on the numbers in it."""


def region_of(form: FloatFormat, value: float) -> str:
    """Return the part of a format's range that a number lies in, a key of `REGION_MISTAKES`."""
    size = abs(value)
    if size == 0:
        return "0"
    if size <= form.smallest_subnormal:
        return "bottom tie" if size == form.smallest_subnormal / 2 else "bottom"
    if size <= form.smallest_normal:
        return "normal"
    return "top tie" if size == form.max + form.step_at(form.max) / 2 else "top"


def explain_fates(answers: Sequence[tuple[Gradients, Sequence[Any]]]) -> list[str]:
    """Return what is behind the wrong answers of part b: one sentence, or one for each part of the range.

    Args:
        answers: pairs of a case and the learner's list, right and wrong ones; each list is as long as the case.
    """
    numbers = [(c.form, x, got) for c, given in answers for x, got in zip(c.values, given, strict=True)]
    by_region: dict[str, list[tuple[FloatFormat, float, Any]]] = {name: [] for name in REGION_MISTAKES}
    for form, value, got in numbers:
        by_region[region_of(form, value)].append((form, value, got))
    wrong = [name for name, part in by_region.items() if not _all_by(FloatFormat.fate, part)]
    if not wrong:
        return []
    for sentence, judge in WHOLE_MISTAKES:
        if _all_by(judge, numbers):
            return [sentence]
    found = []
    for name in wrong:
        sentence = next((text for text, judge in REGION_MISTAKES[name] if _all_by(judge, by_region[name])), "")
        if sentence and sentence not in found:
            found.append(sentence)
    return found


def _all_by(judge: Judge, numbers: Sequence[tuple[FloatFormat, float, Any]]) -> bool:
    return all(judge(form, value) == got for form, value, got in numbers)
