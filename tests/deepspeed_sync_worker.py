"""What two ranks do for `test_parallel_deepspeed_sync.py`. Usage: deepspeed_sync_worker.py FOLDER.

Each rank trains the tiny model under a real DeepSpeed engine of every ZeRO stage, two steps of three micro-batches, and
writes what it saw to FOLDER/rank<r>.pt. The test makes the same steps on one process, as one big batch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from vlmcourse.data.samples import Batch
from vlmcourse.labs.ch02 import build_collator, cut, ragged_samples, tiny_model
from vlmcourse.layout import Layout
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel import sync
from vlmcourse.parallel.apply import unwrap
from vlmcourse.parallel.comm import sum_over_ranks
from vlmcourse.parallel.counting import CollectiveCounter
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.parallel.sync import find_exchanges, gradient_sync, is_engine, run_backward
from vlmcourse.presets import get_model
from vlmcourse.train import accumulate
from vlmcourse.train.accumulate import Accumulation, accumulate_gradients, count_tokens, micro_batch_loss_sum

STAGES = (0, 1, 2, 3)
NUM_MICRO_BATCHES = 3
MICRO_BATCH_SIZE = 2
NUM_STEPS = 2
MAX_GRAD_NORM = 0.5
"""Below what is measured at every step, so that clipping is active."""
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-4, "weight_decay": 0.1}
"""With a large eps: Adam divides by the gradient's size, and makes a whole update of what is only a rounding error."""
EXCHANGES = ("all-reduce", "reduce", "reduce-scatter")


@dataclass
class Run:
    """What one engine, or one process, did; tensors are whole."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, before clipping."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""
    exchanged: list[int] = field(default_factory=list)
    """Bytes that were reduced in each micro-batch of the first step."""
    found: list[int] = field(default_factory=list)
    """Those that `find_exchanges` names."""
    moved: list[float] = field(default_factory=list)
    """The most that any weight changed, after each micro-batch of the first step and the engine's `step` after it."""
    counted: list[int] = field(default_factory=list)
    """Steps that the engine counts then."""
    num_supervised: list[int] = field(default_factory=list)
    """Tokens of each micro-batch of the first step."""
    optimizer: str = ""
    """What makes the update."""


def load_batches(step: int, size: int = MICRO_BATCH_SIZE) -> list[Batch]:
    """Return the micro-batches of all ranks of one step, in order; short and long ones take turns."""
    num_samples = 2 * NUM_MICRO_BATCHES * MICRO_BATCH_SIZE
    return cut(ragged_samples(num_samples, seed=step, period=MICRO_BATCH_SIZE), build_collator(), size)


def load_mine(step: int, ranks: Ranks) -> list[Batch]:
    first = ranks.rank * NUM_MICRO_BATCHES
    return load_batches(step)[first : first + NUM_MICRO_BATCHES]


def train_alone(ranks: Ranks) -> Run:
    """Make the steps on one process, each as one big batch."""
    run, model = Run(), tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)  # type: ignore[arg-type]
    for step in range(NUM_STEPS):
        batches = load_batches(step, 2 * NUM_MICRO_BATCHES * MICRO_BATCH_SIZE)
        run.losses.append(accumulate_gradients(model, batches, ranks, "fp32").loss)
        run.gradients = run.gradients or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
    run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


# --- A real engine --------------------------------------------------------------------------------------------------


def start_deepspeed() -> Any:
    """Import DeepSpeed for CPU ranks that have met already, without the operation that it would compile for them."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


def build_engine(deepspeed: Any, stage: int, ranks: Ranks) -> Any:
    """Return an engine; its weights are rank 0's, those of the other ranks differ before."""
    settings = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "gradient_clipping": MAX_GRAD_NORM,
        "optimizer": {"type": "AdamW", "params": OPTIMIZER | {"torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return deepspeed.initialize(model=build_model(get_model("tiny"), seed=ranks.rank), config=settings)[0]


def read_weights(deepspeed: Any, engine: Any) -> dict[str, Tensor]:
    """Return whole weights; all ranks must call this."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def train(deepspeed: Any, stage: int, ranks: Ranks) -> Run:
    """Make the first step by hand, counting, and the second as a trainer does."""
    run, engine = Run(), build_engine(deepspeed, stage, ranks)
    assert is_engine(engine) and unwrap(engine) is engine.module
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    run.optimizer = f"{type(inner).__module__}.{type(inner).__name__}"
    batches, before = load_mine(0, ranks), read_weights(deepspeed, engine)
    tokens = count_tokens(batches, ranks, Layout(dp_replicate=ranks.world_size)).supervised
    loss_sum = torch.zeros(())
    for m, batch in enumerate(batches):
        with CollectiveCounter() as counter, gradient_sync(engine, m == NUM_MICRO_BATCHES - 1):
            part = micro_batch_loss_sum(engine, batch, "fp32")
            run_backward(engine, part * ranks.world_size / tokens)
        loss_sum += part.detach()
        run.exchanged.append(sum(call.payload_bytes for call in counter.calls if call.kind in EXCHANGES))
        run.found.append(sum(call.payload_bytes for call in find_exchanges(engine, counter.calls)))
        if m == NUM_MICRO_BATCHES - 1:
            gradients = {n: deepspeed.utils.safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
            run.gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        engine.step()  # DeepSpeed's own loops call it after every micro-batch: only the last one may change weights
        after = read_weights(deepspeed, engine)
        run.moved.append(max(float((after[name] - before[name]).abs().max()) for name in before))
        run.counted.append(engine.global_steps)
    run.losses.append(float(sum_over_ranks([loss_sum], ranks)[0]) / tokens)
    run.num_supervised = [batch.num_supervised_tokens for batch in batches]
    silent = Accumulation(check_silence=True)
    run.losses.append(accumulate_gradients(engine, load_mine(1, ranks), ranks, "fp32", how=silent).loss)
    engine.step()
    run.counted.append(engine.global_steps)
    run.weights = read_weights(deepspeed, engine)
    return run


# --- Planted bugs ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def divided_again() -> Iterator[None]:
    """The engine divides the loss by its accumulation steps, as it does by default."""

    def backward(model: Any, loss: Tensor) -> None:
        model.backward(loss)

    with mock.patch.object(accumulate, "run_backward", backward), mock.patch.dict(globals(), run_backward=backward):
        yield


@contextlib.contextmanager
def told(last: Callable[[bool], bool]) -> Iterator[None]:
    """The engine is told something else of each micro-batch than whether it is the last."""

    @contextlib.contextmanager
    def wrong(model: Any, enabled: bool, every: bool = False) -> Iterator[None]:
        with sync.gradient_sync(model, last(enabled), every):
            yield

    with mock.patch.object(accumulate, "gradient_sync", wrong), mock.patch.dict(globals(), gradient_sync=wrong):
        yield


BUGS: dict[str, tuple[int, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "divided by the accumulation steps again, stage 0": (0, divided_again),
    "divided by the accumulation steps again, stage 3": (3, divided_again),
    "every micro-batch is the last, stage 1": (1, lambda: told(lambda _: True)),
    "every micro-batch is the last, stage 2": (2, lambda: told(lambda _: True)),
}
"""Name -> ZeRO stage and what is broken."""


def train_wrongly(deepspeed: Any, stage: int, plant: Callable[[], Any], ranks: Ranks) -> Run | str:
    with plant():
        try:
            return train(deepspeed, stage, ranks)
        except RuntimeError as error:
            return str(error)


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    deepspeed = start_deepspeed()
    runs: dict[Any, Any] = {stage: train(deepspeed, stage, ranks) for stage in STAGES}
    bugs = {name: train_wrongly(deepspeed, stage, plant, ranks) for name, (stage, plant) in BUGS.items()}
    found = {name: run if isinstance(run, str) else vars(run) for name, run in (runs | bugs).items()}
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
