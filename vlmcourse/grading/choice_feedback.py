"""Exercise 4.3's misconceptions in part c: each is a rule that gives the answers which the mistake would give.

Enters: all answers with their cases. Leaves: the sentence of the one mistake, or of the one pair of mistakes, that
gives every answer, right and wrong ones; "" if none does, or if several do.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from vlmcourse.grading.choice_cases import Answer, Choice, choose

Answers = Sequence[tuple[Choice, Answer]]
"""Cases with what the learner's function returned."""
SOME_ANSWERS = 3
"""So many answers, at least, must be there before a mistake is named."""


def _in_given_order(form: tuple[str, int, int]) -> int:
    return 0


def _most_range(form: tuple[str, int, int]) -> int:
    return -form[1]


CHOICE_MISTAKES: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("you left no headroom: the largest gradient of the next step may be larger", {"headroom": False}),
    (
        "you did not look at the top: a scale that saves the small ones may make the large ones infinite",
        {"overflow": False},
    ),
    (
        "you counted all towers together: a small tower can be lost as a whole and hardly show in the sum; look at "
        "each",
        {"together": True},
    ),
    (
        "subnormal numbers count as kept: a gradient is not lost below the smallest normal number, but below half of "
        "the smallest subnormal one",
        {"normal": True},
    ),
    (
        "part b's rule holds here too: between half of the smallest subnormal number and that number a gradient is "
        "rounded up, so one exponent more is kept",
        {"rounded": False},
    ),
    (
        "you took the largest scale that fits: the task asks for the smallest that loses little enough",
        {"largest": True},
    ),
    ("you used no scale: one power of two multiplies all gradients, and more small ones stay", {"powers": False}),
    ("you allowed no loss at all: max_lost of each tower's gradients may become zero", {"max_lost": 0.0}),
    (
        "formats come in no order: take the one with the most mantissa bits of those that work",
        {"order": _in_given_order},
    ),
    (
        "you preferred range: of the formats that work, the one with the most mantissa bits keeps the most digits",
        {"order": _most_range},
    ),
    ("you looked at the vision tower only: the loss has one scale for all towers", {"only": "vision"}),
    ("you looked at the projector only: the loss has one scale for all towers", {"only": "projector"}),
    ("you looked at the language tower only: the loss has one scale for all towers", {"only": "language"}),
    ("the largest exponent of a format is 2^(e-1) - 1, the bias: the one above is kept for infinities", {"off": 1}),
    ("e + power + headroom may be as large as the bias: you left one exponent unused", {"off": -1}),
)
"""What to say, and the arguments of `choose` that give the mistake's answers."""


def explain_choices(answers: Answers) -> str:
    """Return the sentence of the mistake behind a learner's answers, or "".

    Args:
        answers: all of them, right and wrong: a mistake must give the right ones too.
    """
    if len(answers) < SOME_ANSWERS or all(got == case.answer() for case, got in answers):
        return ""
    if all(got == answers[0][1] for _, got in answers):
        return _same_for_all(answers[0][1])
    if all((got == case.answer()) == (case.answer() is not None) for case, got in answers):
        return "where nothing works, return None"
    single = [sentence for sentence, changes in CHOICE_MISTAKES if _gives(changes, answers)]
    if single:
        return single[0] if len(single) == 1 else ""
    pairs = [
        f"{one}. And {other}"
        for (one, changes), (other, more) in itertools.combinations(CHOICE_MISTAKES, 2)
        if not changes.keys() & more.keys() and _gives({**changes, **more}, answers)
    ]
    return pairs[0] if len(pairs) == 1 else ""


def _gives(changes: Mapping[str, Any], answers: Answers) -> bool:
    return all(choose(case, **changes) == got for case, got in answers)


def _same_for_all(answer: Answer) -> str:
    if answer is None:
        return "you gave up too early: try the formats with fewer digits, and larger powers, before you return None"
    return f"your answer is {answer} whatever the towers and the headroom are: it must follow from them"
