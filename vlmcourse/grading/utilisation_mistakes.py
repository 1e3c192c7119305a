"""Lab 6.1's misconceptions: which wrong assumptions about MFU and HFU give all of a learner's numbers.

Enters: numbers that a learner's function gave. Leaves: sentences to stand behind "It looks as if"; see
`assumptions.py`. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlmcourse.grading.assumptions import Aspects, Choice, find_assumptions
from vlmcourse.grading.utilisation_cases import StepCase, Tower, count_passes

Asked = tuple[StepCase, int]
"""A case, and which of its two numbers: 0 is MFU, 1 is HFU."""
Passes = Callable[[Sequence[Tower]], list[int]]


def _passes_from_the_loss(towers: Sequence[Tower]) -> list[int]:
    """Count as if a frozen tower needed a backward for what is trained behind it."""
    return count_passes(towers[::-1])[::-1]


def _passes_from_the_one_before(towers: Sequence[Tower]) -> list[int]:
    """Count as if a frozen tower had a backward only right behind a trained one, and not behind another frozen one."""
    before = [False, *(is_trained for _, is_trained, _ in towers)]
    return [1 + (is_trained or before[i]) + is_trained for i, (_, is_trained, _) in enumerate(towers)]


WRONG_PASSES: list[Choice] = [
    (
        "you counted a frozen tower three times, as 6 N does: its weights need no gradient, and its inputs need one "
        "only if something before it is trained",
        lambda towers: [3] * len(towers),
    ),
    (
        "you gave a frozen tower no backward at all: behind a trained one it passes the gradient on, which costs "
        "one forward more",
        lambda towers: [3 if is_trained else 1 for _, is_trained, _ in towers],
    ),
    (
        "you gave a frozen tower at the front the gradient of its inputs: nothing before it is trained, so nobody "
        "wants that",
        lambda towers: [2 + is_trained for _, is_trained, _ in towers],
    ),
    (
        "you gave a frozen tower behind a trained one the gradient of its weights too: it needs that of its inputs "
        "only",
        lambda towers: [3 if count > 1 else 1 for count in count_passes(towers)],
    ),
    (
        "you took a backward for as dear as a forward: it makes two products of that size, for the gradient of the "
        "weights and for that of the inputs",
        lambda towers: [1 + (count > 1) for count in count_passes(towers)],
    ),
    (
        "you took a backward for as dear as a forward, and gave every tower one: a trained tower's costs two "
        "forwards, and a frozen one needs at most the gradient of its inputs",
        lambda towers: [2] * len(towers),
    ),
    (
        "you gave a frozen tower a backward where something *behind* it is trained: gradients travel from the loss "
        "to the front, and stop behind the first tower that is trained",
        _passes_from_the_loss,
    ),
    (
        "you looked for a trained tower just before a frozen one only: the gradient passes through *all* frozen towers "
        "behind the first trained one",
        _passes_from_the_one_before,
    ),
    (
        "you left frozen towers out: their forward is needed too",
        lambda towers: [3 * is_trained for _, is_trained, _ in towers],
    ),
    ("you counted forward alone: training needs backward too", lambda towers: [1] * len(towers)),
]
"""Of each tower, in forwards."""


def _count(towers: Sequence[Tower], passes_of: Passes, is_own: bool) -> list[tuple[int, bool]]:
    """Return passes of each tower, and whether it has a backward: by these passes, or as it is right."""
    passes = passes_of(towers)
    return [(count, of > 1) for count, of in zip(passes, passes if is_own else count_passes(towers), strict=True)]


def _choose(passes_of: Passes, is_own: bool = False) -> Callable[[Sequence[Tower]], list[tuple[int, bool]]]:
    return lambda towers: _count(towers, passes_of, is_own)


ASPECTS: Aspects = {
    "passes_of": [
        ("", _choose(count_passes)),
        *((sentence, _choose(passes_of, is_own)) for sentence, passes_of in WRONG_PASSES for is_own in (False, True)),
    ],
    "is_again": [
        ("", lambda is_trained, has_backward, is_marked: is_marked and has_backward),
        (
            "you ran every marked tower again: one without a backward has nothing to recompute for",
            lambda is_trained, has_backward, is_marked: is_marked,
        ),
        (
            "you recomputed trained towers only: a frozen one that has a backward is recomputed too",
            lambda is_trained, has_backward, is_marked: is_marked and is_trained,
        ),
        (
            "you recomputed all towers: only those that are marked run again",
            lambda is_trained, has_backward, is_marked: has_backward,
        ),
        (
            "you ran every tower's forward once more for HFU: only one that is marked and has a backward runs again",
            lambda is_trained, has_backward, is_marked: True,
        ),
        (
            "you took HFU for 4/3 of MFU, as 8 N over 6 N in papers: that is so only where every tower is trained and "
            "marked",
            lambda is_trained, has_backward, is_marked: (1 + has_backward + is_trained) / 3,
        ),
    ],
    "weight_of_again": [
        ("", (0, 1)),
        (
            "you counted recomputation into MFU: it is work of the hardware that training does not need, so it belongs "
            "to HFU alone",
            (1, 1),
        ),
        ("you counted no recomputation into HFU: what runs again is executed too", (0, 0)),
        ("you swapped MFU and HFU: the first is without recomputation", (1, 0)),
        ("you counted backward again as well: only forward runs a second time", (0, 3)),
    ],
    "possible_of": [
        ("", lambda case: case.step_s * case.num_devices),
        (
            "you divided by what *one* device can do: the FLOPs are of a whole step on all devices, so multiply its "
            "peak by their number",
            lambda case: case.step_s,
        ),
        (
            "you left the time of the step out: a peak is FLOPs a second, so a step can have step_s times as many",
            lambda case: case.num_devices,
        ),
        (
            "you divided by the time of the step and not by peak times time: a longer step with the same FLOPs is a "
            "lower utilisation",
            lambda case: case.num_devices / case.step_s,
        ),
        (
            "you divided by the number of devices twice: the peak times their number is what all can do together",
            lambda case: case.step_s * case.num_devices**2,
        ),
    ],
    "unit": [
        ("", lambda share: share),
        ("you returned percent: return a fraction, 0.4 for 40 %", lambda share: 100 * share),
        ("you divided what is possible by what is done: turn it over", lambda share: 1 / share if share else 0.0),
    ],
}


def _formula(
    asked: Asked,
    *,
    passes_of: Callable[[Sequence[Tower]], list[tuple[int, bool]]],
    is_again: Callable[[bool, bool, bool], float],
    weight_of_again: tuple[int, int],
    possible_of: Callable[[StepCase], float],
    unit: Callable[[float], float],
) -> float:
    case, which = asked
    assert case.peak_flop_per_s is not None, "cases without a peak have no number"
    flops = 0.0
    for (forward, is_trained, is_marked), (count, has_backward) in zip(
        case.towers, passes_of(case.towers), strict=True
    ):
        flops += forward * (count + weight_of_again[which] * is_again(is_trained, has_backward, is_marked))
    return unit(flops / (possible_of(case) * case.peak_flop_per_s))


def explain_utilisation(answers: Sequence[tuple[Asked, float]]) -> list[str]:
    """Name the wrong assumptions behind all numbers of cases that have a peak."""
    return find_assumptions(answers, _formula, ASPECTS)
