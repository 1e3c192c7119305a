"""Trains every distributed variant of the parity test, and every planted bug, on the ranks it is started on.

Usage: parity_worker.py FOLDER. Each rank writes its recordings to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from parity import CASES, AwkwardTrainer, Recording, build_trainer, parity_config, record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.data import sampler
from vlmcourse.parallel import apply
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.train import accumulate, optimizer

WEIGHT_SEED = 100


@contextlib.contextmanager
def no_exchange() -> Iterator[None]:
    """Gradients stay on their rank."""
    real = accumulate.gradient_sync
    with mock.patch.object(accumulate, "gradient_sync", lambda model, enabled: real(model, False)):
        yield


@contextlib.contextmanager
def exchange_before_the_last() -> Iterator[None]:
    """The first micro-batch is exchanged and the others are not."""
    real, calls = accumulate.gradient_sync, iter(range(10**6))
    with mock.patch.object(accumulate, "gradient_sync", lambda model, enabled: real(model, next(calls) % 4 == 0)):
        yield


@contextlib.contextmanager
def average_left_in() -> Iterator[None]:
    """The loss is not multiplied by the number of ranks, so that averaging divides the gradient by it."""
    real = accumulate.micro_batch_loss_sum

    def loss_sum(*args: Any) -> torch.Tensor:
        loss = real(*args)
        return loss.detach() + (loss - loss.detach()) / 2

    with mock.patch.object(accumulate, "micro_batch_loss_sum", loss_sum):
        yield


@contextlib.contextmanager
def gradients_kept() -> Iterator[None]:
    """Gradients are not zeroed between steps."""
    with mock.patch.object(torch.optim.AdamW, "zero_grad", lambda self, set_to_none=True: None):
        yield


@contextlib.contextmanager
def mean_of_means() -> Iterator[None]:
    """Each micro-batch's mean loss counts alike, however many tokens it has."""
    real_count = accumulate.count_tokens

    def mean_loss(model: Any, batch: Any, precision: str) -> torch.Tensor:
        logits = model(batch.input_ids_BS, batch.pixel_values_ICHW, batch.attention_mask_BS)
        mean = F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten())
        return mean.nan_to_num()

    def count(batches: Any, ranks: Ranks, layout: Any) -> Any:
        return replace(real_count(batches, ranks, layout), supervised=len(batches) * ranks.world_size)

    with mock.patch.multiple(accumulate, micro_batch_loss_sum=mean_loss, count_tokens=count):
        yield


@contextlib.contextmanager
def same_slice() -> Iterator[None]:
    """Every rank works on rank 0's samples."""
    real = sampler.GlobalBatchSampler.micro_batch

    def micro_batch(self: Any, step: int, m: int, steps: int, dp_rank: int, dp_degree: int) -> list[int]:
        return real(self, step, m, steps, dp_rank=0, dp_degree=dp_degree)

    with mock.patch.object(sampler.GlobalBatchSampler, "micro_batch", micro_batch):
        yield


@contextlib.contextmanager
def local_clipping() -> Iterator[None]:
    """Each rank clips by the norm of what it stores."""

    def clip(parameters: Any, max_norm: float) -> float:
        gradients = [p.grad for p in parameters if p.grad is not None]
        local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
        norm = torch.stack([g.norm() for g in local]).norm()
        for gradient in local:
            gradient.mul_(max_norm / norm)
        return float(norm)

    with mock.patch.object(optimizer, "clip_global_norm", clip):
        yield


@contextlib.contextmanager
def weights_not_shared() -> Iterator[None]:
    """FSDP shards the different models of the ranks into one mixture."""
    with mock.patch("vlmcourse.parallel.fsdp.broadcast_weights", lambda model: None):
        yield


@contextlib.contextmanager
def own_weights() -> Iterator[None]:
    """DDP leaves every rank the weights that it came with."""
    with mock.patch.object(apply, "apply_ddp", lambda model, ranks: DistributedDataParallel(model, init_sync=False)):
        yield


@contextlib.contextmanager
def not_distributed() -> Iterator[None]:
    """The strategy leaves the model as it is."""
    with mock.patch.multiple(apply, apply_ddp=lambda model, ranks: model, apply_fsdp=lambda model, ranks, **_: model):
        yield


BUGS: dict[str, tuple[str, int, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "no gradient exchange (ddp)": ("ddp", 1, no_exchange),
    "no gradient exchange (fsdp)": ("fsdp", 1, no_exchange),
    "exchange of the first micro-batch only": ("ddp", 4, exchange_before_the_last),
    "averaging over ranks left in (ddp)": ("ddp", 1, average_left_in),
    "averaging over ranks left in (fsdp)": ("fsdp", 1, average_left_in),
    "gradients not zeroed": ("ddp", 1, gradients_kept),
    "mean of means over ranks": ("ddp", 1, mean_of_means),
    "mean of means over micro-batches": ("fsdp", 4, mean_of_means),
    "every rank takes the same slice": ("ddp", 4, same_slice),
    "clipping by the norm of the local shards": ("fsdp", 1, local_clipping),
    "weights not shared before sharding": ("fsdp", 1, weights_not_shared),
    "weights not shared (ddp)": ("ddp", 1, own_weights),
    "model not distributed (ddp)": ("ddp", 1, not_distributed),
    "model not distributed (fsdp)": ("fsdp", 1, not_distributed),
}
REFUSALS = {
    "exchange of the first micro-batch only": "micro-batch 1 of 4: gradients were exchanged",
    "weights not shared (ddp)": "weights of rank 1 differ from rank 0's",
    "model not distributed (ddp)": "the model is a VLM, not a DistributedDataParallel",
    "model not distributed (fsdp)": "parts are not wrapped by fully_shard",
}
"""What is said to those of the bugs that are refused, at the latest in the first step; all others train wrongly."""


def run(strategy: str, accumulation_steps: int, case: str, ranks: Ranks, num_steps: int | None = None) -> Recording:
    config = parity_config(strategy, accumulation_steps, ranks.world_size, case)
    built: AwkwardTrainer = build_trainer(config, ranks, WEIGHT_SEED + ranks.rank)  # every rank another seed
    return record(built, num_steps)


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    runs: dict[tuple[str, str, int], Recording] = {}
    for case in CASES:
        for strategy in ("ddp", "fsdp"):
            for accumulation_steps in (1, 4):
                runs[case, strategy, accumulation_steps] = run(strategy, accumulation_steps, case, ranks)
    bugs: dict[str, Recording | str] = {}
    for name, (strategy, accumulation_steps, plant) in BUGS.items():
        with plant():
            try:
                bugs[name] = run(strategy, accumulation_steps, "all towers", ranks, num_steps=3)
            except RuntimeError as error:
                bugs[name] = str(error)
    torch.save({"runs": runs, "bugs": bugs}, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
