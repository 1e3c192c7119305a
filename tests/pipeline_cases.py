"""What the pipeline tests train: a small model of eight blocks on awkward batches, and the same in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from parity import small_shape
from torch import Tensor

from vlmcourse.data.samples import IGNORE_LABEL, Batch
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.planner.stages import StageSplit, split_evenly, vision_apart
from vlmcourse.presets import VLMShape
from vlmcourse.train.loss import token_loss_sum
from vlmcourse.train.optimizer import clip_global_norm

LOSS_SCALE = 0.02
MAX_GRAD_NORM = 0.3
"""Below what is measured at every step, so that clipping is active."""
STEPS = ("mixed", "text", "pictures", "mixed again")


@dataclass(frozen=True)
class Case:
    """One pipeline to compare with one process."""

    schedule: str
    split: str = "even"
    tied: bool = False
    frozen: tuple[str, ...] = ()
    dp: str = "single"
    reshard_after_forward: bool = True


CASES_OF_2 = {
    "gpipe, vision apart, tied": Case("gpipe", "vision apart", tied=True),
    "gpipe, uneven": Case("gpipe", "uneven"),
    "gpipe, vision frozen and apart": Case("gpipe", "vision apart", frozen=("vision",)),
    "1f1b, early fusion, tied": Case("1f1b", "early fusion", tied=True),
    "1f1b, all but the vision frozen": Case("1f1b", frozen=("projector", "language")),
    "interleaved": Case("interleaved"),
    "interleaved, tied": Case("interleaved", "vision apart", tied=True),
    "zbv": Case("zbv"),
    "zbv, tied": Case("zbv", "vision apart", tied=True),
    "zbv, vision frozen": Case("zbv", "vision apart", frozen=("vision",)),
    "zbv, early fusion, tied": Case("zbv", "early fusion", tied=True),
    "dualpipev": Case("dualpipev"),
    "dualpipev, vision frozen, tied": Case("dualpipev", frozen=("vision",), tied=True),
}
CASES_OF_4 = {
    "gpipe on 4": Case("gpipe", tied=True),
    "1f1b on 4": Case("1f1b", "vision apart"),
    "interleaved on 4": Case("interleaved"),
    "zbv on 4": Case("zbv"),
    "dualpipev on 4": Case("dualpipev"),
    "gpipe over fsdp": Case("gpipe", tied=True, dp="fsdp"),
    "1f1b over fsdp": Case("1f1b", "vision apart", dp="fsdp"),
    "interleaved over fsdp": Case("interleaved", dp="fsdp", tied=True),
    "interleaved over ddp": Case("interleaved", dp="ddp"),
    "zbv over fsdp, kept": Case("zbv", dp="fsdp", reshard_after_forward=False),
    "1f1b over ddp": Case("1f1b", dp="ddp", frozen=("vision",)),
}


@dataclass
class Recording:
    """What a run did, step by step; of one rank, or of the single process."""

    losses: list[list[float]] = field(default_factory=list)
    """The loss sum of each micro-batch."""
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """By name, before clipping; `tied copy` is the second copy's."""
    weights: dict[str, Tensor] = field(default_factory=dict)


def pipeline_shape(tied: bool) -> VLMShape:
    """Return a shape of four vision and four language blocks with no two widths alike."""
    shape = small_shape(tied)
    vision = dataclasses.replace(shape.vision, num_layers=4)
    return dataclasses.replace(shape, vision=vision, language=dataclasses.replace(shape.language, num_layers=4))


def build_case_model(case: Case, seed: int = 7) -> VLM:
    """Return the whole plain model of a case, towers frozen."""
    model = build_model(pipeline_shape(case.tied), seed=seed)
    for tower in case.frozen:
        model.get_submodule(tower).requires_grad_(False)
    return model


def split_of(case: Case, num_stages: int) -> StageSplit:
    """Return the split that a case names."""
    shape = pipeline_shape(case.tied)
    if case.split == "even":
        return split_evenly(shape, num_stages)
    if case.split == "vision apart":
        return vision_apart(shape, num_stages, max(1, num_stages // 2))
    # Layers: patches, 4 vision, fusion, 4 language, output.
    first = {"uneven": 2, "early fusion": 8}[case.split]
    rest = [first, *[1] * (num_stages - 2)]
    return StageSplit(num_vision_layers=4, num_language_layers=4, layers_per_stage=(*rest, 11 - sum(rest)))


def make_batch(shape: VLMShape, seed: int, tiles_per_sample: Sequence[int], seq_len: int) -> Batch:
    """Return a batch of random tokens, rows ragged, with some tiles a sample and few supervised tokens."""
    generator = torch.Generator().manual_seed(seed)
    per_tile, side = shape.num_visual_tokens_per_tile, shape.vision.image_size_px
    rows = len(tiles_per_sample)
    ids = torch.randint(4, shape.language.vocab_size, (rows, seq_len), generator=generator)
    labels, mask = torch.full_like(ids, IGNORE_LABEL), torch.zeros(rows, seq_len, dtype=torch.bool)
    for row, tiles in enumerate(tiles_per_sample):
        for tile in range(tiles):  # text between the pictures
            start = 1 + tile * (per_tile + 1)
            ids[row, start : start + per_tile] = shape.image_token_id
        used = 1 + tiles * (per_tile + 1)
        length = int(torch.randint(used + 1, seq_len + 1, (), generator=generator))
        mask[row, :length] = True
        ids[row, length:] = 0
        if (seed + row) % 4 != 3:  # every fourth sample is mute
            supervised = torch.arange(used - 1, length - 1)
            labels[row, supervised] = ids[row, supervised + 1]
    return Batch(
        input_ids_BS=ids,
        labels_BS=labels,
        attention_mask_BS=mask,
        pixel_values_ICHW=torch.randn(sum(tiles_per_sample), 3, side, side, generator=generator),
        tiles_per_sample=tuple(tiles_per_sample),
        sample_ids=tuple(f"{seed}-{row}" for row in range(rows)),
        tokens_per_tile=per_tile,
    )


def make_step(shape: VLMShape, step: str, num_microbatches: int) -> list[Batch]:
    """Return the micro-batches of a step, of different sizes and numbers of tiles."""
    kinds = {
        "mixed": [((0, 2), 24), ((1,), 16), ((0, 0, 0), 8), ((3, 1), 32)],
        "text": [((0, 0), 16), ((0,), 8)],
        "pictures": [((2, 1), 24), ((1, 3), 32), ((1, 1), 16)],
        "mixed again": [((3, 1), 32), ((0, 0, 0), 24), ((1,), 16), ((0, 2), 16)],
    }[step]
    first_seed = 100 * STEPS.index(step)
    return [make_batch(shape, first_seed + m, *kinds[m % len(kinds)]) for m in range(num_microbatches)]


def build_adamw(model_parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    """Return the optimizer of all cases; eps is large for the reason that `parity.py` gives."""
    trained = [p for p in model_parameters if p.requires_grad]
    # A rank may hold frozen layers only.
    return torch.optim.AdamW(trained or [torch.nn.Parameter(torch.zeros(1))], lr=2e-3, eps=1e-5, weight_decay=0.1)


def train_plain(
    model: VLM, optimizer: torch.optim.Optimizer, steps: Sequence[str], num_microbatches: int, recording: Recording
) -> None:
    """Train a whole model in this process and note its losses, gradients and norms."""
    for step in steps:
        optimizer.zero_grad()
        losses = []
        for batch in make_step(model.shape, step, num_microbatches):
            logits = model(batch.input_ids_BS, batch.pixel_values_ICHW, batch.attention_mask_BS)
            loss = token_loss_sum(logits, batch.labels_BS)
            (loss * LOSS_SCALE).backward()
            losses.append(loss.item())
        recording.losses.append(losses)
        recording.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        recording.grad_norms.append(clip_global_norm(model.parameters(), MAX_GRAD_NORM))
        optimizer.step()


def train_single(case: Case, num_microbatches: int) -> Recording:
    """Train a case in one process."""
    model, recording = build_case_model(case), Recording()
    train_plain(model, build_adamw(list(model.parameters())), STEPS, num_microbatches, recording)
    recording.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return recording
