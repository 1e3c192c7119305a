"""Every random choice of a run as a function of one seed, so that ranks agree where they must and differ where they
may.

Weights start equal on all data-parallel ranks; which samples make up a step is the sampler's arithmetic, equal for
every strategy; only randomness inside a forward pass (dropout, augmentation) differs by data-parallel rank. Because a
step's randomness depends on (seed, step, rank) alone, a resumed run needs no saved generator states. `seed + rank` for
everything would break the first rule.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """Return a seed for one purpose that is unrelated to the seeds of all others.

    Args:
        seed: the run's seed.
        purpose: what it is for, such as "weights".
        indices: step, rank and the like.

    Returns:
        A number from 0 to 2^63 - 1, equal on every machine and Python version.
    """
    text = ":".join([str(seed), purpose, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Set the generators of Python, NumPy and PyTorch for one optimizer step of one data-parallel rank."""
    step_seed = derive_seed(seed, "step", step, dp_rank)
    random.seed(step_seed)
    np.random.seed(step_seed % 2**32)
    torch.manual_seed(step_seed)
