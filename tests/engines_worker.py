"""What two ranks do for `test_parallel_engines.py`. Usage: engines_worker.py FOLDER.

Each rank trains the small model of the parity tests under every engine and writes its recordings to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parity import AwkwardTrainer, Recording, build_trainer, parity_config, record
from precision_cases import spoil_gradients

from vlmcourse.config import TrainConfig
from vlmcourse.parallel import engines
from vlmcourse.parallel.engines import gather_engine_state
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.strategies import DEEPSPEED, ENGINES
from vlmcourse.train.nan_finder import find_in_step

RUNS = {
    **{f"{strategy}, all towers": (strategy, "all towers", 2) for strategy in ENGINES},
    "deepspeed-zero2, vision frozen": ("deepspeed-zero2", "vision frozen", 1),
    "deepspeed-zero3, vision frozen": ("deepspeed-zero3", "vision frozen", 2),
    "deepspeed-zero1, clipping off": ("deepspeed-zero1", "clipping off", 1),
    "deepspeed-zero3, tied embeddings": ("deepspeed-zero3", "tied embeddings", 1),
    "deepspeed-zero2, from a file": ("deepspeed-zero2", "all towers", 2),
    "deepspeed-zero3, from a file": ("deepspeed-zero3", "all towers", 2),
    "accelerate-deepspeed-zero1, from a file": ("accelerate-deepspeed-zero1", "all towers", 2),
}
"""Name -> strategy, case of the parity tests, accumulation steps."""
AT_FIRST = ", in the first step"
BAD_GRADIENTS = ("0, clipping off", "1, clipping off", "2, all towers" + AT_FIRST, "3, all towers")
"""Stage of DeepSpeed, and case of the parity tests, of a second step with a gradient of NaN, or of a first."""
AUTO = {
    **{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
    **{"gradient_clipping": "auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"}},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-5, "weight_decay": "auto"}},
}
SMALL_BUCKETS = {"reduce_bucket_size": "auto", "allgather_bucket_size": 5000, "contiguous_gradients": True}
FILES: dict[str, dict[str, Any]] = {
    "deepspeed-zero2, from a file": {
        **AUTO,
        "prescale_gradients": True,
        "zero_optimization": {
            **{"stage": 2, "reduce_scatter": False, "parameter_alignment": True},
            **{"overlap_comm": True, "use_multi_rank_bucket_allreduce": False, "ignore_unused_parameters": True},
            **SMALL_BUCKETS,
        },
    },
    "deepspeed-zero3, from a file": {
        **AUTO,
        "zero_optimization": {
            **{"stage": 3, "prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": 40},
            **{"stage3_max_live_parameters": 2000, "stage3_max_reuse_distance": 1000, "sub_group_size": 4000},
            **{"memory_efficient_linear": False, "stage3_module_granularity_threshold": 0},
            **{"stage3_gather_16bit_weights_on_model_save": "auto", "overlap_comm": True, "enable_sanity_checks": True},
            **SMALL_BUCKETS,
        },
    },
    "accelerate-deepspeed-zero1, from a file": {
        **AUTO,
        "gradient_predivide_factor": 2.0,
        "zero_optimization": {"stage": "auto", "allgather_partitions": False, "overlap_comm": False, **SMALL_BUCKETS},
    },
}
"""Runs that take DeepSpeed's settings from a file -> what it holds: as much as goes that is not the default."""
RESUMED_AS = {"accelerate-deepspeed-zero1": "deepspeed-zero1", "deepspeed-zero2": "accelerate-deepspeed-zero2"}
"""Strategies whose checkpoint the same engine loads that has been started in the other way."""
NUM_STEPS = 3
SAVED_STEP = 2
WEIGHT_SEED = 100
"""Of rank 0; other ranks begin with other weights, which must not matter."""


def build(config: TrainConfig, ranks: Ranks, seed: int) -> AwkwardTrainer:
    return build_trainer(config, ranks, seed)


def run(name: str, ranks: Ranks, strategy: str | None = None) -> Recording:
    of, case, steps = RUNS[name]
    alone = strategy == "single"
    config = parity_config(strategy or of, 1 if alone else steps, ranks.world_size, case)
    if name in FILES and not alone:
        path = Path(tempfile.mkdtemp()) / "ds_config.json"
        path.write_text(json.dumps(FILES[name]), encoding="utf-8")
        parallel = dataclasses.replace(config.parallel, deepspeed_config=str(path))
        config = dataclasses.replace(config, parallel=parallel)
    recording = record(build(config, ranks, WEIGHT_SEED + ranks.rank), NUM_STEPS)
    if config.parallel.strategy in DEEPSPEED and config.train.max_grad_norm:
        # An engine clips in its step, after the moment at which gradients are recorded.
        for norm, gradients in zip(recording.grad_norms, recording.gradients, strict=True):
            for gradient in gradients.values():
                gradient *= min(1.0, config.train.max_grad_norm / (norm + 1e-6))
    return recording


def resume(strategy: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Save after some steps, go on, and go on again in a new trainer with other weights."""
    both = strategy, RESUMED_AS.get(strategy, strategy)
    config, later = (parity_config(each, 2, ranks.world_size, "all towers") for each in both)
    run = dataclasses.replace(config.run, output_dir=str(folder), name=strategy)
    config, later = dataclasses.replace(config, run=run), dataclasses.replace(later, run=run)
    first = build(config, ranks, WEIGHT_SEED)
    for _ in range(SAVED_STEP):
        first.train_step()
    first.save()
    expected = [first.train_step().loss for _ in range(2)]
    second = build(later, ranks, WEIGHT_SEED + 7)
    step = second.resume()
    found: dict[str, Any] = {"step": step, "expected": expected}
    found["losses"] = [second.train_step().loss for _ in range(2)]
    found["exact"] = second.evaluate().fraction
    return found


def find_a_nan(ranks: Ranks) -> list[str]:
    """Spoil the pictures of the second rank and look for them in an engine whose weights are shards."""
    trainer = build(parity_config("deepspeed-zero3", 2, ranks.world_size, "all towers"), ranks, WEIGHT_SEED)
    batches = trainer.load_step(0)
    for batch in batches if ranks.rank == 1 else []:
        if batch.pixel_values_ICHW is not None:
            batch.pixel_values_ICHW.fill_(float("nan"))
    trainer.load_step = lambda step: batches  # type: ignore[method-assign]
    return find_in_step(trainer)


def bad_gradient(case: str, ranks: Ranks) -> dict[str, Any]:
    """Make a step with a finite loss and a gradient of NaN, the first or after a good one; say what stopped it."""
    parity_case = case[3:].removesuffix(AT_FIRST)
    trainer = build(parity_config("deepspeed-zero" + case[0], 1, ranks.world_size, parity_case), ranks, WEIGHT_SEED)
    if not case.endswith(AT_FIRST):
        trainer.train_step()
    before, said = gather_engine_state(trainer.model), ""
    with spoil_gradients():
        try:
            trainer.train_step()
        except RuntimeError as error:
            said = str(error)
        found = find_in_step(trainer)
    after = gather_engine_state(trainer.model)
    kept = all(torch.equal(weight, after[name]) for name, weight in before.items())
    return {"said": said, "kept": kept, "step": trainer.step, "found": found}


def share_nothing(ranks: Ranks) -> str:
    """Start ZeRO-3 with DeepSpeed's own threshold, under which a small model stays whole; return what is said."""
    config = parity_config("deepspeed-zero3", 2, ranks.world_size, "all towers")
    ours = engines.build_deepspeed_settings

    def theirs(config: TrainConfig) -> dict[str, Any]:
        return ours(config) | {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100_000}}

    engines.build_deepspeed_settings = theirs
    try:
        build(config, ranks, WEIGHT_SEED)
    except RuntimeError as error:
        return str(error)
    finally:
        engines.build_deepspeed_settings = ours
    return ""


def start_with_variables(ranks: Ranks) -> dict[str, Any]:
    """Start DeepSpeed through accelerate in an environment that asks it for something else."""
    import accelerate

    os.environ.update({"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true"})
    mine = accelerate.PartialState(cpu=True)
    before, kind = dict(os.environ), mine.distributed_type
    try:
        engine: Any = build(parity_config("accelerate-deepspeed-zero2", 2, 2, "all towers"), ranks, WEIGHT_SEED).model
        is_same = dict(os.environ) == before and accelerate.PartialState().distributed_type == kind
        return {"is_same": is_same, "stage": engine.zero_optimization_stage()}
    finally:
        os.environ.pop("ACCELERATE_USE_CPU")
        os.environ.pop("ACCELERATE_USE_FSDP")
        accelerate.PartialState._reset_state()


def fall_back(ranks: Ranks) -> str:
    """Start DeepSpeed through an accelerator on CPU as its documentation says; return what is said."""
    import accelerate

    theirs = accelerate.Accelerator
    accelerate.Accelerator = partial(theirs, cpu=True)
    try:
        build(parity_config("accelerate-deepspeed-zero3", 2, 2, "all towers"), ranks, WEIGHT_SEED)
    except RuntimeError as error:
        return str(error)
    finally:
        accelerate.Accelerator = theirs
    return ""


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    found: dict[str, Any] = {name: run(name, ranks) for name in RUNS}
    found["resume"] = {strategy: resume(strategy, ranks, folder) for strategy in ENGINES}
    found["nan"] = find_a_nan(ranks)
    found["gradients"] = {case: bad_gradient(case, ranks) for case in BAD_GRADIENTS}
    found["variables"] = start_with_variables(ranks)
    found["fallback"] = fall_back(ranks)
    found["whole"] = share_nothing(ranks)
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
