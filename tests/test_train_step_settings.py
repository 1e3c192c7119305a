"""Settings that make other steps: those of every section count, and a resume marks them once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vlmcourse.config import parse_config
from vlmcourse.layout import Layout
from vlmcourse.monitor.step_log import read_step_log
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.presets import MODELS
from vlmcourse.train.run_monitor import RunMonitor
from vlmcourse.train.step_settings import SAME_STEP, SECTIONS, name_changes

OFFLOADS = {"optimizer": "cpu", "parameters": "cpu"}
CONFIG = parse_config({"parallel": {"strategy": "fsdp"}, "offload": OFFLOADS})
BEFORE: dict[str, dict[str, Any]] = json.loads(json.dumps(dataclasses.asdict(CONFIG)))
"""As a checkpoint keeps it."""
CHANGES: dict[str, tuple[str, Any]] = {
    "data": ("max_seq_len", 300),
    "train": ("micro_batch_size", 3),
    "parallel": ("prefetch", 2),
    "activations": ("language", "full"),
    "offload": ("pin_memory", False),
    "logging": ("hardware_every_s", 9.0),
}


def name_change(section: str, key: str, value: Any) -> str:
    changed = dataclasses.replace(getattr(CONFIG, section), **{key: value})
    return name_changes(BEFORE, dataclasses.replace(CONFIG, **{section: changed}))


@pytest.mark.parametrize("section", CHANGES)
def test_a_setting_of_every_section_makes_other_steps(section: str) -> None:
    key, value = CHANGES[section]
    assert name_change(section, key, value) == f"{section}.{key} {BEFORE[section][key]!r} -> {value!r}"
    assert name_changes(BEFORE, CONFIG) == "" and set(SECTIONS) == set(CHANGES)


@pytest.mark.parametrize("name", SAME_STEP)
def test_names_and_limits_make_no_other_steps(name: str) -> None:
    section, key = name.split(".")
    value = BEFORE[section][key]
    assert name_change(section, key, f"{value}x" if isinstance(value, str) else value + 1) == ""


def test_what_has_changed_is_marked_at_the_first_resume_only(tmp_path: Path) -> None:
    """A trainer that was resumed and calls `fit` again goes on with its own settings."""
    ranks = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
    monitor = RunMonitor(CONFIG, "single", MODELS["tiny"], Layout(), ranks)
    monitor.changed = "train.micro_batch_size 4 -> 2"
    for step in (3, 7):
        monitor.open(tmp_path, step)
        monitor.close()
    marks = [(event.step, event.changed) for event in read_step_log(tmp_path)[0].events]
    assert marks == [(3, "train.micro_batch_size 4 -> 2"), (7, "")]
