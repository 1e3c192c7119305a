"""`vlmcourse train` from a folder in the original InternVL layout on a LLaVA-format set, and back into that layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from internvl_chat import chat_config, random_weights, read_files, reference_logits, write_folder, write_qwen_tokenizer
from PIL import Image
from ranks import run_worker

from vlmcourse import cli
from vlmcourse.config import load_config
from vlmcourse.models.hf import load_hf_folder, save_hf_folder
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.train.trainer import Trainer

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
# float32 sums in another order over two ranks, after two steps of AdamW.
FP32_ATOL = 2e-5


def write_conversations(folder: Path) -> None:
    """Write 20 rows, each with a picture of its own, some of them wide enough for several tiles."""
    rows = []
    for i in range(20):
        Image.linear_gradient("L").resize((16 + 16 * (i % 3), 16)).rotate(10 * i).save(folder / f"{i}.png")
        question, answer = f"<image>\nis this number {i}?", "yes" if i % 2 else "no, it is not"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        rows.append({"id": str(i), "image": f"{i}.png", "conversations": turns})
    (folder / "chats.json").write_text(json.dumps(rows), encoding="utf-8")


def write_toml(path: Path, hf_folder: Path, tokenizer: Path, data: Path, strategy: str, micro_batch_size: int) -> Path:
    text = f"""
[run]
name = "{path.stem}"
output_dir = "{path.parent}"
[model]
hf_folder = "{hf_folder}"
freeze = ["vision"]
[data]
dataset = "llava"
path = "{data}/chats.json"
image_dir = "{data}"
tokenizer = "{tokenizer}"
max_tiles_per_image = 3
num_eval_samples = 2
[train]
num_steps = 2
micro_batch_size = {micro_batch_size}
log_every = 1
[optimizer]
lr_projector = 1e-3
lr_language = 1e-3
warmup_steps = 0
[parallel]
strategy = "{strategy}"
"""
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.slow
def test_two_ranks_fine_tune_an_original_folder_and_write_one_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = tmp_path / "InternVL2-tiny"
    origin.mkdir()
    num_ids = write_qwen_tokenizer(origin)
    config = chat_config("InternLM2ForCausalLM", {"llm_config.vocab_size": num_ids + 2}, big_vision=True)
    weights = random_weights(config)
    tokens = (origin / "added_tokens.json").read_bytes()
    write_folder(origin, config, weights, num_shards=2)
    (origin / "added_tokens.json").write_bytes(tokens)
    write_conversations(tmp_path)
    run_worker("finetune_worker.py", str(write_toml(tmp_path / "two.toml", origin, origin, tmp_path, "fsdp", 4)))
    assert cli.main(["export", str(tmp_path / "two"), "--out", str(tmp_path / "out"), "--layout", "internvl_chat"]) == 0
    assert f"(internvl_chat: config.json and code of {origin})" in capsys.readouterr().out

    written = read_files(tmp_path / "out")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) == name.startswith("vision_model.") for name in weights)
    beside = {file.name for file in origin.iterdir() if "safetensors" not in file.name}
    assert {file.name for file in (tmp_path / "out").iterdir()} == {*beside, "model.safetensors"}
    assert all((tmp_path / "out" / name).read_bytes() == (origin / name).read_bytes() for name in beside)

    # One process, from the same weights in transformers' layout, makes the same steps.
    save_hf_folder(load_hf_folder(origin), tmp_path / "hf", origin)
    alone = write_toml(tmp_path / "one.toml", tmp_path / "hf", tmp_path / "hf", tmp_path, "single", 8)
    trainer = Trainer(load_config(alone), ALONE, show_progress=False)
    for _ in range(2):
        trainer.train_step()
    exported = load_hf_folder(tmp_path / "out")
    for name, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(exported.state_dict()[name], weight, rtol=0, atol=FP32_ATOL, msg=name)
    batch, image_token_id = trainer.load_step(0)[0], exported.shape.image_token_id
    ids = batch.input_ids_BS[:1, : int(batch.attention_mask_BS[0].sum())]
    pixels = batch.pixel_values_ICHW[: int((ids == image_token_id).sum()) // 4]
    with torch.no_grad():
        logits = exported.eval()(ids, pixels).double()
    expected = reference_logits(tmp_path / "out", ids, pixels, image_token_id)
    torch.testing.assert_close(logits, expected, rtol=0, atol=FP32_ATOL)
