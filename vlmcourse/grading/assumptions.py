"""Which wrong assumptions behind a formula explain all of a learner's numbers.

Enters: answers, a formula of named assumptions, and for each of these the right one and wrong ones with their
sentences. Leaves: the sentences of the fewest wrong assumptions that together give every answer. As one formula has to
give all answers, right ones too, a mistake that only some of them show is never named.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Choice = tuple[str, Any]
"""What to say of an assumption ("" for the right one), and what the formula is given for it."""
Aspects = Mapping[str, Sequence[Choice]]
"""By the name of the formula's argument: the right choice first, then wrong ones, the likelier ones first."""

TOLERANCE = 0.01
"""Relative difference up to which a number counts as right, and as the one that a mistake gives."""
MAX_TOGETHER = 2
"""Wrong assumptions that are tried together."""
FEWEST_ANSWERS = 3
"""Fewer numbers than these prove no mistake."""


def is_near(got: float, expected: float, tolerance: float = TOLERANCE) -> bool:
    """Tell whether a number is another one up to the tolerance."""
    return abs(got - expected) <= tolerance * abs(expected)


def find_assumptions(
    answers: Sequence[tuple[Any, float]], formula: Callable[..., float], aspects: Aspects
) -> list[str]:
    """Return the sentences of the fewest wrong assumptions that give every answer.

    Args:
        answers: each case and the number that was given for it; right ones too.
        formula: called with a case and, by name, one choice of each aspect.
        aspects: see `Aspects`.

    Returns:
        Sentences; none if the answers are right, too few, or given by no known mistake.
    """
    if len(answers) < FEWEST_ANSWERS or not any(got for _, got in answers):
        return []
    for chosen in _choices(aspects):
        values = {name: value for name, (_, value) in chosen.items()}
        if all(is_near(got, formula(case, **values)) for case, got in answers):
            return [sentence for sentence, _ in chosen.values() if sentence]
    return []


def _choices(aspects: Aspects) -> Iterator[dict[str, Choice]]:
    """Yield one choice of each aspect: the right ones, then with one wrong, then with two."""
    right = {name: choices[0] for name, choices in aspects.items()}
    for count in range(MAX_TOGETHER + 1):
        for names in itertools.combinations(aspects, count):
            for wrong in itertools.product(*(aspects[name][1:] for name in names)):
                yield right | dict(zip(names, wrong, strict=True))
