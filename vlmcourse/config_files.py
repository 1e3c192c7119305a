"""Are the files there that a configuration names? Asked before any rank starts to look for them.

Enters: a checked `TrainConfig`. Leaves: nothing, or one error that lists every key whose file or folder is missing.
"""

from __future__ import annotations

import json
from pathlib import Path

from vlmcourse.config import TrainConfig
from vlmcourse.values import ConfigError

HF_WEIGHTS_FILE = "model.safetensors"
HF_INDEX_FILE = "model.safetensors.index.json"
"""Names that transformers gives: weights in one file, or a list of the files that they are in."""


def check_files(config: TrainConfig) -> None:
    """Refuse a run whose files are not there, before any rank starts to look for them.

    Raises:
        ConfigError: listing every key that names a missing file or folder.
    """
    data, hf_folder, found = config.data, config.model.hf_folder, []
    if hf_folder and not (Path(hf_folder) / "config.json").is_file():
        found.append(f"model.hf_folder = {hf_folder!r}: there is no config.json in it; give a Hugging Face folder")
    elif hf_folder:
        found += [f"model.hf_folder = {hf_folder!r}: {problem}" for problem in _find_weights_problems(Path(hf_folder))]
    if data.tokenizer != "builtin" and not Path(data.tokenizer).is_dir():
        found.append(f"data.tokenizer = {data.tokenizer!r}: there is no such folder; give one, or 'builtin'")
    if data.dataset == "llava" and not Path(data.path).is_file():
        found.append(f"data.path = {data.path!r}: there is no such conversation file")
    if data.dataset == "llava" and not Path(data.image_dir).is_dir():
        found.append(f"data.image_dir = {data.image_dir!r}: there is no such folder")
    if found:
        raise ConfigError("The training configuration", found)


def _find_weights_problems(folder: Path) -> list[str]:
    """Return which files of weights a Hugging Face folder lacks."""
    if (folder / HF_WEIGHTS_FILE).is_file():
        return []
    index = folder / HF_INDEX_FILE
    if not index.is_file():
        return [f"it has neither {HF_WEIGHTS_FILE} nor {HF_INDEX_FILE}; save the model as safetensors"]
    try:
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError):
        return [f"{HF_INDEX_FILE} is not a list of files; download it again"]
    missing = [name for name in named if not (folder / name).is_file()]
    if not missing:
        return []
    return [f"{len(missing)} of {len(named)} files of weights are not there, the first is {missing[0]}; download all"]
