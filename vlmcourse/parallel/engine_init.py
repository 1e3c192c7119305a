"""ZeRO-3 from the first weight on: a model of which no rank ever holds more than one module and its own shards.

Enters: the shape of a model and the run. Leaves: the model with every parameter cut up by `deepspeed.zero.Init`, and
the weights that `build_model` gives for the same seed. A model that is built whole and cut up afterwards needs, for a
moment, all of its weights on every rank. Chapter 5.

Every rank draws the same numbers, in the order of the plain model, into one module at a time, and keeps its part of
them. A folder of weights is read as a whole on every rank and cut up then: nothing of this happens there.

Source: Rajbhandari et al. 2020 (ZeRO), section 5.3; documentation of `deepspeed.zero.Init`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vlmcourse.models.init import init_weights
from vlmcourse.models.vlm import VLM
from vlmcourse.presets import VLMShape


def build_in_shards(settings: dict[str, Any], shape: VLMShape, seed: int, rank: int) -> VLM:
    """Build a model in shards of ZeRO-3, with the weights of a plain model of the same seed.

    Args:
        settings: of the engine that will train the model; they say where shards lie.
        shape: what to build.
        seed: of the weights.
        rank: this one.

    Returns:
        The model: each parameter is empty, and has this rank's flat shard in `ds_tensor`, fp32.

    Raises:
        RuntimeError: if a parameter was not cut up.
    Communicates: for each module, an all-gather of its weights and a broadcast of them from rank 0, twice.
    """
    import deepspeed  # for the ranks' devices, and in their process group, already

    with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.float32):
        model = VLM(shape)

    @contextmanager
    def whole(parameters: list[nn.Parameter]) -> Iterator[None]:
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            yield

    # A plain model's weights are drawn on the CPU.
    init_weights(model, seed, device=torch.device("cpu"), whole=whole)
    left = [name for name, p in model.named_parameters() if not hasattr(p, "ds_tensor") or p.numel()]
    if left:
        raise RuntimeError(
            f"rank {rank}: deepspeed.zero.Init left {len(left)} parameters whole, the first is {left[0]}: all must be "
            "cut up; look at zero_optimization in the engine's settings"
        )
    return model
