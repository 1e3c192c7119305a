import dataclasses
import json
import random
from pathlib import Path

import pytest
from PIL import Image

from vlmcourse.config import DataConfig, RunConfig, TrainConfig
from vlmcourse.data.build import build_dataset, split_by_image


def llava_config(folder: Path, images_of_rows: list[str], **data: object) -> TrainConfig:
    """Write a conversation file whose rows show the named images, and return a configuration that reads it."""
    for name in set(images_of_rows):
        Image.new("RGB", (4, 4)).save(folder / name)
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "yes"}]
    rows = [{"id": i, "image": name, "conversations": turns} for i, name in enumerate(images_of_rows)]
    (folder / "data.json").write_text(json.dumps(rows))
    settings = {"dataset": "llava", "path": str(folder / "data.json")} | data
    return TrainConfig(data=DataConfig(**settings))  # pyright: ignore[reportArgumentType]


def test_digits_have_the_configured_numbers_and_seed():
    config = TrainConfig(run=RunConfig(seed=3), data=DataConfig(num_train_samples=20, num_eval_samples=9))
    train, heldout = build_dataset(config, "train"), build_dataset(config, "heldout")
    assert (len(train), len(heldout)) == (20, 9)
    other = dataclasses.replace(config, run=RunConfig(seed=4))
    assert build_dataset(other, "train")[0].messages != train[0].messages or (
        build_dataset(other, "train")[1].messages != train[1].messages
    )
    assert [sample.messages for sample in build_dataset(other, "heldout")] == [s.messages for s in heldout]


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split = 'test': must be 'train' or 'heldout'"):
        build_dataset(TrainConfig(), "test")  # pyright: ignore[reportArgumentType]


def test_a_llava_file_is_split_without_a_common_image(tmp_path):
    draw = random.Random(0)
    config = llava_config(tmp_path, [f"{draw.randrange(60)}.png" for _ in range(100)], num_eval_samples=8)
    train, heldout = build_dataset(config, "train"), build_dataset(config, "heldout")
    rows = {str(row["id"]): row["image"] for row in json.loads((tmp_path / "data.json").read_text())}
    assert len(heldout) == 8 and len(train) > 60
    assert not {rows[s.sample_id] for s in train} & {rows[s.sample_id] for s in heldout}
    again = build_dataset(config, "heldout")
    assert [s.sample_id for s in again] == [s.sample_id for s in heldout] == [s.sample_id for s in heldout[:]]


def test_a_llava_file_gives_at_most_the_configured_numbers(tmp_path):
    names = [f"{i}.png" for i in range(30)]
    config = llava_config(tmp_path, names, num_train_samples=7, num_eval_samples=256)
    assert len(build_dataset(config, "train")) == 7
    assert len(build_dataset(config, "heldout")) == 3, "a tenth of the file at most"


def test_bad_rows_follow_the_configured_policy(tmp_path):
    config = llava_config(tmp_path, [f"{i}.png" for i in range(20)])
    (tmp_path / "5.png").unlink()
    with pytest.raises(ValueError, match=r"entry 6 \(line 1\): image '5.png' is missing"):
        build_dataset(config, "train")
    skipping = dataclasses.replace(config, data=dataclasses.replace(config.data, on_bad_row="skip"))
    assert len(build_dataset(skipping, "train")) + len(build_dataset(skipping, "heldout")) == 19


def test_a_file_that_changed_is_read_again(tmp_path):
    config = llava_config(tmp_path, [f"{i}.png" for i in range(20)])
    assert len(build_dataset(config, "train")) == 18
    config = llava_config(tmp_path, [f"{i}.png" for i in range(40)])
    assert len(build_dataset(config, "train")) == 36


def test_images_are_relative_to_the_configured_folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    config = llava_config(tmp_path, [f"{i}.png" for i in range(20)], image_dir=str(tmp_path / "pictures"))
    with pytest.raises(ValueError, match="20 bad rows"):
        build_dataset(config, "train")


def test_a_file_whose_rows_all_show_one_image_cannot_be_split(tmp_path):
    config = llava_config(tmp_path, ["same.png"] * 12)
    with pytest.raises(ValueError, match="12 usable rows, and none is left to train on"):
        build_dataset(config, "train")


def test_splits_never_share_an_image_and_hold_out_at_least_one_row():
    draw = random.Random(1)
    for _ in range(200):
        rows = [[str(draw.randrange(30)) for _ in range(draw.randrange(4))] for _ in range(draw.randint(1, 60))]
        num_heldout = draw.randint(1, 20)
        train, heldout = split_by_image(rows, num_heldout)
        assert 1 <= len(heldout) <= num_heldout and not set(train) & set(heldout)
        assert not {name for i in train for name in rows[i]} & {name for i in heldout for name in rows[i]}
        kept = set(train) | set(heldout)
        shown = {name for i in heldout for name in rows[i]}
        assert all(shown & set(rows[i]) for i in range(len(rows)) if i not in kept), "a row is left out for no reason"
