"""What the parity tests train: a very small model on awkward data, every loss and gradient kept.

The data holds answers of very different lengths, samples without a picture and samples without any supervised token, in
numbers that leave some ranks and micro-batches with nothing but those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import IGNORE_LABEL, Batch, Message, Sample
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.monitor.metrics import TokenCount
from vlmcourse.parallel.gather import gather_plain_state
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.presets import MODELS, VLMShape
from vlmcourse.train.trainer import Trainer

GLOBAL_BATCH_SIZE = 8
NUM_STEPS = 5
"""The fifth is the first of the second epoch. Cases that say how many steps they have stay within the first."""
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp64": 1e-9}
"""fp32: a few roundings of sums added in another order. bf16: 8 significant bits in every matrix product. fp64: the
model in float64, where those roundings are 1e-16 each and anything that remains is a mistake."""
GRADIENT_TOLERANCE = {"fp32": 3e-5, "bf16": 5e-2, "fp64": 1e-9}
"""Length of the difference over the length of the gradient, parameter by parameter; measured: 3e-6 and 1.1e-2. A
gradient that is missing is off by 1, one of half the length by 0.5."""
KEY_BIAS = "attention.k_proj.bias"
"""It adds the same number to all scores of a query, which softmax takes out again: its true gradient is 0."""
KEY_BIAS_TOLERANCE = 2e-5
"""Absolute; measured: 2e-9 in fp32 and 3e-6 in bf16."""
EXACT_KEY_BIAS_TOLERANCE = 1e-12
"""The same in float64."""
MAX_GRAD_NORM = 0.5
"""Below what is measured at every step, so that clipping is active."""
CASES: dict[str, dict[str, Any]] = {
    "all towers": {},
    "vision frozen": {"model.freeze": ["vision"], "train.num_steps": 3},
    "vision and projector frozen": {"model.freeze": ["vision", "projector"], "train.num_steps": 3},
    "language frozen": {"model.freeze": ["language"], "train.num_steps": 3},
    "clipping off": {"train.max_grad_norm": 0, "train.num_steps": 3},
    "tied embeddings": {"model.preset": "small", "train.num_steps": 3},
    "bf16": {"train.precision": "bf16", "train.num_steps": 2},
}


@dataclass
class Recording:
    """All that one run did; tensors are whole and on CPU."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    sample_ids: list[list[str]] = field(default_factory=list)
    """This rank's samples of each step."""
    num_tiles: list[list[int]] = field(default_factory=list)
    """Tiles of each micro-batch of each step, this rank's."""
    num_supervised: list[list[int]] = field(default_factory=list)
    num_tokens: list[TokenCount] = field(default_factory=list)
    """Of this rank's micro-batches of each step, counted here."""
    reported_tokens: list[TokenCount] = field(default_factory=list)
    """Of each step, as its report says."""
    draws: list[float] = field(default_factory=list)
    """What PyTorch's generator gave in each step."""
    weights: dict[str, Tensor] = field(default_factory=dict)


def small_shape(tied_embeddings: bool = False) -> VLMShape:
    """Return a small shape with everything in it: grouped heads, tensors that 2 does not divide."""
    tiny = MODELS["tiny"]
    vision = dataclasses.replace(tiny.vision, patch_size_px=8, num_layers=2, hidden_size=24, num_heads=2, mlp_size=31)
    language = dataclasses.replace(
        tiny.language,
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        mlp_size=45,
        tied_embeddings=tied_embeddings,
    )
    return dataclasses.replace(tiny, name="parity", vision=vision, language=language)


def awkward_samples() -> list[Sample]:
    """Return 32 samples: a third with a picture, the rest text; some of them mute (see `AwkwardTrainer`)."""
    pictures = DigitsDataset(32, 0, "train")
    samples = []
    for i in range(32):
        if i % 3 == 0:
            turns = pictures[i].messages[: 2 * (1 + i % 4)]
            samples.append(dataclasses.replace(pictures[i], sample_id=f"picture-{i}", messages=turns))
        elif i % 3 == 1:
            text = "seven " * (i % 7) + str(i)
            samples.append(Sample(f"text-{i}", (), (Message("user", "what is it?"), Message("assistant", text))))
        else:
            samples.append(Sample(f"mute-{i}", (), (Message("user", "and now?"), Message("assistant", "left"))))
    return samples


class AwkwardTrainer(Trainer):
    """A trainer whose mute samples supervise no token at all."""

    def load_step(self, step: int) -> list[Batch]:
        batches = super().load_step(step)
        for batch in batches:
            for row, sample_id in enumerate(batch.sample_ids):
                if sample_id.startswith("mute"):
                    batch.labels_BS[row] = IGNORE_LABEL
        return batches


def parity_config(strategy: str, accumulation_steps: int, world_size: int, case: str) -> TrainConfig:
    """Return the configuration of one run; all runs of a case have the same global batch."""
    table = {
        "train": {
            "num_steps": NUM_STEPS,
            "micro_batch_size": GLOBAL_BATCH_SIZE // (accumulation_steps * world_size),
            "accumulation_steps": accumulation_steps,
            "max_grad_norm": MAX_GRAD_NORM,
        },
        # A larger eps than usual: Adam divides by the gradient's size, and where that is a rounding error (the bias of
        # keys has no effect), the direction of the update would be one too.
        "optimizer": {"warmup_steps": 2, "eps": 1e-5, "weight_decay": 0.1, "lr_vision": 2e-3, "lr_language": 5e-4},
        "parallel": {"strategy": strategy},
    }
    return parse_config(table, CASES[case])


def build_trainer(config: TrainConfig, ranks: Ranks, seed: int) -> AwkwardTrainer:
    """Build a trainer of the small model, embeddings tied as in the preset named; `seed` is that of the weights."""
    samples = awkward_samples()
    tied = MODELS[config.model.preset].language.tied_embeddings
    model: VLM = build_model(small_shape(tied), seed=seed)
    return AwkwardTrainer(config, ranks, model=model, train_data=samples, eval_data=samples[:1], show_progress=False)


def record(trainer: Trainer, num_steps: int | None = None) -> Recording:
    """Make the steps of a run and keep everything."""
    recording = Recording()

    def keep_gradients(trainer: Trainer) -> None:
        recording.gradients.append(gather_plain_state(trainer.model, trainer.shape, gradients=True))
        recording.draws.append(torch.rand(()).item())

    trainer.before_update.append(keep_gradients)
    load_step: Callable[[int], list[Batch]] = trainer.load_step

    def keep_batches(step: int) -> list[Batch]:
        batches = load_step(step)
        recording.sample_ids.append([name for batch in batches for name in batch.sample_ids])
        recording.num_tiles.append([sum(batch.tiles_per_sample) for batch in batches])
        recording.num_supervised.append([batch.num_supervised_tokens for batch in batches])
        recording.num_tokens.append(count_tokens(batches, trainer.shape.image_token_id))
        return batches

    trainer.load_step = keep_batches  # type: ignore[method-assign]
    for _ in range(num_steps or trainer.config.train.num_steps):
        report = trainer.train_step()
        recording.losses.append(report.loss)
        recording.grad_norms.append(report.grad_norm)
        recording.reported_tokens.append(report.tokens)
    recording.weights = gather_plain_state(trainer.model, trainer.shape)
    return recording


def count_tokens(batches: list[Batch], image_token_id: int) -> TokenCount:
    """Count the tokens of some micro-batches from their tensors alone."""
    visual = sum(int((batch.input_ids_BS == image_token_id).sum()) for batch in batches)
    real = sum(int(batch.attention_mask_BS.sum()) for batch in batches)
    supervised = sum(int((batch.labels_BS != IGNORE_LABEL).sum()) for batch in batches)
    return TokenCount(text=real - visual, visual=visual, supervised=supervised)


def check_parity(reference: Recording, other: Recording, precision: str) -> None:
    """Raise AssertionError at the first loss, norm or gradient that differs by more than the tolerance of its type."""
    for step, loss in enumerate(other.losses):
        expected = reference.losses[step]
        assert abs(loss - expected) <= LOSS_TOLERANCE[precision], f"step {step}: loss {loss} instead of {expected}"
        norm, expected = other.grad_norms[step], reference.grad_norms[step]
        # Clipping hides a wrong scale of the gradient; its norm is from before.
        assert abs(norm - expected) <= LOSS_TOLERANCE[precision], f"step {step}: norm {norm} instead of {expected}"
        gradients, expected_gradients = other.gradients[step], reference.gradients[step]
        assert gradients.keys() == expected_gradients.keys(), f"step {step}: other parameters have gradients"
        for name, gradient in gradients.items():
            check_gradient(f"step {step}: gradient of {name}", gradient, expected_gradients[name], precision)


def check_bf16_parity(reference: Recording, other: Recording) -> None:
    """Compare the losses of all steps, and norm and gradients of the first.

    Ranks round their parts of a sum to 8 bits before the parts are added; from the second step on, Adam has turned the
    roundings of small gradients into whole updates.
    """
    for step, (loss, expected) in enumerate(zip(other.losses, reference.losses, strict=True)):
        assert abs(loss - expected) <= LOSS_TOLERANCE["bf16"], f"step {step}: loss {loss} instead of {expected}"
    norm, expected = other.grad_norms[0], reference.grad_norms[0]
    assert abs(norm - expected) <= LOSS_TOLERANCE["bf16"] * expected, f"norm {norm} instead of {expected}"
    assert other.gradients[0].keys() == reference.gradients[0].keys()
    for name, gradient in other.gradients[0].items():
        check_gradient(f"gradient of {name}", gradient, reference.gradients[0][name], "bf16")


def check_gradient(name: str, gradient: Tensor, expected: Tensor, precision: str) -> None:
    """Raise AssertionError if one parameter's gradient differs by more than the tolerance of its type."""
    difference, length = float((gradient - expected).norm()), float(expected.norm())
    key_bias_tolerance = EXACT_KEY_BIAS_TOLERANCE if precision == "fp64" else KEY_BIAS_TOLERANCE
    allowed = key_bias_tolerance if name.endswith(KEY_BIAS) else GRADIENT_TOLERANCE[precision] * length
    assert difference <= allowed, f"{name} is off by {difference}; it is {length} long"


def load(path: Path) -> Any:
    """Read what a worker saved."""
    return torch.load(path, weights_only=False)
