"""DeepSpeed's own checkpoints, and its own way to another number of ranks: the universal checkpoint.

Enters: an engine. Leaves: the folder that DeepSpeed's users know, one file of shards a rank, which loads into the same
stage on as many ranks only; converted by `ds_to_universal`, one folder a parameter, which loads on any number. A run of
this course does not need it: its own checkpoints hold tensors by name from the start (see `engine_state.py`). It is
here to be compared, and for those who must hand a run over to other DeepSpeed users. Chapter 5.

Source: documentation of DeepSpeed's Universal Checkpointing; Lian et al. 2024 (arXiv:2406.18820);
`deepspeed/checkpoint/ds_to_universal.py` and `runtime/zero/` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

TAG = "state"
"""What DeepSpeed calls a checkpoint inside the folder that it is given."""
UNIVERSAL = f"{TAG}_universal"


def save_native(engine: Any, folder: str | Path) -> None:
    """Write weights and optimizer state as DeepSpeed does; all ranks must call this.

    Args:
        engine: a DeepSpeed engine.
        folder: of the checkpoint `state`, and of the file `latest` that names it.
    Communicates: barriers.
    """
    engine.save_checkpoint(str(folder), tag=TAG)


def load_native(engine: Any, folder: str | Path) -> None:
    """Overwrite weights and optimizer state with what `save_native` wrote; all ranks must call this.

    Args:
        engine: of the same ZeRO stage on as many ranks.
        folder: what `save_native` was given.

    Raises:
        RuntimeError: if DeepSpeed finds nothing to load.
    """
    _load(engine, folder, TAG)


def convert_to_universal(folder: str | Path) -> Path:
    """Turn what `save_native` wrote into a universal checkpoint beside it; one process does it, such as rank 0.

    Args:
        folder: what `save_native` was given.

    Returns:
        The universal checkpoint; the file `latest_universal` beside it names it.

    Raises:
        FileNotFoundError: if there is no checkpoint of DeepSpeed.
    """
    source, target = Path(folder) / TAG, Path(folder) / UNIVERSAL
    if not any(source.glob("*optim_states.pt")):
        raise FileNotFoundError(f"There is no DeepSpeed checkpoint in {str(source)!r}: write one with save_native")
    from deepspeed.checkpoint import ds_to_universal

    # As `python -m deepspeed.checkpoint.ds_to_universal` with these flags. The missing state is what DeepSpeed's
    # pipelines write of themselves: without it ZeRO-1 and 2 are refused.
    options = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    silence = io.StringIO()  # a line for each of its phases and a progress bar for each file
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        ds_to_universal.main(options)
    return target


def load_universal(engine: Any, folder: str | Path) -> None:
    """Overwrite weights and optimizer state with a universal checkpoint; all ranks must call this.

    Two things would go wrong without a word, and show from the second loss on. DeepSpeed also overwrites the groups'
    settings, and under ZeRO-3 gives every group those of the first (rates by tower, weight decay): they belong to the
    configuration and are put back. And under ZeRO-3 all groups get one step count together, a tensor that each group's
    update raises: every group gets its own.

    Args:
        engine: of the stage that wrote it (its files differ between ZeRO-1 and 2, and 3), on any number of ranks.
        folder: what `convert_to_universal` was given.

    Raises:
        RuntimeError: if DeepSpeed finds nothing to load.
    """
    groups = engine.optimizer.param_groups
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    config = engine._config  # what the key checkpoint.load_universal of a configuration file sets
    before, config.load_universal_checkpoint = config.load_universal_checkpoint, True
    try:
        _load(engine, folder, UNIVERSAL)
    finally:
        config.load_universal_checkpoint = before
    for group, kept in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(kept)
    for state in engine.optimizer.optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()


def _load(engine: Any, folder: str | Path, tag: str) -> None:
    path, _ = engine.load_checkpoint(str(folder), tag=tag)
    if path is None:
        raise RuntimeError(
            f"rank {dist.get_rank()}: DeepSpeed loaded nothing from {str(Path(folder) / tag)!r}: its files are gone"
        )
