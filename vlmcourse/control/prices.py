"""What a step costs: the planner's seconds and bytes for given samples, settings and state of the cluster.

Enters: a `Job` (model, device, link, ranks), `Settings`, the micro-batches of each data-parallel rank. Leaves: a
`StepPrice`. FLOPs, memory by owner, traffic and the alpha-beta link are `planner/`'s (`rates.py` asks it); `price_step`
is the one place that puts them together to a step. Chapter 7.

A step of ZeRO-1 exchanges gradients once, under the last micro-batch's backward; ZeRO-2 does it every micro-batch, as a
rank keeps only its part of them; ZeRO-3 gathers the weights in every forward and backward besides. What is longer than
the computing that hides it is exposed. ZeRO-2's updated weights are gathered under the first forward, as FSDP2 does it;
ZeRO-1's at the end of the step, where nothing hides it. Left out: what stages of a pipeline send each other, which is
less than a hundredth of their computing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vlmcourse.control.actions import Settings
from vlmcourse.control.rates import ByUnit, Job, StageRates, find_rates
from vlmcourse.planner.network import ring_messages

HALF_TOKENS = 400
"""Tokens of a micro-batch with which a device reaches half of its pace for large ones; an assumption."""
HIDING_FRACTION = 0.8
"""Of computing under which communication can run; an assumption."""
BALANCING_S = 0.04
"""For each step whose samples are dealt out by tokens: their sizes are exchanged, then the samples; an assumption."""


class Load(NamedTuple):
    """One micro-batch of one data-parallel rank."""

    num_tiles: int
    num_tokens: int
    """Of the language tower, image tokens included."""
    num_pairs: int
    """Each sample's tokens squared, added up."""


@dataclass(frozen=True)
class StepPrice:
    """One step of all ranks; those of one pipeline stand together, first stage first."""

    forward_s: list[float]
    """By rank."""
    backward_s: list[float]
    """By rank, recomputation included."""
    exposed_s: float
    """Communication that nothing hides, on every rank; waits for slower ranks and for other stages are not in it."""
    data_wait_s: float
    update_s: float
    peak_bytes: list[float]
    """By rank."""
    num_stages: int
    num_microbatches: int

    @property
    def step_s(self) -> float:
        """The pace of the slowest pipeline."""
        return self.passes_s(self.forward_s, self.backward_s) + self.exposed_s + self.data_wait_s + self.update_s

    def passes_s(self, forward_s: Sequence[float], backward_s: Sequence[float]) -> float:
        """Return the seconds of all forwards and backwards of the slowest pipeline, bubble included.

        Args:
            forward_s: by rank, as this price has it or as it was measured.
            backward_s: by rank.
        """
        work = [forward + backward for forward, backward in zip(forward_s, backward_s, strict=True)]
        count = self.num_stages
        return max(pipeline_s(work[at : at + count], self.num_microbatches) for at in range(0, len(work), count))


def pipeline_s(stages_s: Sequence[float], num_microbatches: int) -> float:
    """Return the seconds of one pipeline's step from those that each stage computes.

    One micro-batch goes through all stages; each of the others ends one pace of the slowest stage later. With equal
    stages that is the bubble of `planner.schedules.ideal_bubble_fraction` for 1f1b; with unequal ones the most that it
    takes if micro-batches are equal. One stage has no bubble.
    """
    return (sum(stages_s) + (num_microbatches - 1) * max(stages_s)) / num_microbatches


def rates_of(job: Job, settings: Settings) -> tuple[StageRates, ...]:
    """Return what the planner says of these settings, by stage."""
    return find_rates(
        job,
        settings.zero_stage,
        settings.recompute_vision,
        settings.recompute_language,
        settings.compress,
        settings.layers_per_stage,
    )


def estimate_peak_bytes(rates: StageRates, load: Load, fragmentation: float) -> float:
    """Return a rank's peak while this micro-batch is at work; a pipeline's others in flight are taken to be as large.

    Args:
        rates: of the rank's stage.
        load: the micro-batch.
        fragmentation: share of the activations that is lost to holes beside them.
    """
    tokens, tiles = load.num_tokens, max(1, load.num_tiles)  # a text alone is encoded with a blank tile
    activations = max(constant + token * tokens + tile * tiles for constant, token, tile in rates.activation_bytes)
    return rates.constant_bytes + activations * (1 + fragmentation)


def price_step(
    job: Job,
    settings: Settings,
    loads: Sequence[Sequence[Load]],
    slowness: Sequence[float],
    link_fraction: float,
    fragmentation: float,
) -> StepPrice:
    """Price one step.

    Args:
        job: the run.
        settings: in force.
        loads: by data-parallel rank, its micro-batches.
        slowness: by rank, how many times longer it computes than a healthy one.
        link_fraction: of the link's bandwidth that is there.
        fragmentation: as in `estimate_peak_bytes`.
    """
    stages = rates_of(job, settings)
    forward_s, backward_s, peaks = list[float](), list[float](), list[float]()
    for rank_loads in loads:
        tiles = tokens = pairs = 0.0
        for load in rank_loads:
            if load.num_tokens:
                below = (load.num_tokens + HALF_TOKENS) / load.num_tokens
                tiles += below * load.num_tiles
                tokens += below * load.num_tokens
                pairs += below * load.num_pairs
        largest = _find_largest(rank_loads)
        for rates in stages:
            slow = slowness[len(forward_s)]
            forward_s.append(slow * _seconds(rates.forward_s, tiles, tokens, pairs))
            backward_s.append(slow * _seconds(rates.backward_s, tiles, tokens, pairs))
            peaks.append(max(estimate_peak_bytes(rates, load, fragmentation) for load in largest))
    return StepPrice(
        forward_s,
        backward_s,
        max(
            _exposed_s(job, settings, rates, forward_s[at :: len(stages)], backward_s[at :: len(stages)], link_fraction)
            for at, rates in enumerate(stages)
        ),
        BALANCING_S if settings.balance == "tokens" else 0.0,
        max(rates.update_s for rates in stages),
        peaks,
        len(stages),
        settings.accumulation_steps,
    )


def _find_largest(loads: Sequence[Load]) -> list[Load]:
    """Return the micro-batches of which no other has at least as many tokens and as many tiles."""
    found: list[Load] = []
    most_tiles = -1
    for load in sorted(loads, key=lambda load: (-load.num_tokens, -load.num_tiles)):
        if load.num_tiles > most_tiles:
            most_tiles = load.num_tiles
            found.append(load)
    return found


def _seconds(rates: ByUnit, tiles: float, tokens: float, pairs: float) -> float:
    return rates[0] * tiles + rates[1] * tokens + rates[2] * pairs


def _exposed_s(
    job: Job,
    settings: Settings,
    rates: StageRates,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    link_fraction: float,
) -> float:
    """Return the communication of a step that no computing of this stage's slowest rank hides."""
    bandwidth, num_steps = job.link.bytes_per_s * link_fraction, settings.accumulation_steps
    latency_s = ring_messages("reduce-scatter", job.dp_degree) * job.link.latency_s
    reduce_s, gather_s = rates.reduce_bytes / bandwidth + latency_s, rates.gather_bytes / bandwidth + latency_s
    num_exchanges = 1 if settings.zero_stage == 1 else num_steps
    under_forward_s = HIDING_FRACTION * max(forward_s) / num_steps
    under_backward_s = HIDING_FRACTION * max(backward_s) / num_steps
    if settings.zero_stage == 3:
        exchange_s = max(0.0, reduce_s + gather_s - under_backward_s) + max(0.0, gather_s - under_forward_s)
    else:
        exchange_s = max(0.0, reduce_s - under_backward_s)
    once_s = {1: gather_s, 2: max(0.0, gather_s - under_forward_s), 3: 0.0}[settings.zero_stage]
    return num_exchanges * (exchange_s + rates.encode_s) + once_s
