"""Exercise 4.3's misconceptions: each is a function that gives the answer which the mistake would give.

Enters: wrong answers with their cases. Leaves: the sentence of the first mistake that gives all of them, or "".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vlmcourse.grading.format_cases import Choice, Gradients, lost, spec
from vlmcourse.planner.formats import FloatFormat

Mistake = tuple[str, Callable[[Any], Any]]
"""What to say, and the answer that the mistake gives to a case."""


def explain(wrong: Sequence[tuple[Any, Any]], mistakes: Iterable[Mistake], same: Callable[[Any, Any], bool]) -> str:
    """Return the sentence of the first mistake that gives every one of the wrong answers; "" if none does.

    Args:
        wrong: pairs of a case and the learner's answer.
        mistakes: in the order in which they are tried.
        same: whether two answers are one.
    """
    for sentence, answer in mistakes:
        if wrong and all(same(_try(answer, case), got) for case, got in wrong):
            return sentence
    return ""


def _try(answer: Callable[[Any], Any], case: Any) -> Any:
    try:
        return answer(case)
    except (ArithmeticError, ValueError):
        return None


def _with_bias(form: FloatFormat, bias: int) -> float:
    """Return the largest number that another bias would give."""
    return (2 - form.epsilon) * 2.0 ** (2**form.exponent_bits - 2 - bias)


FACT_MISTAKES: Mapping[str, Sequence[Mistake]] = {
    "max": (
        (
            "without infinities the highest exponent holds numbers too: has_infinity=False was ignored",
            lambda f: spec(f.exponent_bits, f.mantissa_bits).max,
        ),
        (
            "without infinities one pattern is still kept, all ones, for NaN: the largest number is one step below it",
            lambda f: (2 - f.epsilon) * 2.0**f.max_exponent,
        ),
        (
            "the highest stored exponent is kept for infinities and NaN: the largest number has the one below it",
            lambda f: (2 - f.epsilon) * 2.0 ** (2**f.exponent_bits - 1 - f.bias),
        ),
        (
            "a power of two is too much: the mantissa ends one step below 2, so max = (2 - 2^-m) x 2^exponent",
            lambda f: 2.0 ** (f.max_exponent + 1),
        ),
        ("you left the mantissa out: with all its bits set it is nearly 2, not 1", lambda f: 2.0**f.max_exponent),
        ("the bias is 2^(e-1) - 1, not 2^(e-1)", lambda f: _with_bias(f, f.bias + 1)),
        (
            "(2 - 2^-m): you subtracted another step than the last bit of the mantissa",
            lambda f: (2 - f.epsilon / 2) * 2.0**f.max_exponent,
        ),
    ),
    "smallest_normal": (
        (
            "stored exponent 0 is kept for subnormal numbers: the smallest normal one has stored exponent 1",
            lambda f: f.smallest_normal / 2,
        ),
        ("this is the smallest subnormal number: a normal one has the leading 1", lambda f: f.smallest_subnormal),
        ("the bias is 2^(e-1) - 1: you are off by a factor of 2", lambda f: f.smallest_normal * 2),
    ),
    "smallest_subnormal": (
        (
            "this is the smallest normal number: subnormal ones go on below it, down to one step of the mantissa",
            lambda f: f.smallest_normal,
        ),
        (
            "subnormal numbers have the exponent of the smallest normal one, 1 - bias, not one less",
            lambda f: f.smallest_subnormal / 2,
        ),
        (
            "one step is the last bit of the mantissa, 2^-m: you are off by a factor of 2",
            lambda f: f.smallest_subnormal * 2,
        ),
        ("half of the smallest number is a rounding limit and no number", lambda f: f.smallest_subnormal / 2),
    ),
    "epsilon": (
        (
            "this is half a step, the largest rounding error: epsilon is from 1 to the next number, 2^-m",
            lambda f: f.epsilon / 2,
        ),
        ("epsilon is 2^-m: the leading 1 is not among the stored bits", lambda f: f.epsilon * 2),
        ("this is a step at the smallest numbers: epsilon is the step at 1", lambda f: f.smallest_subnormal),
    ),
    "decimal_digits": (
        (
            "the leading 1 is a digit too: m + 1 significant bits (F8: 11 bits of fp16 are 3.3 digits)",
            lambda f: f.mantissa_bits * math.log10(2),
        ),
        ("do not round down: 11 bits are 3.3 digits", lambda f: math.floor(f.decimal_digits)),
        ("do not round: 11 bits are 3.3 digits", lambda f: round(f.decimal_digits)),
        ("these are bits, not decimal digits: multiply by log10(2)", lambda f: f.significant_bits),
        ("log10, not ln: a decimal digit is a factor of 10", lambda f: f.significant_bits * math.log(2)),
    ),
}
"""By fact, tried on the formats for which it was wrong."""


def _fates(case: Gradients, judge: Callable[[FloatFormat, float], str]) -> list[str]:
    return [judge(case.form, value) for value in case.values]


def _by_thresholds(form: FloatFormat, value: float, *, low: float, high: float) -> str:
    size = abs(value)
    if size >= high:
        return "overflow"
    if size < low:
        return "zero"
    return "subnormal" if size < form.smallest_normal else "normal"


def _no_subnormals(form: FloatFormat, value: float) -> str:
    return "zero" if form.fate(value) == "subnormal" else form.fate(value)


def _sign_kept(form: FloatFormat, value: float) -> str:
    return form.fate(value) if value > 0 else "zero"


def _bits_swapped(form: FloatFormat, value: float) -> str:
    return spec(form.mantissa_bits, form.exponent_bits).fate(value)


FATE_MISTAKES: Sequence[Mistake] = (
    ("take the size of a number: negative gradients survive like positive ones", lambda c: _fates(c, _sign_kept)),
    (
        "below the smallest normal number come the subnormal ones, down to 2^-m times smaller; only below them is zero",
        lambda c: _fates(c, _no_subnormals),
    ),
    (
        "numbers are rounded to the nearest, not cut off: more than half of the smallest number becomes that number, "
        "and less than half a step above max becomes max",
        lambda c: _fates(c, lambda f, x: _cut_off(f, x)),
    ),
    (
        "at the bottom numbers are rounded too: more than half of the smallest number becomes that number",
        lambda c: _fates(c, lambda f, x: "zero" if abs(x) < f.smallest_subnormal else f.fate(x)),
    ),
    (
        "at the top numbers are rounded too: less than half a step above max becomes max",
        lambda c: _fates(c, lambda f, x: "overflow" if abs(x) > f.max else f.fate(x)),
    ),
    (
        "a tie goes to the even neighbor: half of the smallest number becomes 0, half a step above max is infinite",
        lambda c: _fates(c, _ties_kept),
    ),
    (
        "a number within half a step of the smallest normal one is rounded to it, and is normal then",
        lambda c: _fates(c, _late_normal),
    ),
    ("the first number of bits is the exponent's, the second the mantissa's", lambda c: _fates(c, _bits_swapped)),
    (
        "the exponent 2^e - 1 is kept for infinities: numbers overflow from half that size on",
        lambda c: _fates(c, lambda f, x: f.fate(x / 2) if abs(x) > f.max / 2 else f.fate(x)),
    ),
    (
        "what overflows becomes infinite, it is not held at max",
        lambda c: ["normal" if fate == "overflow" else fate for fate in c.fates],
    ),
    ("0 is zero in every format", lambda c: ["subnormal" if x == 0 else c.form.fate(x) for x in c.values]),
)


def _cut_off(form: FloatFormat, value: float) -> str:
    if abs(value) > form.max:
        return "overflow"
    if abs(value) < form.smallest_subnormal:
        return "zero"
    return "subnormal" if abs(value) < form.smallest_normal else "normal"


def _ties_kept(form: FloatFormat, value: float) -> str:
    size = abs(value)
    if size == form.smallest_subnormal / 2:
        return "subnormal"
    return "normal" if size == form.max + form.step_at(form.max) / 2 else form.fate(value)


def _late_normal(form: FloatFormat, value: float) -> str:
    fate = form.fate(value)
    return "subnormal" if fate == "normal" and abs(value) < form.smallest_normal else fate


# --- c --------------------------------------------------------------------------------------------------------------


def choose(
    case: Choice,
    *,
    order: Callable[[tuple[str, int, int]], Any] = lambda form: -form[2],
    headroom: bool = True,
    overflow: bool = True,
    together: bool = False,
    normal: bool = False,
    largest: bool = False,
    powers: bool = True,
    max_lost: float | None = None,
    only: str = "",
    off: int = 0,
) -> tuple[str, int] | None:
    """Return what a learner with some of these mistakes would choose."""
    allowed = case.max_lost if max_lost is None else max_lost
    towers = {name: counts for name, counts in case.towers.items() if not only or name == only}
    merged: dict[int, int] = {}
    for counts in towers.values():
        for exponent, number in counts.items():
            merged[exponent] = merged.get(exponent, 0) + number
    for name, exponent_bits, mantissa_bits in sorted(case.formats, key=order):
        form = spec(exponent_bits, mantissa_bits)
        room = form.max_exponent + off - case.headroom * headroom - max(max(counts) for counts in towers.values())
        lowest = round(math.log2(form.smallest_normal if normal else form.smallest_subnormal))
        last = (room if overflow else 60) if powers else min(room, 0)
        works = [
            power
            for power in range(last + 1)
            if all(lost(c, lowest - power) <= allowed for c in ([merged] if together else towers.values()))
        ]
        if works:
            return name, works[-1 if largest else 0]
    return None


def _keeping_order(form: tuple[str, int, int]) -> int:
    return 0


CHOICE_MISTAKES: Sequence[Mistake] = (
    ("you left no headroom: the largest gradient of the next step may be larger", lambda c: choose(c, headroom=False)),
    ("you did not look at the top: a scale that saves the small ones may make the large ones infinite",
     lambda c: choose(c, overflow=False)),
    ("you counted all towers together: a small tower can be lost as a whole and hardly show in the sum; look at each",
     lambda c: choose(c, together=True)),
    ("subnormal numbers count as kept: a gradient is lost below the smallest subnormal, not below the smallest normal",
     lambda c: choose(c, normal=True)),
    ("you took the largest scale that fits: the task asks for the smallest that loses little enough",
     lambda c: choose(c, largest=True)),
    ("you used no scale: one power of two multiplies all gradients, and more small ones stay",
     lambda c: choose(c, powers=False)),
    ("you allowed no loss at all: max_lost of each tower's gradients may become zero",
     lambda c: choose(c, max_lost=0.0)),
    ("formats come in no order: take the one with the most mantissa bits of those that work",
     lambda c: choose(c, order=_keeping_order)),
    ("you preferred range: of the formats that work, the one with the most mantissa bits keeps the most digits",
     lambda c: choose(c, order=lambda form: -form[1])),
    ("you looked at the vision tower only: the loss has one scale for all towers", lambda c: choose(c, only="vision")),
    ("you looked at the language tower only: the loss has one scale for all towers",
     lambda c: choose(c, only="language")),
    ("the largest exponent of a format is 2^(e-1) - 1, the bias: the one above is kept for infinities",
     lambda c: choose(c, off=1)),
    ("you gave up too early: try the formats with fewer digits before you return None", lambda c: None),
    ("where nothing works, return None", lambda c: choose(c, overflow=False, headroom=False) or (c.formats[0][0], 0)),
)  # fmt: skip
