"""What a dry run found: bytes by owner over the step, collectives by axis, FLOPs.

Enters: what was seen of a played step. Leaves: a `DryRun`, which knows its peak and turns into plain data for JSON.
Chapter 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from vlmcourse.dryrun.batch import BatchSize
from vlmcourse.dryrun.ledger import OWNERS, Moment
from vlmcourse.parallel.mesh import Place
from vlmcourse.planner.memory import ALLOWANCE_BYTES
from vlmcourse.planner.network import RING_PASSES, ring_sent_bytes
from vlmcourse.presets import VLMShape


@dataclass(frozen=True)
class Call:
    """One collective of the played step."""

    kind: str
    axis: str
    """Of the mesh, or "all ranks"."""
    num_ranks: int
    payload_bytes: int
    """The whole tensor, counted once."""
    times: int = 1
    """How often the step makes it: more than once in a micro-batch that stands for several alike."""


@dataclass(frozen=True)
class PlayedStep:
    """What was seen of a step, before anything is summed up."""

    moments: tuple[Moment, ...]
    calls: tuple[Call, ...]
    flops: int


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind on one axis in one step."""

    kind: str
    axis: str
    num_ranks: int
    calls: int
    payload_bytes: int
    """Whole tensors, each counted once."""

    @property
    def sent_bytes(self) -> float:
        """What this rank sends if each runs as a ring; all of it for a message, nothing for what only receives."""
        if self.kind in RING_PASSES:
            return ring_sent_bytes(self.kind, self.payload_bytes, self.num_ranks)
        return float(self.payload_bytes) if self.kind == "send" else 0.0


@dataclass(frozen=True)
class DryRun:
    """One optimizer step of one rank."""

    rank: int
    world_size: int
    coordinates: dict[str, int]
    """Of the rank on each axis of the mesh."""
    model: str
    num_vision_layers: int
    num_language_layers: int
    size: BatchSize
    is_full_depth: bool
    """Whether all layers were played; else two small depths of each tower were, and bytes are linear in both."""
    moments: tuple[Moment, ...]
    """At full depth all of them; else one a layer and phase, the fullest."""
    calls: tuple[Call, ...]
    """In the order in which they were made; empty where not all layers were played."""
    collectives: tuple[Collective, ...]
    flops: int
    """Of this rank in the whole step, recomputation included; matrix products and attention alone."""
    seconds: float
    """That the dry run took."""
    allowance_bytes: int = ALLOWANCE_BYTES
    """What no tensor holds and is kept free besides the peak: CUDA context, NCCL's buffers, cuBLAS's workspace,
    fragmentation."""

    @property
    def peak(self) -> Moment:
        """The first moment with the most bytes alive."""
        return max(self.moments, key=lambda moment: moment.total_bytes)

    @property
    def resting_bytes(self) -> int:
        """Weights and optimizer state between two steps, when gradients are gone; buckets of DDP stay."""
        return self.moments[0].total_bytes

    @property
    def device_bytes(self) -> int:
        """The peak and the allowance: what a device should have."""
        return self.peak.total_bytes + self.allowance_bytes

    def course(self) -> list[Moment]:
        """Return the fullest moment of each stretch of the step: one a phase, layer and micro-batch, in their order."""
        return fullest(self.moments)

    def to_json(self) -> dict[str, Any]:
        """Return plain data: everything but single moments and calls, of which the course and sums remain."""
        peak = self.peak
        return {
            **{name: getattr(self, name) for name in ("rank", "world_size", "coordinates", "model", "is_full_depth")},
            "layers": {"vision": self.num_vision_layers, "language": self.num_language_layers},
            "micro_batch": dataclasses.asdict(self.size),
            "peak": {"total_bytes": peak.total_bytes, **_plain(peak)},
            "allowance_bytes": self.allowance_bytes,
            "flops": self.flops,
            "collectives": [
                dataclasses.asdict(collective) | {"sent_bytes": round(collective.sent_bytes)}
                for collective in self.collectives
            ],
            "course": [_plain(moment) for moment in self.course()],
            "seconds": round(self.seconds, 2),
        }


def _plain(moment: Moment) -> dict[str, Any]:
    found = {name: getattr(moment, name) for name in ("phase", "layer", "micro_batch")}
    return found | {"bytes": {owner: moment.live_bytes.get(owner, 0) for owner in OWNERS}}


def fullest(moments: Iterable[Moment]) -> list[Moment]:
    """Return the fullest of neighbouring moments in the same place."""
    stretches = groupby(moments, key=place_of)
    return [max(stretch, key=lambda moment: moment.total_bytes) for _, stretch in stretches]


def place_of(moment: Moment) -> tuple[str, str, int]:
    """Return where in the step a moment is: phase, layer, micro-batch."""
    return moment.phase, moment.layer, moment.micro_batch


def sum_calls(calls: Sequence[Call]) -> tuple[Collective, ...]:
    """Add up calls by kind and axis, the largest payload first."""
    sums: dict[tuple[str, str, int], tuple[int, int]] = {}
    for call in calls:
        key = call.kind, call.axis, call.num_ranks
        number, size = sums.get(key, (0, 0))
        sums[key] = number + call.times, size + call.times * call.payload_bytes
    found = [Collective(*key, *numbers) for key, numbers in sums.items()]
    return tuple(sorted(found, key=lambda collective: -collective.payload_bytes))


def summarise(
    played: PlayedStep,
    place: Place,
    shape: VLMShape,
    size: BatchSize,
    *,
    is_full_depth: bool,
    seconds: float,
    collectives: tuple[Collective, ...] | None = None,
) -> DryRun:
    """Turn what was seen into a `DryRun`; `collectives` are the sums of the played calls where none are given."""
    return DryRun(
        place.rank,
        place.layout.world_size,
        place.layout.coordinates(place.rank),
        shape.name,
        shape.vision.num_layers,
        shape.language.num_layers,
        size,
        is_full_depth,
        played.moments,
        played.calls,
        sum_calls(played.calls) if collectives is None else collectives,
        played.flops,
        seconds,
    )
