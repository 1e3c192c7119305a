"""Inputs on which a synchronized BatchNorm is compared with fp64 arithmetic in one process; run by two ranks."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

from vlmcourse.labs.ch01 import relative_error
from vlmcourse.parallel.batch_norm import SyncBatchNorm2d
from vlmcourse.parallel.ranks import Ranks

BATCH_NORM_INPUTS: dict[str, tuple[float, float, torch.dtype, bool, int]] = {
    "far from 0": (1000.0, 0.01, torch.float32, True, 6),
    "no weights": (3.0, 1.0, torch.float32, False, 6),
    "bf16": (3.0, 1.0, torch.bfloat16, True, 6),
    "fp16, more elements than it can count": (3.0, 1.0, torch.float16, True, 150),
}
"""Mean, standard deviation, type, whether the layer has weights, height and width."""


def normalize(name: str, ranks: Ranks) -> dict[str, float]:
    """Return how far a synchronized BatchNorm is from fp64 arithmetic over the samples of all ranks."""
    mean, std, dtype, affine, size = BATCH_NORM_INPUTS[name]
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(4, 3, size, size, generator=generator, dtype=torch.float64)
    noise[1::2] += 0.5  # the ranks' own means differ
    pixels = (mean + std * noise).to(dtype)
    pull = torch.randn(4, 3, size, size, generator=generator, dtype=torch.float64)
    norm = torch.nn.BatchNorm2d(3, affine=affine, momentum=1.0)
    if affine:
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([1.0, 2.0, 0.5]))
    exact = copy.deepcopy(norm).double()
    assert dist.group.WORLD is not None
    synced = SyncBatchNorm2d(norm, dist.group.WORLD)
    whole, mine = pixels.double().requires_grad_(), pixels[ranks.rank :: 2].clone().requires_grad_()
    (expected := exact(whole)).backward(pull)
    (got := synced(mine)).backward(pull[ranks.rank :: 2].to(dtype))
    assert got.dtype == dtype and mine.grad is not None and whole.grad is not None
    assert exact.running_var is not None and synced.running_var is not None
    off = {
        "output": float((got.double() - expected[ranks.rank :: 2]).detach().abs().max()),
        "gradient": relative_error(mine.grad.double(), whole.grad[ranks.rank :: 2]),
        "variance": relative_error(synced.running_var.double(), exact.running_var),
    }
    if affine:
        assert synced.weight.grad is not None and exact.weight.grad is not None
        total = synced.weight.grad.double()
        dist.all_reduce(total)
        off["weight"] = relative_error(total, exact.weight.grad)
    return off
