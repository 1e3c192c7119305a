"""Tensor parallelism of a vision-language model: a different plan for the vision tower and for the language tower.

Enters: a plain `VLM` (or a pipeline stage of one) and the one-axis `tp` mesh. Leaves: the same object, every parameter
a `DTensor` on that mesh: layers that begin a branch are split by columns (`q_proj`, `up_proj`: Shard(0) of the weight),
layers that end it by rows (`out_proj`, `down_proj`: Shard(1)), the vocabulary by rows, norms and the rest whole. Each
branch needs one exchange at its end forward and one at its beginning backward. All ranks of the axis work on the same
batch. Chapter 1.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053); torch.distributed.tensor.parallel documentation.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from vlmcourse.models.vit import VisionTower
from vlmcourse.models.vlm import VLM
from vlmcourse.parallel.comm import local_part
from vlmcourse.parallel.padding import pad_vision_heads, pad_vocabulary, plain_sizes
from vlmcourse.parallel.ranks import answers
from vlmcourse.parallel.tensor_styles import (
    Branch,
    Replicated,
    SequenceLayout,
    SplitSequence,
    VocabularyEmbedding,
    WholeWidthNorm,
    check_sequence,
)
from vlmcourse.parallel.vocabulary import split_predict
from vlmcourse.planner.degrees import tensor_problems

Role = Literal["column", "row", "vocabulary", "wide norm", "norm", "whole"]
ROLE_OF_LAYER: dict[str, Role] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "column"),
    **dict.fromkeys(("out_proj", "down_proj"), "row"),
    **dict.fromkeys(("q_norm", "k_norm"), "wide norm"),
    **dict.fromkeys(("embedding", "lm_head"), "vocabulary"),
}


def apply_tensor(model: VLM, mesh: DeviceMesh, *, vision: str = "split", sequence_parallel: bool = True) -> VLM:
    """Split every layer of a model over the ranks of one mesh axis.

    Args:
        model: plain, on its device, towers already frozen where wanted; may lack parts (a pipeline stage). Weights may
            differ between the ranks of the axis, those of its rank 0 win.
        mesh: one axis, `tp`; with one rank the model is returned as it is.
        vision: what the vision tower does. "split": attention by heads, which `tp` must divide, and the MLP.
            "pad_heads": the same after heads of zeros were added until `tp` divides. "mlp_only": attention whole on
            every rank, MLP split. "replicate": the whole tower on every rank. The projector is split in every case.
        sequence_parallel: between the branches of language blocks, each rank holds its own 1 / tp of the positions, so
            norms and residuals cost 1 / tp of the memory. Every sequence must then be a multiple of tp.

    Returns:
        `model`, changed in place. In training it returns logits as a `DTensor` split along the vocabulary, which
        `train.loss` takes; where `tp` does not divide the vocabulary, rows of zeros were added whose logits are -inf.
        With a cache or `last_only` it returns whole, plain logits.

    Raises:
        ValueError: naming every number that `tp` does not divide.
        RuntimeError: if the result is not what the plan says.
    Communicates: now, each weight from rank 0 of the axis; then per block and direction what `Branch` says.
    """
    tp_degree = mesh.size()
    problems = tensor_problems(model.shape, tp_degree, vision)
    if problems:
        raise ValueError("; ".join(problems))
    if tp_degree == 1:
        return model
    if vision == "pad_heads":
        pad_vision_heads(model, tp_degree)
    pad_vocabulary(model, tp_degree)
    layout = SequenceLayout(sequence_parallel)
    parallelize_module(model, mesh, plan_styles(model, vision, layout))
    if getattr(model, "language", None) is not None:
        split_predict(model.language, mesh, layout)
    check = partial(_check_sequence_first, tp_degree=tp_degree, layout=layout)
    model.register_forward_pre_hook(check, with_kwargs=True)
    check_tensor(model, vision, sequence_parallel)
    return model


def roles(model: nn.Module, vision: str) -> Iterator[tuple[str, nn.Module, Role]]:
    """Yield every module that holds parameters of its own: name, module, and how a plan treats it."""
    for name, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        tower, layer = name.partition(".")[0], name.rpartition(".")[2]
        role = ROLE_OF_LAYER.get(layer, "norm" if tower == "language" else "whole")
        if tower == "vision" and (vision == "replicate" or (vision == "mlp_only" and ".attention." in name)):
            role = "whole"
        yield name, module, role


def plan_styles(model: VLM, vision: str, layout: SequenceLayout) -> dict[str, ParallelStyle]:
    """Return the plan for `parallelize_module`: name of a module -> how it is split.

    Args:
        model: plain, padded.
        vision: the plan of its vision tower.
        layout: of the language tower's sequence.
    """
    whole = SequenceLayout(sequence_parallel=False)
    plan: dict[str, ParallelStyle] = {}
    for name, module, role in roles(model, vision):
        parent = name.rpartition(".")[0]
        in_branch = parent.endswith((".attention", ".mlp"))
        if role == "row" and in_branch:
            plan[parent] = Branch(layout if parent.startswith("language.") else whole)
        plan[name] = _style(role, module, layout, model.shape.vision.hidden_size, in_branch)
    if "language.blocks.0.norm1" in plan:  # a later pipeline stage gets its part from the stage before
        plan["language.blocks.0"] = SplitSequence(layout)
    return plan


def _style(role: Role, module: nn.Module, layout: SequenceLayout, vision_width: int, in_branch: bool) -> ParallelStyle:
    if role == "column":
        return ColwiseParallel()
    if role == "row":
        # The branch around it knows what becomes of the ranks' partial sums; the projector is no branch.
        return RowwiseParallel(output_layouts=Partial(), use_local_output=False) if in_branch else RowwiseParallel()
    if role == "vocabulary":
        if isinstance(module, nn.Embedding):
            return VocabularyEmbedding()
        return ColwiseParallel(use_local_output=False)
    if role == "wide norm":
        return WholeWidthNorm(vision_width)
    if isinstance(module, VisionTower):  # a pipeline stage calls `embed` alone
        return Replicated(method="embed")
    return Replicated(layout if role == "norm" else None)


def _check_sequence_first(
    model: VLM, args: tuple[Any, ...], kwargs: dict[str, Any], *, tp_degree: int, layout: SequenceLayout
) -> None:
    """Let the model refuse a sequence that cannot be split before anything is computed or sent."""
    # By name: a pipeline stage's forward takes the same things in another order.
    given = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
    generates = given.get("kv_cache") is not None or given.get("last_only", False)
    if layout.is_split and not generates:
        check_sequence(given["input_ids_BS"].shape[1], tp_degree)


def splits_sequence(model: nn.Module) -> bool:
    """Whether between the branches of language blocks each rank holds its own part of the positions."""
    hooks = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, partial)]
    return any(hook.func is _check_sequence_first and hook.keywords["layout"].is_split for hook in hooks)


def planned_placement(role: Role, parameter: str) -> Placement:
    """Return how a parameter lies on the `tp` axis: `parameter` is its name in its module, weight or bias."""
    if role == "row":
        return Shard(1) if parameter == "weight" else Replicate()
    return Replicate() if role in ("norm", "whole") else Shard(0)


def check_tensor(model: VLM, vision: str = "split", sequence_parallel: bool = True) -> None:
    """Refuse a model that is not split as its plan says; also under FSDP2.

    Args:
        model: from `apply_tensor`.
        vision: the plan it was given.
        sequence_parallel: whether it was asked to split sequences.

    Raises:
        RuntimeError: naming the first parameter that is not split as planned, or the numbers of stored elements if
            they do not add up over the ranks.
    Communicates: an all-reduce of 8 bytes over each axis that the model is on.
    """
    wrong: list[str] = []
    num_expected = num_stored = 0
    mesh: DeviceMesh | None = None
    for name, module, role in roles(model, vision):
        for own, parameter in module.named_parameters(recurse=False):
            planned = planned_placement(role, own)
            if not isinstance(parameter, DTensor):
                wrong.append(f"{name}.{own} is a plain tensor instead of {_say(planned)}")
                continue
            # FSDP2 puts its axes before `tp`, which is the last.
            mesh, placements = parameter.device_mesh, parameter.placements
            if placements[-1] != planned:
                wrong.append(f"{name}.{own} is {_say(placements[-1])} instead of {_say(planned)}")
            copies = [mesh.size(axis) for axis, placement in enumerate(placements) if placement.is_replicate()]
            num_expected += parameter.numel() * math.prod(copies)
            num_stored += local_part(parameter).numel()
    where = f"rank {dist.get_rank()}: tensor parallelism with vision={vision!r}"
    if splits_sequence(model) != sequence_parallel:
        raise RuntimeError(
            f"{where}: sequence_parallel={sequence_parallel}, but the model was split with {not sequence_parallel}"
        )
    if wrong or mesh is None:
        found = f"{len(wrong)} parameters are not split as planned, the first: {wrong[0]}" if wrong else "no parameters"
        raise RuntimeError(f"{where}: {found}; use the model that apply_tensor returned with this plan")
    if not answers():
        return  # what the ranks store together, none of them can say
    total = torch.tensor(num_stored, device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(total, group=mesh.get_group(axis))
    if int(total) != num_expected:
        raise RuntimeError(
            f"{where}: {mesh.size()} ranks store {int(total)} elements instead of {num_expected}: every split element "
            "must be on one rank and every whole one on all"
        )


@dataclass(frozen=True)
class ParameterSplit:
    """How one parameter lies on the ranks."""

    placement: str
    """On the `tp` axis: Shard(0), Shard(1) or Replicate."""
    plain_size: tuple[int, ...]
    """In the plain model."""
    padded_size: tuple[int, ...]
    """On all ranks together; longer than `plain_size` where zeros were added."""
    local_size: tuple[int, ...]
    """What this rank stores."""


def describe_tensor_plan(model: VLM) -> dict[str, ParameterSplit]:
    """Return how every parameter is split, read from the parameters themselves.

    Args:
        model: from `apply_tensor`, also under FSDP2 (`local_size` is then after both splits).
    """
    sizes, described = plain_sizes(model.shape), {}
    for name, parameter in model.named_parameters():
        placement = parameter.placements[-1] if isinstance(parameter, DTensor) else Replicate()
        described[name] = ParameterSplit(
            _say(placement),
            tuple(sizes[name]),
            tuple(parameter.shape),
            tuple(local_part(parameter).shape),
        )
    return described


def _say(placement: Placement) -> str:
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else type(placement).__name__
