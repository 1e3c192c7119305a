"""Cases of lab 1.1: a two-layer MLP of one process, its parts on each rank, and what each quantity must be.

Enters: a case and, on a rank, what a learner's function returned there. Leaves: one word for each quantity: "right", or
the mistake that it equals. Cases are drawn from a seed, so hidden ones come from another. F channels lie between two
layers of width D.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

PARTS: tuple[str, ...] = ("w_in", "b_in", "w_out", "b_out")
"""The weights of the MLP, in the order in which a learner's functions take them."""
TOLERANCE = 1e-4
"""Largest difference, as a share of the largest expected number: fp32 sums in another order stay below 1e-5."""


@dataclass(frozen=True, kw_only=True)
class PairCase:
    """One input and one MLP on some ranks."""

    world_size: int
    lead: tuple[int, ...]
    """The input's dimensions before its width."""
    width: int
    hidden: int
    seed: int

    @property
    def most_numbers(self) -> int:
        """How many numbers a rank may hand to collectives in one direction: the input's size on every rank."""
        return self.world_size * torch.Size(self.lead).numel() * self.width

    def __str__(self) -> str:
        shape = ", ".join(map(str, (*self.lead, self.width)))
        return f"x [{shape}], F = {self.hidden}, on {self.world_size} ranks"


def make_pair_cases(seed: int, world_size: int, num_cases: int) -> list[PairCase]:
    """Draw cases: F is so large that sending weights or hidden channels costs more than sending every rank's sum."""
    rng = random.Random(f"pair:{seed}:{world_size}")
    leads = [(3,), (2, 2), (1,), (2, 1, 2)]
    sizes = [(6, 48), (8, 64), (12, 96), (7, 56)]
    rng.shuffle(sizes)
    return [
        PairCase(
            world_size=world_size,
            lead=leads[number % len(leads)],
            width=sizes[number % len(sizes)][0],
            hidden=sizes[number % len(sizes)][1],
            seed=rng.randrange(10**6),
        )
        for number in range(num_cases)
    ]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """A case with its tensors and all that can be compared."""

    x: Tensor
    """[*lead, D]"""
    grad_y: Tensor
    """[*lead, D], the gradient that arrives at the output."""
    parts: dict[str, Tensor]
    """Weights of one rank, without gradients."""
    outputs: dict[str, Tensor]
    """What the output may equal, by the word for it; "right" first."""
    input_grads: dict[str, Tensor]
    part_grads: dict[str, Tensor]


def make_weights(width: int, hidden: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw an MLP: w_in [F, D], b_in [F], w_out [D, F], b_out [D]."""
    shapes = {"w_in": (hidden, width), "b_in": (hidden,), "w_out": (width, hidden), "b_out": (width,)}
    return {
        name: torch.randn(shape, generator=generator) / (shape[1] ** 0.5 if len(shape) > 1 else 1.0)
        for name, shape in shapes.items()
    }


def cut(weights: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """Return a rank's parts, each a copy of its own: rows of `w_in` and `b_in`, columns of `w_out`, all of `b_out`."""
    size = weights["w_in"].shape[0] // world_size
    block = slice(rank * size, (rank + 1) * size)
    return {
        "w_in": weights["w_in"][block].clone(),
        "b_in": weights["b_in"][block].clone(),
        "w_out": weights["w_out"][:, block].clone(),
        "b_out": weights["b_out"].clone(),
    }


def make_truth(case: PairCase, rank: int) -> Truth:
    """Compute in one process what a rank must find, and what it finds with a known mistake."""
    generator = torch.Generator().manual_seed(case.seed)
    weights = make_weights(case.width, case.hidden, generator)
    x = torch.randn(*case.lead, case.width, generator=generator)
    grad_y = torch.randn(x.shape, generator=generator)
    num_ranks = case.world_size
    y, grad_x, grads = run_mlp(x, grad_y, weights)
    parts = cut(weights, rank, num_ranks)
    part_y, part_grad_x, _ = run_mlp(x, grad_y, parts)
    bias = parts["b_out"]
    outputs = {
        "right": y,
        "bias_on_every_rank": y + (num_ranks - 1) * bias,
        "no_bias": y - bias,
        "own_part": part_y,
        "own_part_no_bias": part_y - bias,
        "mean": (y - bias) / num_ranks + bias,
        "mean_of_all": y / num_ranks,
    }
    input_grads = {
        "right": grad_x,
        "own_part": part_grad_x,
        "times_ranks": num_ranks * grad_x,
        "own_part_times_ranks": num_ranks * part_grad_x,
        "over_ranks": grad_x / num_ranks,
    }
    part_grads = cut(grads, rank, num_ranks)
    return Truth(x=x, grad_y=grad_y, parts=parts, outputs=outputs, input_grads=input_grads, part_grads=part_grads)


def run_mlp(x: Tensor, grad_y: Tensor, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Run forward and backward in one process: output, gradient of x, and gradients of the weights."""
    x = x.clone().requires_grad_()
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    hidden = F.gelu(F.linear(x, leaves["w_in"], leaves["b_in"]))
    y = F.linear(hidden, leaves["w_out"], leaves["b_out"])
    grad_x, *grads = torch.autograd.grad(y, [x, *leaves.values()], grad_y)
    return y.detach(), grad_x, dict(zip(leaves, grads, strict=True))


def name_value(got: Any, candidates: Mapping[str, Tensor]) -> str:
    """Return the word of the candidate that a value equals; "missing", "shape", "nan" or "off" where it is none."""
    if not isinstance(got, Tensor):
        return "missing"
    expected = candidates["right"]
    if got.shape != expected.shape:
        return f"shape {list(got.shape)}"
    value = got.detach().float()
    if not bool(torch.isfinite(value).all()):
        return "nan"
    return next((word for word, candidate in candidates.items() if is_near(value, candidate)), "off")


def name_part_grad(got: Any, expected: Tensor, num_ranks: int) -> str:
    """Return the word for the gradient of a part; see `name_value`."""
    return name_value(got, {"right": expected, "times_ranks": expected * num_ranks, "over_ranks": expected / num_ranks})


def is_near(value: Tensor, expected: Tensor) -> bool:
    """Tell whether two tensors of one shape are equal up to rounding."""
    return float((value - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())
