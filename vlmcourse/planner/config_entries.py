"""What the config.json of every layout is checked for, one sentence a problem.

Enters: a section of a parsed config.json and what to call it. Leaves: sentences, for one error that lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NORMS = {"layer_norm": "layernorm", "rms_norm": "rmsnorm"}
"""Their names of the vision tower's norms, and ours."""
ROPE_TYPES = ("default", "dynamic")
"""`dynamic` changes nothing up to max_position_embeddings, and longer sequences are refused by the decoder."""


def find_missing(where: str, section: Mapping[str, Any], *names: str) -> list[str]:
    """Return a sentence for each entry that is not there."""
    return [f"{where}.{name} is missing" for name in names if name not in section]


def find_wrong(where: str, section: Mapping[str, Any], **wanted: object) -> list[str]:
    """Return a sentence for each entry that is there and is not what this model does."""
    return [
        f"{where}.{name} = {section[name]!r} must be {value!r}"
        for name, value in wanted.items()
        if section.get(name, value) != value
    ]


def rope_settings(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of rotary positions: `rope_parameters` of newer configs, `rope_scaling` of older ones."""
    return text.get("rope_parameters") or text.get("rope_scaling") or {}


def find_rope_problems(where: str, text: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the rotary positions of a language tower."""
    rope, problems = rope_settings(text), []
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        problems.append(f"{where} rotary positions of type {rope_type!r} must be one of {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"{where} partial_rotary_factor = {rope['partial_rotary_factor']} must be 1.0")
    return problems


def find_head_problems(where: str, text: Mapping[str, Any]) -> list[str]:
    """Return whether the heads of a language tower have another width than their share of it."""
    head_width = text["hidden_size"] // text["num_attention_heads"]
    if text.get("head_dim") in (None, head_width):
        return []
    return [f"{where}.head_dim = {text['head_dim']!r} must be hidden_size / heads = {head_width}"]
