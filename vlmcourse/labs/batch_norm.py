"""The BatchNorm lab of chapter 2: which normalization gives the big batch's gradient when the batch is cut (F19).

Enters: two ranks or more. Leaves: for each normalization and each way to cut 32 scans of digits, how far the gradient
of the whole tower is from that of one batch.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from vlmcourse.data.digits import load_scans
from vlmcourse.labs.ch01 import flat_gradient, relative_error
from vlmcourse.models.cnn import ConvTower, freeze_batch_norms, measure_statistics
from vlmcourse.parallel.batch_norm import sync_batch_norms
from vlmcourse.parallel.data import apply_ddp
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.parallel.sync import gradient_sync
from vlmcourse.values import check_counts

NORMS = ("BatchNorm", "SyncBatchNorm", "frozen BatchNorm", "GroupNorm")
CUTS = ("1 rank x 4 micro-batches", "2 ranks x 1 micro-batch", "2 ranks x 4 micro-batches")
NUM_SAMPLES = 32


def load_pictures(num_samples: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    """Return scans, fp32 [samples, 1, 8, 8] from 0 to 1, and the digits that they show, int64 [samples].

    Raises:
        ValueError: if `num_samples` is below 1 or more than there are scans.
    """
    check_counts(1, num_samples=num_samples)
    ink, digits = load_scans()
    if num_samples > len(digits):
        raise ValueError(f"num_samples = {num_samples}: there are {len(digits)} scans; ask for at most so many")
    return torch.from_numpy(ink[:num_samples] / 16.0).float()[:, None], torch.from_numpy(digits[:num_samples])


def build_tower(norm: str, pixels_BCHW: Tensor) -> ConvTower:
    """Return a tower of the lab with the same convolutions whatever the normalization.

    Args:
        norm: one of `NORMS`; a SyncBatchNorm is a BatchNorm until it is told of its ranks.
        pixels_BCHW: [batch, 1, 8, 8], what a frozen BatchNorm's constants are measured on.

    Raises:
        ValueError: if there is no such normalization.
    """
    if norm not in NORMS:
        raise ValueError(f"norm = {norm!r}: choose from {', '.join(NORMS)}")
    torch.manual_seed(0)
    tower = ConvTower("group" if norm == "GroupNorm" else "batch")
    if norm == "frozen BatchNorm":
        measure_statistics(tower, pixels_BCHW)
        freeze_batch_norms(tower)
    return tower


def compare_norms(ranks: Ranks) -> dict[str, dict[str, float]]:
    """Return the relative error of the gradient by normalization and cut; all ranks must call this.

    Communicates: in the cuts with several ranks, gradients once a cut; a SyncBatchNorm its sums in every layer.
    """
    pixels, digits = load_pictures()
    errors: dict[str, dict[str, float]] = {}
    for norm in NORMS:
        tower = build_tower(norm, pixels)
        big = copy.deepcopy(tower).to(ranks.device)
        F.cross_entropy(big(pixels.to(ranks.device)), digits.to(ranks.device)).backward()
        expected = flat_gradient(big)
        cuts = [accumulate(tower, pixels, digits, ranks, norm, *cut) for cut in ((1, 4), (2, 1), (2, 4))]
        errors[norm] = {name: relative_error(gradient, expected) for name, gradient in zip(CUTS, cuts, strict=True)}
    return errors


def accumulate(
    tower: ConvTower, pixels: Tensor, digits: Tensor, ranks: Ranks, norm: str, num_ranks: int, num_micro_batches: int
) -> Tensor:
    """Return the gradient [parameters] of one batch, cut over ranks and micro-batches.

    Args:
        tower: left as it is.
        pixels: [batch, 1, 8, 8].
        digits: [batch].
        ranks: this process's place.
        norm: as in `build_tower`.
        num_ranks: 1 (every rank does all of it) or the number that there are.
        num_micro_batches: of each rank.
    """
    model: nn.Module = copy.deepcopy(tower)
    if num_ranks > 1:
        if norm == "SyncBatchNorm":
            assert dist.group.WORLD is not None
            model = sync_batch_norms(model, dist.group.WORLD, ranks.device)
        model = apply_ddp(model.to(ranks.device), ranks)
    model.to(ranks.device).train()
    mine = slice(ranks.rank, None, ranks.world_size) if num_ranks > 1 else slice(None)
    parts = zip(pixels[mine].chunk(num_micro_batches), digits[mine].chunk(num_micro_batches), strict=True)
    for i, (some, answers) in enumerate(parts):
        with gradient_sync(model, enabled=i == num_micro_batches - 1):
            loss_sum = F.cross_entropy(model(some.to(ranks.device)), answers.to(ranks.device), reduction="sum")
            (loss_sum * num_ranks / len(digits)).backward()  # DDP averages over the ranks
    return flat_gradient(model)
