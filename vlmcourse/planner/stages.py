"""Which layers stand on which stage of a pipeline, which rank runs which stage, and what a schedule asks for.

Enters: a model's shape and a number of stages. Leaves: a `StageSplit`, the stages of each rank, and a list of what is
wrong with a wish. The layers of a vision-language model, in the order in which data meets them: patch embedding, vision
blocks, fusion (projector and token embedding), language blocks, output (final norm and output matrix). Imports no
torch. What runs the stages is `parallel/pipeline.py`. Chapter 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from vlmcourse.presets import VLMShape


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order in which a rank runs forwards and backwards of micro-batches."""

    stages_per_rank: int
    v_shaped: bool = False
    """Whether the ranks' second stages stand in reverse order, so that the last rank's two are neighbours."""
    splits_backward: bool = False
    """Whether gradients of weights are computed later than those of activations, to fill the bubble."""
    source: str = ""


SCHEDULES = {
    "gpipe": Schedule(stages_per_rank=1, source="Huang et al. 2019 (arXiv:1811.06965)"),
    "1f1b": Schedule(stages_per_rank=1, source="Narayanan et al. 2019 (PipeDream), 2021 (arXiv:2104.04473)"),
    "interleaved": Schedule(stages_per_rank=2, source="Narayanan et al. 2021 (arXiv:2104.04473), section 2.2"),
    "zbv": Schedule(
        stages_per_rank=2, v_shaped=True, splits_backward=True, source="Qi et al. 2023 (arXiv:2401.10241), section 6"
    ),
    "dualpipev": Schedule(
        stages_per_rank=2, v_shaped=True, splits_backward=True, source="DeepSeek-AI 2024 (arXiv:2412.19437)"
    ),
}
"""The schedules that a pipeline can run, by the name that the configuration uses."""


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

    def layers(self, stage: int) -> range:
        """Return the numbers of a stage's layers, of all layers in order."""
        ends = list(accumulate(self.layers_per_stage))
        return range(ends[stage] - self.layers_per_stage[stage], ends[stage])

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

    @property
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
    return _split_at(shape, [cut + 1 if cut <= num_vision else cut + 2 for cut in cuts])


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
    return _split_at(shape, cuts)


def split_by_cost(shape: VLMShape, costs: Sequence[float], num_stages: int) -> StageSplit:
    """Find the split whose slowest stage is fastest; of those, the one with the least sum of squared costs.

    Exact: dynamic programming over (layers so far, stages so far), in stages x layers^2 steps.

    Args:
        shape: the model's shape.
        costs: of every layer in order, such as its forward and backward seconds; at least 0.
        num_stages: ranks of the pipeline x stages of a rank.

    Raises:
        ValueError: if there are not as many costs as layers, or fewer layers than stages.
    """
    num_layers = shape.vision.num_layers + shape.language.num_layers + 3
    if len(costs) != num_layers or min(costs) < 0 or not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"{len(costs)} costs, the least {min(costs, default=0)}, for {num_stages} stages: give the cost of each of "
            f"the {num_layers} layers, none below 0, and a stage for at most each of them"
        )
    slowest = best_cuts(costs, num_stages, limit=float("inf"), power=None)[0]
    return _split_at(shape, best_cuts(costs, num_stages, limit=slowest, power=2)[1])


def best_cuts(costs: Sequence[float], num_stages: int, limit: float, power: int | None) -> tuple[float, list[int]]:
    """Return the least possible value of a contiguous split, and its cuts: the layers at which later stages begin.

    Args:
        costs: of every layer in order, at least 0.
        num_stages: 1 .. number of layers; each stage gets a layer or more.
        limit: what a stage may cost.
        power: what is made small: the cost of the slowest stage (None), or the sum of the stages' costs to a power.
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
                found = max(value, cost) if power is None else value + cost**power
                if end not in after or found < after[end][0]:
                    after[end] = (found, [*cuts, end])
        best = after
    value, cuts = best[num_layers]
    return value, cuts[:-1]


def _split_at(shape: VLMShape, cuts: Sequence[int]) -> StageSplit:
    """Return the split whose stages begin at layer 0 and at each of `cuts`."""
    num_vision, num_language = shape.vision.num_layers, shape.language.num_layers
    edges = [0, *cuts, num_vision + num_language + 3]
    return StageSplit(
        num_vision_layers=num_vision,
        num_language_layers=num_language,
        layers_per_stage=tuple(end - start for start, end in zip(edges, edges[1:], strict=False)),
    )


def stages_of_rank(schedule: str, pp: int, pp_rank: int) -> tuple[int, ...]:
    """Return the stages that a rank of a pipeline runs, first to last.

    Args:
        schedule: one of `SCHEDULES`.
        pp: ranks of the pipeline.
        pp_rank: 0 .. pp - 1.
    """
    chosen = SCHEDULES[schedule]
    if chosen.v_shaped:
        return pp_rank, 2 * pp - 1 - pp_rank
    return tuple(pp_rank + pp * i for i in range(chosen.stages_per_rank))


def find_schedule_problems(
    schedule: str,
    *,
    pp: int,
    num_microbatches: int,
    data_strategy: str = "single",
    reshard_after_forward: bool = True,
) -> list[str]:
    """Return what is wrong with a pipeline, each with what to change; nothing if it can run.

    Args:
        schedule: how forwards and backwards are ordered.
        pp: ranks of the pipeline.
        num_microbatches: micro-batches of one optimizer step, which is `accumulation_steps`.
        data_strategy: what happens to each stage over the data-parallel ranks: single (nothing), ddp or fsdp.
        reshard_after_forward: with fsdp, whether gathered weights are freed after forward (ZeRO-3) or kept (ZeRO-2).
    """
    if schedule not in SCHEDULES:
        return [f"schedule {schedule!r} is unknown: choose one of {', '.join(SCHEDULES)}"]
    found = [] if pp >= 2 else [f"pp={pp}: a pipeline needs at least 2 ranks"]
    # As torch.distributed.pipelining states them; below these its schedules raise, or have no order to run.
    least = {"1f1b": pp, "dualpipev": 2 * pp}.get(schedule, 1)
    if num_microbatches < least:
        found.append(
            f"{num_microbatches} micro-batches with pp={pp}: {schedule} needs at least {least}; raise "
            "accumulation_steps or choose gpipe"
        )
    rounds = max(1, num_microbatches // max(pp, 1))
    if schedule == "interleaved" and num_microbatches % rounds:
        found.append(
            f"{num_microbatches} micro-batches with pp={pp}: interleaved runs them in {rounds} equal rounds of at "
            f"least {pp}; set accumulation_steps to a multiple of {pp}"
        )
    return found + _find_data_problems(schedule, data_strategy, reshard_after_forward)


def _find_data_problems(schedule: str, data_strategy: str, reshard_after_forward: bool) -> list[str]:
    if data_strategy not in ("single", "ddp", "fsdp"):
        return [f"data strategy {data_strategy!r} is unknown: choose single, ddp or fsdp"]
    if data_strategy == "ddp" and SCHEDULES[schedule].stages_per_rank > 1:
        return [
            f"{schedule} over ddp trains on wrong gradients in silence: torch's runtime of several stages a rank does "
            "not tell DDP which backward is the last; choose fsdp, or gpipe or 1f1b"
        ]
    if data_strategy == "fsdp" and reshard_after_forward and SCHEDULES[schedule].splits_backward:
        return [
            f"{schedule} over fsdp with reshard_after_forward leaves gradients out in silence: weights are gone when "
            "their postponed gradients are computed; set reshard_after_forward = false, or choose 1f1b or interleaved"
        ]
    return []


def check_schedule(
    schedule: str,
    *,
    pp: int,
    num_microbatches: int,
    data_strategy: str = "single",
    reshard_after_forward: bool = True,
) -> None:
    """Refuse a pipeline that cannot run, or would train on wrong gradients; see `find_schedule_problems`.

    Raises:
        ValueError: naming everything that is wrong.
    """
    found = find_schedule_problems(
        schedule,
        pp=pp,
        num_microbatches=num_microbatches,
        data_strategy=data_strategy,
        reshard_after_forward=reshard_after_forward,
    )
    if found:
        raise ValueError("This pipeline cannot run: " + "; ".join(found))


def ideal_bubble_fraction(schedule: str, pp: int, num_microbatches: int) -> float:
    """Return the share of a rank's time that it waits, with equal stages and messages that take no time.

    The time is that of the rank with the longest way from its first action to its last. Forward, gradients of
    activations and gradients of weights of a stage take equally long.

    Args:
        schedule: one of `SCHEDULES`.
        pp: ranks of the pipeline.
        num_microbatches: micro-batches of one optimizer step.
    Source: Narayanan et al. 2021, section 2.2 (gpipe, 1f1b, interleaved); Qi et al. 2023, section 6 (zbv, from 2 pp - 1
        micro-batches on); DeepSeek-AI, DualPipe, table of bubbles (dualpipev, forward and backward not overlapping).
    """
    idle, work = {
        "gpipe": (pp - 1, num_microbatches),
        "1f1b": (pp - 1, num_microbatches),
        "interleaved": (pp - 1, 2 * num_microbatches),
        "zbv": (0, num_microbatches),
        "dualpipev": (pp - 1, 3 * num_microbatches),
    }[schedule]
    return idle / (idle + work)
