"""The original InternVL layout, in and out, against a reference written down in `internvl_chat.py`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from internvl_chat import IMAGE_TOKEN, chat_config, random_weights, read_files, reference_logits, write_folder
from safetensors.torch import save_file
from torch import Tensor
from transformers import InternVLForConditionalGeneration

from vlmcourse.models import build_model
from vlmcourse.models.hf import load_hf_folder, save_hf_folder
from vlmcourse.planner.hf_chat_config import chat_config_from_shape, shape_from_chat_config
from vlmcourse.planner.hf_folder import read_hf_shape
from vlmcourse.presets import MODELS

# float64 on both sides; the package's rotations are float32, with positions below 20.
FP64_ATOL = 1e-6
# float32 sums in another order, through a few layers.
FP32_ATOL = 2e-5
INTERNLM2, QWEN2, LLAMA = "InternLM2ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"
CASES: dict[str, dict[str, Any]] = {
    "26B: InternLM2, RMSNorm, qk-norm": chat_config(INTERNLM2, big_vision=True),
    "8B: InternLM2, LayerNorm, biases": chat_config(INTERNLM2),
    "1B: Qwen2": chat_config(QWEN2),
    "Qwen2 tied, RMSNorm": chat_config(QWEN2, {"llm_config.tie_word_embeddings": True}, big_vision=True),
    "76B: Llama": chat_config(LLAMA, {"llm_config.rope_scaling": None}, big_vision=True),
    "as before 1.5: Llama, v1, earlier vision layer": chat_config(LLAMA, {"ps_version": "v1", "select_layer": -2}),
    "InternLM2 without groups": chat_config(INTERNLM2, {"llm_config.num_key_value_heads": 6}),
    "InternLM2 with one group": chat_config(INTERNLM2, {"llm_config.num_key_value_heads": 1}),
}


def make_folder(folder: Path, name: str, num_shards: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    return write_folder(folder, CASES[name], random_weights(CASES[name], dtype=dtype), num_shards)


def batch() -> tuple[Tensor, Tensor]:
    """Return ids [2, 14] and pixels of 3 tiles, of which the second row shows 2."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(6, 64, (2, 14), generator=generator)
    ids[0, 2:6] = IMAGE_TOKEN
    ids[1, 1:5] = IMAGE_TOKEN
    ids[1, 6:10] = IMAGE_TOKEN
    return ids, torch.randn(3, 3, 16, 16, generator=generator)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_reference_in_float64(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path, name)
    ids, pixels = batch()
    expected = reference_logits(folder, ids, pixels)
    with torch.no_grad():
        logits = load_hf_folder(folder, dtype=torch.float64).eval()(ids, pixels.double())
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=FP64_ATOL)


@pytest.mark.parametrize("name", [name for name, config in CASES.items() if config["ps_version"] == "v2"])
def test_written_for_transformers_it_has_the_logits_of_the_reference(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "chat", name)
    ids, pixels = batch()
    save_hf_folder(load_hf_folder(folder), tmp_path / "hf")
    loaded: Any = InternVLForConditionalGeneration.from_pretrained(tmp_path / "hf", output_loading_info=True)
    theirs, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        logits = theirs.eval()(input_ids=ids, pixel_values=pixels).logits
    torch.testing.assert_close(logits.double(), reference_logits(folder, ids, pixels), rtol=0, atol=FP32_ATOL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name, config in CASES.items() if config["select_layer"] == -1])
def test_a_folder_survives_the_way_in_and_out_to_the_byte(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    folder = make_folder(tmp_path / "chat", name, dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for section in (config, config["vision_config"], config["llm_config"]):
        section["torch_dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")  # indented in its own way
    model = load_hf_folder(folder, dtype=dtype)  # float32 holds every bfloat16
    state = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    save_hf_folder(model, tmp_path / "out", layout="internvl_chat", like=folder, state_dict=state)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_shards_are_read_and_written(tmp_path: Path) -> None:
    name = "26B: InternLM2, RMSNorm, qk-norm"
    folder = make_folder(tmp_path / "chat", name, num_shards=3)
    model = load_hf_folder(folder)
    save_hf_folder(model, tmp_path / "out", layout="internvl_chat", like=folder, max_shard_bytes=20_000)
    before, after = read_files(folder), read_files(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["weight_map"].keys() == before.keys()
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in before.values())
    next(folder.glob("model-*.safetensors")).unlink()
    with pytest.raises(FileNotFoundError, match="download all the shards"):
        load_hf_folder(folder)


def test_weights_taken_apart_share_no_memory(tmp_path: Path) -> None:
    model = load_hf_folder(make_folder(tmp_path, "8B: InternLM2, LayerNorm, biases"))
    weights = dict(model.named_parameters())
    assert len({weight.untyped_storage().data_ptr() for weight in weights.values()}) == len(weights)
    assert all(weight.is_contiguous() for weight in weights.values())


def test_vision_layers_behind_the_selected_one_are_neither_kept_nor_written(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "chat", "as before 1.5: Llama, v1, earlier vision layer")
    model = load_hf_folder(folder)
    assert len(model.vision.blocks) == 2 and model.shape.vision.num_layers == 2
    save_hf_folder(model, tmp_path / "out", layout="internvl_chat", like=folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["select_layer"] == -1 and config["vision_config"]["num_hidden_layers"] == 2
    ids, pixels = batch()
    assert torch.equal(reference_logits(folder, ids, pixels), reference_logits(tmp_path / "out", ids, pixels))
    with pytest.raises(ValueError, match="pixel shuffle v1.*layout 'internvl_chat'"):
        save_hf_folder(model, tmp_path / "hf")


@pytest.mark.parametrize("qkv_bias", [True, False], ids=["qwen2", "internlm2"])
def test_a_model_without_a_folder_to_follow_is_written_whole(tmp_path: Path, qkv_bias: bool) -> None:
    shape = read_hf_shape(make_folder(tmp_path / "chat", "1B: Qwen2"))
    assert shape is not None
    language = dataclasses.replace(shape.language, qkv_bias=qkv_bias, tied_embeddings=qkv_bias)
    model = build_model(dataclasses.replace(shape, language=language, pixel_shuffle_version="v1"), seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) * 0.1)
    save_hf_folder(model, tmp_path / "out", layout="internvl_chat")
    again = load_hf_folder(tmp_path / "out")
    assert again.shape == dataclasses.replace(model.shape, name="out", source=again.shape.source)
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in model.state_dict().items())
    ids, pixels = batch()
    with torch.no_grad():
        logits = model.eval()(ids, pixels).double()
    torch.testing.assert_close(logits, reference_logits(tmp_path / "out", ids, pixels), rtol=0, atol=FP32_ATOL)


def test_every_preset_survives_the_way_through_a_config() -> None:
    for shape in MODELS.values():
        config = json.loads(json.dumps(chat_config_from_shape(shape, "bfloat16")))
        again = shape_from_chat_config(config, config["img_context_token_id"], shape.name)
        assert again == dataclasses.replace(shape, source=again.source)


def test_the_published_config_of_26b_is_the_preset() -> None:
    # config.json of OpenGVLab/InternVL2-26B, without what says nothing of the model.
    config = chat_config(INTERNLM2, big_vision=True)
    config["force_image_size"] = 448
    config["llm_config"] |= {
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "max_position_embeddings": 32768,
        "num_attention_heads": 48,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "vocab_size": 92553,
    }
    config["vision_config"] |= {
        "hidden_size": 3200,
        "image_size": 448,
        "intermediate_size": 12800,
        "num_attention_heads": 25,
        "num_hidden_layers": 45,
        "patch_size": 14,
    }
    shape = MODELS["internvl2-26b"]
    found = shape_from_chat_config(config, shape.image_token_id, shape.name)
    assert found == dataclasses.replace(shape, source=found.source)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (
            "model_type",
            "llava",
            r"model_type = 'llava' \(InternVLChatModel\): only 'internvl' .*'internvl_chat'",
        ),
        (
            "llm_config.architectures",
            ["Phi3ForCausalLM"],
            "Phi3ForCausalLM.*InternLM2ForCausalLM, Qwen2",
        ),
        ("llm_config.architectures", ["Qwen3ForCausalLM"], "Qwen3ForCausalLM"),
        ("llm_config.bias", True, "llm_config.bias must be there and False"),
        ("llm_config.bias", ..., "llm_config.bias must be there and False"),
        ("llm_config.rope_scaling", {"type": "linear", "factor": 2.0}, "llm_config rotary positions of type 'linear'"),
        ("llm_config.rope_pos_id_version", "v2pe_fix", "rope_pos_id_version = 'v2pe_fix'"),
        ("llm_config.head_dim", 8, "head_dim = 8"),
        ("llm_config.hidden_act", "gelu", "hidden_act = 'gelu' must be 'silu'"),
        ("vision_config.qk_normalization", None, "weights"),
        ("vision_config.norm_type", "batch_norm", "batch_norm"),
        ("vision_config.use_moe", True, "use_moe"),
        ("vision_config.image_size", [16, 16], "one number"),
        ("vision_config.hidden_size", ..., "vision_config.hidden_size is missing"),
        ("ps_version", "v3", "ps_version = 'v3'"),
        ("select_layer", -4, "select_layer = -4 must be the output of one of 3 layers"),
        ("force_image_size", 32, "force_image_size = 32 must be vision_config.image_size = 16"),
        ("pad2square", True, "pad2square"),
        ("use_thumbnail", False, "use_thumbnail"),
        ("use_llm_lora", 16, "use_llm_lora = 16"),
        ("vision_config", None, "no vision_config"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(tmp_path: Path, path: str, value: Any, words: str) -> None:
    config = chat_config(INTERNLM2)
    weights = random_weights(config)
    section, _, key = path.rpartition(".")
    if value is ...:
        del config[section][key]
    elif path == "vision_config.qk_normalization":  # the original's default is True: those weights are not there
        del config[section][key]
        words = r"6 are missing \(vision_model.encoder.layers.0.attn.k_norm.weight"
    else:
        (config[section] if section else config)[key] = value
    with pytest.raises(ValueError, match=words):
        load_hf_folder(write_folder(tmp_path, config, weights))


def test_a_missing_image_token_or_weight_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "26B: InternLM2, RMSNorm, qk-norm")
    weights = read_files(folder)
    weights["language_model.model.layers.1.attention.wqkv.weight"] = torch.zeros(39, 24)
    weights["language_model.lm_head.weight"] = weights.pop("language_model.output.weight")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"output\.weight.*lm_head\.weight.*wqkv\.weight is \[39, 24\], not \[40, 24\]"
    ):
        load_hf_folder(folder)
    (folder / "added_tokens.json").unlink()
    with pytest.raises(ValueError, match="does not say which token.*IMG_CONTEXT.*copy the model's tokenizer files"):
        read_hf_shape(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "<IMG_CONTEXT>"}, "3": {"content": "a"}}}),
        ("tokenizer.json", {"added_tokens": [{"id": 3, "content": "a"}, {"id": 9, "content": "<IMG_CONTEXT>"}]}),
        ("added_tokens.json", {"<img>": 8, "<IMG_CONTEXT>": 9}),
    ],
)
def test_the_image_token_is_found_in_the_tokenizer(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(chat_config(QWEN2)), encoding="utf-8")
    (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    shape = read_hf_shape(tmp_path)
    assert shape is not None and shape.image_token_id == 9


def test_stochastic_depth_is_said_to_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = chat_config(QWEN2, {"vision_config.drop_path_rate": 0.1})
    load_hf_folder(write_folder(tmp_path, config, random_weights(config)))
    assert "drop_path_rate = 0.1" in caplog.text


def test_a_folder_to_follow_must_be_of_the_same_model(tmp_path: Path) -> None:
    model = load_hf_folder(make_folder(tmp_path / "chat", "1B: Qwen2"))
    other = make_folder(tmp_path / "other", "8B: InternLM2, LayerNorm, biases")
    with pytest.raises(ValueError, match=r"of another model: language.qkv_bias is False there and True here"):
        save_hf_folder(model, tmp_path / "out", layout="internvl_chat", like=other)
    with pytest.raises(ValueError, match="only 'internvl_chat' follows a folder"):
        save_hf_folder(model, tmp_path / "out", like=other)
    with pytest.raises(ValueError, match="is no folder of an InternVLChatModel"):
        save_hf_folder(model, tmp_path / "out", layout="internvl_chat", like=tmp_path)
    with pytest.raises(ValueError, match="layout = 'hf'"):
        save_hf_folder(model, tmp_path / "out", layout="hf")
    assert not (tmp_path / "out").exists()
