"""What stops a run before any rank starts: half an environment of a rank, and sequences with no room for a picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlmcourse import cli
from vlmcourse.commands import start, train
from vlmcourse.config import ConfigError, load_config
from vlmcourse.data.samples import Message
from vlmcourse.data.tokenizer import load_tokenizer

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.toml")
WHOLE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
HALF = [
    ({"RANK": "0"}, "has RANK=0 but no WORLD_SIZE, MASTER_ADDR, MASTER_PORT: a rank needs all four"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "has RANK=0, WORLD_SIZE=2 but no MASTER_ADDR, MASTER_PORT: a rank needs"),
    ({"WORLD_SIZE": "2"}, "has WORLD_SIZE=2 but no RANK, MASTER_ADDR, MASTER_PORT: a rank needs all four"),
    ({"RANK": ""}, "has empty values but no RANK, WORLD_SIZE, "),
    (WHOLE | {"RANK": "x"}, "RANK=x, WORLD_SIZE=2, MASTER_PORT=29500: these must be whole numbers"),
    (WHOLE | {"RANK": "2"}, "RANK must be from 0 to WORLD_SIZE - 1"),
    (WHOLE | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "(and LOCAL_RANK to LOCAL_WORLD_SIZE - 1)"),
    (WHOLE | {"MASTER_PORT": "0"}, "MASTER_PORT from 1 to 65535"),
]


def test_half_an_environment_of_a_rank_is_refused_in_a_sentence_without_torch() -> None:
    code = (
        "import json, os, sys\n"
        "sys.modules['torch'] = None\n"
        "from vlmcourse.cli import main\n"
        "clean = dict(os.environ)\n"
        "for variables in json.loads(sys.argv[1]):\n"
        "    os.environ.clear()\n"
        "    os.environ.update(clean | variables)\n"
        "    print(main(['train', sys.argv[2]]))\n"
    )
    clean = {key: value for key, value in os.environ.items() if key not in WHOLE and not key.startswith("LOCAL_")}
    cases = json.dumps([variables for variables, _ in HALF])
    done = subprocess.run(
        [sys.executable, "-c", code, cases, TINY], capture_output=True, text=True, timeout=60, env=clean
    )
    assert done.stdout.split() == ["2"] * len(HALF), done.stderr
    for line, (_, words) in zip(done.stderr.splitlines(), HALF, strict=True):
        assert line.startswith("vlmcourse train: the environment ") and words in line
        assert "start the ranks with vlmcourse train --nproc, %%torchrun or torchrun" in line


def test_a_whole_environment_and_none_are_taken() -> None:
    assert start.check_rank_environment(WHOLE) == 2
    assert start.check_rank_environment(WHOLE | {"RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) == 2
    assert start.check_rank_environment({"MASTER_ADDR": "somewhere"}) is None


def test_a_sequence_without_room_for_a_picture_is_refused_before_an_earlier_run_is_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "_train_here", None)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "log.csv").touch()
    argv = ["--set", "parallel.strategy=single", "--set", f"run.output_dir={tmp_path}", "--set", "data.max_seq_len=13"]
    assert cli.main(["train", TINY, *argv]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert "data.max_seq_len = 13: a picture takes 4 image tokens or more in the model 'tiny', a question" in shown.err
    assert "raise it above 14 by the length of your text" in shown.err
    assert cli.main(["launch", TINY, "--target", "slurm", "--set", "data.max_seq_len=13"]) == 2
    assert "data.max_seq_len = 13: a picture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('[{"id": 1, "image": "a.png"}]', True),
        ('{"id": 1, "image" :\n ["a.png"]}', True),
        ('[{"id": 1, "image": null}]', False),
        ('[{"id": 1, "image": []}]', False),
        ('[{"id": 1, "conversations": []}]', False),
        ("", False),
        (None, False),
    ],
)
def test_a_conversation_file_needs_room_for_pictures_where_it_has_some(
    text: str | None, refused: bool, tmp_path: Path
) -> None:
    path = tmp_path / "chats.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    llava = {"model.preset": "internvl2-1b", "data.dataset": "llava", "data.path": str(path)}
    start.check_room(load_config(TINY, llava | {"data.max_seq_len": 266}))
    config = load_config(TINY, llava)  # whose 256 are all taken by the picture
    if not refused:
        return start.check_room(config)
    with pytest.raises(ConfigError, match=r"data\.max_seq_len = 256: a picture takes 256 image tokens or more"):
        start.check_room(config)


def test_the_shortest_conversation_about_a_picture_takes_no_fewer_tokens_than_counted() -> None:
    messages = (Message("user", "<image>"), Message("assistant", "1"))
    ids, _ = load_tokenizer("builtin").encode_conversation(messages, [4])
    assert len(ids) == 4 + start.FEWEST_TOKENS_AROUND


def test_a_policy_that_covers_no_block_is_refused_before_any_rank_starts_or_a_run_is_spoken_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_no_rank(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "_start_ranks", start_no_rank)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "log.csv").touch()  # an earlier run
    changes = ["--set", f"run.output_dir={tmp_path}", "--set", "activations.vision=every:9"]
    launch = ["--target", "torchrun", "--nproc-per-node", "2"]
    for argv in (["train", TINY, *changes, "--nproc", "2"], ["launch", TINY, *changes, *launch]):
        assert cli.main(argv) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and "activations.vision = 'every:9': the tower has " in shown.err
