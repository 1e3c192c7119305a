"""Whole answers to exercise 4.6: right ones in four styles, and wrong ones with the words that they should be told."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from scipy.optimize import curve_fit, least_squares, nnls

from vlmcourse.planner.scaling import find_serial_fraction

Answer = dict[str, Callable[..., Any]]
"""The five functions, by the name of their part."""
PARTS = ("speedup", "serial", "split", "fixes", "together")
LOSSES = ("communication", "imbalance", "input", "serial", "computing")

# --- Right ----------------------------------------------------------------------------------------------------------


def plain() -> Answer:
    def speedup_and_efficiency(num_ranks, alone_s, step_s, scaling):
        if scaling not in ("strong", "weak"):
            raise ValueError(f"scaling = {scaling!r}")
        speedup = alone_s / step_s * (num_ranks if scaling == "weak" else 1)
        return speedup, speedup / num_ranks

    def fit_serial_fraction(ranks, step_s):
        # minimise the sum of ((s + p / N) / t - 1)^2: two linear equations
        a = [1 / t for t in step_s]
        b = [1 / (n * t) for n, t in zip(ranks, step_s, strict=True)]
        aa, ab, bb = sum(x * x for x in a), sum(x * y for x, y in zip(a, b, strict=True)), sum(y * y for y in b)
        serial = (sum(a) * bb - sum(b) * ab) / (aa * bb - ab * ab)
        shared = (sum(b) * aa - sum(a) * ab) / (aa * bb - ab * ab)
        return serial / (serial + shared)

    def split_loss(alone, by_rank):
        total = sum(sum(rank.values()) for rank in by_rank)
        own = [sum(rank.values()) - rank["communication_s"] for rank in by_rank]
        longest = len(by_rank) * max(own)

        def excess(*names):
            return sum(sum(rank[name] for rank in by_rank) - alone[name] for name in names) / total

        return {
            "communication": (total - longest) / total,
            "imbalance": (longest - sum(own)) / total,
            "input": excess("data_wait_s"),
            "serial": excess("optimizer_s"),
            "computing": excess("forward_s", "backward_s"),
        }

    def rank_fixes(split, fixes):
        gains = [
            (name, 1 / (1 - sum(split[part] * share for part, share in fix.items()))) for name, fix in fixes.items()
        ]
        return sorted(gains, key=lambda pair: -pair[1])

    def gain_together(split, fixes):
        saved = 0
        for part, share in split.items():
            left = 1.0
            for fix in fixes.values():
                left *= 1 - fix.get(part, 0)
            saved += share * (1 - left)
        return 1 / (1 - saved)

    functions = (speedup_and_efficiency, fit_serial_fraction, split_loss, rank_fixes, gain_together)
    return dict(zip(PARTS, functions, strict=True))


def in_numpy() -> Answer:
    def speed(n, t1, tn, scaling):
        factor = {"strong": 1, "weak": n}.get(scaling)
        if factor is None:
            raise ValueError
        return np.array([factor, factor / n]) * t1 / tn

    def serial(ranks, step_s):
        n, t = np.array(ranks, float), np.array(step_s)
        return (found := np.linalg.lstsq(np.stack([1 / t, 1 / (n * t)], 1), np.ones(len(t)), rcond=None)[0])[
            0
        ] / found.sum()

    def split(alone, by_rank):
        names = list(alone)
        times = np.array([[rank[name] for name in names] for rank in by_rank])
        one = np.array([alone[name] for name in names])
        column = {name: (times - one / len(times))[:, i].sum() for i, name in enumerate(names)}
        own = times.sum(1) - times[:, names.index("communication_s")]
        found = {
            "computing": column["forward_s"] + column["backward_s"],
            "serial": column["optimizer_s"],
            "input": column["data_wait_s"],
            "imbalance": (own.max() - own).sum(),
            "communication": (times.sum(1) - own.max()).sum(),
        }
        return {name: np.float64(value) / times.sum() for name, value in found.items()}

    def fixes(split, fixes):
        saved = {name: sum(np.multiply(split[part], by) for part, by in fix.items()) for name, fix in fixes.items()}
        return {
            name: np.reciprocal(1 - saved[name]) for name in sorted(saved, key=lambda name: saved[name], reverse=True)
        }

    def together(split, fixes):
        matrix = np.array([[fix.get(part, 0) for part in split] for fix in fixes.values()])
        return 1 / (1 - np.dot(list(split.values()), 1 - np.prod(1 - matrix, axis=0)))

    return dict(zip(PARTS, (speed, serial, split, fixes, together), strict=True))


def by_scipy_and_logarithms() -> Answer:
    def serial(ranks, step_s):
        (a, b), _ = curve_fit(
            lambda n, s, p: np.log(np.abs(s) + np.abs(p) / n), ranks, np.log(step_s), p0=(0.1 * step_s[0], step_s[0])
        )
        return abs(a) / (abs(a) + abs(b))

    def split(alone, by_rank):
        own = [math.fsum(v for k, v in rank.items() if k != "communication_s") for rank in by_rank]
        total = math.fsum(map(math.fsum, (rank.values() for rank in by_rank)))
        found = dict.fromkeys(LOSSES, 0.0)
        for rank, mine in zip(by_rank, own, strict=True):
            found["imbalance"] += max(own) - mine
            found["communication"] += mine + rank["communication_s"] - max(own)
            found["input"] += rank["data_wait_s"] - alone["data_wait_s"] / len(own)
            found["serial"] += rank["optimizer_s"] - alone["optimizer_s"] / len(own)
        found = {name: lost / total for name, lost in found.items()}
        found["computing"] = 1 - math.fsum(alone.values()) / total - sum(found.values())
        return found

    return plain() | {"serial": serial, "split": split}


def in_torch_and_fractions() -> Answer:
    def speed(n, t1, tn, scaling):
        if scaling == "strong":
            speedup = Fraction(t1) / Fraction(tn)
        elif scaling == "weak":
            speedup = n * Fraction(t1) / Fraction(tn)
        else:
            raise ValueError("strong or weak")
        return [speedup, speedup / n]

    def serial(ranks, step_s):
        rows = np.array([[1 / t, 1 / n / t] for n, t in zip(ranks, step_s, strict=True)])
        s, p = nnls(rows, np.ones(len(ranks)))[0]
        return torch.tensor(s / (s + p))

    def fixes(split, fixes):
        order = []
        while fixes:
            best = max(fixes, key=lambda name: sum(split[part] * by for part, by in fixes[name].items()))
            saved = sum(torch.tensor(split[part]).double() * by for part, by in fixes.pop(best).items())
            order.append([best, 1 / (1 - saved)])
        return order

    def together(split, fixes):
        step = 1 - sum(split.values())
        for part in split:
            step += split[part] * math.prod(1 - fix.get(part, 0) for fix in fixes.values())
        return Fraction(1) / Fraction(step)

    return plain() | {"speedup": speed, "serial": serial, "fixes": fixes, "together": together}


RIGHT = (plain, in_numpy, by_scipy_and_logarithms, in_torch_and_fractions)

# --- Wrong ----------------------------------------------------------------------------------------------------------


def _speeds(pair: Any) -> Answer:
    def function(n, t1, tn, scaling):
        if scaling not in ("strong", "weak"):
            raise ValueError
        return pair(n, t1, tn, n if scaling == "weak" else 1)

    return plain() | {"speedup": function}


def _serial(function: Any) -> Answer:
    return plain() | {"serial": function}


def _karp_flatt(ranks, step_s, point):
    return (ranks[point] * step_s[point] / step_s[0] - 1) / (ranks[point] - 1)


def _solve(ranks, step_s, power=1):
    n, t = np.array(ranks, float), np.array(step_s)
    return np.linalg.lstsq(np.stack([t**-power, 1 / (n * t**power)], 1), t ** (1 - power), rcond=None)[0]


def _two_points(ranks, step_s):
    (n, m), (t, u) = (ranks[0], ranks[-1]), (step_s[0], step_s[-1])
    p = (t - u) / (1 / n - 1 / m)
    return (t - p / n) / (t - p / n + p)


def _own(rank):
    return sum(rank.values()) - rank["communication_s"]


def _split(over: Any = None, scale: float = 1.0, **changes: Any) -> Answer:
    """Change parts of the split, given in seconds of ranks, or what all is divided by."""

    def function(alone, by_rank):
        total = sum(sum(rank.values()) for rank in by_rank)
        found = {name: share * total for name, share in plain()["split"](alone, by_rank).items()}
        found |= {name: change(alone, by_rank) for name, change in changes.items()}
        below = over(alone, by_rank) if over else total
        return {name: scale * seconds / below for name, seconds in found.items()}

    return plain() | {"split": function}


def _waits(alone, by_rank):
    return sum(rank["communication_s"] for rank in by_rank)


def _gains(function: Any) -> Answer:
    def fixes(split, fixes):
        pairs = [(name, function(split, fix)) for name, fix in fixes.items()]
        return sorted(pairs, key=lambda pair: -pair[1])

    return plain() | {"fixes": fixes}


def _saved(split, fix):
    return sum(split[part] * share for part, share in fix.items())


def _together(function: Any) -> Answer:
    def together(split, fixes):
        gains = dict(plain()["fixes"](split, fixes))
        return function(split, fixes, list(gains.values()))

    return plain() | {"together": together}


def _by_speeds(ranks, step_s):
    n, t = np.array(ranks, float), np.array(step_s)
    start = _solve(ranks, step_s)
    found = least_squares(lambda x: t[0] / t - t[0] / (x[0] + x[1] / n), start, x_scale=np.abs(start)).x
    return found[0] / found.sum()


def _computing(rank):
    return rank["forward_s"] + rank["backward_s"]


WRONG: dict[str, tuple[Answer, dict[str, str]]] = {
    "speed-up for efficiency": (
        _speeds(lambda n, t1, tn, k: (k * t1 / tn, k * t1 / tn)),
        {"speedup": "you took the speed-up for the efficiency"},
    ),
    "weak for strong": (
        _speeds(lambda n, t1, tn, k: (t1 / tn, t1 / tn / n)),
        {"speedup": "for weak scaling you used the formula of strong scaling"},
    ),
    "strong for weak": (
        _speeds(lambda n, t1, tn, k: (n * t1 / tn, t1 / tn)),
        {"speedup": "for strong scaling you used the formula of weak scaling"},
    ),
    "percent": (
        _speeds(lambda n, t1, tn, k: (k * t1 / tn, 100 * k * t1 / tn / n)),
        {"speedup": "you returned percent"},
    ),
    "upside down": (_speeds(lambda n, t1, tn, k: (tn / t1 / k, tn / t1 / k / n)), {"speedup": "a speed-up above 1 is"}),
    "one rank does not count": (
        _speeds(lambda n, t1, tn, k: (k * t1 / tn, k * t1 / tn / (n - 1))),
        {"speedup": "you divided by N - 1"},
    ),
    "any kind will do": (
        plain()
        | {"speedup": lambda n, a, b, k: ((n if k == "weak" else 1) * a / b, (1 if k == "weak" else 1 / n) * a / b)},
        {"speedup": "scaling = 'both': it is 'strong' or 'weak': raise a ValueError"},
    ),
    "one number": (plain() | {"speedup": lambda *_: 5.2}, {"speedup": "return two numbers"}),
    "one point": (_serial(lambda r, t: _karp_flatt(r, t, -1)), {"serial": "one point always gives one"}),
    "two points": (_serial(_two_points), {"serial": "two points always fit"}),
    "mean of points": (
        _serial(lambda r, t: statistics.fmean(_karp_flatt(r, t, i) for i in range(1, len(r)))),
        {"serial": "you averaged a fraction of each point"},
    ),
    "errors in seconds": (
        _serial(lambda r, t: (found := _solve(r, t, 0))[0] / found.sum()),
        {"serial": "the longest step decides"},
    ),
    "errors of N times a step": (
        _serial(lambda r, t: (found := np.polyfit(r, np.multiply(r, t), 1))[0] / found.sum()),
        {"serial": "you drew a line through N times the step"},
    ),
    "errors in speed-ups": (_serial(lambda r, t: _by_speeds(r, t)), {"serial": "you minimised errors in speed-ups"}),
    "seconds": (_serial(lambda r, t: _solve(r, t)[0]), {"serial": "you returned the serial seconds"}),
    "over the shared": (
        _serial(lambda r, t: _solve(r, t)[0] / _solve(r, t)[1]),
        {"serial": "you divided the serial time"},
    ),
    "over the first": (_serial(lambda r, t: _solve(r, t)[0] / t[0]), {"serial": "by the first time measured"}),
    "fraction in percent": (_serial(lambda r, t: 100 * plain()["serial"](r, t)), {"serial": "you returned percent"}),
    "shared fraction": (_serial(lambda r, t: 1 - plain()["serial"](r, t)), {"serial": "asked is the serial one"}),
    "loss for fraction": (
        _serial(lambda r, t: 1 - t[0] / t[-1] * r[0] / r[-1]),
        {"serial": "you took what is lost on the most ranks"},
    ),
    "the planner's": (
        _serial(lambda r, t: find_serial_fraction(t[0] / t[-1], r[-1])),
        {"serial": "vlmcourse.planner.scaling.find_serial_fraction holds the answer"},
    ),
    "waits counted twice": (
        _split(communication=_waits),
        {"split": "communication: it looks as if you counted all waits as communication"},
    ),
    "mean rank": (
        _split(communication=_waits, imbalance=lambda *_: 0.0),
        {"split": "imbalance: it looks as if you took the mean rank for the slowest"},
    ),
    "longest wait": (
        _split(communication=lambda a, b: len(b) * max(rank["communication_s"] for rank in b)),
        {"split": "it is the fastest rank's"},
    ),
    "slowest against fastest": (
        _split(imbalance=lambda a, b: len(b) * (max(map(_own, b)) - min(map(_own, b)))),
        {"split": "you compared the slowest rank with the fastest"},
    ),
    "slowest against median": (
        _split(imbalance=lambda a, b: len(b) * (max(map(_own, b)) - statistics.median(map(_own, b)))),
        {"split": "you compared the slowest rank with the median one"},
    ),
    "forward and backward only": (
        _split(imbalance=lambda a, b: len(b) * max(map(_computing, b)) - sum(map(_computing, b))),
        {"split": "imbalance: it looks as if you looked at forward and backward only"},
    ),
    "all input": (
        _split(input=lambda a, b: sum(rank["data_wait_s"] for rank in b)),
        {"split": "input: it looks as if you counted all of the waits for data"},
    ),
    "all of everything": (
        _split(
            input=lambda a, b: sum(rank["data_wait_s"] for rank in b),
            serial=lambda a, b: sum(rank["optimizer_s"] for rank in b),
            computing=lambda a, b: sum(rank["forward_s"] + rank["backward_s"] for rank in b),
        ),
        {"split": "computing: it looks as if you counted all of forward and backward"},
    ),
    "weak split of one part": (
        _split(serial=lambda a, b: sum(rank["optimizer_s"] for rank in b) - len(b) * a["optimizer_s"] + 1e-9),
        {"split": "serial: it looks as if you took weak scaling for strong"},
    ),
    "weak split": (
        _split(
            input=lambda a, b: sum(rank["data_wait_s"] for rank in b) - len(b) * a["data_wait_s"],
            serial=lambda a, b: sum(rank["optimizer_s"] for rank in b) - len(b) * a["optimizer_s"],
            computing=lambda a, b: sum(r["forward_s"] + r["backward_s"] - a["forward_s"] - a["backward_s"] for r in b),
        ),
        {"split": "input and serial and computing: it looks as if you took weak scaling for strong"},
    ),
    "no sum": (_split(input=lambda *_: 0, computing=lambda *_: 0.1), {"split": "your parts add up to"}),
    "of a step": (
        _split(over=lambda a, b: sum(sum(rank.values()) for rank in b) / len(b)),
        {"split": "you divided by the length of a step"},
    ),
    "of one rank's time": (_split(over=lambda a, b: sum(a.values())), {"split": "you divided by the time on one rank"}),
    "seconds of ranks": (_split(over=lambda a, b: 1), {"split": "you returned seconds of ranks"}),
    "shares of the loss": (
        _split(over=lambda a, b: sum(sum(rank.values()) for rank in b) - sum(a.values())),
        {"split": "you returned shares of the loss"},
    ),
    "percent of time": (_split(scale=100), {"split": "it looks as if you returned percent"}),
    "four parts": (
        plain() | {"split": lambda a, b: {k: v for k, v in plain()["split"](a, b).items() if k != "input"}},
        {"split": "return a dict with the keys"},
    ),
    "saved for gained": (
        _gains(lambda s, f: 1 + _saved(s, f)),
        {"fixes": "you took the share of time that a fix saves"},
    ),
    "the part for the step": (
        _gains(lambda s, f: 1 / (1 - sum(f.values()))),
        {"fixes": "multiply it by the part's share first"},
    ),
    "of the loss": (
        _gains(lambda s, f: 1 / (1 - _saved(s, f) / sum(s.values()))),
        {"fixes": "you counted on what is lost alone"},
    ),
    "parts away whole": (
        _gains(lambda s, f: 1 / (1 - sum(s[part] for part in f))),
        {"fixes": "you took a part away whole"},
    ),
    "costs overlooked": (
        _gains(lambda s, f: 1 / (1 - sum(s[part] * max(0, by) for part, by in f.items()))),
        {"fixes": "you overlooked what a fix adds"},
    ),
    "gain without the one": (_gains(lambda s, f: 1 / (1 - _saved(s, f)) - 1), {"fixes": "you returned what is gained"}),
    "gain in percent": (
        _gains(lambda s, f: 100 / (1 - _saved(s, f)) - 100),
        {"fixes": "you returned percent"},
    ),
    "worst first": (
        plain() | {"fixes": lambda s, f: plain()["fixes"](s, f)[::-1]},
        {"fixes": "the best fix comes first"},
    ),
    "not sorted": (
        plain() | {"fixes": lambda s, f: [(name, dict(plain()["fixes"](s, f))[name]) for name in f]},
        {"fixes": "you left the fixes in the order in which they came"},
    ),
    "names only": (plain() | {"fixes": lambda s, f: list(f)}, {"fixes": "return a list of pairs"}),
    "gains added": (
        _together(lambda s, f, gains: 1 + sum(g - 1 for g in gains)),
        {"together": "you added the gains up"},
    ),
    "gains multiplied": (_together(lambda s, f, gains: math.prod(gains)), {"together": "you multiplied the gains"}),
    "one part twice": (
        _together(lambda s, f, gains: 1 / (1 - sum(_saved(s, fix) for fix in f.values()))),
        {"together": "the second has only what the first left"},
    ),
    "best for all": (_together(lambda s, f, gains: max(gains)), {"together": "you took the best fix for all"}),
    "errors": (plain() | {"together": lambda s, f: f["more GPUs"]}, {"together": "KeyError: 'more GPUs'"}),
}
"""By name: the five functions, and for each part that must lose points some of the words that are said."""
