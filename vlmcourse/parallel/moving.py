"""Layers of a pipeline change ranks in the middle of training, with all that the optimizer knows of them.

Enters: a pipeline at work, its optimizer and another split. Leaves: the same two objects, changed in place: each rank
has the stages of the new split, and for every parameter the moments, step count, learning rate and decay that it had
where it was before. Only what changes ranks is sent, tensor by tensor under its name. Gradients are not kept: move
between an update and the next forward. Chapter 1.

The stages are cut out of a model on the meta device and wrapped anew, so strategies that put their own things in the
place of weights meet plain modules. In that moment a rank holds its weights (not its moments) twice.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.parallel.comm import local_part
from vlmcourse.parallel.data import local_optimizer
from vlmcourse.parallel.parcels import WEIGHT, Parcel, pack, regroup, share_groups
from vlmcourse.parallel.pipeline import Pipeline
from vlmcourse.parallel.stages import VLMStage, layer_parameters
from vlmcourse.planner.schedules import find_tied_problem
from vlmcourse.planner.stages import StageSplit


@dataclass(frozen=True)
class Moved:
    """What one rank's part in a move was."""

    sent: tuple[str, ...]
    """Names of parameters that went to other ranks, in the order of the layers."""
    received: tuple[str, ...]
    sent_bytes: int
    """Weights and optimizer state."""
    seconds: float


class Move(NamedTuple):
    """A parameter on its way from one rank of a pipeline to another."""

    name: str
    sender: int
    receiver: int


def move_layers(
    pipeline: Pipeline, optimizer: Optimizer, split: StageSplit, everyone: dist.ProcessGroup | None = None
) -> Moved:
    """Give the stages of a pipeline other layers; training goes on as if they had always had them.

    Args:
        pipeline: changed in place; its wrapper is applied to the new stages. Hooks that others put on its modules are
            gone, and so are gradients.
        optimizer: of this rank's parameters, one with a state a parameter, such as AdamW; changed in place. All
            ranks get the same groups, see `share_groups`.
        split: which layers stand on which stage from now on.
        everyone: all ranks that have stages of the model, data-parallel copies too; None is all ranks there are. All of
            them must call this.

    Returns:
        What this rank sent and received.

    Raises:
        ValueError: on all ranks, before any tensor is sent, if the split does not fit, ranks want different ones, or a
            wrapper or the optimizer keeps what cannot be moved.
    Communicates: three all-gathers of objects; then weights and optimizer state of each parameter that changes ranks,
        once, from its old rank to its new one.
    """
    started_s = time.perf_counter()
    _check_together(find_move_problem(pipeline, optimizer, split), split, everyone)
    share_groups(optimizer, everyone)
    old = pipeline.stages[0]
    frame = build_model(old.shape, device="meta", dtype=old.dtype)
    moves = plan_moves(pipeline, split, names_by_layer(frame))
    parcels = pack(named_parameters(pipeline.stages), optimizer)
    contents, trained = _exchange_contents(pipeline, parcels, [m.name for m in moves if m.sender == pipeline.pp_rank])
    sent_bytes = _exchange_tensors(pipeline, parcels, contents, moves)
    for name, parameter in frame.named_parameters():
        parameter.requires_grad_(trained[name])
    _cut_and_fill(pipeline, frame.train(old.training), split, parcels)
    regroup(named_parameters(pipeline.stages), optimizer, parcels)
    if pipeline.device.type == "cuda":
        gc.collect()  # wrappers refer to each other in circles that hold the old weights
    return Moved(
        sent=tuple(m.name for m in moves if m.sender == pipeline.pp_rank),
        received=tuple(m.name for m in moves if m.receiver == pipeline.pp_rank),
        sent_bytes=sent_bytes,
        seconds=time.perf_counter() - started_s,
    )


def find_move_problem(pipeline: Pipeline, optimizer: Optimizer, split: StageSplit | None = None) -> str | None:
    """Return what keeps the layers of a pipeline from being moved (to a split), with what to change; None if nothing.

    Sees only what this rank has: another rank may find something else.
    """
    named = [(name, p) for stage in pipeline.stages for name, p in stage.named_parameters()]
    known = {id(p) for _, p in named}
    sharded = any(isinstance(module, FSDPModule) for module in pipeline.modules)
    if any(isinstance(module, DistributedDataParallel) for module in pipeline.modules):
        return "a stage is in a DDP, whose buckets hold its gradients: choose fsdp, or no data parallelism"
    for name, parameter in named:
        axes = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
        if "tp" in axes or (isinstance(parameter, DTensor) and not sharded):
            return (
                f"{name} is split by tensor parallelism, which starts from whole weights, and no rank has them any "
                "more: set tp=1, or choose the split at the start with split_by_cost"
            )
    if any(True for stage in pipeline.stages for _ in stage.buffers()):
        return "a stage has buffers: only parameters are moved"
    if local_optimizer(optimizer) is not optimizer:
        return "a ZeroRedundancyOptimizer keeps state for parameters of its own choice: use a plain AdamW"
    if any("param_names" in group for group in optimizer.param_groups):
        return "the optimizer was given named parameters: build it from parameters alone"
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        return "the optimizer has parameters that are not the pipeline's: build it from pipeline.parameters()"
    return _find_split_problem(pipeline, split, sharded) if split is not None else None


def _find_split_problem(pipeline: Pipeline, split: StageSplit, sharded: bool) -> str | None:
    present = pipeline.split
    wanted, have = (
        (s.num_vision_layers, s.num_language_layers, s.num_stages) for s in (split, present)
    )  # fmt: skip
    if wanted != have:
        return (
            "vision blocks, language blocks and stages of the new split are "
            f"{wanted}, those of the pipeline {have}: only the cuts may change"
        )
    for stage in range(split.num_stages) if sharded else ():
        if not split.vision_blocks(stage) and not split.language_blocks(stage):
            return (
                f"stage {stage} would be {split.describe(stage)} alone: FSDP shards by blocks, so give it a block "
                "(split_by_cost with block_each)"
            )
    tied = pipeline.stages[0].shape.language.tied_embeddings
    return find_tied_problem(pipeline.schedule, split, tied_embeddings=tied)


def _check_together(problem: str | None, split: StageSplit, everyone: dist.ProcessGroup | None) -> None:
    """Raise on all ranks if one has a problem, or wants another split than the first."""
    found: list[Any] = [None] * dist.get_world_size(everyone)
    dist.all_gather_object(found, (dist.get_rank(), problem, split.layers_per_stage), group=everyone)
    refused = [f"rank {rank}: {said}" for rank, said, _ in found if said is not None]
    if refused:
        raise ValueError(f"No layer was moved: {refused[0]}")
    others = [(rank, layers) for rank, _, layers in found if layers != found[0][2]]
    if others:
        raise ValueError(
            f"No layer was moved: rank {found[0][0]} wants layers_per_stage = {found[0][2]} and rank {others[0][0]} "
            f"{others[0][1]}: decide from numbers that all ranks share"
        )


def names_by_layer(model: VLM) -> list[list[str]]:
    """Return the names of each layer's parameters of a plain model, in the order of `StageSplit`'s layers.

    A tied embedding is in two layers: where tokens are embedded, and in the output.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in parameters] for parameters in layer_parameters(model)]


def _stages_with(split: StageSplit, names: list[list[str]]) -> dict[str, list[int]]:
    """Return on which stages each parameter is, in order; a tied embedding may be on two."""
    found: dict[str, list[int]] = {}
    for stage in range(split.num_stages):
        for layer in split.layers(stage):
            for name in names[layer]:
                stages = found.setdefault(name, [])
                if stage not in stages:
                    stages.append(stage)
    return found


def plan_moves(pipeline: Pipeline, split: StageSplit, names: list[list[str]]) -> list[Move]:
    """Return what changes ranks between the pipeline's split and another one, in an order that all ranks agree on.

    Args:
        pipeline: with the present split and the rank of each stage.
        split: the new one.
        names: what `names_by_layer` returned.
    """
    before, after = _stages_with(pipeline.split, names), _stages_with(split, names)
    moves = []
    for name, stages in after.items():
        holders = [pipeline.owner[stage] for stage in before[name]]
        receivers = dict.fromkeys(pipeline.owner[stage] for stage in stages)
        # Copies of a tied embedding are equal, so any rank that has one needs no other.
        moves += [Move(name, holders[0], receiver) for receiver in receivers if receiver not in holders]
    return moves


def _exchange_contents(
    pipeline: Pipeline, parcels: dict[str, Parcel], sent: list[str]
) -> tuple[dict[str, Parcel], dict[str, bool]]:
    """Tell the ranks of a pipeline what will be sent, and which parameters are trained."""
    trained = {name: p.requires_grad for stage in pipeline.stages for name, p in stage.named_parameters()}
    found: list[Any] = [None] * pipeline.pp
    mine = {name: parcels[name].list_contents() for name in dict.fromkeys(sent)}, trained
    dist.all_gather_object(found, mine, group=pipeline.group)
    contents, everything = {}, {}
    for of_rank, trained_there in found:
        contents |= of_rank
        everything |= trained_there
    return contents, everything


def _exchange_tensors(
    pipeline: Pipeline, parcels: dict[str, Parcel], contents: dict[str, Parcel], moves: Iterable[Move]
) -> int:
    """Send what goes, and put what comes among the parcels; return the bytes sent.

    All ranks go through the moves in one order, and wait for those they take part in, so none waits in a circle.
    """
    sent_bytes = 0
    for (sender, receiver), some in groupby(moves, key=lambda move: (move.sender, move.receiver)):
        operations = []
        for move in some:
            content = contents[move.name]
            if pipeline.pp_rank == sender:
                for tensor in parcels[move.name].tensors.values():
                    sent_bytes += tensor.numel() * tensor.element_size()
                    operations.append(_send(tensor, receiver, pipeline.group))
            elif pipeline.pp_rank == receiver:
                tensors = {
                    key: torch.empty(s, dtype=d, device=pipeline.device) for key, (s, d) in content.tensors.items()
                }
                operations += [_receive(tensor, sender, pipeline.group) for tensor in tensors.values()]
                parcels[move.name] = Parcel(tensors, content.values, content.group)
        # A shard of a small tensor may be empty; there is nothing to send then.
        operations = [operation for operation in operations if operation.tensor.numel()]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
    return sent_bytes


def _send(tensor: Tensor, receiver: int, group: dist.ProcessGroup) -> dist.P2POp:
    return dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=receiver)


def _receive(tensor: Tensor, sender: int, group: dist.ProcessGroup) -> dist.P2POp:
    return dist.P2POp(dist.irecv, tensor, group=group, group_peer=sender)


def _cut_and_fill(pipeline: Pipeline, frame: VLM, split: StageSplit, parcels: dict[str, Parcel]) -> None:
    """Cut the new stages out of the frame, wrap them and give them their weights."""
    wrap, sharded = pipeline.wrap, any(isinstance(module, FSDPModule) for module in pipeline.modules)

    @torch.no_grad()
    def fill(stage: nn.Module) -> None:
        stage.to_empty(device=pipeline.device)
        for name, parameter in stage.named_parameters():
            local_part(parameter).copy_(parcels[name].tensors[WEIGHT])

    def fill_and_wrap(stage: nn.Module) -> nn.Module:
        # What stays whole is wrapped with its weights; what is sharded is cut before there is anything to cut.
        if not sharded:
            fill(stage)
        module = wrap(stage) if wrap else stage
        if sharded:
            fill(stage)
        return module

    pipeline.cut(frame, split, fill_and_wrap)


def named_parameters(stages: Iterable[VLMStage]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of some stages; a tied embedding may come twice."""
    for stage in stages:
        yield from stage.named_parameters()
