"""What two ranks do for `test_engine_offload.py`. Usage: offload_worker.py FOLDER.

Each rank trains the small model of the parity tests with its state off the device, and writes what it found to
FOLDER/rank<r>.pt. DeepSpeed's compiled operations have stand-ins, see `stub_ops.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from parity import AwkwardTrainer, Recording, awkward_samples, build_trainer, parity_config, record, small_shape
from stub_ops import StubBuilder, stub_ops

from vlmcourse.config import TrainConfig
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.parallel import apply, engine_offload, engines, fsdp, op_builds
from vlmcourse.parallel.comm import wait_for_all
from vlmcourse.parallel.engine_places import measure_state_places, swap_files
from vlmcourse.parallel.gather import gather_plain_state
from vlmcourse.parallel.nvme import SUFFIX
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.presets import VLMShape
from vlmcourse.state_offload import OffloadConfig
from vlmcourse.train.export import CheckpointWeights
from vlmcourse.train.trainer import Trainer

NUM_STEPS = 3
WEIGHT_SEED = 100
OPTIMIZER = OffloadConfig(optimizer="cpu")
BOTH = OffloadConfig(optimizer="cpu", parameters="cpu")
LAYERED = dataclasses.replace(BOTH, layered=True)
RUNS = {
    "zero1, optimizer": ("deepspeed-zero1", "all towers", OPTIMIZER),
    "zero2, optimizer": ("deepspeed-zero2", "vision frozen", OPTIMIZER),
    "zero2, DeepSpeed's Adam": ("deepspeed-zero2", "all towers", OffloadConfig(optimizer="cpu", adam="deepspeed")),
    "zero3, optimizer": ("deepspeed-zero3", "tied embeddings", OPTIMIZER),
    "zero3, both": ("deepspeed-zero3", "vision frozen", BOTH),
    "fsdp, both": ("fsdp", "vision frozen", BOTH),
    "fsdp, layered": ("fsdp", "tied embeddings", LAYERED),
    "zero3, layered": ("deepspeed-zero3", "vision frozen", LAYERED),
    "accelerate zero2, optimizer": ("accelerate-deepspeed-zero2", "vision frozen", OPTIMIZER),
    "accelerate zero3, both": ("accelerate-deepspeed-zero3", "vision frozen", BOTH),
}
"""Name -> strategy, case of the parity tests, what is offloaded."""


def offload_config(name: str, num_ranks: int) -> TrainConfig:
    strategy, case, offload = RUNS[name]
    config = parity_config(strategy, 2, num_ranks, case)
    sync = "every" if offload.layered and strategy == "fsdp" else "last"
    return dataclasses.replace(
        config, offload=offload, parallel=dataclasses.replace(config.parallel, gradient_sync=sync)
    )


def unclip(recording: Recording, max_norm: float) -> None:
    """Clip the gradients of an engine, which does that in its step, after the moment at which they are recorded."""
    for norm, gradients in zip(recording.grad_norms, recording.gradients, strict=True):
        for gradient in gradients.values():
            gradient *= min(1.0, max_norm / (norm + 1e-6))


def run(name: str, ranks: Ranks) -> tuple[Recording, dict[str, Any]]:
    config = offload_config(name, ranks.world_size)
    with stub_ops() as adam:
        trainer = build_trainer(config, ranks, WEIGHT_SEED + ranks.rank)
        recording = record(trainer, NUM_STEPS)
    found: dict[str, Any] = {"num_updates": adam.num_updates}
    if config.parallel.strategy != "fsdp":
        unclip(recording, config.train.max_grad_norm)
        found |= dataclasses.asdict(measure_state_places(trainer.model))
    return recording, found


def resume(name: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Save under offloading, go on; go on from there in a new trainer, under ZeRO-3 without offloading."""
    config = offload_config(name, ranks.world_size)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, output_dir=str(folder), name=name))
    first = build_trainer(config, ranks, WEIGHT_SEED)
    first.train_step()
    first.save()
    found: dict[str, Any] = {"expected": [first.train_step().loss for _ in range(2)]}
    offload = OffloadConfig() if name.startswith("zero3") else config.offload
    second = build_trainer(dataclasses.replace(config, offload=offload), ranks, WEIGHT_SEED + 7)
    found["step"] = second.resume()
    found["losses"] = [second.train_step().loss for _ in range(2)]
    return found


def start_in_shards(ranks: Ranks) -> dict[str, Any]:
    """Let a trainer build its model under ZeRO-3, and compare with one that cuts a whole model up."""
    config = dataclasses.replace(parity_config("deepspeed-zero3", 2, ranks.world_size, "vision frozen"), offload=BOTH)
    samples = awkward_samples()
    shape = small_shape()
    largest = 0
    real = engines.build_in_shards

    def watch(*arguments: Any) -> VLM:
        nonlocal largest
        model = real(*arguments)
        largest = max(p.numel() for p in model.parameters())
        return model

    class SmallTrainer(AwkwardTrainer):
        def _build_model(self) -> VLM:
            self.shape = shape
            return super()._build_model()

    def train(model: VLM | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        trainer = SmallTrainer(
            config, ranks, model=model, train_data=samples, eval_data=samples[:1], show_progress=False
        )
        weights = gather_plain_state(trainer.model, shape)
        return [trainer.train_step().loss for _ in range(3)], weights

    engines.build_in_shards = watch
    try:
        in_shards = train(None)
    finally:
        engines.build_in_shards = real
    whole = train(build_model(shape, seed=config.run.seed))
    equal = {name: torch.equal(weight, in_shards[1][name]) for name, weight in whole[1].items()}
    return {
        "largest": largest,
        "differing": [name for name, is_equal in equal.items() if not is_equal],
        "num_weights": len(equal),
        "losses": (in_shards[0], whole[0]),
    }


def say_why_not(name: str, ranks: Ranks, **stand_ins: Any) -> str:
    """Start a run with parts of the engine replaced; return what is said."""
    before = {key: getattr(engines, key, None) for key in stand_ins}
    try:
        for key, value in stand_ins.items():
            setattr(engines, key, value)
        build_trainer(offload_config(name, ranks.world_size), ranks, WEIGHT_SEED).train_step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        for key, value in before.items():
            setattr(engines, key, value)
    return ""


def offload_nothing(ranks: Ranks) -> dict[str, str]:
    """Let the engine, or FSDP, know nothing of offloading, or of a half of it; return what is said."""
    names = ("zero1, optimizer", "zero3, both")
    said = {name: say_why_not(name, ranks, offload_settings=lambda offload: {}) for name in names}
    only_the_optimizer = engine_offload.offload_settings(OPTIMIZER)
    said["zero3, one of both"] = say_why_not("zero3, both", ranks, offload_settings=lambda offload: only_the_optimizer)
    said["zero3, layered"] = say_why_not(
        "zero3, layered", ranks, offload_settings=lambda offload: engine_offload.offload_settings(BOTH)
    )
    takes_one = apply.take_one_at_a_time
    apply.take_one_at_a_time = lambda model: None
    try:
        said["fsdp, layered"] = say_why_not("fsdp, layered", ranks)
    finally:
        apply.take_one_at_a_time = takes_one
    said["accelerate zero2, optimizer"] = say_why_not(
        "accelerate zero2, optimizer", ranks, offload_settings=lambda offload: {}
    )
    fully_shard = fsdp.fully_shard
    fsdp.fully_shard = lambda *a, offload_policy, **k: fully_shard(*a, **k)  # type: ignore[assignment]
    try:
        said["fsdp, both"] = say_why_not("fsdp, both", ranks)
    finally:
        fsdp.fully_shard = fully_shard
    return said


def start_from_a_file(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Offload by a ds_config.json, with the optimizer that it means; and by one that the engine does not get."""
    config = offload_config("zero3, both", ranks.world_size)
    settings = engines.build_deepspeed_settings(config)
    del settings["zero_force_ds_cpu_optimizer"]  # so DeepSpeed takes no other Adam than its own
    path = folder / f"ds_config{ranks.rank}.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    parallel = dataclasses.replace(config.parallel, deepspeed_config=str(path))
    of_file = dataclasses.replace(config, parallel=parallel, offload=OffloadConfig())
    found: dict[str, Any] = {}
    with stub_ops() as adam:
        trainer = build_trainer(of_file, ranks, WEIGHT_SEED + ranks.rank)
        found["losses"] = [trainer.train_step().loss for _ in range(NUM_STEPS)]
        found["places"], found["num_updates"] = (
            dataclasses.asdict(measure_state_places(trainer.model)),
            adam.num_updates,
        )
    plain = dataclasses.replace(config, offload=OffloadConfig())
    real = engines.choose_deepspeed_settings
    engines.choose_deepspeed_settings = lambda *_: engines.build_deepspeed_settings(plain)
    try:
        with stub_ops():
            build_trainer(of_file, ranks, WEIGHT_SEED)
    except RuntimeError as error:
        found["nothing"] = str(error)
    finally:
        engines.choose_deepspeed_settings = real
    return found


def large_shape() -> VLMShape:
    """Return a shape with matrices of which half has more than 1 MiB."""
    small = small_shape()
    language = dataclasses.replace(small.language, hidden_size=512, mlp_size=1088)
    return dataclasses.replace(small, language=language)


class LargeTrainer(Trainer):
    """Trains a model of the large shape, whatever the configuration names."""

    def _build_model(self) -> VLM:
        self.shape = large_shape()
        return super()._build_model()


def swap(ranks: Ranks, folder: Path, ops: Callable[[], AbstractContextManager[Any]] = stub_ops) -> dict[str, Any]:
    """Train with state in files and without; save, and try to go on; `ops` gives what stands in for libaio, if any."""
    config = parity_config("deepspeed-zero3", 2, ranks.world_size, "all towers")
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, output_dir=str(folder), name="nvme"))
    samples = awkward_samples()
    found: dict[str, Any] = {}
    whole: dict[str, torch.Tensor] = {}
    for key, place in ("memory", "none"), ("files", "nvme"):
        options: dict[str, Any] = (
            {"nvme_path": str(folder / "swap"), "buffer_elements": 1_000_000} if place == "nvme" else {}
        )
        offload = OffloadConfig(optimizer=place, parameters=place, **options)
        with ops():
            model = build_model(large_shape(), seed=config.run.seed) if place == "none" else None  # else in shards
            of_run = dataclasses.replace(config, offload=offload)
            trainer = LargeTrainer(
                of_run, ranks, model=model, train_data=samples, eval_data=samples[:1], show_progress=False
            )
            found[key] = [trainer.train_step().loss for _ in range(2)]
            if place == "none":
                whole = gather_plain_state(trainer.model, trainer.shape)
            else:
                found["places"] = dataclasses.asdict(measure_state_places(trainer.model))
                found["parameter files"] = [
                    path.stat().st_size
                    for path in (folder / "swap").rglob(f"*{SUFFIX}")
                    if "optimizer" not in path.parts
                ]
                files = swap_files(trainer.model)
                found["num_files"], found["num_bytes"], found["text"] = files.num_files, files.num_bytes, str(files)
                saved = CheckpointWeights(trainer.save())
                is_close = {name: torch.allclose(saved[name], weight, atol=1e-6) for name, weight in whole.items()}
                found["saved"] = saved.keys() == whole.keys() and all(is_close.values())
                try:
                    trainer.resume()
                except ValueError as error:
                    found["resume"] = str(error)
    return found


def refuse(ranks: Ranks, folder: Path) -> dict[str, str]:
    """Ask for files without libaio, of too small a model, and for DeepSpeed's Adam without a compiler."""
    config = parity_config("deepspeed-zero3", 2, ranks.world_size, "all towers")
    nvme = dataclasses.replace(config, offload=OffloadConfig(optimizer="nvme", nvme_path=str(folder / "swap")))
    said = {}
    real = engine_offload.find_nvme_problem
    engine_offload.find_nvme_problem = lambda path, builder: "DeepSpeed's async_io finds no libaio" * (ranks.rank == 1)
    try:
        build_trainer(nvme, ranks, WEIGHT_SEED)
    except ValueError as error:
        said["no libaio"] = str(error)
    finally:
        engine_offload.find_nvme_problem = real
    try:
        with stub_ops():
            build_trainer(nvme, ranks, WEIGHT_SEED)
    except ValueError as error:
        said["too small"] = str(error)
    own = dataclasses.replace(
        parity_config("deepspeed-zero1", 2, ranks.world_size, "all towers"),
        offload=OffloadConfig(optimizer="cpu", adam="deepspeed"),
    )
    os.environ["CXX"] = "no-such-compiler"
    try:
        trainer = build_trainer(own, ranks, WEIGHT_SEED)
        said["updated by"] = measure_state_places(trainer.model).updated_by
    finally:
        del os.environ["CXX"]
    return said


def build_together(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Let one rank build for all, with success and without; return what the others get."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
    found: dict[str, Any] = {"said": ""}
    target = op_builds.find_build_folder(StubBuilder.name)
    (target / op_builds.LOCK).touch()
    try:
        op_builds.load_op(StubBuilder(target), ranks)
    except ValueError as error:
        found["stale"] = str(error)
    (target / op_builds.LOCK).unlink(missing_ok=True)
    wait_for_all(ranks)
    try:
        op_builds.load_op(StubBuilder(target, error=RuntimeError("line 1\nline 2: error")), ranks)
    except RuntimeError as error:
        found["said"] = str(error)
    builder = StubBuilder(target, build_s=0.5)
    found["loaded"] = op_builds.load_op(builder, ranks)
    found["waited"] = (target / "stub.so").exists() and builder.num_loads == 1
    return found


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    found = {
        "runs": {name: run(name, ranks) for name in RUNS},
        "resume": {name: resume(name, ranks, folder) for name in ("zero2, optimizer", "zero3, both", "fsdp, both")},
        "in shards": start_in_shards(ranks),
        "from a file": start_from_a_file(ranks, folder),
        "nothing": offload_nothing(ranks),
        "refused": refuse(ranks, folder),
        "swap": swap(ranks, folder),
        "together": build_together(ranks, folder),
    }
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
