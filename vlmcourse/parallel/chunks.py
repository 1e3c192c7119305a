"""Which positions of a sequence each context-parallel rank holds, and how causal work is shared by that choice.

Enters: a whole sequence. Leaves: a rank's chunks of it, in two orders. `contiguous` gives rank r the r-th of `cp`
chunks; under a causal mask the last rank then does most of the work. `zigzag` cuts 2 x cp chunks and gives rank r an
early one, r, and a late one, 2 cp - 1 - r, so that every rank works alike. A rank's chunks are kept in rising order.

Source of the zig-zag: the Llama 3 paper (arXiv:2407.21783), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ORDERS = ("zigzag", "contiguous")


def chunks_of_rank(rank: int, cp: int, order: str) -> tuple[int, ...]:
    """Return the numbers of the chunks that a rank of `cp` holds, rising.

    Raises:
        ValueError: if the order is none of `ORDERS`.
    """
    if order == "zigzag":
        return rank, 2 * cp - 1 - rank
    if order == "contiguous":
        return (rank,)
    raise ValueError(f"context-parallel order {order!r}: choose one of {', '.join(ORDERS)}")


def count_chunks(cp: int, order: str) -> int:
    """Return into how many equal chunks the sequence is cut: its length must be a multiple of this."""
    return cp * len(chunks_of_rank(0, cp, order))


def check_seq_len(seq_len: int, cp: int, order: str) -> None:
    """Refuse a sequence that does not fall into equal chunks.

    Raises:
        ValueError: naming the length and the next one that fits.
    """
    num_chunks = count_chunks(cp, order)
    if seq_len % num_chunks:
        raise ValueError(
            f"A sequence of {seq_len} tokens does not fall into {num_chunks} equal chunks (cp={cp}, order {order!r}): "
            f"pad it to {-(-seq_len // num_chunks) * num_chunks} tokens, a multiple of {num_chunks}"
        )


def take_part(tensor: Tensor, dim: int, rank: int, cp: int, order: str) -> Tensor:
    """Cut the positions of one rank out of a dimension of the sequence.

    Args:
        tensor: any shape, whole along `dim`, on every rank of the group alike.
        dim: the dimension of the sequence.
        rank: of the context-parallel group.
        cp: ranks of the group.
        order: one of `ORDERS`.

    Returns:
        The same shape with 1/cp of `dim`: the rank's chunks, one after the other.

    Raises:
        ValueError: if `dim` does not fall into equal chunks.
    """
    check_seq_len(tensor.shape[dim], cp, order)
    mine = chunks_of_rank(rank, cp, order)
    length = tensor.shape[dim] // count_chunks(cp, order)
    return torch.cat([tensor.narrow(dim, chunk * length, length) for chunk in mine], dim)


def sort_parts(parts: Tensor, dim: int, cp: int, order: str) -> Tensor:
    """Put the parts of all ranks, concatenated along `dim` by rank, into the order of the sequence."""
    held = [chunk for rank in range(cp) for chunk in chunks_of_rank(rank, cp, order)]
    if held == sorted(held):
        return parts
    pieces = parts.chunk(len(held), dim)
    return torch.cat([pieces[held.index(chunk)] for chunk in range(len(held))], dim)


def unsort_parts(whole: Tensor, dim: int, cp: int, order: str) -> Tensor:
    """Undo `sort_parts`: from the order of the sequence to that of the ranks."""
    held = [chunk for rank in range(cp) for chunk in chunks_of_rank(rank, cp, order)]
    if held == sorted(held):
        return whole
    pieces = whole.chunk(len(held), dim)
    return torch.cat([pieces[chunk] for chunk in held], dim)


@dataclass(frozen=True)
class Meeting:
    """One chunk of queries and one chunk of keys that it may see."""

    query: int
    """The chunk's place among those of the rank that holds the queries."""
    key: int
    """The chunk's place among those of the rank that holds the keys."""
    is_causal: bool
    """The same chunk on both sides, so that half of it is masked; otherwise all keys are earlier and all are seen."""


def visible_meetings(query_rank: int, key_rank: int, cp: int, order: str) -> Iterator[Meeting]:
    """Yield the pairs of chunks with any visible key; those that are masked as a whole are left out."""
    for i, query_chunk in enumerate(chunks_of_rank(query_rank, cp, order)):
        for j, key_chunk in enumerate(chunks_of_rank(key_rank, cp, order)):
            if key_chunk <= query_chunk:
                yield Meeting(i, j, is_causal=key_chunk == query_chunk)


def count_visible_pairs(seq_len: int, cp: int, order: str) -> list[int]:
    """Count the query-key pairs of causal attention that each rank computes, for one head of one sample.

    Args:
        seq_len: tokens of the whole sequence, S.
        cp: ranks that it is split over.
        order: one of `ORDERS`.

    Returns:
        Pairs of each rank; they sum to S (S + 1) / 2.

    Raises:
        ValueError: if the sequence does not fall into equal chunks.
    """
    check_seq_len(seq_len, cp, order)
    length = seq_len // count_chunks(cp, order)
    # The query at position p sees p + 1 keys; chunk c holds the positions c * length ... (c + 1) * length - 1.
    of_chunk = [length * c * length + length * (length + 1) // 2 for c in range(count_chunks(cp, order))]
    return [sum(of_chunk[c] for c in chunks_of_rank(rank, cp, order)) for rank in range(cp)]


def take_part_positions(seq_len: int, rank: int, cp: int, order: str) -> list[int]:
    """Return the positions that one rank of a context-parallel group holds, in the order in which it holds them.

    Raises:
        ValueError: if the sequence does not fall into equal chunks.
    """
    return take_part(torch.arange(seq_len), 0, rank, cp, order).tolist()
