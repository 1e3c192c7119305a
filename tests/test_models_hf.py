"""Our model against transformers' InternVLForConditionalGeneration: the proof that it is the real architecture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import InternVLConfig, InternVLForConditionalGeneration

from vlmcourse.models import VLM, build_model, generate
from vlmcourse.models.hf import hf_config_from_shape, hf_name, load_hf_folder, save_hf_folder, shape_from_hf_config
from vlmcourse.presets import MODELS, LanguageShape, VisionShape, VLMShape

# float32 on both sides: what is left are sums in another order, amplified by a few layers.
FP32_ATOL = 1e-5
IMAGE_TOKEN = 3
TOKENS_PER_TILE = 4
TIED = VLMShape(
    name="tied",
    vision=VisionShape(image_size_px=32, patch_size_px=4, num_layers=3, hidden_size=64, num_heads=2, mlp_size=192),
    language=LanguageShape(
        vocab_size=256, num_layers=4, hidden_size=96, num_heads=4, num_kv_heads=2, mlp_size=192, tied_embeddings=True
    ),
    image_token_id=IMAGE_TOKEN,
)
VARIANTS = {
    "qwen2 untied, layernorm": dict(text="qwen2", tied=False),
    "qwen2 tied, rmsnorm, qk-norm": dict(text="qwen2", tied=True, norm_type="rms_norm", use_qk_norm=True),
    "llama untied, rmsnorm, qk-norm, vision biases": dict(
        text="llama", tied=False, norm_type="rms_norm", use_qk_norm=True, attention_bias=True
    ),
    "llama tied, layernorm, vision biases": dict(text="llama", tied=True, attention_bias=True),
    "llama without grouped heads, odd eps": dict(text="llama", tied=False, kv_heads=4, eps=1e-3, use_qk_norm=True),
}


def hf_config(text: str, tied: bool, kv_heads: int = 2, eps: float = 1e-6, **vision: Any) -> InternVLConfig:
    return InternVLConfig(
        vision_config={
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 40,
            "image_size": [16, 16],
            "patch_size": [4, 4],
            "layer_norm_eps": eps,
            **vision,
        },
        text_config={
            "model_type": text,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": kv_heads,
            "intermediate_size": 48,
            "vocab_size": 64,
            "rms_norm_eps": eps,
            "rope_theta": 5e4,
            "max_position_embeddings": 512,
            "tie_word_embeddings": tied,
        },
        image_token_id=IMAGE_TOKEN,
        image_seq_length=TOKENS_PER_TILE,
        tie_word_embeddings=tied,
    )


def random_hf_model(name: str) -> InternVLForConditionalGeneration:
    torch.manual_seed(11)
    model = InternVLForConditionalGeneration(hf_config(**VARIANTS[name]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Norms, biases, class token and positions start at 0 or 1: move them, or an error in them would not show.
            weight.add_(torch.randn_like(weight) * (0.3 if "layers" in name and weight.dim() > 1 else 0.1))
    return model.eval()


def random_batch(tiles: tuple[int, ...], lengths: tuple[int, ...], side_px: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded ids [batch, seq], pixels and mask; each sample's images stand at its beginning, one id apart."""
    ids = torch.zeros(len(tiles), max(lengths), dtype=torch.long)
    per_tile = (side_px // 8) ** 2
    generator = torch.Generator().manual_seed(5)
    for row, (num_tiles, length) in enumerate(zip(tiles, lengths, strict=True)):
        text = torch.randint(6, 64, (length,), generator=generator)
        for tile in range(num_tiles):
            start = 1 + tile * (per_tile + 1)
            text[start : start + per_tile] = IMAGE_TOKEN
        ids[row, :length] = text
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    pixels = torch.randn(sum(tiles), 3, side_px, side_px, generator=generator)
    return ids, pixels, mask


BATCHES = {
    "one tile each": ((1, 1), (12, 12)),
    "0, 1 and 3 tiles, padded": ((0, 1, 3), (9, 13, 22)),
    "two tiles, then text, no padding": ((2, 0), (16, 16)),
    "text only, padded": ((0, 0), (11, 7)),
}


def hf_logits(model: InternVLForConditionalGeneration, ids: Tensor, pixels: Tensor, mask: Tensor) -> Tensor:
    return model(input_ids=ids, pixel_values=pixels if len(pixels) else None, attention_mask=mask.long()).logits


def token_loss(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    real = mask[:, 1:] & mask[:, :-1]
    return F.cross_entropy(logits[:, :-1][real], ids[:, 1:][real])


def shaken(shape: VLMShape) -> VLM:
    model = build_model(shape, seed=1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) * 0.1)
    return model.eval()


def hf_gradients(model: InternVLForConditionalGeneration) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def in_memory_name(disk_name: str) -> str:
    """The name inside transformers of a weight on disk."""
    for disk, memory in (
        ("language_model.lm_head", "lm_head"),
        ("language_model.model", "model.language_model"),
        ("vision_tower", "model.vision_tower"),
        ("multi_modal_projector", "model.multi_modal_projector"),
    ):
        if disk_name.startswith(disk):
            return memory + disk_name.removeprefix(disk)
    raise KeyError(disk_name)


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A transformers model, and ours loaded from the folder that it saved."""
    theirs = random_hf_model(request.param)
    folder = tmp_path_factory.mktemp("hf")
    theirs.save_pretrained(folder)
    return theirs, load_hf_folder(folder).eval()


@pytest.mark.parametrize("batch", BATCHES)
def test_logits_equal_transformers(pair, batch):
    theirs, ours = pair
    ids, pixels, mask = random_batch(*BATCHES[batch])
    with torch.no_grad():
        expected = hf_logits(theirs, ids, pixels, mask)
        logits = ours(ids, pixels, mask, tiles_per_sample=BATCHES[batch][0])
    assert expected[mask].std() > 0.1
    torch.testing.assert_close(logits[mask], expected[mask], rtol=0, atol=FP32_ATOL)


@pytest.mark.parametrize("batch", BATCHES)
def test_gradients_of_every_parameter_equal_transformers(pair, batch):
    theirs, ours = pair
    ids, pixels, mask = random_batch(*BATCHES[batch])
    theirs.zero_grad()
    ours.zero_grad()
    ours.train()
    token_loss(hf_logits(theirs, ids, pixels, mask), ids, mask).backward()
    token_loss(ours(ids, pixels, mask), ids, mask).backward()
    ours.eval()
    expected = hf_gradients(theirs)
    if len(pixels):
        assert len(expected) == len(list(ours.parameters()))
    for name, weight in ours.named_parameters():
        their_gradient = expected.get(in_memory_name(hf_name(name)))
        # transformers leaves None where no image took part; ours is zero there.
        want = torch.zeros_like(weight) if their_gradient is None else their_gradient
        assert weight.grad is not None, name
        torch.testing.assert_close(weight.grad, want, rtol=0, atol=FP32_ATOL, msg=lambda m, n=name: f"{n}: {m}")


def test_other_image_sizes_interpolate_positions_as_transformers(pair):
    theirs, ours = pair
    ids, pixels, mask = random_batch((1, 2), (12, 25), side_px=24)
    with torch.no_grad():
        expected = hf_logits(theirs, ids, pixels, mask)
        logits = ours(ids, pixels, mask)
    torch.testing.assert_close(logits[mask], expected[mask], rtol=0, atol=FP32_ATOL)


def test_greedy_generation_equals_transformers(pair):
    theirs, ours = pair
    ids, pixels, mask = random_batch((1, 2), (9, 14))
    for row, length in enumerate((9, 14)):  # to left padding
        ids[row] = ids[row].roll(14 - length)
        mask[row] = mask[row].roll(14 - length)
    expected = theirs.generate(
        input_ids=ids,
        pixel_values=pixels,
        attention_mask=mask.long(),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=2,
    )
    new = generate(ours, ids, pixels, mask, max_new_tokens=8, eos_token_id=2)
    assert len(set(new.flatten().tolist())) > 2
    assert new.tolist() == expected[:, 14:].tolist()


@pytest.mark.parametrize("qkv_bias", [True, False], ids=["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_saved_folder_loads_in_transformers_with_the_same_logits(tmp_path, qkv_bias, tied, norm):
    shape = VLMShape(
        name="random",
        vision=VisionShape(
            image_size_px=16,
            patch_size_px=4,
            num_layers=2,
            hidden_size=16,
            num_heads=2,
            mlp_size=40,
            norm=norm,
            qk_norm=norm == "rmsnorm",
            qkv_bias=not tied,
        ),
        language=LanguageShape(
            vocab_size=64,
            num_layers=2,
            hidden_size=32,
            num_heads=4,
            num_kv_heads=1,
            mlp_size=40,
            rope_theta=3e4,
            norm_eps=1e-4,
            qkv_bias=qkv_bias,
            tied_embeddings=tied,
        ),
        image_token_id=IMAGE_TOKEN,
    )
    ours = shaken(shape)
    save_hf_folder(ours, tmp_path)
    loaded: Any = InternVLForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    theirs, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert (theirs.lm_head.weight is theirs.model.language_model.embed_tokens.weight) == tied
    ids, pixels, mask = random_batch((0, 1, 2), (9, 12, 16))
    with torch.no_grad():
        torch.testing.assert_close(
            ours(ids, pixels, mask)[mask], hf_logits(theirs.eval(), ids, pixels, mask)[mask], rtol=0, atol=FP32_ATOL
        )


def test_saving_and_loading_gives_the_same_weights_and_shape(tmp_path):
    model = build_model(TIED, seed=3)
    save_hf_folder(model, tmp_path)
    again = load_hf_folder(tmp_path)
    assert again.shape.vision == model.shape.vision and again.shape.language == model.shape.language
    assert again.shape.image_token_id == model.shape.image_token_id
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    assert all(weight.requires_grad for weight in again.parameters())


def test_sharded_folders_load_and_are_written(tmp_path):
    model = build_model(TIED, seed=3)
    save_hf_folder(model, tmp_path, max_shard_bytes=500_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (tmp_path / "model.safetensors").exists()
    for name, weight in load_hf_folder(tmp_path).state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    InternVLForConditionalGeneration.from_pretrained(tmp_path)
    shards[0].unlink()
    with pytest.raises(FileNotFoundError, match=shards[0].name):
        load_hf_folder(tmp_path)


def test_transformers_shards_load(tmp_path):
    theirs = random_hf_model("llama untied, rmsnorm, qk-norm, vision biases")
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ids, pixels, mask = random_batch((1, 1), (12, 12))
    with torch.no_grad():
        expected = hf_logits(theirs, ids, pixels, mask)
        torch.testing.assert_close(load_hf_folder(tmp_path)(ids, pixels, mask), expected, rtol=0, atol=FP32_ATOL)


@pytest.mark.parametrize("first_shard_bytes", [500_000, 10**9], ids=["shards", "one file"])
def test_saving_over_a_loaded_folder_leaves_both_whole(tmp_path, first_shard_bytes):
    save_hf_folder(build_model(TIED, seed=3), tmp_path, max_shard_bytes=first_shard_bytes)
    model = load_hf_folder(tmp_path)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    other = build_model(TIED, seed=4)
    save_hf_folder(other, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    for name, weight in load_hf_folder(tmp_path).state_dict().items():
        assert torch.equal(other.state_dict()[name], weight), name
        assert torch.equal(before[name], model.state_dict()[name]), f"{name} of the loaded model changed"


def test_weights_named_as_inside_transformers_load_too(tmp_path):
    model = build_model(TIED, seed=3)
    save_hf_folder(model, tmp_path)
    weights = {name: weight.clone() for name, weight in load_file(tmp_path / "model.safetensors").items()}
    weights = {in_memory_name(name): weight for name, weight in weights.items()}
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"].clone()
    weights["model.vision_tower.embeddings.mask_token"] = torch.zeros(1, 1, 64)
    save_file(weights, tmp_path / "model.safetensors")
    again = load_hf_folder(tmp_path)
    assert again.shape.language.tied_embeddings
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_an_output_matrix_of_its_own_wins_over_a_config_that_ties(tmp_path, caplog):
    theirs = random_hf_model("qwen2 untied, layernorm")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]  # as in folders that an older transformers wrote; the class's default is True
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_hf_folder(tmp_path)
    assert not model.shape.language.tied_embeddings
    assert "output matrix of its own" in caplog.text
    ids, pixels, mask = random_batch((1,), (12,))
    with torch.no_grad():
        expected = hf_logits(theirs, ids, pixels, mask)
        torch.testing.assert_close(model(ids, pixels, mask), expected, rtol=0, atol=FP32_ATOL)


def test_bf16_weights_are_saved_as_bf16_and_load_as_asked(tmp_path):
    model = build_model(TIED, seed=3, dtype=torch.bfloat16)
    save_hf_folder(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_tensor("language_model.model.norm.weight").dtype == torch.bfloat16
    assert load_hf_folder(tmp_path).language.norm.weight.dtype == torch.float32
    assert load_hf_folder(tmp_path, dtype=torch.bfloat16).language.norm.weight.dtype == torch.bfloat16


def test_a_gathered_state_dict_is_saved_in_place_of_the_models(tmp_path):
    model, other = build_model(TIED, seed=3), build_model(TIED, seed=4)
    save_hf_folder(model, tmp_path, state_dict=other.state_dict())
    assert torch.equal(load_hf_folder(tmp_path).language.embedding.weight, other.language.embedding.weight)
    part = {name: weight for name, weight in other.state_dict().items() if not name.startswith("vision.blocks.0.norm1")}
    with pytest.raises(ValueError, match=r"vision\.blocks\.0\.norm1\.bias"):
        save_hf_folder(model, tmp_path, state_dict=part)


def test_the_tokenizer_is_copied(tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        save_hf_folder(build_model(TIED, seed=0), tmp_path / "model", source)
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_config.json").write_text("{}")
    (source / "model.safetensors").write_text("not to be copied")
    save_hf_folder(build_model(TIED, seed=0), tmp_path / "model", source)
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    assert (tmp_path / "model" / "tokenizer_config.json").is_file()
    load_hf_folder(tmp_path / "model")


def test_every_preset_survives_the_way_through_a_config():
    for shape in MODELS.values():
        config = json.loads(json.dumps(hf_config_from_shape(shape, "bfloat16")))
        again = shape_from_hf_config(config, name=shape.name)
        assert again.vision == shape.vision and again.language == shape.language
        assert again.num_visual_tokens_per_tile == shape.num_visual_tokens_per_tile == config["image_seq_length"]
        assert config["text_config"]["model_type"] == ("qwen2" if shape.name == "internvl2-1b" else "llama")
        InternVLConfig(**config)


def test_the_config_of_a_published_folder_is_read():
    # As in OpenGVLab/InternVL3-1B-hf: rope_scaling and rope_theta in the old place, no attention_bias in the text part.
    config = hf_config_from_shape(MODELS["internvl2-1b"], "bfloat16")
    config["text_config"].update(rope_scaling={"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"})
    del config["text_config"]["rope_parameters"]
    assert shape_from_hf_config(config).language.rope_theta == 1e6


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model_type", "internvl_chat", "InternVLForConditionalGeneration"),
        ("model_type", "llava", "'llava'"),
        ("text_config.model_type", "internlm2", "llama"),
        ("text_config.model_type", "qwen3", "qwen2, llama"),
        ("text_config.hidden_act", "gelu", "hidden_act = 'gelu' must be 'silu'"),
        ("text_config.head_dim", 64, "head_dim = 64"),
        ("text_config.attention_bias", True, "attention_bias"),
        ("text_config.rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}, "llama3"),
        ("text_config.use_sliding_window", True, "use_sliding_window"),
        ("vision_config.norm_type", "batch_norm", "batch_norm"),
        ("vision_config.image_size", [32, 64], "square"),
        ("vision_config.use_mean_pooling", False, "use_mean_pooling"),
        ("vision_config.attention_dropout", 0.1, "attention_dropout"),
        ("projector_hidden_act", "relu", "projector_hidden_act"),
        ("vision_feature_layer", -2, "vision_feature_layer"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(path, value, words):
    config = hf_config_from_shape(TIED, "float32")
    section, _, key = path.rpartition(".")
    (config[section] if section else config)[key] = value
    with pytest.raises(ValueError, match=words):
        shape_from_hf_config(config)


def test_all_problems_of_a_config_are_listed_together():
    config = hf_config_from_shape(TIED, "float32")
    config["text_config"]["hidden_act"] = "relu"
    config["vision_config"]["num_channels"] = 1
    with pytest.raises(ValueError, match=r"num_channels = 1.*hidden_act = 'relu'"):
        shape_from_hf_config(config)
    del config["text_config"]["vocab_size"], config["image_token_id"]
    with pytest.raises(ValueError, match=r"vocab_size is missing.*image_token_id is missing"):
        shape_from_hf_config(config)


def test_weights_that_do_not_fit_are_named(tmp_path):
    save_hf_folder(build_model(TIED, seed=0), tmp_path)
    weights = {name: weight.clone() for name, weight in load_file(tmp_path / "model.safetensors").items()}
    del weights["language_model.model.norm.weight"]
    weights["language_model.model.extra"] = torch.zeros(1)
    weights["multi_modal_projector.linear_1.bias"] = torch.zeros(7)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*model\.extra.*linear_1\.bias is \[7\], not \[96\]"):
        load_hf_folder(tmp_path)


def test_an_incomplete_folder_says_what_is_missing(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_hf_folder(tmp_path)
    save_hf_folder(build_model(TIED, seed=0), tmp_path / "model")
    shutil.copy(tmp_path / "model" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_hf_folder(tmp_path)
