"""The loss of a step: the mean over all supervised tokens of all ranks and micro-batches, exactly.

Averaging the means of micro-batches or ranks is wrong as soon as they hold different numbers of supervised tokens:
short answers would weigh more. So a micro-batch contributes the *sum* of its token losses, and the whole step is
divided once, by the number of supervised tokens of the whole step. Chapter 2.

`train.loss_weighting` may give tokens different weights; the sum is then a weighted one, and the step is divided by the
sum of all its weights. "sqrt" weighs each token of a sample with n supervised tokens by 1 / sqrt(n): a sample counts
as sqrt(n), between one for all samples and n. Source: InternVL's training code, `--loss_reduction square` (`len2weight`
in internvl_chat_finetune.py); Chen et al. 2024, InternVL 2.5 (arXiv:2412.05271), loss reweighting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from vlmcourse.data.samples import IGNORE_LABEL
from vlmcourse.parallel.comm import at_least_fp32
from vlmcourse.parallel.vocabulary import vocabulary_losses


def check_loss(loss: object) -> Tensor:
    """Return what a learner's `loss_of` has returned, if backward can start from it.

    Raises:
        ValueError: if it is no tensor, not a single number, or has no gradient.
    """
    if not isinstance(loss, Tensor):
        found = f"a {type(loss).__name__}"
    elif loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}"
    elif not loss.requires_grad:
        found = "a tensor without a gradient"
    else:
        return loss
    raise ValueError(
        f"loss_of returned {found}: it must return a scalar tensor with a gradient; add its elements up, and leave out "
        "item(), detach() and no_grad()"
    )


class RowLosses(NamedTuple):
    """The losses of one micro-batch at this rank's positions; detached, on the device."""

    losses_BS: Tensor
    """fp32 [batch, seq / cp], weighted; 0 where nothing is supervised."""
    weights_BS: Tensor
    """fp32 [batch, seq / cp]."""
    positions_S: Tensor | None
    """int64 [seq / cp], which columns of the labels these are; None where they are all of them, in order."""


@dataclass
class LossRows:
    """The losses of a step's micro-batches, in their order, while somebody asks for them."""

    is_open: bool = False
    found: list[RowLosses] = field(default_factory=list)


@dataclass(frozen=True)
class TokenLoss:
    """What a micro-batch contributes to the loss of its step, under one weighting of tokens; call it as a function."""

    weighting: str = "tokens"
    """tokens (all weigh 1) or sqrt (see `token_weights`)."""
    rows: LossRows | None = field(default=None, compare=False, repr=False)
    """Where the losses of single tokens go."""

    def __call__(
        self, logits_BSV: Tensor, labels_BS: Tensor, take_part: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Add up the weighted cross-entropy of every supervised token of one micro-batch.

        Args:
            logits_BSV: as in `token_loss_sum`; [batch, seq / cp, vocabulary] where there is `take_part`.
            labels_BS: int64 [batch, seq], of whole sequences: a sample's weight depends on all of its tokens.
            take_part: cuts this rank's positions out of a [batch, seq], under context parallelism.

        Returns:
            A scalar, fp32.
        """
        weights_BS = None if self.weighting == "tokens" else token_weights(labels_BS, self.weighting)
        positions_S = None
        if take_part is not None:
            positions_S = take_part(torch.arange(labels_BS.shape[1], device=labels_BS.device)[None])[0]
            labels_BS = take_part(labels_BS)
            weights_BS = None if weights_BS is None else take_part(weights_BS)
        if self.rows is None or not self.rows.is_open:
            return token_loss_sum(logits_BSV, labels_BS, weights_BS)
        losses_BS = token_losses(logits_BSV, labels_BS, weights_BS)
        if weights_BS is None:
            weights_BS = token_weights(labels_BS, "tokens")
        self.rows.found.append(RowLosses(losses_BS.detach(), weights_BS, positions_S))
        return losses_BS.sum()


def token_weights(labels_BS: Tensor, weighting: str) -> Tensor:
    """Return the weight of each token in the loss.

    Args:
        labels_BS: int64 [batch, seq]; each row is one sample, with all of its answers.
        weighting: tokens or sqrt.

    Returns:
        fp32 [batch, seq]; 0 where nothing is supervised, else 1 (tokens), or 1 / sqrt(supervised tokens of the row).

    Raises:
        ValueError: if there is no such weighting.
    """
    is_supervised_BS = labels_BS != IGNORE_LABEL
    if weighting == "tokens":
        return is_supervised_BS.float()
    if weighting != "sqrt":
        raise ValueError(f"train.loss_weighting = {weighting!r}: choose tokens or sqrt")
    num_B1 = is_supervised_BS.sum(dim=1, keepdim=True)
    return torch.where(is_supervised_BS, num_B1.clamp(min=1).float().rsqrt(), 0.0)


def weight_sum(labels_BS: Tensor, weighting: str) -> float:
    """Return the sum of all weights of some samples in float64: the number of tokens, or the sum of sqrt(n)."""
    num_B = (labels_BS != IGNORE_LABEL).sum(dim=1).double()
    return float(num_B.sum() if weighting == "tokens" else num_B.sqrt().sum())


def token_loss_sum(logits_BSV: Tensor, labels_BS: Tensor, weights_BS: Tensor | None = None) -> Tensor:
    """Add up what `token_losses` returns: a scalar, fp32; 0, with zero gradients, where no token is supervised."""
    return token_losses(logits_BSV, labels_BS, weights_BS).sum()


def token_losses(logits_BSV: Tensor, labels_BS: Tensor, weights_BS: Tensor | None = None) -> Tensor:
    """Return the cross-entropy of every token of one micro-batch.

    Args:
        logits_BSV: [batch, seq, vocabulary], any float type; computed in fp32 (or float64, where they are that). Under
            tensor parallelism a `DTensor` split along the vocabulary; it is not gathered.
        labels_BS: int64 [batch, seq], already shifted; `IGNORE_LABEL` positions count nothing.
        weights_BS: fp32 [batch, seq], what each token's loss is multiplied by; None is 1.

    Returns:
        fp32 [batch, seq]; 0 where nothing is supervised. Under tensor parallelism all ranks of the axis have the same.
    Communicates: nothing, or what `vocabulary_losses` does.
    """
    if isinstance(logits_BSV, DTensor):
        return vocabulary_losses(logits_BSV, labels_BS, IGNORE_LABEL, weights_BS)
    logits_NV, labels_N = at_least_fp32(logits_BSV.flatten(0, 1)), labels_BS.flatten()
    losses_BS = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE_LABEL, reduction="none").view_as(labels_BS)
    return losses_BS if weights_BS is None else losses_BS * weights_BS
