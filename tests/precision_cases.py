"""What the tests of precisions train: a small model under every strategy, and one that has learned its answers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from parity import AwkwardTrainer, Recording, awkward_samples, record, small_shape
from torch import Tensor

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import Message, Sample
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.comm import local_part
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.presets import VLMShape
from vlmcourse.train import activations, offload
from vlmcourse.train.loss import TokenLoss
from vlmcourse.train.trainer import Trainer

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "fsdp": {"strategy": "fsdp"},
    "tp": {"strategy": "single", "tp": 2},
    "pp": {"strategy": "single", "pp": 2},
    "cp": {"strategy": "ddp", "cp": 2},
    "adaptive": {"strategy": "single", "pp": 2, "adaptive": True},
}
"""On two ranks."""
SHARES = ("ddp", "zero1", "zero2", "fsdp")
"""Each rank has samples of its own."""
SAME_SUMS = ("single", *SHARES)
"""These add up the same two micro-batches as one process does, in the same formats: equal to the last bits."""
EVERY = ("fp16", "bf16_master", "bf16_pure", "fp8")
CUT = ("bf16", "fp16", "bf16_master", "bf16_pure")
"""All that compute in 16 bits: these go with tp, pp and cp."""
RUNS = {
    "ddp": EVERY,
    "zero1": EVERY,
    "zero2": ("fp32", "bf16", *EVERY),
    "fsdp": EVERY,
    "tp": CUT[1:],
    "pp": CUT[1:],
    "cp": CUT[1:],
}
"""What is trained under each strategy, besides steps that overflow."""
ANSWERS = {strategy: CUT for strategy in ("tp", "pp", "cp")} | {"fsdp": ("fp8",)}
"""Under what questions are answered."""
RESUMED = (
    *(("ddp", "fp16"), ("fsdp", "bf16_pure"), ("fsdp", "bf16_master")),
    *((strategy, precision) for strategy in ("tp", "pp") for precision in CUT[1:]),
    ("adaptive", "bf16_pure"),
)
BAD_GRADIENTS = ("fsdp", "tp", "pp")
"""Under what a step with a finite loss and a gradient of NaN is made, without clipping in a pipeline."""
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"vision": "full", "language": "full"},
    "selective": {"vision": "selective", "language": "selective"},
    "offload": {"offload": True},
}
NUM_STEPS = 2
LEARNING_STEPS = 25
WEIGHT_SEED = 100


def precision_config(
    strategy: str, precision: str, folder: str = "runs", keeps: dict[str, Any] | None = None, **train: Any
) -> TrainConfig:
    """Return a run whose step is two micro-batches of four samples, the same two wherever it runs.

    Args:
        strategy: one of `STRATEGIES`, or single.
        precision: one of `precision_rules.PRECISIONS`.
        folder: where it would write.
        keeps: the section [activations].
        train: other keys of [train].
    """
    steps = 1 if strategy in SHARES else 2
    options = {"num_steps": 4, "micro_batch_size": 4, "accumulation_steps": steps, "max_grad_norm": 0.5}
    return parse_config(
        {
            "run": {"output_dir": folder, "name": f"{strategy}-{precision}"},
            "train": options | {"precision": precision} | train,
            "optimizer": {"warmup_steps": 1, "eps": 1e-5, "weight_decay": 0.1},
            "parallel": STRATEGIES.get(strategy, {"strategy": strategy}),
            "activations": keeps or {},
        }
    )


def even_shape() -> VLMShape:
    """Return a shape like that of the parity tests with widths that 2 divides, and fewer layers."""
    shape = small_shape()
    vision = replace(shape.vision, num_layers=1, mlp_size=32)
    language = replace(shape.language, num_layers=2, num_heads=2, mlp_size=46)
    return replace(shape, vision=vision, language=language)


def build(config: TrainConfig, ranks: Ranks) -> AwkwardTrainer:
    """Build a trainer of the small model."""
    samples = awkward_samples()
    model = build_model(even_shape(), seed=WEIGHT_SEED)
    return AwkwardTrainer(config, ranks, model=model, train_data=samples, eval_data=samples[:1], show_progress=False)


def run(strategy: str, precision: str, ranks: Ranks) -> Recording:
    """Train some steps; what was rounded differently on two ranks shows in the weights, which each rank records."""
    trainer = build(precision_config(strategy, precision), ranks)
    return record(trainer, NUM_STEPS if strategy in SAME_SUMS else 1)


def run_with_policy(strategy: str, precision: str, policy: str, ranks: Ranks) -> tuple[Recording, int]:
    """Train with one of `POLICIES`; also return how often something was recomputed, or moved to the host.

    Random rounding takes part in a second step only; the other precisions make one.
    """
    trainer = build(precision_config(strategy, precision, keeps=POLICIES[policy]), ranks)
    place, name = (offload, "_HostCopy") if policy == "offload" else (activations, "checkpoint")
    with mock.patch.object(place, name, wraps=getattr(place, name)) as worked:
        return record(trainer, NUM_STEPS if precision == "bf16_pure" else 1), worked.call_count


@contextlib.contextmanager
def spoil_gradients() -> Iterator[None]:
    """Let every loss, inside, be what it was, with a gradient of NaN: that of the square root at 0."""
    real = TokenLoss.__call__

    def spoiled(self: TokenLoss, logits_BSV: Tensor, *args: Any) -> Tensor:
        local_BSV = local_part(logits_BSV)
        return real(self, logits_BSV, *args) + (local_BSV - local_BSV.detach()).float().square().sum().sqrt()

    with mock.patch.object(TokenLoss, "__call__", spoiled):
        yield


def questions() -> list[Sample]:
    """Return eight samples that can be learned by heart: a word to repeat, and a word to a picture."""
    pictures, words = DigitsDataset(8, 0, "train"), ("left", "73", "3", "top", "sum", "digit", "right", "many")
    samples = []
    for i, word in enumerate(words):
        images = pictures[i].images if i % 2 else ()
        asked = ("<image>\n" if i % 2 else "") + f"say {word}"
        samples.append(Sample(f"say-{i}", images, (Message("user", asked), Message("assistant", word))))
    return samples


def half_wrong() -> list[Sample]:
    """Return those questions, and three of them again with the answer of another one, which is wrong."""
    asked = questions()
    others = [
        replace(sample, sample_id=f"wrong-{i}", messages=(sample.messages[0], asked[i - 1].messages[1]))
        for i, sample in enumerate(asked[:3])
    ]
    return asked + others


def learn() -> dict[str, Tensor]:
    """Return the weights of a model that has learned `questions` by heart, in fp32 and one process."""
    config = precision_config("single", "fp32", num_steps=LEARNING_STEPS, micro_batch_size=8, accumulation_steps=1)
    config = replace(config, optimizer=replace(config.optimizer, lr_vision=1e-2, lr_projector=1e-2, lr_language=1e-2))
    trainer = questioned(config, ALONE, None)
    for _ in range(LEARNING_STEPS):
        trainer.train_step()
    return {name: weight.detach().clone() for name, weight in trainer.model.state_dict().items()}


def questioned(config: TrainConfig, ranks: Ranks, weights: dict[str, Tensor] | None) -> Trainer:
    """Build a trainer that learns `questions` and is asked `half_wrong`."""
    model = build_model(even_shape(), seed=WEIGHT_SEED)
    if weights is not None:
        model.load_state_dict(weights)
    return Trainer(config, ranks, model=model, train_data=questions(), eval_data=half_wrong(), show_progress=False)


def answer(strategy: str, precision: str, weights: dict[str, Tensor], ranks: Ranks) -> dict[str, Any]:
    """Evaluate a model that has learned its answers; then make a step, which all ranks must still be ready for."""
    trainer = questioned(precision_config(strategy, precision), ranks, weights)
    exact = trainer.evaluate()
    return {"exact": dataclasses.astuple(exact), "loss": trainer.train_step().loss}
