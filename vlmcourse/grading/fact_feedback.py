"""Exercise 4.3's misconceptions in part a: each is a function that gives the answer of the mistake.

Enters: answers with their formats. Leaves: the sentence of the first mistake that gives all of them. Part b:
`format_feedback.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vlmcourse.grading.format_cases import spec
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


BIASES: Sequence[tuple[str, Callable[[int], int]]] = (
    ("2^(e-1)", lambda e: 2 ** (e - 1)),
    ("2^(e-1) - 2", lambda e: 2 ** (e - 1) - 2),
    ("2^(e-1) + 1", lambda e: 2 ** (e - 1) + 1),
    ("2^e - 1", lambda e: 2**e - 1),
    ("2^e - 2", lambda e: 2**e - 2),
)
"""Wrong ones, of a number of exponent bits."""
BIASED = ("max", "smallest_normal", "smallest_subnormal")
"""The facts that a wrong bias makes wrong, all by the same power of two."""


def explain_bias(answers: Sequence[tuple[FloatFormat, Mapping[str, Any]]], same: Callable[[Any, Any], bool]) -> str:
    """Return the sentence of a wrong bias that explains all three facts that hang on it; "" if none does.

    Args:
        answers: pairs of a format and the learner's facts, of all formats asked.
        same: whether two numbers are one.
    """
    for written, bias in BIASES:
        if all(
            same(facts.get(name), getattr(form, name) * 2.0 ** (form.bias - bias(form.exponent_bits)))
            for form, facts in answers
            for name in BIASED[0 if form.has_infinity else 1 :]  # there max is often wrong for another reason too
        ):
            return f"the bias is 2^(e-1) - 1, not {written}: {', '.join(BIASED[:2])} and {BIASED[2]} follow from it"
    return ""


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
        (
            "a power of two is too much: the mantissa ends one step below 2, so max = (2 - 2^-m) x 2^exponent; and "
            "has_infinity=False was ignored: then the highest exponent holds numbers too",
            lambda f: 2.0 ** (f.bias + 1),
        ),
        ("you left the mantissa out: with all its bits set it is nearly 2, not 1", lambda f: 2.0**f.max_exponent),
        (
            "you left the mantissa out: with all its bits set it is nearly 2, not 1; and has_infinity=False was "
            "ignored: then the highest exponent holds numbers too",
            lambda f: 2.0**f.bias,
        ),
        (
            "your exponent is one too low: the highest stored exponent of a number is 2^e - 2, and without infinities "
            "2^e - 1",
            lambda f: f.max / 2,
        ),
        *(
            (
                "a stored exponent is not the exponent yet: subtract the bias, 2^(e-1) - 1",
                lambda f, all_ones=all_ones, power=power: (
                    (1.0 if power else 2 - f.epsilon) * 2.0 ** (2**f.exponent_bits - 2 + all_ones)
                ),
            )
            for all_ones in (0, 1)
            for power in (False, True)
        ),
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
        (
            "this is epsilon, the step at 1: the smallest subnormal number is the step at the smallest normal one",
            lambda f: f.epsilon,
        ),
        (
            "half of the smallest normal number is subnormal, but not the smallest: that is one step, 2^-m of the "
            "smallest normal number",
            lambda f: f.smallest_normal / 2,
        ),
    ),
    "epsilon": (
        (
            "this is half a step, the largest rounding error: epsilon is from 1 to the next number, 2^-m",
            lambda f: f.epsilon / 2,
        ),
        ("epsilon is 2^-m: the leading 1 is not among the stored bits", lambda f: f.epsilon * 2),
        ("this is a step at the smallest numbers: epsilon is the step at 1", lambda f: f.smallest_subnormal),
        ("this is the step at max: epsilon is the step at 1", lambda f: f.step_at(f.max)),
        ("this is the step at the largest numbers: epsilon is the step at 1", lambda f: f.epsilon * 2.0**f.bias),
    ),
    "decimal_digits": (
        (
            "the leading 1 is a digit too: m + 1 significant bits (11 bits of fp16 are 3.3 digits)",
            lambda f: f.mantissa_bits * math.log10(2),
        ),
        ("do not round down: 11 bits are 3.311 digits", lambda f: math.floor(f.decimal_digits)),
        ("do not round: 11 bits are 3.311 digits", lambda f: round(f.decimal_digits)),
        ("do not round to one decimal: 11 bits are 3.311 digits", lambda f: round(f.decimal_digits, 1)),
        (
            "these are the decimal digits that survive a round trip (C's FLT_DIG): asked are the significant bits, the "
            "leading 1 included, in decimal digits, not rounded down",
            lambda f: math.floor(f.mantissa_bits * math.log10(2)),
        ),
        (
            "the leading 1 is a bit more, not a decimal digit more: m + 1 bits, times log10(2)",
            lambda f: 1 + f.mantissa_bits * math.log10(2),
        ),
        (
            "sign and exponent bits say nothing about digits: only the m bits of the mantissa and the leading 1 count",
            lambda f: f.bits * math.log10(2),
        ),
        (
            "exponent bits say nothing about digits: only the m bits of the mantissa and the leading 1 count",
            lambda f: (f.bits - 1) * math.log10(2),
        ),
        ("these are bits, not decimal digits: multiply by log10(2)", lambda f: f.significant_bits),
        ("log10, not ln: a decimal digit is a factor of 10", lambda f: f.significant_bits * math.log(2)),
    ),
}
"""By fact, tried on the formats for which it was wrong."""
