"""What two ranks do for `test_train_ranks.py`: checkpoints, evaluation, refusals. Usage: ranks_worker.py FOLDER."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parity import AwkwardTrainer, awkward_samples, build_trainer, parity_config, small_shape
from torch import nn

from vlmcourse.config import ParallelConfig, TrainConfig
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import Message, Sample
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.monitor.ledger import measure_ledger
from vlmcourse.parallel import apply
from vlmcourse.parallel.apply import apply_strategy, check_strategy
from vlmcourse.parallel.comm import max_over_ranks, sum_over_ranks
from vlmcourse.parallel.counting import CollectiveCounter
from vlmcourse.parallel.fsdp import apply_fsdp
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.parallel.verify import check_equal_weights
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.train import trainer as trainer_module
from vlmcourse.train.trainer import Trainer

WORDS = ("left", "right", "seven", "two twos")
PICTURE_ANSWER = "seven seven seven"
"""Ends later than "left": unless something holds them in step, ranks with pictures generate for longer."""


QUESTION_COUNTS = {"odd": (2, 3), "one": (1, 0), "text": (0, 3), "many": (70, 67)}
"""Questions with and without a picture; one rank answers 64 at a time."""


def config_in(folder: Path, strategy: str, name: str, *, world_size: int = 2, **train: Any) -> TrainConfig:
    config = parity_config(strategy, 1, world_size, "all towers")
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, output_dir=str(folder), name=name),
        train=dataclasses.replace(config.train, **({"num_steps": 6} | train)),
    )


def questions(num_pictures: int, num_texts: int) -> list[Sample]:
    """Return questions of which those with a picture come at even places as long as there are any."""
    pictures = DigitsDataset(70, 0, "heldout")[:num_pictures]
    texts = [
        Sample(f"text-{i}", (), (Message("user", "which?"), Message("assistant", WORDS[i % 4])))
        for i in range(num_texts)
    ]
    mixed = []
    while pictures or texts:
        mixed += [part.pop(0) for part in (pictures, texts) if part]
    return mixed


def train_lefty(folder: Path, ranks: Ranks) -> None:
    """Train and save, in one process, a model that answers "left" to text and something longer to pictures."""
    config = config_in(folder, "single", "lefty", world_size=1, num_steps=40)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr_language=1e-2))
    trainer = build_trainer(config, ranks, seed=5)
    samples = questions(8, 8)
    trainer.train_data = [
        dataclasses.replace(s, messages=(s.messages[0], Message("assistant", PICTURE_ANSWER if s.images else "left")))
        for s in samples
    ]
    trainer.sampler = dataclasses.replace(trainer.sampler, num_samples=len(samples))
    for _ in range(40):
        trainer.train_step()
    trainer.save()


def check_resume(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Train 6 steps at once, and 3 steps, then 3 more from a checkpoint in a new trainer with other weights."""
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp", "zero1"):
        whole = build_trainer(config_in(folder, strategy, f"{strategy}-whole"), ranks, seed=1).fit()
        first = build_trainer(config_in(folder, strategy, f"{strategy}-parts", checkpoint_every=3), ranks, seed=1)
        for _ in range(3):
            first.train_step()
        first.save()
        second = build_trainer(config_in(folder, strategy, f"{strategy}-parts"), ranks, seed=2)
        second.resume()
        rest = second.fit()
        found[strategy] = {"whole": whole.losses, "rest": rest.losses, "history": [row["step"] for row in rest.history]}
    return found


def check_other_world(folder: Path, ranks: Ranks) -> dict[str, list[float]]:
    """Go on from the checkpoint that one process saved, on two ranks."""
    found = {}
    for strategy in ("ddp", "fsdp", "zero1"):
        trainer = build_trainer(config_in(folder, strategy, f"from-single-{strategy}"), ranks, seed=3)
        trainer.resume(folder / "single")
        found[strategy] = [trainer.train_step().loss for _ in range(3)]
    return found


def check_evaluation(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Count right answers with unequal numbers of questions, pictures on one rank only, fewer questions than ranks."""
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp", "zero2"):
        trainer = build_trainer(config_in(folder, strategy, "evaluation"), ranks, seed=5)
        trainer.resume(folder / "lefty")
        before = measure_ledger(trainer.model)
        for name, counts in QUESTION_COUNTS.items():
            trainer.eval_data = questions(*counts)
            outcome = trainer.evaluate()
            found[f"{strategy} {name}"] = (outcome.num_questions, outcome.num_correct)
        found[f"{strategy} stores the same after"] = measure_ledger(trainer.model) == before
        found[f"{strategy} loss after"] = trainer.train_step().loss
    return found


def check_refusals(ranks: Ranks) -> dict[str, str]:
    """Collect what is said about models that are not what their strategy claims."""

    def message_of(model: nn.Module, strategy: str, prefetch: int = 0) -> str:
        try:
            check_strategy(model, ParallelConfig(strategy=strategy, prefetch=prefetch), ranks)
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    found = {}
    plain = build_model(small_shape(), seed=0)
    found["ddp not wrapped"] = message_of(plain, "ddp")
    found["fsdp not wrapped"] = message_of(plain, "fsdp")
    found["single on two ranks"] = message_of(plain, "single")
    config = parity_config("ddp", 1, 2, "all towers").parallel
    with mock.patch.object(apply, "apply_ddp", lambda model, _: model):
        try:
            apply_strategy(plain, config, ranks)
            found["ddp that wraps nothing"] = "accepted"
        except RuntimeError as error:
            found["ddp that wraps nothing"] = str(error)
    ddp = apply_strategy(build_model(small_shape(), seed=ranks.rank), config, ranks)
    found["ddp"] = message_of(ddp, "ddp")
    found["ddp called fsdp"] = message_of(ddp, "fsdp")
    with torch.no_grad():
        next(iter(ddp.parameters())).add_(ranks.rank)
    found["ddp with other weights"] = message_of(ddp, "ddp")
    fsdp = apply_fsdp(build_model(small_shape(), seed=0), ranks)
    found["fsdp"] = message_of(fsdp, "fsdp")
    found["fsdp called ddp"] = message_of(fsdp, "ddp")
    found["fsdp called zero2"] = message_of(fsdp, "zero2")
    found["fsdp called fsdp with prefetch"] = message_of(fsdp, "fsdp", prefetch=1)
    ahead = apply_fsdp(build_model(small_shape(), seed=0), ranks, prefetch=2)
    found["fsdp with prefetch"] = message_of(ahead, "fsdp", prefetch=2)
    found["prefetch of 2 called 1"] = message_of(ahead, "fsdp", prefetch=1)
    zero2 = apply_fsdp(build_model(small_shape(), seed=0), ranks, reshard_after_forward=False)
    found["zero2"] = message_of(zero2, "zero2")
    found["zero2 called fsdp"] = message_of(zero2, "fsdp")
    alone = dataclasses.replace(ranks, world_size=3)
    try:
        check_strategy(fsdp, ParallelConfig(strategy="fsdp"), alone)
    except RuntimeError as error:
        found["wrong size"] = str(error)
    one_rank_mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    unsharded = apply_fsdp(build_model(small_shape(), seed=0), ranks, mesh=one_rank_mesh["dp_shard"])
    found["fsdp over one rank"] = message_of(unsharded, "fsdp")
    return found


def check_exchanges(ranks: Ranks) -> dict[str, dict[str, int]]:
    """Count the collectives of the third step: with one and four micro-batches, and with a frozen vision tower."""
    found = {}
    for strategy, steps, prefetch, case in (
        *((strategy, steps, 0, "all towers") for strategy in ("ddp", "fsdp", "zero2") for steps in (1, 4)),
        *(("fsdp", 1, prefetch, "vision frozen") for prefetch in (0, 1, 2)),
    ):
        config = parity_config(strategy, steps, 2, case)
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, prefetch=prefetch))
        trainer = build_trainer(config, ranks, seed=0)
        trainer.train_step()
        trainer.train_step()  # DDP arranges its buckets in the first
        with CollectiveCounter() as counter:
            trainer.train_step()
        calls = {kind: count.calls for kind, count in counter.counts.items()}
        found[f"{strategy}, {steps} micro-batches, prefetch={prefetch}, {case}"] = calls
    return found


def check_own_start(ranks: Ranks) -> dict[str, Any]:
    """Let trainers build their own model; return on which devices, and the losses beside those of a model handed in."""
    devices, real = [], trainer_module.build_model

    def build(shape: VLMShape, *, device: str, seed: int) -> VLM:
        devices.append(device)
        return real(shape, device=device, seed=seed)

    losses = {}
    for strategy in ("fsdp", "zero2", "ddp"):
        config = parity_config(strategy, 1, 2, "all towers")
        for start in ("own", "handed in"):
            model = build_model(get_model("tiny"), seed=config.run.seed) if start == "handed in" else None
            with mock.patch.object(trainer_module, "build_model", build):
                trainer = AwkwardTrainer(
                    config, ranks, model=model, train_data=awkward_samples(), eval_data=(), show_progress=False
                )
            losses[f"{strategy}, {start}"] = [trainer.train_step().loss for _ in range(2)]
    return {"devices": devices, "losses": losses}


def check_ledgers(ranks: Ranks) -> dict[str, list[float]]:
    """Measure the training state of each strategy after a step, per rank."""
    found = {}
    for strategy in ("ddp", "fsdp"):
        trainer = build_trainer(parity_config(strategy, 1, 2, "all towers"), ranks, seed=0)
        trainer.train_step()
        ledger = measure_ledger(trainer.model, trainer.optimizer)
        found[strategy] = [ledger.weights_bytes, ledger.gradients_bytes, ledger.optimizer_bytes]
        found[f"{strategy} sum"] = sum_over_ranks(found[strategy], ranks)
    return found


def check_empty_step(ranks: Ranks) -> str:
    trainer = build_trainer(parity_config("ddp", 1, 2, "all towers"), ranks, seed=0)
    mute = [s for s in awkward_samples() if s.sample_id.startswith("mute")]
    trainer.train_data, trainer.sampler = mute, dataclasses.replace(trainer.sampler, num_samples=len(mute))
    try:
        trainer.train_step()
    except ValueError as error:
        return str(error)
    return "no error"


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    assert init_ranks() == ranks
    found = {
        "sum": sum_over_ranks([ranks.rank, torch.tensor(2.5)], ranks),
        "max": max_over_ranks([ranks.rank, -ranks.rank], ranks),
        "resume": check_resume(folder, ranks),
        "other world": check_other_world(folder, ranks),
        "evaluation": check_evaluation(folder, ranks),
        "refusals": check_refusals(ranks),
        "ledgers": check_ledgers(ranks),
        "empty step": check_empty_step(ranks),
        "exchanges": check_exchanges(ranks),
        "own start": check_own_start(ranks),
    }
    check_equal_weights(build_model(small_shape(), seed=0), ranks)
    trainer = Trainer(
        config_in(folder, "ddp", "real"), ranks, model=build_model(small_shape(), seed=0), show_progress=False
    )
    found["dataset"] = len(trainer.train_data)
    (folder / f"found{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    del trainer
    shutdown_ranks()
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
