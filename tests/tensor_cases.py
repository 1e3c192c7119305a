"""What the tests of tensor parallelism train: small models on ragged answers, text-only and two-picture samples.

The same loop runs the plain model in one process and the split one on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from parity import Recording, awkward_samples
from torch import Tensor
from torch.nn import functional

from vlmcourse.config import OptimizerConfig
from vlmcourse.data.collate import Collator
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import IGNORE_LABEL, Batch, Message, Sample
from vlmcourse.data.tokenizer import load_tokenizer
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.presets import MODELS, VLMShape
from vlmcourse.train.loss import token_loss_sum
from vlmcourse.train.optimizer import build_optimizer, clip_global_norm, freeze_towers
from vlmcourse.train.precision import autocast

NUM_STEPS = 3
BATCH_SIZE = 4
NUM_POSITIONS = 56
WEIGHT_SEED = 100
MAX_GRAD_NORM = 0.5
OPTIMIZER = OptimizerConfig(
    warmup_steps=1, eps=1e-5, weight_decay=0.1, lr_vision=2e-3, lr_projector=1e-3, lr_language=5e-4
)
"""A large eps: see `parity.parity_config`."""
QK_NORM = {"norm": "rmsnorm", "qk_norm": True}


@dataclass(frozen=True)
class Case:
    """One model and one plan."""

    plan: dict[str, Any] = field(default_factory=dict)
    """Arguments of `apply_tensor`."""
    vision: dict[str, Any] = field(default_factory=dict)
    """Differences of the vision shape."""
    language: dict[str, Any] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    precision: str = "fp32"
    part: slice | None = None
    """Positions that `take_part` cuts out, as context parallelism does; None for all."""


CASES = {
    "split": Case(),
    "split, whole sequence": Case({"sequence_parallel": False}),
    "split, norms of queries and keys": Case(vision={**QK_NORM, "qkv_bias": False}),
    "mlp_only, 3 heads": Case({"vision": "mlp_only", "sequence_parallel": False}, {"num_heads": 3, **QK_NORM}),
    "pad_heads, 3 heads, norms": Case({"vision": "pad_heads"}, {"num_heads": 3, **QK_NORM}),
    "replicate, 3 heads": Case({"vision": "replicate"}, {"num_heads": 3, "mlp_size": 31}),
    "tied embeddings": Case(language={"tied_embeddings": True, "qkv_bias": True}),
    "padded vocabulary, tied": Case(language={"vocab_size": 257, "tied_embeddings": True}),
    "vision frozen": Case(freeze=("vision",)),
    "language frozen": Case(vision=QK_NORM, freeze=("language",)),
    "shards of unequal size under FSDP": Case(
        vision={"mlp_size": 34}, language={"hidden_size": 40, "mlp_size": 50, "qkv_bias": True}
    ),
    "a part of the sequence": Case(part=slice(0, 40)),
    # Without key biases, whose gradients are nothing but roundings: see `parity.KEY_BIAS`.
    "bf16": Case(vision={"qkv_bias": False}, precision="bf16"),
}


def case_shape(case: Case) -> VLMShape:
    """Return the shape of a case: 4 heads in the language tower, 2 key/value heads, 2 vision heads."""
    tiny = MODELS["tiny"]
    vision = {"num_layers": 1, "hidden_size": 24, "num_heads": 2, "mlp_size": 32} | case.vision
    language = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "mlp_size": 48} | case.language
    return dataclasses.replace(
        tiny,
        name="tensor",
        vision=dataclasses.replace(tiny.vision, **vision),
        language=dataclasses.replace(tiny.language, **language),
    )


def build_case(case: Case, seed: int = WEIGHT_SEED) -> VLM:
    """Build the plain model of a case; biases and norm weights start from random numbers too."""
    model = build_model(case_shape(case), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    freeze_towers(model, case.freeze)
    if case.part is not None:
        part = case.part
        model.language.take_part = lambda tensor, dim: tensor[(slice(None),) * dim + (part,)]
    return model


def samples_in_use() -> list[Sample]:
    """Return the awkward samples, every fourth with two pictures."""
    samples, pictures = awkward_samples(), DigitsDataset(32, 1, "train")
    for i in range(0, len(samples), 4):
        first, second = pictures[i], pictures[i + 1]
        question = Message("user", "<image>\n<image>\nwhich is which?")
        answer = Message("assistant", "both " * (1 + i % 3))
        samples[i] = Sample(f"two-{i}", first.images + second.images, (question, answer))
    return samples


@cache
def load_batches() -> list[Batch]:
    """Return the batch of each step, the same for all cases; the second holds text alone."""
    samples = samples_in_use()
    collate = Collator(load_tokenizer("builtin"), MODELS["tiny"], max_seq_len=512)
    texts = [sample for sample in samples if not sample.images]
    batches = [collate(part) for part in (samples[:BATCH_SIZE], texts[:BATCH_SIZE], samples[4 : 4 + BATCH_SIZE])]
    for batch in batches:
        # DTensor works out afresh how to split an operation for each new size, which takes longer than all the
        # arithmetic here: one length for all.
        missing = NUM_POSITIONS - batch.input_ids_BS.shape[1]
        batch.input_ids_BS = functional.pad(batch.input_ids_BS, (0, missing))
        batch.labels_BS = functional.pad(batch.labels_BS, (0, missing), value=IGNORE_LABEL)
        batch.attention_mask_BS = functional.pad(batch.attention_mask_BS, (0, missing), value=False)
        for row, sample_id in enumerate(batch.sample_ids):
            if sample_id.startswith("mute"):
                batch.labels_BS[row] = IGNORE_LABEL
    return batches


def train(
    model: VLM,
    case: Case,
    read: Callable[[bool], dict[str, Tensor]],
    *,
    rows: slice | None = None,
    num_parts: int = 1,
    num_steps: int = NUM_STEPS,
) -> Recording:
    """Make a few optimizer steps and keep everything.

    Args:
        model: plain or split.
        case: what it is.
        read: returns whole gradients (True) or weights (False) by name.
        rows: of each batch, that this rank works on; None for all. The loss recorded is then of these rows.
        num_parts: in how many parts of rows the batch is, which FSDP averages over.
        num_steps: steps of the run.
    """
    recording = Recording()
    optimizer = build_optimizer(model, OPTIMIZER)
    for batch in load_batches()[:num_steps]:
        optimizer.zero_grad()
        labels_BS = batch.labels_BS if case.part is None else batch.labels_BS[:, case.part]
        num_supervised = int((labels_BS != IGNORE_LABEL).sum())
        mine = batch if rows is None else take_rows(batch, rows)
        with autocast(case.precision, torch.device("cpu")):
            logits_BSV = model(
                mine.input_ids_BS,
                mine.pixel_values_ICHW,
                mine.attention_mask_BS,
                tiles_per_sample=mine.tiles_per_sample,
            )
        loss_sum = token_loss_sum(logits_BSV, labels_BS if rows is None else labels_BS[rows])
        (loss_sum * num_parts / num_supervised).backward()
        recording.losses.append(loss_sum.item() / num_supervised)
        recording.gradients.append(read(True))
        recording.grad_norms.append(clip_global_norm(model.parameters(), MAX_GRAD_NORM))
        optimizer.step()
    recording.weights = read(False)
    return recording


def take_rows(batch: Batch, rows: slice) -> Batch:
    """Return some samples of a batch, with their tiles."""
    first = sum(batch.tiles_per_sample[: rows.start])
    tiles = batch.tiles_per_sample[rows]
    return dataclasses.replace(
        batch,
        input_ids_BS=batch.input_ids_BS[rows],
        labels_BS=batch.labels_BS[rows],
        attention_mask_BS=batch.attention_mask_BS[rows],
        pixel_values_ICHW=batch.pixel_values_ICHW[first : first + sum(tiles)],
        tiles_per_sample=tiles,
        sample_ids=batch.sample_ids[rows],
    )


def train_plain(case: Case) -> Recording:
    """Train the plain model of a case in this process."""
    model = build_case(case)

    def read(gradients: bool) -> dict[str, Tensor]:
        named = ((name, p.grad if gradients else p) for name, p in model.named_parameters())
        return {name: tensor.detach().clone() for name, tensor in named if tensor is not None}

    return train(model, case, read)
