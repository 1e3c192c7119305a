"""Hugging Face folders of `InternVLForConditionalGeneration`: config.json and safetensors, in and out.

Weights carry other names on disk (`language_model.model.layers.0...`) than inside transformers
(`model.language_model.layers.0...`). Folders in either layout are read; the first, which every published folder has, is
written. Only names differ from ours: no weight is transposed, split or merged. The tokenizer is copied, not read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vlmcourse.config_files import HF_INDEX_FILE as INDEX_FILE
from vlmcourse.config_files import HF_WEIGHTS_FILE as WEIGHTS_FILE
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.planner.hf_config import hf_config_from_shape, shape_from_hf_config

__all__ = ["hf_config_from_shape", "load_hf_folder", "save_hf_folder", "shape_from_hf_config"]

logger = logging.getLogger(__name__)

LM_HEAD = "language_model.lm_head.weight"
EMBEDDING = "language_model.model.embed_tokens.weight"
UNUSED = ("mask_token", "rotary_emb.inv_freq")
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.*",
)

# Ours on the left, as regular expressions; the first that matches the start of a name gives its new start.
_PREFIXES = (
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
    (r"language\.embedding", "language_model.model.embed_tokens"),
    (r"language\.blocks\.(\d+)\.norm1", r"language_model.model.layers.\1.input_layernorm"),
    (r"language\.blocks\.(\d+)\.norm2", r"language_model.model.layers.\1.post_attention_layernorm"),
    (r"language\.blocks\.(\d+)\.attention\.out_proj", r"language_model.model.layers.\1.self_attn.o_proj"),
    (r"language\.blocks\.(\d+)\.attention", r"language_model.model.layers.\1.self_attn"),
    (r"language\.blocks\.(\d+)\.mlp", r"language_model.model.layers.\1.mlp"),
    (r"language\.norm", "language_model.model.norm"),
    (r"language\.lm_head", "language_model.lm_head"),
)
# Inside transformers on the left, on disk on the right.
_LAYOUTS = (
    (r"model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"model\.language_model\.", "language_model.model."),
    (r"lm_head\.", "language_model.lm_head."),
)


def hf_name(name: str) -> str:
    """Return the name on disk of one of our weights.

    Raises:
        KeyError: if no weight of a `VLM` has that name.
    """
    for pattern, replacement in _PREFIXES:
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name, count=1)
    raise KeyError(name)


def load_hf_folder(path: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> VLM:
    """Read a model from a folder with config.json and safetensors, in one file or in shards.

    Args:
        path: the folder.
        device: where the weights go.
        dtype: of every weight, whatever the files hold.

    Returns:
        The model, in training mode as `build_model` gives it.

    Raises:
        FileNotFoundError: if the folder, its config.json or a weights file is missing.
        ValueError: if the config describes a model that cannot be built here, or the weights do not fit it; the message
            lists the names.
    """
    folder = Path(path)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"There is no {config_file}: give a folder with config.json and safetensors")
    shape = shape_from_hf_config(json.loads(config_file.read_text(encoding="utf-8")), name=folder.name)
    weights = _read_weights(folder, device, dtype)
    tied = _is_tied(weights, shape.language.tied_embeddings)
    language = dataclasses.replace(shape.language, tied_embeddings=tied)
    model = build_model(dataclasses.replace(shape, language=language), device="meta", dtype=dtype)
    expected = {hf_name(name): (name, weight.shape) for name, weight in model.state_dict().items()}
    _check_weights(folder, {name: shape for name, (_, shape) in expected.items()}, weights)
    model.load_state_dict({ours: weights[theirs] for theirs, (ours, _) in expected.items()}, assign=True)
    return model


def save_hf_folder(
    model: VLM,
    path: str | Path,
    tokenizer_dir: str | Path | None = None,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a folder that `load_hf_folder` and `InternVLForConditionalGeneration.from_pretrained` read.

    A language tower without biases is written as llama, one with biases as qwen2 (see `hf_config_from_shape`).
    Weights that the folder already held are replaced.

    Args:
        model: the model; only its shape is read when `state_dict` is given.
        path: the folder, made if need be.
        tokenizer_dir: a folder whose tokenizer files are copied along.
        state_dict: whole weights under the names of `model.state_dict()`, for a model that holds only parts of them.
            Each is asked for once, in order, so that they may come from a file one by one.
        max_shard_bytes: size from which a new file is begun.

    Raises:
        FileNotFoundError: if `tokenizer_dir` holds no tokenizer.
        ValueError: if `state_dict` does not name every weight.
    """
    ours = model.state_dict() if state_dict is None else state_dict
    names = model.state_dict().keys()
    if ours.keys() != names:
        raise ValueError(f"state_dict must have the names of the model's: {_few(ours.keys() ^ names)} differ")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer_dir is not None:
        _copy_tokenizer(Path(tokenizer_dir), folder)
    weights = ((hf_name(name), ours[name].detach().cpu().contiguous()) for name in names)
    dtype = _write_weights(folder, weights, max_shard_bytes)
    config = json.dumps(hf_config_from_shape(model.shape, str(dtype).removeprefix("torch.")), indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")


def _disk_name(name: str) -> str:
    """Return the name on disk of a weight in either of transformers' layouts."""
    for pattern, replacement in _LAYOUTS:
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name, count=1)
    return name


def _read_weights(folder: Path, device: str | torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return every weight in the folder under its name on disk."""
    if (folder / WEIGHTS_FILE).is_file():
        files = [WEIGHTS_FILE]
    elif (folder / INDEX_FILE).is_file():
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        files = sorted(set(index["weight_map"].values()))
    else:
        raise FileNotFoundError(
            f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}: save the model as safetensors, as transformers does"
        )
    weights: dict[str, Tensor] = {}
    for file in files:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / INDEX_FILE} names {file}, which is not there: download all the shards")
        with safe_open(folder / file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (the handle is not a mapping)
                if not name.endswith(UNUSED):
                    weights[_disk_name(name)] = tensors.get_tensor(name).to(dtype)
    return weights


def _is_tied(weights: dict[str, Tensor], config_says: bool) -> bool:
    """Whether the output matrix is the embedding; removes a second copy of it from `weights`."""
    head, embedding = weights.get(LM_HEAD), weights.get(EMBEDDING)
    if not config_says or head is None or embedding is None:
        return config_says
    if torch.equal(head, embedding):
        del weights[LM_HEAD]
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


def _write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> torch.dtype:
    """Write one file, or shards with an index; nothing of an older save is left. Return the first weight's type."""
    # A loaded model may still be reading the old file, so that file must not be written to: replace it whole.
    stale = {*folder.glob("model*.safetensors"), *folder.glob(INDEX_FILE)}
    dtypes: list[torch.dtype] = []
    names_of: list[list[str]] = []
    num_bytes = 0
    for number, shard in enumerate(_fill_shards(weights, max_shard_bytes)):
        save_file(shard, folder / f"{number}.partial", metadata={"format": "pt"})
        dtypes += [weight.dtype for weight in shard.values()]
        num_bytes += sum(weight.nbytes for weight in shard.values())
        names_of.append(list(shard))
    for file in stale:
        file.unlink()
    count = len(names_of)
    files = [WEIGHTS_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for number, file in enumerate(files):
        (folder / f"{number}.partial").replace(folder / file)
    if count > 1:
        index = {
            "metadata": {"total_size": num_bytes},
            "weight_map": {name: file for file, names in zip(files, names_of, strict=True) for name in names},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return dtypes[0]


def _fill_shards(weights: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield weights by name, as many at a time as have room in one file; one that has none is alone."""
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    for name, weight in weights:
        if shard and shard_bytes + weight.nbytes > max_shard_bytes:
            yield shard
            shard, shard_bytes = {}, 0
        shard[name] = weight
        shard_bytes += weight.nbytes
    yield shard


def _copy_tokenizer(source: Path, folder: Path) -> None:
    files = {file for pattern in TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()}
    if not files:
        raise FileNotFoundError(f"{source} holds no tokenizer files: give a folder with tokenizer.json")
    for file in files:
        if file.resolve() != (folder / file.name).resolve():
            shutil.copy2(file, folder / file.name)
