"""The NaN finder where it is easily wrong: whose picture, which module of a backward, what a step's loss really is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from precision_cases import spoil_gradients
from torch import Tensor, nn

from vlmcourse.config import TrainConfig
from vlmcourse.data.samples import Batch
from vlmcourse.labs import ch03
from vlmcourse.models.vlm import VLM
from vlmcourse.train import nan_finder
from vlmcourse.train.loss import TokenLoss
from vlmcourse.train.nan_finder import find_in_step, find_nonfinite, take_sample
from vlmcourse.train.trainer import Trainer


def build(precision: str = "fp16", freeze: tuple[str, ...] = (), **train: Any) -> Trainer:
    config: TrainConfig = ch03.lab_config(precision, **train)
    return ch03.lab_trainer(replace(config, model=replace(config.model, freeze=freeze)))


def test_a_sample_is_taken_with_its_own_tiles_and_no_others() -> None:
    (batch,) = build().load_step(0)
    batch = replace(batch, pixel_values_ICHW=torch.arange(6.0).view(6, 1, 1, 1), tiles_per_sample=(1, 2, 0, 3))
    for row, tiles in enumerate(([0], [1, 2], [], [3, 4, 5])):
        alone = take_sample(batch, row)
        assert alone.pixel_values_ICHW.flatten().tolist() == tiles
        assert alone.tiles_per_sample == (len(tiles),) and alone.sample_ids == (batch.sample_ids[row],)
        for field in ("input_ids_BS", "labels_BS", "attention_mask_BS"):
            assert torch.equal(getattr(alone, field), getattr(batch, field)[row : row + 1])


@pytest.mark.parametrize("row", [0, 2])
def test_one_of_several_pictures_is_guilty_of_what_a_cast_makes_of_it(row: int) -> None:
    trainer = build()
    (batch,) = trainer.load_step(0)
    assert len(batch.sample_ids) == sum(batch.tiles_per_sample) == 4
    batch.pixel_values_ICHW[row, 0, 3, 4] = 1e6  # a number, so the look at inputs passes it; fp16 ends at 65504
    found = find_nonfinite(trainer.model, batch, "fp16")
    assert found is not None and found.phase == "forward" and found.module.startswith("vision")
    assert found.samples == (batch.sample_ids[row],)
    assert find_nonfinite(trainer.model, batch, "bf16") is None


def test_a_backward_outside_of_all_modules_names_the_one_its_gradient_goes_to() -> None:
    trainer = build()
    (batch,) = trainer.load_step(0)
    found = find_nonfinite(trainer.model, batch, "fp16", loss_scale=2.0**24)
    assert found is not None and (found.phase, found.module, found.op) == ("backward", "language.lm_head", "_to_copy")
    assert str(found).startswith("backward in language.lm_head, operation _to_copy: inf in fp16 from numbers up to ")


@pytest.mark.parametrize("weighting", ["tokens", "sqrt"])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_step_is_looked_into_with_its_own_loss_and_frozen_towers(
    weighting: str, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces: as if weights were sharded, so that a copy is looked into."""
    trainer = build("fp16", freeze=("vision",), loss_weighting=weighting)
    (batch,) = trainer.load_step(0)
    batch.labels_BS[1, : batch.labels_BS.shape[1] // 2] = nan_finder.IGNORE_LABEL
    trainer.load_step = lambda step: [batch]  # type: ignore[method-assign]
    seen: dict[str, Any] = {}

    def look(model: Any, batch: Batch, precision: str, **options: Any) -> None:
        seen.update(options, model=model, precision=precision)

    monkeypatch.setattr(nan_finder, "find_nonfinite", look)
    monkeypatch.setattr(nan_finder, "_is_in_pieces", lambda model: in_pieces)
    assert find_in_step(trainer) == []
    counts = (batch.labels_BS != nan_finder.IGNORE_LABEL).sum(1).tolist()
    weights = sum(counts) if weighting == "tokens" else sum(map(math.sqrt, counts))
    assert seen["loss_scale"] == pytest.approx(trainer.scaler.scale / weights)
    assert (seen["model"] is trainer.model) == (not in_pieces) and seen["precision"] == "fp16"
    assert {n.partition(".")[0] for n, p in seen["model"].named_parameters() if not p.requires_grad} == {"vision"}
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, seen["model"].state_dict()[name])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        logits_BSV = ch03._logits(trainer.model, batch)
    expected = TokenLoss(weighting)(logits_BSV, batch.labels_BS)
    assert float(seen["loss_of"](seen["model"], batch).detach()) == pytest.approx(float(expected), rel=1e-5)


def test_a_model_that_shares_its_sequences_is_not_run_alone() -> None:
    trainer = build("fp32")
    (batch,) = trainer.load_step(0)
    assert isinstance(trainer.model, VLM)
    trainer.model.language.take_part = lambda tensor, dim: tensor
    with pytest.raises(ValueError, match="a part of each sequence .* use find_in_step"):
        find_nonfinite(trainer.model, batch)


class Masked(nn.Module):
    """One layer of attention; `mask` hides every key from one sample, whose scores are then all -inf."""

    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor], guilty: str) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(600, 8), nn.Linear(8, 600)
        self.mask, self.guilty = mask, guilty

    def forward(self, batch: Batch) -> Tensor:
        x_BSD = self.embed(batch.input_ids_BS)
        hidden_B = torch.tensor([sample_id == self.guilty for sample_id in batch.sample_ids])
        scores_BSS = self.mask(x_BSD @ x_BSD.transpose(1, 2), hidden_B[:, None, None])
        return self.out(scores_BSS.softmax(-1) @ x_BSD)


@pytest.mark.parametrize(
    "mask",
    [
        lambda scores, hidden: scores.masked_fill(hidden, -torch.inf),
        lambda scores, hidden: scores + torch.zeros_like(scores).masked_fill(hidden, -torch.inf),
        lambda scores, hidden: torch.where(hidden, -torch.inf, scores),
        lambda scores, hidden: (
            scores + torch.zeros_like(scores).index_fill(0, hidden.flatten().nonzero()[:, 0], -torch.inf)
        ),
    ],
)
def test_a_row_that_is_masked_everywhere_is_found_in_the_softmax_that_makes_nan_of_it(mask: Any) -> None:
    (batch,) = build("fp32").load_step(0)
    found = find_nonfinite(Masked(mask, batch.sample_ids[1]), batch, loss_of=loss_of_masked)
    assert found is not None and (found.phase, found.op, found.samples) == ("loss", "_softmax", (batch.sample_ids[1],))
    assert found.what.startswith("nan in fp32 from numbers up to ") and found.what.endswith(" and -inf")
    assert find_nonfinite(Masked(mask, "nobody"), batch, loss_of=loss_of_masked) is None


def loss_of_masked(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch).flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch.labels_BS.flatten(), ignore_index=-100, reduction="sum")


def test_what_no_operation_was_seen_to_do_is_said_of_the_loss_or_the_gradient_that_has_it() -> None:
    model, (batch,) = nn.Linear(2, 2), build("fp32").load_step(0)

    def infinite(model: nn.Module, batch: Batch) -> Tensor:
        return model(torch.ones(2)).masked_fill(torch.tensor([True, False]), torch.inf).sum()

    found = find_nonfinite(model, batch, loss_of=infinite)
    assert found is not None and (found.phase, found.op, len(found.samples)) == ("loss", "", 4)
    assert found.what.endswith("no operation was seen to make it so, and masked_fill wrote an infinity as it was told")
    found = find_nonfinite(model, batch, loss_of=lambda model, batch: 0.5 * Told.apply(model(torch.ones(2))).sum())
    assert found is not None and (found.phase, found.op) == ("backward", "")
    assert found.what.startswith("the gradient of weight is not finite, though no operation")


class Told(torch.autograd.Function):
    """Hands on what it gets, and in backward what it was told to: infinities."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.full_like(grads[0], torch.inf)


def test_an_operation_in_place_is_found_with_the_numbers_it_had() -> None:
    model, (batch,) = nn.Linear(2, 2), build("fp32").load_step(0)
    found = find_nonfinite(
        model, batch, loss_of=lambda m, b: m(torch.ones(2)).mul(0).add(3).div_(torch.zeros(())).sum()
    )
    assert found is not None and (found.op, found.what) == (
        "div_",
        "inf in fp32 from numbers up to 3, with a zero to divide by",
    )


@pytest.mark.parametrize(
    ("loss_of", "what"),
    [
        (lambda x: (x * torch.tensor([0.0, 3.0])).log().sum(), "-inf in fp32 from numbers up to 3, a zero among them"),
        (lambda x: (x * torch.tensor([0.0, 3.0])).log_().sum(), "-inf in fp32 from numbers up to 3, a zero among them"),
        (lambda x: x.sum() / torch.tensor(0), "inf in fp32 from numbers up to 2, with a zero to divide by"),
        (lambda x: x.sum() / 0, "inf in fp32 from numbers up to 2, with a zero to divide by"),
        (lambda x: (x * torch.tensor([0.0, 3e38]) / 1e-3).sum(), "inf in fp32 from numbers up to 3e+38"),
    ],
)
def test_the_zero_that_a_logarithm_or_a_division_cannot_take_is_told(loss_of: Any, what: str) -> None:
    model, (batch,) = nn.Linear(2, 2, bias=False), build("fp32").load_step(0)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    found = find_nonfinite(model, batch, loss_of=lambda m, b: loss_of(m(torch.ones(2))))
    assert found is not None and found.what == what


def test_the_first_micro_batch_with_a_fault_is_named() -> None:
    trainer = build("fp32", micro_batch_size=1, accumulation_steps=3)
    batches = trainer.load_step(0)
    for batch in batches[1:]:
        batch.pixel_values_ICHW.fill_(torch.nan)
    trainer.load_step = lambda step: batches  # type: ignore[method-assign]
    (said,) = find_in_step(trainer)
    assert said.startswith("rank 0, step 0, micro-batch 1: input in pixel_values")


@pytest.mark.parametrize(("precision", "max_grad_norm"), [("fp32", 0.0), ("bf16", 1.0), ("bf16_pure", 0.0)])
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(
    precision: str, max_grad_norm: float, tmp_path: Path
) -> None:
    config = ch03.lab_config(precision, num_steps=1, max_grad_norm=max_grad_norm)
    trainer = ch03.lab_trainer(replace(config, run=replace(config.run, output_dir=str(tmp_path))))
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with spoil_gradients():
        with pytest.raises(RuntimeError, match="the loss of this step is finite, but the norm of its gradient is nan"):
            trainer.fit()
        (said,) = find_in_step(trainer)
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
    assert trainer.step == 0 and not list(tmp_path.rglob("checkpoints/*"))
    assert said.startswith(
        "rank 0, step 0, micro-batch 0: backward in language.lm_head, operation div: inf in fp32 from"
    )
    assert find_in_step(trainer) == []
