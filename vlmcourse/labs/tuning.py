"""From naive to tuned: one change at a time to the same training, each measured beside the others on the same ranks.

Enters: ranks that have met. Leaves: a `Tuned` row a variant, its speed and the fullest moment of its fullest rank. All
variants train the same model on the same samples in steps of the same size, so that their losses can be compared too.
Chapter 7.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.labs.zero_stages import close, show_running
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.ledger import StepLedger
from vlmcourse.parallel.fewer_ranks import Regrouping
from vlmcourse.parallel.ranks import Ranks, init_ranks
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.train.trainer import Trainer
from vlmcourse.values import check_counts

GLOBAL_BATCH = 8
"""Samples of an optimizer step in every variant."""
MAX_SEQ_LEN = 512
"""Tokens that a sample may have, and that the naive run pads every row to; those of the digits have about 90."""
NUM_LAYERS = 4
"""Of each tower."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A run that is measured."""

    change: str
    """What was changed to the variant before, in a few words."""
    num_ranks: int = 1
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of the run's configuration, by dotted name."""
    eager_attention: bool = False
    """Write the scores of all pairs of positions to memory, as attention spelled out in Python does."""
    pads_to_longest_allowed: bool = False
    """Pad every row to `MAX_SEQ_LEN`, not to the longest row of its micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What one variant does on these ranks."""

    change: str
    num_ranks: int
    tokens_per_s: float
    """Of all ranks together, padding not counted."""
    tokens_per_cpu_s: float
    """The same over the CPU seconds of the rank that had most: without what it waited for others and other programs.
    On a GPU it says nothing."""
    owners: Mapping[str, int]
    """Bytes by owner of a `StepLedger` at the fullest moment of a step, on the rank that has most then."""
    loss: float
    """Of the last timed step."""

    @property
    def peak_bytes(self) -> int:
        """All owners together: weights, gradients, optimizer, activations, the rest."""
        return sum(self.owners.values())


def tuning_steps() -> list[Variant]:
    """Return the way from a naive run to a tuned one, each variant with the changes of those before it."""
    bf16 = {"train.precision": "bf16"}
    split = bf16 | {"train.micro_batch_size": GLOBAL_BATCH // 2}
    return [
        Variant(change="naive", eager_attention=True, pads_to_longest_allowed=True),
        Variant(change="fused attention", pads_to_longest_allowed=True),
        Variant(change="rows as long as the longest"),
        Variant(change="bf16 autocast", settings=bf16),
        Variant(change="2 ranks, ddp", num_ranks=2, settings=split | {"parallel.strategy": "ddp"}),
    ]


def memory_trades() -> list[Variant]:
    """Return what could follow the last of `tuning_steps`, each by itself: less memory for a slower step."""
    end = tuning_steps()[-1]
    settings = {
        "+ state split, zero2": {"parallel.strategy": "zero2"},
        "+ 2 micro-batches": {"train.micro_batch_size": GLOBAL_BATCH // 4, "train.accumulation_steps": 2},
        "+ blocks recomputed": {"activations.vision": "full", "activations.language": "full"},
    }
    return [
        dataclasses.replace(end, change=change, settings={**end.settings, **more}) for change, more in settings.items()
    ]


def tuned_shape() -> VLMShape:
    """Return the small preset with `NUM_LAYERS` layers in each tower: real widths, and a step takes seconds."""
    small = get_model("small")
    towers = {name: dataclasses.replace(getattr(small, name), num_layers=NUM_LAYERS) for name in ("vision", "language")}
    return dataclasses.replace(small, name=f"small, {NUM_LAYERS} layers a tower", **towers)


def measure_tuning(
    variants: Sequence[Variant] = (),
    num_turns: int = 2,
    num_steps: int = 1,
    ranks: Ranks | None = None,
    shape: VLMShape | None = None,
) -> list[Tuned]:
    """Train each variant on the ranks at hand and measure its speed and its peak; all ranks must call this.

    In each turn every variant is built anew and makes a step to warm up, then `num_steps` timed ones, then one whose
    bytes are counted; variants follow each other, so that a busy machine slows them all.

    Args:
        variants: by default `tuning_steps()` and `memory_trades()`.
        num_turns: of which medians are taken, 1 or more.
        num_steps: timed steps of each variant in each turn, 1 or more.
        ranks: this process's place; by default what `init_ranks` finds.
        shape: of the model; by default `tuned_shape()`.

    Returns:
        A row a variant, the same on every rank.

    Raises:
        ValueError: if a number is out of range, two variants have one name, one needs more ranks than there are, or
            its steps are not of `GLOBAL_BATCH` samples.
        RuntimeError: on a rank that waited for others that failed.
    Communicates: what the runs do; the process group is left and joined again for each run.
    """
    variants = list(variants) or [*tuning_steps(), *memory_trades()]
    ranks, shape = ranks or init_ranks(timeout_s=120), shape or tuned_shape()
    check_counts(1, num_turns=num_turns, num_steps=num_steps)
    _check(variants, ranks)
    found: dict[str, list[Tuned]] = {variant.change: [] for variant in variants}
    with Regrouping(ranks) as regrouping, show_running(ranks) as show:
        for turn in range(num_turns):
            for variant in variants:
                show(f"turn {turn + 1} of {num_turns}: {variant.change}")
                with regrouping.only(variant.num_ranks) as few:
                    if few is not None:
                        found[variant.change].append(_measure(variant, few, shape, num_steps))
    rows = [_middle(turns) for turns in found.values() if turns]  # rank 0 takes part in every run
    if ranks.world_size > 1:
        shared: list[Any] = [rows]
        dist.broadcast_object_list(shared)
        rows = shared[0]
    return rows


def configure(variant: Variant) -> TrainConfig:
    """Return the run of a variant."""
    table = {
        "data": {"max_seq_len": MAX_SEQ_LEN, "num_train_samples": 64, "num_eval_samples": 1},
        "train": {"num_steps": 100, "micro_batch_size": GLOBAL_BATCH},
        "optimizer": {"warmup_steps": 0},
        "parallel": {"strategy": "single"},
    }
    return parse_config(table, variant.settings)


def _check(variants: Sequence[Variant], ranks: Ranks) -> None:
    """Refuse what cannot be compared, before the first run."""
    names = [variant.change for variant in variants]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two variants are called {doubled[0]!r}: a row is known by its name; give each its own")
    for variant in variants:
        if variant.num_ranks > ranks.world_size:
            raise ValueError(
                f"{variant.change!r} needs {variant.num_ranks} ranks, and {ranks.world_size} were started: start "
                f"{variant.num_ranks} or more"
            )
        train = configure(variant).train
        samples = train.micro_batch_size * train.accumulation_steps * variant.num_ranks
        if samples != GLOBAL_BATCH:
            raise ValueError(
                f"{variant.change!r}: a step has {train.micro_batch_size} x {train.accumulation_steps} x "
                f"{variant.num_ranks} = {samples} samples, and {GLOBAL_BATCH} in every variant: change its micro-batch "
                "size or its accumulation"
            )


def _measure(variant: Variant, ranks: Ranks, shape: VLMShape, num_steps: int) -> Tuned:
    with _open(variant, ranks, shape) as trainer:
        trainer.train_step()  # from now on there are moments, which the first forward and backward do without
        started_s, busy_s = time.perf_counter(), time.process_time()
        reports = [trainer.train_step() for _ in range(num_steps)]
        seconds, busy_s = time.perf_counter() - started_s, time.process_time() - busy_s
        with StepLedger(trainer.model, trainer.optimizer) as ledger:  # slows each operation down
            trainer.train_step()
    of_ranks: list[Any] = [(ledger.peak().by_owner(), busy_s)]
    if ranks.world_size > 1:
        of_ranks = [None] * ranks.world_size
        dist.all_gather_object(of_ranks, (ledger.peak().by_owner(), busy_s))
    num_tokens = sum(report.tokens.total for report in reports)
    return Tuned(
        change=variant.change,
        num_ranks=variant.num_ranks,
        tokens_per_s=num_tokens / seconds,
        tokens_per_cpu_s=num_tokens / max(busy for _, busy in of_ranks),
        owners=max((owners for owners, _ in of_ranks), key=lambda owners: sum(owners.values())),
        loss=reports[-1].loss,
    )


@contextmanager
def _open(variant: Variant, ranks: Ranks, shape: VLMShape) -> Iterator[Trainer]:
    """Give the trainer of a variant, with the attention and the padding that it names."""
    config = configure(variant)
    trainer = Trainer(config, ranks, model=build_model(shape, seed=config.run.seed), show_progress=False)
    if variant.pads_to_longest_allowed:
        trainer.collator.pad_multiple = MAX_SEQ_LEN
    try:
        with sdpa_kernel(SDPBackend.MATH) if variant.eager_attention else nullcontext():
            yield trainer
    finally:
        close(trainer)


def _middle(turns: Sequence[Tuned]) -> Tuned:
    """Return the median speeds of a variant's turns, and the fullest moment of any."""
    return dataclasses.replace(
        turns[-1],
        tokens_per_s=median(turn.tokens_per_s for turn in turns),
        tokens_per_cpu_s=median(turn.tokens_per_cpu_s for turn in turns),
        owners=max((turn.owners for turn in turns), key=lambda owners: sum(owners.values())),
    )
