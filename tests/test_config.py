"""Configurations: TOML in, checked values out, every mistake in one message."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vlmcourse.config import MAX_SEED, ConfigError, TrainConfig, TrainSection, load_config, parse_config
from vlmcourse.layout import ParallelConfig

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_is_valid(path: Path) -> None:
    assert load_config(path).train.num_steps > 0


def test_there_is_a_shipped_config() -> None:
    assert "tiny.toml" in {path.name for path in CONFIGS}


def test_all_mistakes_are_listed_together() -> None:
    table = {
        "train": {"num_step": 5, "precision": "fp61", "micro_batch_size": 0, "max_grad_norm": "1"},
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
        "train.precision = 'fp61': did you mean 'fp16'?",
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


@pytest.mark.parametrize("data", [{}, {"dataset": "digits"}])
def test_keys_that_digits_do_not_read_are_refused(data: dict[str, str]) -> None:
    unread = {"path": "chats.json", "image_dir": "pictures", "on_bad_row": "skip"}
    with pytest.raises(ConfigError) as caught:
        parse_config({"data": data | unread})
    assert caught.value.problems == tuple(
        f"data.{key} = {value!r} with dataset = 'digits': only 'llava' reads it; set dataset = 'llava', or leave it out"
        for key, value in unread.items()
    )
    parse_config({"data": data | {"path": "", "image_dir": "", "on_bad_row": "refuse"}})  # as a saved one has them
    parse_config({"data": unread | {"dataset": "llava"}})


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


def test_every_float_must_be_finite() -> None:
    floats = [
        f"{section.name}.{key}"
        for section in dataclasses.fields(TrainConfig)
        for key, value in dataclasses.asdict(getattr(TrainConfig(), section.name)).items()
        if isinstance(value, float)
    ]
    assert "optimizer.lr_vision" in floats and "train.max_grad_norm" in floats
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ConfigError) as caught:
            parse_config({}, dict.fromkeys(floats, value))
        assert set(caught.value.problems) == {f"{key} = {value}: must be a finite number" for key in floats}
        assert len(caught.value.problems) == len(floats)
    with pytest.raises(ConfigError, match=r"optimizer\.eps = 10*: int too large"):
        parse_config({}, {"optimizer.eps": 10**400})


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1, 99999999999999999999])
def test_a_seed_that_torch_may_not_take_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match=rf"run\.seed = {seed}: must be from 0 to 9223372036854775807, 2\*\*63 - 1"):
        parse_config({"run": {"seed": seed}})


def test_the_largest_seed_serves_torch_and_numpy() -> None:
    assert parse_config({"run": {"seed": MAX_SEED}}).run.seed == MAX_SEED
    torch.Generator().manual_seed(MAX_SEED)
    np.random.default_rng((MAX_SEED, 0))


@pytest.mark.parametrize("name", ["", " ", ".", "..", "a/b", "/tmp", "..\\up", "a\nb", "a\0"])
def test_a_run_name_that_is_no_plain_folder_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"run": {"name": name}})
    assert f"run.name = {name!r}: must be one folder's name, such as 'run'" in str(caught.value)


def test_plain_run_names_are_accepted() -> None:
    for name in ("run", "run.1", "..run", "two words", "läufe"):
        assert parse_config({"run": {"name": name}}).run.name == name


def test_a_byte_order_mark_is_read_over_and_what_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "saved.toml"
    text = '# a run\r\n[run]\r\nname = "läufe"\r\n'
    path.write_bytes(text.encode("utf-8-sig"))
    assert load_config(path).run.name == "läufe"
    for encoding, where in (("latin-1", "line 3 has a byte that is not UTF-8 (0xe4)"), ("utf-16", "line 1 has a byte")):
        path.write_bytes(text.encode(encoding))
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value).startswith(f"{path} has 1 problem:")
        assert where in str(caught.value) and "save it as UTF-8" in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    path = tmp_path / "secret.toml"
    path.touch()
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"secret\.toml has 1 problem:\n.*cannot be read \(Permission denied\)"):
        load_config(path)


def test_a_missing_file_is_told_with_its_folder_and_the_path_that_would_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chapter = tmp_path / "chapters" / "ch01"
    chapter.mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.toml").touch()
    monkeypatch.chdir(chapter)
    with pytest.raises(FileNotFoundError) as caught:
        load_config("configs/tiny.toml")
    assert str(caught.value) == (
        f"There is no configuration file 'configs/tiny.toml' in the folder {str(chapter)!r}: "
        "did you mean '../../configs/tiny.toml'?"
    )
    load_config("../../configs/tiny.toml")
    with pytest.raises(FileNotFoundError) as caught:
        load_config("configs/tony.toml")
    assert f"in the folder {str(chapter)!r}: give the path" in str(caught.value)
    with pytest.raises(FileNotFoundError, match="none.toml': give the path"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(FileNotFoundError, match="'../../configs' is a folder: give the path of a TOML file"):
        load_config("../../configs")


def test_direct_construction_is_checked_too() -> None:
    defaults = TrainConfig()
    with pytest.raises(ConfigError, match="must be 1 or greater"):
        dataclasses.replace(defaults, train=dataclasses.replace(defaults.train, num_steps=0))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("parallel.gradient_sync", "never", "= 'never': choose one of last, every"),
        ("parallel.gradient_sync", "evrey", "= 'evrey': did you mean 'every'? choose one of last, every"),
        ("parallel.pp_schedule", "1F1B", "= '1F1B': did you mean '1f1b'? choose one of gpipe, 1f1b,"),
        (
            "train.precision",
            16,
            "= 16: must be str, not int; choose one of fp32, bf16, fp16, bf16_master, bf16_pure, fp8",
        ),
        ("train.precision", "fp61", "'fp61': did you mean 'fp16'? choose one of fp32, bf16, fp16,"),
        ("activations.vision", True, "True: must be str, not bool; choose one of none, full, every:k, sqrt, selective"),
        ("parallel.strategy", 3, "= 3: must be str, not int; choose one of single, ddp,"),
        ("model.freeze", "vision", "must be a list of strings; choose one of vision, projector, language"),
        ("run.seed", "0", "run.seed = '0': must be int, not str\n"),
    ],
)
def test_a_value_that_cannot_be_names_those_that_can(key: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({}, {key: value})
    assert words in f"{caught.value}\n"


def test_a_wrong_type_in_python_names_the_choices_too() -> None:
    wrong: Any = 1
    assert ParallelConfig(gradient_sync=wrong).problems() == [
        "parallel.gradient_sync = 1: must be of type str, not int; choose one of last, every"
    ]
    assert TrainSection(precision=wrong).problems()[0].startswith("train.precision = 1: choose one of fp32,")
