"""Attention of some queries to some keys, in a form whose results can be merged, forward and backward.

Enters: queries, and one block of the keys and values that they may see. Leaves: the mixed values and the log of the
softmax's denominator (log-sum-exp), with which results over several blocks are merged into exactly what one softmax
over all of them gives. `F.scaled_dot_product_attention` does not return that number, so PyTorch's flash kernels are
called by their own names where they take the tensors (CPU; CUDA in half precision), else two matrix products.

Source: Milakov and Gimelshein 2018 (arXiv:1805.02867) for the merge; Dao 2023, FlashAttention-2 (arXiv:2307.08691),
section 3.1 and algorithm 2, for the backward from outputs and log-sum-exp alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from vlmcourse.parallel.comm import at_least_fp32

CUDA_FLASH_DTYPES = (torch.float16, torch.bfloat16)


def attend_block(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Attend to one block of keys.

    Args:
        q_BHSE: [batch, heads, queries, head width], on one device, fp32, bf16 or fp16.
        k_BKSE: [batch, kv heads, keys, head width], where kv heads divides heads.
        v_BKSE: as the keys.
        is_causal: query i sees keys 0 .. i only (as many keys as queries); otherwise it sees all.

    Returns:
        Mixed values [batch, heads, queries, head width], dtype of the queries, and log-sum-exp [batch, heads,
        queries], fp32.
    """
    num_groups = q_BHSE.shape[1] // k_BKSE.shape[1]
    k_BHSE, v_BHSE = _repeat_heads(k_BKSE, num_groups), _repeat_heads(v_BKSE, num_groups)
    kernel = choose_kernel(q_BHSE, k_BHSE, v_BHSE, is_causal)
    if kernel == "flash_cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BHSE, k_BHSE, v_BHSE, 0.0, is_causal)
    if kernel == "flash_cuda":
        results = torch.ops.aten._scaled_dot_product_flash_attention(q_BHSE, k_BHSE, v_BHSE, 0.0, is_causal)
        return results[0], results[1]
    return _plain(q_BHSE, k_BHSE, v_BHSE, is_causal)


def attend_block_backward(
    grad_BHSE: Tensor,
    q_BHSE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    out_BHSE: Tensor,
    lse_BHS: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what one block of keys contributes to the gradients.

    The block's probabilities are computed again as exp(score - log-sum-exp). With outputs and log-sum-exp of *all*
    blocks these are the true probabilities, so blocks can be gone through one by one.

    Args:
        grad_BHSE: gradient of the merged outputs.
        q_BHSE: the queries.
        k_BKSE: the block's keys.
        v_BKSE: the block's values.
        out_BHSE: outputs merged over all blocks.
        lse_BHS: log-sum-exp over all blocks, fp32.
        is_causal: as in `attend_block`.

    Returns:
        Contributions to the gradients of the queries, of the block's keys and of its values, each shaped as its tensor.
    """
    num_groups = q_BHSE.shape[1] // k_BKSE.shape[1]
    k_BHSE, v_BHSE = _repeat_heads(k_BKSE, num_groups), _repeat_heads(v_BKSE, num_groups)
    kernel = choose_kernel(q_BHSE, k_BHSE, v_BHSE, is_causal)
    aten, tensors = torch.ops.aten, (grad_BHSE, q_BHSE, k_BHSE, v_BHSE, out_BHSE, lse_BHS.contiguous())
    if kernel == "flash_cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal)
    elif kernel == "flash_cuda":
        unused = torch.zeros(2, dtype=torch.int64, device=q_BHSE.device)  # the state of dropout, of which there is none
        lengths = (q_BHSE.shape[2], k_BHSE.shape[2])
        grads = aten._scaled_dot_product_flash_attention_backward(
            *tensors, None, None, *lengths, 0.0, is_causal, unused, unused
        )
    else:
        grads = _plain_backward(*tensors, is_causal)
    return grads[0], _sum_heads(grads[1], num_groups), _sum_heads(grads[2], num_groups)


def merge_blocks(
    out_BHSE: Tensor, lse_BHS: Tensor, block_out_BHSE: Tensor, block_lse_BHS: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge what the same queries found in one more block of keys into what they have found so far.

    Each side counts by its share of the common denominator, exp(its log-sum-exp - the common log-sum-exp).

    Args:
        out_BHSE: mixed values so far, fp32; zeros before the first block.
        lse_BHS: log-sum-exp so far, fp32; minus infinity before the first block.
        block_out_BHSE: mixed values of the block alone, any float dtype.
        block_lse_BHS: log-sum-exp of the block alone.

    Returns:
        Both over all blocks, in fp32.
    """
    merged_BHS = torch.logaddexp(lse_BHS, block_lse_BHS)
    share_BHS1 = (lse_BHS - merged_BHS).exp()[..., None]
    block_share_BHS1 = (block_lse_BHS - merged_BHS).exp()[..., None]
    return out_BHSE * share_BHS1 + at_least_fp32(block_out_BHSE) * block_share_BHS1, merged_BHS


def choose_kernel(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, is_causal: bool) -> str:
    """Return which implementation takes these tensors, with as many kv heads as heads.

    Returns:
        flash_cpu, flash_cuda or plain.
    """
    if q_BHSE.device.type == "cpu":
        return "flash_cpu" if hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu") else "plain"
    if q_BHSE.device.type == "cuda" and q_BHSE.dtype in CUDA_FLASH_DTYPES and q_BHSE.shape[-1] % 8 == 0:
        parameters = SDPAParams(q_BHSE, k_BHSE, v_BHSE, None, 0.0, is_causal, False)
        return "flash_cuda" if can_use_flash_attention(parameters) else "plain"
    return "plain"


def _plain(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    with torch.autocast(q_BHSE.device.type, enabled=False):
        scores_BHSS = _scores(q_BHSE, k_BHSE, is_causal)
        lse_BHS = scores_BHSS.logsumexp(dim=-1)
        out_BHSE = (scores_BHSS - lse_BHS[..., None]).exp() @ at_least_fp32(v_BHSE)
    return out_BHSE.to(q_BHSE.dtype), lse_BHS


def _plain_backward(
    grad_BHSE: Tensor,
    q_BHSE: Tensor,
    k_BHSE: Tensor,
    v_BHSE: Tensor,
    out_BHSE: Tensor,
    lse_BHS: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(q_BHSE.device.type, enabled=False):
        wide_grad_BHSE = at_least_fp32(grad_BHSE)
        p_BHSS = (_scores(q_BHSE, k_BHSE, is_causal) - lse_BHS[..., None]).exp()
        grad_v_BHSE = p_BHSS.mT @ wide_grad_BHSE
        grad_p_BHSS = wide_grad_BHSE @ at_least_fp32(v_BHSE).mT
        # Softmax's backward subtracts each row's mean gradient under p: the product of output and its gradient.
        mean_BHS1 = (wide_grad_BHSE * at_least_fp32(out_BHSE)).sum(dim=-1, keepdim=True)
        grad_scores_BHSS = p_BHSS * (grad_p_BHSS - mean_BHS1) / math.sqrt(q_BHSE.shape[-1])
        grad_q_BHSE, grad_k_BHSE = grad_scores_BHSS @ at_least_fp32(k_BHSE), grad_scores_BHSS.mT @ at_least_fp32(q_BHSE)
    return grad_q_BHSE.to(q_BHSE.dtype), grad_k_BHSE.to(k_BHSE.dtype), grad_v_BHSE.to(v_BHSE.dtype)


def _scores(q_BHSE: Tensor, k_BHSE: Tensor, is_causal: bool) -> Tensor:
    """Return scaled scores in fp32 [batch, heads, queries, keys], minus infinity where a query may not look."""
    scores_BHSS = at_least_fp32(q_BHSE) @ at_least_fp32(k_BHSE).mT / math.sqrt(q_BHSE.shape[-1])
    if is_causal:
        later_SS = torch.ones(scores_BHSS.shape[-2:], dtype=torch.bool, device=q_BHSE.device).triu(1)
        scores_BHSS = scores_BHSS.masked_fill(later_SS, -math.inf)
    return scores_BHSS


def _repeat_heads(x_BKSE: Tensor, num_groups: int) -> Tensor:
    """Write each key/value head once for every query head that reads it."""
    return x_BKSE if num_groups == 1 else x_BKSE.repeat_interleave(num_groups, dim=1)


def _sum_heads(grad_BHSE: Tensor, num_groups: int) -> Tensor:
    """Undo `_repeat_heads` for gradients: a key/value head gets the sum over the query heads that read it."""
    return grad_BHSE if num_groups == 1 else grad_BHSE.unflatten(1, (-1, num_groups)).sum(dim=2)
