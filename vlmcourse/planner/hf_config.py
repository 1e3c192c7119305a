"""transformers' config.json of an InternVL model to a `VLMShape`, and back.

`InternVLForConditionalGeneration` describes the same architecture with other words. What it allows and this model does
not have (another activation, dropout, a second kind of rotary positions, ...) is refused by name, never ignored. The
original layout is read in `hf_chat_config.py`, folders of either in `hf_folder.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmcourse.planner.config_entries import (
    NORMS,
    find_head_problems,
    find_missing,
    find_rope_problems,
    find_wrong,
    rope_settings,
)
from vlmcourse.presets import LanguageShape, VisionShape, VLMShape

TEXT_MODELS = ("qwen2", "llama")


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
    problems = find_missing("vision_config", vision, "hidden_size", "num_hidden_layers", "num_attention_heads")
    problems += find_missing(
        "text_config", text, "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"
    )
    problems += find_missing("vision_config", vision, "intermediate_size", "image_size", "patch_size")
    problems += find_missing("text_config", text, "intermediate_size")
    problems += find_missing("config", config, "image_token_id")
    if not problems:
        problems = _top_problems(config) + _vision_problems(vision) + _text_problems(text)
    if problems:
        raise ValueError(f"The config of {name!r} describes a model that cannot be built here: " + "; ".join(problems))
    return VLMShape(
        name=name,
        vision=_vision_shape(vision),
        language=language_shape(text, text.get("model_type", "qwen2"), config.get("tie_word_embeddings", True)),
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

    Raises:
        ValueError: if the visual tokens are in the order of pixel shuffle v1, for which transformers has no entry.
    """
    if shape.pixel_shuffle_version != "v2":
        raise ValueError(
            f"The visual tokens of {shape.name!r} are in the order of pixel shuffle {shape.pixel_shuffle_version}, and "
            "InternVLForConditionalGeneration knows that of v2 only: write the layout 'internvl_chat'"
        )
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
        "text_config": hf_text_config(shape.language),
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


def hf_text_config(language: LanguageShape) -> dict[str, Any]:
    """Describe a language tower as the config of a `Qwen2ForCausalLM` or, without biases, a `LlamaForCausalLM`."""
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
    if kind != "internvl":
        raise ValueError(f"model_type = {kind!r}: only 'internvl' (InternVLForConditionalGeneration) can be read")
    for section in ("vision_config", "text_config"):
        if not isinstance(config.get(section), Mapping):
            raise ValueError(f"The config has no {section}: it is not a complete config.json")
    text_kind = config["text_config"].get("model_type", "qwen2")
    if text_kind not in TEXT_MODELS:
        hint = " (InternLM2 has Llama's mathematics: convert it to llama weights)" if text_kind == "internlm2" else ""
        raise ValueError(f"text_config.model_type = {text_kind!r}: choose one of {', '.join(TEXT_MODELS)}{hint}")


def _top_problems(config: Mapping[str, Any]) -> list[str]:
    return find_wrong(
        "config",
        config,
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )


def _vision_problems(vision: Mapping[str, Any]) -> list[str]:
    problems = find_wrong(
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
    problems = find_wrong(
        "text_config",
        text,
        hidden_act="silu",
        use_sliding_window=False,
        attention_dropout=0.0,
        mlp_bias=False,
    )
    if text.get("model_type") == "llama":
        problems += find_wrong("text_config", text, attention_bias=False)
    return [*problems, *find_head_problems("text_config", text), *find_rope_problems("text_config", text)]


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


def language_shape(text: Mapping[str, Any], kind: str, tied: bool) -> LanguageShape:
    """Read the shape of a language tower whose config has no problems.

    Args:
        text: the config of a `Qwen2ForCausalLM`, `LlamaForCausalLM` or `InternLM2ForCausalLM`; all use these words.
        kind: qwen2 has biases on q, k and v; llama and internlm2 have none.
        tied: whether the config ties the embeddings.
    """
    return LanguageShape(
        vocab_size=text["vocab_size"],
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
        mlp_size=text["intermediate_size"],
        rope_theta=float(rope_settings(text).get("rope_theta", text.get("rope_theta", 1e4))),
        norm_eps=text.get("rms_norm_eps", 1e-6),
        qkv_bias=kind == "qwen2",
        tied_embeddings=tied,
        max_seq_len=text.get("max_position_embeddings", 32768 if kind == "qwen2" else 2048),
    )
