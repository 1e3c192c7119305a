"""A microscope for numbers: how many elements of a tensor have which exponent, and how many of them a format can hold.

Enters: tensors, such as the gradients of a real step. Leaves: an `Exponents` for each tower: counts by power of two, to
be drawn against the range of a format (`planner/formats.py`). Only what this rank stores counts. Chapter 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlmcourse.config import TOWERS
from vlmcourse.parallel.apply import named_plain_parameters
from vlmcourse.parallel.comm import local_part
from vlmcourse.planner.formats import FloatFormat


@dataclass(frozen=True)
class Exponents:
    """Elements counted by exponent: e stands for a size from 2^e up to, but not including, 2^(e + 1)."""

    counts: Mapping[int, int]
    """Elements that are finite and not zero, by exponent, ascending."""
    num_zero: int = 0
    num_nonfinite: int = 0

    @property
    def num_nonzero(self) -> int:
        """Finite elements that are not zero."""
        return sum(self.counts.values())

    def __add__(self, other: Exponents) -> Exponents:
        """Count the elements of both."""
        every = sorted({*self.counts, *other.counts})
        counts = {e: self.counts.get(e, 0) + other.counts.get(e, 0) for e in every}
        return Exponents(counts, self.num_zero + other.num_zero, self.num_nonfinite + other.num_nonfinite)

    def scaled(self, power: int) -> Exponents:
        """Return the counts after a multiplication by 2^power, as a loss scaler does it."""
        return Exponents({e + power: n for e, n in self.counts.items()}, self.num_zero, self.num_nonfinite)

    def fates(self, format: FloatFormat) -> dict[str, float]:
        """Return which fraction of the elements that are not zero becomes what in a format.

        Returns:
            Fractions of "zero", "subnormal", "normal" and "overflow". Exact but for two edges that exponents do not
            show: a number just below a power of two that rounds up to it, and exactly half of the smallest one.
        """
        fates: dict[str, float] = {"zero": 0.0, "subnormal": 0.0, "normal": 0.0, "overflow": 0.0}
        for exponent, number in self.counts.items():
            # The middle of the exponent's numbers decides, except that rounding up saves all above half the smallest.
            fates[format.fate(1.25 * 2.0**exponent)] += number
        return {fate: number / max(1, self.num_nonzero) for fate, number in fates.items()}


@torch.no_grad()
def count_exponents(tensors: Tensor | Iterable[Tensor]) -> Exponents:
    """Count the elements of tensors by exponent.

    Args:
        tensors: of any float type and placement; of a `DTensor` this rank's part counts.
    """
    total = Exponents({})
    for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
        numbers = local_part(tensor).detach().double().flatten()
        finite = numbers[torch.isfinite(numbers)]
        nonzero = finite[finite != 0]
        exponents, counts = (torch.frexp(nonzero).exponent - 1).unique(return_counts=True)  # frexp: 0.5 <= size < 1
        by_exponent = dict(zip(exponents.tolist(), counts.tolist(), strict=True))
        total += Exponents(by_exponent, finite.numel() - nonzero.numel(), numbers.numel() - finite.numel())
    return total


def gradient_exponents(model: nn.Module) -> dict[str, Exponents]:
    """Count the gradients of a model by exponent and tower.

    Args:
        model: under any strategy, after backward. Shards: this rank's part of each gradient.

    Returns:
        By tower, of those that have a gradient.
    """
    gradients: dict[str, list[Tensor]] = {}
    for name, parameter in named_plain_parameters(model):
        if parameter.grad is not None:
            gradients.setdefault(name.partition(".")[0], []).append(parameter.grad)
    return {tower: count_exponents(gradients[tower]) for tower in TOWERS if tower in gradients}
