"""The planner's bytes of a step beside a real step's ledger, owner by owner, on the ranks at hand.

Enters: names of strategies. Leaves: a `Comparison` for each rank, and a table of them. All micro-batches are alike and
full: so many tokens a sample, so many tiles. In fp32, and on CPU ranks the ledger sees every byte. Chapter 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.data.samples import Batch
from vlmcourse.layout import align
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.ledger import StepLedger, measure_ledger
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.job import describe_config
from vlmcourse.planner.rank_peak import find_peak, most_stored
from vlmcourse.planner.run_peak import build_run_load
from vlmcourse.planner.workload import Workload
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.train.trainer import Trainer

OWNERS = ("weights", "gradients", "optimizer", "activations")
TOLERANCE = 0.03
"""Of an owner's bytes: what may be off."""
FULL = {"activations.vision": "full", "activations.language": "full"}
Settings = Mapping[str, Any]
CHECKED: dict[int, dict[str, Settings]] = {
    1: {
        "one rank": {},
        "accumulation": {"train.accumulation_steps": 3},
        "vision frozen": {"model.freeze": ["vision"]},
        "language frozen": {"model.freeze": ["language"]},
        "vision and projector frozen": {"model.freeze": ["vision", "projector"]},
        "recomputed": FULL,
        "recomputed, selective": dict.fromkeys(FULL, "selective"),
        "recomputed, sqrt and every:2": {"activations.vision": "every:2", "activations.language": "sqrt"},
        "bf16, fp32 master copies": {"train.precision": "bf16_master"},
    },
    2: {
        "ddp": {"parallel.strategy": "ddp"},
        "zero1": {"parallel.strategy": "zero1"},
        "zero2": {"parallel.strategy": "zero2"},
        "fsdp": {"parallel.strategy": "fsdp"},
        "fsdp, recomputed": {"parallel.strategy": "fsdp", **FULL},
        "fsdp, accumulation": {"parallel.strategy": "fsdp", "train.accumulation_steps": 3},
        "fsdp, exchange with every": {
            "parallel.strategy": "fsdp",
            "train.accumulation_steps": 3,
            "parallel.gradient_sync": "every",
        },
        "tp": {"parallel.tp": 2, "parallel.sequence_parallel": False},
        "tp, sequence parallel": {"parallel.tp": 2},
        "tp, vision whole": {"parallel.tp": 2, "parallel.vision_tp": 1},
        "tp, vision MLP only, selective": {
            "parallel.tp": 2,
            "parallel.vision_heads": "mlp_only",
            "activations.language": "selective",
        },
        "cp, ring": {"parallel.strategy": "ddp", "parallel.cp": 2},
        "cp, allgather": {"parallel.strategy": "ddp", "parallel.cp": 2, "parallel.cp_method": "allgather"},
        "cp, ulysses": {"parallel.strategy": "ddp", "parallel.cp": 2, "parallel.cp_method": "ulysses"},
        "pp, 1f1b": {"parallel.pp": 2, "train.accumulation_steps": 4},
        "pp, 1f1b, recomputed": {"parallel.pp": 2, "train.accumulation_steps": 4, **FULL},
        "pp, gpipe": {"parallel.pp": 2, "train.accumulation_steps": 4, "parallel.pp_schedule": "gpipe"},
        "pp, interleaved": {"parallel.pp": 2, "train.accumulation_steps": 4, "parallel.pp_schedule": "interleaved"},
        "pp, zbv": {"parallel.pp": 2, "train.accumulation_steps": 4, "parallel.pp_schedule": "zbv"},
        "pp, dualpipev": {"parallel.pp": 2, "train.accumulation_steps": 4, "parallel.pp_schedule": "dualpipev"},
    },
    4: {
        "fsdp + tp": {"parallel.strategy": "fsdp", "parallel.tp": 2},
        "fsdp + cp": {"parallel.strategy": "fsdp", "parallel.cp": 2},
        "fsdp + pp": {"parallel.strategy": "fsdp", "parallel.pp": 2, "train.accumulation_steps": 4},
        "tp + cp": {"parallel.strategy": "fsdp", "parallel.cp": 2, "parallel.tp": 2},
        "tp + pp": {"parallel.tp": 2, "parallel.pp": 2, "train.accumulation_steps": 4},
        "pp of four, 1f1b": {"parallel.pp": 4, "train.accumulation_steps": 6},
        "hsdp": {"parallel.strategy": "hsdp", "parallel.dp_replicate": 2},
    },
}
"""Number of ranks -> what is compared on so many: the settings in which a run differs from `checked_config`'s."""
FIRST_TEXT_TOKEN = 10


WORKLOAD = Workload(seq_len=64, tiles_per_sample=2)


@dataclass(frozen=True)
class Comparison:
    """One rank under one strategy, in bytes."""

    strategy: str
    rank: int
    predicted: dict[str, float]
    """By owner: the state between backward and update, and the most that is kept for backward at once."""
    measured: dict[str, float]
    peak_predicted: int
    """Of all owners together, at the fullest moment."""
    peak_measured: int

    def error(self, owner: str) -> float:
        """Return predicted / measured - 1 of an owner."""
        return self.predicted[owner] / self.measured[owner] - 1

    @property
    def peak_error(self) -> float:
        """The same of the peak."""
        return self.peak_predicted / self.peak_measured - 1

    @property
    def worst(self) -> float:
        """The largest error of an owner, without its sign."""
        return max(abs(self.error(owner)) for owner in OWNERS)


def checked_shape() -> VLMShape:
    """Return the tiny model with four layers in each tower, so that two ranks have two stages each."""
    tiny = get_model("tiny")
    vision, language = (dataclasses.replace(tower, num_layers=4) for tower in (tiny.vision, tiny.language))
    return dataclasses.replace(tiny, vision=vision, language=language)


def checked_config(settings: Settings) -> TrainConfig:
    """Return a short fp32 run of two samples a micro-batch with some settings, by dotted name."""
    train = {"num_steps": 10, "micro_batch_size": 2, "precision": "fp32"}
    return parse_config({"train": train, "data": {"num_train_samples": 64, "num_eval_samples": 8}}, settings)


class FullBatches(Trainer):
    """A trainer whose micro-batches all have the same shapes."""

    workload: Workload

    def load_step(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches; `step` changes nothing."""
        return [self._fill() for _ in range(self.config.train.accumulation_steps)]

    def _fill(self) -> Batch:
        samples, tokens = self.config.train.micro_batch_size, self.workload.seq_len
        tiles, per_tile = self.workload.tiles_per_sample, self.shape.num_visual_tokens_per_tile
        ids_BS = torch.full((samples, tokens), FIRST_TEXT_TOKEN)
        ids_BS[:, : tiles * per_tile] = self.shape.image_token_id
        side_px = self.shape.vision.image_size_px
        return Batch(
            input_ids_BS=ids_BS,
            labels_BS=torch.full((samples, tokens), FIRST_TEXT_TOKEN),
            attention_mask_BS=torch.ones(samples, tokens, dtype=torch.bool),
            pixel_values_ICHW=torch.ones(samples * tiles, 3, side_px, side_px),
            tiles_per_sample=(tiles,) * samples,
            sample_ids=tuple(map(str, range(samples))),
            tokens_per_tile=per_tile,
        )


def compare(strategy: str, settings: Settings, ranks: Ranks, workload: Workload = WORKLOAD) -> Comparison:
    """Train two steps of the checked model, watch the second, and set the planner's bytes beside it.

    All ranks call it together.

    Args:
        strategy: a name for it.
        settings: what differs from `checked_config`; no engine of another project.
        ranks: this process's place.
        workload: tokens and tiles of each sample.

    Communicates: what training does.
    """
    config, shape = checked_config(settings), checked_shape()
    trainer = FullBatches(config, ranks, model=build_model(shape, seed=0), show_progress=False)
    trainer.workload = workload
    trainer.train_step()
    measured: dict[str, float] = {}

    def look(_: Any) -> None:
        state = measure_ledger(trainer.model, trainer.optimizer)
        measured.update({owner: getattr(state, f"{owner}_bytes") for owner in OWNERS[:3]})

    trainer.before_update.append(look)
    with StepLedger(trainer.model, trainer.optimizer) as ledger:
        trainer.train_step()
    measured["activations"] = max(sample.by_owner().get("activations", 0) for sample in ledger.samples)
    on_gpu = ranks.device.type == "cuda"
    job = describe_config(config, ranks.world_size, shape, workload, on_gpu=on_gpu)
    load = build_run_load(job, trainer.place.layout.coordinates(ranks.rank)["pp"])
    predicted = {owner: getattr(load, owner) for owner in OWNERS[:3]} | {"activations": most_stored(load)}
    return Comparison(strategy, ranks.rank, predicted, measured, find_peak(load).total_bytes, ledger.peak().total_bytes)


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """Return a line a comparison: measured bytes and the planner's error, of each owner and of the peak."""
    rows = [["strategy", "rank", *OWNERS, "peak"]]
    for found in comparisons:
        cells = [f"{found.measured[owner] / 1e6:.2f} MB {found.error(owner):+.1%}" for owner in OWNERS]
        rows.append(
            [found.strategy, str(found.rank), *cells, f"{found.peak_measured / 1e6:.2f} MB {found.peak_error:+.1%}"]
        )
    return align(rows)
