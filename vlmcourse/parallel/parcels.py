"""All that belongs to a parameter, packed to go to another rank and unpacked there: weight, optimizer state, group.

Enters: named parameters and their optimizer. Leaves: a `Parcel` for each, and later the optimizer with the parameters
that its rank has then. Ranks first agree on the optimizer's groups: all have the same ones in one order, empty where a
rank has no parameter of it. So a group is a number, and an LR scheduler finds as many groups after a move as before.
Chapter 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vlmcourse.parallel.comm import local_part

WEIGHT = "weight"
"""The name of the parameter itself among the tensors that belong to it."""


class Value(NamedTuple):
    """Something small that an optimizer keeps of a parameter."""

    value: Any
    dtype: torch.dtype | None = None
    """If it is a tensor of one number; `value` is then that number."""
    on_device: bool = False
    """Whether that tensor is where the weights are."""


@dataclass
class Parcel:
    """All that belongs to a parameter on one rank: what is as large as it as tensors, the rest as values."""

    tensors: dict[str, Any]
    """Under `WEIGHT` and the optimizer's names, this rank's parts; as the list of contents that precedes the tensors
    themselves, pairs of shape and type."""
    values: dict[str, Value]
    """What else the optimizer keeps, such as the step count."""
    group: int | None
    """The number of its group in the optimizer, the same on all ranks; None where it is not trained."""

    def list_contents(self) -> Parcel:
        """Return this without its tensors, to tell another rank what will come."""
        contents = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in self.tensors.items()}
        return Parcel(contents, self.values, self.group)


def share_groups(optimizer: Optimizer, everyone: dist.ProcessGroup | None = None) -> None:
    """Give the optimizers of all ranks the same groups in the same order; parameters and rates stay as they are.

    Args:
        optimizer: this rank's; changed in place. Groups that have no parameter on any rank are dropped.
        everyone: all ranks that have stages of the model; None is all ranks there are. All of them call this.

    Raises:
        ValueError: on all ranks, if groups are missing somewhere and an LR scheduler has already counted them.
    Communicates: one all-gather of objects.
    """
    mine = [(_options(group), bool(group["params"])) for group in optimizer.param_groups]
    found: list[Any] = [None] * dist.get_world_size(everyone)
    dist.all_gather_object(found, mine, group=everyone)
    of_ranks = [[options for options, _ in groups] for groups in found]
    if all(groups == of_ranks[0] for groups in of_ranks):
        return
    if any("initial_lr" in options for groups in of_ranks for options in groups):
        raise ValueError(
            f"rank {dist.get_rank()}: the ranks' optimizers have {[len(groups) for groups in of_ranks]} parameter "
            "groups, not all alike, and an LR scheduler has counted them; parameters bring their groups along when "
            "they move: make the AdaptivePipelineScheduler first (it gives all ranks the same groups), then the LR "
            "scheduler"
        )
    wanted: list[dict[str, Any]] = []
    for groups in found:
        left = list(wanted)
        for options in (options for options, is_used in groups if is_used):
            if options in left:
                left.remove(options)
            else:
                wanted.append(options)
    own = [group for group in optimizer.param_groups if group["params"]]
    shared = []
    for options in wanted:
        group = next((group for group in own if _options(group) == options), None)
        if group is None:
            shared.append({"params": [], **options})
        else:
            own = [other for other in own if other is not group]
            shared.append(group)
    optimizer.param_groups[:] = shared


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def pack(named: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer) -> dict[str, Parcel]:
    """Return all that this rank has, by name; of two copies of a tied embedding the first."""
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    parcels: dict[str, Parcel] = {}
    for name, parameter in named:
        if name not in parcels:
            parcels[name] = _pack_parameter(parameter, optimizer, groups.get(id(parameter)))
    return parcels


def _pack_parameter(parameter: nn.Parameter, optimizer: Optimizer, group: int | None) -> Parcel:
    parcel = Parcel({WEIGHT: local_part(parameter.detach())}, {}, group)
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
            parcel.tensors[key] = local_part(value)
        elif isinstance(value, Tensor) and not value.dim():
            parcel.values[key] = Value(value.item(), value.dtype, value.device == parameter.device)
        else:
            parcel.values[key] = Value(value)
    return parcel


def regroup(named: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer, parcels: dict[str, Parcel]) -> None:
    """Give the optimizer the parameters that are here now, in the groups in which they were, and their state."""
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.state.clear()
    used: set[str] = set()
    for name, parameter in named:
        parcel = parcels[name]
        if parcel.group is None:
            continue
        optimizer.param_groups[parcel.group]["params"].append(parameter)
        state = _unpack_state(parameter, parcel, copy=name in used)
        if state:
            optimizer.state[parameter] = state
        used.add(name)


def _unpack_state(parameter: nn.Parameter, parcel: Parcel, copy: bool) -> dict[str, Any]:
    """Return a parameter's state; a second copy of a tied embedding gets tensors of its own."""
    state: dict[str, Any] = {}
    for key, (value, dtype, on_device) in parcel.values.items():
        if dtype is not None:
            value = torch.tensor(value, dtype=dtype, device=parameter.device if on_device else "cpu")
        state[key] = value
    for key, tensor in parcel.tensors.items():
        if key != WEIGHT:
            state[key] = _like(parameter, tensor.clone() if copy else tensor)
    return state


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a rank's part of a tensor as a `DTensor` where the parameter is one."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
