"""Cases of lab 6.1: steps of models with trained, frozen and recomputed towers, with their MFU and HFU.

Enters: a seed. Leaves: cases of each part and what each must give. Chapter 6.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

Tower = tuple[float, bool, bool]
"""FLOPs of forward, whether its weights are trained, whether it is recomputed."""

T, F = True, False
FLAGS: dict[str, tuple[tuple[tuple[bool, bool], ...], ...]] = {
    "trained": (((T, F), (T, F)), ((T, F), (T, F), (T, F))),
    "frozen": (
        ((F, F), (T, F), (F, F)),  # a frozen vision tower, a trained projector, a frozen language tower
        ((F, F), (T, F)),
        ((T, F), (F, F), (T, F)),
        ((F, F), (F, F), (T, F)),
    ),
    "recomputed": (
        ((F, T), (T, F), (F, T)),
        ((F, T), (T, T)),
        ((T, T), (F, F), (T, T)),
        ((T, T), (T, F)),
    ),
    "no peak": (((T, T),), ((F, F), (T, F))),
}
"""By part: of each tower, whether it is trained and whether it is recomputed. Cases go round in them."""
MIN_FLOPS, MAX_FLOPS = 2, 9
"""Of a tower's forward, in 10^12: none is so small that a mistake about it is no more than rounding."""


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """One step, as a learner's function is called with it."""

    towers: tuple[Tower, ...]
    step_s: float
    num_devices: int
    peak_flop_per_s: float | None

    def __str__(self) -> str:
        towers = ", ".join(f"({flops:.0e}, {trained}, {again})" for flops, trained, again in self.towers)
        peak = "None" if self.peak_flop_per_s is None else f"{self.peak_flop_per_s:.2g}"
        return f"utilisation([{towers}], {self.step_s:g}, {self.num_devices}, {peak})".replace("e+", "e")


def count_passes(towers: Sequence[Tower]) -> list[int]:
    """Return what each tower's forward and backward cost together, in forwards of this tower."""
    passes, is_reached = [], False
    for _, is_trained, _ in towers:
        is_reached = is_reached or is_trained
        passes.append(1 + is_reached + is_trained)
    return passes


def right_utilisation(case: StepCase) -> tuple[float, float] | tuple[None, None]:
    """Return MFU and HFU of a step, or None for both where no peak is known."""
    if case.peak_flop_per_s is None:
        return None, None
    passes = count_passes(case.towers)
    needed = sum(flops * count for (flops, _, _), count in zip(case.towers, passes, strict=True))
    again = sum(
        flops * (is_again and count > 1) for (flops, _, is_again), count in zip(case.towers, passes, strict=True)
    )
    possible = case.step_s * case.num_devices * case.peak_flop_per_s
    return needed / possible, (needed + again) / possible


def make_steps(part: str, seed: int, num_cases: int) -> list[StepCase]:
    """Make the cases of a part, a key of `FLAGS`; MFU and HFU are below 1."""
    rng, cases = random.Random(f"{part} {seed}"), []
    for number in range(num_cases):
        flags = FLAGS[part][number % len(FLAGS[part])]
        flops = rng.sample(range(MIN_FLOPS, MAX_FLOPS + 1), len(flags))
        towers = tuple((1e12 * size, *flag) for size, flag in zip(flops, flags, strict=True))
        num_devices = rng.choice((2, 4, 8, 16))
        seconds = rng.choice((0.2, 0.4, 0.5, 0.8, 1.6))
        least = 4 * sum(size for size, _, _ in towers) / (num_devices * seconds)  # a peak at which all would be busy
        peak = None if part == "no peak" else float(f"{least / rng.uniform(0.3, 0.7):.1e}")
        cases.append(StepCase(towers=towers, step_s=seconds, num_devices=num_devices, peak_flop_per_s=peak))
    return cases
