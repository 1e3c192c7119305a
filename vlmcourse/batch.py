"""How many samples one optimizer step takes, and how to reach a number of them.

Enters: samples of a micro-batch, micro-batches that a rank adds up, ranks with samples of their own. Leaves: the
effective (or global) batch, from this one function wherever the package names it: the `Trainer`, the check of a
configuration, the planner, every report. No torch. Chapter 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcourse.values import check_counts


@dataclass(frozen=True)
class AccumulationChoice:
    """A number of micro-batches a step, and how far its batch is from the one that was asked for."""

    accumulation_steps: int
    samples: int
    """Of one optimizer step."""
    error: int
    """`samples` minus the target; 0 where the target is met exactly."""


def effective_batch_size(micro_batch_size: int, accumulation_steps: int, dp_degree: int) -> int:
    """Return the samples of one optimizer step: micro-batch x accumulation x data-parallel degree.

    The number of ranks has no place in it: ranks that share samples (tensor, context and pipeline parallelism) do not
    make the batch larger (F4).

    Args:
        micro_batch_size: samples of one forward pass of one rank.
        accumulation_steps: micro-batches that a rank adds up before the optimizer steps.
        dp_degree: ranks with samples of their own, `Layout.dp_degree`.

    Raises:
        ValueError: naming every argument that is not a whole number of 1 or more.
    """
    check_counts(1, micro_batch_size=micro_batch_size, accumulation_steps=accumulation_steps, dp_degree=dp_degree)
    return micro_batch_size * accumulation_steps * dp_degree


def describe_batch(micro_batch_size: int, accumulation_steps: int, dp_degree: int) -> str:
    """Return the product as text, such as "2 x 8 x 4 = 64"."""
    samples = effective_batch_size(micro_batch_size, accumulation_steps, dp_degree)
    return f"{micro_batch_size} x {accumulation_steps} x {dp_degree} = {samples}"


def nearest_accumulation(target: int, micro_batch_size: int, dp_degree: int) -> tuple[AccumulationChoice, ...]:
    """Return how often to accumulate for a batch of `target` samples.

    Args:
        target: samples of one optimizer step that are wanted.
        micro_batch_size: samples of one forward pass of one rank.
        dp_degree: ranks with samples of their own.

    Returns:
        One choice where it meets the target; else the two nearest, the smaller batch first, or the one of a single
        micro-batch where that is already too much.

    Raises:
        ValueError: if an argument is not a whole number of 1 or more.
    """
    check_counts(1, target=target)
    one_round = effective_batch_size(micro_batch_size, 1, dp_degree)
    below, left = divmod(target, one_round)
    steps = [below] if not left else [s for s in (below, below + 1) if s]
    return tuple(AccumulationChoice(s, s * one_round, s * one_round - target) for s in steps)
