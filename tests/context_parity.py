"""What the context-parallel tests compare: random attention, and a small model trained on awkward micro-batches.

A step is two micro-batches of the same samples for every rank of a group. Between them they hold several pictures in a
sample, no picture at all, fewer tiles than ranks, answers of very different lengths, and samples without any.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from parity import small_shape
from torch import Tensor, nn

from vlmcourse.data.collate import Collator
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import IGNORE_LABEL, IMAGE_MARKER, Batch, Message, Sample
from vlmcourse.data.tokenizer import load_tokenizer
from vlmcourse.models.decoder import attend
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.train.loss import token_loss_sum
from vlmcourse.train.precision import autocast

METHODS = ("ring", "allgather", "ulysses")
ORDERS = ("zigzag", "contiguous")
MODEL_KINDS = [
    *((cp, method, "zigzag") for cp in (2, 4) for method in METHODS),
    (2, "ulysses", "contiguous"),
    (4, "ring", "contiguous"),
    (4, "allgather", "contiguous"),
]
"""Ranks, method and order of the whole models that are trained; attention alone is tested in all of them."""
FROZEN = (("vision",), ("vision", "projector"), ("language",))
WEIGHT_SEED = 7
HEADS = ((4, 4), (4, 2), (4, 1))
"""Query heads and key/value heads of the attention that is tested alone."""
BATCH, SEQ, HEAD_WIDTH = 2, 48, 8
ATTENTION_TOLERANCE = {"fp32": 1e-5, "bf16": 1.2e-2}
"""Length of the difference over the length of the tensor; bf16 has 8 significant bits, 4e-3 a rounding."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def attention_inputs(num_heads: int, num_kv_heads: int, precision: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values and the gradient of the output, whole, the same in every process."""
    generator = torch.Generator().manual_seed(11)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    drawn = [2 * torch.randn(BATCH, h, SEQ, HEAD_WIDTH, generator=generator) for h in heads]
    q, k, v, grad = (x.to(DTYPES[precision]) for x in drawn)
    return q, k, v, grad


def reference_attention(num_heads: int, num_kv_heads: int, precision: str) -> dict[str, Tensor]:
    """Return output and gradients of plain causal attention over the whole sequence, computed in fp32."""
    inputs = attention_inputs(num_heads, num_kv_heads, precision)
    q, k, v, grad = (x.float().requires_grad_() for x in inputs)
    out = attend(q, k, v, None, True)
    out.backward(grad.detach())
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: x for name, x in found.items() if x is not None}


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@cache
def make_steps() -> list[list[Batch]]:
    """Return the steps, each a list of two micro-batches."""
    pictures = DigitsDataset(12, 0, "train")

    def question(name: str, num_images: int, answer: str, turns: int = 1) -> Sample:
        images = tuple(pictures[i].images[0] for i in range(num_images))
        said = [Message("user", IMAGE_MARKER * num_images + "which?"), Message("assistant", answer)]
        for i in range(turns - 1):
            said += [Message("user", "and now?"), Message("assistant", "seven " * (i + 1))]
        return Sample(name, images, tuple(said))

    mixed = [
        question("three", 3, "one"),
        question("text", 0, "seven " * 12),
        question("one", 1, "left", turns=3),
        question("mute", 1, "right"),
    ]
    text_only = [question("short", 0, "2"), question("long", 0, "two " * 7, turns=4)]
    single_tile = [question("late", 1, "three"), question("mute-text", 0, "left"), question("text", 0, "a b c")]
    nearly_mute = [question("mute", 2, "left " * 9), question("mute", 0, "right"), question("short", 1, "9")]
    collator = Collator(load_tokenizer("builtin"), small_shape(), max_seq_len=256)
    batches = [collator(samples) for samples in (mixed, text_only, single_tile, nearly_mute)]
    for batch in batches:
        for row, sample_id in enumerate(batch.sample_ids):
            if sample_id.startswith("mute"):
                batch.labels_BS[row] = IGNORE_LABEL
    return [[batches[0], batches[1]], [batches[2], batches[3]], [batches[1], batches[0]]]


@dataclass(repr=False)  # pytest writes out the arguments of a test that fails
class Run:
    """Loss and gradients of every step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


def build(**language: object) -> VLM:
    """Build the small model; keywords change its language shape."""
    shape = small_shape()
    shape = dataclasses.replace(shape, language=dataclasses.replace(shape.language, **language))
    return build_model(shape, seed=WEIGHT_SEED)


def train(
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    *,
    take_labels: Callable[[Tensor], Tensor] = lambda labels: labels,
    loss_scales: Sequence[float] | None = None,
    sum_up: Callable[[float, nn.Module], tuple[float, dict[str, Tensor]]] | None = None,
    precision: str = "fp32",
) -> Run:
    """Make optimizer steps, and keep every loss and gradient.

    Args:
        model: what runs; its logits fit the labels that `take_labels` returns.
        steps: micro-batches of each step.
        take_labels: cuts the labels as the model cuts the sequence.
        loss_scales: what a step's sum of token losses is multiplied by; 1 / supervised tokens by default.
        sum_up: turns this rank's loss into that of all, and returns whole gradients; it leaves in `.grad` what the
            optimizer needs.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5)
    run = Run()
    for step, batches in enumerate(steps):
        scale = loss_scales[step] if loss_scales else 1 / sum(batch.num_supervised_tokens for batch in batches)
        loss_sum = 0.0
        for batch in batches:
            with autocast(precision, torch.device("cpu")):
                logits = model(
                    batch.input_ids_BS,
                    batch.pixel_values_ICHW,
                    batch.attention_mask_BS,
                    tiles_per_sample=batch.tiles_per_sample,
                )
            loss = token_loss_sum(logits, take_labels(batch.labels_BS)) * scale
            loss.backward()
            loss_sum += loss.item()
        if sum_up is None:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        else:
            loss_sum, gradients = sum_up(loss_sum, model)
        run.losses.append(loss_sum)
        run.gradients.append(gradients)
        optimizer.step()
        optimizer.zero_grad()
    return run
