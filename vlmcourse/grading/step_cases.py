"""Cases of exercise 4.2's accumulation step: a small model and ragged micro-batches on ranks.

Enters: a seed. Leaves: cases, their models and micro-batches, and gradients of these; `step_truths` says what a step
must make of them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, SEQ_LEN = 13, 8, 9
IGNORE = -100
LEARNING_RATE = 0.5
KINDS = ("ragged", "clipped", "mute rank", "mute last", "single")
"""What is special about a case: nothing but ragged labels; clipping; a rank without any supervised token; a last
micro-batch without any, and clipping; only one micro-batch."""
CLIPPED = ("clipped", "mute last")
"""Kinds whose first step is clipped and whose second comes close to it: a clipped gradient hides a wrong factor."""
LEFT_OVER = ("ragged", "mute rank")
"""Kinds that begin with gradients left from before."""

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


def loss_sum(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of token losses."""
    return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def count_supervised(batches: Sequence[MicroBatch]) -> int:
    """Count the supervised tokens."""
    return sum(int((labels != IGNORE).sum()) for _, labels in batches)


def find_gradient(model: nn.Module, inputs: Tensor, labels: Tensor, shift: int = 0) -> Tensor:
    """Return the gradient [parameters] of the sum of token losses, of labels that stand `shift` places too early."""
    twin = copy.deepcopy(model)
    logits = twin(inputs)[:, : SEQ_LEN - shift].flatten(0, 1)
    F.cross_entropy(logits, labels[:, shift:].flatten(), ignore_index=IGNORE, reduction="sum").backward()
    return flat_gradient(twin)


def flat_gradient(model: nn.Module) -> Tensor:
    """Return all gradients as one vector; zeros where there is none."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def find_left_over(case: StepCase, model: nn.Module) -> Tensor:
    """Return what stands in a model's gradients before the first step [parameters]: zeros in most cases."""
    size = sum(p.numel() for p in model.parameters())
    generator = torch.Generator().manual_seed(case.seed)
    return 0.1 * torch.randn(size, generator=generator) if case.kind in LEFT_OVER else torch.zeros(size)


def leave_gradient(case: StepCase, model: nn.Module) -> None:
    """Write what was left from before into the gradients, the same on every rank."""
    if case.kind in LEFT_OVER:
        for parameter, left in zip(model.parameters(), split(model, find_left_over(case, model)), strict=True):
            parameter.grad = left.clone()


def split(model: nn.Module, vector: Tensor) -> list[Tensor]:
    """Cut a vector [parameters] into the shapes of a model's parameters."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    return [part.view_as(p) for part, p in zip(vector.split(sizes), model.parameters(), strict=True)]


@torch.no_grad()
def descend(model: nn.Module, gradient: Tensor) -> None:
    """Make the step of plain SGD."""
    for parameter, part in zip(model.parameters(), split(model, gradient), strict=True):
        parameter -= LEARNING_RATE * part
