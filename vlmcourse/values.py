"""Checks of values that a person has written, and the error that lists all that is wrong with them."""

from __future__ import annotations

import difflib
import math
import numbers
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

FEW_CHOICES = 16
"""So many choices are all named, whatever was written."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message lists every problem found, one a line."""

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{where} has {len(self.problems)} {noun}:\n{lines}")


def check_types(section: object, prefix: str, choices: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a sentence for each field of a dataclass whose value has another type than the field's.

    Args:
        section: the dataclass.
        prefix: what its fields' names begin with in a sentence.
        choices: what a field may be, for those that have a few.
    """
    found = []
    for name, hint in typing.get_type_hints(type(section)).items():
        value = getattr(section, name)
        is_number = hint is float and isinstance(value, int) and not isinstance(value, bool)
        if type(value) is not hint and not is_number:
            rule = f"must be of type {hint.__name__}, not {type(value).__name__}{add_choices(choices.get(name, ()))}"
            found.append(f"{prefix}.{name} = {value!r}: {rule}")
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


def describe_missing(path: Path, noun: str, kind: str) -> str:
    """Say that there is no such file and, where the path would be right from a parent folder, the path from here.

    Args:
        path: of something that is no file.
        noun: what the file is called.
        kind: what the path should be of.
    """
    if os.path.isdir(path):
        return f"{str(path)!r} is a folder: give the path of {kind}"
    there_is_none = f"There is no {noun} {str(path)!r}"
    if path.is_absolute():
        return f"{there_is_none}: give the path of {kind}"
    here = Path.cwd()
    for depth, parent in enumerate(here.parents, start=1):
        if os.path.isfile(parent / path):
            return f"{there_is_none} in the folder {str(here)!r}: did you mean {'../' * depth + str(path)!r}?"
    return f"{there_is_none} in the folder {str(here)!r}: give the path of {kind}, absolute or from there"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint for a mistyped name that gives the nearest known one, or all of them where none is near."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}"


def suggest_choice(value: object, known: Iterable[str]) -> str:
    """Return a hint for a value that must be one of several: all of them where they are few.

    A value is named as meant only if one slip of the hand lies between: 'every' is near 'never' too.
    """
    known, text = list(known), str(value)
    if len(known) > FEW_CHOICES:
        return did_you_mean(text, known)
    near = [repr(each) for each in known if _is_one_slip(text.lower(), each.lower())]
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{meant}choose one of {', '.join(known)}"


def add_choices(known: Iterable[str]) -> str:
    """Return the end of a sentence about a wrong type: what the value may be, or nothing where that is many."""
    known = list(known)
    return f"; choose one of {', '.join(known)}" if 0 < len(known) <= FEW_CHOICES else ""


def _is_one_slip(written: str, meant: str) -> bool:
    """Whether two words differ by at most one letter: another, one more, one less, or two neighbors swapped."""
    if len(written) == len(meant):
        places = [i for i, (ours, theirs) in enumerate(zip(written, meant, strict=True)) if ours != theirs]
        is_swap = len(places) == 2 and places[1] == places[0] + 1
        return len(places) < 2 or (is_swap and {*written[places[0] :][:2]} == {*meant[places[0] :][:2]})
    short, long = sorted((written, meant), key=len)
    return len(long) == len(short) + 1 and any(long[:i] + long[i + 1 :] == short for i in range(len(long)))
