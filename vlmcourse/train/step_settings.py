"""Which settings make a step, or the time between steps, another one: steps before and after do not compare.

Enters: the configuration in a checkpoint's `meta.json`, and that of the run that goes on from it. Leaves: what a resume
mark in the step log says has changed, so that a diagnosis does not read steps of the one by the settings of the other.
Left out: learning rates and the seed, which change numbers and no work; how long the run is; what is only a name or a
limit. Chapter 6.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlmcourse.config import TrainConfig

SECTIONS = ("data", "train", "parallel", "activations", "offload", "logging")
SAME_STEP = ("train.num_steps", "train.keep_checkpoints", "parallel.timeout_s", "logging.project", "logging.timeout_s")
"""Keys of these sections that change no step and nothing between steps."""


def name_changes(saved: Mapping[str, Any], config: TrainConfig) -> str:
    """Return the settings whose change makes other steps, as "train.micro_batch_size 8 -> 4"; "" if there is none.

    Args:
        saved: `config` as a checkpoint keeps it; keys that its version did not have are passed over.
        config: the present run.
    """
    found: list[str] = []
    for section in SECTIONS:
        before = saved.get(section, {})
        for key, value in dataclasses.asdict(getattr(config, section)).items():
            now = list(value) if isinstance(value, tuple) else value
            if key in before and before[key] not in (now, value) and f"{section}.{key}" not in SAME_STEP:
                found.append(f"{section}.{key} {before[key]!r} -> {value!r}")
    return ", ".join(found)
