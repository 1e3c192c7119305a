"""Answers to exercise 4.3, part c: right ones in other styles, wrong ones with words of their feedback."""

from __future__ import annotations

import numpy as np
from ex04_3_facts import bias_of
from ex04_3_survivors import by_limits


def search(towers, formats, max_lost, headroom, spare=0):
    """The right answer; `spare` exponents at the top stay unused."""
    for name, e, m in sorted(formats, key=lambda form: -form[2]):
        bias, lowest = bias_of(e) - spare, -bias_of(e) - m
        power = 0
        while all(max(counts) + power + headroom <= bias for counts in towers.values()):
            if all(share_below(counts, lowest - power) <= max_lost for counts in towers.values()):
                return name, power
            power += 1
    return None


def share_below(counts, lowest):
    return sum(n for e, n in counts.items() if e < lowest) / sum(counts.values())


def from_quantiles(towers, formats, max_lost, headroom):
    """The exponent that must be kept in each tower gives the power at once."""
    kept = []
    for counts in towers.values():
        total, below = sum(counts.values()), 0
        for e in sorted(counts):
            if (below + counts[e]) / total > max_lost:
                kept.append(e)
                break
            below += counts[e]
    best = None
    for name, e, m in formats:
        power = max(0, -bias_of(e) - m - min(kept))
        largest = max(exponent for counts in towers.values() for exponent in counts)
        if largest + power + headroom <= bias_of(e) and (best is None or m > best[0]):
            best = (m, name, power)
    return best and [best[1], best[2]]


def with_arrays(towers, formats, max_lost, headroom):
    arrays = [(np.array(list(c)), np.array(list(c.values()), float)) for c in towers.values()]
    found = []
    for name, e, m in formats:
        last = bias_of(e) - headroom - max(int(exponents.max()) for exponents, _ in arrays)
        for power in range(last + 1):
            lost = [w[x + power < -bias_of(e) - m].sum() / w.sum() for x, w in arrays]
            if max(lost) <= max_lost:
                found.append((-m, np.int64(power), name))
                break
    return (min(found)[2], min(found)[1]) if found else None


def recursively(towers, formats, max_lost, headroom):
    if not formats:
        return None
    name, e, m = max(formats, key=lambda form: form[2])
    room = bias_of(e) - headroom - max(map(max, towers.values()))
    works = (k for k in range(room + 1)
             if not any(share_below(c, -bias_of(e) - m - k) > max_lost for c in towers.values()))  # fmt: skip
    power = next(works, None)
    if power is not None:
        return name, float(power)
    return recursively(towers, [form for form in formats if form[0] != name], max_lost, headroom)


def by_part_b(towers, formats, max_lost, headroom):
    """Part b's rule says what becomes of the middle of each exponent's numbers."""
    for name, e, m in sorted(formats, key=lambda form: form[2], reverse=True):
        for power in range(bias_of(e) - headroom - max(map(max, towers.values())) + 1):
            shares = []
            for counts in towers.values():
                fates = by_limits([1.5 * 2.0 ** (exponent + power) for exponent in counts], e, m)
                gone = [number for number, fate in zip(counts.values(), fates, strict=True) if fate == "zero"]
                shares.append(sum(gone) / sum(counts.values()))
            if max(shares) <= max_lost:
                return name, power
    return None


CHOICE_RIGHT = [search, from_quantiles, with_arrays, recursively, by_part_b]


def no_headroom(towers, formats, max_lost, headroom):
    return search(towers, formats, max_lost, 0)


def all_in_one(towers, formats, max_lost, headroom):
    merged = {}
    for counts in towers.values():
        for e, n in counts.items():
            merged[e] = merged.get(e, 0) + n
    return search({"all": merged}, formats, max_lost, headroom)


def largest_scale(towers, formats, max_lost, headroom):
    found = search(towers, formats, max_lost, headroom)
    if found is None:
        return None
    e = next(form[1] for form in formats if form[0] == found[0])
    return found[0], bias_of(e) - headroom - max(map(max, towers.values()))


def no_scale(towers, formats, max_lost, headroom):
    return next(
        (
            (name, 0)
            for name, e, m in sorted(formats, key=lambda form: -form[2])
            if max(map(max, towers.values())) + headroom <= bias_of(e)
            and all(share_below(c, -bias_of(e) - m) <= max_lost for c in towers.values())
        ),
        None,
    )


def without_subnormals(towers, formats, max_lost, headroom):
    for name, e, _ in sorted(formats, key=lambda form: -form[2]):
        for power in range(bias_of(e) - headroom - max(map(max, towers.values())) + 1):
            if all(share_below(c, 1 - bias_of(e) - power) <= max_lost for c in towers.values()):
                return name, power
    return None


def no_top(towers, formats, max_lost, headroom):
    name, e, m = max(formats, key=lambda form: form[2])
    power = 0
    while any(share_below(c, -bias_of(e) - m - power) > max_lost for c in towers.values()):
        power += 1
    return name, power


def most_range(towers, formats, max_lost, headroom):
    for form in sorted(formats, key=lambda form: -form[1]):
        found = search(towers, [form], max_lost, headroom)
        if found:
            return found
    return None


def first_listed(towers, formats, max_lost, headroom):
    for form in formats:
        found = search(towers, [form], max_lost, headroom)
        if found:
            return found
    return None


def language_only(towers, formats, max_lost, headroom):
    return search({"language": towers["language"]}, formats, max_lost, headroom)


def nothing_lost(towers, formats, max_lost, headroom):
    return search(towers, formats, 0.0, headroom)


def gives_up(towers, formats, max_lost, headroom):
    return None


def cut_off_below(towers, formats, max_lost, headroom):
    """No rounding: what is below the smallest subnormal number is lost."""
    moved = {name: {e - 1: n for e, n in counts.items()} for name, counts in towers.items()}
    return search(moved, formats, max_lost, headroom + 1)


def projector_only(towers, formats, max_lost, headroom):
    return search({"projector": towers["projector"]}, formats, max_lost, headroom)


def top_of_infinity(towers, formats, max_lost, headroom):
    return search(towers, formats, max_lost, headroom, spare=-1)


def below_the_bias(towers, formats, max_lost, headroom):
    return search(towers, formats, max_lost, headroom, spare=1)


def never_none(towers, formats, max_lost, headroom):
    return search(towers, formats, max_lost, headroom) or (formats[0][0], 0)


def always_fp16(towers, formats, max_lost, headroom):
    return "fp16", 0


def normal_and_no_headroom(towers, formats, max_lost, headroom):
    return without_subnormals(towers, formats, max_lost, 0)


def bf16_if_offered(towers, formats, max_lost, headroom):
    return next((("bf16", 0) for name, *_ in formats if name == "bf16"), None)


def most_exponent_bits(towers, formats, max_lost, headroom):
    return max(formats, key=lambda form: form[1])[0], 0


def by_rule(towers, formats, max_lost, headroom, *, lost=None, enough=lambda share, most: share <= most,
            order=lambda form: -form[2], least=lambda bias: 0, top=max, tried=None):  # fmt: skip
    """The right answer, unless a rule is given: of what is lost, of the formats' order, of the powers."""

    def each(counts, lowest):
        return [share_below(c, lowest) for c in counts]

    counts = list(towers.values())
    for name, e, m in sorted(formats, key=order)[:tried]:
        for power in range(least(bias_of(e)), bias_of(e) - headroom - top(map(max, counts)) + 1):
            shares = (lost or each)(counts, -bias_of(e) - m - power)
            if all(enough(share, max_lost) for share in shares):
                return name, power
    return None


def negative_power(towers, formats, max_lost, headroom):
    return by_rule(towers, formats, max_lost, headroom, least=lambda bias: -60)


def unclamped_power(towers, formats, max_lost, headroom):
    return by_rule(towers, formats, max_lost, headroom, least=lambda bias: -2 * bias)


def first_tower_lost(towers, formats, max_lost, headroom):
    return by_rule(towers, formats, max_lost, headroom, lost=lambda counts, low: [share_below(counts[0], low)])


def last_tower_lost(towers, formats, max_lost, headroom):
    return by_rule(towers, formats, max_lost, headroom, lost=lambda counts, low: [share_below(counts[-1], low)])


def mean_lost(towers, formats, max_lost, headroom):
    def mean(counts, lowest):
        return [sum(share_below(c, lowest) for c in counts) / len(counts)]

    return by_rule(towers, formats, max_lost, headroom, lost=mean)


def exponents_lost(towers, formats, max_lost, headroom):
    def bins(counts, lowest):
        return [sum(e < lowest for e in c) / len(c) for c in counts]

    return by_rule(towers, formats, max_lost, headroom, lost=bins)


def less_than_max_lost(towers, formats, max_lost, headroom):
    return by_rule(towers, formats, max_lost, headroom, enough=lambda share, most: share < most)


def fewest_mantissa_bits(towers, formats, max_lost, headroom):
    return by_rule(towers, formats, max_lost, headroom, order=lambda form: form[2])


def one_format(towers, formats, max_lost, headroom):
    return by_rule(towers, formats, max_lost, headroom, tried=1)


def smallest_top(towers, formats, max_lost, headroom):
    return by_rule(towers, formats, max_lost, headroom, top=min)


def one_tower_is_enough(towers, formats, max_lost, headroom):
    def least(counts, lowest):
        return [min(share_below(c, lowest) for c in counts)]

    return by_rule(towers, formats, max_lost, headroom, lost=least)


def bias_off_by(power):
    def choose_format(towers, formats, max_lost, headroom):
        for name, e, m in sorted(formats, key=lambda form: -form[2]):
            found = by_rule(towers, [(name, e, m + power)], max_lost, headroom - power)
            if found:
                return found
        return None

    return choose_format


bias_too_large, bias_too_small = bias_off_by(1), bias_off_by(-1)
bias_too_large.__name__, bias_too_small.__name__ = "bias_too_large", "bias_too_small"


def scale_for_power(towers, formats, max_lost, headroom):
    found = search(towers, formats, max_lost, headroom)
    return found and (found[0], 2 ** found[1])


CHOICE_GUESSES = [gives_up, always_fp16, bf16_if_offered, most_exponent_bits]
"""Answers that look at no gradient."""
CHOICE_WRONG = [
    (no_headroom, "you left no headroom"),
    (no_top, "you did not look at the top|the largest gradient of all towers limits the scale"),
    (all_in_one, "you counted all towers together"),
    (without_subnormals, "subnormal numbers count as kept"),
    (largest_scale, "you took the largest scale"),
    (no_scale, "you used no scale"),
    (most_range, "you preferred range|take the one with the most mantissa bits"),
    (first_listed, "formats come in no order"),
    (language_only, "the language tower only"),
    (nothing_lost, "you allowed less loss than the task"),
    (gives_up, "you gave up too early"),
    (cut_off_below, "part b's rule holds here too"),
    (projector_only, "the projector only"),
    (top_of_infinity, "the one above is kept for infinities"),
    (below_the_bias, "you left one exponent unused"),
    (never_none, "where nothing works, return None"),
    (always_fp16, "whatever the towers and the headroom are"),
    (normal_and_no_headroom, "you left no headroom"),
    (normal_and_no_headroom, "not lost below the smallest normal number"),
    (negative_power, "power is 0 or larger: where no scale is needed, it is 0"),
    (unclamped_power, "power is 0 or larger: where no scale is needed, it is 0"),
    (first_tower_lost, "the vision tower only"),
    (last_tower_lost, "the language tower only"),
    (mean_lost, "you took the mean over the towers"),
    (exponents_lost, "you allowed less loss than the task"),
    (fewest_mantissa_bits, "you tried few mantissa bits first|take the one with the most mantissa bits"),
    (one_format, "you tried one format only"),
    (one_tower_is_enough, "you were content with one tower|look again at what may be lost"),
    (bias_too_large, "the bias is 2^(e-1) - 1, not 2^(e-1):"),
    (bias_too_small, "the bias is 2^(e-1) - 1, not 2^(e-1) - 2:"),
    (scale_for_power, "return the power itself, not the scale"),
    (smallest_top, "the tower with the largest gradient limits|the largest gradient of all towers limits the scale"),
]
"""Answers with words of the sentences about them: the mistake's own and, where other mistakes about the same rule give
the same answers, the rule's. At least one of the sentences for the two levels is the mistake's own."""
