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
    def num_inputs(self) -> int:
        """How many numbers the input has."""
        return torch.Size(self.lead).numel() * self.width

    @property
    def most_numbers(self) -> int:
        """How many numbers a rank may hand to collectives in one direction: the input's size on every rank.

        Where an input has to be padded to be shared out by its rows, a reduce-scatter of all of it and an all-gather of
        a rank's share may take more than that.
        """
        rows = self.lead[0]
        padded = (-(-rows // self.world_size) * self.world_size) * self.num_inputs // rows
        return max(self.world_size * self.num_inputs, padded + padded // self.world_size)

    def __str__(self) -> str:
        shape = ", ".join(map(str, (*self.lead, self.width)))
        return f"x [{shape}], F = {self.hidden}, on {self.world_size} ranks"


def make_pair_cases(seed: int, world_size: int, num_cases: int) -> list[PairCase]:
    """Draw cases: F is so large that sending weights or a rank's channels costs more than sending every rank's sum."""
    rng = random.Random(f"pair:{seed}:{world_size}")
    leads = [(3,), (2, 2), (1,), (2, 1, 2)]
    widths = [6, 8, 12, 7]
    rng.shuffle(widths)
    return [
        PairCase(
            world_size=world_size,
            lead=leads[number % len(leads)],
            width=widths[number % len(widths)],
            hidden=3 * world_size**2 * widths[number % len(widths)],
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
    } | _mistaken_outputs(x, weights, rank, num_ranks)
    input_grads = {
        "right": grad_x,
        "own_part": part_grad_x,
        "times_ranks": num_ranks * grad_x,
        "own_part_times_ranks": num_ranks * part_grad_x,
        "over_ranks": grad_x / num_ranks,
        "own_part_over_ranks": part_grad_x / num_ranks,
    }
    part_grads = cut(grads, rank, num_ranks)
    return Truth(x=x, grad_y=grad_y, parts=parts, outputs=outputs, input_grads=input_grads, part_grads=part_grads)


def _mistaken_outputs(x: Tensor, weights: Mapping[str, Tensor], rank: int, num_ranks: int) -> dict[str, Tensor]:
    """Compute what a rank's output is with a mistake in forward, by the word for it."""
    w_in, b_in, w_out, b_out = (weights[name] for name in PARTS)
    no_gelu = F.linear(F.linear(x, w_in, b_in), w_out)
    activations = {"relu": F.relu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}
    activations["gelu_by_tanh"] = lambda channels: F.gelu(channels, approximate="tanh")
    summands = torch.stack([_forward(x, cut(weights, other, num_ranks)) for other in range(num_ranks)])
    found = {
        "x_summed": _forward(num_ranks * x, weights),
        "x_over_ranks": _forward(x / num_ranks, weights),
        "only_x_summed": _forward(num_ranks * x, cut(weights, rank, num_ranks)),
        "no_gelu": no_gelu,
        "gelu_after_sum": F.gelu(no_gelu),
        "gelu_after_sum_and_bias": F.gelu(no_gelu + b_out) - b_out,
        "gelu_twice": F.gelu(_forward(x, weights)),
        "no_b_in": _forward(x, {**weights, "b_in": torch.zeros_like(b_in)}),
        "max": summands.amax(dim=0),
        "min": summands.amin(dim=0),
        "product": summands.prod(dim=0),
    }
    found |= {name: F.linear(function(F.linear(x, w_in, b_in)), w_out) for name, function in activations.items()}
    without = {f"{word}_no_bias": output for word, output in found.items()}
    return {word: output + b_out for word, output in found.items()} | without


def _forward(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the output without `b_out`."""
    return F.linear(F.gelu(F.linear(x, weights["w_in"], weights["b_in"])), weights["w_out"])


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
