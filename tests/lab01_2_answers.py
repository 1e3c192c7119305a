"""Answers to lab 1.2: right ones in other styles, and wrong ones with the words that their feedback must hold."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np


class StagesError(ValueError):
    pass


def check(costs, num_stages):
    if not 1 <= num_stages <= len(costs):
        raise StagesError(f"{num_stages} stages for {len(costs)} layers")


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


def best_by(of_stage, join):
    """Return an answer that makes another value small than that of the slowest stage, by recursion with memory."""

    def place_layers(costs, num_stages):
        check(costs, num_stages)
        total = [0.0, *itertools.accumulate(costs)]
        mean = total[-1] / num_stages

        @functools.cache
        def best(start, stages):
            if stages == 1:
                return of_stage(total[-1] - total[start], mean), [len(costs) - start]
            found = []
            for end in range(start + 1, len(costs) - stages + 2):
                rest, counts = best(end, stages - 1)
                found.append((join(of_stage(total[end] - total[start], mean), rest), [end - start, *counts]))
            return min(found)

        return best(0, num_stages)[1]

    return place_layers


def sum_of(a, b):
    return a + b


least_squares = best_by(lambda stage, mean: stage**2, sum_of)
least_deviation = best_by(lambda stage, mean: abs(stage - mean), max)
least_deviations = best_by(lambda stage, mean: abs(stage - mean), sum_of)
slowest_fastest = best_by(lambda stage, mean: -stage, max)


def least_spread(costs, num_stages):
    """Slowest minus fastest: of the first layers, every pair of them that may still be the best is kept."""
    check(costs, num_stages)
    total = [0.0, *itertools.accumulate(costs)]
    mean = total[-1] / num_stages
    kept: dict = {0: [(0.0, math.inf, [])]}
    for _ in range(num_stages):
        after: dict = {}
        for start, pairs in kept.items():
            for end in range(start + 1, len(costs) + 1):
                stage = total[end] - total[start]
                if mean > 0 and len(costs) > 30 and not 0.7 * mean < stage < 1.3 * mean:
                    continue  # never so far from the mean in the many layers of these cases
                after.setdefault(end, []).extend(
                    (max(high, stage), min(low, stage), [*counts, end - start]) for high, low, counts in pairs
                )
        kept = {}
        for end, pairs in after.items():
            kept[end], most = [], -math.inf
            for high, low, counts in sorted(pairs, key=lambda pair: (pair[0], -pair[1])):
                if low > most:
                    kept[end].append((high, low, counts))
                    most = low
    return min(kept[len(costs)], key=lambda pair: pair[0] - pair[1])[2]


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


def floor_and_rest(costs, num_stages):
    check(costs, num_stages)
    each = len(costs) // num_stages
    return [each] * (num_stages - 1) + [len(costs) - each * (num_stages - 1)]


def reversed_list(costs, num_stages):
    return recursion_with_memory(costs, num_stages)[::-1]


def sorted_costs(costs, num_stages):
    return recursion_with_memory(sorted(costs, reverse=True), num_stages)


def forgets_the_last_stage(costs, num_stages):
    """The recursion ends with nothing where it must end with what is left."""
    check(costs, num_stages)

    @functools.cache
    def best(start, stages):
        if stages == 1:
            return 0.0, [len(costs) - start]
        found = []
        for end in range(start + 1, len(costs) - stages + 2):
            rest, counts = best(end, stages - 1)
            found.append((max(sum(costs[start:end]), rest), [end - start, *counts]))
        return min(found)

    return best(0, num_stages)[1]


def fill_from_the_end(costs, num_stages):
    return fill_before_the_mean(costs[::-1], num_stages)[::-1]


def halving(costs, num_stages):
    check(costs, num_stages)
    if num_stages == 1:
        return [len(costs)]
    left = num_stages // 2
    right = num_stages - left
    cut = min(
        range(left, len(costs) - right + 1), key=lambda cut: abs(sum(costs[:cut]) / left - sum(costs[cut:]) / right)
    )
    return halving(costs[:cut], left) + halving(costs[cut:], right)


def time_of(costs, counts):
    ends = [0, *itertools.accumulate(counts)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))


def hill_climbing(costs, num_stages, rounds=None, start=equal_counts):
    counts = start(costs, num_stages)
    while rounds is None or rounds > 0:
        rounds = None if rounds is None else rounds - 1
        tries = []
        for stage in range(num_stages - 1):
            for step in (1, -1):
                moved = list(counts)
                moved[stage] += step
                moved[stage + 1] -= step
                if min(moved) > 0:
                    tries.append(moved)
        best = min(tries, key=lambda moved: time_of(costs, moved), default=counts)
        if time_of(costs, best) >= time_of(costs, counts):
            break
        counts = best
    return counts


def slowest_gives(costs, num_stages):
    """A climb of its own kind: the slowest stage hands a layer to the faster of its neighbors."""
    counts = equal_counts(costs, num_stages)
    while True:
        ends = [0, *itertools.accumulate(counts)]
        times = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        slow = times.index(max(times))
        found = []
        for other in (slow - 1, slow + 1):
            if 0 <= other < num_stages and counts[slow] > 1:
                moved = list(counts)
                moved[slow] -= 1
                moved[other] += 1
                found.append(moved)
        best = min(found, key=lambda moved: time_of(costs, moved), default=counts)
        if time_of(costs, best) >= max(times):
            return counts
        counts = best


def improves_a_filling(costs, num_stages):
    return hill_climbing(costs, num_stages, start=fill_before_the_mean)


def merging(costs, num_stages):
    check(costs, num_stages)
    groups = [[cost] for cost in costs]
    while len(groups) > num_stages:
        sums = [sum(a) + sum(b) for a, b in itertools.pairwise(groups)]
        at = sums.index(min(sums))
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    return [len(group) for group in groups]


def times(costs, num_stages):
    ends = [0, *itertools.accumulate(recursion_with_memory(costs, num_stages))]
    return [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]


def ends(costs, num_stages):
    return list(itertools.accumulate(recursion_with_memory(costs, num_stages)))


WRONG = {
    # words of the feedback, and the points of 10 that are possible: from, to
    "equal counts": (equal_counts, "you give each stage equally many layers. With costs", (1, 4.5)),
    "n // k layers each": (floor_and_rest, "equally many layers and what remains to one of them", (1, 4.5)),
    "fills before the mean": (fill_before_the_mean, "up to the mean. With costs", (1, 6)),
    "fills past the mean": (fill_past_the_mean, "up to the mean. With costs", (1, 6)),
    "fills from the end": (fill_from_the_end, "up to the mean, from the last layer to the first", (1, 6)),
    "cuts nearest to multiples": (cut_nearest_to_multiples, "up to the mean. With costs", (1, 7)),
    "leaves the output out": (without_output, "you leave the cost of the last layer out", (1, 7)),
    "leaves both ends out": (without_ends, "you leave the cost of the first and the last layer out", (1, 7)),
    "leaves the last stage out": (forgets_the_last_stage, "you leave the cost of the last stage out", (1, 4)),
    "least squares": (least_squares, "as alike as possible (the least squares)", (3, 7)),
    "least deviation": (least_deviation, "you make the largest deviation from the mean small", (3, 7)),
    "least deviations": (least_deviations, "you make the sum of the deviations from the mean small", (3, 7)),
    "least spread": (least_spread, "difference between the slowest and the fastest stage small", (3, 7)),
    "slowest fastest stage": (slowest_fastest, "you make the fastest stage as slow as possible", (1, 7)),
    "reversed list": (reversed_list, "you return the stages in reverse order", (1, 5)),
    "sorts the costs": (sorted_costs, "you sort the costs before you place them", (1, 5)),
    "halves": (halving, "you cut in two, and the parts in two again", (1, 7)),
    "climbs": (hill_climbing, "you improve an even split while moving one layer over one cut helps", (1, 7)),
    "climbs a step": (functools.partial(hill_climbing, rounds=1), "by a single step, or one round of steps", (1, 5)),
    "slowest stage gives": (slowest_gives, "you improve an even split while moving one layer over one cut", (1, 7)),
    "improves a filling": (improves_a_filling, "you stop where no single layer moved over one cut", (1, 8)),
    "merges": (merging, "you put the two cheapest neighbors together again and again", (1, 7)),
    "largest first, counted": (
        lambda costs, num_stages: [len(stage) for stage in largest_first(costs, num_stages)],
        "you give each layer to the stage with the least load so far",
        (1, 5),
    ),
    "times": (times, "looks like the times of the stages: return how many layers each stage has", (0, 2)),
    "ends": (ends, "looks like running totals, the layer at which each stage ends", (0, 2)),
    "starts": (
        lambda costs, num_stages: [0, *ends(costs, num_stages)[:-1]],
        "looks like the layer with which each stage begins",
        (0, 1),
    ),
    "all edges": (
        lambda costs, num_stages: [0, *ends(costs, num_stages)],
        "looks like the layers at which stages begin and end",
        (0, 1),
    ),
    "time of the slowest": (
        lambda costs, num_stages: max(times(costs, num_stages)),
        "not float: this looks like the time of the slowest stage",
        (0, 1),
    ),
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
