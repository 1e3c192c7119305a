"""`vlmcourse export`: a checkpoint as a Hugging Face folder with the same logits, and what it says of bad input."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crossing_worker import build_trainer, configure
from exported import check_exported
from torch import Tensor

from vlmcourse import cli
from vlmcourse.models.hf import load_hf_folder
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.train.export import CheckpointWeights, export_hf_folder
from vlmcourse.train.trainer import Trainer

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """Return the folder of a run with one checkpoint, and its trainer."""
    folder = tmp_path_factory.mktemp("export")
    trainer = build_trainer(configure("single", 1, folder, "run"), ALONE, 3)
    trainer.train_step()
    trainer.save()
    return folder / "run", trainer


def test_an_exported_checkpoint_has_the_logits_of_the_run(trained: tuple[Path, Trainer], tmp_path: Path) -> None:
    run, trainer = trained
    check_exported(run, tmp_path / "out", trainer)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_command_says_what_it_wrote(
    trained: tuple[Path, Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, trainer = trained
    out = tmp_path / "new" / "out"
    out.mkdir(parents=True)  # empty, so it may be used
    assert cli.main(["export", str(run), "--out", str(out), "--dtype", "bf16", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    num_params = sum(p.numel() for p in trainer.model.parameters())
    assert said["strategy"] == "single" and said["step"] == 1 and said["dtype"] == "bfloat16"
    assert said["num_params"] == num_params and said["weight_bytes"] == 2 * num_params
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"
    weights = load_hf_folder(out).state_dict()
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weights[name], weight.bfloat16().float()), name
    assert cli.main(["export", str(run / "checkpoints" / "step_000001"), "--out", str(tmp_path / "two")]) == 0
    said = capsys.readouterr().out
    assert "step 1 of single" in said and re.search(r" in float32, 0\.1\d\d MB -> ", said)


def test_the_original_layout_is_written_too(
    trained: tuple[Path, Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, trainer = trained
    argv = ["export", str(run), "--layout", "internvl_chat", "--out"]
    assert cli.main([*argv, str(tmp_path / "out")]) == 0
    assert "(internvl_chat: a config.json without the original's code)" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["model_type"] == "internvl_chat"
    weights = load_hf_folder(tmp_path / "out").state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in trainer.model.state_dict().items())
    assert cli.main([*argv, str(tmp_path / "two"), "--like", str(tmp_path / "out"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["layout"], said["like"]) == ("internvl_chat", str(tmp_path / "out"))
    for file in (tmp_path / "out").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    assert cli.main([*argv, str(tmp_path / "three"), "--like", str(run)]) == 2
    assert "is no folder of an InternVLChatModel" in capsys.readouterr().err
    assert not (tmp_path / "three").exists()


def test_weights_are_read_one_by_one_into_several_files(
    trained: tuple[Path, Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, trainer = trained
    asked: list[str] = []
    read: Callable[[CheckpointWeights, str], Tensor] = CheckpointWeights.__getitem__

    def remember(weights: CheckpointWeights, name: str) -> Tensor:
        asked.append(name)
        return read(weights, name)

    monkeypatch.setattr(CheckpointWeights, "__getitem__", remember)
    export_hf_folder(run, tmp_path / "out", max_shard_bytes=20_000)
    assert asked == list(trainer.model.state_dict())
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    weights = load_hf_folder(tmp_path / "out").state_dict()
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weights[name], weight), name


def test_a_folder_of_a_similar_name_is_left_alone(trained: tuple[Path, Trainer], tmp_path: Path) -> None:
    notes = tmp_path / "out.partial" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine", encoding="utf-8")
    export_hf_folder(trained[0], tmp_path / "out")
    assert notes.is_file() and len(list(tmp_path.iterdir())) == 2
    assert (tmp_path / "out").stat().st_mode == notes.parent.stat().st_mode  # as open to others as any folder


def test_fp32_of_a_run_with_master_weights_is_the_master(tmp_path: Path) -> None:
    config = configure("single", 1, tmp_path, "run")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, precision="bf16_master"))
    trainer = build_trainer(config, ALONE, 3)
    trainer.train_step()
    trainer.save()
    export_hf_folder(tmp_path / "run", tmp_path / "out", dtype="fp32")
    weights = load_hf_folder(tmp_path / "out").state_dict()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(weights[name], trainer.optimizer.state[parameter]["master"]), name
    assert export_hf_folder(tmp_path / "run", tmp_path / "bf16").dtype == "bfloat16"


def no_run(run: Path) -> Path:
    return run.parent / "nowhere"


def without_checkpoint(run: Path) -> Path:
    shutil.rmtree(run / "checkpoints")
    return run


def a_save_that_was_killed(run: Path) -> Path:
    (run / "checkpoints" / "latest").unlink()
    (run / "checkpoints" / "step_000001").rename(run / "checkpoints" / "step_000001.partial")
    return run / "checkpoints" / "step_000001.partial"


def without_meta(run: Path) -> Path:
    (run / "checkpoints" / "step_000001" / "meta.json").unlink()
    return run / "checkpoints" / "step_000001"


def without_list(run: Path) -> Path:
    (run / "checkpoints" / "step_000001" / ".metadata").unlink()
    return run


def without_a_ranks_file(run: Path) -> Path:
    next((run / "checkpoints" / "step_000001").glob("*.distcp")).unlink()
    return run


def cut_off(run: Path) -> Path:
    file = next((run / "checkpoints" / "step_000001").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    return run


def spoilt_list(run: Path) -> Path:
    (run / "checkpoints" / "step_000001" / ".metadata").write_bytes(b"no list")
    return run


def spoilt_meta(run: Path) -> Path:
    (run / "checkpoints" / "step_000001" / "meta.json").write_text("{", encoding="utf-8")
    return run


def of_an_earlier_version(run: Path) -> Path:
    file = run / "checkpoints" / "step_000001" / "meta.json"
    meta = json.loads(file.read_text(encoding="utf-8"))
    del meta["shape"]
    file.write_text(json.dumps(meta), encoding="utf-8")
    return run


def tokenizer_gone(run: Path) -> Path:
    file = run / "checkpoints" / "step_000001" / "meta.json"
    meta = json.loads(file.read_text(encoding="utf-8"))
    meta["config"]["data"]["tokenizer"] = "/nowhere/tokenizer"
    file.write_text(json.dumps(meta), encoding="utf-8")
    return run


BAD_RUNS: dict[Callable[[Path], Path], str] = {
    no_run: "There is no folder",
    without_checkpoint: "There is no checkpoint in",
    a_save_that_was_killed: "a save was interrupted",
    without_meta: "a save was interrupted",
    without_list: "has no list of its tensors",
    without_a_ranks_file: "is not there",
    cut_off: "copy all of it",
    spoilt_list: "cannot be read",
    spoilt_meta: "cannot be read",
    of_an_earlier_version: "does not say the shape of its model",
    tokenizer_gone: "--tokenizer",
}


@pytest.mark.parametrize("spoil", BAD_RUNS, ids=lambda spoil: spoil.__name__)
def test_a_bad_checkpoint_is_explained_and_nothing_is_written(
    trained: tuple[Path, Trainer],
    tmp_path: Path,
    spoil: Callable[[Path], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained[0], copy)
    assert cli.main(["export", str(spoil(copy)), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert BAD_RUNS[spoil] in said and "Traceback" not in said
    assert not list(tmp_path.glob("out*"))


def test_a_damaged_file_is_told_from_a_wrong_word(
    trained: tuple[Path, Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained[0], tmp_path / "run")
    for file in (tmp_path / "run").rglob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "cannot be read" in said and "Traceback" not in said
    assert not list(tmp_path.glob("out*"))


def test_a_bad_folder_is_explained_and_left_alone(
    trained: tuple[Path, Trainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, out = str(trained[0]), tmp_path / "out"

    def fails(words: str) -> None:
        assert cli.main(["export", run, "--out", str(out)]) == 2
        assert words in capsys.readouterr().err

    out.mkdir()
    (out / "mine.txt").write_text("keep", encoding="utf-8")
    fails("is not empty")
    assert [file.name for file in out.iterdir()] == ["mine.txt"]
    shutil.rmtree(out)
    out.write_text("a file", encoding="utf-8")
    fails("is a file")
    assert out.read_text(encoding="utf-8") == "a file"
    out.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda place: Usage(10, 9, 1))
        fails("MB and its disk has 0.000 MB free: free some")

    def fill_up(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("vlmcourse.models.weight_files.save_file", fill_up)
        fails("free some space")
    assert not list(tmp_path.iterdir())
    out = tmp_path / "file" / "out"
    (tmp_path / "file").write_text("", encoding="utf-8")
    fails("cannot be written")
