"""Chapter 2's glue: ragged micro-batches, one deliberately wrong loss, looks at what accumulation costs.

Enters: what a cell of the chapter has at hand. Leaves: measurements as plain data that can travel from the ranks back
to the notebook. Everything that a run needs is in the package itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vlmcourse.data.collate import Collator
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import Batch, Sample
from vlmcourse.data.tokenizer import load_tokenizer
from vlmcourse.labs.ch01 import flat_gradient, relative_error
from vlmcourse.labs.chain import seconds_in_turns
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.monitor.activations import ActivationMeter
from vlmcourse.parallel.comm import sum_over_ranks
from vlmcourse.parallel.counting import CollectiveCounter
from vlmcourse.parallel.data import apply_ddp
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.parallel.sync import (
    estimate_waiting_bytes,
    find_exchanges,
    gradient_sync,
    measure_waiting_bytes,
    run_backward,
)
from vlmcourse.presets import get_model
from vlmcourse.train.accumulate import accumulate_gradients, micro_batch_loss_sum
from vlmcourse.train.trainer import Trainer
from vlmcourse.values import check_counts

MAX_SEQ_LEN = 256
NUM_TURNS = 4

# --- Ragged micro-batches -------------------------------------------------------------------------------------------


def ragged_samples(num_samples: int, seed: int = 0, period: int = 4) -> list[Sample]:
    """Return conversations of which runs of short ones (one question) and of long ones (four) take turns.

    Args:
        num_samples: how many.
        seed: of the pictures and questions.
        period: samples of a run; micro-batches of at most as many have very different numbers of supervised tokens.

    Raises:
        ValueError: if `num_samples` or `period` is below 1.
    """
    check_counts(1, num_samples=num_samples, period=period)
    short, long = (DigitsDataset(num_samples, seed, "train", num_turns=turns) for turns in (1, NUM_TURNS))
    return [(short if (i // period) % 2 == 0 else long)[i] for i in range(num_samples)]


def build_collator() -> Collator:
    """Return what turns samples into batches for the tiny model."""
    return Collator(load_tokenizer("builtin"), get_model("tiny"), MAX_SEQ_LEN)


def cut(samples: Sequence[Sample], collate: Collator, micro_batch_size: int) -> list[Batch]:
    """Return samples in micro-batches, in their order; ValueError if their size is below 1."""
    check_counts(1, micro_batch_size=micro_batch_size)
    starts = range(0, len(samples), micro_batch_size)
    return [collate(samples[start : start + micro_batch_size]) for start in starts]


def alone(ranks: Ranks) -> Ranks:
    """Return the place of a process that trains by itself, on the same device."""
    return Ranks(rank=0, local_rank=0, world_size=1, device=ranks.device, backend="none")


# --- The wrong loss, and where it leads -----------------------------------------------------------------------------


def mean_of_means(model: nn.Module, batches: Sequence[Batch], ranks: Ranks) -> float:
    """Add the gradients of `loss / steps`, micro-batch by micro-batch: wrong where these hold different numbers of
    supervised tokens.

    Returns:
        The mean of the means over all micro-batches and ranks.
    Communicates: DDP's exchange with the last micro-batch, and an all-reduce of 8 bytes.
    """
    total = 0.0
    for i, batch in enumerate(batches):
        with gradient_sync(model, enabled=i == len(batches) - 1):
            loss = micro_batch_loss_sum(model, batch.to(ranks.device), "fp32") / max(1, batch.num_supervised_tokens)
            (loss / len(batches)).backward()
        total += loss.item() / len(batches)
    return sum_over_ranks([total], ranks)[0] / ranks.world_size


@dataclass
class Drift:
    """Three runs of one model on the same samples: as one big batch, accumulated, and accumulated wrongly."""

    steps: list[int] = field(default_factory=list)
    """Optimizer steps done at each measurement."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Mean loss of all supervised tokens of samples that are not trained on, by run."""
    distances: dict[str, list[float]] = field(default_factory=dict)
    """Length of the difference to the big batch's weights over the length of these, by run."""


BIG, RIGHT, WRONG = "one big batch", "accumulated: sum / all tokens", "accumulated: mean of means"


def train_three_ways(
    ranks: Ranks,
    num_steps: int = 24,
    *,
    samples_per_step: int = 16,
    micro_batch_size: int = 2,
    learning_rate: float = 2e-3,
    measure_every: int = 3,
    on_measure: Callable[[Drift], None] | None = None,
) -> Drift:
    """Train three copies of the tiny model on ragged digit conversations; all ranks must call this.

    Args:
        ranks: this process's place; two copies are shared by all ranks, one is trained by each rank alone.
        num_steps: optimizer steps.
        samples_per_step: over all ranks.
        micro_batch_size: samples of one forward pass of the accumulated runs.
        learning_rate: of AdamW.
        measure_every: steps between measurements.
        on_measure: called after each measurement, on every rank.

    Raises:
        ValueError: if a number is below 1, or a step has fewer micro-batches than there are ranks.
    Communicates: the exchange of gradients of the two accumulated runs.
    """
    check_counts(1, num_steps=num_steps, samples_per_step=samples_per_step, micro_batch_size=micro_batch_size)
    check_counts(1, measure_every=measure_every)
    num_micro_batches = -(-samples_per_step // micro_batch_size)
    if num_micro_batches < ranks.world_size:  # a rank with none would not exchange gradients: the others would wait
        raise ValueError(
            f"samples_per_step = {samples_per_step} in micro-batches of {micro_batch_size} are {num_micro_batches} for "
            f"{ranks.world_size} ranks: each needs one; raise samples_per_step or lower micro_batch_size"
        )
    collate, shape = build_collator(), get_model("tiny")
    data = ragged_samples(num_steps * samples_per_step, period=micro_batch_size)
    probe = collate(ragged_samples(16, seed=1)).to(ranks.device)
    start = build_model(shape, seed=0).to(ranks.device)
    models: dict[str, nn.Module] = {
        BIG: copy.deepcopy(start),
        RIGHT: apply_ddp(copy.deepcopy(start), ranks),
        WRONG: apply_ddp(copy.deepcopy(start), ranks),
    }
    optimizers = {name: torch.optim.AdamW(model.parameters(), learning_rate) for name, model in models.items()}
    drift = Drift([], {name: [] for name in models}, {name: [] for name in (RIGHT, WRONG)})
    for step in range(num_steps):
        samples = data[step * samples_per_step : (step + 1) * samples_per_step]
        mine = cut(samples, collate, micro_batch_size)[ranks.rank :: ranks.world_size]
        for optimizer in optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        accumulate_gradients(models[BIG], [collate(samples)], alone(ranks), "fp32")
        accumulate_gradients(models[RIGHT], mine, ranks, "fp32")
        mean_of_means(models[WRONG], mine, ranks)
        for optimizer in optimizers.values():
            optimizer.step()
        if (step + 1) % measure_every == 0:
            _measure(drift, models, probe, step + 1)
            if on_measure is not None:
                on_measure(drift)
    return drift


@torch.no_grad()
def _measure(drift: Drift, models: dict[str, nn.Module], probe: Batch, step: int) -> None:
    drift.steps.append(step)
    expected = _flat_weights(models[BIG])
    for name, model in models.items():
        plain = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        drift.losses[name].append(micro_batch_loss_sum(plain, probe, "fp32").item() / probe.num_supervised_tokens)
        if name in drift.distances:
            drift.distances[name].append(relative_error(_flat_weights(plain), expected))


def _flat_weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


# --- What accumulation costs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCost:
    """One step's forward and backward passes, cut into micro-batches."""

    micro_batch_size: int
    num_micro_batches: int
    activation_bytes: int
    """The most that was kept for backward at once."""
    gradient_bytes: int
    seconds: float
    """The least of a few, taken in turns with the other cuts; see `seconds_in_turns`."""


def measure_cuts(num_samples: int, micro_batch_sizes: Sequence[int], repeats: int = 3) -> tuple[list[StepCost], float]:
    """Run the same samples through the tiny model in micro-batches of several sizes, in this process.

    Args:
        num_samples: of the step; all with four questions.
        micro_batch_sizes: each divides `num_samples`.
        repeats: passes of each cut, of which the fastest counts; the cuts take turns.

    Returns:
        The cost of each cut, and the largest relative difference between the gradients of two of them.

    Raises:
        ValueError: if a number is below 1, a size does not divide `num_samples`, or there is no size.
    """
    check_counts(1, num_samples=num_samples, repeats=repeats, num_sizes=len(micro_batch_sizes))
    for i, size in enumerate(micro_batch_sizes):
        check_counts(1, **{f"micro_batch_sizes[{i}]": size})
        if num_samples % size:
            raise ValueError(
                f"micro_batch_sizes[{i}] = {size}: must divide num_samples = {num_samples}; choose a divisor"
            )
    collate = build_collator()
    samples = DigitsDataset(num_samples, 0, "train", num_turns=NUM_TURNS)[:]
    place = alone(Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none"))
    found: list[tuple[int, int, int]] = []
    gradients: list[Tensor] = []
    turns: dict[Any, Any] = {}
    for number, size in enumerate(micro_batch_sizes):
        model, batches = build_model(get_model("tiny"), seed=0), cut(samples, collate, size)
        with ActivationMeter() as meter:
            accumulate_gradients(model, batches, place, "fp32")
        gradients.append(flat_gradient(model))
        found.append((len(batches), meter.peak_bytes, measure_waiting_bytes(model)))
        run = partial(accumulate_gradients, model, batches, place, "fp32")
        turns[number] = partial(model.zero_grad, set_to_none=True), run
    seconds = seconds_in_turns(turns, repeats)
    costs = [StepCost(size, *found[i], min(seconds[i])) for i, size in enumerate(micro_batch_sizes)]
    return costs, max(relative_error(gradient, gradients[0]) for gradient in gradients)


@dataclass(frozen=True)
class SyncRecord:
    """What one rank exchanged and held in the micro-batches of one step."""

    sent_bytes: list[float]
    """Of gradients, by micro-batch, if collectives run as rings."""
    all_sent_bytes: float
    """In all micro-batches, gradients and FSDP's gathers of weights."""
    held_bytes: list[int]
    """Of gradients, after each micro-batch."""
    estimated_bytes: int
    """Between micro-batches, from shapes alone."""


def record_sync(trainer: Trainer, never_off: bool = False) -> SyncRecord:
    """Run the micro-batches of a trainer's first step one by one; all ranks must call this.

    Args:
        trainer: of any strategy but a pipeline; its weights stay as they are.
        never_off: exchange gradients with every micro-batch, whatever the configuration says.
    """
    batches, model = trainer.load_step(0), trainer.model
    every = trainer.parallel.gradient_sync == "every"
    trainer.optimizer.zero_grad(set_to_none=True)
    sent, held, all_sent = [], [], 0.0
    for i, batch in enumerate(batches):
        is_on = never_off or i == len(batches) - 1
        with CollectiveCounter() as counter, gradient_sync(model, is_on, every):
            run_backward(model, micro_batch_loss_sum(model, batch.to(trainer.ranks.device), "fp32"))
        sent.append(sum(call.sent_bytes for call in find_exchanges(model, counter.calls)))
        all_sent += sum(call.sent_bytes for call in counter.calls)
        held.append(measure_waiting_bytes(model))
    trainer.optimizer.zero_grad(set_to_none=True)
    return SyncRecord(sent, all_sent, held, estimate_waiting_bytes(model, every))


def tiny_model() -> VLM:
    """Return the tiny model with the same weights in every process."""
    return build_model(get_model("tiny"), seed=0)
