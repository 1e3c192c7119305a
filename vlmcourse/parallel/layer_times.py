"""How long each layer of a pipeline takes, forward and backward, in steps that train.

Enters: a `Pipeline` at work. Leaves: seconds a micro-batch of every layer, the same on all ranks. Hooks note when a
layer begins; the layer before it ends there, so the times of a stage's layers add up to the stage's, and what lies
between two blocks (fusion, rotary tables, loss) counts as well. Waiting for messages does not. Chapter 1.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vlmcourse.parallel.pipeline import Pipeline
from vlmcourse.parallel.stages import VLMStage
from vlmcourse.parallel.timeline import Action, gather_actions
from vlmcourse.planner.stages import StageSplit

Moment = Any
"""Seconds of a steady clock on CPU; on a GPU an event in its queue, which waits for nothing."""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds that each layer of a model takes for one micro-batch, in the order of `StageSplit`'s layers."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    num_samples: int
    """Micro-batches of which each number is a mean, on the rank with the fewest."""
    order: tuple[tuple[Action, ...], ...] = ()
    """What each rank of the pipeline ran in the last step measured, in order; the times in it are 0."""
    trained: tuple[bool, ...] = ()
    """Of each layer, whether it has trained parameters; empty if all have."""

    @property
    def total_s(self) -> tuple[float, ...]:
        """Forward and backward together."""
        return tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the step whose order is known."""
        return 1 + max((action.microbatch for of_rank in self.order for action in of_rank), default=-1)

    def of_stages(self, split: StageSplit) -> tuple[float, ...]:
        """Return what each stage of a split takes, forward and backward."""
        total_s = self.total_s
        return tuple(sum(total_s[layer] for layer in split.layers(stage)) for stage in range(split.num_stages))


@dataclass
class _Action:
    """One action under way: when which layer's forward began, or which layer's backward was done."""

    kind: str
    microbatch: int
    stage: int
    marks: list[tuple[int, Moment]]
    started: Moment
    ended: Moment = None


class _Step(NamedTuple):
    """The layers of one step on one rank."""

    sizes: tuple[int, ...]
    """All that the shapes of its micro-batches depend on."""
    num_microbatches: int
    forward_s: dict[int, float]
    """Of each layer, the mean over the micro-batches."""
    backward_s: dict[int, float]


class LayerTimer:
    """Measures the layers of one rank's stages, from `start` to `stop`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.num_steps = 0
        """Steps measured."""
        self._steps: list[_Step] = []
        self._actions: list[_Action] = []
        self._order: list[Action] = []
        self._removers: list[Callable[[], None]] = []

    def start(self) -> None:
        """Measure the next steps."""
        for stage in self.pipeline.stages:
            self._watch(stage)
        self.pipeline.on_action = self._run_action

    def stop(self) -> None:
        """Measure no more; what was measured stays."""
        for remove in self._removers:
            remove()
        self._removers.clear()
        self.pipeline.on_action = None

    def _watch(self, stage: VLMStage) -> None:
        """Note when each layer of a stage begins; the first one begins with the stage."""
        split = self.pipeline.split
        for blocks, numbers, first in (
            (stage.vision.blocks, split.vision_blocks(stage.stage), 1),
            (stage.language.blocks, split.language_blocks(stage.stage), split.fusion_layer + 1),
        ):
            for block, number in zip(blocks.children(), numbers, strict=True):
                # Before the hooks of FSDP, so that gathering a block's weights counts as the block's.
                hook = block.register_forward_pre_hook(partial(self._begins, first + number), prepend=True)
                self._removers.append(hook.remove)
        # What follows a tower begins where its last block ends.
        last_vision = list(stage.vision.blocks.children())[-1:] if stage.has_fusion else []
        last_language = list(stage.language.blocks.children())[-1:] if stage.is_last else []
        for blocks, layer in ((last_vision, split.fusion_layer), (last_language, split.num_layers - 1)):
            for block in blocks:
                hook = block.register_forward_hook(partial(self._follows, layer))
                self._removers.append(hook.remove)

    def _begins(self, layer: int, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._mark(layer, inputs[0])

    def _follows(self, layer: int, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        self._mark(layer, output)

    def _mark(self, layer: int, x: Tensor) -> None:
        """Note that a layer begins with `x`; the backward of the layer is done when the gradient of `x` is there."""
        self._note(layer)
        if x.requires_grad:
            # On a leaf, too: it is then the input of the whole stage.
            x.register_hook(lambda _: self._note(layer))

    def _note(self, layer: int) -> None:
        if self._actions and self._actions[-1].ended is None:
            self._actions[-1].marks.append((layer, self._now()))

    def _now(self) -> Moment:
        if self.pipeline.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Moment, end: Moment) -> float:
        return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3

    def _run_action(self, kind: str, microbatch: int, stage: int, run: Callable[[], Any]) -> Any:
        action = _Action(kind, microbatch, stage, [], self._now())
        self._actions.append(action)
        result = run()
        action.ended = self._now()
        return result

    def close_step(self) -> None:
        """Take in a step that has ended; call it after each."""
        if self.pipeline.device.type == "cuda":
            torch.cuda.synchronize(self.pipeline.device)
        forward: dict[tuple[int, int], dict[int, float]] = {}
        backward: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for action in self._actions:
            key = action.stage, action.microbatch
            if action.kind == "F":
                forward[key] = self._split_forward(action)
            else:
                for layer, seconds in self._split_backward(action, forward[key]).items():
                    backward[key][layer] += seconds
        split, rank = self.pipeline.split, self.pipeline.pp_rank
        self._order = [Action(rank, a.kind, a.microbatch, a.stage, 0.0, 0.0) for a in self._actions]
        layers = {stage: split.layers(stage) for stage, _ in forward}
        num_microbatches = len(forward) // max(1, len(layers))
        self._steps.append(
            _Step(
                self.pipeline.sizes,
                num_microbatches,
                _mean_by_layer(forward, layers, num_microbatches),
                _mean_by_layer(backward, layers, num_microbatches),
            )
        )
        self._actions.clear()
        self.num_steps += 1

    def _split_forward(self, action: _Action) -> dict[int, float]:
        """Share a forward's time out: each layer has it from its beginning to the next one's."""
        begins = [(self.pipeline.split.layers(action.stage)[0], action.started), *action.marks]
        ends = [moment for _, moment in begins[1:]] + [action.ended]
        times: dict[int, float] = defaultdict(float)
        for (layer, start), end in zip(begins, ends, strict=True):
            times[layer] += self._seconds(start, end)
        return times

    def _split_backward(self, action: _Action, forward: dict[int, float]) -> dict[int, float]:
        """Share out a backward's time: each layer has it from the end of the one above to its own."""
        layers = self.pipeline.split.layers(action.stage)
        if action.kind == "W" and action.stage > 0:  # on stage 0 torch postpones the whole backward to there
            return self._split_weights(action, forward)
        times: dict[int, float] = defaultdict(float)
        start, below = action.started, layers[-1]
        for layer, moment in action.marks:
            times[layer] += self._seconds(start, moment)
            start, below = moment, max(layers[0], layer - 1)
        times[below] += self._seconds(start, action.ended)
        return times

    def _split_weights(self, action: _Action, forward: dict[int, float]) -> dict[int, float]:
        """Share out the time of postponed gradients of weights, which torch computes in no order of layers.

        A gradient of weights takes as many operations as the forward with them, so trained layers share in proportion.
        """
        stage = next(stage for stage in self.pipeline.stages if stage.stage == action.stage)
        trained = {layer: forward.get(layer, 0.0) for layer in trained_layers(stage)}
        total = sum(trained.values())
        seconds = self._seconds(action.started, action.ended)
        if not total:
            return {self.pipeline.split.layers(action.stage)[-1]: seconds}
        return {layer: seconds * part / total for layer, part in trained.items()}

    def share(self, everyone: dist.ProcessGroup | None = None) -> LayerTimes:
        """Return the times of all layers; where several ranks run copies of a layer, the slowest copy's.

        Every micro-batch counts, the rare ones with many tiles too: a step lasts as long as all of them together. Steps
        of one shape should take equally long, so of those the median counts, which a hiccup of the machine leaves as it
        is; of steps of several shapes it is the mean.

        Args:
            everyone: all ranks that have stages of the model; None is all ranks there are.

        Raises:
            RuntimeError: if no step was measured.
        Communicates: one all-reduce of 24 bytes a layer and 8 more, over `everyone`; then one all-gather of objects
            over the pipeline, about 100 bytes an action of one step.
        """
        if not self.num_steps:
            raise RuntimeError(f"rank {dist.get_rank()}: no step was measured: run one between start and close_step")
        num_layers = self.pipeline.split.num_layers
        mine = torch.zeros(3 * num_layers + 1, dtype=torch.float64)
        for offset, steps in (
            (0, [(step.sizes, step.forward_s) for step in self._steps]),
            (num_layers, [(step.sizes, step.backward_s) for step in self._steps]),
        ):
            for layer in steps[0][1]:
                mine[offset + layer] = typical_s([(sizes, seconds[layer]) for sizes, seconds in steps])
        for layer in (layer for stage in self.pipeline.stages for layer in trained_layers(stage)):
            mine[2 * num_layers + layer] = 1
        mine[-1] = -sum(step.num_microbatches for step in self._steps)  # the largest of these is the fewest
        mine = mine.to(self.pipeline.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=everyone)
        *found, fewest = mine.tolist()
        forward_s, backward_s, trained = (tuple(found[n * num_layers :][:num_layers]) for n in range(3))
        order = tuple(tuple(of_rank) for of_rank in gather_actions(self._order, self.pipeline.group))
        return LayerTimes(forward_s, backward_s, round(-fewest), order, tuple(map(bool, trained)))


def _mean_by_layer(
    of_stages: Mapping[tuple[int, int], Mapping[int, float]], layers: Mapping[int, range], num_microbatches: int
) -> dict[int, float]:
    """Return the mean seconds of each layer over a step's micro-batches; what was not seen took none."""
    total = {layer: 0.0 for of_stage in layers.values() for layer in of_stage}
    for times in of_stages.values():
        for layer, seconds in times.items():
            total[layer] += seconds
    return {layer: seconds / num_microbatches for layer, seconds in total.items()}


def typical_s(steps: Sequence[tuple[tuple[int, ...], float]]) -> float:
    """Return what a step took on average: of steps of one shape their median, of different shapes the mean.

    Args:
        steps: the shape of each step, and its seconds.
    """
    of_shapes: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for sizes, seconds in steps:
        of_shapes[sizes].append(seconds)
    return sum(len(alike) * median(alike) for alike in of_shapes.values()) / len(steps)


def trained_layers(stage: VLMStage) -> list[int]:
    """Return the numbers of the layers of a stage that have trained parameters."""
    split, vision, language = stage.split, stage.vision, stage.language
    parts: dict[int, list[nn.Parameter]] = {layer: [] for layer in split.layers(stage.stage)}
    if stage.is_first:
        parts[0] = [p for name, p in vision.named_parameters() if not name.startswith("blocks.")]
    if stage.has_fusion:
        parts[split.fusion_layer] = [*stage.projector.parameters(), *language.embedding.parameters()]
    if stage.is_last:
        output = language.embedding if language.lm_head is None else language.lm_head
        parts[split.num_layers - 1] = [*language.norm.parameters(), *output.parameters()]
    for first, blocks, numbers in (
        (1, vision.blocks, split.vision_blocks(stage.stage)),
        (split.fusion_layer + 1, language.blocks, split.language_blocks(stage.stage)),
    ):
        parts |= {first + n: list(block.parameters()) for n, block in zip(numbers, blocks.children(), strict=True)}
    return [layer for layer, parameters in parts.items() if any(p.requires_grad for p in parameters)]
