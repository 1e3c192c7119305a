"""What can be refused before any rank starts, without torch: ranks, degrees, and samples that no sequence has room for.

Enters: a checked `TrainConfig`, a number of ranks, the environment of this process. Leaves: what was chosen with its
reason, or one error that says what to change. Files that are missing are found in `config_files.py`.
"""

from __future__ import annotations

from vlmcourse.config import TrainConfig, check_batch
from vlmcourse.layout import ParallelConfig, find_layout
from vlmcourse.planner.degrees import settle
from vlmcourse.planner.hf_config import read_hf_shape
from vlmcourse.presets import VLMShape, get_model


def choose_degrees(config: TrainConfig, world_size: int) -> tuple[ParallelConfig, str]:
    """Refuse a number of ranks, degrees or samples that the run cannot use, and decide what auto leaves open.

    Returns:
        How the ranks share the work, and what auto chose and why; that text is empty under another strategy.

    Raises:
        ValueError: as in `settle` and `check_batch`.
    """
    settled, reason = settle(config.parallel, world_size, find_shape(config), config.train.accumulation_steps)
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
