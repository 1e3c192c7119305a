"""Greedy text generation with a key/value cache.

Enters: left-padded prompts and their tiles. Leaves: the new tokens only. Sampling and beams are left out: an
evaluation by exact match wants the one most likely answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vlmcourse.models.cache import KVCache


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids_BS: Tensor,
    pixel_values_ICHW: Tensor | None,
    attention_mask_BS: Tensor | None,
    *,
    max_new_tokens: int,
    eos_token_id: int,
    tiles_per_sample: Sequence[int] | None = None,
    stop_early: bool = True,
) -> Tensor:
    """Continue each prompt with its most likely next token until it ends.

    Args:
        model: a `VLM`, or a wrapper that is called like one.
        input_ids_BS: prompts [batch, seq], padded on the left, image tokens included.
        pixel_values_ICHW: tiles [tiles, 3, height, width], or None.
        attention_mask_BS: bool [batch, seq], True for a real token; None if there is no padding.
        max_new_tokens: tokens to add at most.
        eos_token_id: the token that ends an answer.
        tiles_per_sample: tiles of each prompt, for better error messages.
        stop_early: return as soon as every answer has ended. False always takes `max_new_tokens` forward passes, for
            models that must be called equally often everywhere.

    Returns:
        New tokens int64 [batch, at most max_new_tokens]; after an answer's end every token is `eos_token_id`.

    Raises:
        ValueError: if `max_new_tokens` is below 1, or a prompt ends in padding.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens}: must be 1 or greater")
    mask = attention_mask_BS
    if mask is not None and not bool(mask[:, -1].all()):
        rows = (~mask[:, -1]).nonzero().flatten().tolist()
        raise ValueError(f"Prompts {rows} end in padding: pad prompts on the left, so that the answer follows the text")
    if mask is not None and bool(mask.all()):
        mask = None
    batch_size, prompt_length = input_ids_BS.shape
    # The last token that is written is never read back.
    cache = KVCache(prompt_length + max_new_tokens - 1)
    logits_B1V = model(
        input_ids_BS, pixel_values_ICHW, mask, tiles_per_sample=tiles_per_sample, kv_cache=cache, last_only=True
    )
    ended_B = torch.zeros(batch_size, dtype=torch.bool, device=input_ids_BS.device)
    written: list[Tensor] = []
    while True:
        next_B = logits_B1V[:, -1].argmax(dim=-1).masked_fill(ended_B, eos_token_id)
        written.append(next_B)
        ended_B |= next_B == eos_token_id
        if len(written) == max_new_tokens or (stop_early and bool(ended_B.all())):
            return torch.stack(written, dim=1)
        if mask is not None:
            mask = torch.cat((mask, mask.new_ones(batch_size, 1)), dim=1)
        logits_B1V = model(next_B[:, None], None, mask, kv_cache=cache, last_only=True)
