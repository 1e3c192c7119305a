"""A vocabulary that is split over the tensor-parallel ranks: logits and loss without ever gathering them.

Enters: a language tower whose embedding and output matrix are split by rows. Leaves: logits as a `DTensor` split along
the vocabulary, and a loss that exchanges three numbers a position instead of `vocab_size`: InternVL2's logits of 4,096
positions are 1.5 GB in fp32. Chapter 1.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3, "fuse the output of the parallel GEMM with the
cross entropy loss".
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

from vlmcourse.models.cache import KVCache
from vlmcourse.models.decoder import LanguageTower, pick_positions
from vlmcourse.parallel.comm import at_least_fp32
from vlmcourse.parallel.tensor_styles import SequenceLayout


def split_predict(tower: LanguageTower, mesh: DeviceMesh, layout: SequenceLayout) -> None:
    """Let a tower, whose weights are split already, return logits that are split along the vocabulary.

    A call for the last position alone, or with a cache of keys, is a generation: it works on whole sequences, which a
    single token cannot be split into, and returns whole, plain logits without the rows of padding. `predict` with one
    position of each row returns such logits as well.

    Args:
        tower: `embedding` and `lm_head` split by rows; `predict` and `forward` are replaced.
        mesh: the `tp` axis.
        layout: of what the last block gives.
    Communicates: in `predict`, an all-gather of [batch, seq, width] where the sequence is split; when generating, an
        all-gather of the logits of one position.
    """
    vocab_size, forward = tower.shape.vocab_size, tower.forward

    def predict(x_BSD: Tensor, position_B: Tensor | None = None) -> Tensor:
        part_BSD = DTensor.from_local(tower.norm(x_BSD), mesh, [layout.placement], run_check=False)
        whole_BSD = part_BSD.redistribute(placements=[Replicate()])
        if position_B is not None:
            picked_BSD = pick_positions(whole_BSD.to_local(), position_B)
            whole_BSD = DTensor.from_local(picked_BSD, mesh, [Replicate()], run_check=False)
        head = tower.lm_head
        logits_BSV = F.linear(whole_BSD, tower.embedding.weight) if head is None else head(whole_BSD)
        if position_B is not None:
            return cast(DTensor, logits_BSV).full_tensor()[..., :vocab_size]
        return hide_padding(cast(DTensor, logits_BSV), vocab_size)

    def run(*args: Any, kv_cache: KVCache | None = None, last_only: bool = False, **kwargs: Any) -> Tensor:
        if kv_cache is None and not last_only:
            return forward(*args, **kwargs)
        with layout.whole():
            logits_BSV = cast(DTensor, forward(*args, kv_cache=kv_cache, last_only=last_only, **kwargs))
        return logits_BSV.full_tensor()[..., :vocab_size]

    tower.predict = predict
    tower.forward = run


def hide_padding(logits_BSV: DTensor, vocab_size: int) -> DTensor:
    """Set the logits of padded vocabulary rows to minus infinity: they take no part in the softmax and get no gradient.

    Args:
        logits_BSV: [batch, seq, padded vocabulary], split along the last dimension.
        vocab_size: rows that are no padding.
    """
    if logits_BSV.shape[-1] == vocab_size:
        return logits_BSV
    local_BSV = logits_BSV.to_local()
    is_padding_V = _first_row(logits_BSV) + torch.arange(local_BSV.shape[-1], device=local_BSV.device) >= vocab_size
    hidden_BSV = local_BSV.masked_fill(is_padding_V, -math.inf)
    return DTensor.from_local(hidden_BSV, logits_BSV.device_mesh, logits_BSV.placements, run_check=False)


def vocabulary_losses(
    logits_BSV: DTensor, labels_BS: Tensor, ignore_label: int, weights_BS: Tensor | None = None
) -> Tensor:
    """Return the cross-entropy of every supervised token over a split vocabulary.

    Args:
        logits_BSV: [batch, seq, vocabulary], split evenly along the vocabulary over the one axis of its mesh; any float
            type, computed in fp32 (or float64, where they are that).
        labels_BS: int64 [batch, seq], plain, equal on all ranks of the mesh.
        ignore_label: the label of positions that count nothing.
        weights_BS: fp32 [batch, seq], what each token's loss is multiplied by, equal on all ranks; None is 1.

    Returns:
        Plain fp32 [batch, seq], 0 where nothing is supervised, the same on all ranks of the mesh.

    Raises:
        ValueError: if the logits are split in another way.
    Communicates: two all-reduces over the mesh, of 4 and 8 bytes a position; nothing backward.
    """
    mesh, local_BSV = logits_BSV.device_mesh, logits_BSV.to_local()
    split_last = mesh.ndim == 1 and logits_BSV.placements[0].is_shard(logits_BSV.ndim - 1)
    if not split_last or local_BSV.shape[-1] * mesh.size() != logits_BSV.shape[-1]:
        raise ValueError(
            f"Logits {list(logits_BSV.shape)} are placed as {logits_BSV.placements} on {mesh.size()} ranks: they must "
            "be split evenly along the vocabulary, the last dimension; take them from `apply_tensor`'s model"
        )
    is_supervised_BS = labels_BS != ignore_label
    weights_BS = is_supervised_BS.float() if weights_BS is None else weights_BS * is_supervised_BS
    losses_N = _VocabularyLosses.apply(
        at_least_fp32(local_BSV.flatten(0, -2)),
        labels_BS.flatten(),
        weights_BS.flatten(),
        _first_row(logits_BSV),
        mesh.get_group(),
    )
    return cast(Tensor, losses_N).view_as(labels_BS)


def _first_row(logits_BSV: DTensor) -> int:
    """Return the first row of the vocabulary that this rank has, the split being even."""
    mesh = logits_BSV.device_mesh
    return mesh.get_local_rank() * (logits_BSV.shape[-1] // mesh.size())


class _VocabularyLosses(torch.autograd.Function):
    """log(sum over V of exp(logit)) - logit of the label, with V in parts."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, first_row: int, group: dist.ProcessGroup
    ) -> Tensor:
        is_mine_N = (labels_N >= first_row) & (labels_N < first_row + logits_NV.shape[1])
        row_N1 = (labels_N - first_row).where(is_mine_N, 0)[:, None]
        max_N = logits_NV.amax(dim=1)
        dist.all_reduce(max_N, op=dist.ReduceOp.MAX, group=group)
        shifted_NV = logits_NV - max_N[:, None]
        # The label's logit is on one rank; the others add zero.
        label_N = shifted_NV.gather(1, row_N1)[:, 0].where(is_mine_N, 0)
        softmax_NV = shifted_NV.exp_()
        sums_2N = torch.stack((softmax_NV.sum(dim=1), label_N))
        dist.all_reduce(sums_2N, group=group)
        softmax_NV /= sums_2N[0][:, None]
        ctx.save_for_backward(softmax_NV, row_N1, weights_N, weights_N * is_mine_N)
        return (sums_2N[0].log() - sums_2N[1]) * weights_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax_NV, row_N1, weights_N, label_weight_N = ctx.saved_tensors
        grad_NV = softmax_NV * weights_N[:, None]
        grad_NV.scatter_add_(1, row_N1, -label_weight_N[:, None].to(grad_NV.dtype))
        return grad_NV.mul_(grads[0][:, None]), None, None, None, None
