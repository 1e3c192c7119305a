"""Hugging Face's config.json of an InternVL model to a `VLMShape`, and back.

`InternVLForConditionalGeneration` describes the same architecture with other words. What it allows and this model does
not have (another activation, dropout, a second kind of rotary positions, ...) is refused by name, never ignored.
Imports no torch, so that degrees are checked against the model before any rank starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmcourse.presets import LanguageShape, VisionShape, VLMShape

NORMS = {"layer_norm": "layernorm", "rms_norm": "rmsnorm"}
TEXT_MODELS = ("qwen2", "llama")
ROPE_TYPES = ("default", "dynamic")
"""`dynamic` changes nothing up to max_position_embeddings, and longer sequences are refused by the decoder."""


def read_hf_shape(folder: str | Path) -> VLMShape | None:
    """Read the shape of the model in a Hugging Face folder from its config.json; None where there is none.

    Raises:
        ValueError: if it is not JSON, or describes a model that cannot be built here.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"{file} is not JSON ({error}): download it again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}, not an object with the model's sizes")
    return shape_from_hf_config(config, name=file.parent.name)


def shape_from_hf_config(config: Mapping[str, Any], name: str = "hf") -> VLMShape:
    """Read the shape of a model from its config.json.

    Args:
        config: the parsed config.json of an `InternVLForConditionalGeneration`.
        name: what to call the shape.

    Returns:
        The shape. Whether the embeddings are tied is what the config says; the weights have the last word.

    Raises:
        ValueError: listing everything in the config that this model cannot do.
    """
    _check_family(config)
    vision, text = config["vision_config"], config["text_config"]
    problems = _missing("vision_config", vision, "hidden_size", "num_hidden_layers", "num_attention_heads")
    problems += _missing("text_config", text, "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    problems += _missing("vision_config", vision, "intermediate_size", "image_size", "patch_size")
    problems += _missing("text_config", text, "intermediate_size")
    problems += _missing("config", config, "image_token_id")
    if not problems:
        problems = _top_problems(config) + _vision_problems(vision) + _text_problems(text)
    if problems:
        raise ValueError(f"The config of {name!r} describes a model that cannot be built here: " + "; ".join(problems))
    return VLMShape(
        name=name,
        vision=_vision_shape(vision),
        language=_language_shape(text, tied=config.get("tie_word_embeddings", True)),
        image_token_id=config["image_token_id"],
        pixel_shuffle_fraction=config.get("downsample_ratio", 0.5),
        source="a Hugging Face config.json",
    )


def hf_config_from_shape(shape: VLMShape, dtype: str) -> dict[str, Any]:
    """Describe a shape as the config.json of an `InternVLForConditionalGeneration`.

    A language tower with biases on q, k and v is written as qwen2, one without as llama. An InternLM2 tower is of the
    second kind: it is Llama with grouped key/value heads and no biases, under other names of the weights.

    Args:
        shape: the model's shape.
        dtype: of the saved weights, as torch spells it: `float32`, `bfloat16`, ...

    Returns:
        A dictionary ready for `json.dump`.
    """
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "dtype": dtype,
        "image_token_id": shape.image_token_id,
        "image_seq_length": shape.num_visual_tokens_per_tile,
        "downsample_ratio": shape.pixel_shuffle_fraction,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": shape.language.tied_embeddings,
        "vision_config": _hf_vision_config(shape.vision),
        "text_config": _hf_text_config(shape.language),
    }


def _hf_vision_config(vision: VisionShape) -> dict[str, Any]:
    return {
        "model_type": "internvl_vision",
        "architectures": ["InternVLVisionModel"],
        "image_size": [vision.image_size_px, vision.image_size_px],
        "patch_size": [vision.patch_size_px, vision.patch_size_px],
        "num_channels": 3,
        "hidden_size": vision.hidden_size,
        "num_hidden_layers": vision.num_layers,
        "num_attention_heads": vision.num_heads,
        "intermediate_size": vision.mlp_size,
        "hidden_act": "gelu",
        "norm_type": {ours: theirs for theirs, ours in NORMS.items()}[vision.norm],
        "layer_norm_eps": vision.norm_eps,
        "attention_bias": vision.qkv_bias,
        "use_qk_norm": vision.qk_norm,
        "layer_scale_init_value": vision.layer_scale_init,
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
    }


def _hf_text_config(language: LanguageShape) -> dict[str, Any]:
    return {
        "model_type": "qwen2" if language.qkv_bias else "llama",
        "architectures": ["Qwen2ForCausalLM" if language.qkv_bias else "LlamaForCausalLM"],
        "vocab_size": language.vocab_size,
        "hidden_size": language.hidden_size,
        "num_hidden_layers": language.num_layers,
        "num_attention_heads": language.num_heads,
        "num_key_value_heads": language.num_kv_heads,
        "intermediate_size": language.mlp_size,
        "hidden_act": "silu",
        "rms_norm_eps": language.norm_eps,
        "max_position_embeddings": language.max_seq_len,
        "rope_theta": language.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": language.rope_theta},
        "tie_word_embeddings": language.tied_embeddings,
    }


def _check_family(config: Mapping[str, Any]) -> None:
    """Raise ValueError unless this is the config of an InternVL model in the Hugging Face layout."""
    kind = config.get("model_type")
    if kind == "internvl_chat":
        raise ValueError(
            "model_type = 'internvl_chat' is the layout of the original checkpoints: use the model whose name ends in "
            "-hf, or convert the folder to InternVLForConditionalGeneration first"
        )
    if kind != "internvl":
        raise ValueError(f"model_type = {kind!r}: only 'internvl' (InternVLForConditionalGeneration) can be read")
    for section in ("vision_config", "text_config"):
        if not isinstance(config.get(section), Mapping):
            raise ValueError(f"The config has no {section}: it is not a complete config.json")
    text_kind = config["text_config"].get("model_type", "qwen2")
    if text_kind not in TEXT_MODELS:
        hint = " (InternLM2 has Llama's mathematics: convert it to llama weights)" if text_kind == "internlm2" else ""
        raise ValueError(f"text_config.model_type = {text_kind!r}: choose one of {', '.join(TEXT_MODELS)}{hint}")


def _missing(where: str, section: Mapping[str, Any], *names: str) -> list[str]:
    return [f"{where}.{name} is missing" for name in names if name not in section]


def _must_be(where: str, section: Mapping[str, Any], **wanted: object) -> list[str]:
    """Return a sentence for each entry that is there and is not what this model does."""
    return [
        f"{where}.{name} = {section[name]!r} must be {value!r}"
        for name, value in wanted.items()
        if section.get(name, value) != value
    ]


def _top_problems(config: Mapping[str, Any]) -> list[str]:
    return _must_be(
        "config",
        config,
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )


def _vision_problems(vision: Mapping[str, Any]) -> list[str]:
    problems = _must_be(
        "vision_config",
        vision,
        hidden_act="gelu",
        num_channels=3,
        use_absolute_position_embeddings=True,
        use_mean_pooling=True,
        hidden_dropout_prob=0.0,
        attention_dropout=0.0,
        projection_dropout=0.0,
    )
    if vision.get("norm_type", "layer_norm") not in NORMS:
        problems.append(f"vision_config.norm_type = {vision['norm_type']!r} must be one of {', '.join(NORMS)}")
    for side in ("image_size", "patch_size"):
        if len(set(_sides(vision[side]))) != 1:
            problems.append(f"vision_config.{side} = {vision[side]!r} must be square")
    return problems


def _text_problems(text: Mapping[str, Any]) -> list[str]:
    problems = _must_be(
        "text_config",
        text,
        hidden_act="silu",
        use_sliding_window=False,
        attention_dropout=0.0,
        mlp_bias=False,
    )
    if text.get("model_type") == "llama":
        problems += _must_be("text_config", text, attention_bias=False)
    head_width = text["hidden_size"] // text["num_attention_heads"]
    if text.get("head_dim") not in (None, head_width):
        problems.append(f"text_config.head_dim = {text['head_dim']!r} must be hidden_size / heads = {head_width}")
    rope = _rope(text)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        problems.append(f"text_config rotary positions of type {rope_type!r} must be one of {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"text_config partial_rotary_factor = {rope['partial_rotary_factor']} must be 1.0")
    return problems


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of rotary positions: `rope_parameters` of newer configs, `rope_scaling` of older ones."""
    return text.get("rope_parameters") or text.get("rope_scaling") or {}


def _sides(value: int | list[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _vision_shape(vision: Mapping[str, Any]) -> VisionShape:
    return VisionShape(
        image_size_px=_sides(vision["image_size"])[0],
        patch_size_px=_sides(vision["patch_size"])[0],
        num_layers=vision["num_hidden_layers"],
        hidden_size=vision["hidden_size"],
        num_heads=vision["num_attention_heads"],
        mlp_size=vision["intermediate_size"],
        norm=NORMS[vision.get("norm_type", "layer_norm")],
        qk_norm=vision.get("use_qk_norm", False),
        qkv_bias=vision.get("attention_bias", False),
        norm_eps=vision.get("layer_norm_eps", 1e-6),
        layer_scale_init=vision.get("layer_scale_init_value", 0.1),
    )


def _language_shape(text: Mapping[str, Any], tied: bool) -> LanguageShape:
    return LanguageShape(
        vocab_size=text["vocab_size"],
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
        mlp_size=text["intermediate_size"],
        rope_theta=_rope(text).get("rope_theta", text.get("rope_theta", 1e4)),
        norm_eps=text.get("rms_norm_eps", 1e-6),
        qkv_bias=text.get("model_type", "qwen2") == "qwen2",
        tied_embeddings=tied,
        max_seq_len=text.get("max_position_embeddings", 32768 if text.get("model_type") == "qwen2" else 2048),
    )
