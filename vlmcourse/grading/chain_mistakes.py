"""What is wrong with plans of recomputation: rules of thumb and wrong counts that give the same answers, symptoms.

Enters: cases, the segments answered, cases that were refused. Leaves: a sentence that goes on from "It looks as if", or
"".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from vlmcourse.grading.chain_cases import LARGEST_ALONE, SEGMENT_LEFT_OUT, WITHOUT_INNER_INPUTS
from vlmcourse.grading.chains import (
    ChainCase,
    Counting,
    Segments,
    best_segments,
    cost,
    is_best_by,
    kept_bytes,
    least_cost,
    lowest_limit,
    peak_bytes,
)

Answer = tuple[ChainCase, Segments]


def _equal_segments(case: ChainCase, length: int) -> Segments:
    n = case.num_layers
    return [(start, min(start + length, n)) for start in range(0, n, length)]


def _is_whole(case: ChainCase, segments: Segments) -> bool:
    return sum(end - start for start, end in segments) == case.num_layers


def _is_sqrt(case: ChainCase, segments: Segments) -> bool:
    lengths = {end - start for start, end in segments[:-1]} or {segments[0][1] - segments[0][0]} if segments else set()
    root = math.sqrt(case.num_layers)
    return _is_whole(case, segments) and lengths <= {math.floor(root), math.ceil(root)}


def _ends_needlessly(case: ChainCase, segments: Segments) -> bool:
    """Whether a plan keeps the limit, and still would without its last segment."""
    if not segments or segments[-1][1] != case.num_layers:
        return False
    return max(peak_bytes(case, segments[:-1]), peak_bytes(case, segments)) <= case.limit


def _would_fit_without(case: ChainCase, segments: Segments, part: str) -> bool:
    """Whether an answer that breaks the limit would keep it if a part of the bytes were not there."""
    if peak_bytes(case, segments) <= case.limit:
        return False
    if part == "live":
        return kept_bytes(case, segments) <= case.limit
    zeros = (0,) * case.num_layers
    return peak_bytes(dataclasses.replace(case, **{part: zeros}), segments) <= case.limit


def _is_lowest(case: ChainCase, segments: Segments) -> bool:
    return peak_bytes(case, segments) == lowest_limit(case) < case.limit


def _has_fewest_layers(case: ChainCase, segments: Segments) -> bool:
    alike = dataclasses.replace(case, costs=(1,) * case.num_layers)
    best = best_segments(alike)
    fits = peak_bytes(case, segments) <= case.limit
    return best is not None and fits and cost(alike, segments) == cost(alike, list(best))


def _are_single(case: ChainCase, segments: Segments) -> bool:
    best = best_segments(case) or ()
    return all(end - start == 1 for start, end in segments) and any(end - start > 1 for start, end in best)


LIVE = (
    "you leave out the segment that backward makes again, or a part of it: while it runs backward, the inputs and "
    "insides of all its layers are alive"
)
Symptom = tuple[str, Callable[[ChainCase, Segments], bool]]
SYMPTOMS: tuple[Symptom, ...] = (
    (
        "you recompute nothing, though the limit is broken: count all that a layer keeps, its input and `inside`",
        lambda case, segments: not segments,
    ),
    (
        "you recompute every layer by itself: where the limit leaves room, each layer that stays saves its forward",
        lambda case, segments: len(segments) == case.num_layers,
    ),
    (
        "you cut the chain into about sqrt(L) equal segments: that rule is for equal layers, and knows no limit",
        _is_sqrt,
    ),
    (
        "you recompute all layers, in segments: where the limit leaves room, layers can stay",
        _is_whole,
    ),
    (
        "you recompute the last segment: backward makes it again the moment forward has dropped it, so leaving it out "
        "has the same peak and costs less",
        _ends_needlessly,
    ),
    (
        LIVE,
        lambda case, segments: _would_fit_without(case, segments, "live"),
    ),
    (
        "you leave out the inputs, which every layer and every segment keeps",
        lambda case, segments: _would_fit_without(case, segments, "inputs"),
    ),
    (
        "you leave out what layers keep besides their inputs (`inside`)",
        lambda case, segments: _would_fit_without(case, segments, "inside"),
    ),
    (
        "you make the peak as low as it can be: the limit is given, and what counts within it is time",
        _is_lowest,
    ),
    (
        "you make the number of recomputed layers small, not their cost",
        _has_fewest_layers,
    ),
)
"""Each must hold for every wrong answer, the first that does is told."""


# --- Rules of thumb -------------------------------------------------------------------------------------------------


def cover_one_by_one(order: Callable[[ChainCase, int], float]) -> Callable[[ChainCase], Segments]:
    """Return the rule that recomputes single layers in some order until the plan fits."""

    def plan(case: ChainCase) -> Segments:
        segments: Segments = []
        for layer in sorted(range(case.num_layers), key=lambda i: order(case, i)):
            if peak_bytes(case, segments) <= case.limit:
                break
            segments = sorted([*segments, (layer, layer + 1)])
        return segments

    return plan


def best_single_layers(case: ChainCase) -> Segments:
    """Return the best plan whose segments have one layer each, by trying more and more cost."""
    ways: list[tuple[int, int, Segments]] = [(0, 0, [])]
    for i, size in enumerate(case.sizes):
        ways = [way for way in ways if way[0] + size <= case.limit]
        stays = [(kept + size, spent, segments) for kept, spent, segments in ways]
        again = [(kept + case.inputs[i], spent + case.costs[i], [*s, (i, i + 1)]) for kept, spent, s in ways]
        ways, least = [], math.inf
        for way in sorted([*stays, *again], key=lambda way: way[:2]):
            if way[1] < least:
                ways.append(way)
                least = way[1]
    return min(ways, key=lambda way: way[1])[2] if ways else []


def best_equal_lengths(case: ChainCase) -> Segments:
    """Return the equal segments over all layers with the lowest peak."""
    plans = [_equal_segments(case, length) for length in range(1, case.num_layers + 1)]
    return min(plans, key=lambda plan: peak_bytes(case, plan))


RULES: tuple[tuple[str, Callable[[ChainCase], Segments]], ...] = (
    (
        "you recompute the largest layers first, one by one, until it fits: a segment of several keeps one input",
        cover_one_by_one(lambda case, i: -case.inside[i]),
    ),
    (
        "you recompute the cheapest layers first, one by one, until it fits: bytes won for their cost matter, and "
        "segments",
        cover_one_by_one(lambda case, i: case.costs[i]),
    ),
    (
        "you recompute the layers with the most bytes for their cost first, one by one: neighbors together keep one "
        "input only",
        cover_one_by_one(lambda case, i: -case.inside[i] / case.costs[i]),
    ),
    (
        "you recompute layers from the first one on until it fits",
        cover_one_by_one(lambda case, i: i),
    ),
    ("your segments have one layer each: several in a row keep one input together", best_single_layers),
    ("you cut the chain into equal segments: layers differ in bytes and cost", best_equal_lengths),
)


# --- Wrong counts ---------------------------------------------------------------------------------------------------


def _dearest(case: ChainCase, start: int, end: int) -> int:
    return max(case.costs[start:end])


def _largest_with_its_input(case: ChainCase, start: int, end: int) -> int:
    return max(case.sizes[start:end])


def _largest_besides_the_input(case: ChainCase, start: int, end: int) -> int:
    return case.inputs[start] + max(case.sizes[start:end])


_OF_LARGEST = (
    "you count only the largest layer of a segment that runs again: backward needs what all its layers keep at once"
)
COUNTS: tuple[tuple[str, Counting], ...] = (
    (
        "you allow less than `limit`: a plan fits whose highest sum is exactly the limit",
        Counting(spare=1),
    ),
    (
        "you take the dearest layer of a segment for its cost: all of its layers run again, so their costs add up",
        Counting(price=_dearest),
    ),
    (
        "you leave out the inputs of a segment's inner layers: forward dropped them, and the second forward makes them "
        "again, so in backward they are alive",
        WITHOUT_INNER_INPUTS,
    ),
    (_OF_LARGEST, LARGEST_ALONE),
    (_OF_LARGEST, Counting(alive=_largest_with_its_input)),
    (_OF_LARGEST, Counting(alive=_largest_besides_the_input, stays=_largest_besides_the_input)),
    (
        "you count what is kept when forward ends and leave out the segment that backward makes again",
        SEGMENT_LEFT_OUT,
    ),
)
"""By each, all plans answered must keep the limit at the least cost, and no plan must fit what was refused."""


def _explain_counts(answers: Sequence[Answer], refused: Sequence[ChainCase]) -> str:
    """Return the sentence of the wrong count that gives these answers; where several do, what they have in common."""
    found = {
        sentence
        for sentence, counting in COUNTS
        if all(math.isinf(least_cost(case, counting)) for case in refused)
        and all(is_best_by(case, segments, counting) for case, segments in answers)
    }
    if len(found) > 1:
        return LIVE if found <= {sentence for sentence, _ in COUNTS[2:]} else ""
    return found.pop() if found else ""


def explain_plans(answers: Sequence[Answer], wrong: Sequence[Answer], refused: Sequence[ChainCase] = ()) -> str:
    """Return what the wrong answers have in common, or "".

    Args:
        answers: all that were plans, right ones too.
        wrong: those of them that were not the best.
        refused: cases that some plan fits, answered with a ValueError.
    """
    if not wrong and not refused:
        return ""
    for sentence, rule in RULES:
        if answers and all(_signature(case, rule(case)) == _signature(case, segments) for case, segments in answers):
            return sentence
    sentence = _explain_counts(answers, refused)
    if sentence or not wrong:
        return sentence
    for sentence, holds in SYMPTOMS:
        if all(holds(case, segments) for case, segments in wrong):
            return sentence
    # Of single layers alone, some that forget the live unit keep the limit by chance and cost too much.
    without_live = [_would_fit_without(case, segments, "live") for case, segments in wrong]
    if any(without_live) and all(
        live or _are_single(*answer) for live, answer in zip(without_live, wrong, strict=True)
    ):
        return LIVE
    if all(_are_single(case, segments) for case, segments in wrong):
        return RULES[4][0]
    return ""


def _signature(case: ChainCase, segments: Segments) -> tuple[int, int]:
    return cost(case, segments), peak_bytes(case, segments)
