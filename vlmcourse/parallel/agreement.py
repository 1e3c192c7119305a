"""What must be alike on all ranks before a model is distributed, and not have been done to it yet.

Enters: a plain model and a configuration. Leaves: nothing, or one error on all ranks alike: ranks that distribute
something else wait for each other until the time limit ends them, or send bytes of one tensor into another.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.layout import ParallelConfig
from vlmcourse.models.vlm import VLM
from vlmcourse.parallel.comm import check_alike
from vlmcourse.parallel.mesh import describe_config
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.parallel.sync import is_engine

WRAPPERS = (DistributedDataParallel, FSDPModule, PipelinedModel)


def find_distributed(model: nn.Module) -> str:
    """Return what has distributed a model already, in words; nothing if it is plain."""
    if is_engine(model):
        return "an engine"
    for name, module in model.named_modules():
        for wrapper in WRAPPERS:
            if isinstance(module, wrapper):
                return f"{wrapper.__name__} around {name or 'all of it'}"
    split = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if split:
        return f"{len(split)} parameters are DTensors, the first {split[0]}"
    return "context parallelism" if isinstance(model, VLM) and model.language.take_part is not None else ""


def check_plain(model: nn.Module) -> None:
    """Refuse a model that is distributed already.

    Raises:
        ValueError: naming what has been done to it.
    """
    if done := find_distributed(model):
        raise ValueError(
            f"this {type(model).__name__} is distributed already ({done}): a strategy is applied once, to a plain "
            "model; build it anew for another strategy"
        )


def check_agreement(model: nn.Module, config: ParallelConfig, ranks: Ranks, asked: dict[str, str]) -> None:
    """Refuse ranks that bring another configuration or another model than rank 0.

    Weights may differ, and lie on any device.

    Args:
        model: plain.
        config: how it is to be distributed.
        ranks: this process's place.
        asked: what else must be alike, in words, by name.

    Raises:
        ValueError: on all ranks, naming those that differ from rank 0 and in what.
    Communicates: see `check_alike`.
    """
    check_alike(_describe(model, config) | asked, ranks)


def _describe(model: nn.Module, config: ParallelConfig) -> dict[str, str]:
    """Return by name what must be alike; values in words."""
    found = describe_config(config) | {"the model": find_distributed(model) or "plain"}
    for name, parameter in model.named_parameters() if found["the model"] == "plain" else ():
        state = "trained" if parameter.requires_grad else "frozen"
        found[name] = f"{tuple(parameter.shape)}, {parameter.dtype}, {state}"
    return found
