"""The loss of a step: the mean over all supervised tokens of all ranks and micro-batches, exactly.

Averaging the means of micro-batches or ranks is wrong as soon as they hold different numbers of supervised tokens:
short answers would weigh more. So a micro-batch contributes the *sum* of its token losses, and the whole step is
divided once, by the number of supervised tokens of the whole step. Chapter 2.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from vlmcourse.data.samples import IGNORE_LABEL
from vlmcourse.parallel.vocabulary import vocabulary_loss_sum


def token_loss_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Add up the cross-entropy of every supervised token of one micro-batch.

    Args:
        logits_BSV: [batch, seq, vocabulary], any float type; computed in fp32. Under tensor parallelism a `DTensor`
            split along the vocabulary; it is not gathered.
        labels_BS: int64 [batch, seq], already shifted; `IGNORE_LABEL` positions count nothing.

    Returns:
        A scalar, fp32; 0, with zero gradients, where no token is supervised. Under tensor parallelism all ranks of the
        axis have the same.
    Communicates: nothing, or what `vocabulary_loss_sum` does.
    """
    if isinstance(logits_BSV, DTensor):
        return vocabulary_loss_sum(logits_BSV, labels_BS, IGNORE_LABEL)
    return F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
    )
