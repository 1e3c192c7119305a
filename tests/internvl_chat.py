"""Checkpoints in the original InternVL layout, made here, and what they compute, written down once more in float64.

Nothing of `vlmcourse` is used: names, packing and arithmetic follow the description of the layout, with loops over
samples and heads instead of modules, so that an error in the package's reading cannot hide behind the same error here.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor

IMAGE_TOKEN = 3
Weights = dict[str, Tensor]


def chat_config(
    architecture: str, changes: dict[str, Any] | None = None, *, big_vision: bool = False
) -> dict[str, Any]:
    """Return a tiny model's config.json as OpenGVLab's folders have it; dotted names change an entry."""
    kind = {"InternLM2ForCausalLM": "internlm2", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}[architecture]
    config: dict[str, Any] = {
        "_commit_hash": None,
        "architectures": ["InternVLChatModel"],
        "auto_map": {
            "AutoConfig": "configuration_internvl_chat.InternVLChatConfig",
            "AutoModel": "modeling_internvl_chat.InternVLChatModel",
            "AutoModelForCausalLM": "modeling_internvl_chat.InternVLChatModel",
        },
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 16,
        "llm_config": {
            "architectures": [architecture],
            "model_type": kind,
            "hidden_act": "silu",
            "hidden_size": 24,
            "intermediate_size": 40,
            "max_position_embeddings": 512,
            "num_attention_heads": 6,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 3.0, "type": "dynamic"},
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "vocab_size": 64,
        },
        "max_dynamic_patch": 12,
        "min_dynamic_patch": 1,
        "model_type": "internvl_chat",
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internlm2-chat",
        "torch_dtype": "float32",
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "use_thumbnail": True,
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "attention_dropout": 0.0,
            "drop_path_rate": 0.0,
            "dropout": 0.0,
            "hidden_act": "gelu",
            "hidden_size": 24,
            "image_size": 16,
            "initializer_factor": 0.1,
            "intermediate_size": 40,
            "layer_norm_eps": 1e-06,
            "model_type": "intern_vit_6b",
            "norm_type": "rms_norm" if big_vision else "layer_norm",
            "num_attention_heads": 3,
            "num_channels": 3,
            "num_hidden_layers": 3,
            "patch_size": 4,
            "qk_normalization": big_vision,
            "qkv_bias": not big_vision,
            "torch_dtype": "float32",
            "use_flash_attn": True,
        },
    }
    if kind == "internlm2":
        config["llm_config"]["bias"] = False
    for path, value in (changes or {}).items():
        section, _, key = path.rpartition(".")
        (config[section] if section else config)[key] = value
    return config


def random_weights(config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Weights:
    """Return weights under the names and in the sizes of the original layout, in the order of its modules."""
    generator = torch.Generator().manual_seed(seed)
    vision, text = config["vision_config"], config["llm_config"]
    weights: Weights = {}

    def add(name: str, *size: int, around: float = 0.0) -> None:
        spread = 0.2
        weights[name] = (around + spread * torch.randn(size, generator=generator)).to(dtype)

    def add_linear(name: str, out: int, into: int, bias: bool) -> None:
        add(f"{name}.weight", out, into)
        if bias:
            add(f"{name}.bias", out)

    def add_norm(name: str, width: int, bias: bool) -> None:
        add(f"{name}.weight", width, around=1.0)
        if bias:
            add(f"{name}.bias", width)

    D, patch = vision["hidden_size"], vision["patch_size"]
    is_layer_norm = vision["norm_type"] == "layer_norm"
    embeddings = "vision_model.embeddings."
    add(embeddings + "class_embedding", 1, 1, D)
    add(embeddings + "position_embedding", 1, 1 + (vision["image_size"] // patch) ** 2, D)
    add(embeddings + "patch_embedding.weight", D, 3, patch, patch)
    add(embeddings + "patch_embedding.bias", D)
    for layer in range(vision["num_hidden_layers"]):
        start = f"vision_model.encoder.layers.{layer}."
        add_linear(start + "attn.qkv", 3 * D, D, vision["qkv_bias"])
        if vision["qk_normalization"]:
            add_norm(start + "attn.q_norm", D, False)
            add_norm(start + "attn.k_norm", D, False)
        add_linear(start + "attn.proj", D, D, True)
        add_linear(start + "mlp.fc1", vision["intermediate_size"], D, True)
        add_linear(start + "mlp.fc2", D, vision["intermediate_size"], True)
        for branch in (1, 2):
            add_norm(f"{start}norm{branch}", D, is_layer_norm)
            add(f"{start}ls{branch}", D)
    W, F, V = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    add_norm("mlp1.0", 4 * D, True)
    add_linear("mlp1.1", W, 4 * D, True)
    add_linear("mlp1.3", W, W, True)
    E, H, K = W // text["num_attention_heads"], text["num_attention_heads"], text["num_key_value_heads"]
    model = "language_model.model."
    if text["model_type"] == "internlm2":
        add(model + "tok_embeddings.weight", V, W)
        for layer in range(text["num_hidden_layers"]):
            start = f"{model}layers.{layer}."
            add_linear(start + "attention.wqkv", (H + 2 * K) * E, W, False)
            add_linear(start + "attention.wo", W, W, False)
            for name, out, into in (("w1", F, W), ("w3", F, W), ("w2", W, F)):
                add_linear(f"{start}feed_forward.{name}", out, into, False)
            add_norm(start + "attention_norm", W, False)
            add_norm(start + "ffn_norm", W, False)
        add_norm(model + "norm", W, False)
        add("language_model.output.weight", V, W)
        return weights
    add(model + "embed_tokens.weight", V, W)
    has_bias = text["model_type"] == "qwen2"
    for layer in range(text["num_hidden_layers"]):
        start = f"{model}layers.{layer}."
        for name, out in (("q_proj", H * E), ("k_proj", K * E), ("v_proj", K * E)):
            add_linear(f"{start}self_attn.{name}", out, W, has_bias)
        add_linear(start + "self_attn.o_proj", W, W, False)
        for name, out, into in (("gate_proj", F, W), ("up_proj", F, W), ("down_proj", W, F)):
            add_linear(f"{start}mlp.{name}", out, into, False)
        add_norm(start + "input_layernorm", W, False)
        add_norm(start + "post_attention_layernorm", W, False)
    add_norm(model + "norm", W, False)
    if not text["tie_word_embeddings"]:
        add("language_model.lm_head.weight", V, W)
    return weights


def write_folder(folder: Path, config: dict[str, Any], weights: Weights, num_shards: int = 1) -> Path:
    """Write config.json, weights, a list of added tokens and the original's code."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "modeling_internvl_chat.py").write_text("raise RuntimeError('must never run')\n", encoding="utf-8")
    added = {"<img>": 4, "</img>": 5, "<IMG_CONTEXT>": IMAGE_TOKEN}
    (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(weights)
    places = {name: i * num_shards // len(names) for i, name in enumerate(names)}
    files = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    for number, file in enumerate(files):
        part = {name: weights[name] for name in names if places[name] == number}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(weight.nbytes for weight in weights.values())},
        "weight_map": {name: files[places[name]] for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return folder


def read_files(folder: Path) -> Weights:
    """Return all weights of a folder as they are stored."""
    weights: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            weights |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return weights


def reference_logits(folder: Path, ids_BS: Tensor, pixels_ICHW: Tensor, image_token_id: int = IMAGE_TOKEN) -> Tensor:
    """Return what the original model computes from a folder's files, in float64.

    Args:
        folder: in the original layout.
        ids_BS: [batch, seq], without padding; image tokens stand for the features of the tiles in order.
        pixels_ICHW: all tiles [tiles, 3, height, width].
        image_token_id: what stands for a feature.

    Returns:
        Logits [batch, seq, vocabulary].
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    w = {name: weight.double() for name, weight in read_files(folder).items()}
    tiles = [_encode_tile(pixels.double(), w, config) for pixels in pixels_ICHW]
    features = list(torch.cat(tiles)) if tiles else []
    is_internlm2 = config["llm_config"]["model_type"] == "internlm2"
    embedding = w["language_model.model." + ("tok_embeddings.weight" if is_internlm2 else "embed_tokens.weight")]
    rows = []
    for ids in ids_BS.tolist():
        x = torch.stack([features.pop(0) if token == image_token_id else embedding[token] for token in ids])
        rows.append(_decode(x, w, config["llm_config"]))
    assert not features
    head = w.get("language_model.output.weight", w.get("language_model.lm_head.weight", embedding))
    return torch.stack(rows) @ head.T


def _layer_norm(x: Tensor, w: Weights, name: str, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * w[name + ".weight"] + w[name + ".bias"]


def _rms_norm(x: Tensor, w: Weights, name: str, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[name + ".weight"]


def _linear(x: Tensor, w: Weights, name: str) -> Tensor:
    return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _encode_tile(pixels_CHW: Tensor, w: Weights, config: dict[str, Any]) -> Tensor:
    """Return the visual tokens [tokens, language width] of one tile."""
    vision = config["vision_config"]
    D, patch, heads, eps = (
        vision[name] for name in ("hidden_size", "patch_size", "num_attention_heads", "layer_norm_eps")
    )
    side = pixels_CHW.shape[1] // patch
    kernel = w["vision_model.embeddings.patch_embedding.weight"].reshape(D, -1)
    bias = w["vision_model.embeddings.patch_embedding.bias"]
    cells = [(row * patch, column * patch) for row in range(side) for column in range(side)]
    patches = [kernel @ pixels_CHW[:, y : y + patch, x : x + patch].reshape(-1) + bias for y, x in cells]
    x = torch.stack([w["vision_model.embeddings.class_embedding"][0, 0], *patches])
    x = x + w["vision_model.embeddings.position_embedding"][0]
    norm = _layer_norm if vision["norm_type"] == "layer_norm" else _rms_norm
    outputs = [x]
    for layer in range(vision["num_hidden_layers"]):
        start = f"vision_model.encoder.layers.{layer}."
        q, k, v = _linear(norm(x, w, start + "norm1", eps), w, start + "attn.qkv").split(D, dim=1)
        if vision["qk_normalization"]:
            q, k = _rms_norm(q, w, start + "attn.q_norm", eps), _rms_norm(k, w, start + "attn.k_norm", eps)
        E = D // heads
        mixed = []
        for h in range(heads):
            part = slice(h * E, (h + 1) * E)
            mixed.append(torch.softmax(q[:, part] @ k[:, part].T / math.sqrt(E), dim=1) @ v[:, part])
        x = x + _linear(torch.cat(mixed, dim=1), w, start + "attn.proj") * w[start + "ls1"]
        inner = _gelu(_linear(norm(x, w, start + "norm2", eps), w, start + "mlp.fc1"))
        x = x + _linear(inner, w, start + "mlp.fc2") * w[start + "ls2"]
        outputs.append(x)
    grid = outputs[config["select_layer"]][1:].reshape(side, side, D)
    half = range(side // 2)
    order = (
        [(r, c) for r in half for c in half] if config["ps_version"] == "v2" else [(r, c) for c in half for r in half]
    )
    folded = torch.stack(
        [torch.cat([grid[2 * r + i, 2 * c + j] for i in range(2) for j in range(2)]) for r, c in order]
    )
    return _linear(_gelu(_linear(_layer_norm(folded, w, "mlp1.0", 1e-5), w, "mlp1.1")), w, "mlp1.3")


def _rotate(x_SE: Tensor, theta: float) -> Tensor:
    """Turn channel e of each position together with channel e + half."""
    S, E = x_SE.shape
    angles = torch.arange(S).double()[:, None] * theta ** (-torch.arange(0, E, 2).double() / E)
    first, second = x_SE[:, : E // 2], x_SE[:, E // 2 :]
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.cat(turned, dim=1)


def _decode(x: Tensor, w: Weights, text: dict[str, Any]) -> Tensor:
    """Return the last norm's output [seq, width] of one sample without padding."""
    H, K, eps = (text[name] for name in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps"))
    E, is_internlm2 = text["hidden_size"] // H, text["model_type"] == "internlm2"
    for layer in range(text["num_hidden_layers"]):
        start = f"language_model.model.layers.{layer}."
        y = _rms_norm(x, w, start + ("attention_norm" if is_internlm2 else "input_layernorm"), eps)
        if is_internlm2:
            groups = _linear(y, w, start + "attention.wqkv").split((H // K + 2) * E, dim=1)
            heads = [group.split(E, dim=1) for group in groups]
            q = [head for group in heads for head in group[:-2]]
            k, v = [group[-2] for group in heads], [group[-1] for group in heads]
        else:
            q, k, v = (_linear(y, w, f"{start}self_attn.{name}_proj").split(E, dim=1) for name in "qkv")
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = []
        for h in range(H):
            scores = _rotate(q[h], text["rope_theta"]) @ _rotate(k[h * K // H], text["rope_theta"]).T / math.sqrt(E)
            mixed.append(torch.softmax(scores.masked_fill(hidden, -math.inf), dim=1) @ v[h * K // H])
        out, ffn = ("attention.wo", "ffn_norm") if is_internlm2 else ("self_attn.o_proj", "post_attention_layernorm")
        x = x + _linear(torch.cat(mixed, dim=1), w, start + out)
        mlp = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
        gate, up, down = mlp if is_internlm2 else ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        y = _rms_norm(x, w, start + ffn, eps)
        gated = _linear(y, w, start + gate)
        x = x + _linear(gated * torch.sigmoid(gated) * _linear(y, w, start + up), w, start + down)
    return _rms_norm(x, w, "language_model.model.norm", eps)


def write_qwen_tokenizer(folder: Path) -> int:
    """Write tokenizer files as a Qwen2 folder of OpenGVLab's has them, of bytes; return the number of ids."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ye", "yes"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\ny e\nye s\n", encoding="utf-8")
    controls = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>")
    added = {token: len(pieces) + i for i, token in enumerate(controls)}
    (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "added_tokens_decoder": {str(i): {"content": token, **flags} for token, i in added.items()},
        "additional_special_tokens": list(controls[1:]),
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return len(pieces) + len(added)
