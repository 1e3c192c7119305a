"""Checks of values that a person has written, and the error that lists all that is wrong with them."""

from __future__ import annotations

import difflib
import math
import numbers
import typing
from collections.abc import Callable, Sequence


class ConfigError(ValueError):
    """A configuration that cannot be used; the message lists every problem found, one a line."""

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{where} has {len(self.problems)} {noun}:\n{lines}")


def check_types(section: object, prefix: str) -> list[str]:
    """Return a sentence for each field of a dataclass whose value has another type than the field's."""
    found = []
    for name, hint in typing.get_type_hints(type(section)).items():
        value = getattr(section, name)
        is_number = hint is float and isinstance(value, int) and not isinstance(value, bool)
        if type(value) is not hint and not is_number:
            found.append(f"{prefix}.{name} = {value!r}: must be of type {hint.__name__}, not {type(value).__name__}")
    return found


def at_least_one(section: object, prefix: str, *names: str) -> list[str]:
    """Return a sentence for each named field of `section` that is below 1."""
    return check_values(section, prefix, names, lambda value: value >= 1, "must be 1 or greater")


def at_least_zero(section: object, prefix: str, *names: str) -> list[str]:
    """Return a sentence for each named field of `section` that is below 0."""
    return check_values(section, prefix, names, lambda value: value >= 0, "must be 0 or greater")


def check_values(
    section: object, prefix: str, names: Sequence[str], is_right: Callable[[float], bool], rule: str
) -> list[str]:
    """Return a sentence for each named field of `section` that is not finite or breaks the rule."""
    found = []
    for name in names:
        value = getattr(section, name)
        if isinstance(value, float) and not math.isfinite(value):
            found.append(f"{prefix}.{name} = {value}: must be a finite number")
        elif not is_right(value):
            found.append(f"{prefix}.{name} = {value}: {rule}")
    return found


def check_counts(least: int, **counts: object) -> None:
    """Refuse arguments that count something and cannot.

    Args:
        least: the smallest count that makes sense.
        counts: the arguments by name.

    Raises:
        ValueError: naming every one that is not a whole number, or is below `least`.
    """
    wrong = [
        f"{name} = {value!r}"
        for name, value in counts.items()
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least
    ]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: must be a whole number, {least} or greater; change it")


def did_you_mean(word: str, known: typing.Iterable[str]) -> str:
    """Return a hint that names the nearest known word, or all of them where none is near."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}"
