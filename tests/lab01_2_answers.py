"""Answers to lab 1.2: right ones in other styles, and wrong ones with the words that their feedback must hold."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np


def check(costs, num_stages):
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"{num_stages} stages for {len(costs)} layers")


def counts_of(cuts, costs):
    return [end - start for start, end in itertools.pairwise([0, *cuts, len(costs)])]


# --- Right ----------------------------------------------------------------------------------------------------------


def recursion_with_memory(costs, num_stages):
    check(costs, num_stages)

    @functools.cache
    def best(start, stages):
        if stages == 1:
            return sum(costs[start:]), [len(costs) - start]
        found = []
        for end in range(start + 1, len(costs) - stages + 2):
            rest, counts = best(end, stages - 1)
            found.append((max(sum(costs[start:end]), rest), [end - start, *counts]))
        return min(found)

    return best(0, num_stages)[1]


def table_with_numpy(costs, num_stages):
    check(costs, num_stages)
    total = np.concatenate([[0.0], np.cumsum(costs)])
    n = len(costs)
    table, choice = np.full((num_stages + 1, n + 1), np.inf), np.zeros((num_stages + 1, n + 1), int)
    table[0, 0] = 0
    for stage in range(1, num_stages + 1):
        for end in range(stage, n + 1):
            values = np.maximum(table[stage - 1, :end], total[end] - total[:end])
            choice[stage, end] = values.argmin()
            table[stage, end] = values.min()
    counts, end = [], n
    for stage in range(num_stages, 0, -1):
        counts.append(end - choice[stage, end])
        end = choice[stage, end]
    return np.array(counts[::-1])


def search_for_the_limit(costs, num_stages):
    """The slowest stage is one of the sums of neighbouring layers: try them, filling stages up to each."""
    check(costs, num_stages)
    limits = sorted({sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)})

    def fill(limit):
        stages = [[]]
        for number, cost in enumerate(costs):
            must_close = len(costs) - number < num_stages - len(stages) + 1
            if stages[-1] and (must_close or sum(costs[i] for i in stages[-1]) + cost > limit * (1 + 1e-12)):
                stages.append([])
            stages[-1].append(number)
        return stages

    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        fits = max(costs) <= limits[middle] * (1 + 1e-12) and len(fill(limits[middle])) <= num_stages
        low, high = (low, middle) if fits else (middle + 1, high)
    return [len(stage) for stage in fill(limits[low])]


def layers_by_number(costs, num_stages):
    ends = list(itertools.accumulate(recursion_with_memory(costs, num_stages)))
    return tuple(range(start, end) for start, end in itertools.pairwise([0, *ends]))


RIGHT = (recursion_with_memory, table_with_numpy, search_for_the_limit, layers_by_number)

# --- Wrong ----------------------------------------------------------------------------------------------------------


def equal_counts(costs, num_stages):
    check(costs, num_stages)
    each, rest = divmod(len(costs), num_stages)
    return [each + (stage < rest) for stage in range(num_stages)]


def fill_before_the_mean(costs, num_stages):
    check(costs, num_stages)
    mean, counts, total = sum(costs) / num_stages, [0], 0
    for number, cost in enumerate(costs):
        stages_left = num_stages - len(counts)
        if counts[-1] and stages_left and (total + cost > mean or len(costs) - number <= stages_left):
            counts.append(0)
            total = 0
        counts[-1] += 1
        total += cost
    return counts


def fill_past_the_mean(costs, num_stages):
    check(costs, num_stages)
    mean, counts, total = sum(costs) / num_stages, [0], 0
    for number, cost in enumerate(costs):
        stages_left = num_stages - len(counts)
        if counts[-1] and stages_left and (total >= mean or len(costs) - number <= stages_left):
            counts.append(0)
            total = 0
        counts[-1] += 1
        total += cost
    return counts


def cut_nearest_to_multiples(costs, num_stages):
    check(costs, num_stages)
    sums, cuts = list(itertools.accumulate(costs)), [0]
    for stage in range(1, num_stages):
        possible = range(cuts[-1] + 1, len(costs) - num_stages + stage + 1)
        goal = sums[-1] * stage / num_stages
        cuts.append(min(possible, key=lambda cut, goal=goal: abs(sums[cut - 1] - goal)))
    return counts_of(cuts[1:], costs)


def without_output(costs, num_stages):
    return recursion_with_memory([*costs[:-1], 0.0], num_stages)


def without_ends(costs, num_stages):
    return recursion_with_memory([0.0, *costs[1:-1], 0.0], num_stages)


def least_squares(costs, num_stages):
    check(costs, num_stages)

    @functools.cache
    def best(start, stages):
        if stages == 1:
            return sum(costs[start:]) ** 2, [len(costs) - start]
        found = []
        for end in range(start + 1, len(costs) - stages + 2):
            rest, counts = best(end, stages - 1)
            found.append((sum(costs[start:end]) ** 2 + rest, [end - start, *counts]))
        return min(found)

    return best(0, num_stages)[1]


def try_everything(costs, num_stages):
    check(costs, num_stages)

    def value(cuts):
        edges = [0, *cuts, len(costs)]
        return max(sum(costs[start:end]) for start, end in itertools.pairwise(edges))

    return counts_of(min(itertools.combinations(range(1, len(costs)), num_stages - 1), key=value), costs)


def largest_first(costs, num_stages):
    """The heuristic for jobs that need not be neighbours."""
    check(costs, num_stages)
    stages, load = [[] for _ in range(num_stages)], [0.0] * num_stages
    for layer in sorted(range(len(costs)), key=lambda layer: -costs[layer]):
        stage = load.index(min(load))
        stages[stage].append(layer)
        load[stage] += costs[layer]
    return [sorted(stage) for stage in stages]


def round_robin(costs, num_stages):
    check(costs, num_stages)
    return [list(range(len(costs)))[stage::num_stages] for stage in range(num_stages)]


def cuts_only(costs, num_stages):
    return list(itertools.accumulate(recursion_with_memory(costs, num_stages)))[:-1]


def stage_of_each(costs, num_stages):
    counts = recursion_with_memory(costs, num_stages)
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


def empty_stages(costs, num_stages):
    best = max(1, math.ceil(len(costs) / num_stages) + 1)
    counts = [min(best, max(0, len(costs) - best * stage)) for stage in range(num_stages)]
    return counts


def loses_a_layer(costs, num_stages):
    return recursion_with_memory(costs[:-1], num_stages)


def no_check(costs, num_stages):
    return recursion_with_memory(costs, min(max(num_stages, 1), len(costs)))


WRONG = {
    # words of the feedback, and the points of 10 that are possible: from, to
    "equal counts": (equal_counts, "you give each stage equally many layers", (1, 4.5)),
    "fills before the mean": (fill_before_the_mean, "up to the mean. With costs", (1, 6)),
    "fills past the mean": (fill_past_the_mean, "up to the mean. With costs", (1, 6)),
    "cuts nearest to multiples": (cut_nearest_to_multiples, "up to the mean. With costs", (1, 8.5)),
    "leaves the output out": (without_output, "you leave the cost of the last layer out", (2, 7.5)),
    "leaves both ends out": (without_ends, "you leave the cost of the first and the last layer out", (2, 7.5)),
    "least squares": (least_squares, "you make the stages as alike as possible", (5, 9.8)),
    "tries everything": (try_everything, "placements; to try all of them is no way", (7.5, 8.5)),
    "largest first": (largest_first, "the layers of a stage must follow one another", (0, 2)),
    "round robin": (round_robin, "the layers of a stage must follow one another", (0, 2)),
    "cuts": (cuts_only, "looks like cuts", (0, 1)),
    "stage of each layer": (stage_of_each, "this looks like the stage of each layer", (0, 2)),
    "empty stages": (empty_stages, "is empty, and its rank", (0, 5)),
    "loses a layer": (loses_a_layer, "layers, and there are", (0, 1)),
    "takes any number of stages": (no_check, "raise a ValueError, each stage needs a layer", (9, 9.9)),
    "raises": (lambda costs, num_stages: costs[99], "IndexError", (0, 0)),
    "returns None": (lambda costs, num_stages: None, "not NoneType", (0, 0)),
    "returns NaN": (lambda costs, num_stages: [float("nan")] * num_stages, "return", (0, 0)),
    "takes one argument": (lambda costs: [1], "your function must take (costs, num_stages)", (0, 0)),
}
