"""Save and load weights, optimizer state and progress, so that a stopped run goes on with the same losses.

Enters: a model under any strategy, a DeepSpeed engine among them. Leaves: `checkpoints/step_000100/` with PyTorch's
distributed checkpoint (every rank writes its shards), `meta.json` beside it, and the file `checkpoints/latest` that
names the newest. A checkpoint holds tensors by name and not by rank, in the sizes of the plain model, so it also loads
on another number of ranks or under another plan. It is written under another name and renamed when complete: a kill at
any moment leaves the previous one in use.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from vlmcourse.config import TrainConfig
from vlmcourse.models.vlm import VLM
from vlmcourse.parallel.apply import named_plain_parameters, plain_parts
from vlmcourse.parallel.comm import wait_for_all
from vlmcourse.parallel.data import local_optimizer
from vlmcourse.parallel.engine_state import EngineState, at_rest, collect_weights, find_nvme
from vlmcourse.parallel.padding import plain_sizes
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.parallel.sync import is_engine
from vlmcourse.train.folder import META_NAME, POINTER_NAME
from vlmcourse.train.low_precision import LowPrecisionAdamW
from vlmcourse.train.plain_checkpoint import PlainLoadPlanner, PlainSavePlanner, quiet_alone, readable_errors
from vlmcourse.train.precision import BF16_WEIGHTS

logger = logging.getLogger(__name__)
HARMLESS_CHANGES = (
    *("name", "output_dir", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints"),
    *("micro_batch_size", "accumulation_steps"),
)
"""Keys that change no loss at a resume (the last two as long as their product with the number of ranks stays)."""


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    ranks: Ranks,
    meta: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """Write one checkpoint and make it the latest.

    Args:
        folder: the run's `checkpoints` folder, on a disk that all ranks share.
        step: optimizer steps done.
        model: under any strategy.
        optimizer: the model's, an AdamW or one in shards.
        ranks: this process's place; all ranks must call this.
        meta: what else to keep, as JSON.
        keep: how many checkpoints stay, the new one among them.

    Returns:
        The checkpoint's folder.

    Raises:
        RuntimeError: if a rank cannot write.
    Communicates: barriers, and the few kilobytes with which the ranks agree who writes what.
    """
    final = folder / f"step_{step:06d}"
    partial = final.with_suffix(".partial")
    if ranks.is_main:
        shutil.rmtree(partial, ignore_errors=True)  # from a save that was killed
        partial.mkdir(parents=True)
    wait_for_all(ranks)
    with (
        quiet_alone(ranks.world_size == 1),
        readable_errors(f"the checkpoint {str(final)!r} cannot be saved", "report this"),
    ):
        planner = PlainSavePlanner(_plain_sizes_of(model))
        with _loadable_state(model, optimizer) as state:
            dcp.save(state, checkpoint_id=partial, planner=planner, no_dist=ranks.world_size == 1)
    if ranks.is_main:
        _write_durably(partial / META_NAME, json.dumps({**meta, "step": step}, indent=2))
        _replace_folder(partial, final)
        _write_durably(folder / POINTER_NAME, final.name)
        _remove_old(folder, keep)
    wait_for_all(ranks)
    return final


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Overwrite weights and optimizer state with those of a checkpoint.

    Args:
        path: a checkpoint's folder.
        model: the same architecture and frozen towers, under any strategy and number of ranks.
        optimizer: the model's.
        ranks: this process's place; all ranks must call this.

    Raises:
        ValueError: on every rank, if a tensor of some rank is missing in the checkpoint or has another size there.
        RuntimeError: on every rank, if a file cannot be read.
    Communicates: the few kilobytes with which the ranks agree who reads what; for a DeepSpeed engine of ZeRO-1 or 2
        also an all-gather of all weights.
    """
    what = f"the checkpoint {str(path)!r} cannot be loaded"
    remedy = "a run goes on with the model and frozen towers that were saved; set them back, or start a new run"
    with (
        quiet_alone(ranks.world_size == 1),
        readable_errors(what, remedy),
        _loadable_state(model, optimizer, loads=True) as state,
    ):
        planner = PlainLoadPlanner(_plain_sizes_of(model))
        dcp.load(state, checkpoint_id=path, planner=planner, no_dist=ranks.world_size == 1)  # in place
    _fill_second_copies(model, optimizer)


def check_resumable(path: Path, meta: dict[str, Any], config: TrainConfig, global_batch_size: int) -> None:
    """Refuse a checkpoint of another model; warn of what changes the losses that follow.

    Args:
        path: the checkpoint's folder.
        meta: what was kept beside its tensors.
        config: the present run.
        global_batch_size: samples of one of its optimizer steps.

    Raises:
        ValueError: if the model, the frozen towers or what the precision stores differs.
    """
    saved, present = meta["config"], dataclasses.asdict(config)
    for key, value in present["model"].items():
        before = saved["model"].get(key)
        if before != (list(value) if isinstance(value, tuple) else value):
            raise ValueError(
                f"model.{key} = {value!r}, but the checkpoint {str(path)!r} was saved with {before!r}: a run goes on "
                "with the same model and frozen towers; set it back, or start a new run"
            )
    check_same_formats(path, saved["train"].get("precision", "fp32"), config.train.precision)
    changed = [
        f"{section}.{key} from {saved[section].get(key)!r} to {value!r}"
        for section in ("run", "data", "train", "optimizer")
        for key, value in present[section].items()
        if saved[section].get(key) != value and key not in HARMLESS_CHANGES
    ]
    if meta["global_batch_size"] != global_batch_size:
        changed.append(f"the global batch from {meta['global_batch_size']} to {global_batch_size} samples")
    if changed:
        logger.warning("resuming with changes, so losses will differ from an uninterrupted run: %s", "; ".join(changed))


def check_same_formats(path: Path, before: str, precision: str) -> None:
    """Refuse to go on in a precision that stores other tensors than those of a checkpoint.

    bf16_master has fp32 master copies beside bf16 weights, bf16_pure has bf16 moments; fp32, bf16, fp16 and fp8 all
    store fp32 weights and moments, and may follow each other.

    Args:
        path: the checkpoint's folder.
        before: the `train.precision` that it was saved with.
        precision: that of the present run.

    Raises:
        ValueError: if what is stored differs.
    """
    kinds = [name if name in BF16_WEIGHTS else "fp32" for name in (before, precision)]
    if kinds[0] == kinds[1]:
        return
    stored = {"fp32": "fp32 weights", "bf16_master": "bf16 weights with fp32 master copies", "bf16_pure": "bf16 alone"}
    raise ValueError(
        f"train.precision was {before!r} in the checkpoint {str(path)!r} ({stored[kinds[0]]}) and is {precision!r} "
        f"({stored[kinds[1]]}): set it back to {before!r}, or start a new run, whose optimizer begins anew"
    )


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the tensors that this rank stores, by the plain model's names: weights, and moments of trainable ones.

    Of a DeepSpeed engine `parallel.engine_state.EngineState` knows them.
    Every moment exists afterwards, as zeros before the first step: what is loaded into these tensors is in use at once.
    Learning rates and the like are not among them; they follow from the configuration and the step.
    """
    own = local_optimizer(optimizer)
    names = {parameter: name for name, parameter in named_plain_parameters(model)}
    moments: dict[str, dict[str, Tensor]] = {}
    for group in own.param_groups:
        for parameter in group["params"]:
            state = own.state[parameter]
            if not state and isinstance(own, LowPrecisionAdamW):
                own.init_state(parameter)
            elif not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            moments.setdefault(names[parameter], dict(state))
    weights: dict[str, Tensor] = {}
    for part in plain_parts(model):
        for name, tensor in part.state_dict().items():
            weights.setdefault(name, tensor)
    return {"model": weights, "optimizer": moments}


@contextmanager
def _loadable_state(model: nn.Module, optimizer: Any, *, loads: bool = False) -> Iterator[dict[str, Any]]:
    """Provide `named_state` under any strategy, of a DeepSpeed engine too; what is loaded into it is in use afterwards.

    Raises:
        ValueError: if something is to be loaded into an engine that keeps a part of its state in files.
    Communicates: of an engine, what `EngineState.use_loaded` and `at_rest` do, or `collect_weights`.
    """
    if not is_engine(model):
        yield named_state(model, optimizer)
        return
    engine: Any = model
    if engine.zero_optimization_stage() == 0:  # whole weights, and the optimizer that was given to it
        yield named_state(model, engine.optimizer)
        return
    if key := find_nvme(engine):
        if loads:
            raise ValueError(
                f"a checkpoint cannot be loaded with {key} = 'nvme': what DeepSpeed keeps in files cannot be replaced; "
                f"set {key} = 'cpu', and begin with a checkpoint that was saved so"
            )
        if dist.get_rank() == 0:
            logger.warning("%s = 'nvme': this checkpoint keeps the weights; a run cannot go on from it", key)
        yield {"model": collect_weights(engine), "optimizer": {}}
        return
    with at_rest(engine):
        state = EngineState(engine)
        yield {"model": state.weights, "optimizer": state.moments}
        if loads:
            state.use_loaded()


def _plain_sizes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the sizes without padding of a VLM's parameters; no other model has padding."""
    part = plain_parts(model)[0]
    return plain_sizes(part.shape) if isinstance(part, VLM) else {}


@torch.no_grad()
def _fill_second_copies(model: nn.Module, optimizer: Optimizer) -> None:
    """Give a parameter that this rank holds twice, such as a tied embedding, what its first copy has loaded."""
    first: dict[str, nn.Parameter] = {}
    for name, parameter in named_plain_parameters(model):
        source = first.setdefault(name, parameter)
        if source is not parameter:
            parameter.copy_(source)
            for key, value in optimizer.state[source].items():
                optimizer.state[parameter][key].copy_(value)


def _replace_folder(new: Path, final: Path) -> None:
    """Rename `new` to `final`; an earlier `final` is moved away first and removed last."""
    if final.exists():
        old = final.with_suffix(".old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        new.rename(final)
        shutil.rmtree(old)
    else:
        new.rename(final)


def _remove_old(folder: Path, keep: int) -> None:
    whole = sorted(path for path in folder.iterdir() if re.fullmatch(r"step_\d{6,}", path.name))
    for path in sorted(whole, key=lambda p: int(p.name[5:]))[:-keep]:
        shutil.rmtree(path)


def _write_durably(path: Path, text: str) -> None:
    """Write a small file so that it holds the old text or the new at any moment, even if the power fails."""
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
