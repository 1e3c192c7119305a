"""Hugging Face folders of InternVL models: config.json and safetensors, in and out, in the two layouts people have.

`transformers` is `InternVLForConditionalGeneration`; its weights carry other names on disk
(`language_model.model.layers.0...`) than inside transformers (`model.language_model.layers.0...`), and folders with
either are read. `internvl_chat` is the original `InternVLChatModel` of OpenGVLab's folders, with an InternLM2, Qwen2 or
Llama tower; the code in such a folder is copied, never run. The tokenizer is copied, not read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.models.weight_files import read_weights, write_weights
from vlmcourse.models.weight_names import TRANSFORMERS, WeightNames, find_weight_names, pack, packed_size, unpack
from vlmcourse.planner.hf_chat_config import CHAT_MODEL_TYPE, chat_config_from_shape, chat_config_like
from vlmcourse.planner.hf_config import hf_config_from_shape, shape_from_hf_config
from vlmcourse.planner.hf_folder import LAYOUTS, find_hf_layout, find_hf_shape, read_hf_config

__all__ = ["LAYOUTS", "hf_config_from_shape", "load_hf_folder", "save_hf_folder", "shape_from_hf_config"]

logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.*",
)
BESIDE_FILES = ("*.py", "generation_config.json", "preprocessor_config.json")
"""What else a folder in the original layout needs to be loaded by its own code."""
_VISION_LAYER = re.compile(r"vision_model\.encoder\.layers\.(\d+)\.")


def hf_name(name: str) -> str:
    """Return the name on disk of one of our weights in transformers' layout.

    Raises:
        KeyError: if no weight of a `VLM` has that name.
    """
    return TRANSFORMERS.disk_name(name)


def load_hf_folder(path: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> VLM:
    """Read a model from a folder with config.json and safetensors, in one file or in shards, in either layout.

    Args:
        path: the folder.
        device: where the weights go.
        dtype: of every weight, whatever the files hold.

    Returns:
        The model, in training mode as `build_model` gives it.

    Raises:
        FileNotFoundError: if the folder, its config.json or a weights file is missing.
        ValueError: if the config is of another model or describes one that cannot be built here, or the weights do not
            fit it; the message lists the names.
    """
    folder = Path(path)
    config = read_hf_config(folder)
    if config is None:
        raise FileNotFoundError(f"There is no {folder / 'config.json'}: give a folder with config.json and safetensors")
    shape, names = find_hf_shape(folder, config), find_weight_names(config)
    weights = read_weights(folder, device, dtype, names.read_name)
    if find_hf_layout(config, folder.name) == CHAT_MODEL_TYPE:
        _drop_unused_layers(weights, shape.vision.num_layers, config)
        _warn_of_drop_path(config)
    tied = _is_tied(weights, names, shape.language.tied_embeddings)
    language = dataclasses.replace(shape.language, tied_embeddings=tied)
    model = build_model(dataclasses.replace(shape, language=language), device="meta", dtype=dtype)
    sizes = {name: weight.shape for name, weight in model.state_dict().items()}
    groups = names.group(sizes)
    expected = {theirs: packed_size([sizes[name] for name in ours]) for theirs, ours in groups.items()}
    _check_weights(folder, expected, weights)
    found: dict[str, Tensor] = {}
    for theirs, ours in groups.items():
        parts = unpack(theirs, weights.pop(theirs), [sizes[name] for name in ours], language.num_kv_heads)
        found |= zip(ours, parts, strict=True)
    model.load_state_dict(found, assign=True)
    return model


def save_hf_folder(
    model: VLM,
    path: str | Path,
    tokenizer_dir: str | Path | None = None,
    *,
    layout: str = "transformers",
    like: str | Path | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a folder that `load_hf_folder` reads, and what the layout is named after.

    In transformers' layout, a language tower without biases is written as llama, one with biases as qwen2; in the
    original one, as InternLM2 or Qwen2, or as in the folder to follow. Weights that the folder held are replaced.

    Args:
        model: the model; only its shape is read when `state_dict` is given.
        path: the folder, made if need be.
        tokenizer_dir: a folder whose tokenizer files are copied along; by default those of `like`.
        layout: one of `LAYOUTS`.
        like: with `internvl_chat`, a folder of the same model in that layout. Its config.json is kept but for the type
            of the weights, and its code is copied, without which the original's own `from_pretrained` cannot load it.
        state_dict: whole weights under the names of `model.state_dict()`, for a model that holds only parts of them.
            Each is asked for once, so that they may come from a file one by one.
        max_shard_bytes: size from which a new file is begun.

    Raises:
        FileNotFoundError: if `tokenizer_dir` holds no tokenizer.
        ValueError: if `state_dict` does not name every weight, the layout cannot hold this model, or `like` is of
            another one.
    """
    ours = model.state_dict() if state_dict is None else state_dict
    sizes = model.state_dict().keys()
    if ours.keys() != sizes:
        raise ValueError(f"state_dict must have the names of the model's: {_few(ours.keys() ^ sizes)} differ")
    followed = _read_followed(layout, like)
    config = _build_config(model, layout, followed, "float32")
    names = find_weight_names(config)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if like is not None:
        _copy(Path(like), folder, (*BESIDE_FILES, *(TOKENIZER_FILES if tokenizer_dir is None else ())))
    if tokenizer_dir is not None and not _copy(Path(tokenizer_dir), folder, TOKENIZER_FILES):
        raise FileNotFoundError(f"{tokenizer_dir} holds no tokenizer files: give a folder with tokenizer.json")
    kv_heads = model.shape.language.num_kv_heads
    packed = (
        (theirs, pack(theirs, [ours[name].detach().cpu() for name in parts], kv_heads).contiguous())
        for theirs, parts in names.group(sizes).items()
    )
    dtype = write_weights(folder, packed, max_shard_bytes)
    config = _build_config(model, layout, followed, str(dtype).removeprefix("torch."))
    if like is not None and config == followed:  # to the byte
        text = (Path(like) / "config.json").read_text(encoding="utf-8")
    else:
        text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _read_followed(layout: str, like: str | Path | None) -> dict[str, Any] | None:
    """Return the config.json of the folder to follow."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout = {layout!r}: choose one of {', '.join(LAYOUTS)}")
    if like is None:
        return None
    if layout != CHAT_MODEL_TYPE:
        raise ValueError(f"like = {str(like)!r} with layout = {layout!r}: only {CHAT_MODEL_TYPE!r} follows a folder")
    config = read_hf_config(like)
    if config is None or find_hf_layout(config, Path(like).name) != CHAT_MODEL_TYPE:
        raise ValueError(f"{str(like)!r} is no folder of an InternVLChatModel: give the one that the model came from")
    return config


def _build_config(model: VLM, layout: str, followed: Mapping[str, Any] | None, dtype: str) -> dict[str, Any]:
    if layout != CHAT_MODEL_TYPE:
        return hf_config_from_shape(model.shape, dtype)
    if followed is not None:
        return chat_config_like(followed, model.shape, dtype)
    return chat_config_from_shape(model.shape, dtype)


def _drop_unused_layers(weights: dict[str, Tensor], num_layers: int, config: Mapping[str, Any]) -> None:
    """Remove the vision layers after the one whose output `select_layer` picks."""
    for name in list(weights):
        layer = _VISION_LAYER.match(name)
        if layer and num_layers <= int(layer[1]) < config["vision_config"]["num_hidden_layers"]:
            del weights[name]


def _warn_of_drop_path(config: Mapping[str, Any]) -> None:
    rate = config["vision_config"].get("drop_path_rate", 0.0)
    if rate:
        logger.warning(
            "The config asks for vision_config.drop_path_rate = %s, which drops whole vision layers at random in "
            "training: this model has no such thing and trains with all of them; what it computes is the same",
            rate,
        )


def _is_tied(weights: dict[str, Tensor], names: WeightNames, config_says: bool) -> bool:
    """Whether the output matrix is the embedding; removes a second copy of it from `weights`."""
    head, embedding = weights.get(names.head), weights.get(names.embedding)
    if not config_says or head is None or embedding is None:
        return config_says
    if torch.equal(head, embedding):
        del weights[names.head]
        return True
    logger.warning("The config ties the embeddings, but the folder has an output matrix of its own: it is used")
    return False


def _check_weights(folder: Path, expected: Mapping[str, torch.Size], weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the weights are exactly those expected."""
    problems = []
    if missing := expected.keys() - weights.keys():
        problems.append(f"{len(missing)} are missing ({_few(missing)})")
    if extra := weights.keys() - expected.keys():
        problems.append(f"{len(extra)} have no place in the model ({_few(extra)})")
    for name in sorted(expected.keys() & weights.keys()):
        if weights[name].shape != expected[name]:
            problems.append(f"{name} is {list(weights[name].shape)}, not {list(expected[name])}")
    if problems:
        raise ValueError(f"The weights in {folder} do not fit its config.json: " + "; ".join(problems))


def _few(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (", ..." if len(ordered) > 4 else "")


def _copy(source: Path, folder: Path, patterns: Iterable[str]) -> bool:
    """Copy what is named by the patterns; return whether there was anything."""
    files = {file for pattern in patterns for file in source.glob(pattern) if file.is_file()}
    for file in files:
        if file.resolve() != (folder / file.name).resolve():
            shutil.copy2(file, folder / file.name)
    return bool(files)
