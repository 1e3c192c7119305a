"""The combinations of strategies and degrees whose parity with one process is tested, and how one is run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from parity import GLOBAL_BATCH_SIZE, MAX_GRAD_NORM, AwkwardTrainer, Recording, awkward_samples, record, small_shape
from torch.distributed.tensor import DTensor

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.layout import find_layout
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.apply import named_plain_parameters
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.presets import VLMShape
from vlmcourse.train.trainer import Trainer

NUM_STEPS = 2
"""The second uses weights and moments of the first; what it makes of them is compared as weights."""
WEIGHT_SEED = 100


@dataclass(frozen=True)
class Combination:
    """One run on several ranks."""

    world_size: int
    parallel: dict[str, Any]
    accumulation_steps: int = 1
    freeze: tuple[str, ...] = ()
    precision: str = "fp32"
    heads: int = 2
    """Of the vision tower."""
    vocab_size: int = 256
    tied: bool = False
    starts_empty: bool = False
    """Whether rank 0 alone has weights, and the others a model on the meta device."""
    num_steps: int = NUM_STEPS


COMBINATIONS: dict[str, Combination] = {
    "zero1": Combination(2, {"strategy": "zero1"}),
    "zero1, accumulation, frozen vision": Combination(2, {"strategy": "zero1"}, 2, ("vision",)),
    "zero2, bf16": Combination(2, {"strategy": "zero2"}, precision="bf16", starts_empty=True),
    "zero2, accumulation, prefetch": Combination(2, {"strategy": "zero2", "prefetch": 2}, 2),
    "fsdp, prefetch, tied": Combination(2, {"strategy": "fsdp", "prefetch": 1}, tied=True, starts_empty=True),
    "tp": Combination(2, {"tp": 2}, heads=2),
    "tp, odd heads padded, tied": Combination(2, {"tp": 2, "vision_heads": "pad_heads"}, heads=3, tied=True),
    "tp, odd heads whole, frozen vision": Combination(
        2, {"tp": 2, "vision_heads": "mlp_only"}, 2, ("vision",), heads=3
    ),
    "tp of language alone, whole sequences": Combination(2, {"tp": 2, "vision_tp": 1, "sequence_parallel": False}),
    "cp by ring, ddp": Combination(2, {"strategy": "ddp", "cp": 2}, 2),
    "cp by all-gather, fsdp": Combination(
        2, {"strategy": "fsdp", "cp": 2, "cp_method": "allgather", "cp_order": "contiguous"}
    ),
    "pp, 1f1b": Combination(2, {"pp": 2}, 4),
    "pp, gpipe, vision apart, tied": Combination(
        2, {"pp": 2, "pp_schedule": "gpipe", "vision_stages": 1}, 2, tied=True
    ),
    "pp, interleaved, frozen vision": Combination(2, {"pp": 2, "pp_schedule": "interleaved"}, 4, ("vision",)),
    "pp, frozen vision apart": Combination(2, {"pp": 2, "vision_stages": 1}, 2, ("vision",)),
    "pp, zbv": Combination(2, {"pp": 2, "pp_schedule": "zbv"}, 4),
    "pp, dualpipev": Combination(2, {"pp": 2, "pp_schedule": "dualpipev"}, 4),
    "hsdp": Combination(4, {"strategy": "hsdp", "dp_replicate": 2}, 2, starts_empty=True),
    "zero1 on 4": Combination(4, {"strategy": "zero1"}, 2),
    "cp by ulysses, more ranks than key/value heads": Combination(
        4, {"strategy": "zero1", "cp": 4, "cp_method": "ulysses"}
    ),
    "fsdp x tp": Combination(4, {"strategy": "fsdp", "tp": 2}, 2),
    "zero2 x tp, language alone": Combination(4, {"strategy": "zero2", "tp": 2, "vision_tp": 1}),
    "hsdp x cp": Combination(4, {"strategy": "hsdp", "dp_replicate": 2, "cp": 2}),
    "ddp x cp, bf16": Combination(4, {"strategy": "ddp", "cp": 2}, 2, precision="bf16"),
    "fsdp over cp x tp": Combination(4, {"strategy": "fsdp", "cp": 2, "tp": 2}, 2),
    "pp x fsdp, 1f1b": Combination(4, {"strategy": "fsdp", "pp": 2}, 2),
    "pp x fsdp, interleaved, a stage of frozen language": Combination(
        4, {"strategy": "fsdp", "pp": 2, "pp_schedule": "interleaved"}, 2, ("language",)
    ),
    "pp x zero2, zbv": Combination(4, {"strategy": "zero2", "pp": 2, "pp_schedule": "zbv"}, 2),
    "pp x tp": Combination(4, {"pp": 2, "tp": 2}, 4),
    "pp x fsdp over cp": Combination(4, {"strategy": "fsdp", "pp": 2, "cp": 2}, 4),
    "pp x fsdp x tp": Combination(8, {"strategy": "fsdp", "pp": 2, "tp": 2}, 2),
    "pp x fsdp over cp x tp": Combination(8, {"strategy": "fsdp", "pp": 2, "cp": 2, "tp": 2}, 4),
    "hsdp x tp": Combination(8, {"strategy": "hsdp", "dp_replicate": 2, "tp": 2}, 2),
    "fsdp x cp x tp": Combination(8, {"strategy": "fsdp", "cp": 2, "tp": 2}, 2),
}


def divisible_shape(num_heads: int = 2, tied_embeddings: bool = False, vocab_size: int = 256) -> VLMShape:
    """Return the parity test's shape with widths that 2 divides; `num_heads` is of the vision tower, 12 wide each."""
    shape = small_shape(tied_embeddings)
    vision = dataclasses.replace(shape.vision, num_heads=num_heads, hidden_size=12 * num_heads, mlp_size=32)
    language = dataclasses.replace(shape.language, mlp_size=44, vocab_size=vocab_size)
    return dataclasses.replace(shape, vision=vision, language=language)


def config_of(combination: Combination, *, alone: bool = False) -> TrainConfig:
    """Return the run's configuration, or that of one process that it must equal."""
    parallel = {"strategy": "single"} if alone else combination.parallel
    steps = 1 if alone else combination.accumulation_steps
    table = {
        "model": {"freeze": list(combination.freeze)},
        "train": {
            "num_steps": combination.num_steps,
            "accumulation_steps": steps,
            "max_grad_norm": MAX_GRAD_NORM,
            "precision": combination.precision,
        },
        "optimizer": {"warmup_steps": 2, "eps": 1e-5, "weight_decay": 0.1, "lr_vision": 2e-3, "lr_language": 5e-4},
        "parallel": parallel,
    }
    dp_degree = find_layout(parse_config(table).parallel, 1 if alone else combination.world_size).dp_degree
    return parse_config(table, {"train.micro_batch_size": GLOBAL_BATCH_SIZE // (steps * dp_degree)})


def check_placements(trainer: Trainer) -> None:
    """Refuse gradients that are not stored as their weights are: whole ones, say, for weights in shards."""
    for name, parameter in named_plain_parameters(trainer.model):
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            gradient = parameter.grad
            assert isinstance(gradient, DTensor), name
            assert gradient.placements == parameter.placements, (name, gradient.placements, parameter.placements)
            assert gradient.to_local().shape == parameter.to_local().shape, name


def run(combination: Combination, ranks: Ranks, seed: int = WEIGHT_SEED) -> Recording:
    """Train and keep everything; one rank alone is the reference."""
    device = "meta" if combination.starts_empty and not ranks.is_main else "cpu"
    model = build_model(divisible_shape(combination.heads, combination.tied), device=device, seed=seed)
    samples = awkward_samples()
    config = config_of(combination, alone=ranks.world_size == 1)
    trainer = AwkwardTrainer(config, ranks, model=model, train_data=samples, eval_data=samples[:1], show_progress=False)
    trainer.before_update.append(check_placements)
    return record(trainer)
