"""Which layers of a model stand on which stage of a pipeline.

Enters: a model's shape, a number of stages and, where they were measured, the layers' costs. Leaves: a `StageSplit`.
The layers of a vision-language model, in the order in which data meets them: patch embedding, vision blocks, fusion
(projector and token embedding), language blocks, output (final norm and output matrix). Imports no torch. What cuts a
model accordingly is `parallel/stages.py`. Chapter 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from vlmcourse.planner.plan import Plan
from vlmcourse.presets import VLMShape


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """A contiguous assignment of layers to stages."""

    num_vision_layers: int
    num_language_layers: int
    layers_per_stage: tuple[int, ...]
    """How many layers each stage has, first stage first; see the module's docstring for what counts as a layer."""

    def __post_init__(self) -> None:
        if min(self.layers_per_stage, default=0) < 1 or sum(self.layers_per_stage) != self.num_layers:
            raise ValueError(
                f"layers_per_stage = {self.layers_per_stage}: each stage needs a layer, and together they must be the "
                f"{self.num_layers} layers (patches, {self.num_vision_layers} vision blocks, fusion, "
                f"{self.num_language_layers} language blocks, output)"
            )

    @property
    def num_layers(self) -> int:
        """All layers: the blocks of both towers and the three others."""
        return self.num_vision_layers + self.num_language_layers + 3

    @property
    def num_stages(self) -> int:
        """Stages, of which a rank may run several."""
        return len(self.layers_per_stage)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.layers_per_stage))

    def layers(self, stage: int) -> range:
        """Return the numbers of a stage's layers, of all layers in order."""
        return range(self._ends[stage] - self.layers_per_stage[stage], self._ends[stage])

    def vision_blocks(self, stage: int) -> range:
        """Return the numbers of the vision blocks on a stage."""
        return _overlap(self.layers(stage), 1, self.num_vision_layers)

    def language_blocks(self, stage: int) -> range:
        """Return the numbers of the language blocks on a stage."""
        return _overlap(self.layers(stage), self.num_vision_layers + 2, self.num_language_layers)

    @property
    def fusion_layer(self) -> int:
        """The number of the layer where image features meet the text."""
        return self.num_vision_layers + 1

    @cached_property
    def fusion_stage(self) -> int:
        """The stage with the projector and the token embedding; earlier ones hold vision only."""
        return next(stage for stage in range(self.num_stages) if self.fusion_layer in self.layers(stage))

    def describe(self, stage: int) -> str:
        """Return the layers of a stage in words, such as `patches, vision 0-3`."""
        parts = ["patches"] if 0 in self.layers(stage) else []
        parts += _named("vision", self.vision_blocks(stage))
        parts += ["projector and embedding"] if stage == self.fusion_stage else []
        parts += _named("language", self.language_blocks(stage))
        parts += ["norm and output"] if self.num_layers - 1 in self.layers(stage) else []
        return ", ".join(parts)

    def __str__(self) -> str:
        return "\n".join(f"stage {stage}: {self.describe(stage)}" for stage in range(self.num_stages))


def _overlap(layers: range, first: int, count: int) -> range:
    """Return which of `count` blocks, of which block 0 is layer `first`, are among `layers`."""
    start, stop = max(layers.start, first) - first, min(layers.stop, first + count) - first
    return range(start, max(start, stop))


def _named(tower: str, blocks: range) -> list[str]:
    if not blocks:
        return []
    return [f"{tower} {blocks[0]}" if len(blocks) == 1 else f"{tower} {blocks[0]}-{blocks[-1]}"]


@lru_cache(maxsize=1024)
def split_evenly(shape: VLMShape, num_stages: int) -> StageSplit:
    """Give every stage as many blocks as any other, or one fewer; blocks of both towers count alike.

    Patch embedding and output go with the first and last block, the fusion with the first language block.

    Args:
        shape: the model's shape.
        num_stages: ranks of the pipeline x stages of a rank.

    Raises:
        ValueError: if there are fewer blocks than stages.
    """
    num_vision, num_blocks = shape.vision.num_layers, shape.vision.num_layers + shape.language.num_layers
    if not 1 <= num_stages <= num_blocks:
        raise ValueError(f"{num_blocks} blocks cannot be split into {num_stages} stages: each needs at least one block")
    cuts = [num_blocks * stage // num_stages for stage in range(1, num_stages)]
    # Block b of all blocks is layer b + 1 in the vision tower and b + 2 behind the fusion; a cut exactly between the
    # towers leaves the fusion behind it.
    return split_at(shape, [cut + 1 if cut <= num_vision else cut + 2 for cut in cuts])


def find_split(plan: Plan, model: VLMShape) -> StageSplit:
    """Return what stands on the stages of a plan: the split that the trainer uses where nothing else is asked for.

    A plan of more stages than blocks, which `check_plan` refuses, is taken as one of a stage a block.

    Raises:
        ValueError: if `layers_per_stage` of the plan does not add up to the model's layers.
    """
    if plan.layers_per_stage:
        return StageSplit(
            num_vision_layers=model.vision.num_layers,
            num_language_layers=model.language.num_layers,
            layers_per_stage=plan.layers_per_stage,
        )
    return split_evenly(model, min(plan.pp, model.vision.num_layers + model.language.num_layers))


def vision_apart(shape: VLMShape, num_stages: int, num_vision_stages: int = 1) -> StageSplit:
    """Put the vision tower on stages of its own, and projector and language tower on the others, each split evenly.

    Raises:
        ValueError: if a tower has fewer blocks than stages.
    """
    num_language_stages = num_stages - num_vision_stages
    num_vision, num_language = shape.vision.num_layers, shape.language.num_layers
    if not 1 <= num_vision_stages <= num_vision or not 1 <= num_language_stages <= num_language:
        raise ValueError(
            f"{num_vision_stages} of {num_stages} stages for vision leave {num_language_stages} for language, but "
            f"there are {num_vision} vision and {num_language} language blocks: each stage needs at least one block"
        )
    cuts = [1 + num_vision * stage // num_vision_stages for stage in range(1, num_vision_stages + 1)]
    cuts += [num_vision + 2 + num_language * stage // num_language_stages for stage in range(1, num_language_stages)]
    return split_at(shape, cuts)


def split_by_cost(
    shape: VLMShape,
    costs: Sequence[float],
    num_stages: int,
    *,
    block_each: bool = False,
    output_apart: bool = False,
) -> StageSplit:
    """Find the split whose slowest stage is fastest; of those, the one with the least sum of squared costs.

    That is the pace of a pipeline with one stage a rank; its step can still be shorter with another split, see
    `parallel/best_split.py`. Exact: dynamic programming over (layers so far, stages so far), in stages x layers^2
    steps.

    Args:
        shape: the model's shape.
        costs: of every layer in order, such as its forward and backward seconds; at least 0.
        num_stages: ranks of the pipeline x stages of a rank.
        block_each: whether every stage needs a block of a tower, as FSDP does; patches, fusion or output alone are then
            no stage.
        output_apart: whether fusion and output must be on two stages, as `find_tied_problem` asks of some.

    Raises:
        ValueError: if there are not as many costs as layers, or fewer layers (or blocks) than stages.
    """
    num_layers = shape.vision.num_layers + shape.language.num_layers + 3
    if len(costs) != num_layers or min(costs) < 0 or not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"{len(costs)} costs, the least {min(costs, default=0)}, for {num_stages} stages: give the cost of each of "
            f"the {num_layers} layers, none below 0, and a stage for at most each of them"
        )
    may_be_stage = stage_rule(shape, num_stages, block_each=block_each, output_apart=output_apart)
    slowest = best_cuts(costs, num_stages, float("inf"), None, may_be_stage)[0]
    return split_at(shape, best_cuts(costs, num_stages, slowest, 2, may_be_stage)[1])


def stage_rule(
    shape: VLMShape, num_stages: int, *, block_each: bool = False, output_apart: bool = False
) -> Callable[[int, int], bool]:
    """Return what tells whether the layers from a first to before an end may be a stage; see `split_by_cost`.

    Raises:
        ValueError: if every stage needs a block and there are too few.
    """
    if block_each:
        split_evenly(shape, num_stages)  # raises where there are too few blocks
    fusion, num_layers = shape.vision.num_layers + 1, shape.vision.num_layers + shape.language.num_layers + 3

    def may_be_stage(start: int, end: int) -> bool:
        has_block = end > start + 1 or start not in (0, fusion, num_layers - 1)
        return (has_block or not block_each) and not (output_apart and start <= fusion and end == num_layers)

    return may_be_stage


def best_cuts(
    costs: Sequence[float],
    num_stages: int,
    limit: float,
    power: int | None,
    may_be_stage: Callable[[int, int], bool] = lambda start, end: True,
) -> tuple[float, list[int]]:
    """Return the least possible value of a contiguous split, and its cuts: the layers at which later stages begin.

    Args:
        costs: of every layer in order, at least 0.
        num_stages: 1 .. number of layers; each stage gets a layer or more.
        limit: what a stage may cost.
        power: what is made small: the cost of the slowest stage (None), or the sum of the stages' costs to a power.
        may_be_stage: whether the layers from a first to before an end may be a stage.
    """
    total = [0.0, *accumulate(costs)]
    num_layers = len(costs)
    # Rounding must not forbid the very split whose slowest stage is the limit: its sum is computed alike.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(num_stages):
        after: dict[int, tuple[float, list[int]]] = {}
        for start, (value, cuts) in best.items():
            for end in range(start + 1, num_layers + 1):
                cost = total[end] - total[start]
                if cost > limit:
                    break
                if not may_be_stage(start, end):
                    continue
                found = max(value, cost) if power is None else value + cost**power
                if end not in after or found < after[end][0]:
                    after[end] = (found, [*cuts, end])
        best = after
    value, cuts = best[num_layers]
    return value, cuts[:-1]


def split_at(shape: VLMShape, cuts: Sequence[int]) -> StageSplit:
    """Return the split whose stages begin at layer 0 and at each of `cuts`."""
    num_vision, num_language = shape.vision.num_layers, shape.language.num_layers
    edges = [0, *cuts, num_vision + num_language + 3]
    return StageSplit(
        num_vision_layers=num_vision,
        num_language_layers=num_language,
        layers_per_stage=tuple(end - start for start, end in zip(edges, edges[1:], strict=False)),
    )
