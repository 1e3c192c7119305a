"""The language tower: token ids and image features in, logits out.

A decoder as in Llama, Qwen2 and InternLM2: RMSNorm before each branch, rotary positions (RoPE), fewer key/value heads
than query heads (GQA), a SwiGLU MLP, optional biases on q, k and v and an optional output matrix tied to the
embedding. Padding on the right needs no mask at all: a causal model never looks to the right.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from vlmcourse.models.cache import KVCache
from vlmcourse.presets import LanguageShape


def rope_tables(positions_BS: Tensor, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return the cosines and signed sines that rotate each pair of channels by an angle that grows with position.

    Args:
        positions_BS: [batch or 1, seq] integer positions.
        head_width: channels of one head; channel e is paired with channel e + head_width / 2.
        theta: base of the geometric series of wavelengths.

    Returns:
        Two float32 tensors [batch or 1, seq, 1, head_width]; the sines of the first half are negated.
    Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864), in the half-split layout of Llama.
    """
    exponents = torch.arange(0, head_width, 2, device=positions_BS.device, dtype=torch.float32) / head_width
    angles = positions_BS[:, :, None, None].float() * theta**-exponents
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x_BSHE: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate queries or keys [batch, seq, heads, head width] by the tables of `rope_tables`."""
    # Rolling by half the width brings each channel's partner to its place; the sign is already in the sines.
    partners = x_BSHE.roll(x_BSHE.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BSHE * cos.to(x_BSHE.dtype), partners, signed_sin.to(x_BSHE.dtype))


def is_right_padded(attention_mask_BS: Tensor) -> bool:
    """Whether in every row no real token follows padding.

    Tensors without values (meta, fake) count as right padded, which is what training uses.
    """
    if attention_mask_BS.is_meta or isinstance(attention_mask_BS, FakeTensor):
        return True
    return not bool((attention_mask_BS[:, 1:] & ~attention_mask_BS[:, :-1]).any())


def plan_attention(
    attention_mask_BS: Tensor | None, num_new: int, num_past: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Work out the positions and the mask of one forward pass, once for all blocks.

    Args:
        attention_mask_BS: bool [batch, past + new], True for a real token; None if all are real.
        num_new: tokens that go in now.
        num_past: tokens already in the cache.
        device: where the results go.

    Returns:
        Positions [batch or 1, new], and either None (plain causal attention is right) or a bool mask
        [batch or 1, 1, new, past + new] that is True where a query may look.
    """
    num_all = num_past + num_new
    plain = attention_mask_BS is None or (num_past == 0 and is_right_padded(attention_mask_BS))
    if plain and (num_past == 0 or num_new == 1):
        return torch.arange(num_past, num_all, device=device)[None], None
    queries_S1 = torch.arange(num_past, num_all, device=device)[:, None]
    keys_1S = torch.arange(num_all, device=device)[None]
    visible_SS = keys_1S <= queries_S1
    if attention_mask_BS is None:
        return queries_S1.T, visible_SS[None, None]
    positions_BS = (attention_mask_BS.cumsum(dim=1) - 1).clamp(min=0)[:, num_past:]
    # A padding query sees itself, so that its softmax has something to sum over.
    visible_BSS = (visible_SS & attention_mask_BS[:, None]) | (keys_1S == queries_S1)
    return positions_BS, visible_BSS[:, None]


def attend(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Mix the values that each query may see; query head h reads key/value head h // (heads / key/value heads).

    Args:
        q_BHSE: [batch, heads, new, head width].
        k_BKSE: [batch, kv heads, past + new, head width].
        v_BKSE: as the keys.
        mask: bool, True where a query may look; None for all or, with `is_causal`, for what is not later.
        is_causal: whether query i sees keys 0 .. i only; not together with a mask.

    Returns:
        [batch, heads, new, head width].
    """
    grouped = q_BHSE.shape[1] != k_BKSE.shape[1]
    return F.scaled_dot_product_attention(
        q_BHSE, k_BKSE, v_BKSE, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped
    )


class LanguageAttention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, shape: LanguageShape) -> None:
        super().__init__()
        D = shape.hidden_size
        self.head_width = D // shape.num_heads
        kv_width = self.head_width * shape.num_kv_heads
        self.q_proj = nn.Linear(D, D, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(D, kv_width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(D, kv_width, bias=shape.qkv_bias)
        self.out_proj = nn.Linear(D, D, bias=False)
        self.attend = attend
        """Where queries meet keys: context parallelism puts its own in this place."""

    def forward(
        self, x_BSD: Tensor, cos: Tensor, signed_sin: Tensor, mask: Tensor | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        """Mix earlier positions into later ones; [batch, seq, width] in and out."""
        # The number of heads is inferred: it is smaller than in the shape when the projections are split by heads.
        q_BSHE = self.q_proj(x_BSD).unflatten(-1, (-1, self.head_width))
        k_BSKE = self.k_proj(x_BSD).unflatten(-1, (-1, self.head_width))
        v_BKSE = self.v_proj(x_BSD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        q_BHSE = apply_rope(q_BSHE, cos, signed_sin).transpose(1, 2)
        k_BKSE = apply_rope(k_BSKE, cos, signed_sin).transpose(1, 2)
        if cache is not None:
            k_BKSE, v_BKSE = cache.append(layer, k_BKSE, v_BKSE)
        causal = mask is None and q_BHSE.shape[2] > 1
        mixed_BHSE = self.attend(q_BHSE, k_BKSE, v_BKSE, mask, causal)
        return self.out_proj(mixed_BHSE.transpose(1, 2).flatten(2))


class LanguageMLP(nn.Module):
    """SwiGLU: a gate and a value, multiplied, then mapped back."""

    def __init__(self, shape: LanguageShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Transform each position alone; [batch, seq, width] in and out."""
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class LanguageBlock(nn.Module):
    """Attention and MLP, each on a residual branch."""

    def __init__(self, shape: LanguageShape) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.attention = LanguageAttention(shape)
        self.norm2 = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = LanguageMLP(shape)

    def forward(
        self,
        x_BSD: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Apply the block.

        Args:
            x_BSD: [batch, seq, width].
            cos: cosines of `rope_tables`.
            signed_sin: sines of `rope_tables`.
            mask: the mask of `plan_attention`; None is plain causal attention.
            cache: keys and values of earlier tokens, which this block extends.
            layer: this block's place in the cache.

        Returns:
            [batch, seq, width].
        """
        x_BSD = x_BSD + self.attention(self.norm1(x_BSD), cos, signed_sin, mask, cache, layer)
        return x_BSD + self.mlp(self.norm2(x_BSD))


class LanguageTower(nn.Module):
    """The whole tower; see the module's docstring."""

    def __init__(self, shape: LanguageShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(LanguageBlock(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.lm_head = None if shape.tied_embeddings else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.take_part: Callable[[Tensor, int], Tensor] | None = None
        """Cuts out, along a dimension of the sequence, the positions that this copy of the tower works on; None for all
        of them. Context parallelism sets it: blocks and logits are then of these positions only."""

    def forward(
        self,
        input_ids_BS: Tensor,
        features_ND: Tensor | None = None,
        feature_index_N: Tensor | None = None,
        attention_mask_BS: Tensor | None = None,
        *,
        kv_cache: KVCache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Predict the next token at every position.

        Args:
            input_ids_BS: token ids [batch, seq].
            features_ND: image features [features, width] that take the place of token embeddings.
            feature_index_N: where each feature goes, counted in the flattened batch * seq; int64.
            attention_mask_BS: bool [batch, cached + seq], True for a real token; None if all are real.
            kv_cache: keys and values of earlier tokens; this call adds its own.
            last_only: compute the logits of the last position alone.

        Returns:
            Logits [batch, seq, vocab], or [batch, 1, vocab] with `last_only`; of its own positions with `take_part`.

        Raises:
            ValueError: if the sequence is longer than `max_seq_len`.
        """
        num_past = 0 if kv_cache is None else kv_cache.num_tokens
        num_new = input_ids_BS.shape[1]
        if num_past + num_new > self.shape.max_seq_len:
            raise ValueError(
                f"A sequence of {num_past + num_new} tokens is longer than the {self.shape.max_seq_len} that this "
                "model's positions reach: shorten it, or raise language.max_seq_len"
            )
        x_BSD = self.embed(input_ids_BS, features_ND, feature_index_N)
        positions, mask = plan_attention(attention_mask_BS, num_new, num_past, input_ids_BS.device)
        if self.take_part is not None:
            x_BSD, positions = self.take_part(x_BSD, 1), self.take_part(positions, 1)
        cos, signed_sin = self.rope_tables(positions)
        for layer, block in enumerate(self.blocks):
            x_BSD = block(x_BSD, cos, signed_sin, mask, kv_cache, layer)
        if kv_cache is not None:
            kv_cache.num_tokens += num_new
        return self.predict(x_BSD[:, -1:] if last_only else x_BSD)

    def embed(self, input_ids_BS: Tensor, features_ND: Tensor | None, feature_index_N: Tensor | None) -> Tensor:
        """Return what the first block takes [batch, seq, width]: embeddings of tokens, with image features placed."""
        x_BSD = self.embedding(input_ids_BS)
        if features_ND is not None and feature_index_N is not None:
            x_BSD = _place_features(x_BSD, features_ND, feature_index_N)
        return x_BSD

    def rope_tables(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotations of these positions, for every block; see `rope_tables`."""
        return rope_tables(positions_BS, self.shape.hidden_size // self.shape.num_heads, self.shape.rope_theta)

    def predict(self, x_BSD: Tensor, position_B: Tensor | None = None) -> Tensor:
        """Turn what the last block gives [batch, seq, width] into logits [batch, seq, vocab].

        With `position_B`, int64 [batch], of this one position of each row: [batch, 1, vocab].
        """
        x_BSD = self.norm(x_BSD if position_B is None else pick_positions(x_BSD, position_B))
        return F.linear(x_BSD, self.embedding.weight) if self.lm_head is None else self.lm_head(x_BSD)


def pick_positions(x_BSD: Tensor, position_B: Tensor) -> Tensor:
    """Return one position of each row, [batch, 1, width]; `position_B` is int64 [batch]."""
    return x_BSD[torch.arange(len(position_B), device=x_BSD.device), position_B][:, None]


def _place_features(x_BSD: Tensor, features_ND: Tensor, feature_index_N: Tensor) -> Tensor:
    """Overwrite the embeddings at the indexed positions; features beyond the index get a zero gradient."""
    placed_ND = features_ND[: feature_index_N.shape[0]].to(x_BSD.dtype)
    return x_BSD.flatten(0, 1).index_copy(0, feature_index_N, placed_ND).view_as(x_BSD)
