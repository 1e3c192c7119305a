"""What takes effect while a `Trainer` makes its steps: rates, AdamW, gradients, seeds, tokens, number format.

Expected values are written out by hand here, so that they share no line with the package.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import awkward_samples, check_gradient, count_tokens, small_shape
from torch import Tensor
from torch.nn import functional as F

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.data.samples import IGNORE_LABEL
from vlmcourse.layout import Layout
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.mesh import Place
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.train import trainer as trainer_module
from vlmcourse.train.report import StepReport
from vlmcourse.train.rows import RATE_NAMES
from vlmcourse.train.trainer import Trainer

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
RATES = {"vision": 2e-3, "projector": 3e-3, "language": 5e-4}
BETA1, BETA2, EPS, WEIGHT_DECAY = 0.8, 0.7, 1e-4, 0.3
MAX_GRAD_NORM = 0.5
NUM_STEPS = 6
ROOT_HALF = math.sqrt(0.5)
SCALES = [0.5, 1.0, 1.0, 0.2 + 0.4 * (1 + ROOT_HALF), 0.6, 0.2 + 0.4 * (1 - ROOT_HALF)]
"""Two steps of warm-up, then half a cosine from 1 towards 0.2 in four steps."""
OPTIMIZER = {
    **{f"lr_{tower}": rate for tower, rate in RATES.items()},
    "beta1": BETA1,
    "beta2": BETA2,
    "eps": EPS,
    "weight_decay": WEIGHT_DECAY,
    "warmup_steps": 2,
    "min_lr_fraction": 0.2,
}


def config_of(**changes: Any) -> TrainConfig:
    """Return the configuration of all tests here; `changes` are written section__key."""
    train = {"num_steps": NUM_STEPS, "micro_batch_size": 4, "accumulation_steps": 2, "max_grad_norm": MAX_GRAD_NORM}
    overrides = {name.replace("__", "."): value for name, value in changes.items()}
    return parse_config({"train": train, "optimizer": OPTIMIZER, "parallel": {"strategy": "single"}}, overrides)


def build(config: TrainConfig | None = None, ranks: Ranks = ALONE) -> Trainer:
    samples = awkward_samples()
    model = build_model(small_shape(), seed=0)
    return Trainer(
        config or config_of(), ranks, model=model, train_data=samples, eval_data=samples[:1], show_progress=False
    )


def build_seeded(monkeypatch: pytest.MonkeyPatch, seed: int) -> Trainer:
    """Build a trainer that makes its own model, of the small shape."""
    monkeypatch.setattr(trainer_module, "get_model", lambda preset: small_shape())
    samples = awkward_samples()
    return Trainer(config_of(run__seed=seed), ALONE, train_data=samples, eval_data=samples[:1], show_progress=False)


def tower_of(name: str) -> str:
    return name.split(".")[0]


def is_decayed(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and name not in ("vision.class_token", "vision.position_embedding")


def settings_by_parameter(trainer: Trainer, key: str) -> dict[str, Any]:
    """Return what the optimizer's groups say about each parameter, by name."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    return {names[id(p)]: group[key] for group in trainer.optimizer.param_groups for p in group["params"]}


def test_every_step_has_the_rates_of_warm_up_and_cosine_tower_by_tower(tmp_path: Path) -> None:
    trainer = build(config_of(run__output_dir=str(tmp_path), train__log_every=1))
    in_effect: list[dict[str, float]] = []
    reports: list[StepReport] = []
    trainer.before_update.append(lambda trainer: in_effect.append(settings_by_parameter(trainer, "lr")))
    trainer.after_step.append(lambda trainer, report: reports.append(report))
    result = trainer.fit()
    assert len(in_effect) == len(reports) == len(result.history) == NUM_STEPS
    for step, scale in enumerate(SCALES):
        expected = {tower: pytest.approx(rate * scale, rel=1e-12) for tower, rate in RATES.items()}
        assert reports[step].learning_rates == expected, step
        assert {tower: result.history[step][f"lr/{RATE_NAMES[tower]}"] for tower in RATES} == expected, step
        assert in_effect[step].keys() == dict(trainer.model.named_parameters()).keys()
        for name, rate in in_effect[step].items():
            assert rate == expected[tower_of(name)], (step, name)


def test_the_optimizer_has_the_configured_betas_eps_and_weight_decay() -> None:
    trainer = build()
    trainer.train_step()
    for name, parameter in trainer.model.named_parameters():
        assert settings_by_parameter(trainer, "betas")[name] == (BETA1, BETA2)
        assert settings_by_parameter(trainer, "eps")[name] == EPS
        expected = WEIGHT_DECAY if is_decayed(name, parameter) else 0.0
        assert settings_by_parameter(trainer, "weight_decay")[name] == expected, name


def test_updates_are_those_of_adamw_written_out_by_hand() -> None:
    trainer = build()
    weights = {name: p.detach().double() for name, p in trainer.model.named_parameters()}
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    gradients: dict[str, Tensor] = {}
    trainer.before_update.append(lambda trainer: gradients.update(clone_gradients(trainer)))
    for step in range(3):
        trainer.train_step()
        for name, parameter in trainer.model.named_parameters():
            w, g = weights[name], gradients[name].double()
            rate = RATES[tower_of(name)] * SCALES[step]
            if is_decayed(name, parameter):
                w = w - rate * WEIGHT_DECAY * w
            first[name] = BETA1 * first[name] + (1 - BETA1) * g
            second[name] = BETA2 * second[name] + (1 - BETA2) * g**2
            m, v = first[name] / (1 - BETA1 ** (step + 1)), second[name] / (1 - BETA2 ** (step + 1))
            expected = w - rate * m / (v.sqrt() + EPS)
            state, where = trainer.optimizer.state[parameter], f"step {step}, {name}"
            moved = float((expected - weights[name]).norm())
            # Rounding to fp32 of the weight itself, and a small part of the update.
            allowed = 1e-6 * float(expected.norm()) + 1e-4 * moved
            assert float((parameter.detach() - expected).norm()) <= allowed, where
            assert moved > 10 * allowed or not g.any(), where
            assert torch.allclose(state["exp_avg"].double(), first[name], rtol=1e-4, atol=1e-9), where
            assert torch.allclose(state["exp_avg_sq"].double(), second[name], rtol=1e-4, atol=1e-14), where
            weights[name] = parameter.detach().double()


def clone_gradients(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("max_grad_norm", [0.0, MAX_GRAD_NORM])
def test_gradients_of_a_step_are_those_of_its_own_batches(max_grad_norm: float) -> None:
    trainer = build(config_of(train__max_grad_norm=max_grad_norm))
    for step in range(3):
        model, batches = copy.deepcopy(trainer.model), trainer.load_step(step)
        model.zero_grad()
        losses = []
        for batch in batches:
            logits = model(batch.input_ids_BS, batch.pixel_values_ICHW, batch.attention_mask_BS)
            labels = batch.labels_BS.flatten()
            losses.append(F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORE_LABEL, reduction="sum"))
        num_supervised = sum(int((batch.labels_BS != IGNORE_LABEL).sum()) for batch in batches)
        loss = torch.stack(losses).sum() / num_supervised
        loss.backward()
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
        assert norm > MAX_GRAD_NORM
        found: dict[str, Tensor] = {}
        trainer.before_update = [lambda trainer, found=found: found.update(clone_gradients(trainer))]
        report = trainer.train_step()
        assert report.loss == pytest.approx(loss.item(), abs=1e-5)
        assert report.grad_norm == pytest.approx(norm, rel=1e-5)
        assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
        for name, gradient in expected.items():
            clipped = gradient * (max_grad_norm / norm if max_grad_norm else 1.0)
            check_gradient(f"step {step}: gradient of {name}", found[name], clipped, "fp32")


def sample_order(trainer: Trainer) -> list[str]:
    return [name for step in range(4) for batch in trainer.load_step(step) for name in batch.sample_ids]


def test_the_seed_of_a_run_decides_over_weights_and_order_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    one, again, other = (build_seeded(monkeypatch, seed) for seed in (1, 1, 2))
    assert sample_order(one) == sample_order(again)
    assert sorted(sample_order(one)) == sorted(sample_order(other))  # the same epoch
    assert sample_order(one) != sample_order(other)
    weights, same, others = (trainer.model.state_dict() for trainer in (one, again, other))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    for name in ("vision.patch_embedding.weight", "projector.up_proj.weight", "language.lm_head.weight"):
        assert not torch.equal(weights[name], others[name]), name
    assert one.train_step().loss == again.train_step().loss != other.train_step().loss


Draw = tuple[float, float, float]


def draws_of(rank: int, *, seed: int = 0, first_step: int = 0) -> list[list[Draw]]:
    """Return what Python, NumPy and PyTorch draw inside the forward passes of each step up to the third."""
    trainer = build(config_of(run__seed=seed))
    # The only rank of its world as far as communication goes, but with samples and a number of its own.
    trainer.place = Place(Layout(dp_replicate=2), rank, mesh=None)
    batches = build().load_step(0)
    trainer.load_step = lambda step: batches  # type: ignore[method-assign]
    trainer.step = first_step
    draws: list[Draw] = []
    trainer.model.register_forward_pre_hook(
        lambda model, arguments: draws.append((random.random(), float(np.random.rand()), torch.rand(()).item()))
    )
    by_step = []
    for _ in range(first_step, 3):
        trainer.train_step()
        by_step.append(draws.copy())
        draws.clear()
    return by_step


def test_random_draws_inside_a_step_depend_on_seed_step_and_rank_alone() -> None:
    of_rank_0 = draws_of(0)
    assert [len(step) for step in of_rank_0] == [2, 2, 2]
    assert draws_of(0) == of_rank_0
    assert draws_of(0, first_step=2) == of_rank_0[2:]  # as after a resume
    everything = [draw for run in (of_rank_0, draws_of(1), draws_of(0, seed=1)) for step in run for draw in step]
    for generator in zip(*everything, strict=True):
        assert len(set(generator)) == len(everything) == 18


def test_tokens_per_s_is_tokens_over_seconds_without_the_first_three_steps(tmp_path: Path) -> None:
    trainer = build(config_of(run__output_dir=str(tmp_path)))
    reports: list[StepReport] = []
    trainer.after_step.append(lambda trainer, report: reports.append(report))
    result = trainer.fit()
    for step, report in enumerate(reports):
        assert report.tokens == count_tokens(trainer.load_step(step), trainer.shape.image_token_id)
    counted = reports[3:]
    tokens = sum(report.tokens.text + report.tokens.visual for report in counted)
    assert result.tokens_per_s == pytest.approx(tokens / sum(report.seconds for report in counted))


def allow_tf32() -> None:
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")


def allow_tf32_everywhere() -> None:
    torch.backends.fp32_precision = "tf32"  # type: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("allow", [allow_tf32, allow_tf32_everywhere])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_trainer_computes_fp32_without_tf32(precision: str, allow: Callable[[], None]) -> None:
    allow()
    cudnn: Any = torch.backends.cudnn
    assert cudnn.conv.fp32_precision == "tf32"
    build(config_of(train__precision=precision))
    assert cudnn.allow_tf32 is False
    assert cudnn.conv.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.get_float32_matmul_precision() == "highest"
