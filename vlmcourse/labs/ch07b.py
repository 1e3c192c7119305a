"""Glue of chapter 7's second half: checkpoints and conversations where none are at hand, and logits in other formats.

Enters: folders. Leaves: tiny random checkpoints in both layouts of InternVL with the same weights, digits as a set in
LLaVA's format, and what a folder's model computes in a format of weights. A real checkpoint takes the same way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.data.build import build_dataset
from vlmcourse.data.collate import Collator
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import Batch
from vlmcourse.data.tokenizer import BUILTIN_FOLDER, load_tokenizer
from vlmcourse.models.hf import LAYOUTS, load_hf_folder, save_hf_folder
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.planner.flops import TOWERS, Work, count_tower_flops
from vlmcourse.planner.hf_folder import read_hf_shape
from vlmcourse.presets import VLMShape, get_model

SHARD_BYTES = 10**6
"""Of a made-up checkpoint, so that it comes in shards as a real one does."""
ROOM_FOR_TEXT = 256
"""Tokens that a sample may have beside those of its tiles."""
CHAT_ROLES = {"user": "human", "assistant": "gpt"}
"""What LLaVA's format calls who speaks."""


def make_checkpoints(parent: str | Path, seed: int = 0) -> dict[str, Path]:
    """Write one tiny random model as a folder in each layout, in shards; those of an earlier call are replaced.

    Args:
        parent: where the folders go, each named after its layout.
        seed: of the weights.

    Returns:
        The folders by layout, one of `LAYOUTS`.
    """
    model, folders = build_model(get_model("tiny"), seed=seed), {}
    for layout in LAYOUTS:
        folders[layout] = folder = Path(parent) / layout
        save_hf_folder(model, folder, BUILTIN_FOLDER, layout=layout, max_shard_bytes=SHARD_BYTES)
    return folders


def write_conversations(folder: str | Path, num_rows: int = 64, num_turns: int = 2) -> Path:
    """Write digits and questions about them as a set in LLaVA's format: one JSON file, and a picture a row beside it.

    Args:
        folder: made if need be.
        num_rows: conversations.
        num_turns: questions, each with its answer, in a conversation.

    Returns:
        The JSON file; the pictures are in its folder.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, sample in enumerate(DigitsDataset(num_rows, 0, "train", num_turns)):
        sample.images[0].save(place / f"{number}.png")
        turns = [{"from": CHAT_ROLES[message.role], "value": message.text} for message in sample.messages]
        rows.append({"id": str(number), "image": f"{number}.png", "conversations": turns})
    path = place / "chats.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def finetune_config(
    checkpoint: str | Path, conversations: str | Path, name: str, *, images: str | Path = "", **settings: object
) -> TrainConfig:
    """Return a short FSDP fine-tuning of a checkpoint with its vision tower frozen, in `runs/ch07b`.

    Args:
        checkpoint: a Hugging Face folder in either layout, with its tokenizer.
        conversations: a file in LLaVA's format.
        name: of the run.
        images: the folder that image names are relative to; by default that of the file.
        settings: further keys of a configuration, with "__" for the dot, such as `train__num_steps`.

    Raises:
        FileNotFoundError: if the folder has no config.json.
        ValueError: if a setting is wrong, or the config.json is of another model.
    """
    shape = read_hf_shape(checkpoint)
    if shape is None:
        raise FileNotFoundError(f"There is no {Path(checkpoint) / 'config.json'}: give a folder with config.json")
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    tiles = changes.get("data.max_tiles_per_image", 1)
    assert isinstance(tiles, int)
    table = {
        "run": {"output_dir": "runs/ch07b", "name": name},
        "model": {"hf_folder": str(checkpoint), "freeze": ["vision"]},
        "data": {
            "dataset": "llava",
            "path": str(conversations),
            "image_dir": str(images or Path(conversations).parent),
            "tokenizer": str(checkpoint),
            "num_eval_samples": 4,
            "max_seq_len": min(shape.language.max_seq_len, _tile_tokens(shape, tiles) + ROOM_FOR_TEXT),
        },
        "train": {"num_steps": 20, "micro_batch_size": 4, "log_every": 10},
        "optimizer": {"warmup_steps": 2},
        "parallel": {"strategy": "fsdp"},
    }
    return parse_config(table, changes)


def load_batch(config: TrainConfig, num_samples: int = 4) -> Batch:
    """Return the first held-out samples of a run as one batch.

    Args:
        config: of the run, with its model's folder.
        num_samples: at most; there may be fewer.
    """
    shape = read_hf_shape(config.model.hf_folder)
    assert shape is not None, "a run of fine-tuning has a folder"
    samples = list(build_dataset(config, "heldout"))[:num_samples]
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer)
    return Collator(tokenizer, shape, max_seq_len=data.max_seq_len, max_tiles_per_image=data.max_tiles_per_image)(
        samples
    )


@torch.no_grad()
def compute_logits(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Return a model's logits of a batch, [supervised tokens, vocabulary] in float64 on the CPU.

    Args:
        model: a `VLM`, or one that an engine shards; it is put into evaluation mode.
        batch: on any device.
    Communicates: what the model's forward does.
    """
    weight = next(model.parameters())
    here = batch.to(weight.device)
    pixels = here.pixel_values_ICHW.to(weight.dtype)
    logits = model.eval()(here.input_ids_BS, pixels, here.attention_mask_BS, tiles_per_sample=here.tiles_per_sample)
    return logits[here.labels_BS >= 0].double().cpu()


@dataclass(frozen=True, kw_only=True)
class FormatError:
    """How far a model in another format is from itself in fp32."""

    dtype: str
    weight_bytes: int
    relative_error: float
    """Of the logits, as a share of their standard deviation; NaN where one of them is not finite."""
    changed_fraction: float
    """Of the supervised tokens whose most likely next token is another one."""
    num_not_finite: int
    """Logits that are infinite or NaN."""


def compare_formats(
    model: VLM, batch: Batch, dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16)
) -> list[FormatError]:
    """Hold copies of a model whose weights are in other formats against the model.

    Args:
        model: in fp32; it stays as it is, apart from evaluation mode.
        batch: what it is asked.
        dtypes: of all weights and of what is computed with them.

    Returns:
        A row for fp32, then one a format.
    """
    exact = compute_logits(model, batch)
    rows = []
    for dtype in (torch.float32, *dtypes):
        with torch.device("meta"):
            twin = VLM(model.shape)
        twin.load_state_dict({name: w.to(dtype) for name, w in model.state_dict().items()}, assign=True)
        logits = compute_logits(twin, batch)
        finite = logits.isfinite()
        rows.append(
            FormatError(
                dtype=str(dtype).removeprefix("torch."),
                weight_bytes=sum(weight.nbytes for weight in twin.parameters()),
                relative_error=float((logits - exact).square().mean().sqrt() / exact.std()),
                changed_fraction=float((logits.argmax(-1) != exact.argmax(-1)).double().mean()),
                num_not_finite=int((~finite).sum()),
            )
        )
    return rows


@torch.no_grad()
def stretch_mlps(model: VLM, power: int) -> VLM:
    """Multiply by 2^power inside each MLP of the language tower and divide by it at its end: the same function.

    Args:
        model: changed in place; powers of two round nothing in a format whose range they stay within.
        power: of two.

    Returns:
        The model.
    """
    for name, weight in model.language.named_parameters():
        if name.endswith("mlp.up_proj.weight"):
            weight.mul_(2.0**power)
        elif name.endswith("mlp.down_proj.weight"):
            weight.mul_(2.0**-power)
    return model


@torch.no_grad()
def split_as_if_stacked(folder: str | Path) -> VLM:
    """Load a folder whose wqkv is packed as InternLM2's and cut it as if q, k and v lay below each other: the bug."""
    model = load_hf_folder(folder)
    for block in model.language.blocks:
        q, k, v = (getattr(block.attention, f"{name}_proj").weight for name in "qkv")
        groups = model.shape.language.num_kv_heads
        packed = torch.cat([part.unflatten(0, (groups, -1)) for part in (q, k, v)], dim=1).flatten(0, 1)
        for weight, part in zip((q, k, v), packed.split([len(q), len(k), len(v)]), strict=True):
            weight.copy_(part)
    return model


def heavy_vision() -> VLMShape:
    """Return the small preset with 6 vision layers and 2 language layers: most of the work is the vision tower's."""
    small = get_model("small")
    vision = dataclasses.replace(small.vision, num_layers=6)
    language = dataclasses.replace(small.language, num_layers=2)
    return dataclasses.replace(small, name="small, heavy vision", vision=vision, language=language)


def vision_share(shape: VLMShape, num_tiles: int, num_text_tokens: int, *, frozen: bool = False) -> float:
    """Return the vision tower's share of the FLOPs of training on one sample.

    Args:
        shape: the model.
        num_tiles: of the sample, its thumbnail included.
        num_text_tokens: beside those of the tiles.
        frozen: whether the vision tower is not trained.
    """
    work = Work.of_sequences([num_tiles * shape.num_visual_tokens_per_tile + num_text_tokens], num_tiles)
    trained = [tower for tower in TOWERS if not (frozen and tower == "vision")]
    flops = {tower: found.model for tower, found in count_tower_flops(shape, work, trained).items()}
    return flops["vision"] / sum(flops.values())


def _tile_tokens(shape: VLMShape, tiles_per_image: int) -> int:
    """Return the tokens of a picture's tiles, its thumbnail among them where there is more than one."""
    return shape.num_visual_tokens_per_tile * (tiles_per_image + (tiles_per_image > 1))
