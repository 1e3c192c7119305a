"""The fullest moment of a rank's step, by owner: one way of counting for every kind of run.

Enters: a `RankLoad`, what a rank holds and keeps, already divided by every kind of parallelism. Leaves: `Peak`s. Memory
is highest at one of these moments: when the output matrix's gradient is computed (all activations are there, logits
too); when the last layer of a tower goes backward, and is made again before, if it was not kept; at the end of backward
(all gradients); in the optimizer's step. `peak.py` makes loads of published runs, `run_peak.py` of this package's, and
`memory.py` of plans. Chapter 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

OWNERS = ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "temporary", "buffers", "fixed")


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What one rank has allocated at the fullest moment of a step."""

    stage: int
    """Rank of the pipeline."""
    moment: str
    """head; of each tower the layer that goes backward first, the tower's first layers, and the exchange of a layer's
    gradients ("language layer", "language, first layers", "language, exchange"); gradients; step."""
    owners: dict[str, int]
    """Bytes by owner, in the order of `OWNERS`; those that hold nothing are 0."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self.owners.values())


@dataclass(frozen=True, kw_only=True)
class TowerLoad:
    """Layers of one tower on one stage, for one micro-batch, in bytes."""

    name: str
    """vision or language."""
    stored: float
    """Kept from forward to backward."""
    temporary: float
    """Of one layer, or segment of layers, that goes backward: what is made again, and gradients of activations."""
    unit: float = 0.0
    """Gathered for the layer at work, and its whole gradient."""
    unit_after: float = 0.0
    """The same when the layer has gone backward: its whole gradient is then being exchanged."""
    share: float = 1.0
    """Part of the tower's layers here that is at work at once: one layer, or the longest segment."""
    gradients: float = 0.0
    """Of weights, when the tower has gone backward; as they are kept."""


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """One stage of a rank, for one micro-batch, in bytes."""

    towers: tuple[TowerLoad, ...]
    """In the order in which backward comes to them: language before vision."""
    ends: float = 0.0
    """Kept by what stands around the layers: patches, projector, embedding, final norm."""
    head_kept: float = 0.0
    """Kept by the loss, of the size of the logits; 0 without the output matrix."""
    head_temporary: float = 0.0
    """Most that exists of logits, copies and gradients of them beside that."""
    head_unit: float = 0.0
    """Gathered for the output matrix, and its whole gradient."""

    @property
    def stored(self) -> float:
        """Kept of one micro-batch until it goes backward."""
        return sum(tower.stored for tower in self.towers) + self.ends + self.head_kept


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """What one rank holds, in bytes."""

    stage: int
    """Rank of the pipeline."""
    weights: float
    gradients: float
    """When all are there."""
    optimizer: float
    stages: tuple[StageLoad, ...]
    """Of the pipeline, on this rank: one, or two under interleaved schedules."""
    in_flight: tuple[tuple[int, ...], ...] = ((1,),)
    """The fullest moments: micro-batches whose activations each of these stages holds."""
    num_microbatches: int = 0
    """Of a step: while all of these are held at once, none has left gradients; 0 is any number of them."""
    gradients_stay: bool = True
    """Whether gradients, or the buckets that they are in, are there before the first backward."""
    gradients_last: bool = False
    """Whether they come with the last micro-batch only: shards, where whole gradients are exchanged then."""
    always_stored: float = 0.0
    """Kept through forward and backward, whichever micro-batches are under way: the pictures of all of them."""
    gathered: float = 0.0
    """Whole weights and gradients that stay from forward to backward, beside the shards."""
    gathered_at_step: float = 0.0
    """Of those, what is still there in the optimizer's step."""
    buffers: float = 0.0
    """What communication keeps all the time."""
    late_gradients: float = 0.0
    """Whole gradients in 16 bits at the end of backward, beside those that are kept."""
    step_temporary: float = 0.0
    """Of the optimizer's step."""
    fixed: float = 0.0
    """Context, workspaces, fragmentation: what does not depend on the moment."""


def list_moments(load: RankLoad) -> list[Peak]:
    """Return what a rank has allocated at each moment of a step where that may be most."""
    return [_round(load, moment, owners) for moment, owners in _list_moments(load)]


def find_peak(load: RankLoad) -> Peak:
    """Return the fullest moment of a rank."""
    moment, owners = max(_list_moments(load), key=lambda found: sum(found[1].values()))
    return _round(load, moment, owners)


def most_stored(load: RankLoad) -> float:
    """Return the most bytes that a rank keeps for backward at once."""
    return max(_stored(load, held) for held in load.in_flight)


def _stored(load: RankLoad, held: tuple[int, ...]) -> float:
    return load.always_stored + sum(stage.stored * count for stage, count in zip(load.stages, held, strict=True))


def _list_moments(load: RankLoad) -> Iterator[tuple[str, dict[str, float]]]:
    always = {"weights": load.weights, "optimizer": load.optimizer, "buffers": load.buffers, "fixed": load.fixed}
    for held in load.in_flight:
        none_left = not load.gradients_stay and all(count == load.num_microbatches for count in held)
        is_first = none_left or load.gradients_last
        for moment, owners in _while_held(load, _stored(load, held), is_first):
            yield moment, always | owners
    after = always | {"gradients": load.gradients}
    yield "gradients", after | {"temporary": load.late_gradients, "gathered": load.gathered}
    yield "step", after | {"temporary": load.step_temporary, "gathered": load.gathered_at_step}


def _while_held(load: RankLoad, stored: float, is_first: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield what changes in the backward of one micro-batch on each stage of the rank; the first finds no gradients."""
    for stage in load.stages:
        left, back = stored, 0.0 if is_first else load.gradients
        if stage.head_temporary:
            left -= stage.head_kept
            logits = {"logits": stage.head_temporary + stage.head_kept, "gathered": load.gathered + stage.head_unit}
            yield "head", logits | {"gradients": back, "activations": left}
        for tower in stage.towers:
            grown = tower.gradients if is_first else 0.0
            at_work = {"temporary": tower.temporary, "gathered": load.gathered + tower.unit}
            others = 1 - tower.share
            yield f"{tower.name} layer", at_work | {"gradients": back, "activations": left}
            # Its first layers, at which backward comes last: the others have gone, and left their gradients.
            last = {"gradients": back + others * grown, "activations": left - others * tower.stored}
            yield f"{tower.name}, first layers", at_work | last
            exchanged = {"gathered": load.gathered + tower.unit_after}
            yield (
                f"{tower.name}, exchange",
                exchanged | {"gradients": back, "activations": left - tower.share * tower.stored},
            )
            left -= tower.stored
            back += grown


def _round(load: RankLoad, moment: str, owners: dict[str, float]) -> Peak:
    return Peak(stage=load.stage, moment=moment, owners={owner: round(owners.get(owner, 0)) for owner in OWNERS})
