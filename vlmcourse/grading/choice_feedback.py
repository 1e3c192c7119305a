"""Exercise 4.3's misconceptions in part c: each is a rule that gives the answers which the mistake would give.

Enters: all answers with their cases. Leaves: the sentence of the one mistake, or of the one pair of mistakes, that
gives every answer, right and wrong ones; "" if none does, or if several do.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from vlmcourse.grading.choice_cases import Answer, Choice, choose, lost

Answers = Sequence[tuple[Choice, Answer]]
"""Cases with what the learner's function returned."""
SOME_ANSWERS = 3
"""So many answers, at least, must be there before a mistake is named."""


def _in_given_order(form: tuple[str, int, int]) -> int:
    return 0


def _most_range(form: tuple[str, int, int]) -> int:
    return -form[1]


def _fewest_digits(form: tuple[str, int, int]) -> int:
    return form[2]


_ALL_TOWERS = "only: the loss has one scale for all towers, and none may lose more than max_lost"
VISION_ONLY = f"you looked at the vision tower {_ALL_TOWERS}"
LANGUAGE_ONLY = f"you looked at the language tower {_ALL_TOWERS}"
TOO_CAREFUL = (
    "you allowed less loss than the task: max_lost is a fraction of each tower's gradients (not of its exponents), and "
    "that fraction may become zero"
)
CHOICE_MISTAKES: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("you left no headroom: the largest gradient of the next step may be larger", {"headroom": False}),
    (
        "you did not look at the top: a scale that saves the small ones may make the large ones infinite",
        {"top": "none"},
    ),
    ("the tower with the largest gradient limits the scale: you let another one do so", {"top": "smallest"}),
    (
        "you counted all towers together: a small tower can be lost as a whole and hardly show in the sum; look at "
        "each",
        {"lost_by": "together"},
    ),
    (
        "you were content with one tower: the one that loses most decides, as each may lose at most max_lost",
        {"lost_by": "any"},
    ),
    (
        "you took the mean over the towers: one that loses much hides behind those that lose nothing; look at each",
        {"lost_by": "mean"},
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
    (TOO_CAREFUL, {"lost_by": "nothing"}),
    ("at most max_lost may be lost: exactly that much is allowed too (<=, not <)", {"lost_by": "less"}),
    (
        "formats come in no order: take the one with the most mantissa bits of those that work",
        {"order": _in_given_order},
    ),
    (
        "you preferred range: of the formats that work, the one with the most mantissa bits keeps the most digits",
        {"order": _most_range},
    ),
    (
        "you tried few mantissa bits first: of the formats that work, the one with the most keeps the most digits",
        {"order": _fewest_digits},
    ),
    ("you tried one format only: where it fails, one with fewer mantissa bits may work", {"first_only": True}),
    (VISION_ONLY, {"only": "vision"}),
    (VISION_ONLY, {"lost_by": "first"}),
    (f"you looked at the projector {_ALL_TOWERS}", {"only": "projector"}),
    (LANGUAGE_ONLY, {"only": "language"}),
    (LANGUAGE_ONLY, {"lost_by": "last"}),
    ("the largest exponent of a format is 2^(e-1) - 1, the bias: the one above is kept for infinities", {"off": 1}),
    ("e + power + headroom may be as large as the bias: you left one exponent unused", {"off": -1}),
    ("the bias is 2^(e-1) - 1, not 2^(e-1): both ends of a format follow from it", {"bias": 1}),
    ("the bias is 2^(e-1) - 1, not 2^(e-1) - 2: both ends of a format follow from it", {"bias": -1}),
)
"""What to say, and the arguments of `choose` that give the mistake's answers."""
ONE_OF_SEVERAL = {
    "top": "the largest gradient of all towers limits the scale: e + power + headroom must not exceed the bias",
    "lost_by": "look again at what may be lost: in each tower, at most the fraction max_lost of its own gradients",
    "order": "of the formats that work, take the one with the most mantissa bits, wherever it stands in the list",
}
"""What to say where several mistakes about one argument of `choose` give the same answers."""


def explain_choices(answers: Answers) -> str:
    """Return the sentence of the mistake behind a learner's answers, or "".

    Args:
        answers: all of them, right and wrong: a mistake must give the right ones too.
    """
    if len(answers) < SOME_ANSWERS or all(got == case.answer() for case, got in answers):
        return ""
    if all(got == answers[0][1] for _, got in answers):
        return _same_for_all(answers[0][1])
    if any(got and got[1] < 0 for _, got in answers):
        return "power is 0 or larger: where no scale is needed, it is 0"
    if all(got == (best and (best[0], 2 ** best[1])) for case, got in answers for best in [case.answer()]):
        return "return the power itself, not the scale 2^power"
    if all((got == case.answer()) == (case.answer() is not None) for case, got in answers):
        return "where nothing works, return None"
    single = {sentence: changes for sentence, changes in CHOICE_MISTAKES if _gives(changes, answers)}
    if len(single) == 1:
        return next(iter(single))
    if single:
        about = {name for changes in single.values() for name in changes}
        return ONE_OF_SEVERAL.get(about.pop(), "") if len(about) == 1 else ""
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


def broken_rule(case: Choice, answer: Answer) -> str:
    """Return which rule of the task a wrong answer to one case breaks first, with the numbers that show it."""
    best = case.answer()
    if answer is None:
        return f"{best[0]} works with some power" if best else ""
    form = next((form for form in case.formats if form[0] == answer[0]), None)
    if form is None:
        return "no format of the case has that name"
    power, (_, exponent_bits, mantissa_bits) = answer[1], form
    if power < 0:
        return "power is 0 or larger"
    bias = 2 ** (exponent_bits - 1) - 1
    tower, top = max(((name, max(counts)) for name, counts in case.towers.items()), key=lambda pair: pair[1])
    if top + power + case.headroom > bias:
        used = f"e + power + headroom = {top} + {power} + {case.headroom} = {top + power + case.headroom}"
        return f"{used} of {tower} is above the bias, {bias}"
    shares = {name: lost(counts, -bias - mantissa_bits - power) for name, counts in case.towers.items()}
    tower = max(shares, key=lambda name: shares[name])
    if shares[tower] > case.max_lost:
        return f"{tower} loses the fraction {shares[tower]:.3g} of its gradients, more than max_lost"
    if best is None or best[0] == answer[0]:
        return "it works, but so does a smaller power"
    return f"it works, but so does {best[0]}, which has more mantissa bits"
