"""What a learner's functions of exercise 4.6 may return, in any of the usual containers, read as plain numbers.

Enters: any value. Leaves: numbers, or None where the value is not what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmcourse.grading.checks import as_number

Pair = tuple[float, float]


def read_pair(value: Any) -> Pair | None:
    """Return an answer of two numbers; None if it is none."""
    if isinstance(value, (str, bytes, Mapping)):
        return None
    try:
        numbers = [as_number(number) for number in value]
    except TypeError:
        return None
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        return None
    return numbers[0], numbers[1]


def read_gains(answer: Any) -> dict[str, float] | None:
    """Return gains by name in the order given; None if the answer is no list of pairs."""
    pairs = list(answer.items()) if isinstance(answer, Mapping) else answer
    if isinstance(pairs, (str, bytes)):
        return None
    found: dict[str, float] = {}
    try:
        for name, gain in pairs:
            number = as_number(gain)
            if not isinstance(name, str) or number is None or name in found:
                return None
            found[name] = number
    except (TypeError, ValueError):
        return None
    return found
