"""Small exchanges between ranks that a notebook shows by hand: swap tensors with the other rank, collect values.

Enters and leaves: tensors and plain values of one rank. Imports nothing else of the package, so that a cell which only
shows a collective starts fast. Chapter 1.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def exchange(tensor: Tensor) -> Tensor:
    """Give a tensor to the other one of two ranks and return what that one gives.

    Communicates: the tensor, once in each direction.
    """
    received, other = torch.empty_like(tensor), 1 - dist.get_rank()
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor.contiguous(), other), dist.P2POp(dist.irecv, received, other)]
    )
    for request in requests:
        request.wait()
    return received


def from_every_rank(value: T) -> list[T]:
    """Return the value of every rank, in rank order; all ranks must call this.

    Communicates: an all-gather of the pickled value.
    """
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
