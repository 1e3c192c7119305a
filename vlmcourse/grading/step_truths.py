"""What an accumulation step of exercise 4.2 must make of a case, and what it makes with a known mistake.

Enters: a case and, on a rank, what a learner's step left behind. Leaves: a word for each quantity ("right", or what is
wrong with it) and the known mistakes that it equals. Everything is computed by one process, which sees the samples of
all ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlmcourse.grading.step_cases import (
    CLIPPED,
    MicroBatch,
    StepCase,
    count_supervised,
    descend,
    find_gradient,
    find_left_over,
    loss_sum,
    make_micro_batches,
    make_model,
    split,
)

TOLERANCE = 1e-4
"""Length of the difference over that of what is expected; fp32 sums in another order stay below 1e-5."""
NO_LIMIT = 1e9
FAR, CLOSE = 1 / 8, 1.5
"""The limit over the right norm in the two steps of a clipped case. The first is below the gradient's largest element,
so that clipping by elements shows; the second clips nothing, and any wrong factor is seen."""
NOT_CLIPPED = "_not_clipped"
"""How the word for a mistake ends where clipping was left out besides."""


@dataclass(frozen=True, kw_only=True)
class StepTruth:
    """What one step must find, and what it finds with a known mistake, by the word for it; "right" first."""

    max_norm: float
    """The limit of the gradient's norm in this step."""
    gradients: dict[str, Tensor]
    """[parameters], when the optimizer steps; every case has every word, equal to what is right where the mistake
    changes nothing."""
    losses: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """One step's micro-batches of all ranks, by rank and micro-batch, and the gradients of their token losses."""

    batches: list[list[MicroBatch]]
    gradients: list[list[Tensor]]
    """Of sums of token losses."""
    shifted: list[list[Tensor]]
    """The same with labels shifted by one place."""

    @property
    def counts(self) -> list[list[int]]:
        """Supervised tokens."""
        return [[count_supervised([batch]) for batch in of_rank] for of_rank in self.batches]

    @property
    def tokens(self) -> int:
        """Supervised tokens of the whole step."""
        return sum(map(sum, self.counts))

    @property
    def whole(self) -> Tensor:
        """The gradient of the sum of all token losses."""
        return _add_up(self.gradients)


def _add_up(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.stack([gradient for of_rank in gradients for gradient in of_rank]).sum(0)


@functools.lru_cache(maxsize=32)
def make_truths(case: StepCase) -> list[list[StepTruth]]:
    """Return for each step the truth of each rank."""
    model = make_model(case)
    truths: list[list[StepTruth]] = []
    left = find_left_over(case, model)
    for step in range(case.num_steps):
        batches = [make_micro_batches(case, step, rank) for rank in range(case.world_size)]
        sums = _Sums(
            batches=batches,
            gradients=[[find_gradient(model, *batch) for batch in of_rank] for of_rank in batches],
            shifted=[[find_gradient(model, *batch, shift=1) for batch in of_rank] for of_rank in batches],
        )
        right = sums.whole / sums.tokens
        max_norm = float(right.norm()) * (CLOSE if step else FAR) if case.kind in CLIPPED else NO_LIMIT
        clip = _clipper(max_norm)
        wrongly = _clipped_wrongly(sums, clip) | _clipped_otherwise(right, max_norm, model) | _kept(sums, clip, left)
        wrongly["kept_from_before"] = wrongly["kept"] if step == 0 else clip(right)
        of_ranks = []
        for rank in range(case.world_size):
            gradients = _clipped(_mistakes(sums, rank), clip) | wrongly
            losses = _losses(model, batches, rank)
            of_ranks.append(StepTruth(max_norm=max_norm, gradients=gradients, losses=losses))
        truths.append(of_ranks)
        left = clip(right)
        descend(model, left)
    return truths


def _clipper(max_norm: float) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient * min(1.0, max_norm / (float(gradient.norm()) + 1e-6))


def _clipped(raw: Mapping[str, Tensor], clip: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return gradients clipped, and behind them as they are."""
    return {name: clip(gradient) for name, gradient in raw.items()} | {
        name + NOT_CLIPPED: gradient for name, gradient in raw.items()
    }


def _mistakes(sums: _Sums, rank: int) -> dict[str, Tensor]:
    """Return the gradient on a rank before clipping, right and with each known mistake."""
    num_ranks, steps = len(sums.batches), len(sums.batches[0])
    every = [batch for of_rank in sums.batches for batch in of_rank]
    tokens, counts, whole, right = sums.tokens, sums.counts, sums.whole, sums.whole / sums.tokens
    of_ranks = [torch.stack(of_rank).sum(0) for of_rank in sums.gradients]
    means = [
        [g / max(1, n) for g, n in zip(gs, ns, strict=True)] for gs, ns in zip(sums.gradients, counts, strict=True)
    ]
    mean_of_means = _add_up(means) / (steps * num_ranks)
    own_means = torch.stack([g / max(1, sum(ns)) for g, ns in zip(of_ranks, counts, strict=True)]).mean(0)
    by_micro_batch = zip(zip(*sums.gradients, strict=True), zip(*counts, strict=True), strict=True)
    means_over_ranks = torch.stack([torch.stack(gs).sum(0) / max(1, sum(ns)) for gs, ns in by_micro_batch]).mean(0)
    positions = sum(labels.numel() for _, labels in every)
    shifted = _add_up(sums.shifted)
    shifted_tokens = count_supervised([(inputs, labels[:, 1:]) for inputs, labels in every])
    first, last = (torch.stack([of_rank[at] for of_rank in sums.gradients]).sum(0) for at in (0, -1))
    return {
        "right": right,
        "over_ranks": right / num_ranks,
        "times_ranks": right * num_ranks,
        "mean_of_means": mean_of_means,
        "sum_of_means": mean_of_means * steps,
        "rank_means": own_means,
        "rank_means_times_ranks": own_means * num_ranks,
        "rank_means_over_steps": own_means / steps,
        "means_over_ranks": means_over_ranks,
        "means_over_ranks_summed": means_over_ranks * steps,
        "over_steps": right / steps,
        "over_steps_and_ranks": right / steps / num_ranks,
        "all_positions": whole / positions,
        "all_positions_over_ranks": whole / positions / num_ranks,
        "positive_labels": whole / max(1, sum(int((labels > 0).sum()) for _, labels in every)),
        "last_count": whole / max(1, sum(of_rank[-1] for of_rank in counts)),
        "not_divided": whole / num_ranks,
        "summed": whole,
        "own_only": of_ranks[rank] / tokens * num_ranks,
        "own_only_over_tokens": of_ranks[rank] / tokens,
        "last_only": last / tokens,
        "factor_on_last": (right - last / tokens) / num_ranks + last / tokens,
        "first_exchanged": (first + sum(sums.gradients[rank][1:]) * num_ranks) / tokens,
        "over_samples": whole / sum(len(labels) for _, labels in every),
        "shifted": shifted / tokens,
        "shifted_and_counted": shifted / max(1, shifted_tokens),
        "shifted_over_ranks": shifted / tokens / num_ranks,
    }


def _clipped_wrongly(sums: _Sums, clip: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the gradient where it is clipped at another place."""
    num_ranks, tokens = len(sums.batches), sums.tokens
    parts = [torch.stack(of_rank).sum(0) / tokens for of_rank in sums.gradients]
    return {
        "clipped_each_time": _clip_each_time(sums, clip),
        "clipped_early": _clip_each_time(sums, clip, also_last=False),
        "clipped_before_the_exchange": torch.stack([clip(part * num_ranks) for part in parts]).mean(0),
        "clipped_before_the_sum": torch.stack([clip(part) for part in parts]).sum(0),
    }


def _clipped_otherwise(right: Tensor, max_norm: float, model: nn.Module) -> dict[str, Tensor]:
    """Return the gradient where something else than its norm is limited."""
    clip = _clipper(max_norm)
    return {
        "clipped_by_parameter": torch.cat([clip(part).flatten() for part in split(model, right)]),
        "clipped_by_value": right.clamp(-max_norm, max_norm),
        "clipped_by_largest": right * min(1.0, max_norm / float(right.abs().max())),
        "scaled_to_norm": right * (max_norm / float(right.norm())),
    }


def _kept(sums: _Sums, clip: Callable[[Tensor], Tensor], left: Tensor) -> dict[str, Tensor]:
    """Return the gradient where what was left in it from before was not forgotten."""
    right = sums.whole / sums.tokens
    return {"kept": clip(right + left), "kept_over_ranks": clip(right / len(sums.batches) + left)}


def _clip_each_time(sums: _Sums, clip: Callable[[Tensor], Tensor], also_last: bool = True) -> Tensor:
    """Clip what every rank has added up after each micro-batch; after the last, what the exchange has averaged."""
    num_ranks, tokens = len(sums.batches), sums.tokens
    *earlier, last = zip(*sums.gradients, strict=True)
    kept = [torch.zeros_like(gradient) for gradient in last]
    for of_ranks in earlier:
        kept = [clip(own + gradient / tokens * num_ranks) for own, gradient in zip(kept, of_ranks, strict=True)]
    average = torch.stack(kept).mean(0) + torch.stack(last).sum(0) / tokens
    return clip(average) if also_last else average


@torch.no_grad()
def _losses(model: nn.Module, batches: Sequence[Sequence[MicroBatch]], rank: int) -> dict[str, float]:
    """Return what a step may call its loss."""
    sums = [[float(loss_sum(model, *batch)) for batch in of_rank] for of_rank in batches]
    counts = [[count_supervised([batch]) for batch in of_rank] for of_rank in batches]
    total, tokens, steps, num_ranks = sum(map(sum, sums)), sum(map(sum, counts)), len(sums[0]), len(sums)
    means = [
        sum(s / max(1, n) for s, n in zip(ss, ns, strict=True)) / steps for ss, ns in zip(sums, counts, strict=True)
    ]
    own_tokens = max(1, sum(counts[rank]))
    return {
        "right": total / tokens,
        "times_ranks": total / tokens * num_ranks,
        "over_ranks": total / tokens / num_ranks,
        "mean_of_means": sum(means) / num_ranks,
        "own_mean_of_means": means[rank],
        "own": sum(sums[rank]) / own_tokens,
        "own_part": sum(sums[rank]) / tokens,
        "own_part_times_ranks": sum(sums[rank]) / tokens * num_ranks,
        "mean_of_own": sum(sum(s) / max(1, sum(n)) for s, n in zip(sums, counts, strict=True)) / num_ranks,
        "last": sums[rank][-1] / max(1, counts[rank][-1]),
        "last_parts": sum(of_rank[-1] for of_rank in sums) / tokens,
        "last_part": sums[rank][-1] / tokens,
        "last_part_times_ranks": sums[rank][-1] / tokens * num_ranks,
        "summed": total,
        "own_sum": sum(sums[rank]),
        "over_steps": total / tokens / steps,
    }


def name_gradient(got: Tensor, right: Tensor) -> str:
    """Return "right", or what can be said of a gradient without a known mistake: "nan", "none", "scaled", "other"."""
    if not torch.isfinite(got).all():
        return "nan"
    if not got.any():
        return "none"
    if fit_gradient(got, {"right": right}):
        return "right"
    cosine = float(got @ right / (got.norm() * right.norm()))
    return "scaled" if cosine > 1 - 1e-6 else "other"


def fit_gradient(got: Tensor, expected: Mapping[str, Tensor]) -> list[str]:
    """Return the words for all vectors that a gradient equals; in a special case several mistakes give the same."""
    return [name for name, vector in expected.items() if (got - vector).norm() <= TOLERANCE * vector.norm()]


def name_loss(got: object, expected: Mapping[str, float]) -> str:
    """Return "right", or what can be said of a returned loss without a known mistake: "missing", "nan", "other"."""
    loss = _as_loss(got)
    if loss is None:
        return "missing"
    if not math.isfinite(loss):
        return "nan"
    return "right" if "right" in fit_loss(loss, expected) else "other"


def fit_loss(got: object, expected: Mapping[str, float]) -> list[str]:
    """Return the words for all losses that a returned one equals."""
    loss = _as_loss(got)
    if loss is None:
        return []
    return [name for name, value in expected.items() if abs(loss - value) <= TOLERANCE * abs(value)]


def _as_loss(got: object) -> float | None:
    """Return a number; None where it is none."""
    if isinstance(got, Tensor) and got.numel() == 1:
        got = got.item()
    return None if isinstance(got, bool) or not isinstance(got, (int, float)) else float(got)
