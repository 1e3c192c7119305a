"""Lab 6.1, graded: MFU and HFU of steps of models with several towers.

Enters: a learner's function. Leaves: points (always a number from 0 to the cell's maximum) and printed feedback that
names the misconception. The cases of the hidden tests come from the same generators under another seed.
"""

from __future__ import annotations

from typing import Any

from vlmcourse.grading.checks import Outcome, ask_each, award, explain_signature, is_close
from vlmcourse.grading.plain import call_plainly
from vlmcourse.grading.scaling_answers import Pair, read_pair
from vlmcourse.grading.utilisation_cases import FLAGS, StepCase, make_steps, right_utilisation
from vlmcourse.grading.utilisation_mistakes import explain_utilisation

ANSWERED_BY = "vlmcourse.grading.utilisation_cases"
SHARES = {"trained": 1.0, "frozen": 1.0, "recomputed": 1.5, "no peak": 0.5}
"""Of 4 points, by part; a part's cases share them, and MFU and HFU are half a case each."""
NO_PEAK = "without a peak there is neither: return (None, None)"


def check_utilisation(function: Any, points: float, seed: int, num_cases: int) -> float:
    """Grade `utilisation(towers, step_s, num_devices, peak_flop_per_s)` on cases of each part.

    Args:
        function: the learner's function.
        points: the cell's maximum.
        seed: of the cases.
        num_cases: of each part.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    wrong_signature = explain_signature(function, "towers", "step_s", "num_devices", "peak_flop_per_s")
    if wrong_signature:
        print(wrong_signature)
        return 0.0
    worth = dict.fromkeys(SHARES, 0.0)
    numbers: list[tuple[StepCase, Pair]] = []

    def judge(asked: tuple[str, StepCase], outcome: Outcome) -> tuple[Pair | None, float, str]:
        part, case = asked
        pair, value, problem = _judge(case, outcome)
        worth[part] += value
        if pair is not None:
            numbers.append((case, pair))
        return pair, value, f"{case}: {problem}"

    cases = [(part, case) for part in FLAGS for case in make_steps(part, seed, num_cases)]
    asked = ask_each("utilisation", cases, lambda each: _ask(function, each[1]), judge)
    if asked is None:
        return 0.0
    answers = [((case, which), pair[which]) for case, pair in numbers for which in range(2)]
    for number, sentence in enumerate(explain_utilisation(answers) if asked.num_wrong else ()):
        print(f"{'And' if number else 'It looks as if'} {sentence}.")
    print("utilisation: " + ", ".join(f"{part} {value:g} of {num_cases}" for part, value in worth.items()))
    has_numbers = any(
        value for part, value in worth.items() if part != "no peak"
    )  # else None for all would earn points
    earned = sum(SHARES[part] * value / num_cases for part, value in worth.items()) if has_numbers else 0.0
    return award(points, earned / sum(SHARES.values()), 1)


def _ask(function: Any, case: StepCase) -> Outcome:
    if not callable(function):
        return Outcome(error=f"this is not a function but {type(function).__name__}")
    arguments = (list(case.towers), case.step_s, case.num_devices, case.peak_flop_per_s)
    return call_plainly(function, *arguments, module=ANSWERED_BY)


def _judge(case: StepCase, outcome: Outcome) -> tuple[Pair | None, float, str]:
    """Return an answer's two numbers if it has any, its worth from 0 to 1, and what is wrong with it."""
    right = right_utilisation(case)
    if case.peak_flop_per_s is None:
        if outcome.error:
            return None, 0.0, f"{NO_PEAK} ({outcome.error})"
        is_right = isinstance(outcome.value, (tuple, list)) and list(outcome.value) == [None, None]
        return None, float(is_right), f"{NO_PEAK}, not {outcome.value!r:.60}; a 0 would be a lie"
    if outcome.error:
        return None, 0.0, outcome.error
    pair = read_pair(outcome.value)
    if pair is None:
        return None, 0.0, f"return two numbers, MFU and HFU, not {outcome.value!r:.60}"
    wrong = [
        f"{name} {got:.4g}"
        for name, got, expected in zip(("MFU", "HFU"), pair, right, strict=True)
        if expected is None or not is_close(got, expected)
    ]
    return pair, 1 - len(wrong) / 2, f"not right: {' and '.join(wrong)}"
