"""Model presets against the published sizes of their towers."""

from __future__ import annotations

import time

import pytest

from vlmcourse.models import build_model
from vlmcourse.presets import MODELS, get_model

# Millions of parameters (vision, projector, language), to the digits given; the totals are those of the published
# checkpoints: 0.9, 2.2, 8.1, 25.5 and 76.3 billion. The vision towers are InternViT-300M (304 M) and InternViT-6B with
# 45 layers, whose model card says 5540 M, the language towers Qwen2-0.5B with an untied output, InternLM2 and Llama-3.
PUBLISHED_MILLIONS = {
    "internvl2-1b": (304.01, 4.48, 629.66, 938.16),
    "internvl2-2b": (304.01, 12.60, 1889.15, 2205.75),
    "internvl2-8b": (304.01, 33.57, 7737.78, 8075.37),
    "internvl2-26b": (5536.50, 116.43, 19861.26, 25514.19),
    "internvl2-76b": (5536.50, 172.01, 70553.85, 76262.36),
}
PUBLISHED_BILLIONS = {
    "internvl2-1b": 0.9,
    "internvl2-2b": 2.2,
    "internvl2-8b": 8.1,
    "internvl2-26b": 25.5,
    "internvl2-76b": 76.3,
}


def count_by_tower(name: str) -> dict[str, int]:
    model = build_model(get_model(name), device="meta")
    return {tower: sum(p.numel() for p in child.parameters()) for tower, child in model.named_children()}


@pytest.mark.parametrize("name", PUBLISHED_MILLIONS)
def test_parameter_counts_equal_the_published_ones_by_tower(name):
    counts = count_by_tower(name)
    *towers, total = PUBLISHED_MILLIONS[name]
    assert [round(count / 1e6, 2) for count in counts.values()] == towers
    assert round(sum(counts.values()) / 1e6, 2) == total
    assert round(sum(counts.values()) / 1e9, 1) == PUBLISHED_BILLIONS[name]


def test_26b_is_the_sum_worked_by_hand():
    counts = count_by_tower("internvl2-26b")
    D, F, L = 3200, 12800, 45
    block = 3 * D * D + (D * D + D) + (D * F + F) + (F * D + D) + 4 * D + 2 * D  # qkv, out, MLP, four norms, two scales
    assert counts["vision"] == L * block + (3 * 14 * 14 * D + D) + D + 1025 * D
    assert counts["projector"] == 2 * 12800 + (12800 * 6144 + 6144) + (6144 * 6144 + 6144)
    D, F, L, V, kv = 6144, 16384, 48, 92553, 8 * 128
    block = 2 * D * D + 2 * D * kv + 3 * D * F + 2 * D
    assert counts["language"] == L * block + 2 * V * D + D
    assert round(sum(counts.values()) / 1e9, 3) == 25.514


def test_26b_and_76b_build_on_meta_in_seconds_and_in_no_memory():
    started = time.perf_counter()
    for name in ("internvl2-26b", "internvl2-76b"):
        model = build_model(get_model(name), device="meta")
        assert all(weight.is_meta for weight in model.parameters())
    assert time.perf_counter() - started < 10


def test_26b_has_the_published_shape():
    shape = get_model("internvl2-26b")
    assert (shape.vision.num_heads, shape.vision.num_layers, shape.vision.qk_norm) == (25, 45, True)
    assert (shape.language.vocab_size, shape.language.num_layers, shape.language.num_kv_heads) == (92553, 48, 8)
    assert shape.vision.num_patches == 1024 and shape.num_visual_tokens_per_tile == 256


def test_tiny_is_half_a_million_and_small_thirty_million():
    assert 0.4e6 < sum(count_by_tower("tiny").values()) < 0.7e6
    assert 25e6 < sum(count_by_tower("small").values()) < 35e6


def test_tiny_and_small_fit_the_builtin_tokenizer():
    for name in ("tiny", "small"):
        shape = get_model(name)
        assert shape.language.vocab_size == 256 and shape.image_token_id == 3
    assert get_model("tiny").num_visual_tokens_per_tile == 4 and get_model("tiny").vision.image_size_px == 32


def test_names_are_keys_and_every_preset_builds_and_says_its_source():
    for name, shape in MODELS.items():
        assert shape.name == name and shape.source
        build_model(shape, device="meta")


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'internvl2-26b'"):
        get_model("internvl2-26")
    with pytest.raises(ValueError, match="choose one of tiny, small"):
        get_model("zzz")
