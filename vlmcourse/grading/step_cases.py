"""Cases of exercise 4.2's accumulation step: ragged micro-batches on ranks, and what a step must make of them.

Enters: a case and, on a rank, what a learner's step left behind. Leaves: one word for each quantity: "right", or the
mistake that it equals. Everything is computed by one process, which sees the samples of all ranks.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, SEQ_LEN = 13, 8, 9
IGNORE = -100
TOLERANCE = 1e-4
"""Length of the difference over that of what is expected; fp32 sums in another order stay below 1e-5."""
LEARNING_RATE = 0.5
NO_LIMIT = 1e9
KINDS = ("ragged", "clipped", "mute rank", "mute last", "single")
"""What is special about a case: nothing but ragged labels; clipping at half the norm; a rank without any supervised
token; a last micro-batch without any, and clipping; only one micro-batch."""

MicroBatch = tuple[Tensor, Tensor]
"""Inputs and labels, int64 [B, S]."""


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """Two optimizer steps of a small model on some ranks."""

    kind: str
    num_micro_batches: int
    seed: int
    world_size: int = 2
    num_steps: int = 2

    def __str__(self) -> str:
        return f"{self.kind} ({self.num_micro_batches} micro-batches on each of {self.world_size} ranks)"


def make_step_cases(seed: int, num_cases: int) -> list[StepCase]:
    """Draw cases, one kind after the other; those in which a careless step leaves a rank waiting come last.

    Never as many micro-batches as ranks: a division by the wrong one of the two would look like the other.
    """
    rng = random.Random(f"step:{seed}")
    kinds = [("ragged", "clipped", "single", "mute rank", "mute last")[number % 5] for number in range(num_cases)]
    kinds.sort(key=lambda kind: kind.startswith("mute"))
    return [
        StepCase(kind=kind, num_micro_batches=1 if kind == "single" else rng.randint(3, 4), seed=rng.randrange(10**6))
        for kind in kinds
    ]


def make_model(case: StepCase) -> nn.Module:
    """Return the model of a case: token ids [B, S] to logits [B, S, V]."""
    torch.manual_seed(case.seed)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY)
    )


def make_micro_batches(case: StepCase, step: int, rank: int) -> list[MicroBatch]:
    """Return a rank's micro-batches of one step; they differ in their numbers of samples and of supervised tokens."""
    generator = torch.Generator().manual_seed(10_000 * case.seed + 100 * step + rank)
    rng = random.Random(f"{case.seed}:{step}:{rank}")
    found = []
    for m in range(case.num_micro_batches):
        num_samples = rng.randint(1, 3)
        inputs, labels = torch.randint(VOCABULARY, (2, num_samples, SEQ_LEN), generator=generator)
        is_mute = (case.kind == "mute rank" and rank == 1) or (
            case.kind == "mute last" and m == case.num_micro_batches - 1 and rank == 0
        )
        for row in labels:
            # Ranks and micro-batches far apart, so that a mean of means is far from the mean.
            num_supervised = 0 if is_mute else rng.randint(1, 2) if (m + rank) % 2 else rng.randint(6, SEQ_LEN)
            row[: SEQ_LEN - num_supervised] = IGNORE
        found.append((inputs, labels))
    return found


@dataclass(frozen=True, kw_only=True)
class StepTruth:
    """What one step must find, and what it finds with a known mistake, by the word for it; "right" first."""

    gradients: dict[str, Tensor]
    """[parameters], when the optimizer steps."""
    losses: dict[str, float]


def make_truths(case: StepCase) -> tuple[float, list[list[StepTruth]]]:
    """Return the limit of the norm, and for each step the truth of each rank."""
    model = make_model(case)
    max_norm = NO_LIMIT
    truths: list[list[StepTruth]] = []
    previous: Tensor | None = None
    for step in range(case.num_steps):
        batches = [make_micro_batches(case, step, rank) for rank in range(case.world_size)]
        sums = [[_gradient(model, [batch]) for batch in of_rank] for of_rank in batches]
        whole = torch.stack([gradient for of_rank in sums for gradient in of_rank]).sum(0)
        right = whole / _count([batch for of_rank in batches for batch in of_rank])
        if step == 0 and case.kind in ("clipped", "mute last"):
            max_norm = float(right.norm()) / 2
        clip = _clipper(max_norm)
        truths.append(
            [_truth_of_rank(case, model, batches, sums, rank, clip, previous) for rank in range(case.world_size)]
        )
        previous = truths[-1][0].gradients["right"]
        _descend(model, previous)
    return max_norm, truths


def _clipper(max_norm: float) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient * min(1.0, max_norm / (float(gradient.norm()) + 1e-6))


def _truth_of_rank(
    case: StepCase,
    model: nn.Module,
    batches: Sequence[Sequence[MicroBatch]],
    sums: Sequence[Sequence[Tensor]],
    rank: int,
    clip: Callable[[Tensor], Tensor],
    previous: Tensor | None,
) -> StepTruth:
    """Work out the known mistakes from the gradients of each micro-batch's sum of token losses."""
    num_ranks, steps = case.world_size, case.num_micro_batches
    every = [batch for of_rank in batches for batch in of_rank]
    tokens = _count(every)
    whole = torch.stack([gradient for of_rank in sums for gradient in of_rank]).sum(0)
    of_ranks = [torch.stack(list(of_rank)).sum(0) for of_rank in sums]
    right = whole / tokens
    means = [
        [g / max(1, _count([b])) for g, b in zip(gs, bs, strict=True)] for gs, bs in zip(sums, batches, strict=True)
    ]
    mean_of_means = torch.stack([torch.stack(of_rank).sum(0) for of_rank in means]).sum(0) / (steps * num_ranks)
    rank_means = [g / max(1, _count(bs)) for g, bs in zip(of_ranks, batches, strict=True)]
    padded = sum(labels.numel() for _, labels in every)
    raw = {
        "right": right,
        "over_ranks": right / num_ranks,
        "times_ranks": right * num_ranks,
        "mean_of_means": mean_of_means,
        "sum_of_means": mean_of_means * steps,
        "rank_means": torch.stack(rank_means).mean(0),
        "rank_means_over_steps": torch.stack(rank_means).mean(0) / steps,
        "over_steps": right / steps,
        "over_steps_and_ranks": right / steps / num_ranks,
        "all_positions": whole / padded,
        "all_positions_over_ranks": whole / padded / num_ranks,
        "not_divided": whole / num_ranks,
        "summed": whole,
        "own_only": of_ranks[rank] / tokens * num_ranks,
        "own_only_over_tokens": of_ranks[rank] / tokens,
        "last_only": torch.stack([of_rank[-1] for of_rank in sums]).sum(0) / tokens,
        "first_exchanged": (torch.stack([of_rank[0] for of_rank in sums]).sum(0) + sum(sums[rank][1:]) * num_ranks)
        / tokens,
        "over_samples": whole / sum(len(labels) for _, labels in every),
    }
    gradients = {name: clip(gradient) for name, gradient in raw.items()}
    if float(clip(right).norm()) < 0.999 * float(right.norm()):
        gradients |= {f"{name}_not_clipped": raw[name] for name in ("right", "over_ranks", "mean_of_means")}
        gradients["clipped_each_time"] = _clip_each_time(sums, tokens, clip)
        gradients["clipped_early"] = _clip_each_time(sums, tokens, clip, also_last=False)
        gradients["clipped_before_the_exchange"] = torch.stack([clip(g / tokens * num_ranks) for g in of_ranks]).mean(0)
    if previous is not None:
        gradients["kept"] = clip(right + previous)
        gradients["kept_over_ranks"] = clip(right / num_ranks + previous)
    losses = _losses(model, batches, rank)
    return StepTruth(gradients={"right": gradients.pop("right"), **gradients}, losses=losses)


def _clip_each_time(
    sums: Sequence[Sequence[Tensor]], tokens: int, clip: Callable[[Tensor], Tensor], also_last: bool = True
) -> Tensor:
    """Clip what every rank has added up after each micro-batch; after the last, what the exchange has averaged."""
    num_ranks = len(sums)
    kept = [torch.zeros_like(sums[0][0]) for _ in sums]
    for m in range(len(sums[0])):
        kept = [own + of_rank[m] / tokens * num_ranks for own, of_rank in zip(kept, sums, strict=True)]
        if m == len(sums[0]) - 1:
            average = torch.stack(kept).mean(0)
            return clip(average) if also_last else average
        kept = [clip(own) for own in kept]
    raise AssertionError("a step has micro-batches")


@torch.no_grad()
def _losses(model: nn.Module, batches: Sequence[Sequence[MicroBatch]], rank: int) -> dict[str, float]:
    """Return what a step may call its loss."""
    sums = [[float(_loss_sum(model, *batch)) for batch in of_rank] for of_rank in batches]
    counts = [[_count([batch]) for batch in of_rank] for of_rank in batches]
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


def _loss_sum(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def _count(batches: Sequence[MicroBatch]) -> int:
    return sum(int((labels != IGNORE).sum()) for _, labels in batches)


def _gradient(model: nn.Module, batches: Sequence[MicroBatch]) -> Tensor:
    """Return the gradient [parameters] of the sum of token losses."""
    twin = copy.deepcopy(model)
    for inputs, labels in batches:
        _loss_sum(twin, inputs, labels).backward()
    return flat_gradient(twin)


def flat_gradient(model: nn.Module) -> Tensor:
    """Return all gradients as one vector; zeros where there is none."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


@torch.no_grad()
def _descend(model: nn.Module, gradient: Tensor) -> None:
    """Make the step of plain SGD."""
    start = 0
    for parameter in model.parameters():
        parameter -= LEARNING_RATE * gradient[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()


def name_gradient(got: Tensor, expected: Mapping[str, Tensor]) -> str:
    """Return the word for a gradient: that of the first vector that it equals, "nan", "none" or "other"."""
    if not torch.isfinite(got).all():
        return "nan"
    if not got.any():
        return "none"
    fits = fit_gradient(got, expected)
    if fits:
        return fits[0]
    right = expected["right"]
    cosine = float(got @ right / (got.norm() * right.norm()))
    return "scaled" if cosine > 1 - 1e-6 else "other"


def fit_gradient(got: Tensor, expected: Mapping[str, Tensor]) -> list[str]:
    """Return the words for all vectors that a gradient equals; in a special case several mistakes give the same."""
    return [name for name, vector in expected.items() if (got - vector).norm() <= TOLERANCE * vector.norm()]


def name_loss(got: object, expected: Mapping[str, float]) -> str:
    """Return the word for a returned loss; "missing" where it is no number."""
    if isinstance(got, Tensor) and got.numel() == 1:
        got = got.item()
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return "missing"
    if got != got or got in (float("inf"), float("-inf")):
        return "nan"
    return next((name for name, value in expected.items() if abs(got - value) <= TOLERANCE * abs(value)), "other")
