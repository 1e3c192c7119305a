"""A dry run of a deep model from three shallow ones: bytes, FLOPs and collectives are linear in the layers of a tower.

Enters: what `run.dry_run` takes. Leaves: a `DryRun` of the full depth. Played are models with the fewest layers in
which a tower has a first, a middle and a last one, and with one more layer in one tower at a time. Every moment of a
step has its counterpart in each of them: the same operation in the same kind of layer. What lives there is then a
linear function of the depth of each tower and, in the middle of a tower, of the layer's place: four numbers, which the
three models give. The peak may so be at another moment than in a shallow model. Chapter 7.

It holds where layers of a tower are alike: not with recomputation of every second layer, for example, which is refused.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from vlmcourse.config import TrainConfig
from vlmcourse.dryrun.batch import BatchSize
from vlmcourse.dryrun.ledger import Moment
from vlmcourse.dryrun.result import Collective, DryRun, PlayedStep, place_of, sum_calls, summarise
from vlmcourse.dryrun.run import Setting, count_own_elements, play_step, prepare
from vlmcourse.dryrun.world import played_rank
from vlmcourse.parallel.mesh import find_place
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.recompute import RECOMPUTING_TOWERS
from vlmcourse.values import ConfigError

TOWERS = ("vision", "language")
ALIKE = ("none", "full", "selective")
"""Policies of recomputation that treat every layer of a tower alike."""
Run = tuple[str, str, int, int]
"""A stretch of moments in one place: phase, layer, micro-batch, and the how-manieth in that place."""
Term = tuple[int, Sequence[Moment]]
"""A factor and the moments of one stretch in one played model."""


def extrapolate_run(
    config: TrainConfig,
    rank: int,
    world_size: int,
    *,
    shape: VLMShape | None = None,
    size: BatchSize | None = None,
) -> DryRun:
    """Return what `dry_run` would, from models of a few layers; arguments, errors and traffic as there.

    Of a `DryRun` it lacks the single calls; `moments` has one a layer, phase and micro-batch. Under ddp the number of
    all-reduces is about right, their bytes are exact.

    Raises:
        ConfigError: also if layers of a tower are not recomputed alike.
    """
    started_s = time.perf_counter()
    shape = shape or get_model(config.model.preset)
    parallel, size = prepare(config, world_size, shape, size)
    _check_alike(config)
    depths = Depths.of(shape, parallel.prefetch)
    with played_rank(rank, world_size) as ranks:
        setting = Setting(config, parallel, ranks, find_place(parallel, ranks, shape), size)
        played = [play_step(setting, with_depth(shape, *depth)) for depth in depths.played()]
        merged = merge(played, depths)
        if parallel.strategy == "zero1":
            merged = _share_state(merged, setting, shape, depths)
    return summarise(
        merged,
        setting.place,
        shape,
        size,
        is_full_depth=False,
        seconds=time.perf_counter() - started_s,
        collectives=merge_calls([sum_calls(step.calls) for step in played], depths),
    )


def with_depth(shape: VLMShape, num_vision_layers: int, num_language_layers: int) -> VLMShape:
    """Return a shape with as many layers in its towers."""
    vision = dataclasses.replace(shape.vision, num_layers=num_vision_layers)
    return dataclasses.replace(
        shape, vision=vision, language=dataclasses.replace(shape.language, num_layers=num_language_layers)
    )


def _check_alike(config: TrainConfig) -> None:
    policies = {tower: getattr(config.activations, tower) for tower in RECOMPUTING_TOWERS}
    found = [
        f"activations.{tower} = {policy!r}: it treats neighbors differently, so a few layers do not tell what "
        f"all need; play the full depth (--full-depth), or choose one of {', '.join(ALIKE)}"
        for tower, policy in policies.items()
        if policy not in ALIKE
    ]
    if found:
        raise ConfigError("The dry run at small depths", found)


@dataclass(frozen=True)
class Depths:
    """How many layers vision and language tower have, in full and in the models that are played."""

    full: tuple[int, int]
    base: tuple[int, int]
    ends: int
    """Layers at either end of a tower that are not like those in the middle: what they prefetch is other."""

    @classmethod
    def of(cls, shape: VLMShape, prefetch: int) -> Depths:
        """Choose the models to play; a tower that is shallow anyway is played as it is."""
        full, ends = (shape.vision.num_layers, shape.language.num_layers), max(1, prefetch)
        return cls(full, (min(full[0], 2 * ends + 1), min(full[1], 2 * ends + 1)), ends)

    @property
    def missing(self) -> tuple[int, int]:
        """Layers that the base model lacks."""
        return self.full[0] - self.base[0], self.full[1] - self.base[1]

    def played(self) -> list[tuple[int, int]]:
        """Return the depths to play: the base, and one layer more in each tower that lacks some."""
        deeper = [(self.base[0] + 1, self.base[1]), (self.base[0], self.base[1] + 1)]
        return [self.base] + [depth for depth, missing in zip(deeper, self.missing, strict=True) if missing]

    def factors(self) -> list[int]:
        """Return what each played model counts for what has one value a model."""
        more = [missing for missing in self.missing if missing]
        return [1 - sum(more), *more]


def merge(played: Sequence[PlayedStep], depths: Depths) -> PlayedStep:
    """Return the step of the full depth, without its calls.

    Args:
        played: of the models of `depths.played()`, in their order.
        depths: which these are.
    """
    runs = [_split(step.moments) for step in played]
    moments = []
    for run in runs[0]:
        moments += _extend(run, runs, depths)
    flops = sum(factor * step.flops for factor, step in zip(depths.factors(), played, strict=True))
    return PlayedStep(tuple(moments), (), flops)


def merge_calls(played: Sequence[Sequence[Collective]], depths: Depths) -> tuple[Collective, ...]:
    """Return the sums of collectives of the full depth; arguments as in `merge`."""
    calls: Counter[tuple[str, str, int]] = Counter()
    sizes: Counter[tuple[str, str, int]] = Counter()
    for factor, collectives in zip(depths.factors(), played, strict=True):
        for one in collectives:
            key = one.kind, one.axis, one.num_ranks
            calls[key] += factor * one.calls
            sizes[key] += factor * one.payload_bytes
    found = [Collective(*key, max(1, calls[key]), size) for key, size in sizes.items()]
    return tuple(sorted(found, key=lambda collective: -collective.payload_bytes))


def _split(moments: Sequence[Moment]) -> dict[Run, list[Moment]]:
    """Cut a step into its stretches, in their order."""
    seen: Counter[tuple[str, str, int]] = Counter()
    runs: dict[Run, list[Moment]] = {}
    for place, stretch in groupby(moments, key=place_of):
        runs[*place, seen[place]] = list(stretch)
        seen[place] += 1
    return runs


def _extend(run: Run, runs: Sequence[dict[Run, list[Moment]]], depths: Depths) -> list[Moment]:
    """Return the fullest moment at full depth of one stretch of the base model; of a middle layer, of all of them."""
    tower, index = _block_of(run[1])
    if tower is None:
        return [_combine(run[1], [(f, _find(r, run)) for f, r in zip(depths.factors(), runs, strict=True)])]
    num_base, num_full, ends = depths.base[tower], depths.full[tower], depths.ends
    if index >= num_base - ends and num_base < num_full:  # counted from the end
        terms = []
        for factor, (depth, of_model) in zip(depths.factors(), zip(depths.played(), runs, strict=True), strict=True):
            terms.append((factor, _find(of_model, _at(run, tower, index - num_base + depth[tower]))))
        return [_combine(_name(tower, index - num_base + num_full), terms)]
    is_middle = index == ends and num_base < num_full
    found = []
    for place in range(ends, num_full - ends) if is_middle else (index,):
        terms = [(f, _find(r, run)) for f, r in zip(depths.factors(), runs, strict=True)]
        if is_middle:  # one layer on in the model with one more: what a place in the tower makes out
            deeper = next(i for i, depth in enumerate(depths.played()) if depth[tower] > num_base)
            on = place - index
            terms[deeper] = terms[deeper][0] - on, terms[deeper][1]
            terms.append((on, _find(runs[deeper], _at(run, tower, index + 1))))
        found.append(_combine(_name(tower, place), terms))
    backwards = run[0] == "backward"
    return found[::-1] if backwards else found


def _combine(layer: str, terms: Sequence[Term]) -> Moment:
    """Add moments up with factors, operation by operation, and return the fullest sum.

    Where the models made different numbers of operations, such as an optimizer's one by one, their fullest are taken.
    """
    lengths = {len(moments) for _, moments in terms}
    if len(lengths) > 1:
        terms = [(factor, [max(moments, key=lambda moment: moment.total_bytes)]) for factor, moments in terms]
    best: Moment | None = None
    for together in zip(*(moments for _, moments in terms), strict=True):
        live: Counter[str] = Counter()
        for (factor, _), moment in zip(terms, together, strict=True):
            for owner, size in moment.live_bytes.items():
                live[owner] += factor * size
        first = together[0]
        held = {owner: size for owner, size in live.items() if size > 0}
        moment = Moment(first.phase, layer, first.micro_batch, held)
        if best is None or moment.total_bytes > best.total_bytes:
            best = moment
    assert best is not None
    return best


def _find(runs: dict[Run, list[Moment]], run: Run) -> list[Moment]:
    if run not in runs:
        raise RuntimeError(
            f"a deeper model has no {run[0]} in {run[1] or 'no layer'} of micro-batch {run[2]} ({run[3]}), which a "
            "shallower one has: their steps are not alike, and the full depth must be played (--full-depth)"
        )
    return runs[run]


def _block_of(layer: str) -> tuple[int | None, int]:
    """Return the number of the tower, and of the block in it; None for what is no block."""
    tower, is_block, number = layer.partition(".blocks.")
    return (TOWERS.index(tower), int(number)) if is_block else (None, 0)


def _name(tower: int, index: int) -> str:
    return f"{TOWERS[tower]}.blocks.{index}"


def _at(run: Run, tower: int, index: int) -> Run:
    return run[0], _name(tower, index), run[2], run[3]


def _share_state(merged: PlayedStep, setting: Setting, shape: VLMShape, depths: Depths) -> PlayedStep:
    """Put in the optimizer state that this rank has of the whole model: ZeRO-1 deals whole parameters out by size."""
    counted = [count_own_elements(setting, with_depth(shape, *depth)) for depth in depths.played()]
    linear = sum(factor * count for factor, count in zip(depths.factors(), counted, strict=True))
    ratio = count_own_elements(setting, shape) / linear
    moments = [
        dataclasses.replace(m, live_bytes={**m.live_bytes, "optimizer": round(m.live_bytes["optimizer"] * ratio)})
        if "optimizer" in m.live_bytes
        else m
        for m in merged.moments
    ]
    return dataclasses.replace(merged, moments=tuple(moments))
