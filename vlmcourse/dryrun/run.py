"""Play one optimizer step of one rank at the model's full depth.

Enters: a configuration, a rank, a number of ranks, a micro-batch's size. Leaves: a `DryRun`. The model is built,
frozen, cast, distributed and stepped by the functions that a `Trainer` calls, in its order; what a `Trainer` reads
from values (token counts, the loss, whether gradients are finite) has no values here and is left out.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.config import TrainConfig
from vlmcourse.dryrun.batch import BatchSize, build_batches, largest_batch
from vlmcourse.dryrun.buckets import let_ddp_play
from vlmcourse.dryrun.ledger import PlaceLedger
from vlmcourse.dryrun.refusals import check_playable
from vlmcourse.dryrun.result import Call, DryRun, PlayedStep, summarise
from vlmcourse.dryrun.world import fake_tensors, imagine_weights, played_rank
from vlmcourse.layout import AXES, ParallelConfig
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.apply import apply_strategy
from vlmcourse.parallel.data import local_optimizer
from vlmcourse.parallel.mesh import Place, find_place
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.degrees import settle
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.train.accumulate import Accumulation, run_one_by_one
from vlmcourse.train.activations import plan_activations
from vlmcourse.train.low_precision import LowPrecisionAdamW
from vlmcourse.train.optimizer import build_optimizer, freeze_towers, scale_to_norm
from vlmcourse.train.precision import prepare_weights

MAX_PLAYED = 3
"""Micro-batches that are played: the first finds no gradients, the last exchanges them, and all between are alike."""


@dataclass(frozen=True)
class Setting:
    """What does not depend on the depth of the model."""

    config: TrainConfig
    parallel: ParallelConfig
    ranks: Ranks
    place: Place
    size: BatchSize


def dry_run(
    config: TrainConfig,
    rank: int,
    world_size: int,
    *,
    shape: VLMShape | None = None,
    size: BatchSize | None = None,
) -> DryRun:
    """Play one optimizer step of one rank, at the model's full depth.

    It is a step in the middle of a run: the optimizer has its state. A process that belongs to a group of ranks cannot
    play one.

    Args:
        config: the run.
        rank: which rank, from 0.
        world_size: ranks of the run.
        shape: of the model; by default that of `config.model.preset`.
        size: of a micro-batch; by default what `largest_batch` returns.

    Returns:
        Bytes over time, collectives and FLOPs of this rank.

    Raises:
        ConfigError: if the configuration asks for what is not played.
        ValueError: if ranks, degrees, model and batch do not fit together.
        RuntimeError: if this process is a rank of a group already.
    Communicates: nothing.
    """
    started_s = time.perf_counter()
    shape = shape or get_model(config.model.preset)
    parallel, size = prepare(config, world_size, shape, size)
    with played_rank(rank, world_size) as ranks:
        setting = Setting(config, parallel, ranks, find_place(parallel, ranks, shape), size)
        played = play_step(setting, shape)
    return summarise(played, setting.place, shape, size, is_full_depth=True, seconds=time.perf_counter() - started_s)


def prepare(
    config: TrainConfig, world_size: int, shape: VLMShape, size: BatchSize | None
) -> tuple[ParallelConfig, BatchSize]:
    """Settle the degrees and the batch of a run, and refuse what is not played; arguments and errors of `dry_run`."""
    parallel, _ = settle(config.parallel, world_size, shape, config.train.accumulation_steps)
    check_playable(config, parallel)
    return parallel, size or largest_batch(config, parallel, shape)


def play_step(setting: Setting, shape: VLMShape) -> PlayedStep:
    """Play a step of a model of any depth, inside of `played_rank`; see `dry_run`."""
    with fake_tensors():
        model = _distribute(setting, shape)
        optimizer = _optimizer_of(setting, model)
        _make_state(model, optimizer)
        return watch_step(model, optimizer, setting, shape)


def count_own_elements(setting: Setting, shape: VLMShape) -> int:
    """Return the elements that this rank's optimizer updates, inside of `played_rank`; nothing is run."""
    with fake_tensors():
        optimizer = _optimizer_of(setting, _build(setting, shape))
        own = local_optimizer(optimizer)
        return sum(p.numel() for group in own.param_groups for p in group["params"])


def _build(setting: Setting, shape: VLMShape) -> nn.Module:
    """Build, freeze and cast the plain model, in the order of a `Trainer`."""
    with unset_fake_temporarily():
        model = build_model(shape, device="meta")
        freeze_towers(model, setting.config.model.freeze)
        prepare_weights(model, setting.config, setting.ranks.device)
    imagine_weights(model)
    return model


def _distribute(setting: Setting, shape: VLMShape) -> nn.Module:
    """Distribute the model as a `Trainer` does; inside of `fake_tensors`."""
    config, parallel = setting.config, setting.parallel
    plain = _build(setting, shape)
    activations = plan_activations(config, parallel, shape)
    # DDP makes its buckets as it wraps, and these must be fake. The others read real tables of ranks as they cut fake
    # weights, which stay fake anywhere.
    needs_mode = parallel.strategy in ("ddp", "zero1")
    with nullcontext() if needs_mode else unset_fake_temporarily():
        model = apply_strategy(plain, parallel, setting.ranks, setting.place, None, activations, config.offload)
    if isinstance(model, DistributedDataParallel):
        let_ddp_play(model)
    return model


def _optimizer_of(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    config = setting.config
    return build_optimizer(
        model,
        config.optimizer,
        shards_state=setting.parallel.strategy == "zero1",
        precision=config.train.precision,
        seed=config.run.seed,
    )


def _make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the state that it makes in its first step, of gradients that are there for this only."""
    own = local_optimizer(optimizer)
    if isinstance(own, LowPrecisionAdamW):
        for parameter in (p for group in own.param_groups for p in group["params"]):
            own.init_state(parameter)
        return
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def watch_step(model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, shape: VLMShape) -> PlayedStep:
    """Make one optimizer step as `Trainer.train_step` does, and watch it; inside of `fake_tensors`.

    Args:
        model: distributed.
        optimizer: of the model, with its state.
        setting: the run; where it has more micro-batches than are played, the middle one counts for several.
        shape: of the model.
    """
    config, parallel = setting.config.train, setting.parallel
    ledger = PlaceLedger(model, optimizer, of_fakes=True)
    model.train()
    with ledger:
        batches = build_batches(setting.size, shape, min(config.accumulation_steps, MAX_PLAYED))
        optimizer.zero_grad(set_to_none=True)
        how = Accumulation(weighting=config.loss_weighting, every=parallel.gradient_sync == "every")
        run_one_by_one(model, batches, setting.ranks, config.precision, 1.0, how)
        ledger.enter_stage("clip")
        scale_to_norm(model.parameters(), config.max_grad_norm)
        ledger.enter_stage("update")
        optimizer.step()
    times = [1] * len(batches)
    if len(batches) == MAX_PLAYED:
        times[1] = config.accumulation_steps - (MAX_PLAYED - 1)
    with unset_fake_temporarily():  # a mesh is a real table
        axes = name_groups(setting.place)
    calls = []
    for micro_batch, call in ledger.record.calls:
        axis = axes.get(call.group_name, "all ranks")
        calls.append(Call(call.kind, axis, call.num_ranks, call.payload_bytes, times[micro_batch]))
    flops = sum(times[i] * count for i, count in enumerate(ledger.record.flops))
    return PlayedStep(tuple(ledger.record.moments), tuple(calls), flops)


def name_groups(place: Place) -> dict[str, str]:
    """Return the axis of each process group of a mesh, by the group's name."""
    if place.mesh is None:
        return {}
    named: dict[str, str] = {place.group(axis).group_name: axis for axis in AXES if place.mesh[axis].size() > 1}
    if place.layout.cp > 1:
        shards = place.shard_mesh()
        last = (shards.mesh_dim_names or ("",))[-1]
        named[shards.get_group(last).group_name] = "dp_shard x cp"
    return named
