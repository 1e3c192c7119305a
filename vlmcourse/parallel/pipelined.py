"""A pipeline as a module: this rank's stages, with the names that their parameters have in the plain model.

Enters: a plain model and a place in the grid of ranks. Leaves: a `PipelinedModel`, for an optimizer and a checkpoint
to go through; it cannot be called, because no rank has all layers: `pipeline.forward_backward` runs a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vlmcourse.layout import ParallelConfig
from vlmcourse.models.vlm import VLM
from vlmcourse.parallel.mesh import Place
from vlmcourse.parallel.pipeline import Pipeline
from vlmcourse.parallel.stages import LossSum
from vlmcourse.planner.degrees import choose_split


class PipelinedModel(nn.Module):
    """The stages of one rank."""

    def __init__(self, pipeline: Pipeline) -> None:
        """Register the stages of a pipeline."""
        super().__init__()
        self.pipeline = pipeline
        self.take_stages()

    def take_stages(self) -> None:
        """Register the stages that the pipeline has now; call it after `pipeline.cut`."""
        self.stages = nn.ModuleList(self.pipeline.modules)

    def forward(self, *_: Any, **__: Any) -> None:
        """Refuse to run.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "No rank of a pipeline has all layers, so this model cannot be called: use model.pipeline.forward_backward "
            "with the micro-batches of a step, or generate_in_pipeline with prompts"
        )


def apply_pipeline(
    model: VLM,
    config: ParallelConfig,
    place: Place,
    device: torch.device,
    loss_sum: LossSum,
    wrap: Callable[[nn.Module], nn.Module],
) -> PipelinedModel:
    """Cut a plain model into stages and keep this rank's.

    Args:
        model: the same weights on every rank; dropped afterwards.
        config: schedule and stages.
        place: this process's position in the grid.
        device: of this rank.
        loss_sum: makes the sum of token losses of logits and labels.
        wrap: what else happens to each stage: tensor, context and data parallelism.
    """
    split = choose_split(config, model.shape)
    group = place.group("pp")
    pipeline = Pipeline(
        model,
        group,
        config.pp_schedule,
        loss_sum=loss_sum,
        device=device,
        split=split,
        wrap=wrap,
        reshard_after_forward=config.strategy != "zero2",
    )
    return PipelinedModel(pipeline)
