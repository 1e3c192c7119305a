"""How fast the busiest rank of a pipeline lets micro-batches follow each other, and the split that is best at that.

Enters: seconds of every layer, forward and backward, and a schedule. Leaves: its pace with a split, in seconds a
micro-batch, and the split with the least. No step of M micro-batches is shorter than M times the pace, whatever the
order of its actions. How much longer it is depends on the order: `parallel/best_split.py` plays that. Imports no torch.
Chapter 1.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from vlmcourse.planner.schedules import SCHEDULES, stages_of_rank
from vlmcourse.planner.stages import StageSplit, split_at, split_by_cost, stage_rule
from vlmcourse.presets import VLMShape

PRECISION = 1e-4
"""By which share the split that `split_by_pace` finds may be slower than the best; measured times are less exact."""
MAX_STATES = 5_000
"""How many dead ends a search among pairs of stages may meet; reached only with more than 16 stages."""
MayBeStage = Callable[[int, int], bool]


def pace_s(
    schedule: str,
    split: StageSplit,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    first_backward_s: Sequence[float] | None = None,
) -> float:
    """Return how many seconds after another a micro-batch can leave a pipeline at best.

    With gpipe that is the slowest forward and the slowest backward, on whichever stages they are, since all forwards
    come first; otherwise what all stages of the busiest rank take together.

    Args:
        schedule: one of `SCHEDULES`.
        split: which layers stand where.
        forward_s: of every layer, for one micro-batch.
        backward_s: likewise.
        first_backward_s: likewise, of a layer that stands on the first stage; None if it takes as long there.
    """
    stages = range(split.num_stages)
    forward = [sum(forward_s[layer] for layer in split.layers(stage)) for stage in stages]
    backward = [sum(backward_s[layer] for layer in split.layers(stage)) for stage in stages]
    if first_backward_s is not None:
        backward[0] = sum(first_backward_s[layer] for layer in split.layers(0))
    if schedule == "gpipe":
        return max(forward) + max(backward)
    pp = split.num_stages // SCHEDULES[schedule].stages_per_rank
    return max(sum(forward[s] + backward[s] for s in stages_of_rank(schedule, pp, rank)) for rank in range(pp))


def split_by_pace(
    shape: VLMShape,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    schedule: str,
    pp: int,
    *,
    first_backward_s: Sequence[float] | None = None,
    block_each: bool = False,
    output_apart: bool = False,
) -> StageSplit:
    """Find the split with the least `pace_s`, to one part in ten thousand.

    It is the best for steps of many micro-batches; for gpipe, whose step takes all layers once and the pace for every
    micro-batch but the first, it is the best for any number. Otherwise a step of few can be shorter with another split.

    Args:
        shape: the model's shape.
        forward_s: seconds of every layer in order, at least 0.
        backward_s: likewise.
        schedule: one of `SCHEDULES`.
        pp: ranks of the pipeline.
        first_backward_s: likewise, of a layer that stands on the first stage; None if it takes as long there. Only
            schedules with two stages a rank take it.
        block_each: see `split_by_cost`.
        output_apart: see `split_by_cost`.

    Raises:
        ValueError: if there are not as many costs as layers, fewer layers (or blocks) than stages, or the schedule does
            not take `first_backward_s`.
    """
    if first_backward_s is not None and SCHEDULES[schedule].stages_per_rank == 1:
        raise ValueError(f"{schedule} was given first_backward_s: leave it out, only two stages a rank are searched so")
    num_stages = pp * SCHEDULES[schedule].stages_per_rank
    costs = [forward + backward for forward, backward in zip(forward_s, backward_s, strict=True)]
    start = split_by_cost(shape, costs, num_stages, block_each=block_each, output_apart=output_apart)
    may_be_stage = stage_rule(shape, num_stages, block_each=block_each, output_apart=output_apart)
    first_costs = costs
    if first_backward_s is not None:
        first_costs = [forward + backward for forward, backward in zip(forward_s, first_backward_s, strict=True)]
    limit = pace_s(schedule, start, forward_s, backward_s, first_backward_s)
    if schedule == "gpipe":
        return split_at(shape, _cuts_for_two_phases(forward_s, backward_s, num_stages, limit, may_be_stage))
    if SCHEDULES[schedule].stages_per_rank == 1:
        return start
    return _split_for_pairs(shape, costs, first_costs, schedule, start, limit, may_be_stage)


def _cuts_for_two_phases(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_stages: int,
    limit: float,
    may_be_stage: MayBeStage,
) -> list[int]:
    """Return the cuts with the least sum of the slowest forward and the slowest backward.

    Dynamic programming over (layers so far, stages so far), with every pair of the two slowest that no other beats.

    Args:
        forward_s: of every layer.
        backward_s: of every layer.
        num_stages: into how many stages.
        limit: a sum that can be reached.
        may_be_stage: see `best_cuts`.
    """
    forward, backward = ([0.0, *accumulate(costs)] for costs in (forward_s, backward_s))
    num_layers, limit = len(forward_s), limit * (1 + 1e-12)
    fronts: dict[int, list[tuple[float, float, list[int]]]] = {0: [(0.0, 0.0, [])]}
    for _ in range(num_stages):
        after: dict[int, list[tuple[float, float, list[int]]]] = {}
        for start, front in fronts.items():
            for end in range(start + 1, num_layers + 1):
                f, b = forward[end] - forward[start], backward[end] - backward[start]
                if f + b > limit:
                    break
                if may_be_stage(start, end):
                    after.setdefault(end, []).extend(
                        (max(f, slowest_f), max(b, slowest_b), [*cuts, end])
                        for slowest_f, slowest_b, cuts in front
                        if max(f, slowest_f) + max(b, slowest_b) <= limit
                    )
        fronts = {end: _unbeaten(found) for end, found in after.items()}
    return min(fronts[num_layers], key=lambda found: found[0] + found[1])[2][:-1]


def _unbeaten(found: list[tuple[float, float, list[int]]]) -> list[tuple[float, float, list[int]]]:
    """Return those pairs of which no other is as small in both numbers."""
    kept: list[tuple[float, float, list[int]]] = []
    for candidate in sorted(found, key=lambda pair: pair[:2]):
        if not kept or candidate[1] < kept[-1][1]:
            kept.append(candidate)
    return kept


def _split_for_pairs(
    shape: VLMShape,
    costs: Sequence[float],
    first_costs: Sequence[float],
    schedule: str,
    start: StageSplit,
    limit: float,
    may_be_stage: MayBeStage,
) -> StageSplit:
    """Return the split whose busiest rank has least to do, where each rank has two stages.

    Halves the range in which that least is, and asks each time whether some split keeps all ranks below.

    Args:
        shape: the model's.
        costs: of every layer, forward and backward.
        first_costs: likewise, on the first stage.
        schedule: with two stages a rank.
        start: any split.
        limit: the pace of that split.
        may_be_stage: see `best_cuts`.
    """
    none = [0.0] * len(costs)
    best, highest = start, limit
    pp = start.num_stages // 2
    least = list(map(min, costs, first_costs))
    lowest = max(sum(least) / pp, max(least)) * (1 - PRECISION)
    while highest - lowest > PRECISION * highest:
        middle = (lowest + highest) / 2
        pairs = _pairs_below(costs, first_costs, pp, middle, SCHEDULES[schedule].v_shaped, may_be_stage)
        if pairs is None:
            lowest = middle
        else:
            stages = sorted(stage for pair in pairs for stage in pair)
            best = split_at(shape, [first for first, _ in stages[1:]])
            highest = min(middle, pace_s(schedule, best, none, costs, first_costs))
    return best


Pair = tuple[tuple[int, int], tuple[int, int]]
"""First layer and end of both stages of a rank."""


def _pairs_below(
    costs: Sequence[float],
    first_costs: Sequence[float],
    pp: int,
    limit: float,
    v_shaped: bool,
    may_be_stage: MayBeStage,
) -> list[Pair] | None:
    """Return two stages for each rank whose costs are together at most `limit`; None if there are none.

    The ranks take layers in turn: at the front and at the back of what is left (v-shaped), or at the fronts of two
    halves, whose border is tried everywhere. The first rank's front is the first stage. What is left must be no more
    than the other ranks can do; that leaves few states, and each is tried once. Up to 16 stages of 100 layers that is a
    matter of seconds; the search of a larger pipeline may end at `MAX_STATES` and miss a split.
    """
    total, total_first = ([0.0, *accumulate(of_layers)] for of_layers in (costs, first_costs))
    num_layers = len(costs)
    borders = [num_layers] if v_shaped else range(pp, num_layers - pp + 1)
    choose = _v_shaped if v_shaped else _interleaved
    failed: set[tuple[int, int, int, int]] = set()

    def place(rank: int, front: int, back: int, border: int) -> list[Pair] | None:
        if rank == pp:
            return []
        if (rank, front, back, border) in failed or len(failed) == MAX_STATES:
            return None
        of_front = total if rank else total_first
        for front_end, back_end in choose(total, of_front, front, back, border, pp - rank - 1, limit):
            second = min(back, back_end), max(back, back_end)
            if may_be_stage(front, front_end) and may_be_stage(*second):
                rest = place(rank + 1, front_end, back_end, border)
                if rest is not None:
                    return [((front, front_end), second), *rest]
        failed.add((rank, front, back, border))
        return None

    return next(filter(None, (place(0, 0, border, border) for border in borders)), None)


def _v_shaped(
    total: Sequence[float],
    of_front: Sequence[float],
    front: int,
    back: int,
    border: int,
    ranks_left: int,
    limit: float,
) -> Iterator[tuple[int, int]]:
    """Yield where a rank's first stage may end and its second begin, if layers `front` to before `back` are left."""
    for end in range(front + 1, back):
        spent = of_front[end] - of_front[front]
        if spent > limit:
            return
        if not ranks_left:
            if spent + total[back] - total[end] <= limit:
                yield end, end
            continue
        least = bisect_left(total, total[back] - (limit - spent))
        most = bisect_right(total, total[end] + ranks_left * limit) - 1
        for begin in range(max(least, end + 2 * ranks_left), min(most, back - 1) + 1):
            yield end, begin


def _interleaved(
    total: Sequence[float],
    of_front: Sequence[float],
    front: int,
    back: int,
    border: int,
    ranks_left: int,
    limit: float,
) -> Iterator[tuple[int, int]]:
    """Yield where a rank's two stages may end, if they begin at `front` (before the border) and `back`."""
    num_layers = len(total) - 1
    for end in range(front + 1, border - ranks_left + 1):
        spent = of_front[end] - of_front[front]
        if spent > limit:
            return
        if not ranks_left and end < border:
            continue
        most = bisect_right(total, total[back] + limit - spent) - 1
        # What is left of both halves.
        least = bisect_left(total, total[border] - total[end] + total[num_layers] - ranks_left * limit)
        least = max(least, back + 1) if ranks_left else num_layers
        for stop in range(min(most, num_layers - ranks_left), least - 1, -1):
            yield end, stop
