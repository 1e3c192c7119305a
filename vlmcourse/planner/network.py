"""Bytes that one rank sends in an optimizer step of data-parallel training, by collective, and how long they take.

Enters: parameters, ranks, ZeRO stage; or a collective, its payload and a `Link`. Leaves: `Traffic`; bytes; seconds.
Ring algorithms are assumed: a reduce-scatter or an all-gather of S bytes over N ranks sends S (N - 1) / N from each
rank, in N - 1 messages one after the other; an all-reduce is one of each. Links are measured in `parallel/links.py`.
Groups over several nodes, trees and hierarchies are in `fabric.py`, what tensor ranks send in `stage_times.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RING_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "broadcast": 1}
"""How often a collective goes around the ring, by its kind. An all-to-all sends N - 1 parts of S / N without a ring,
and a pipelined broadcast S from all but the last rank: on average the same bytes."""


def ring_sent_bytes(kind: str, payload_bytes: float, num_ranks: int) -> float:
    """Return the bytes that each rank sends in one collective.

    Args:
        kind: a key of `RING_PASSES`.
        payload_bytes: the whole tensor, counted once: what is reduced or broadcast, what is gathered from all ranks,
            what one rank scatters or exchanges.
        num_ranks: ranks of the group; 1 sends nothing.

    Raises:
        ValueError: if the kind is not known, or a number is out of range.
    Source: Thakur et al. 2005, "Optimization of collective communication operations in MPICH", section 4.
    """
    if kind not in RING_PASSES:
        raise ValueError(f"There is no formula for a collective of kind {kind!r}: choose one of {list(RING_PASSES)}")
    if payload_bytes < 0 or num_ranks < 1:
        raise ValueError(f"payload_bytes = {payload_bytes}, num_ranks = {num_ranks}: need 0 or more, and 1 or more")
    return RING_PASSES[kind] * payload_bytes * (num_ranks - 1) / num_ranks


def ring_messages(kind: str, num_ranks: int) -> int:
    """Return how many messages follow each other in one collective; arguments and errors as in `ring_sent_bytes`."""
    ring_sent_bytes(kind, 0, num_ranks)
    return RING_PASSES[kind] * (num_ranks - 1)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between ranks: what a message costs, and what a byte costs (the alpha-beta model).

    Source: Hockney 1994, "The communication challenge for MPP".
    """

    latency_s: float
    """Of one message."""
    bytes_per_s: float
    """That one rank sends; infinite where the size made no difference."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0 and self.bytes_per_s > 0):
            raise ValueError(
                f"latency_s = {self.latency_s}, bytes_per_s = {self.bytes_per_s}: need a number of 0 or more, and one "
                "greater than 0"
            )

    def estimate_s(self, kind: str, payload_bytes: float, num_ranks: int) -> float:
        """Estimate the seconds of one collective; arguments and errors as in `ring_sent_bytes`."""
        sent_bytes = ring_sent_bytes(kind, payload_bytes, num_ranks)
        return ring_messages(kind, num_ranks) * self.latency_s + sent_bytes / self.bytes_per_s


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
    if zero_stage == 0:
        return Traffic(all_reduce=ring_sent_bytes("all-reduce", num_params * gradient_bytes, num_ranks))
    gathered_bytes = num_params * weight_bytes * (2 if zero_stage == 3 else 1)
    return Traffic(
        reduce_scatter=ring_sent_bytes("reduce-scatter", num_params * gradient_bytes, num_ranks),
        all_gather=ring_sent_bytes("all-gather", gathered_bytes, num_ranks),
    )
