"""Configurations: TOML in, checked values out, every mistake in one message."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from vlmcourse.config import ConfigError, TrainConfig, check_world_size, load_config, parse_config

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_is_valid(path: Path) -> None:
    assert load_config(path).train.num_steps > 0


def test_there_is_a_shipped_config() -> None:
    assert "tiny.toml" in {path.name for path in CONFIGS}


def test_all_mistakes_are_listed_together() -> None:
    table = {
        "train": {"num_step": 5, "precision": "fp16", "micro_batch_size": 0, "max_grad_norm": "1"},
        "optimiser": {},
        "model": {"freeze": ["vison"]},
        "data": {"dataset": "llava"},
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(table)
    message = str(caught.value)
    assert len(caught.value.problems) == 7
    for hint in (
        "train.num_step: there is no such key; did you mean 'num_steps'?",
        "train.precision = 'fp16': did you mean 'bf16'?",
        "train.micro_batch_size = 0: must be 1 or greater",
        "train.max_grad_norm = '1': must be float, not str",
        "[optimiser]: there is no such section; did you mean 'optimizer'?",
        "model.freeze names 'vison': did you mean 'vision'?",
        "data.path is empty",
    ):
        assert hint in message


def test_freezing_every_tower_is_refused() -> None:
    with pytest.raises(ConfigError, match="names every tower"):
        parse_config({"model": {"freeze": ["vision", "projector", "language"]}})


def test_overrides_win_and_are_checked() -> None:
    config = parse_config({"train": {"num_steps": 5}}, {"train.num_steps": 7, "run.name": "other"})
    assert (config.train.num_steps, config.run.name) == (7, "other")
    with pytest.raises(ConfigError, match=r"override 'steps': write it as section\.key"):
        parse_config({}, {"steps": 7})
    with pytest.raises(ConfigError, match=r"train\.num_steps = 1\.5: must be int, not float"):
        parse_config({}, {"train.num_steps": 1.5})


def test_integers_are_accepted_where_a_float_is_wanted_but_not_booleans() -> None:
    assert parse_config({"optimizer": {"lr_vision": 1}}).optimizer.lr_vision == 1.0
    with pytest.raises(ConfigError, match="must be float, not bool"):
        parse_config({"optimizer": {"lr_vision": True}})


def test_invalid_toml_and_missing_file_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="this is not valid TOML"):
        load_config(broken)
    with pytest.raises(FileNotFoundError, match="no configuration file"):
        load_config(tmp_path / "missing.toml")


def test_direct_construction_is_checked_too() -> None:
    defaults = TrainConfig()
    with pytest.raises(ConfigError, match="must be 1 or greater"):
        dataclasses.replace(defaults, train=dataclasses.replace(defaults.train, num_steps=0))


def test_strategies_refuse_a_number_of_ranks_that_they_cannot_use() -> None:
    check_world_size("single", 1)
    check_world_size("ddp", 2)
    with pytest.raises(ValueError, match="'single' with 2 ranks"):
        check_world_size("single", 2)
    for strategy in ("ddp", "fsdp"):
        with pytest.raises(ValueError, match="--nproc 2"):
            check_world_size(strategy, 1)
