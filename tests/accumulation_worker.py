"""What two or four ranks do for `test_train_accumulation.py`. Usage: accumulation_worker.py FOLDER PART.

Each rank writes recordings and counts to FOLDER/rank<r>.pt. The cases are also what the test runs on one process, as
one big batch, for reference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from activations_cases import FOUR_RANKS, STRATEGIES, run_case, run_ledger
from batch_norm_cases import BATCH_NORM_INPUTS, normalize
from combinations import divisible_shape
from parity import AwkwardTrainer, Recording, awkward_samples, record

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.data.sampler import GlobalBatchSampler
from vlmcourse.data.samples import IGNORE_LABEL, Batch
from vlmcourse.labs.batch_norm import build_tower, compare_norms, load_pictures
from vlmcourse.labs.ch02 import record_sync, train_three_ways
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel import apply, sync
from vlmcourse.parallel.batch_norm import sync_batch_norms
from vlmcourse.parallel.counting import CollectiveCounter
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.train import accumulate, loss, optimizer
from vlmcourse.train.accumulate import micro_batch_loss_sum
from vlmcourse.train.trainer import Trainer

WEIGHT_SEED = 40
SAMPLES = 12
"""Of one optimizer step in every case: 32 samples are two whole steps and one of 8."""
MAX_GRAD_NORM = 0.5
"""Below what is measured at every step, so that clipping is active."""


@dataclass(frozen=True)
class Case:
    """One run on several ranks, and what its reference on one process shares with it."""

    parallel: dict[str, Any]
    accumulation_steps: int = 2
    train: tuple[tuple[str, Any], ...] = ()
    num_steps: int = 1
    mute_second: bool = False
    """Whether the samples of the second of two data-parallel ranks supervise no token at all."""
    dtype: torch.dtype = torch.float32
    """Of the weights, and so of all that is computed from them."""

    def reference(self) -> Case:
        """Return the same step on one process in one micro-batch."""
        return dataclasses.replace(self, parallel={"strategy": "single"}, accumulation_steps=1)

    def exact(self) -> Case:
        """Return the same step in float64."""
        return dataclasses.replace(self, dtype=torch.float64)


SQRT = (("loss_weighting", "sqrt"),)
SHORT = (("last_group", "short"),)
TWO: dict[str, Case] = {
    **{f"sqrt, {name}": Case(parallel, steps, SQRT) for name, (parallel, steps) in {
        "ddp": ({"strategy": "ddp"}, 3),
        "zero1": ({"strategy": "zero1"}, 2),
        "zero2": ({"strategy": "zero2"}, 2),
        "fsdp": ({"strategy": "fsdp"}, 3),
        "tp": ({"tp": 2}, 2),
        "cp, ddp": ({"strategy": "ddp", "cp": 2}, 2),
        "cp, fsdp": ({"strategy": "fsdp", "cp": 2, "cp_method": "allgather"}, 2),
        "pp": ({"pp": 2}, 4),
        "pp, zbv": ({"pp": 2, "pp_schedule": "zbv"}, 4),
    }.items()},
    "every, fsdp": Case({"strategy": "fsdp", "gradient_sync": "every"}, 3),
    "every, zero2": Case({"strategy": "zero2", "gradient_sync": "every"}, 2),
    "short, ddp": Case({"strategy": "ddp"}, 6, SHORT, 4),
    "short, an empty micro-batch on rank 1, ddp": Case({"strategy": "ddp"}, 2, SHORT, 3),
    "short, an empty micro-batch on rank 1, fsdp": Case({"strategy": "fsdp"}, 2, SHORT, 3),
    "short, zero1": Case({"strategy": "zero1"}, 3, SHORT, 3),
    "short, tp": Case({"tp": 2}, 3, SHORT, 3),
    "short, pp": Case({"pp": 2}, 6, SHORT, 3),
    "short, sqrt, zero2": Case({"strategy": "zero2"}, 3, (*SHORT, *SQRT), 3),
    "one rank supervises nothing, ddp": Case({"strategy": "ddp"}, 3, mute_second=True),
    "one rank supervises nothing, fsdp": Case({"strategy": "fsdp"}, 3, mute_second=True),
}  # fmt: skip
FOUR: dict[str, Case] = {
    "hsdp": Case({"strategy": "hsdp", "dp_replicate": 2}, 3),
    "hsdp, every, sqrt": Case({"strategy": "hsdp", "dp_replicate": 2, "gradient_sync": "every"}, 3, SQRT),
    "fsdp x tp, every, short": Case({"strategy": "fsdp", "tp": 2, "gradient_sync": "every"}, 3, SHORT, 3),
    "pp x fsdp, sqrt": Case({"strategy": "fsdp", "pp": 2}, 2, SQRT),
    "cp x pp, sqrt": Case({"strategy": "fsdp", "cp": 2, "pp": 2}, 2, SQRT),
}
COUNTED = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, every": {"strategy": "fsdp", "gradient_sync": "every"},
    "hsdp": {"strategy": "hsdp", "dp_replicate": 2},
    "hsdp, every": {"strategy": "hsdp", "dp_replicate": 2, "gradient_sync": "every"},
    "pp x fsdp": {"strategy": "fsdp", "pp": 2},
    **{
        f"cp ({method}), {strategy}": {"strategy": strategy, "cp": 2, "cp_method": method}
        for strategy, method in (("ddp", "ring"), ("ddp", "allgather"), ("fsdp", "allgather"), ("fsdp", "ulysses"))
    },
    "cp, hsdp": {"strategy": "hsdp", "dp_replicate": 2, "cp": 2, "cp_method": "allgather"},
}
"""Runs whose collectives and gradient bytes are counted, micro-batch by micro-batch."""


class MutedTrainer(AwkwardTrainer):
    """Mutes whole samples by their position in the dataset, besides those that are mute anyway."""

    muted: frozenset[str] = frozenset()

    def load_step(self, step: int) -> list[Batch]:
        batches = super().load_step(step)
        for batch in batches:
            for row, sample_id in enumerate(batch.sample_ids):
                if sample_id in self.muted:
                    batch.labels_BS[row] = IGNORE_LABEL
        return batches


def config_of(case: Case, dp_degree: int) -> TrainConfig:
    table = {
        "train": {"num_steps": 4, "accumulation_steps": case.accumulation_steps, "max_grad_norm": MAX_GRAD_NORM},
        "optimizer": {"warmup_steps": 2, "eps": 1e-5, "weight_decay": 0.1, "lr_vision": 2e-3, "lr_language": 5e-4},
        "parallel": case.parallel,
    }
    table["train"] |= dict(case.train) | {"micro_batch_size": SAMPLES // (case.accumulation_steps * dp_degree)}
    return parse_config(table)


def build(case: Case, ranks: Ranks) -> MutedTrainer:
    parallel = parse_config({"parallel": case.parallel}).parallel
    dp_degree = ranks.world_size // (parallel.tp * parallel.cp * parallel.pp)
    samples = awkward_samples()
    model = build_model(divisible_shape(), dtype=case.dtype, seed=WEIGHT_SEED)
    config = config_of(case, dp_degree)
    trainer = MutedTrainer(config, ranks, model=model, train_data=samples, eval_data=samples[:1], show_progress=False)
    if case.mute_second:
        order = GlobalBatchSampler(len(samples), SAMPLES, config.run.seed)
        # Positions of rank 1 in rounds of two ranks with micro-batches of two, as the ranks deal them out.
        mine = [order.micro_batch(0, m, 3, dp_rank=1, dp_degree=2) for m in range(3)]
        trainer.muted = frozenset(samples[i].sample_id for indices in mine for i in indices)
    return trainer


def run(case: Case, ranks: Ranks) -> Recording:
    return record(build(case, ranks), case.num_steps)


# --- Planted bugs ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def weights_of_own_positions() -> Iterator[None]:
    """Under cp, a sample's weight is taken from the labels of this rank's positions."""

    def call(self: Any, logits: Any, labels_BS: Any, take_part: Any = None) -> Any:
        labels_BS = labels_BS if take_part is None else take_part(labels_BS)
        return loss.token_loss_sum(logits, labels_BS, loss.token_weights(labels_BS, self.weighting))

    with mock.patch.object(loss.TokenLoss, "__call__", call):
        yield


@contextlib.contextmanager
def divided_by_tokens() -> Iterator[None]:
    """A weighted sum is divided by the number of tokens instead of the sum of weights."""
    with mock.patch.object(
        accumulate,
        "sum_weights",
        lambda batches, ranks, layout, _: accumulate.count_tokens(batches, ranks, layout).supervised,
    ):
        yield


@contextlib.contextmanager
def divided_by_own_weights() -> Iterator[None]:
    """Each rank divides by its own weights x the number of ranks: a mean of means over ranks."""

    def own(batches: Any, ranks: Ranks, layout: Any, weighting: str) -> float:
        return ranks.world_size * max(1e-3, sum(loss.weight_sum(batch.labels_BS, weighting) for batch in batches))

    with mock.patch.object(accumulate, "sum_weights", own):
        yield


@contextlib.contextmanager
def unweighted_backward() -> Iterator[None]:
    """The split vocabulary weighs the loss, and not its gradient."""
    from vlmcourse.parallel import vocabulary

    real = vocabulary._VocabularyLosses.forward

    def forward(ctx: Any, logits: Any, labels: Any, weights: Any, first_row: int, group: Any) -> Any:
        losses = real(ctx, logits, labels, weights, first_row, group)
        softmax, row, _, mine = ctx.to_save
        ctx.save_for_backward(softmax, row, (weights > 0).float(), (mine > 0).float())
        return losses

    with mock.patch.object(vocabulary._VocabularyLosses, "forward", staticmethod(forward)):
        yield


@contextlib.contextmanager
def never_off() -> Iterator[None]:
    """Gradients are exchanged with every micro-batch."""
    with mock.patch.object(accumulate, "gradient_sync", lambda *_: contextlib.nullcontext()):
        yield


@contextlib.contextmanager
def copies_never_added() -> Iterator[None]:
    """HSDP with an exchange every time never all-reduces between copies."""

    @contextlib.contextmanager
    def wrong(model: Any, enabled: bool, every: bool = False) -> Iterator[None]:
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(False)
        yield

    with mock.patch.object(accumulate, "gradient_sync", wrong):
        yield


@contextlib.contextmanager
def clipped_every_time() -> Iterator[None]:
    """Gradients are clipped after every micro-batch."""
    real = accumulate.run_backward

    def backward(model: Any, loss_part: Any) -> None:
        real(model, loss_part)
        optimizer.clip_global_norm(model.parameters(), MAX_GRAD_NORM / 4)

    with mock.patch.object(accumulate, "run_backward", backward):
        yield


@contextlib.contextmanager
def empty_left_out() -> Iterator[None]:
    """A rank without samples for a micro-batch repeats a sample, labels and all."""
    with mock.patch("vlmcourse.train.batches.IGNORE_LABEL", 7):
        yield


@contextlib.contextmanager
def short_as_whole() -> Iterator[None]:
    """A short step is divided by the tokens of a whole one."""
    real = accumulate.count_tokens

    def count(batches: Any, ranks: Ranks, layout: Any) -> Any:
        found = real(batches, ranks, layout)
        return dataclasses.replace(found, supervised=found.supervised * 6 / len(batches))

    with mock.patch.object(accumulate, "count_tokens", count):
        yield


BUGS: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "weights from a rank's own positions": ("sqrt, cp, ddp", weights_of_own_positions),
    "a weighted sum divided by tokens": ("sqrt, ddp", divided_by_tokens),
    "a mean of means of weights over ranks": ("sqrt, fsdp", divided_by_own_weights),
    "a split vocabulary that weighs forward only": ("sqrt, tp", unweighted_backward),
    "an exchange that is never off (ddp)": ("sqrt, ddp", never_off),
    "an exchange that is never off (fsdp)": ("sqrt, fsdp", never_off),
    "an exchange that is never off (cp, ddp)": ("sqrt, cp, ddp", never_off),
    "an exchange that is never off (cp, fsdp)": ("sqrt, cp, fsdp", never_off),
    "clipping after every micro-batch": ("sqrt, ddp", clipped_every_time),
    "an empty micro-batch that repeats a sample": ("short, an empty micro-batch on rank 1, fsdp", empty_left_out),
    "a short step divided as a whole one": ("short, ddp", short_as_whole),
}
BUGS_OF_FOUR = {"copies that are never added up": ("hsdp, every, sqrt", copies_never_added)}
IN_FP32 = {of for of, _ in (BUGS | BUGS_OF_FOUR).values()} | {"sqrt, pp", "pp x fsdp, sqrt"}
"""Cases that run in fp32 too: those that bugs are planted in, and pipelines. What float64 shows to 1e-9 in every case
they show in the type that a run has."""


def run_bug(case: Case, plant: Callable[[], contextlib.AbstractContextManager[None]], ranks: Ranks) -> Recording | str:
    with plant():
        try:
            return run(case, ranks)
        except RuntimeError as error:
            return str(error)


# --- Counts ---------------------------------------------------------------------------------------------------------


def count(trainer: Trainer) -> dict[str, Any]:
    """Run one step's micro-batches one by one; return what each exchanged, and the bytes held after each."""
    batches = trainer.load_step(0)
    trainer.optimizer.zero_grad(set_to_none=True)
    every = trainer.parallel.gradient_sync == "every"
    model = trainer.model
    found: dict[str, Any] = {"exchanges": [], "held": [], "estimate": 0, "in_the_same_group": 0}
    if isinstance(model, PipelinedModel):
        with CollectiveCounter() as counter:
            model.pipeline.forward_backward(batches)
        stage = model.pipeline.modules[0]
        calls = [call.kind for part in model.pipeline.modules for call in sync.find_exchanges(part, counter.calls)]
        assert stage is not None
        return {"exchanges": [calls]}
    for i, batch in enumerate(batches):
        with CollectiveCounter() as counter, sync.gradient_sync(model, i == len(batches) - 1, every):
            sync.run_backward(model, micro_batch_loss_sum(model, batch, "fp32"))
        found["exchanges"].append([call.kind for call in sync.find_exchanges(model, counter.calls)])
        unmarked = [dataclasses.replace(call, of_activations=False) for call in counter.calls]
        found["in_the_same_group"] += len(sync.find_exchanges(model, unmarked)) - len(found["exchanges"][-1])
        found["held"].append(sync.measure_waiting_bytes(model))
    found["estimate"] = sync.estimate_waiting_bytes(model, every)
    found["parameters"] = sum(p.numel() for p in trainer.model.parameters())
    return found


def count_case(parallel: dict[str, Any], steps: int, ranks: Ranks) -> dict[str, Any]:
    return count(build(Case(parallel, steps), ranks))


def check_statistics(ranks: Ranks) -> list[float]:
    """Return how far the running statistics of a synchronized BatchNorm are from those over all samples."""
    pixels, _ = load_pictures()
    plain = build_tower("BatchNorm", pixels)
    synced = build_tower("BatchNorm", pixels)
    assert dist.group.WORLD is not None
    sync_batch_norms(synced, dist.group.WORLD, ranks.device)
    for part in (pixels, pixels.flip(0)[:24]):
        plain(part)
        synced(part[ranks.rank :: 2])
    outputs = [float((plain.eval()(pixels) - synced.eval()(pixels)).abs().max())]
    theirs, ours = plain.state_dict(), synced.state_dict()
    assert theirs.keys() == ours.keys()
    return outputs + [float((theirs[name] - ours[name]).abs().max()) for name in theirs if "running" in name]


def recompute_under_hsdp(ranks: Ranks) -> dict[str, Any]:
    """Run the cases of `activations_cases.py` that need the four ranks that are here already."""
    policies = STRATEGIES[FOUR_RANKS][2]
    found: dict[str, Any] = {policy: run_case(FOUR_RANKS, policy, ranks, torch.float64) for policy in policies}
    return found | {"ledger": run_ledger(FOUR_RANKS, ranks)}


def main(folder: Path, part: str) -> None:
    ranks = init_ranks(timeout_s=60)
    assert apply.is_engine is sync.is_engine
    found = find_exact(ranks) if part == "exact" else find_rest(ranks)
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


def find_exact(ranks: Ranks) -> dict[str, Any]:
    """Run the cases in float64."""
    cases = TWO if ranks.world_size == 2 else FOUR
    return {"exact": {name: run(case.exact(), ranks) for name, case in cases.items()}}


def find_rest(ranks: Ranks) -> dict[str, Any]:
    """Run cases in fp32, with bugs and without; count what is sent; on two ranks look at norms, on four at HSDP."""
    cases, bugs = (TWO, BUGS) if ranks.world_size == 2 else (FOUR, BUGS_OF_FOUR)
    found: dict[str, Any] = {"runs": {name: run(case, ranks) for name, case in cases.items() if name in IN_FP32}}
    found["bugs"] = {name: run_bug(cases[of], plant, ranks) for name, (of, plant) in bugs.items()}
    is_here = partial(lambda name: ("hsdp" in name or "pp" in name) == (ranks.world_size == 4))
    found["counts"] = {
        (name, steps): count_case(parallel, steps, ranks)
        for name, parallel in COUNTED.items()
        if is_here(name)
        for steps in ((2, 6) if "pp" in name else (1, 3))
    }
    if ranks.world_size == 4:
        return found | {"recomputed": recompute_under_hsdp(ranks)}
    norms: dict[str, Any] = {"errors": compare_norms(ranks), "statistics": check_statistics(ranks)}
    norms["inputs"] = {name: normalize(name, ranks) for name in BATCH_NORM_INPUTS}
    norms["records"] = {name: record_sync(build(Case(COUNTED[name], 4), ranks)) for name in ("fsdp", "fsdp, every")}
    norms["drift"] = train_three_ways(ranks, 4, samples_per_step=4, micro_batch_size=1, measure_every=2)
    return found | {"norms": norms}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
