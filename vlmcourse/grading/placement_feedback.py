"""What is wrong with placements of layers: the form of one answer, and the misconception behind many.

Enters: a learner's placements. Leaves: layers of each stage or what is wrong with the form; one sentence about the
answers that are not the best, or none.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from vlmcourse.grading.checks import as_number
from vlmcourse.grading.placement_objectives import EXACT
from vlmcourse.grading.placement_strategies import NEAR_BEST, STRATEGIES, Matches, Strategy
from vlmcourse.grading.placements import Placement, best_counts, credit, slowest

MIN_TELLING = 3
"""Wrong answers from which a misconception may be told."""
MIN_SHARE = 0.85
"""Share of the answers that a strategy must give to be named."""


def read_placement(answer: Any, case: Placement) -> tuple[list[int], str]:
    """Return an answer as layers of each stage, or what is wrong with its form.

    Lists of layer numbers, one a stage, are read too where they are contiguous.
    """
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    num_layers, num_stages = len(case.costs), case.num_stages
    if not isinstance(answer, (list, tuple)):
        is_time = as_number(answer) is not None and math.isclose(float(answer), case.best())
        time = ": this looks like the time of the slowest stage" if is_time and case.best() != num_layers else ""
        return [], f"return a list with the number of layers of each stage, not {type(answer).__name__}{time}"
    if answer and all(isinstance(item, (list, tuple, range)) for item in answer):
        return _read_layers([list(item) for item in answer], num_layers, num_stages)
    if not all(as_number(item) is not None for item in answer):
        return [], f"return whole numbers of layers, not {answer!r:.80}"
    if len(answer) == num_stages and _are_times([float(item) for item in answer], case):
        return [], f"{answer!r:.80} looks like the times of the stages: return how many layers each stage has"
    if not all(float(item).is_integer() for item in answer):
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


def _are_times(answer: list[float], case: Placement) -> bool:
    """Tell whether an answer adds up to the cost of all layers, and not to their number."""
    total = math.fsum(answer)
    return math.isclose(total, math.fsum(case.costs), rel_tol=1e-6) and total != len(case.costs)


def _run_from(layers: Sequence[int]) -> list[int]:
    return list(range(min(layers, default=0), min(layers, default=0) + len(layers)))


def _explain_length(counts: list[int], num_layers: int, num_stages: int) -> str:
    """Say what a list of the wrong length may have been meant for."""
    if len(counts) == num_stages - 1 and all(0 < a < num_layers for a in counts) and counts == sorted(set(counts)):
        return (
            f"{counts} has {len(counts)} entries for {num_stages} stages and looks like cuts: return how many layers "
            "each stage has"
        )
    if len(counts) == num_stages + 1 and counts[0] == 0 and counts[-1] == num_layers and _rise(counts):
        return (
            f"{counts} looks like the layers at which stages begin and end: return how many layers each stage has, the "
            "differences"
        )
    if len(counts) == num_layers and set(counts) <= set(range(num_stages)):
        return "this looks like the stage of each layer: return one number for each stage, how many layers it has"
    return f"{len(counts)} numbers for {num_stages} stages: return one for each stage"


def _rise(counts: list[int]) -> bool:
    return all(before < after for before, after in pairwise(counts))


def _find_fault(counts: list[int], num_layers: int) -> str:
    """Say which rule a list of the right length breaks, or ""."""
    if sum(counts) != num_layers and _rise(counts):
        if counts[-1] == num_layers:
            return (
                f"{counts} looks like running totals, the layer at which each stage ends: return how many layers each "
                "stage has, the differences"
            )
        if counts[0] == 0 and counts[-1] < num_layers:
            return (
                f"{counts} looks like the layer with which each stage begins: return how many layers each stage has, "
                "the differences"
            )
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
    """Return the misconception behind the answers that are not the best, or "": the one that gives most of them.

    A strategy must give most of the wrong answers, and most of all, as the right ones are no accident of it either.
    """
    wrong = [(case, counts) for case, counts in answers if credit(case, counts) < 1]
    if len(wrong) < MIN_TELLING:
        return ""
    found = _find_strategy(STRATEGIES, wrong, answers) or _find_strategy([NEAR_BEST], wrong, answers)
    if found is None:
        return ""
    case, counts = min(wrong, key=lambda pair: len(pair[0].costs))
    return (
        f"{found.what}. With costs {[*case.costs]} on {case.num_stages} stages, {counts} takes "
        f"{slowest(case.costs, counts):.4g} where {best_counts(case.costs, case.num_stages)} takes {case.best():.4g}: "
        f"{found.why}"
    )


def _find_strategy(strategies: Sequence[Strategy], wrong: Answers, answers: Answers) -> Strategy | None:
    """Return the strategy that gives the largest share of the answers, the first of several."""
    found, most = None, MIN_SHARE
    for strategy in strategies:
        for matches in strategy.variants:
            share = min(_share(matches, wrong, most), _share(matches, answers, most))
            if share > most or (share == most and found is None):
                found, most = strategy, share
        if found and most == 1:
            break
    return found


def _share(matches: Matches, answers: Answers, least: float) -> float:
    """Return the share of answers that match, or 0 as soon as it cannot be as much as `least`."""
    missed = 0
    for case, counts in answers:
        missed += not matches(case, counts)
        if missed > (1 - least) * len(answers) + EXACT:
            return 0.0
    return 1 - missed / len(answers)
