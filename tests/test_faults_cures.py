"""What a diagnosis advises can be applied: every cure finds its fix in a recorded run, and its settings can be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_up_logs import write_log

from vlmcourse.config import parse_config
from vlmcourse.faults.catalog import BASE, FAULTS
from vlmcourse.faults.cures import CURES, LOOKALIKE_CURES, apply_cure, find_fix
from vlmcourse.faults.lookalikes import LOOKALIKES
from vlmcourse.monitor.diagnosis import HEALTHY, diagnose
from vlmcourse.monitor.recorded import recorded_run


def test_every_fault_has_a_cure() -> None:
    assert set(CURES) == {name for name, fault in FAULTS.items() if fault.cause != HEALTHY}


@pytest.mark.parametrize("name", CURES)
def test_a_cure_does_what_the_fix_of_a_recorded_run_says(name: str) -> None:
    found = diagnose(recorded_run(name))
    for cure in CURES[name]:
        if name == "few micro-batches" and "as many samples" in cure.fix:
            continue  # with the tiny model it saves nothing on most machines, and is not advised then
        fix = find_fix(cure, (*found.findings, *found.below), FAULTS[name].cause)
        cured = apply_cure(name, cure, fix)
        changed = parse_config({}, {**BASE, **cured.overrides})
        assert fix.what in cured.what and cured.cause == FAULTS[name].cause
        is_same = changed == parse_config({}, {**BASE, **FAULTS[name].overrides})
        assert not is_same or cured.plant is not FAULTS[name].plant, "neither settings nor what is planted changed"


@pytest.mark.parametrize(
    ("name", "set_to"),
    [
        ("slow messages", {"train.accumulation_steps": 2, "train.micro_batch_size": 8}),
        ("slow links under tp", {"train.micro_batch_size": 16}),
    ],
)
def test_what_links_need_where_activations_travel_can_be_applied(
    name: str, set_to: dict[str, int], tmp_path: Path
) -> None:
    fault, config = LOOKALIKES[name], dict[str, dict[str, Any]]()
    for key, value in fault.overrides.items():
        table, field = key.split(".")
        config.setdefault(table, {})[field] = value
    count = config["train"].get("accumulation_steps", 1)
    change = lambda rank, step: {"micro_batches": count, "communication_s": 0.4}  # noqa: E731
    found = diagnose(write_log(tmp_path, change, config=config))
    (cure,) = LOOKALIKE_CURES[name]
    cured = apply_cure(name, cure, find_fix(cure, found.findings, fault.cause))
    assert cured.overrides == {**fault.overrides, **set_to} and cured.plant is fault.plant
    assert parse_config({}, {**BASE, **cured.overrides}) != parse_config({}, {**BASE, **fault.overrides})


def test_settings_are_read_out_of_the_sentence() -> None:
    (cure,) = CURES["frequent saves"]
    found = diagnose(recorded_run("frequent saves"))
    fix = find_fix(cure, found.findings, "checkpoints")
    cured = apply_cure("frequent saves", cure, fix)
    assert f"train.checkpoint_every = {cured.overrides['train.checkpoint_every']} instead" in fix.what


def test_a_fix_that_was_not_advised_and_a_fault_without_cures_are_refused() -> None:
    (cure,) = CURES["frequent saves"]
    with pytest.raises(ValueError, match="no fix of 'checkpoints' says 'train.checkpoint_every', but \\[\\]"):
        find_fix(cure, diagnose(recorded_run("healthy")).findings, "checkpoints")
    fix = diagnose(recorded_run("frequent saves")).findings[0].fixes[0]
    with pytest.raises(ValueError, match="did you mean 'slow links'"):
        apply_cure("slow link", cure, fix)
