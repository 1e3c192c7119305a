"""Cases of lab 5.1: parameters on ranks that ZeRO-1 trains for a few steps, and gradients that differ by rank.

Enters: a seed. Leaves: cases, their weights and gradients, and what a rank may keep and send. `zero_truths` says what
the weights must become, and what known mistakes make of them.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

KINDS = ("uneven", "frozen", "skipped")
"""What is special about a case: nothing but sizes that no number of ranks divides; a parameter that needs no gradient;
two parameters that get no gradient in one of the steps, on any rank."""
STATE_BYTES = 8
"""Of a trained parameter: two fp32 moments."""
COPY_BYTES = 4
"""Of a parameter in fp32: an optimizer may keep a copy of its own share."""
SLACK_BYTES = 1024
"""Allowed for counters, indices and padding."""


@dataclass(frozen=True, kw_only=True)
class ZeroCase:
    """Parameters, AdamW's settings and a few steps on some ranks."""

    kind: str
    world_size: int
    shapes: tuple[tuple[int, ...], ...]
    frozen: int | None
    """Index of the parameter that needs no gradient."""
    skipped: tuple[tuple[int, int], ...]
    """Pairs of a step and the index of a parameter that gets no gradient in it."""
    lr: float
    betas: tuple[float, float]
    eps: float
    """Large, so that a sum of gradients in place of their mean is seen, which Adam's division else hides."""
    weight_decay: float
    seed: int
    num_steps: int = 4

    @property
    def sizes(self) -> list[int]:
        """Numbers of each parameter."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def trained_sizes(self) -> list[int]:
        """Numbers of each parameter that is trained."""
        return [size for index, size in enumerate(self.sizes) if index != self.frozen]

    @property
    def most_state_bytes(self) -> float:
        """What a rank may keep between steps besides weights and gradients.

        Two moments and a copy of 1 / N of what is trained, and the moments of the largest parameter, so that whole
        parameters can be dealt out.
        """
        share = sum(self.trained_sizes) / self.world_size
        return (STATE_BYTES + COPY_BYTES) * share + STATE_BYTES * max(self.trained_sizes) + SLACK_BYTES

    @property
    def most_sent_bytes(self) -> float:
        """What a rank may send in a step: an all-reduce of gradients and a broadcast of weights, as rings."""
        n = self.world_size
        return 1.02 * 3 * COPY_BYTES * sum(self.trained_sizes) * (n - 1) / n + SLACK_BYTES

    def __str__(self) -> str:
        return f"{self.kind} ({sum(self.sizes)} numbers in {len(self.sizes)} parameters, {self.world_size} ranks)"


def make_zero_cases(seed: int, world_size: int, num_cases: int) -> list[ZeroCase]:
    """Draw cases, one kind after the other, those last in which a careless step leaves a rank waiting."""
    rng = random.Random(f"zero:{seed}:{world_size}")
    kinds = sorted((KINDS[-number % 3] for number in range(num_cases)), key=("uneven", "frozen", "skipped").index)
    return [_make_case(rng, kind, world_size) for kind in kinds]


def _make_case(rng: random.Random, kind: str, world_size: int) -> ZeroCase:
    shapes = _draw_shapes(rng, world_size)
    large = [index for index, shape in enumerate(shapes) if len(shape) > 1]
    first, second = rng.sample(large, k=2)
    return ZeroCase(
        kind=kind,
        world_size=world_size,
        shapes=shapes,
        frozen=first if kind == "frozen" else None,
        skipped=((0, first), (2, second)) if kind == "skipped" else (),
        lr=rng.choice((0.04, 0.05, 0.06)),
        betas=(rng.choice((0.8, 0.85, 0.9)), rng.choice((0.93, 0.95, 0.97))),
        eps=rng.choice((0.1, 0.15, 0.2)),
        weight_decay=rng.choice((0.2, 0.25, 0.3)),
        seed=rng.randrange(10**6),
    )


def _draw_shapes(rng: random.Random, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Draw parameters of like sizes and a few tiny ones, which 2 and 3 ranks divide neither together nor one by one.

    They stand in an order in which each N-th of them makes a fair share.
    """
    while True:
        shapes: list[tuple[int, ...]] = [(rng.randint(9, 14), rng.randint(14, 19)) for _ in range(11)]
        shapes += [(rng.randint(5, 6), 7, 5), (rng.choice((11, 13, 17)),), (1,), (rng.choice((5, 7)),)]
        rng.shuffle(shapes)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        dealt = [sum(sizes[rank::world_size]) for rank in range(world_size)]
        has_rest = all(sum(sizes) % number and sum(size % number > 0 for size in sizes) > 5 for number in (2, 3))
        if has_rest and max(dealt) <= sum(sizes) / world_size + max(sizes) / 2:
            return tuple(shapes)


def make_params(case: ZeroCase) -> list[nn.Parameter]:
    """Return the parameters of a case, equal on every rank; weights lie between -0.9 and 0.9."""
    generator = torch.Generator().manual_seed(case.seed)
    weights = [1.8 * torch.rand(shape, generator=generator) - 0.9 for shape in case.shapes]
    return [nn.Parameter(weight, requires_grad=index != case.frozen) for index, weight in enumerate(weights)]


@functools.lru_cache(maxsize=64)
def make_gradients(case: ZeroCase, step: int, rank: int) -> list[Tensor | None]:
    """Return a rank's gradients of one step; None where a parameter has none."""
    generator = torch.Generator().manual_seed(1_000_003 * (step + 1) + 1009 * rank + case.seed)
    drawn = [torch.randn(shape, generator=generator) + 0.3 * rank for shape in case.shapes]
    return [
        None if index == case.frozen or (step, index) in case.skipped else gradient
        for index, gradient in enumerate(drawn)
    ]


def flatten(tensors: list[Tensor]) -> Tensor:
    """Return all numbers as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
