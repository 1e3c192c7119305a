"""A Hugging Face folder of an InternVL model, in either layout, to its `VLMShape`; weights are not read.

Enters: a folder. Leaves: the shape, or which layout it is in. The original layout names its image token in the
tokenizer alone. Imports no torch, so that degrees are checked against the model before any rank starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlmcourse.planner.hf_chat_config import CHAT_MODEL_TYPE, shape_from_chat_config
from vlmcourse.planner.hf_config import shape_from_hf_config
from vlmcourse.presets import VLMShape

LAYOUTS = ("transformers", CHAT_MODEL_TYPE)
"""`InternVLForConditionalGeneration`, and the original `InternVLChatModel`."""
IMAGE_TOKEN = "<IMG_CONTEXT>"
TOKEN_FILES = ("added_tokens.json", "tokenizer_config.json", "tokenizer.json")
"""Where a tokenizer may keep the ids of its added tokens; each is looked into in this order."""


def read_hf_shape(folder: str | Path) -> VLMShape | None:
    """Read the shape of the model in a Hugging Face folder from its config.json; None where there is none.

    Raises:
        ValueError: if it is not JSON, describes a model that cannot be built here, or, in the original layout, there is
            no tokenizer that knows the image token.
    """
    config = read_hf_config(folder)
    return None if config is None else find_hf_shape(folder, config)


def read_hf_config(folder: str | Path) -> dict[str, Any] | None:
    """Return the config.json of a folder; None where there is none.

    Raises:
        ValueError: if it is no JSON object.
    """
    file = Path(folder) / "config.json"
    return _read_object(file) if file.is_file() else None


def find_hf_shape(folder: str | Path, config: Mapping[str, Any]) -> VLMShape:
    """Read the shape of the model in a folder whose config.json has been read; errors as in `read_hf_shape`."""
    name = Path(folder).name
    if find_hf_layout(config, name) == "transformers":
        return shape_from_hf_config(config, name)
    return shape_from_chat_config(config, find_image_token_id(folder, config), name)


def find_hf_layout(config: Mapping[str, Any], name: str) -> str:
    """Return which of `LAYOUTS` a config.json is of.

    Raises:
        ValueError: if it is of another model; the message says which.
    """
    kind = config.get("model_type")
    if kind == CHAT_MODEL_TYPE:
        return CHAT_MODEL_TYPE
    if kind == "internvl":
        return "transformers"
    named = ", ".join(map(str, config.get("architectures") or ["no architecture"]))
    raise ValueError(
        f"{name!r} is a model of model_type = {kind!r} ({named}): only 'internvl' (InternVLForConditionalGeneration) "
        "and 'internvl_chat' (InternVLChatModel) can be read"
    )


def find_image_token_id(folder: str | Path, config: Mapping[str, Any]) -> int:
    """Return the id of the token that stands for an image feature, from the config or from the folder's tokenizer.

    Raises:
        ValueError: if neither names it, or a file of the tokenizer is not JSON.
    """
    for key in ("img_context_token_id", "image_token_id"):
        if isinstance(config.get(key), int):
            return config[key]
    for name in TOKEN_FILES:
        file = Path(folder) / name
        if file.is_file():
            for token, token_id in _added_tokens(_read_object(file)):
                if token == IMAGE_TOKEN:
                    return token_id
    raise ValueError(
        f"{str(folder)!r} does not say which token stands for an image feature: its config.json has no "
        f"img_context_token_id, and {IMAGE_TOKEN} is in none of {', '.join(TOKEN_FILES)}; copy the model's tokenizer "
        "files into it"
    )


def _added_tokens(content: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield added tokens and their ids from any of `TOKEN_FILES`."""
    for token, token_id in content.items():
        if isinstance(token_id, int) and not isinstance(token_id, bool):  # added_tokens.json
            yield token, token_id
    decoder = content.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):  # tokenizer_config.json
        for token_id, token in decoder.items():
            yield token["content"], int(token_id)
    added = content.get("added_tokens")
    if isinstance(added, list):  # tokenizer.json
        for token in added:
            yield token["content"], int(token["id"])


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"{file} is not JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not an object: download it again")
    return content
