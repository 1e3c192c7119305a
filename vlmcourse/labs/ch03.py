"""Chapter 3's glue: a model small enough for slow formats, runs to compare, and six ways to lose a number.

Enters: a seed or the name of a precision. Leaves: losses, gradients, and planted faults for `find_nonfinite`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.data.samples import IGNORE_LABEL, Batch
from vlmcourse.labs.ch01 import check_prediction, guess, print_table
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.monitor.activations import ActivationMeter
from vlmcourse.monitor.ledger import measure_ledger
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.formats import FloatFormat
from vlmcourse.presets import MODELS, VLMShape
from vlmcourse.train.accumulate import micro_batch_loss_sum
from vlmcourse.train.nan_finder import LossOf
from vlmcourse.train.rounding import stochastic_round
from vlmcourse.train.scaler import LossScaler
from vlmcourse.train.trainer import Trainer
from vlmcourse.values import check_counts

__all__ = ["check_prediction", "guess", "print_table"]
"""Taken over from chapter 1 for the notebook; everything else here is meant for it too."""
ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")


def lab_shape() -> VLMShape:
    """Return a shape of about 80,000 parameters: 16-bit products are slow on a CPU without hardware for them."""
    tiny = MODELS["tiny"]
    vision = dataclasses.replace(tiny.vision, num_layers=1, hidden_size=32, mlp_size=64)
    language = dataclasses.replace(
        tiny.language, num_layers=2, hidden_size=48, num_heads=2, num_kv_heads=2, mlp_size=96
    )
    return dataclasses.replace(tiny, name="lab 3", vision=vision, language=language)


def lab_config(precision: str, strategy: str = "single", micro_batch_size: int = 4, **train: Any) -> TrainConfig:
    """Return a short run on the digits in a precision; `train` overrides keys of its `[train]` section."""
    return parse_config(
        {
            "data": {"num_train_samples": 512, "num_eval_samples": 8},
            "train": {"precision": precision, "num_steps": 40, "micro_batch_size": micro_batch_size} | train,
            "optimizer": {"warmup_steps": 4, "lr_vision": 3e-3, "lr_projector": 3e-3, "lr_language": 3e-3},
            "parallel": {"strategy": strategy},
        }
    )


def lab_trainer(config: TrainConfig, ranks: Ranks = ALONE, seed: int = 0) -> Trainer:
    """Build a trainer of the small model, the same first weights for a seed in every precision."""
    return Trainer(config, ranks, model=build_model(lab_shape(), seed=seed), show_progress=False)


def train_losses(trainer: Trainer, num_steps: int) -> list[float]:
    """Make steps, 1 or more, and return the loss of each."""
    check_counts(1, num_steps=num_steps)
    return [trainer.train_step().loss for _ in range(num_steps)]


def bits_of(value: float, spec: FloatFormat) -> str:
    """Return the bits of a number in a format as "sign exponent mantissa", after rounding it to the format.

    Raises:
        ValueError: if it is infinite or NaN there.
    """
    if math.isnan(value):
        raise ValueError(f"{value} is no number and has many patterns of bits in {spec.name}: give a finite number")
    rounded = spec.round(value)
    if spec.fate(value) == "overflow":
        raise ValueError(f"{value} is more than {spec.name} can hold: its largest number is {spec.max}")
    step = spec.step_at(rounded)
    mantissa = round(abs(rounded) / step)
    stored = round(math.log2(step)) + spec.mantissa_bits + spec.bias
    if mantissa < 2**spec.mantissa_bits:
        stored = 0  # subnormal: no leading 1
    fraction = mantissa % 2**spec.mantissa_bits
    sign = int(str(rounded).startswith("-"))
    return f"{sign} {stored:0{spec.exponent_bits}b} {fraction:0{spec.mantissa_bits}b}"


def follow_updates(start: float, update: float, num_updates: int, seed: int = 0) -> dict[str, list[float]]:
    """Add a small number to a weight again and again, stored in four ways; returns its value after each addition."""
    check_counts(1, num_updates=num_updates)
    exact, master = [start], torch.tensor(start)
    nearest = torch.tensor(start, dtype=torch.bfloat16)
    random = torch.full((64,), start).bfloat16()
    kept: dict[str, list[float]] = {"fp32": exact, "bf16, to nearest": [start]}
    kept |= {"bf16 + fp32 master": [start], "bf16, at random (mean of 64)": [start]}
    for step in range(num_updates):
        master = master + update
        nearest = (nearest.float() + update).bfloat16()
        random = stochastic_round(random.float() + update, seed + step)
        values = (master, nearest, master.bfloat16(), random.float().mean())
        for history, value in zip(kept.values(), values, strict=True):
            history.append(float(value))
    return kept


# --- Six ways to lose a number --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A step that goes wrong, ready for `find_nonfinite`."""

    cause: str
    model: nn.Module
    batch: Batch
    precision: str = "fp32"
    loss_of: LossOf | None = None


def _fresh(seed: int = 0) -> tuple[VLM, Batch]:
    trainer = lab_trainer(lab_config("fp32"), seed=seed)
    model = trainer.model
    assert isinstance(model, VLM)
    return model, trainer.load_step(0)[0]


def eager_attend(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Attention written out: scores in the format of the queries, and only then divided by sqrt(head width)."""
    scores_BHSS = q_BHSE @ k_BHSE.transpose(-1, -2)
    scores_BHSS = scores_BHSS / q_BHSE.shape[-1] ** 0.5
    if is_causal:
        later = torch.ones(scores_BHSS.shape[-2:], dtype=torch.bool, device=q_BHSE.device).triu(1)
        scores_BHSS = scores_BHSS.masked_fill(later, -torch.inf)
    return scores_BHSS.softmax(-1).to(v_BHSE.dtype) @ v_BHSE


@torch.no_grad()
def plant_attention_overflow(precision: str = "fp16", *, fused: bool = False) -> Planted:
    """Large queries and keys in a hand-written attention: their products pass 65504. With `fused`, in PyTorch's own."""
    model, batch = _fresh()
    attention: Any = model.language.blocks[1].attention
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.mul_(400)
    if fused:
        return Planted("the same scores in PyTorch's fused attention", model, batch, precision)
    attention.attend = eager_attend
    return Planted("fp16 overflow in attention logits", model, batch, precision)


LOSS_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""What `plant_log_of_zero` computes its loss in, by name; bf16 and fp32 have room for 1e-8."""


@torch.no_grad()
def plant_log_of_zero(precision: str = "fp16") -> Planted:
    """A loss of log(p + 1e-8) in fp16: 1e-8 is 0 there, and a sure model gives the wrong token p = 0.

    Raises:
        ValueError: if `precision` is not one of `LOSS_TYPES`.
    """
    if precision not in LOSS_TYPES:
        raise ValueError(
            f"precision = {precision!r}: this loss is computed in one of {', '.join(LOSS_TYPES)}; choose one"
        )
    dtype = LOSS_TYPES[precision]
    model, batch = _fresh()
    model.get_parameter("language.lm_head.weight").mul_(30)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        p_BSV = _logits(model, batch).to(dtype).softmax(-1)
        wanted = batch.labels_BS != IGNORE_LABEL
        p = p_BSV[wanted].gather(1, batch.labels_BS[wanted][:, None])
        return -(p + 1e-8).log().sum()

    return Planted("log of zero behind + 1e-8", model, batch, "fp32", loss_of)


def plant_no_supervised_token(precision: str = "fp32") -> Planted:
    """A mean over each sample's supervised tokens, of which one sample has none: 0 / 0."""
    model, batch = _fresh()
    batch.labels_BS[2] = IGNORE_LABEL

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        logits_BVS = _logits(model, batch).float().transpose(1, 2)
        losses_BS = nn.functional.cross_entropy(logits_BVS, batch.labels_BS, reduction="none")
        return (losses_BS.sum(1) / (batch.labels_BS != IGNORE_LABEL).sum(1)).mean()

    return Planted("division by zero supervised tokens", model, batch, precision, loss_of)


def plant_high_learning_rate(precision: str = "fp16", lr: float = 30.0) -> Planted:
    """One step of AdamW, which moves every weight by about the learning rate, whatever its gradient."""
    model, batch = _fresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    logits_BSV = _logits(model, batch)
    nn.functional.cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten()).backward()
    optimizer.step()
    return Planted("too high learning rate", model, batch, precision)


def plant_bad_image(precision: str = "fp32") -> Planted:
    """One pixel of one picture is NaN, as after a division by the deviation of an empty picture."""
    model, batch = _fresh()
    first = sum(batch.tiles_per_sample[:1])
    batch.pixel_values_ICHW[first, 1, 3, 4] = torch.nan
    return Planted("bad image", model, batch, precision)


def plant_bad_label(precision: str = "fp32") -> Planted:
    """A label from another tokenizer: the vocabulary does not have it."""
    model, batch = _fresh()
    supervised = (batch.labels_BS[3] != IGNORE_LABEL).nonzero()
    batch.labels_BS[3, int(supervised[0])] = 31999
    return Planted("bad label", model, batch, precision)


PLANTS: tuple[Callable[..., Planted], ...] = (
    plant_attention_overflow,
    plant_log_of_zero,
    plant_no_supervised_token,
    plant_high_learning_rate,
    plant_bad_image,
    plant_bad_label,
)
"""Each makes one planted fault; the first two also take another precision, under which nothing happens."""


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    """Run a model on a batch; [batch, seq, vocab]."""
    return model(
        batch.input_ids_BS,
        batch.pixel_values_ICHW,
        batch.attention_mask_BS,
        tiles_per_sample=batch.tiles_per_sample,
        sample_ids=batch.sample_ids,
    )


# --- Runs to look at ------------------------------------------------------------------------------------------------


def life_of_a_scale(ranks: Ranks, num_steps: int, initial_scale: float, growth_interval: int) -> dict[str, list[Any]]:
    """Train in fp16 with a scaler that starts too high and grows soon; returns the scale of each step, and skips.

    Args:
        ranks: this process's place; with several, the run is ddp.
        num_steps: optimizer steps.
        initial_scale: of the scaler.
        growth_interval: good steps before it doubles.

    Raises:
        ValueError: if a number is not one that a scaler works with, or there is no step to make.
    """
    check_counts(1, num_steps=num_steps)
    trainer = lab_trainer(lab_config("fp16", "ddp" if ranks.world_size > 1 else "single"), ranks)
    trainer.scaler = LossScaler(
        ranks,
        initial_scale=initial_scale,
        growth_interval=growth_interval,
        num_averaged=trainer.place.layout.summed_degree,
    )
    reports = [trainer.train_step() for _ in range(num_steps)]
    return {
        "scales": [report.loss_scale for report in reports],
        "skipped": [report.skipped for report in reports],
        "losses": [report.loss for report in reports],
    }


def measured_bytes(precision: str) -> dict[str, float]:
    """Return what one parameter costs in a precision, counted after a step: bytes by owner, divided by parameters."""
    trainer = lab_trainer(lab_config(precision))
    while trainer.train_step().skipped:  # an optimizer that has made no step keeps nothing
        pass
    num = sum(p.numel() for p in trainer.model.parameters())
    ledger = measure_ledger(trainer.model, trainer.optimizer)
    counters = 4 * len(list(trainer.model.parameters()))  # one step counter a tensor
    return {
        "weights": ledger.weights_bytes / num,
        "gradients": ledger.gradients_bytes / num,
        "optimizer": (ledger.optimizer_bytes - counters) / num,
    }


def activation_bytes(precision: str) -> int:
    """Return the most bytes that autograd keeps for backward in one forward pass of the small model."""
    trainer = lab_trainer(lab_config(precision, micro_batch_size=16))
    (batch,) = trainer.load_step(0)
    with ActivationMeter() as meter:
        micro_batch_loss_sum(trainer.model, batch, precision).backward()
    return meter.peak_bytes
