"""The planner's bytes of a step beside a real step's ledger, owner by owner, on the ranks at hand.

Enters: a `ParallelConfig`, a model's shape, a workload. Leaves: what each rank holds, measured. All micro-batches are
alike and full: `seq_len` tokens a sample, so many tiles each. fp32 on CPU ranks. Chapter 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.data.samples import Batch
from vlmcourse.layout import ParallelConfig
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.ledger import StepLedger, measure_ledger
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.activations import Workload
from vlmcourse.presets import VLMShape
from vlmcourse.train.trainer import Trainer

FIRST_TEXT_TOKEN = 10


@dataclass(frozen=True)
class MeasuredStep:
    """Bytes of one rank in one optimizer step."""

    state: dict[str, int]
    """Weights, gradients and optimizer state between backward and update."""
    activations: int
    """The most that was kept for backward at once."""
    by_layer: dict[str, int]
    """Those by layer, at that moment."""
    peak: dict[str, int]
    """By owner, at the moment with the most bytes of all."""


class FullBatches(Trainer):
    """A trainer whose micro-batches all have the same shapes."""

    workload: Workload

    def load_step(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches; `step` changes nothing."""
        return [self._fill() for _ in range(self.config.train.accumulation_steps)]

    def _fill(self) -> Batch:
        samples, tokens = self.config.train.micro_batch_size, self.workload.seq_len
        tiles, per_tile = self.workload.tiles_per_sample, self.shape.num_visual_tokens_per_tile
        ids_BS = torch.full((samples, tokens), FIRST_TEXT_TOKEN)
        ids_BS[:, : tiles * per_tile] = self.shape.image_token_id
        side_px = self.shape.vision.image_size_px
        return Batch(
            input_ids_BS=ids_BS,
            labels_BS=torch.full((samples, tokens), FIRST_TEXT_TOKEN),
            attention_mask_BS=torch.ones(samples, tokens, dtype=torch.bool),
            pixel_values_ICHW=torch.ones(samples * tiles, 3, side_px, side_px),
            tiles_per_sample=(tiles,) * samples,
            sample_ids=tuple(map(str, range(samples))),
            tokens_per_tile=per_tile,
        )


def measure_step(config: TrainConfig, shape: VLMShape, workload: Workload, ranks: Ranks) -> MeasuredStep:
    """Train two steps and watch the second; all ranks call it together.

    Args:
        config: of the run; its strategy must not be an engine's.
        shape: of the model.
        workload: tokens and tiles of each sample.
        ranks: this process's place.

    Communicates: what training does.
    """
    trainer = FullBatches(config, ranks, model=build_model(shape, seed=0), show_progress=False)
    trainer.workload = workload
    trainer.train_step()
    state: dict[str, int] = {}

    def look(_: Any) -> None:
        ledger = measure_ledger(trainer.model, trainer.optimizer)
        state.update(weights=ledger.weights_bytes, gradients=ledger.gradients_bytes, optimizer=ledger.optimizer_bytes)

    trainer.before_update.append(look)
    with StepLedger(trainer.model, trainer.optimizer) as ledger:
        trainer.train_step()
    fullest = max(ledger.samples, key=lambda sample: sample.by_owner().get("activations", 0))
    return MeasuredStep(
        state=state,
        activations=fullest.by_owner().get("activations", 0),
        by_layer=fullest.by_layer("activations"),
        peak=ledger.peak().by_owner(),
    )
