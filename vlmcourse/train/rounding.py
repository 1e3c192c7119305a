"""Rounding to bf16 at random, right on average: small updates that rounding to nearest would lose add up.

Enters: fp32 numbers and a key. Leaves: bf16 numbers. Each is one of its two neighbors, the nearer one more often, so
that the mean over many roundings is the number itself. The random bits are a function of key and place in the whole
tensor alone: copies of a weight on several ranks round alike, a shard rounds as that part of the whole would, and a
resumed run as one that was never stopped. Chapter 3.

Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision" (arXiv:1502.02551), section 3; Steele, Lea
and Flood 2014, "Fast Splittable Pseudorandom Number Generators", the mixing function of SplitMix64.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

DROPPED_BITS = 16
"""Bits of an fp32 fraction that bf16 does not have."""
_MASK = (1 << DROPPED_BITS) - 1


def stochastic_round(x: Tensor, key: int, index: Tensor | None = None) -> Tensor:
    """Round fp32 numbers to bf16, up or down with the probability that makes the mean right.

    Args:
        x: float32, any shape.
        key: one of `rounding_key`; the same key and places give the same bits.
        index: int64, of `x`'s shape: the place of each element in the whole tensor; by default `x` is the whole.

    Returns:
        bfloat16, of `x`'s shape. Infinities and NaN stay what they are.
    """
    if index is None:
        index = torch.arange(x.numel(), device=x.device).view(x.shape)
    # bf16 is the upper half of fp32. Adding a number below 2^16 to the lower half carries into the upper one with a
    # probability of lower half / 2^16; cutting the lower half off then rounds up or down. The sign has a bit of its
    # own, so this is "away from zero" or "toward zero" for both signs.
    bits = x.contiguous().view(torch.int32)
    carried = (bits + random_16_bits(index, key)) & ~_MASK
    rounded = carried.view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(torch.bfloat16)


def random_16_bits(index: Tensor, key: int) -> Tensor:
    """Return a number from 0 to 2^16 - 1 for each place, int32; it looks random and is a function of place and key."""
    # int64 products wrap around, and shifts copy the sign: the masks make them logical.
    z = index * _signed(0x9E3779B97F4A7C15) + key
    z = (z ^ ((z >> 30) & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return ((z >> 48) & _MASK).to(torch.int32)


def rounding_key(seed: int, step: int, name: str) -> int:
    """Return the key of one tensor in one step, a 64-bit number with a sign.

    Args:
        seed: of the run.
        step: optimizer steps done.
        name: of the tensor, such as "language.norm.weight" or "exp_avg of language.norm.weight".
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def global_index(tensor: Tensor) -> Tensor:
    """Return for each element that this rank stores its place in the flattened whole tensor, int64.

    Args:
        tensor: plain, or a `DTensor` of any placement; the result has the shape of the local part.
    """
    if not isinstance(tensor, DTensor):
        return torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
    with unset_fake_temporarily():  # it reads a table of rows, also in a dry run
        local_shape, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    index = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for dim, (length, offset) in enumerate(zip(local_shape, offsets, strict=True)):
        stride = tensor.shape[dim + 1 :].numel()
        places = (torch.arange(length, device=tensor.device) + offset) * stride
        index = index[..., None] + places
    return index


def _signed(number: int) -> int:
    """Return the 64-bit number with a sign that has the same bits."""
    return number - (1 << 64) if number >> 63 else number
