"""The original config.json of an InternVL model (`InternVLChatModel`, OpenGVLab's folders) to a `VLMShape`, and back.

The model is the one of `hf_config.py` under older words: `llm_config` is an InternLM2, Qwen2 or Llama tower, and what a
config leaves out has the original's defaults, which are those of InternViT-6B. The config does not say which token
stands for an image feature: that is in the folder's tokenizer, see `hf_folder.py`. What would be computed or trained in
another way than here is refused by name.

Source: configuration_internvl_chat.py, configuration_intern_vit.py and modeling_internvl_chat.py of OpenGVLab/InternVL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmcourse.planner.config_entries import NORMS, find_head_problems, find_missing, find_rope_problems, find_wrong
from vlmcourse.planner.hf_config import hf_text_config, language_shape
from vlmcourse.presets import LanguageShape, VisionShape, VLMShape

CHAT_MODEL_TYPE = "internvl_chat"
LANGUAGE_KINDS = {"InternLM2ForCausalLM": "internlm2", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
"""`llm_config.architectures` that can be built here, and their `model_type`."""
QK_NORM_EPS = 1e-6
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def shape_from_chat_config(config: Mapping[str, Any], image_token_id: int, name: str = "hf") -> VLMShape:
    """Read the shape of a model from the config.json of an `InternVLChatModel`.

    `select_layer` picks the output of an earlier vision layer: the layers after it are not part of the shape.

    Args:
        config: the parsed config.json.
        image_token_id: of `<IMG_CONTEXT>` in the model's tokenizer.
        name: what to call the shape.

    Returns:
        The shape. Whether the embeddings are tied is what the config says; the weights have the last word.

    Raises:
        ValueError: listing everything in the config that this model cannot do.
    """
    if config.get("model_type") != CHAT_MODEL_TYPE:
        raise ValueError(
            f"model_type = {config.get('model_type')!r}: {CHAT_MODEL_TYPE!r} is needed (InternVLChatModel)"
        )
    for section in ("vision_config", "llm_config"):
        if not isinstance(config.get(section), Mapping):
            raise ValueError(f"The config has no {section}: it is not a complete config.json")
    vision, text = config["vision_config"], config["llm_config"]
    problems = find_missing("vision_config", vision, *SIZES, "image_size", "patch_size")
    problems += find_missing("llm_config", text, *SIZES, "vocab_size")
    if not problems:
        problems = _top_problems(config) + _vision_problems(vision) + _text_problems(text)
    if problems:
        raise ValueError(f"The config of {name!r} describes a model that cannot be built here: " + "; ".join(problems))
    kind = LANGUAGE_KINDS[language_architecture(config)]
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return VLMShape(
        name=name,
        vision=_vision_shape(vision, count_vision_layers(config)),
        language=language_shape(text, kind, tied),
        image_token_id=image_token_id,
        pixel_shuffle_fraction=config.get("downsample_ratio", 0.5),
        pixel_shuffle_version=config.get("ps_version", "v1"),
        source="the config.json of an InternVLChatModel",
    )


def chat_config_from_shape(shape: VLMShape, dtype: str) -> dict[str, Any]:
    """Describe a shape as the config.json of an `InternVLChatModel`.

    A language tower with biases on q, k and v is written as Qwen2, one without as InternLM2. The template is that of
    InternVL 2.5, whose turns are those that `data/tokenizer.py` writes, apart from its system turn.

    Args:
        shape: the model's shape.
        dtype: of the saved weights, as torch spells it: `float32`, `bfloat16`, ...

    Returns:
        A dictionary ready for `json.dump`.
    """
    return {
        "architectures": ["InternVLChatModel"],
        "model_type": CHAT_MODEL_TYPE,
        "torch_dtype": dtype,
        "downsample_ratio": shape.pixel_shuffle_fraction,
        "ps_version": shape.pixel_shuffle_version,
        "select_layer": -1,
        "force_image_size": shape.vision.image_size_px,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 12,
        "pad2square": False,
        "template": "internvl2_5",
        "img_context_token_id": shape.image_token_id,
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "vision_config": _chat_vision_config(shape.vision, dtype),
        "llm_config": _chat_text_config(shape.language, dtype),
    }


def chat_config_like(config: Mapping[str, Any], shape: VLMShape, dtype: str) -> dict[str, Any]:
    """Return a folder's own config for new weights of the same model.

    Everything in it stays but the type of the weights and, where `select_layer` leaves vision layers unused, these.

    Args:
        config: the parsed config.json of an `InternVLChatModel`.
        shape: of the model whose weights will stand beside it.
        dtype: of these weights, as torch spells it.

    Raises:
        ValueError: naming the parts of the two models that differ.
    """
    own = shape_from_chat_config(config, shape.image_token_id, shape.name)
    found = [
        f"{part}.{name} is {getattr(theirs, name)!r} there and {getattr(ours, name)!r} here"
        for part, theirs, ours in (
            ("vision", own.vision, shape.vision),
            ("language", own.language, shape.language),
            ("model", own, shape),
        )
        for name in vars(ours)
        if name not in ("vision", "language", "source", "layer_scale_init", "tied_embeddings")
        and getattr(theirs, name) != getattr(ours, name)
    ]
    if found:
        raise ValueError("The config.json to follow is of another model: " + "; ".join(found))
    vision, text = dict(config["vision_config"]), dict(config["llm_config"])
    new = {**config, "vision_config": vision, "llm_config": text}
    for section in (new, vision, text):
        section.update({key: dtype for key in ("dtype", "torch_dtype") if section.get(key) is not None})
    if vision["num_hidden_layers"] != shape.vision.num_layers:
        vision["num_hidden_layers"], new["select_layer"] = shape.vision.num_layers, -1
    if own.language.tied_embeddings != shape.language.tied_embeddings:
        text["tie_word_embeddings"] = shape.language.tied_embeddings
    return new


def language_architecture(config: Mapping[str, Any]) -> str:
    """Return the first of `llm_config.architectures`, empty where there is none."""
    named = config["llm_config"].get("architectures") or [""]
    return str(named[0])


def count_vision_layers(config: Mapping[str, Any]) -> int:
    """Return how many vision layers the output that `select_layer` picks has passed."""
    layers, chosen = config["vision_config"]["num_hidden_layers"], config.get("select_layer", -1)
    return layers + 1 + chosen if chosen < 0 else chosen


def _chat_vision_config(vision: VisionShape, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["InternVisionModel"],
        "model_type": "intern_vit_6b",  # of every size
        "torch_dtype": dtype,
        "image_size": vision.image_size_px,
        "patch_size": vision.patch_size_px,
        "num_channels": 3,
        "hidden_size": vision.hidden_size,
        "num_hidden_layers": vision.num_layers,
        "num_attention_heads": vision.num_heads,
        "intermediate_size": vision.mlp_size,
        "hidden_act": "gelu",
        "norm_type": {ours: theirs for theirs, ours in NORMS.items()}[vision.norm],
        "layer_norm_eps": vision.norm_eps,
        "qkv_bias": vision.qkv_bias,
        "qk_normalization": vision.qk_norm,
        "initializer_factor": vision.layer_scale_init,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "drop_path_rate": 0.0,
        "use_flash_attn": False,
    }


def _chat_text_config(language: LanguageShape, dtype: str) -> dict[str, Any]:
    config = {**hf_text_config(language), "torch_dtype": dtype}
    if language.qkv_bias:
        return config
    del config["rope_parameters"]
    return {**config, "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}


def _top_problems(config: Mapping[str, Any]) -> list[str]:
    problems = find_wrong("config", config, pad2square=False, use_backbone_lora=0, use_llm_lora=0)
    version, layers = config.get("ps_version", "v1"), config["vision_config"]["num_hidden_layers"]
    if version not in ("v1", "v2"):
        problems.append(f"config.ps_version = {version!r} must be 'v1' or 'v2'")
    if not 1 <= count_vision_layers(config) <= layers:
        problems.append(f"config.select_layer = {config['select_layer']} must be the output of one of {layers} layers")
    forced, own = config.get("force_image_size"), config["vision_config"]["image_size"]
    if forced not in (None, own):
        problems.append(f"config.force_image_size = {forced} must be vision_config.image_size = {own}")
    if config.get("dynamic_image_size", False) and not config.get("use_thumbnail", False):
        problems.append("config.use_thumbnail = False must be True: here a picture of several tiles has one")
    return problems


def _vision_problems(vision: Mapping[str, Any]) -> list[str]:
    # drop_path_rate changes training alone; loading says that it is left out.
    problems = find_wrong(
        "vision_config", vision, hidden_act="gelu", num_channels=3, dropout=0.0, attention_dropout=0.0, use_moe=False
    )
    if vision.get("norm_type", "rms_norm") not in NORMS:
        problems.append(f"vision_config.norm_type = {vision['norm_type']!r} must be one of {', '.join(NORMS)}")
    problems += [
        f"vision_config.{side} = {vision[side]!r} must be one number, of a square"
        for side in ("image_size", "patch_size")
        if not isinstance(vision[side], int)
    ]
    eps = vision.get("layer_norm_eps", 1e-6)
    if vision.get("qk_normalization", True) and eps != QK_NORM_EPS:
        problems.append(f"vision_config.layer_norm_eps = {eps} must be {QK_NORM_EPS} with qk_normalization")
    return problems


def _text_problems(text: Mapping[str, Any]) -> list[str]:
    architecture = str((text.get("architectures") or [""])[0])
    if architecture not in LANGUAGE_KINDS:
        return [f"llm_config.architectures = [{architecture!r}]: choose one of {', '.join(LANGUAGE_KINDS)}"]
    problems = find_wrong(
        "llm_config",
        text,
        hidden_act="silu",
        use_sliding_window=False,
        attention_dropout=0.0,
        mlp_bias=False,
        rope_pos_id_version="default",
    )
    if architecture == "InternLM2ForCausalLM" and text.get("bias", True) is not False:
        problems.append("llm_config.bias must be there and False: InternLM2's default are biases that this tower lacks")
    if architecture == "LlamaForCausalLM":
        problems += find_wrong("llm_config", text, attention_bias=False)
    return [*problems, *find_head_problems("llm_config", text), *find_rope_problems("llm_config", text)]


def _vision_shape(vision: Mapping[str, Any], num_layers: int) -> VisionShape:
    return VisionShape(
        image_size_px=vision["image_size"],
        patch_size_px=vision["patch_size"],
        num_layers=num_layers,
        hidden_size=vision["hidden_size"],
        num_heads=vision["num_attention_heads"],
        mlp_size=vision["intermediate_size"],
        norm=NORMS[vision.get("norm_type", "rms_norm")],
        qk_norm=vision.get("qk_normalization", True),
        qkv_bias=vision.get("qkv_bias", False),
        norm_eps=vision.get("layer_norm_eps", 1e-6),
        layer_scale_init=vision.get("initializer_factor", 0.1),
    )
