"""What the weights of lab 5.1 must become step by step, and what known mistakes make of them.

Enters: a case. Leaves: by the word for it, the weights [numbers of all parameters] after each step; "right" is
`torch.optim.AdamW` in one process on the mean of the ranks' gradients. A learner's weights are then compared as a whole
(`find_fits`) and number by number (`read_codes`).

Source: Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmcourse.grading.zero_cases import ZeroCase, flatten, make_gradients, make_params

TOLERANCE = 1e-6
"""Largest difference of a weight; weights are below 1, and fp32 in another order of operations stays below half."""
ROUNDED = "rounded"
"""Word for weights that 16 bits on their way have put off."""
ROUNDED_MEDIAN, ROUNDED_MOST = 1.5e-4, 1e-3
"""How far that puts off half of the numbers, and all but one in a hundred, at most; in trials 9e-5 and 8e-4."""
RIGHT, UNMOVED, BEHIND, OTHER = "r", ".", "<", "?"
"""Codes of a number: as it must be; as it was at first; as it must be one step before; none of these."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """How gradients are turned into a step; the defaults are right, each other value is a mistake."""

    gradient: str = "mean"
    """mean; summed over the ranks; over_ranks, the mean divided once more; clipped, the mean of clipped ones."""
    own: int | None = None
    """The one rank whose gradient is used."""
    keeps: bool = False
    """Gradients of earlier steps are added up."""
    zeros: bool = False
    """A missing gradient counts as zeros: the parameter moves on by its momentum."""
    zeroed: bool = False
    """So it does where the parameter has had a gradient before, which zero_grad() has set to zeros in place."""
    decays_without: bool = False
    """A parameter without a gradient is decayed."""
    count: str = "own"
    """Of steps: own to a parameter, calls, ahead by one, or none (no bias correction)."""
    decay: str = "right"
    """right, none, twice, per_rank, without_lr, coupled, after; matrices, of more than one dimension alone."""
    eps: str = "outside"
    """outside the root, inside, or before the correction of the bias."""
    swapped: bool = False
    """The betas."""
    root: bool = True
    fresh: bool = False
    """Moments are forgotten after each step."""
    amsgrad: bool = False
    """The squares' mean never falls."""
    averaged: bool = False
    """Weights are averaged over the ranks, of which one has made the step."""


MISTAKES: dict[str, Update] = {
    "summed": Update(gradient="summed"),
    "over_ranks": Update(gradient="over_ranks"),
    "kept": Update(keeps=True),
    "zeros": Update(zeros=True),
    "zeroed": Update(zeroed=True),
    "decays_without": Update(decays_without=True),
    "calls": Update(count="calls"),
    "ahead": Update(count="ahead"),
    "no_correction": Update(count="none"),
    "no_decay": Update(decay="none"),
    "decay_twice": Update(decay="twice"),
    "decay_per_rank": Update(decay="per_rank"),
    "decay_without_lr": Update(decay="without_lr"),
    "coupled": Update(decay="coupled"),
    "decay_after": Update(decay="after"),
    "eps_inside": Update(eps="inside"),
    "eps_before": Update(eps="before"),
    "swapped": Update(swapped=True),
    "no_root": Update(root=False),
    "fresh": Update(fresh=True),
    "decay_matrices": Update(decay="matrices"),
    "amsgrad": Update(amsgrad=True),
    "clipped": Update(gradient="clipped"),
    "averaged": Update(averaged=True),
}
"""By the word for it; the likelier first where two give the same."""


@functools.lru_cache(maxsize=16)
def make_paths(case: ZeroCase) -> dict[str, list[Tensor]]:
    """Return the weights after each step: right, with each of the mistakes, and with the gradient of one rank alone."""
    alone = {f"own{rank}": Update(own=rank) for rank in range(case.world_size)}
    alone |= {f"part{rank}": replace(update, gradient="over_ranks") for rank, update in enumerate(alone.values())}
    return {"right": run_reference(case)} | {word: play(case, update) for word, update in (MISTAKES | alone).items()}


def run_reference(case: ZeroCase) -> list[Tensor]:
    """Return the weights after each step of `torch.optim.AdamW` in one process."""
    params = make_params(case)
    trained = [parameter for parameter in params if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=case.lr, betas=case.betas, eps=case.eps, weight_decay=case.weight_decay, foreach=False
    )
    found = []
    for step in range(case.num_steps):
        gradients = zip(*(make_gradients(case, step, rank) for rank in range(case.world_size)), strict=True)
        for parameter, of_ranks in zip(params, gradients, strict=True):
            given = [gradient for gradient in of_ranks if gradient is not None]
            parameter.grad = torch.stack(given).mean(dim=0) if given else None
        optimizer.step()
        found.append(flatten(list(params)))
    return found


def play(case: ZeroCase, update: Update) -> list[Tensor]:
    """Return the weights after each step of an AdamW of our own that may be wrong."""
    weights = flatten(list(make_params(case)))
    trained = torch.cat(
        [torch.full((size,), index != case.frozen, dtype=torch.bool) for index, size in enumerate(case.sizes)]
    )
    first, second, peak, count, kept = (torch.zeros_like(weights) for _ in range(5))
    beta_1, beta_2 = reversed(case.betas) if update.swapped else case.betas
    found, has_had = [], torch.zeros_like(trained)
    for step in range(case.num_steps):
        gradient, present = _gradient(case, step, update)
        has_had |= present
        if update.keeps:
            gradient = kept = kept + gradient
            present = trained if step else present
        moves = trained if update.zeros else has_had if update.zeroed else present
        count = torch.where(moves, count + 1, count)
        if update.decay == "coupled":
            gradient = gradient + case.weight_decay * weights
        first = torch.where(moves, beta_1 * first + (1 - beta_1) * gradient, first)
        second = torch.where(moves, beta_2 * second + (1 - beta_2) * gradient**2, second)
        peak = torch.maximum(peak, second) if update.amsgrad else second
        steps = torch.full_like(count, step + 1) if update.count in ("calls", "none") else count
        steps = steps + 1 if update.count == "ahead" else steps
        change = _direction(case, update, first, peak, (beta_1, beta_2), steps.clamp(min=1))
        new = _decay(case, update, weights) - case.lr * change
        if update.decay == "after":
            new = _decay(case, replace(update, decay="right"), weights - case.lr * change)
        new = torch.where(moves, new, weights)
        if update.decays_without:
            new = torch.where(trained & ~moves, _decay(case, update, weights), new)
        weights = weights + (new - weights) / case.world_size if update.averaged else new
        if update.fresh:
            first, second, count = (torch.zeros_like(weights) for _ in range(3))
        found.append(weights)
    return found


def _gradient(case: ZeroCase, step: int, update: Update) -> tuple[Tensor, Tensor]:
    """Return the gradient that a step uses, zeros where there is none, and where there is one."""
    vectors, present = _gradients_of_ranks(case, step)
    if update.own is not None:
        own = vectors[update.own]
        return (own / case.world_size if update.gradient == "over_ranks" else own), present
    if update.gradient == "clipped":
        vectors = vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1)
    factor = {"summed": 1.0, "over_ranks": case.world_size**-2}.get(update.gradient, 1 / case.world_size)
    return vectors.sum(dim=0) * factor, present


@functools.lru_cache(maxsize=64)
def _gradients_of_ranks(case: ZeroCase, step: int) -> tuple[Tensor, Tensor]:
    """Return every rank's gradient [rank, number], zeros where there is none, and where there is one [number]."""
    ranks = [make_gradients(case, step, rank) for rank in range(case.world_size)]
    vectors = [
        torch.cat([torch.zeros(s) if g is None else g.flatten() for g, s in zip(of_rank, case.sizes, strict=True)])
        for of_rank in ranks
    ]
    present = [torch.full((s,), g is not None, dtype=torch.bool) for g, s in zip(ranks[0], case.sizes, strict=True)]
    return torch.stack(vectors), torch.cat(present)


def _direction(
    case: ZeroCase, update: Update, first: Tensor, second: Tensor, betas: tuple[float, float], steps: Tensor
) -> Tensor:
    """Return what Adam multiplies the learning rate with."""
    correction_1, correction_2 = 1 - betas[0] ** steps, 1 - betas[1] ** steps
    if update.count == "none":
        correction_1 = correction_2 = torch.ones_like(first)
    mean, square = first / correction_1, second / correction_2
    if not update.root:
        return mean / (square + case.eps)
    if update.eps == "inside":
        return mean / (square + case.eps).sqrt()
    if update.eps == "before":
        return mean * correction_2.sqrt() / (second.sqrt() + case.eps)
    return mean / (square.sqrt() + case.eps)


def _decay(case: ZeroCase, update: Update, weights: Tensor) -> Tensor:
    """Return the weights after weight decay, before Adam's part of the step."""
    factor = 1 - case.lr * case.weight_decay
    if update.decay == "matrices":
        sizes = zip(case.shapes, case.sizes, strict=True)
        return weights * torch.cat([torch.full((size,), factor if len(shape) > 1 else 1.0) for shape, size in sizes])
    factors = {
        "right": factor,
        "twice": factor**2,
        "per_rank": factor**case.world_size,
        "without_lr": 1 - case.weight_decay,
    }
    return weights * factors.get(update.decay, 1.0)


# --- A learner's weights --------------------------------------------------------------------------------------------


def is_same(got: Tensor, expected: Tensor) -> bool:
    """Tell whether two vectors agree in every number."""
    return got.shape == expected.shape and bool(((got - expected).abs() <= TOLERANCE).all())


def find_fits(weights: Sequence[Tensor], paths: Mapping[str, list[Tensor]]) -> list[str]:
    """Return the words of the paths that weights follow in all steps."""
    return [
        word for word, path in paths.items() if all(is_same(got, at) for got, at in zip(weights, path, strict=True))
    ]


def is_rounded(weights: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Tell whether most numbers are off at the end, and by no more than 16 bits on their way explain."""
    off = (weights[-1] - right[-1]).abs()
    return TOLERANCE < float(off.median()) < ROUNDED_MEDIAN and float(off.quantile(0.99)) < ROUNDED_MOST


def read_codes(case: ZeroCase, got: Tensor, paths: Mapping[str, list[Tensor]]) -> str:
    """Return a code for each trained number at the end.

    RIGHT, UNMOVED, BEHIND or OTHER; the digit of the rank whose gradient alone gives it; where that is divided by the
    number of ranks besides, a letter, "a" for rank 0.
    """
    start = flatten(list(make_params(case)))
    named = [(RIGHT, paths["right"][-1]), (UNMOVED, start), (BEHIND, paths["right"][-2])]
    named += [(str(rank), paths[f"own{rank}"][-1]) for rank in range(case.world_size)]
    named += [(chr(ord("a") + rank), paths[f"part{rank}"][-1]) for rank in range(case.world_size)]
    codes = [OTHER] * len(got)
    for code, expected in reversed(named):
        for index in ((got - expected).abs() <= TOLERANCE).nonzero().flatten().tolist():
            codes[index] = code
    begin, kept = 0, list[str]()
    for index, size in enumerate(case.sizes):
        kept += codes[begin : begin + size] if index != case.frozen else []
        begin += size
    return "".join(kept)


def find_shift(got: Tensor, expected: Tensor, reach: int = 8) -> int:
    """Return by how many places numbers stand too late (negative: too early), where most wrong ones do; else 0.

    Shares of several ranks may be off by different numbers of places; the smallest is returned.
    """
    wrong = ((got - expected).abs() > TOLERANCE).nonzero().flatten()
    for sign in (1, -1):
        explained, shifts = torch.zeros(len(wrong), dtype=torch.bool), list[int]()
        for shift in (sign * step for step in range(1, reach + 1)):
            places = wrong - shift
            inside = (places >= 0) & (places < len(expected))
            there = expected[places.clamp(0, len(expected) - 1)]
            same = inside & ((got[wrong] - there).abs() <= TOLERANCE) & ~explained
            shifts += [shift] if int(same.sum()) > 4 else []
            explained |= same
        if shifts and int(explained.sum()) > 0.6 * len(wrong):
            return shifts[0]
    return 0
