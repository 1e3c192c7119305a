"""What our weights are called in the files of each layout, and which of them are stored as one.

Enters: names of `model.state_dict()`. Leaves: names on disk, and weights packed as there or taken apart. transformers'
layout only renames. The original one keeps q, k and v of a vision layer below each other in one matrix, and InternLM2
those of a language layer by key/value group: the query heads of the first group, its key head, its value head, then the
next group (source: modeling_internlm2.py of OpenGVLab/InternVL). No weight is transposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmcourse.planner.hf_chat_config import CHAT_MODEL_TYPE, language_architecture

# Ours on the left, as regular expressions; the first that matches the start of a name gives its new start.
_VISION = (
    (r"vision\.class_token", "vision_tower.embeddings.cls_token"),
    (r"vision\.position_embedding", "vision_tower.embeddings.position_embeddings"),
    (r"vision\.patch_embedding", "vision_tower.embeddings.patch_embeddings.projection"),
    (r"vision\.blocks\.(\d+)\.norm1", r"vision_tower.encoder.layer.\1.layernorm_before"),
    (r"vision\.blocks\.(\d+)\.norm2", r"vision_tower.encoder.layer.\1.layernorm_after"),
    (r"vision\.blocks\.(\d+)\.attention\.out_proj", r"vision_tower.encoder.layer.\1.attention.projection_layer"),
    (r"vision\.blocks\.(\d+)\.attention", r"vision_tower.encoder.layer.\1.attention"),
    (r"vision\.blocks\.(\d+)\.layer_scale(\d)", r"vision_tower.encoder.layer.\1.lambda_\2"),
    (r"vision\.blocks\.(\d+)\.mlp\.up_proj", r"vision_tower.encoder.layer.\1.mlp.fc1"),
    (r"vision\.blocks\.(\d+)\.mlp\.down_proj", r"vision_tower.encoder.layer.\1.mlp.fc2"),
    (r"projector\.norm", "multi_modal_projector.layer_norm"),
    (r"projector\.up_proj", "multi_modal_projector.linear_1"),
    (r"projector\.down_proj", "multi_modal_projector.linear_2"),
)
_CHAT_VISION = (
    (r"vision\.class_token", "vision_model.embeddings.class_embedding"),
    (r"vision\.position_embedding", "vision_model.embeddings.position_embedding"),
    (r"vision\.patch_embedding", "vision_model.embeddings.patch_embedding"),
    (r"vision\.blocks\.(\d+)\.norm(\d)", r"vision_model.encoder.layers.\1.norm\2"),
    (r"vision\.blocks\.(\d+)\.attention\.[qkv]_proj", r"vision_model.encoder.layers.\1.attn.qkv"),
    (r"vision\.blocks\.(\d+)\.attention\.out_proj", r"vision_model.encoder.layers.\1.attn.proj"),
    (r"vision\.blocks\.(\d+)\.attention", r"vision_model.encoder.layers.\1.attn"),
    (r"vision\.blocks\.(\d+)\.layer_scale(\d)", r"vision_model.encoder.layers.\1.ls\2"),
    (r"vision\.blocks\.(\d+)\.mlp\.up_proj", r"vision_model.encoder.layers.\1.mlp.fc1"),
    (r"vision\.blocks\.(\d+)\.mlp\.down_proj", r"vision_model.encoder.layers.\1.mlp.fc2"),
    (r"projector\.norm", "mlp1.0"),
    (r"projector\.up_proj", "mlp1.1"),
    (r"projector\.down_proj", "mlp1.3"),
)
_LANGUAGE = (
    (r"language\.embedding", "language_model.model.embed_tokens"),
    (r"language\.blocks\.(\d+)\.norm1", r"language_model.model.layers.\1.input_layernorm"),
    (r"language\.blocks\.(\d+)\.norm2", r"language_model.model.layers.\1.post_attention_layernorm"),
    (r"language\.blocks\.(\d+)\.attention\.out_proj", r"language_model.model.layers.\1.self_attn.o_proj"),
    (r"language\.blocks\.(\d+)\.attention", r"language_model.model.layers.\1.self_attn"),
    (r"language\.blocks\.(\d+)\.mlp", r"language_model.model.layers.\1.mlp"),
    (r"language\.norm", "language_model.model.norm"),
    (r"language\.lm_head", "language_model.lm_head"),
)
_INTERNLM2 = (
    (r"language\.embedding", "language_model.model.tok_embeddings"),
    (r"language\.blocks\.(\d+)\.norm1", r"language_model.model.layers.\1.attention_norm"),
    (r"language\.blocks\.(\d+)\.norm2", r"language_model.model.layers.\1.ffn_norm"),
    (r"language\.blocks\.(\d+)\.attention\.[qkv]_proj", r"language_model.model.layers.\1.attention.wqkv"),
    (r"language\.blocks\.(\d+)\.attention\.out_proj", r"language_model.model.layers.\1.attention.wo"),
    (r"language\.blocks\.(\d+)\.mlp\.gate_proj", r"language_model.model.layers.\1.feed_forward.w1"),
    (r"language\.blocks\.(\d+)\.mlp\.down_proj", r"language_model.model.layers.\1.feed_forward.w2"),
    (r"language\.blocks\.(\d+)\.mlp\.up_proj", r"language_model.model.layers.\1.feed_forward.w3"),
    (r"language\.norm", "language_model.model.norm"),
    (r"language\.lm_head", "language_model.output"),
)
# Inside transformers on the left, on disk on the right.
_IN_MEMORY = (
    (r"model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"model\.language_model\.", "language_model.model."),
    (r"lm_head\.", "language_model.lm_head."),
)
_STACKED = re.compile(r"vision_model\..*\.attn\.qkv\.")
_GROUPED = re.compile(r".*\.attention\.wqkv\.")


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """The names of one layout."""

    prefixes: tuple[tuple[str, str], ...]
    other_spellings: tuple[tuple[str, str], ...] = ()
    """Names that mean the same as those on disk."""
    embedding: str = "language_model.model.embed_tokens.weight"
    head: str = "language_model.lm_head.weight"

    def disk_name(self, name: str) -> str:
        """Return the name on disk of one of our weights.

        Raises:
            KeyError: if no weight of a `VLM` has that name.
        """
        for pattern, replacement in self.prefixes:
            if re.match(pattern, name):
                return re.sub(pattern, replacement, name, count=1)
        raise KeyError(name)

    def read_name(self, name: str) -> str:
        """Return the name on disk of a weight that may be spelt in another way."""
        for pattern, replacement in self.other_spellings:
            if re.match(pattern, name):
                return re.sub(pattern, replacement, name, count=1)
        return name

    def group(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return which of our weights make up each weight on disk: q, k and v in this order, or one alone."""
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(self.disk_name(name), []).append(name)
        return groups


TRANSFORMERS = WeightNames(prefixes=_VISION + _LANGUAGE, other_spellings=_IN_MEMORY)
CHAT = WeightNames(prefixes=_CHAT_VISION + _LANGUAGE)
"""The original layout around a Qwen2 or Llama tower, which is stored as everywhere."""
CHAT_INTERNLM2 = WeightNames(
    prefixes=_CHAT_VISION + _INTERNLM2,
    embedding="language_model.model.tok_embeddings.weight",
    head="language_model.output.weight",
)


def find_weight_names(config: Mapping[str, Any]) -> WeightNames:
    """Return the names of the weights that belong to a config.json of either layout, one without problems."""
    if config["model_type"] != CHAT_MODEL_TYPE:
        return TRANSFORMERS
    return CHAT_INTERNLM2 if language_architecture(config) == "InternLM2ForCausalLM" else CHAT


def packed_size(sizes: Sequence[torch.Size]) -> torch.Size:
    """Return the size of the weight on disk that ours of these sizes make up."""
    return torch.Size((sum(size[0] for size in sizes), *sizes[0][1:])) if len(sizes) > 1 else sizes[0]


def pack(disk_name: str, parts: Sequence[Tensor], num_kv_heads: int) -> Tensor:
    """Join weights into the one on disk.

    Args:
        disk_name: of the joined weight.
        parts: one weight, or those of q, k and v, each [heads * head width, width] or a bias [heads * head width].
        num_kv_heads: key/value heads of the language tower.

    Returns:
        A weight [all heads * head width, width], or the one weight as it is.
    """
    if len(parts) == 1:
        return parts[0]
    if _GROUPED.match(disk_name):
        q, k, v = (part.unflatten(0, (num_kv_heads, -1)) for part in parts)
        return torch.cat((q, k, v), dim=1).flatten(0, 1)
    assert _STACKED.match(disk_name)
    return torch.cat(tuple(parts))


def unpack(disk_name: str, weight: Tensor, sizes: Sequence[torch.Size], num_kv_heads: int) -> list[Tensor]:
    """Take a weight on disk apart into ours: the inverse of `pack`.

    Args:
        disk_name: of the weight.
        weight: as it is on disk, of the size `packed_size(sizes)`.
        sizes: of our weights, one or those of q, k and v.
        num_kv_heads: key/value heads of the language tower.

    Returns:
        Weights that share no memory with each other.
    """
    if len(sizes) == 1:
        return [weight]
    rows = [size[0] for size in sizes]
    if _GROUPED.match(disk_name):
        groups = weight.unflatten(0, (num_kv_heads, -1))
        parts = groups.split([count // num_kv_heads for count in rows], dim=1)
        return [part.flatten(0, 1).clone(memory_format=torch.contiguous_format) for part in parts]
    assert _STACKED.match(disk_name)
    return [part.clone() for part in weight.split(rows)]
