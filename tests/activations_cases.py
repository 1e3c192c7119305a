"""Which activation policies the tests run under which strategy, on a small model with awkward data."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch
from parity import MAX_GRAD_NORM, AwkwardTrainer, awkward_samples, small_shape

from vlmcourse.config import parse_config
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.activations import ActivationMeter
from vlmcourse.monitor.ledger import StepLedger, measure_ledger
from vlmcourse.parallel.counting import CollectiveCounter
from vlmcourse.parallel.gather import gather_plain_state
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.presets import VLMShape
from vlmcourse.train.activations_report import report_activations
from vlmcourse.train.trainer import Trainer

FULL = {"vision": "full", "language": "full"}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": FULL,
    "every:2": {"vision": "every:2", "language": "every:2"},
    "sqrt": {"vision": "sqrt", "language": "sqrt"},
    "selective": {"vision": "selective", "language": "selective"},
    "mixed": {"vision": "full", "language": "selective"},
    "offload": {"offload": True},
    "full, offload": {**FULL, "offload": True},
    "sqrt, offload": {"vision": "sqrt", "language": "sqrt", "offload": True},
}
ALL = tuple(POLICIES)
NO_OFFLOAD = tuple(name for name in POLICIES if "offload" not in name)
FEW = ("none", "full", "sqrt")
STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "single": ({"strategy": "single"}, {}, ALL),
    "ddp": ({"strategy": "ddp"}, {}, ("none", "full", "sqrt", "full, offload")),
    "zero1": ({"strategy": "zero1"}, {}, ("none", "full")),
    "zero2": ({"strategy": "zero2"}, {}, ("none", "sqrt")),
    "fsdp": ({"strategy": "fsdp"}, {}, ("none", "full", "every:2", "sqrt", "selective", "offload")),
    "fsdp, vision frozen": ({"strategy": "fsdp"}, {"model.freeze": ["vision"]}, ("none", "language full")),
    "tp": ({"tp": 2}, {}, ("none", "full", "sqrt", "selective")),
    "cp": ({"strategy": "ddp", "cp": 2}, {}, ("none", "full", "sqrt", "selective")),
    "ulysses": ({"strategy": "ddp", "cp": 2, "cp_method": "ulysses"}, {}, ("none", "full", "sqrt", "selective")),
    "1f1b": ({"pp": 2}, {}, ("none", "full", "every:2", "sqrt, offload")),
    "gpipe": ({"pp": 2, "pp_schedule": "gpipe"}, {}, ("none", "full", "every:2", "sqrt", "selective", "offload")),
    "interleaved": ({"pp": 2, "pp_schedule": "interleaved"}, {}, ("none", "full", "every:2", "sqrt", "selective")),
    "zbv": ({"pp": 2, "pp_schedule": "zbv"}, {}, ("none", "full", "sqrt", "offload")),
    "adaptive": ({"pp": 2, "adaptive": True}, {}, ("none", "full")),
    "single, language frozen": ({"strategy": "single"}, {"model.freeze": ["language"]}, ("none", "full", "offload")),
    "single, fp16": ({"strategy": "single"}, {"train.precision": "fp16"}, ("none", "full")),
    "single, bf16_pure": ({"strategy": "single"}, {"train.precision": "bf16_pure"}, ("none", "selective")),
    "single, fp8": ({"strategy": "single"}, {"train.precision": "fp8"}, ("none", "full", "selective")),
    "single, bf16": (
        {"strategy": "single"},
        {"train.precision": "bf16"},
        ("none", "full", "sqrt", "selective", "offload"),
    ),
    "fsdp, bf16": ({"strategy": "fsdp"}, {"train.precision": "bf16"}, ("none", "offload")),
}
"""By name: [parallel], other keys, and the policies to run; strategies with "single" in the name need one rank."""
POLICIES["language full"] = {"language": "full"}
FOUR_RANKS = "hsdp"
STRATEGIES[FOUR_RANKS] = (
    {"strategy": "hsdp", "dp_replicate": 2},
    {},
    ("none", "full", "every:2", "sqrt", "selective", "offload"),
)
"""Two copies of two shards; the only strategy here that needs more than two ranks."""
LEDGERS = ("fsdp", "ddp", "tp", "ulysses", "1f1b", "gpipe", "interleaved")
"""Strategies on two ranks whose ledger and report are checked."""


def is_exact(strategy: str) -> bool:
    """Whether a strategy's cases on ranks run in float64, where all of them must be one process's run to 1e-9.

    Not those of another precision or with frozen towers, nor an adaptive pipeline, whose first step is that of 1f1b.
    """
    _, keys, _ = STRATEGIES[strategy]
    return not keys and strategy != "adaptive"


def deep_shape() -> VLMShape:
    """Return the parity shape with enough blocks for segments of two."""
    shape = small_shape()
    vision = dataclasses.replace(shape.vision, num_layers=4, mlp_size=32)
    language = dataclasses.replace(shape.language, num_layers=4, mlp_size=48)
    return dataclasses.replace(shape, vision=vision, language=language)


def build_case(strategy: str, policy: str, ranks: Ranks, dtype: torch.dtype = torch.float32) -> AwkwardTrainer:
    """Return the trainer of a case, its weights of some type; every step of all cases has the same eight samples."""
    parallel, keys, _ = STRATEGIES[strategy]
    num_samples = 8 // (
        ranks.world_size if parallel.get("strategy", "single") != "single" and "cp" not in parallel else 1
    )
    steps = 4 if "pp" in parallel else 2
    table = {
        "train": {
            "num_steps": 2,
            "micro_batch_size": num_samples // steps,
            "accumulation_steps": steps,
            "max_grad_norm": MAX_GRAD_NORM,
        },
        "optimizer": {"warmup_steps": 2, "eps": 1e-5, "lr_vision": 2e-3},
        "parallel": parallel,
        "activations": POLICIES[policy],
    }
    samples = awkward_samples()
    return AwkwardTrainer(
        parse_config(table, keys),
        ranks,
        model=build_model(deep_shape(), dtype=dtype, seed=1 + ranks.rank if "pp" not in parallel else 1),
        train_data=samples,
        eval_data=samples[:4],
        show_progress=False,
    )


def exact_gradients(strategy: str, policy: str, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the whole gradients of a case's first step in float64."""
    trainer = build_case(strategy, policy, ranks, torch.float64)
    found: dict[str, torch.Tensor] = {}
    trainer.before_update.append(
        lambda trainer: found.update(gather_plain_state(trainer.model, trainer.shape, gradients=True))
    )
    trainer.train_step()
    return found


def run_case(strategy: str, policy: str, ranks: Ranks, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Make a step; return its loss, whole gradients, collectives, and the most that was kept."""
    trainer = build_case(strategy, policy, ranks, dtype)
    gradients: list[dict[str, torch.Tensor]] = []
    calls: dict[str, int] = {}
    with ActivationMeter() as meter, CollectiveCounter() as counter:

        def keep(trainer: Trainer) -> None:
            if not gradients:
                calls.update(Counter(call.kind for call in counter.calls))
            gradients.append(gather_plain_state(trainer.model, trainer.shape, gradients=True))

        trainer.before_update.append(keep)
        losses = [trainer.train_step().loss]
    # A second step: moved and gathered blocks are covered too.
    if policy == "full" and strategy in ("fsdp", "adaptive"):
        losses.append(trainer.train_step().loss)
    return {"losses": losses, "gradients": gradients, "calls": calls, "peak_bytes": meter.peak_bytes}


def run_ledger(strategy: str, ranks: Ranks) -> dict[str, Any]:
    """Make two steps with blocks recomputed, the second inside a ledger; return what it and the report say."""
    table = {
        "train": {"num_steps": 2, "micro_batch_size": 4, "accumulation_steps": 2},
        "parallel": STRATEGIES[strategy][0],
        "activations": {"vision": "full", "language": "every:2"},
    }
    samples = awkward_samples()
    model = build_model(deep_shape(), seed=1)
    trainer = AwkwardTrainer(
        parse_config(table), ranks, model=model, train_data=samples, eval_data=samples[:1], show_progress=False
    )
    trainer.train_step()
    with StepLedger(trainer.model, trainer.optimizer) as ledger:
        trainer.train_step()
    state = measure_ledger(trainer.model, trainer.optimizer)
    last = ledger.samples[-1].by_owner()
    return {
        "ledger": [last.get(owner, 0) for owner in ("weights", "gradients", "optimizer")],
        "state": [state.weights_bytes, state.gradients_bytes, state.optimizer_bytes],
        "gathered": [sample.by_owner().get("gathered", 0) for sample in ledger.samples],
        "negative": any(size < 0 for sample in ledger.samples for size in sample.live_bytes.values()),
        "towers": report_activations(trainer.model, trainer.train_step),
    }


def check_ledger(found: dict[str, Any], strategy: str, rank: int) -> None:
    """Check that what `run_ledger` found is what a rank must hold, and that the report names the blocks covered."""
    # FSDP pads uneven shards: they take a little more memory than they have elements.
    is_sharded = strategy in ("fsdp", "hsdp")
    padded = 1.02 if is_sharded else 1
    assert all(want <= got <= padded * want for got, want in zip(found["ledger"], found["state"], strict=True))
    assert not found["negative"]
    whole = max(found["gathered"])
    # Whole weights come and go under FSDP only, a few blocks at a time: less than twice what the shards are.
    assert (0 < whole < 2 * found["state"][0]) == is_sharded and found["gathered"][-1] == 0
    towers = {tower.tower: tower for tower in found["towers"]}
    if strategy in ("1f1b", "gpipe"):  # vision on the first rank, language on the second
        here, elsewhere = ("vision", "language") if rank == 0 else ("language", "vision")
        assert towers[here].covered and not towers[elsewhere].num_blocks
    elif strategy == "interleaved":  # each rank has a stage of either tower
        numbers = {name: towers[name].covered for name in ("vision", "language")}
        assert numbers == ({"vision": (0, 1), "language": (1,)}, {"vision": (2, 3), "language": (3,)})[rank]
    else:
        assert towers["vision"].covered == (0, 1, 2, 3) and towers["language"].covered == (1, 3)
        kept = towers["language"].kept_by_block
        assert min(kept[0], kept[2]) > 5 * max(kept[1], kept[3]) > 0 and towers["vision"].recomputed_bytes > 0
