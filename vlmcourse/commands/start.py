"""What can be refused before any rank starts, without torch: ranks, degrees, samples that no sequence has
room for, DeepSpeed's own settings, and policies that would do nothing.

Enters: a checked `TrainConfig`, a number of ranks, the environment of this process. Leaves: what was chosen with its
reason, or one error that says what to change. Files that are missing are found in `config_files.py`.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from pathlib import Path

from vlmcourse.config import TrainConfig, check_batch
from vlmcourse.deepspeed_config import Run, check_deepspeed_file
from vlmcourse.layout import ParallelConfig, find_layout
from vlmcourse.planner.auto import settle_run
from vlmcourse.planner.hf_folder import read_hf_shape
from vlmcourse.presets import VLMShape, get_model
from vlmcourse.recompute import RECOMPUTING_TOWERS
from vlmcourse.values import ConfigError

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Without one of these a rank does not know who it is, or where the others are."""
HOW_TO_START = "start the ranks with vlmcourse train --nproc, %%torchrun or torchrun"
MAX_PORT = 65535
FEWEST_TOKENS_AROUND = 10
"""One each: start of turn, role, start and end of the picture, end of turn, line break, and in the answer's turn start,
role, text and end."""
NAMED_IMAGE = re.compile(rb'"image"\s*:\s*(?:"|\[\s*")')


def choose_degrees(config: TrainConfig, world_size: int, elsewhere: str = "") -> tuple[ParallelConfig, str]:
    """Refuse a number of ranks, degrees or samples that the run cannot use, and decide what auto leaves open.

    Args:
        config: the run.
        world_size: its ranks.
        elsewhere: why this machine's GPUs are not those that the ranks use; "" if they are.

    Returns:
        How the ranks share the work, and what auto chose and why; that text is empty under another strategy.

    Raises:
        ValueError: as in `settle_run` and `check_batch`.
    """
    settled, reason = settle_run(config, world_size, find_shape(config), elsewhere=elsewhere)
    if settled.strategy == "auto":
        folder = config.model.hf_folder
        why = f"model.hf_folder = {folder!r} is not on this machine"
        return settled, f"parallel.strategy = 'auto' is left to the ranks, which choose when they start: {why}"
    check_batch(config, find_layout(settled, world_size).dp_degree)
    return settled, f"parallel.strategy = 'auto' chose {settled.strategy}: {reason}" if reason else ""


def check_degrees(config: TrainConfig, world_size: int) -> ParallelConfig:
    """Refuse what `choose_degrees` does; return how the ranks share the work, without auto where the model is known."""
    return choose_degrees(config, world_size)[0]


def find_shape(config: TrainConfig) -> VLMShape | None:
    """Return the shape of the run's model; None where it is in a folder that is not on this machine.

    Raises:
        ValueError: if the folder's config.json cannot be used.
    """
    return read_hf_shape(config.model.hf_folder) if config.model.hf_folder else get_model(config.model.preset)


def check_rank_environment(environ: Mapping[str, str]) -> int | None:
    """Refuse an environment that says only in part which rank this process is.

    Args:
        environ: of this process.

    Returns:
        The number of ranks that a launcher has started; None where it has set neither RANK nor WORLD_SIZE.

    Raises:
        ValueError: naming what is missing, or which numbers cannot be.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    there = ", ".join(f"{name}={environ[name]}" for name in LAUNCHER_VARIABLES if environ.get(name))
    missing = [name for name in LAUNCHER_VARIABLES if not environ.get(name)]
    if missing:
        raise ValueError(
            f"the environment has {there or 'empty values'} but no {', '.join(missing)}: a rank needs all "
            f"four; {HOW_TO_START}, or unset RANK and WORLD_SIZE to train in one process"
        )
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    found = {name: environ[name] for name in names if name in environ}
    listed = ", ".join(f"{name}={value}" for name, value in found.items())
    try:
        numbers = {name: int(value) for name, value in found.items()}
    except ValueError:
        raise ValueError(
            f"the environment of this rank has {listed}: these must be whole numbers; {HOW_TO_START}"
        ) from None
    rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
    local_rank, local_size = numbers.get("LOCAL_RANK", rank), numbers.get("LOCAL_WORLD_SIZE", size)
    if not (0 <= rank < size and 0 <= local_rank < local_size and 1 <= numbers["MASTER_PORT"] <= MAX_PORT):
        raise ValueError(
            f"the environment of this rank has {listed}: RANK must be from 0 to WORLD_SIZE - 1 (and LOCAL_RANK to "
            f"LOCAL_WORLD_SIZE - 1), MASTER_PORT from 1 to {MAX_PORT}; {HOW_TO_START}"
        )
    return size


def check_room(config: TrainConfig) -> None:
    """Refuse `data.max_seq_len` where it has no room for one picture and the shortest conversation about it.

    Text alone may need less: a LLaVA file is looked through for pictures, and one that is not here counts as text.

    Raises:
        ConfigError: naming the tokens that one picture takes.
    """
    shape, data = find_shape(config), config.data
    if shape is None or not (data.dataset == "digits" or _has_pictures(Path(data.path))):
        return
    needed = shape.num_visual_tokens_per_tile + FEWEST_TOKENS_AROUND
    if data.max_seq_len < needed:
        problem = (
            f"data.max_seq_len = {data.max_seq_len}: a picture takes {shape.num_visual_tokens_per_tile} image tokens "
            f"or more in the model {shape.name!r}, a question and its answer {FEWEST_TOKENS_AROUND} or more around "
            f"them; raise it above {needed} by the length of your text"
        )
        raise ConfigError("The training configuration", [problem])


def check_deepspeed_settings(config: TrainConfig, world_size: int) -> None:
    """Refuse a run whose `parallel.deepspeed_config` no engine could be started with, or that says another run.

    Raises:
        FileNotFoundError: if there is no such file.
        ConfigError: listing everything in it that is wrong or does not fit the run.
    """
    shape = find_shape(config)
    check_deepspeed_file(Run(config, world_size, shape.language.hidden_size if shape is not None else None))


def check_activations(config: TrainConfig) -> None:
    """Refuse policies of the section [activations] that would cover no block of their tower.

    Raises:
        ConfigError: naming the policies and how many blocks there are.
    """
    shape = find_shape(config)
    if shape is None:
        return
    found = config.activations.uncovered({name: getattr(shape, name).num_layers for name in RECOMPUTING_TOWERS})
    if found:
        raise ConfigError("The training configuration", found)


def _has_pictures(path: Path) -> bool:
    """Return whether a row of a conversation file names an image, without parsing it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return NAMED_IMAGE.search(text) is not None
    except (OSError, ValueError):  # it is not here, or empty: whoever reads it says so
        return False
