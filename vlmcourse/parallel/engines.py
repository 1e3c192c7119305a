"""DeepSpeed behind the same Trainer: a plain model and its optimizer in, an engine out that is what its name says.

Enters: a plain model, AdamW over its parameters, and a `TrainConfig` whose strategy is one of `DEEPSPEED`. Leaves: a
`DeepSpeedEngine`, its settings made from ours or read from a file, and an `EngineOptimizer` that lets it step. What
the engine is, is checked after start: on CPU ranks DeepSpeed's settings can be accepted and do nothing (by
default the weights of a small model stay whole under ZeRO-3). Chapter 5.

DeepSpeed compiles operations at first use. By default nothing here needs one: the optimizer is PyTorch's, and on CPU
ranks the all-reduce over shared memory is left out, so that gloo carries everything. With `offload.adam = "deepspeed"`
and under 'nvme' operations are compiled, and `op_builds` says so.

Source: Rajbhandari et al. 2020 (ZeRO); documentation of DeepSpeed's JSON configuration and of `DeepSpeedEngine`.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from vlmcourse.config import ParallelConfig, TrainConfig
from vlmcourse.deepspeed_config import Run, load_deepspeed_json, read_offload, resolve_deepspeed
from vlmcourse.models.vlm import VLM
from vlmcourse.parallel.accelerated import start_through_accelerate
from vlmcourse.parallel.clipping import total_norm
from vlmcourse.parallel.engine_init import build_in_shards
from vlmcourse.parallel.engine_offload import check_nvme, offload_settings, prepare_offload
from vlmcourse.parallel.engine_places import check_after_step, check_engine_offload
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.parallel.verify import check_equal_weights
from vlmcourse.presets import VLMShape
from vlmcourse.state_offload import OffloadConfig
from vlmcourse.strategies import ACCELERATE_DEEPSPEED, DEEPSPEED


def build_deepspeed_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a run, as its JSON file would hold it.

    The optimizer is not in it: rates differ by tower, so the engine is given ours. Learning rates are set from outside
    in every step, and the loss is divided by the tokens of the whole step before the engine sees it.

    Args:
        config: the run; its strategy is one of `DEEPSPEED`.
    """
    stage = DEEPSPEED[config.parallel.strategy]
    return {
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": config.train.accumulation_steps,
        "gradient_clipping": config.train.max_grad_norm,
        "zero_optimization": {
            "stage": stage,
            # By default parameters below 100,000 elements stay whole on every rank: all of a tiny model.
            **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
            **offload_settings(config.offload),
        },
        # Ours has a rate for each tower, and PyTorch's fused AdamW runs in main memory too.
        "zero_force_ds_cpu_optimizer": False,
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
    }


def choose_deepspeed_settings(config: TrainConfig, world_size: int, hidden_size: int | None) -> dict[str, Any]:
    """Return what DeepSpeed is given: what the run's `parallel.deepspeed_config` holds, or what is made without one.

    Args:
        config: the run.
        world_size: its ranks.
        hidden_size: of the language tower, by which 'auto' sizes in a file are filled in.

    Raises:
        FileNotFoundError: if there is no such file.
        ConfigError: listing everything in the file that is wrong or does not fit the run.
    """
    path = config.parallel.deepspeed_config
    if not path:
        return build_deepspeed_settings(config)
    return resolve_deepspeed(load_deepspeed_json(path), Run(config, world_size, hidden_size), where=path)


def choose_offload(config: TrainConfig) -> OffloadConfig:
    """Return what a run moves off the device: by its section [offload], or by its file `parallel.deepspeed_config`."""
    path = config.parallel.deepspeed_config
    return read_offload(load_deepspeed_json(path)) if path else config.offload


class EngineOptimizer:
    """Stands where a Trainer has an optimizer, and lets the engine clip, update and forget its gradients."""

    def __init__(self, engine: Any, check_first_step: Callable[[], None] | None = None) -> None:
        """Stand for an engine's optimizer; `check_first_step` is called once, when there are moments to look at."""
        self.engine = engine
        self._check_first_step = check_first_step
        self.grad_norm = float("nan")
        """L2 norm of the whole gradient of the last step, before clipping, equal on every rank."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups that `build_optimizer` made, with shards in the place of parameters; rates are set in them."""
        return self.engine.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine has forgotten its gradients at the end of its step."""

    def step(self) -> None:
        """Clip the gradients and update the weights; where the gradients' norm is not finite, leave the weights alone.

        Raises:
            RuntimeError: if the engine made no step, or the first one left its moments in another place than was asked.
        Communicates: an all-reduce of a few bytes for the norm; under ZeRO-1 and 2 an all-gather of all weights.
        """
        before = self.engine.global_steps
        # Without ZeRO the engine clips by a norm that it does not keep, and updates whatever it is.
        norm = None if self.engine.zero_optimization_stage() else self._measure_norm()
        if norm is not None and not math.isfinite(norm):
            self.grad_norm = norm
            return
        self.engine.step()
        if self.engine.global_steps != before + 1:
            raise RuntimeError(
                f"rank {dist.get_rank()}: the DeepSpeed engine counts {self.engine.global_steps - before} steps "
                "instead of 1: run the last micro-batch inside gradient_sync(model, True), as accumulate_gradients does"
            )
        # With ZeRO it leaves the weights alone where the norm is not finite, and calls all such norms infinite.
        self.grad_norm = float(self.engine.get_global_grad_norm()) if norm is None else norm
        if self._check_first_step is not None and math.isfinite(self.grad_norm):  # else it has made no moments
            self._check_first_step()
            self._check_first_step = None

    def _measure_norm(self) -> float:
        """Return the L2 norm of whole gradients, which all ranks hold."""
        return float(total_norm([p.grad for p in self.engine.module.parameters() if p.grad is not None]))


def start_deepspeed(
    model: nn.Module, optimizer: Optimizer, config: TrainConfig, ranks: Ranks
) -> tuple[nn.Module, EngineOptimizer]:
    """Give a plain model and its optimizer to a DeepSpeed engine.

    Args:
        model: plain, on CPU or `ranks.device`; weights may differ between ranks, rank 0's win. Or of `build_sharded`.
        optimizer: of `build_optimizer` over the parameters of `model`, without state.
        config: the run.
        ranks: this process's place, in a process group that exists.

    Returns:
        The engine, which is a module around `model`, and what steps it.

    Raises:
        ValueError: if offloading to files was asked for, and this machine or this model cannot.
        RuntimeError: if DeepSpeed runs on another kind of device than the ranks, the engine is not what the strategy
            says or does not offload what was asked for, or an operation cannot be compiled.
    Communicates: a broadcast of all weights from rank 0, and a few bytes of checks.
    """
    _import_deepspeed(ranks)
    stage, through_accelerate = DEEPSPEED[config.parallel.strategy], config.parallel.strategy in ACCELERATE_DEEPSPEED
    hidden_size = model.shape.language.hidden_size if isinstance(model, VLM) else None
    settings = choose_deepspeed_settings(config, ranks.world_size, hidden_size)
    offload = choose_offload(config)
    optimizer = prepare_offload(optimizer, offload, ranks)
    settings["zero_force_ds_cpu_optimizer"] = False  # it is chosen already; else DeepSpeed takes none but its own
    updated_by = type(optimizer).__name__
    start = start_through_accelerate if through_accelerate else _start_directly
    engine = start(model if splits_weights(model) else model.to(ranks.device), optimizer, settings, ranks)
    check_deepspeed(engine, stage, ranks, is_chosen=bool(config.parallel.deepspeed_config))
    if stage == 0:
        return engine, EngineOptimizer(engine)
    check_engine_offload(engine, offload, updated_by, ranks)
    return engine, EngineOptimizer(engine, partial(check_after_step, engine, offload, ranks))


def builds_in_shards(parallel: ParallelConfig) -> bool:
    """Whether the model of a run is built in shards; under a file of the user's it is built whole and cut up then."""
    return parallel.strategy == "deepspeed-zero3" and not parallel.deepspeed_config


def build_sharded(shape: VLMShape, config: TrainConfig, ranks: Ranks) -> VLM:
    """Build the model of a run under deepspeed-zero3 in shards, the weights those of `build_model` with the run's seed.

    Args:
        shape: of the model.
        config: the run.
        ranks: this process's place, in a process group that exists; all ranks must call this.

    Raises:
        ValueError: if `builds_in_shards` says no.
        RuntimeError: as `start_deepspeed`; or if a parameter was not cut up.
    Communicates: see `build_in_shards`.
    """
    if not builds_in_shards(config.parallel):
        raise ValueError(
            f"parallel.strategy = {config.parallel.strategy!r}, parallel.deepspeed_config = "
            f"{config.parallel.deepspeed_config!r}: only deepspeed-zero3 with settings of ours builds in shards; call "
            "build_model"
        )
    _import_deepspeed(ranks)
    check_nvme(config.offload, ranks)
    return build_in_shards(build_deepspeed_settings(config), shape, config.run.seed, ranks.rank)


def _start_directly(model: nn.Module, optimizer: Optimizer, settings: dict[str, Any], ranks: Ranks) -> Any:
    """Return the engine that DeepSpeed makes by itself; arguments as those of `start_through_accelerate`."""
    import deepspeed

    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def _import_deepspeed(ranks: Ranks) -> None:
    """Import DeepSpeed for the kind of device that the ranks have, and let it use their process group."""
    wanted = ranks.device.type
    os.environ.setdefault("DS_ACCELERATOR", wanted)  # read once, at import
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    found = accelerator.device_name()
    if found != wanted:
        raise RuntimeError(
            f"rank {ranks.rank}: DeepSpeed runs on {found!r} and this rank on {wanted!r}: set DS_ACCELERATOR={wanted} "
            "before the ranks start, and import deepspeed nowhere earlier"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It calls collectives by names that PyTorch has renamed: one remark a call and rank.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if wanted == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for half a minute at first use
    deepspeed.init_distributed(dist_backend=ranks.backend, auto_mpi_discovery=False, verbose=False)


def check_deepspeed(model: nn.Module, stage: int, ranks: Ranks, *, is_chosen: bool = False) -> None:
    """Refuse an engine that is not what its strategy's name says: equal losses would not show it.

    Args:
        model: what DeepSpeed or accelerate returned.
        stage: of ZeRO.
        ranks: this process's place.
        is_chosen: whether a person has chosen the threshold of ZeRO-3, up to which parameters stay whole on every rank;
            then some may, but not all.

    Raises:
        RuntimeError: if the wrapper, the stage, the number of ranks, the number format or the shards are others; of
            ZeRO-0, if the ranks' weights differ.
    Communicates: without ZeRO an all-gather of 8 bytes a parameter and rank.
    """
    import deepspeed

    where = f"rank {ranks.rank}: deepspeed-zero{stage}"
    if not isinstance(model, deepspeed.DeepSpeedEngine):
        raise RuntimeError(f"{where}: the model is a {type(model).__name__}, not a DeepSpeedEngine")
    engine: Any = model
    found = engine.zero_optimization_stage(), engine.dp_world_size, dist.get_world_size()
    if found != (stage, ranks.world_size, ranks.world_size):
        raise RuntimeError(
            f"{where}: the engine has ZeRO stage {found[0]} over {found[1]} of {found[2]} ranks instead of stage "
            f"{stage} over {ranks.world_size}: start the ranks with --nproc, %%torchrun or torchrun"
        )
    if engine.fp16_enabled() or engine.bfloat16_enabled():
        raise RuntimeError(f"{where}: the engine trains in 16 bits instead of fp32: leave fp16 and bf16 out")
    if stage == 0:
        check_equal_weights(engine.module, ranks)
        return
    mine, whole = count_sharded(engine, stage)
    # Each tensor, or group of them, is filled up until the ranks divide it and their parts are aligned.
    filling = 2 * ranks.world_size * sum(1 for _ in engine.module.parameters())
    if is_chosen and stage == 3 and mine < whole:
        kept = sum(p.ds_numel for p in engine.module.parameters() if p.ds_persist)
        mine, whole = mine - kept, whole - kept
    if mine > whole / ranks.world_size + filling:
        raise RuntimeError(
            f"{where}: this rank holds {mine:,} elements of {whole:,}, and must hold 1/{ranks.world_size} of them: not "
            "all is sharded; look at zero_optimization in the engine's settings, where "
            "stage3_param_persistence_threshold keeps smaller parameters whole"
        )


def count_sharded(engine: Any, stage: int) -> tuple[int, int]:
    """Return how many elements of what the stage splits this rank holds, and how many there are.

    Args:
        engine: a DeepSpeed engine.
        stage: 1 and 2 split what is updated (the fp32 weights in the optimizer), 3 all weights; 0 splits nothing.
    """
    parameters = list(engine.module.parameters())
    if stage == 3:
        whole = sum(p.ds_numel for p in parameters)
        # Below the threshold a parameter is "persistent": cut up at first, but whole on every rank after one forward.
        held = sum(p.ds_numel if p.ds_persist else p.ds_tensor.numel() for p in parameters)
        return held, whole
    mine = sum(partition.numel() for partition in engine.optimizer.single_partition_of_fp32_groups)
    return mine, sum(p.numel() for p in parameters if p.requires_grad)


def splits_weights(model: nn.Module) -> bool:
    """Whether a model's weights are shards of DeepSpeed (ZeRO-3), which all ranks must gather together."""
    return any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())


def gather_engine_state(engine: Any, *, gradients: bool = False) -> dict[str, Tensor]:
    """Return whole weights or gradients by their names in the plain model, on CPU; all ranks must call this.

    Args:
        engine: a DeepSpeed engine.
        gradients: return those of the step whose last micro-batch has run and whose update has not, before clipping.
    Communicates: an all-gather of what is sharded.
    """
    import deepspeed

    named = list(engine.module.named_parameters())
    if gradients:
        found = {name: deepspeed.utils.safe_get_full_grad(p) for name, p in named if p.requires_grad}
        return {name: gradient.to("cpu", copy=True) for name, gradient in found.items() if gradient is not None}
    with deepspeed.zero.GatheredParameters([p for _, p in named]):
        return {name: p.detach().to("cpu", copy=True) for name, p in named}
