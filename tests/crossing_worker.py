"""What ranks do for `test_train_crossing.py`. Usage: crossing_worker.py FOLDER.

Two ranks train the small model of the parity tests under every strategy, save it, and go on from every checkpoint under
every strategy. Another number of ranks goes on from some of these. Each rank writes FOLDER/found<world>_<rank>.pt.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from parity import AwkwardTrainer, awkward_samples, parity_config, small_shape

from vlmcourse.config import TrainConfig
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.engines import EngineOptimizer, start_deepspeed
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.parallel.universal import convert_to_universal, load_native, load_universal, save_native
from vlmcourse.presets import MODELS
from vlmcourse.train.accumulate import accumulate_gradients
from vlmcourse.train.optimizer import build_optimizer, learning_rate_scale, set_learning_rates

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")
OTHER_CASES = {
    "all towers": (
        ("deepspeed-zero0", "accelerate-deepspeed-zero3"),
        ("accelerate-deepspeed-zero2", "deepspeed-zero0"),
    ),
    "vision frozen": (
        ("deepspeed-zero3", "zero1"),
        ("deepspeed-zero2", "deepspeed-zero3"),
        ("fsdp", "deepspeed-zero1"),
    ),
    "tied embeddings": (("deepspeed-zero3", "deepspeed-zero1"), ("deepspeed-zero2", "fsdp")),
}
"""Case of the parity tests -> pairs of source and target."""
ON_FOUR = ("fsdp", "deepspeed-zero1", "deepspeed-zero3")
"""What four ranks run, and go on from."""
NATIVE = ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")
"""What DeepSpeed's own checkpoints, and its universal ones, are written from and loaded into."""
SAVED_STEP, NEXT_STEPS = 2, 2
WEIGHT_SEED = 100
SINGLE, FROM_FOUR = "single", "deepspeed-zero2 on four"


def configure(strategy: str, world_size: int, folder: Path, name: str, case: str = "all towers") -> TrainConfig:
    """Return a run whose steps see the same 8 samples on any number of ranks."""
    config = parity_config(strategy, 1, world_size, case)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, output_dir=str(folder), name=name))


def build_trainer(config: TrainConfig, ranks: Ranks, seed: int) -> AwkwardTrainer:
    """Build a trainer as the parity tests do, of one layer a tower: a checkpoint has half as many tensors to read."""
    shape = small_shape(MODELS[config.model.preset].language.tied_embeddings)
    vision, language = (dataclasses.replace(tower, num_layers=1) for tower in (shape.vision, shape.language))
    model = build_model(dataclasses.replace(shape, vision=vision, language=language), seed=seed)
    samples = awkward_samples()
    return AwkwardTrainer(config, ranks, model=model, train_data=samples, eval_data=samples[:1], show_progress=False)


def train_and_save(config: TrainConfig, ranks: Ranks) -> tuple[AwkwardTrainer, list[float]]:
    """Make some steps, save, and return the losses of the next ones."""
    trainer = build_trainer(config, ranks, WEIGHT_SEED)
    for _ in range(SAVED_STEP):
        trainer.train_step()
    trainer.save()
    return trainer, go_on(trainer)


def go_on(trainer: AwkwardTrainer) -> list[float]:
    return [trainer.train_step().loss for _ in range(NEXT_STEPS)]


def resume(trainer: AwkwardTrainer, folder: Path) -> list[float]:
    assert trainer.resume(folder) == SAVED_STEP
    return go_on(trainer)


def cross(folder: Path, ranks: Ranks) -> dict[str, dict[str, list[float]]]:
    """Return by source and target the losses after a resume; by source and "expected" those without one."""
    found: dict[str, dict[str, list[float]]] = {SINGLE: {}}
    for source in STRATEGIES:
        trainer, losses = train_and_save(configure(source, ranks.world_size, folder, source), ranks)
        found[source] = {"expected": losses}
        if source in NATIVE:
            save_native_copy(trainer, folder / f"native-{source}")
    for target in STRATEGIES:
        # Other weights, which must not matter; and only the first resume finds an optimizer without state.
        trainer = build_trainer(configure(target, ranks.world_size, folder, "x"), ranks, 7 + ranks.rank)
        for source in found:
            found[source][target] = resume(trainer, folder / source)
    return found


def save_native_copy(trainer: AwkwardTrainer, folder: Path) -> None:
    """Go back to the saved step, and write it as DeepSpeed does."""
    trainer.resume()
    save_native(trainer.model, folder)
    if trainer.ranks.is_main:
        convert_to_universal(folder)


def cross_other_cases(folder: Path, ranks: Ranks) -> dict[str, list[list[float]]]:
    """Return the losses without and with a resume, by what is frozen or tied, source and target."""
    found = {}
    for case, pairs in OTHER_CASES.items():
        for source, target in pairs:
            name = f"{case}: {source} -> {target}"
            _, losses = train_and_save(configure(source, ranks.world_size, folder, name, case), ranks)
            other = build_trainer(configure(target, ranks.world_size, folder, "x", case), ranks, 7 + ranks.rank)
            found[name] = [losses, resume(other, folder / name)]
    return found


def cross_on_four(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Go on from checkpoints of one and of two ranks, ours and DeepSpeed's universal ones; and save one."""
    found: dict[str, Any] = {}
    for target in ON_FOUR:
        trainer = build_trainer(configure(target, 4, folder, "x"), ranks, 7 + ranks.rank)
        for source in (*ON_FOUR, SINGLE):
            found[f"{source} -> {target}"] = resume(trainer, folder / source)
        if target in NATIVE:
            found |= load_deepspeeds(trainer, target, folder)
    saved, _ = train_and_save(configure("deepspeed-zero2", 4, folder, FROM_FOUR), ranks)
    return found | load_deepspeeds(saved, "deepspeed-zero2", folder)


def load_deepspeeds(trainer: AwkwardTrainer, stage: str, folder: Path) -> dict[str, Any]:
    """Return the losses after two ranks' universal checkpoint of the same stage, and what their native one says."""
    load_universal(trainer.model, folder / f"native-{stage}")
    trainer.step = SAVED_STEP
    found: dict[str, Any] = {f"universal {stage}": go_on(trainer)}
    try:
        load_native(trainer.model, folder / f"native-{stage}")
    except Exception as error:  # DeepSpeed raises many kinds
        found[f"native {stage}"] = f"{type(error).__name__}: {error}"
    return found


def universal_alone(folder: Path, ranks: Ranks) -> dict[str, list[float]]:
    """Load universal checkpoints of two ranks into an engine of one, which a Trainer would refuse to start."""
    found = {}
    for strategy in NATIVE:
        trainer = build_trainer(configure("single", 1, folder, "x"), ranks, 7)
        config = configure(strategy, 1, folder, "x")
        optimizer = build_optimizer(trainer.model, config.optimizer)
        engine, stepper = start_deepspeed(trainer.model, optimizer, config, ranks)
        load_universal(engine, folder / f"native-{strategy}")
        found[strategy] = [step_alone(trainer, engine, stepper, SAVED_STEP + i) for i in range(NEXT_STEPS)]
    return found


def step_alone(trainer: AwkwardTrainer, engine: Any, stepper: EngineOptimizer, step: int) -> float:
    config = trainer.config
    done = accumulate_gradients(engine, trainer.load_step(step), trainer.ranks, "fp32", trainer.place.layout)
    optimizer: Any = stepper
    warmup_steps, least = config.optimizer.warmup_steps, config.optimizer.min_lr_fraction
    set_learning_rates(optimizer, learning_rate_scale(step, config.train.num_steps, warmup_steps, least))
    stepper.step()
    return done.loss


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    found: dict[str, Any] = {}
    if ranks.world_size == 1:
        found["universal"] = universal_alone(folder, ranks)
    elif ranks.world_size == 2:
        found = {"table": cross(folder, ranks), "others": cross_other_cases(folder, ranks)}
    else:
        found = cross_on_four(folder, ranks)
    torch.save(found, folder / f"found{ranks.world_size}_{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
