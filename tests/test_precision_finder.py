"""The NaN finder where it is easily wrong: whose picture, which module of a backward, what a step's loss really is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

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
