"""Turn a plain model into one that trains on all ranks, and prove that it is what its strategy's name says.

Enters: a plain model with no word of ranks in it, and `ParallelConfig`. Leaves: the wrapped model. A new strategy gets
a file of its own, a line in `apply_strategy`, and a check in `check_strategy`: equal losses do not show that a strategy
silently did something simpler, so wrapper, sizes and shards are checked.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.config import ParallelConfig
from vlmcourse.layout import Layout, check_usable, find_layout
from vlmcourse.models.vlm import VLM
from vlmcourse.parallel.accelerated import apply_accelerate
from vlmcourse.parallel.agreement import check_agreement, check_plain
from vlmcourse.parallel.compression import compress_gradients, find_compression
from vlmcourse.parallel.context import apply_context, check_context, take_part_of_labels
from vlmcourse.parallel.data import apply_ddp
from vlmcourse.parallel.fsdp import apply_fsdp, broadcast_weights, build_offload_policy, check_fsdp_offload
from vlmcourse.parallel.layered import check_one_at_a_time, find_layers, take_one_at_a_time
from vlmcourse.parallel.mesh import Place, find_place
from vlmcourse.parallel.pipelined import PipelinedModel, apply_pipeline
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.parallel.stages import LossSum, VLMStage
from vlmcourse.parallel.sync import is_engine
from vlmcourse.parallel.tensor import apply_tensor, check_tensor
from vlmcourse.parallel.verify import check_equal_weights, check_sharding
from vlmcourse.state_offload import OffloadConfig
from vlmcourse.strategies import DEEPSPEED, SHARDED
from vlmcourse.values import ConfigError


def apply_strategy(
    model: nn.Module,
    config: ParallelConfig,
    ranks: Ranks,
    place: Place | None = None,
    loss_sum: LossSum | None = None,
    activations: Callable[[nn.Module], None] | None = None,
    offload: OffloadConfig | None = None,
) -> nn.Module:
    """Distribute `model` over the ranks as `config` says, and check that it happened.

    Args:
        model: a plain model on CPU or `ranks.device`, its towers already frozen where wanted. Where weights are sharded
            and nothing else is split, all ranks but 0 may bring one on the meta device.
        config: strategy and degrees; not auto any more, and not one of `DEEPSPEED` (see `engines.start_deepspeed`).
        ranks: this process's place.
        place: what `find_place` returned for the same arguments, where that has been called already.
        loss_sum: makes the sum of token losses of logits and labels; a pipeline needs it.
        activations: changes in place what the plain model, or each stage of it, keeps for backward; from
            `train.activations.plan_activations`.
        offload: the section [offload]; fsdp only. By default all is on the device.

    Returns:
        The model, changed in place; under ddp and zero1 in `DistributedDataParallel`. A pipeline of stages of it is a
        `PipelinedModel`.

    Raises:
        ValueError: if the strategy cannot use this number of ranks, this kind of model or `offload`, or is still auto;
            if the model is distributed already; on all ranks, if one brings another configuration or other parameters.
        RuntimeError: if the result is not what the strategy's name says.
    Communicates: a broadcast of all weights from rank 0 where there are several ranks, and a few bytes of checks.
    """
    asked = _describe_arguments(ranks, place, loss_sum, activations, offload)
    check_agreement(model, config, ranks, asked)  # first: a refusal of one rank alone would let the others wait for it
    check_plain(model)
    check_usable(config)
    if found := (offload or OffloadConfig()).contradictions(config):
        raise ConfigError("The offload", found)
    if config.strategy in DEEPSPEED:
        raise ValueError(
            f"parallel.strategy = {config.strategy!r}: an engine takes the optimizer too; call "
            "engines.start_deepspeed, as a Trainer does"
        )
    if config.tp * config.cp * config.pp > 1:
        as_vlm(model)
    _check_place(place, config, ranks)
    place = place or find_place(config, ranks)
    if config.pp > 1:
        if loss_sum is None:
            raise ValueError(f"pp={config.pp}: the last stage of a pipeline needs loss_sum, such as token_loss_sum")
        broadcast_weights(model)
        loss_of_part = _loss_of_part(loss_sum, config, place)
        wrap = partial(_distribute, config=config, ranks=ranks, place=place, activations=activations)
        wrapped: nn.Module = apply_pipeline(as_vlm(model), config, place, ranks.device, loss_of_part, wrap)
    else:
        wrapped = _distribute(model, config, ranks, place, activations, offload)
    check_strategy(wrapped, config, ranks, place)
    if offload is not None and not offload.is_plain:
        _check_offload(wrapped, offload, ranks)
    return wrapped


def _distribute(
    model: nn.Module,
    config: ParallelConfig,
    ranks: Ranks,
    place: Place,
    activations: Callable[[nn.Module], None] | None,
    offload: OffloadConfig | None = None,
) -> nn.Module:
    """Apply what concerns a whole model or a stage of one: tensor parallelism first, data parallelism around it all."""
    are_equal = config.pp > 1
    if config.tp > 1:
        if not are_equal:
            broadcast_weights(model)
        are_equal = True
        apply_tensor(
            as_vlm(_moved(model, ranks)),
            place.axis("tp"),
            vision=config.vision_plan,
            sequence_parallel=config.sequence_parallel,
        )
        if isinstance(model, VLMStage) and config.sequence_parallel:
            model.sequence_parts = config.tp
    if config.cp > 1:
        apply_context(as_vlm(model), place.group("cp"), config.cp_method, config.cp_order)
    if activations is not None:  # between the two: recomputation is inside the hooks that gather a block's weights
        activations(model)
    if config.strategy in ("ddp", "zero1"):
        wrapped = apply_ddp(_moved(model, ranks), ranks)
        if config.compression != "none":
            compress_gradients(wrapped, config.compression)
        return wrapped
    if config.strategy == "accelerate-ddp":
        return apply_accelerate(_moved(model, ranks), ranks)
    if config.strategy in SHARDED:  # moves to the device block by block, as it shards
        offload = offload or OffloadConfig()
        sharded = apply_fsdp(
            model,
            ranks,
            mesh=place.shard_mesh(),
            reshard_after_forward=config.strategy != "zero2",
            prefetch=config.prefetch,
            are_equal=are_equal,
            offload=build_offload_policy(offload, ranks),
            units=find_layers(model) if offload.layered else None,
        )
        if offload.layered:
            take_one_at_a_time(sharded)
        return sharded
    return _moved(model, ranks)


def _moved(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Return the model on its rank's device; where it is there, as it is: `to` exchanges fake parameters for others."""
    is_there = all(tensor.device.type == ranks.device.type for tensor in (*model.parameters(), *model.buffers()))
    return model if is_there and ranks.device.type == "cpu" else model.to(ranks.device)


def _loss_of_part(loss_sum: LossSum, config: ParallelConfig, place: Place) -> LossSum:
    """Let a loss see the labels of this rank's positions only, where the sequence is split.

    A loss with a parameter `take_part` gets the whole labels and cuts for itself: its weights may depend on them.
    """
    if config.cp == 1:
        return loss_sum
    take_part = partial(take_part_of_labels, group=place.group("cp"), order=config.cp_order)
    if "take_part" in inspect.signature(loss_sum).parameters:
        return partial(cast(Callable[..., Tensor], loss_sum), take_part=take_part)
    return lambda logits, labels_BS: loss_sum(logits, take_part(labels_BS))


def as_vlm(model: nn.Module) -> VLM:
    """Refuse a model whose parts tensor, context and pipeline parallelism would not know.

    Raises:
        ValueError: if it is not a `VLM`.
    """
    if not isinstance(model, VLM):
        raise ValueError(
            f"tp, cp and pp are plans for the parts of a VLM, and this is a {type(model).__name__}: use ddp or fsdp, "
            "or write a plan for its layers as parallel/tensor.py does"
        )
    return model


def check_strategy(model: nn.Module, config: ParallelConfig, ranks: Ranks, place: Place | None = None) -> None:
    """Refuse a model that is not distributed as `config` says.

    Where a pipeline is cut is not looked at, since layers may move; nor is what a model does not show and a training
    step reads: `gradient_sync`, `adaptive` and `timeout_s`.

    Raises:
        ValueError: if the strategy cannot use this number of ranks.
        RuntimeError: if the wrapper, the group's size, the shards or the equality of weights over ranks is wrong, or
            the degree or method of an axis, a schedule or a compression is another one.
    Communicates: whole weights: an all-gather of 8 bytes a parameter; shards: an all-reduce of 16 bytes.
    """
    check_usable(config)
    _check_place(place, config, ranks)
    layout = find_layout(config, ranks.world_size)
    where = f"rank {ranks.rank}: strategy {config.strategy!r}"
    if ranks.world_size > 1:
        group_size = dist.get_world_size() if dist.is_initialized() else 0
        if group_size != ranks.world_size:
            raise RuntimeError(f"{where}: the process group has {group_size} ranks instead of {ranks.world_size}")
    if isinstance(model, PipelinedModel) != (config.pp > 1):
        raise RuntimeError(f"{where}: pp={config.pp}, but the model is a {type(model).__name__}")
    if isinstance(model, PipelinedModel):
        found = model.pipeline.pp, model.pipeline.schedule
        if found != (config.pp, config.pp_schedule):
            raise RuntimeError(
                f"{where}: the pipeline has pp={found[0]} and pp_schedule={found[1]!r} instead of pp={config.pp} and "
                f"pp_schedule={config.pp_schedule!r}"
            )
    for part in model.stages if isinstance(model, PipelinedModel) else [model]:
        _check_part(part, config, layout, ranks, where)


def _check_offload(model: nn.Module, offload: OffloadConfig, ranks: Ranks) -> None:
    """Refuse a sharded model that moves something else than was asked for, or more than one layer at a time."""
    check_fsdp_offload(model, offload, ranks)
    if offload.layered:
        check_one_at_a_time(model, ranks)


def _describe_arguments(
    ranks: Ranks, place: Place | None, loss_sum: object, activations: object, offload: OffloadConfig | None
) -> dict[str, str]:
    """Return which arguments of `apply_strategy` a rank brings, in words."""
    return {
        "the place": "none" if place is None else f"{place.layout}, rank is right: {place.rank == ranks.rank}",
        "loss_sum": "none" if loss_sum is None else "given",
        "activations": "none" if activations is None else "given",
        "offload": repr(dataclasses.replace(offload or OffloadConfig(), nvme_path="")),
    }


def _check_place(place: Place | None, config: ParallelConfig, ranks: Ranks) -> None:
    """Refuse a place of another configuration or rank: the model would be cut in another way than it says."""
    expected = find_layout(config, ranks.world_size)
    if place is not None and place.layout != expected:
        raise ValueError(
            f"rank {ranks.rank}: strategy {config.strategy!r} makes {expected} of {ranks.world_size} ranks, but the "
            f"place is of {place.layout}: call find_place with the same configuration"
        )
    if place is not None and place.rank != ranks.rank:
        raise ValueError(
            f"rank {ranks.rank}: the place is that of rank {place.rank}: call find_place with this process's ranks"
        )


def _check_part(model: nn.Module, config: ParallelConfig, layout: Layout, ranks: Ranks, where: str) -> None:
    """Check one model, or one stage of a pipeline."""
    plain, is_ddp = unwrap(model), isinstance(model, DistributedDataParallel)
    if config.tp > 1:
        check_tensor(as_vlm(plain), config.vision_plan, config.sequence_parallel)
    if isinstance(plain, VLM):
        check_context(plain, config.cp, config.cp_method, config.cp_order)
    compression = find_compression(model)
    if compression != config.compression:
        raise RuntimeError(f"{where}: gradients travel with compression {compression!r}, not {config.compression!r}")
    if config.strategy in ("ddp", "zero1", "accelerate-ddp"):
        if not is_ddp:
            raise RuntimeError(f"{where}: the model is a {type(model).__name__}, not a DistributedDataParallel")
        check_equal_weights(plain, ranks)
    elif config.strategy in SHARDED:
        check_sharding(model, config, layout, ranks, where)
    elif is_ddp or isinstance(model, FSDPModule):
        raise RuntimeError(f"{where}: the model is wrapped as {type(model).__name__}, which waits for other ranks")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the plain model inside a DDP wrapper or a DeepSpeed engine; any other model as it is."""
    is_wrapper = isinstance(model, DistributedDataParallel) or is_engine(model)
    return cast(nn.Module, model.module) if is_wrapper else model


def plain_parts(model: nn.Module) -> list[nn.Module]:
    """Return what this rank has of a model, in modules whose parameters have the names of the plain model."""
    return list(model.pipeline.stages) if isinstance(model, PipelinedModel) else [unwrap(model)]


def named_plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield this rank's parameters with their names in the plain model, under any strategy."""
    for part in plain_parts(model):
        yield from part.named_parameters()
