"""Bytes that one rank sends in an optimizer step of data-parallel training, by collective.

Enters: parameters, ranks, ZeRO stage. Leaves: `Traffic`. Ring algorithms are assumed: a reduce-scatter or an
all-gather of S bytes over N ranks sends S (N - 1) / N from each rank, an all-reduce is one of each. Time, topology and
tensor-parallel traffic are left to a later chapter.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends in one optimizer step."""

    all_reduce: float = 0.0
    reduce_scatter: float = 0.0
    all_gather: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.all_reduce + self.reduce_scatter + self.all_gather


def estimate_step_traffic(
    num_params: int, num_ranks: int, zero_stage: int, *, weight_bytes: int = 2, gradient_bytes: int = 2
) -> Traffic:
    """Estimate the bytes that one rank sends in one step without accumulation.

    DDP all-reduces the gradients. ZeRO-1 and ZeRO-2 reduce-scatter the gradients and all-gather the updated weights,
    which is the same volume. ZeRO-3 gathers the weights for the forward pass and again for the backward pass: 1.5 x.

    Args:
        num_params: trainable parameters that the ranks share.
        num_ranks: ranks of the data-parallel group.
        zero_stage: 0 (DDP), 1, 2 or 3.
        weight_bytes: bytes of one weight on the wire.
        gradient_bytes: bytes of one gradient on the wire.

    Returns:
        Bytes sent by one rank.

    Raises:
        ValueError: for a number out of range.

    Source: Rajbhandari et al. 2020, section 7.
    """
    if num_params < 0 or num_ranks < 1:
        raise ValueError(f"num_params = {num_params}, num_ranks = {num_ranks}: need 0 or more, and 1 or more")
    if zero_stage not in range(4):
        raise ValueError(f"zero_stage = {zero_stage!r}: must be 0, 1, 2 or 3")
    ring = num_params * (num_ranks - 1) / num_ranks
    if zero_stage == 0:
        return Traffic(all_reduce=2 * ring * gradient_bytes)
    num_gathers = 2 if zero_stage == 3 else 1
    return Traffic(reduce_scatter=ring * gradient_bytes, all_gather=num_gathers * ring * weight_bytes)
