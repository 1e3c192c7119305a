"""Answers to lab 6.1: right ones in other styles, and wrong ones with the words that their feedback must hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch

Answer = Callable[..., Any]

# --- Right ----------------------------------------------------------------------------------------------------------


def with_accumulate(towers, step_s, num_devices, peak_flop_per_s):
    if not peak_flop_per_s:
        return [None, None]
    sizes, trained, again = zip(*towers, strict=True)
    reached = list(accumulate(trained, lambda a, b: a or b))
    needed = sum(f * (3 if t else 2 if r else 1) for f, t, r in zip(sizes, trained, reached, strict=True))
    extra = sum(f for f, r, a in zip(sizes, reached, again, strict=True) if r and a)
    possible = peak_flop_per_s * num_devices * step_s
    return [needed / possible, (needed + extra) / possible]


def with_arrays(towers, step_s, num_devices, peak_flop_per_s):
    if peak_flop_per_s is None:
        return (None, None)
    forward, trained, again = np.array(towers, dtype=float).T
    reached = np.maximum.accumulate(trained)
    flops = np.array([forward @ (1 + reached + trained), forward @ (1 + reached + trained + reached * again)])
    return torch.tensor(flops / (step_s * num_devices * peak_flop_per_s), dtype=torch.float64)


def from_the_back(towers, step_s, num_devices, peak_flop_per_s):
    towers, mfu, hfu = list(towers), 0.0, 0.0
    while towers and peak_flop_per_s is not None:
        size, is_trained, is_again = towers.pop()
        has_backward = is_trained or any(other[1] for other in towers)
        share = size / step_s / num_devices / peak_flop_per_s
        mfu += share * (1 + has_backward + is_trained)
        hfu += share * (1 + has_backward + is_trained + (has_backward and is_again))
    return (None, None) if peak_flop_per_s is None else (mfu, hfu)


RIGHT: tuple[Answer, ...] = (with_accumulate, with_arrays, from_the_back)

# --- Wrong ----------------------------------------------------------------------------------------------------------


def change(
    passes: Callable[..., float] = lambda trained, before, behind: 1 + (trained or before) + trained,
    again: Callable[..., float] = lambda trained, before, marked: marked and (trained or before),
    pair: Callable[..., Any] = lambda needed, extra, possible: (needed / possible, (needed + extra) / possible),
    possible: Callable[..., float] = lambda step_s, num_devices, peak: step_s * num_devices * peak,
    no_peak: Any = (None, None),
) -> Answer:
    """Return a right answer with some of its parts changed."""

    def utilisation(towers, step_s, num_devices, peak_flop_per_s):
        if peak_flop_per_s is None:
            return no_peak
        needed = extra = 0.0
        for i, (size, trained, marked) in enumerate(towers):
            before = any(tower[1] for tower in towers[:i])
            behind = any(tower[1] for tower in towers[i + 1 :])
            needed += size * passes(trained, before, behind)
            extra += size * again(trained, before, marked)
        return pair(needed, extra, possible(step_s, num_devices, peak_flop_per_s))

    return utilisation


def one_before(towers, step_s, num_devices, peak_flop_per_s):
    """Right where each frozen tower is the only one behind a trained one."""
    if peak_flop_per_s is None:
        return None, None
    mfu = extra = 0.0
    for i, (size, trained, marked) in enumerate(towers):
        reached = trained or (i > 0 and towers[i - 1][1])
        mfu += size * (1 + reached + trained)
        extra += size * (reached and marked)
    possible = step_s * num_devices * peak_flop_per_s
    return mfu / possible, (mfu + extra) / possible


def no_peak_at_all(towers, step_s, num_devices, peak_flop_per_s):
    return change()(towers, step_s, num_devices, peak_flop_per_s * 1.0)


WRONG: dict[str, tuple[Answer, str, float]] = {
    "6 N": (change(lambda trained, before, behind: 3), "a frozen tower three times, as 6 N does", 3.0),
    "frozen has no backward": (
        change(lambda trained, before, behind: 1 + 2 * trained),
        "gave a frozen tower no backward at all",
        3.0,
    ),
    "inputs of the front": (change(lambda trained, before, behind: 2 + trained), "at the front the gradient of", 3.0),
    "weights of the frozen": (
        change(lambda trained, before, behind: 3 if trained or before else 1),
        "the gradient of its weights too",
        3.3,
    ),
    "backward counted once": (
        change(lambda trained, before, behind: 1 + (trained or before)),
        "a backward for as dear as a forward: it makes two products",
        1.5,
    ),
    "twice for all": (change(lambda *_: 2), "as dear as a forward, and gave every tower one", 2.0),
    "wrong way round": (
        change(lambda trained, before, behind: 1 + (trained or behind) + trained),
        "where something *behind* it is trained",
        3.0,
    ),
    "only the one before": (one_before, "a trained tower just before a frozen one only", 3.9),
    "frozen left out": (change(lambda trained, before, behind: 3 * trained), "left frozen towers out", 2.5),
    "forward alone": (change(lambda *_: 1), "counted forward alone", 0.0),
    "all that is marked": (change(again=lambda trained, before, marked: marked), "ran every marked tower again", 3.7),
    "trained ones again": (
        change(again=lambda trained, before, marked: marked and trained),
        "recomputed trained towers only",
        3.9,
    ),
    "all again": (change(again=lambda trained, before, marked: trained or before), "recomputed all towers", 3.0),
    "every forward again": (change(again=lambda *_: 1), "every tower's forward once more for HFU", 2.3),
    "4/3 of MFU": (
        change(pair=lambda needed, extra, possible: (needed / possible, 4 / 3 * needed / possible)),
        "took HFU for 4/3 of MFU",
        2.3,
    ),
    "two mistakes, as 8 N": (change(lambda *_: 3, lambda *_: 1), "And you ran every tower's forward once more", 2.0),
    "MFU with recomputation": (
        change(pair=lambda needed, extra, possible: ((needed + extra) / possible,) * 2),
        "counted recomputation into MFU",
        3.3,
    ),
    "HFU without": (
        change(pair=lambda needed, extra, possible: (needed / possible, needed / possible)),
        "counted no recomputation into HFU",
        3.3,
    ),
    "swapped": (
        change(pair=lambda needed, extra, possible: ((needed + extra) / possible, needed / possible)),
        "swapped MFU and HFU",
        2.5,
    ),
    "backward again": (
        change(again=lambda trained, before, marked: 3 * (marked and (trained or before))),
        "counted backward again as well",
        3.3,
    ),
    "one device": (change(possible=lambda step_s, n, peak: step_s * peak), "what *one* device can do", 0.0),
    "no time": (change(possible=lambda step_s, n, peak: n * peak), "left the time of the step out", 0.0),
    "times the time": (change(possible=lambda step_s, n, peak: n * peak / step_s), "by the time of the step", 0.0),
    "devices twice": (change(possible=lambda step_s, n, peak: step_s * n * n * peak), "devices twice", 0.0),
    "percent": (
        change(pair=lambda needed, extra, possible: (100 * needed / possible, 100 * (needed + extra) / possible)),
        "returned percent",
        0.0,
    ),
    "upside down": (
        change(pair=lambda needed, extra, possible: (possible / needed, possible / (needed + extra))),
        "turn it over",
        0.0,
    ),
    "two mistakes": (
        change(lambda *_: 3, possible=lambda step_s, n, peak: step_s * peak),
        "And you divided by what *one* device",
        0.0,
    ),
    "no peak is 0": (change(no_peak=(0.0, 0.0)), "return (None, None), not (0.0, 0.0); a 0 would be a lie", 3.5),
    "fails without a peak": (no_peak_at_all, "return (None, None) (TypeError", 3.5),
    "always None": (lambda *_: (None, None), "return two numbers, MFU and HFU, not (None, None)", 0.0),
    "one number": (
        change(pair=lambda needed, extra, possible: needed / possible),
        "return two numbers, MFU and HFU, not 0.",
        0.0,
    ),
}
"""By name: the answer, words that it is told, and the most points of 4 that it may keep."""
