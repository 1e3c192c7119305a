"""Bytes that one rank sends for the attention of one layer under context parallelism, by method.

Enters: sizes of one attention layer on one rank. Leaves: bytes of the forward and the backward pass. Collectives are
counted as rings, as in `network`. Image features, weights and gradients travel besides and are not in here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ACCUMULATOR_BYTES = 4
"""The ring adds up gradients of keys and values in fp32 as they pass from rank to rank."""


@dataclass(frozen=True, kw_only=True)
class AttentionTraffic:
    """Bytes that one rank sends for one layer and one micro-batch."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both; with activation checkpointing the forward is sent once more."""
        return self.forward + self.backward


def estimate_attention_traffic(
    method: str,
    *,
    num_tokens: int,
    cp: int,
    num_heads: int,
    num_kv_heads: int,
    head_width: int,
    element_bytes: int = 2,
) -> AttentionTraffic:
    """Estimate what context parallelism sends in one attention layer.

    With T tokens on a rank, H query heads, K key/value heads of E channels and b bytes an element:

    - allgather: keys and values of the other ranks come here, 2 T K E b (cp - 1) sent by each rank; their gradients
      are reduce-scattered, as many bytes.
    - ring: the same keys and values pass on cp - 1 times; in backward they do once more, and their gradients, in fp32.
    - ulysses: (cp - 1) / cp of queries, keys, values and results, T (2 H + 2 K') E b, forward and backward alike. K' is
      the least common multiple of K and cp: too few key/value heads are sent several times.

    Args:
        method: "ring", "allgather" or "ulysses".
        num_tokens: batch x sequence of one micro-batch, before it is split over the ranks.
        cp: ranks that share each sequence.
        num_heads: query heads on one rank, after tensor parallelism.
        num_kv_heads: key/value heads on one rank, after tensor parallelism.
        head_width: channels of a head.
        element_bytes: bytes of an activation on the wire.

    Returns:
        Bytes sent by one rank.

    Raises:
        ValueError: for an unknown method, or numbers that do not divide.

    Source: the algorithms of Llama 3 (arXiv:2407.21783), section 3.3.2, Liu et al. 2023 (arXiv:2310.01889) and Jacobs
        et al. 2023 (arXiv:2309.14509), section 3; fp32 gradients in the ring are this package's choice.
    """
    if cp < 1 or num_tokens % cp:
        raise ValueError(f"{num_tokens} tokens over cp={cp} ranks: cp must be 1 or more and divide the tokens")
    tokens = num_tokens // cp
    kv_elements = 2 * tokens * num_kv_heads * head_width
    if method == "allgather":
        sent = float(kv_elements * (cp - 1) * element_bytes)
        return AttentionTraffic(forward=sent, backward=sent)
    if method == "ring":
        sent = float(kv_elements * (cp - 1) * element_bytes)
        return AttentionTraffic(forward=sent, backward=sent + kv_elements * (cp - 1) * ACCUMULATOR_BYTES)
    if method == "ulysses":
        if num_heads % cp:
            raise ValueError(f"cp={cp} does not divide {num_heads} query heads: Ulysses shares them out evenly")
        sent_heads = 2 * num_heads + 2 * math.lcm(num_kv_heads, cp)
        sent = tokens * sent_heads * head_width * element_bytes * (cp - 1) / cp
        return AttentionTraffic(forward=sent, backward=sent)
    raise ValueError(f"context-parallel method {method!r}: choose one of ring, allgather, ulysses")
