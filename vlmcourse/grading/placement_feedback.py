"""What is wrong with placements of layers: the form of one answer, and the misconception behind many.

Enters: a learner's placements. Leaves: layers of each stage or what is wrong with the form; one sentence about the
answers that are not the best, or none.
"""

from __future__ import annotations

import math
import numbers
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from vlmcourse.grading.checks import as_number
from vlmcourse.grading.placements import EXACT, Placement, best_counts, credit, slowest, stage_costs

MIN_TELLING = 3
"""Wrong answers from which a misconception may be told."""


def read_placement(answer: Any, case: Placement) -> tuple[list[int], str]:
    """Return an answer as layers of each stage, or what is wrong with its form.

    Lists of layer numbers, one a stage, are read too where they are contiguous.
    """
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    num_layers, num_stages = len(case.costs), case.num_stages
    if not isinstance(answer, (list, tuple)):
        return [], f"return a list with the number of layers of each stage, not {type(answer).__name__}"
    if answer and all(isinstance(item, (list, tuple, range)) for item in answer):
        return _read_layers([list(item) for item in answer], num_layers, num_stages)
    if not all(as_number(item) is not None and float(item).is_integer() for item in answer):
        return [], f"return whole numbers of layers, not {answer!r:.80}"
    counts = [int(item) for item in answer]
    if len(counts) != num_stages:
        return [], _explain_length(counts, num_layers, num_stages)
    return counts, _find_fault(counts, num_layers)


def _read_layers(stages: list[list[Any]], num_layers: int, num_stages: int) -> tuple[list[int], str]:
    """Read a placement that names the layers of each stage."""
    placed = [layer for stage in stages for layer in stage]
    if len(stages) != num_stages:
        return [], f"{len(stages)} stages, and {num_stages} were asked for"
    if not all(isinstance(layer, numbers.Integral) for layer in placed) or sorted(placed) != list(range(num_layers)):
        return [], f"every layer from 0 to {num_layers - 1} must stand on exactly one stage"
    if placed != list(range(num_layers)):
        split = (number for number, layers in enumerate(stages) if sorted(layers) != _run_from(layers))
        stage = next(split, None)
        if stage is None:
            return [], "the stages must follow the order of the layers, and so must the layers of a stage"
        return [], (
            f"stage {stage} holds layers {', '.join(map(str, stages[stage][:6]))}: the layers of a stage must follow "
            "one another, or every activation travels back and forth between ranks"
        )
    counts = [len(stage) for stage in stages]
    return counts, _find_fault(counts, num_layers)


def _run_from(layers: Sequence[int]) -> list[int]:
    return list(range(min(layers, default=0), min(layers, default=0) + len(layers)))


def _explain_length(counts: list[int], num_layers: int, num_stages: int) -> str:
    """Say what a list of the wrong length may have been meant for."""
    if len(counts) == num_stages - 1 and all(0 < a < num_layers for a in counts) and counts == sorted(set(counts)):
        return (
            f"{counts} has {len(counts)} entries for {num_stages} stages and looks like cuts: return how many layers "
            "each stage has"
        )
    if len(counts) == num_layers and set(counts) <= set(range(num_stages)):
        return "this looks like the stage of each layer: return one number for each stage, how many layers it has"
    return f"{len(counts)} numbers for {num_stages} stages: return one for each stage"


def _find_fault(counts: list[int], num_layers: int) -> str:
    """Say which rule a list of the right length breaks, or ""."""
    if min(counts) < 0:
        return f"{counts} has a negative number of layers"
    if sum(counts) != num_layers:
        return f"{counts} places {sum(counts)} layers, and there are {num_layers}"
    if 0 in counts:
        return (
            f"{counts}: stage {counts.index(0)} is empty, and its rank would only pass on what it gets; every stage "
            "needs a layer"
        )
    return ""


# --- Many answers ---------------------------------------------------------------------------------------------------

Answers = Sequence[tuple[Placement, list[int]]]
"""Cases, and a learner's placements of valid form."""


def explain_placements(answers: Answers) -> str:
    """Return the misconception behind the answers that are not the best, or ""."""
    wrong = [(case, counts) for case, counts in answers if credit(case, counts) < 1]
    if len(wrong) < MIN_TELLING:
        return ""
    if _share(max(counts) - min(counts) <= 1 for _, counts in wrong) >= 0.9:
        return "you give each stage equally many layers: what must be equal is the time of a stage, and layers differ"
    for zeroed, words in (((-1,), "last layer"), ((0,), "first layer"), ((0, -1), "first and the last layer")):
        if _share(_is_best_without(case, counts, zeroed) for case, counts in wrong) >= 0.9:
            return f"you leave the cost of the {words} out: embedding and output stand on a stage like any other layer"
    if _share(_has_least_squares(case, counts) for case, counts in wrong) >= 0.9:
        return (
            "you make the stages as alike as possible (the least squares): only the slowest stage counts, and what the "
            "faster ones do below it costs nothing"
        )
    for fill in FILLS:
        telling = [(case, counts) for case, counts in answers if credit(case, fill(case)) < 1]
        if len(telling) >= MIN_TELLING and _share(fill(case) == counts for case, counts in telling) >= 0.8:
            return _explain_greedy([(case, counts) for case, counts in telling if fill(case) == counts])
    return ""


def _share(truths: Any) -> float:
    found = list(truths)
    return sum(found) / len(found) if found else 0.0


def _is_best_without(case: Placement, counts: list[int], zeroed: tuple[int, ...]) -> bool:
    costs = list(case.costs)
    for layer in zeroed:
        costs[layer] = 0.0
    return slowest(costs, counts) <= slowest(costs, best_counts(costs, case.num_stages)) * (1 + EXACT)


def _has_least_squares(case: Placement, counts: list[int]) -> bool:
    least = stage_costs(case.costs, best_counts(case.costs, case.num_stages, power=2))
    return math.isclose(
        math.fsum(cost**2 for cost in stage_costs(case.costs, counts)),
        math.fsum(cost**2 for cost in least),
        rel_tol=1e-9,
    )


def _explain_greedy(answers: Answers) -> str:
    """Name the shortest case in which filling up to the mean fails."""
    case, counts = min(answers, key=lambda pair: len(pair[0].costs))
    mean = math.fsum(case.costs) / case.num_stages
    better = best_counts(case.costs, case.num_stages)
    return (
        f"you fill one stage after the other up to the mean. With costs {[*case.costs]} on {case.num_stages} stages "
        f"the mean is {mean:.4g}, and {counts} takes {slowest(case.costs, counts):.4g} where {better} takes "
        f"{case.best():.4g}: each stage decides alone, and what is left falls to the others"
    )


def fill_to_mean(case: Placement, rule: str, renew: bool) -> list[int]:
    """Place layers greedily: close a stage at the mean.

    Args:
        case: what to place.
        rule: close "before" a layer that would exceed the mean, "after" the one that reaches it, or at the "nearest".
        renew: whether the mean is that of the layers and stages still left.
    """
    costs, left = case.costs, case.num_stages
    counts, start = [], 0
    mean = math.fsum(costs) / left
    while left > 1:
        mean = math.fsum(costs[start:]) / left if renew else mean
        end, total = start + 1, costs[start]
        while end < len(costs) - (left - 1):
            over = total + costs[end] - mean
            if (
                (rule == "before" and over > 1e-9)
                or (rule == "after" and total >= mean - 1e-9)
                or (rule == "nearest" and over > mean - total)
            ):
                break
            total, end = total + costs[end], end + 1
        counts.append(end - start)
        start, left = end, left - 1
    return [*counts, len(costs) - start]


def cut_at_multiples(case: Placement, nearest: bool) -> list[int]:
    """Place layers by cutting where the running sum reaches, or comes nearest to, each multiple of the mean."""
    total = list(accumulate(case.costs))
    cuts = [0]
    for stage in range(1, case.num_stages):
        goal = total[-1] * stage / case.num_stages
        cut = bisect_left(total, goal - 1e-9) + 1
        if nearest and cut > 1 and goal - total[cut - 2] <= total[cut - 1] - goal:
            cut -= 1
        cuts.append(min(max(cut, cuts[-1] + 1), len(total) - (case.num_stages - stage)))
    return [end - start for start, end in pairwise([*cuts, len(total)])]


FILLS: tuple[Callable[[Placement], list[int]], ...] = (
    *(
        lambda case, rule=rule, renew=renew: fill_to_mean(case, rule, renew)
        for rule in ("before", "after", "nearest")
        for renew in (False, True)
    ),
    lambda case: cut_at_multiples(case, nearest=False),
    lambda case: cut_at_multiples(case, nearest=True),
)
"""Ways to fill stages up to the mean."""
