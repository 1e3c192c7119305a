import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlmcourse.data.llava import BadRowsError, LlavaDataset

QUESTION = {"from": "human", "value": "<image>\nWhat is this?"}
ANSWER = {"from": "gpt", "value": "A cat."}
GOOD = {"id": "good", "image": "a.png", "conversations": [QUESTION, ANSWER]}


@pytest.fixture
def images(tmp_path) -> Path:
    """Return a folder of good and broken images."""
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 80, 3), np.uint8)
    picture = Image.fromarray(pixels)
    picture.save(folder / "a.png")
    picture.save(folder / "sub" / "b.jpg")
    picture.convert("L").save(folder / "grey.png")
    for name in ("a.png", "sub/b.jpg"):
        whole = (folder / name).read_bytes()
        (folder / f"cut-{Path(name).name}").write_bytes(whole[: len(whole) // 2])
    (folder / "text.png").write_text("not a picture")
    (folder / "empty.png").touch()
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 200).save(folder / "deep.png")
    picture.save(tmp_path / "outside.png")
    return folder


def write(folder: Path, rows: list[object], array: bool = False) -> Path:
    """Write rows as JSON Lines, or as an array that is spread over lines; a str goes in as it is."""
    path = folder / ("data.json" if array else "data.jsonl")
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("[\n" + ",\n".join(lines) + "\n]" if array else "\n".join(lines) + "\n", encoding="utf-8")
    return path


def with_turns(*turns: object) -> dict[str, object]:
    return {**GOOD, "conversations": list(turns)}


BAD_ROWS: dict[str, tuple[object, str]] = {
    "missing image": (GOOD | {"image": "gone.png"}, "image 'gone.png' is missing"),
    "folder as image": (GOOD | {"image": "sub"}, "image 'sub' is missing"),
    "no marker": (with_turns({"from": "human", "value": "What?"}, ANSWER), "no <image> marker"),
    "more markers": (
        with_turns({"from": "human", "value": "<image><image>"}, ANSWER),
        "2 <image> markers and 1 images",
    ),
    "fewer markers": (GOOD | {"image": ["a.png", "a.png"]}, "1 <image> markers and 2 images"),
    "marker without image": ({k: v for k, v in GOOD.items() if k != "image"}, "1 <image> markers and 0 images"),
    "marker in an answer": (with_turns(QUESTION, {"from": "gpt", "value": "<image>"}), "turn 2 is from 'gpt' and has"),
    "truncated PNG": (GOOD | {"image": "cut-a.png"}, "image 'cut-a.png' cannot be read"),
    "truncated JPEG": (GOOD | {"image": "cut-b.jpg"}, "image 'cut-b.jpg' cannot be read"),
    "not an image": (GOOD | {"image": "text.png"}, "image 'text.png' cannot be read"),
    "empty file": (GOOD | {"image": "empty.png"}, "image 'empty.png' cannot be read"),
    "16 bits": (GOOD | {"image": "deep.png"}, "more than 8 bits a channel"),
    "one of two images": (
        GOOD
        | {"image": ["a.png", "cut-a.png"], "conversations": [{"from": "human", "value": "<image> <image>"}, ANSWER]},
        "image 'cut-a.png' cannot be read",
    ),
    "path up": (GOOD | {"image": "../outside.png"}, "image '../outside.png' lies outside"),
    "path down and up": (GOOD | {"image": "sub/../../outside.png"}, "lies outside"),
    "absolute path": (GOOD | {"image": "/etc/passwd"}, "image '/etc/passwd' lies outside"),
    "zero byte": (GOOD | {"image": "a\0.png"}, "is missing"),
    "image is a number": (GOOD | {"image": 7}, "image = 7: must be a file name"),
    "image is empty": (GOOD | {"image": ""}, "image = '': must be a file name"),
    "list with null": (GOOD | {"image": ["a.png", None]}, "must be a file name or a list"),
    "unknown role": (with_turns(QUESTION, {"from": "assistant", "value": "x"}), "turn 2 is from 'assistant'"),
    "system first": (with_turns({"from": "system", "value": "x"}, QUESTION, ANSWER), "turn 1 is from 'system'"),
    "answer first": (with_turns(ANSWER, QUESTION), "turn 1 is from 'gpt': human and gpt must take turns"),
    "human twice": (with_turns(QUESTION, {"from": "human", "value": "?"}, ANSWER), "turn 2 is from 'human'"),
    "no last answer": (with_turns(QUESTION, ANSWER, {"from": "human", "value": "?"}), "the last turn is from 'human'"),
    "unhashable role": (with_turns({"from": ["human"], "value": "x"}, ANSWER), "turn 1 is from ['human']"),
    "no id": ({k: v for k, v in GOOD.items() if k != "id"}, "the key 'id' is missing"),
    "no conversations": ({"id": 1, "image": "a.png"}, "the key 'conversations' is missing"),
    "neither key": ({}, "the key 'id' and 'conversations' is missing"),
    "empty conversations": (GOOD | {"conversations": []}, "at least one question and one answer"),
    "conversations is text": (GOOD | {"conversations": "hello"}, "at least one question and one answer"),
    "turn without value": (with_turns(QUESTION, {"from": "gpt"}), "turn 2 must be an object with the keys"),
    "turn is text": (with_turns("hello", ANSWER), "turn 1 must be an object with the keys"),
    "empty answer": (with_turns(QUESTION, {"from": "gpt", "value": "  "}), "the value of turn 2 must be text"),
    "value is a number": (with_turns(QUESTION, {"from": "gpt", "value": 3}), "the value of turn 2 must be text"),
    "row is a list": ([1, 2], "a row must be a JSON object"),
    "row is null": ("null", "a row must be a JSON object"),
}
BROKEN_LINES = {"cut line": '{"id": "x", "conversations": [', "no JSON": "hello", "two rows": '{"id": 1} {"id": 2}'}


# --- Good rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("array", [False, True])
def test_good_rows_become_samples(tmp_path, images, array):
    rows = [
        GOOD,
        {
            "id": 12,
            "image": ["sub/b.jpg", "grey.png"],
            "conversations": [
                {"from": "human", "value": "<image> or <image>?"},
                {"from": "gpt", "value": "Neither…"},
                {"from": "human", "value": "Why?"},
                {"from": "gpt", "value": "北京"},
            ],
        },
        {"id": "text", "conversations": [{"from": "human", "value": "Hi"}, ANSWER]},
        GOOD | {"id": "null image", "image": None, "conversations": [{"from": "human", "value": "Hi"}, ANSWER]},
        GOOD | {"id": "detour", "image": "./sub/../a.png"},
    ]
    dataset = LlavaDataset(write(tmp_path, rows, array), images)
    assert len(dataset) == 5 and dataset.bad_rows == ()
    assert [sample.sample_id for sample in dataset] == ["good", "12", "text", "null image", "detour"]
    first, second, third = dataset[0], dataset[1], dataset[-3]
    assert [(m.role, m.text) for m in first.messages] == [("user", "<image>\nWhat is this?"), ("assistant", "A cat.")]
    assert np.array_equal(np.asarray(first.images[0]), np.asarray(Image.open(images / "a.png")))
    assert [image.size for image in second.images] == [(80, 64), (80, 64)]
    assert all(image.mode == "RGB" for image in second.images)
    assert second.messages[3].text == "北京" and third.images == ()


def test_images_are_opened_when_a_sample_is_asked_for(tmp_path, images):
    dataset = LlavaDataset(write(tmp_path, [GOOD]), images)
    Image.new("RGB", (3, 3), "red").save(images / "a.png")
    assert dataset[0].images[0].size == (3, 3)
    (images / "a.png").unlink()
    with pytest.raises(RuntimeError, match="line 1: image 'a.png' could be read at the start and cannot be now"):
        dataset[0]


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_no_rows(tmp_path, images):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join([json.dumps(GOOD).encode()] * 2) + b"\r\n\r\n{}")
    dataset = LlavaDataset(path, images, "skip")
    assert len(dataset) == 2 and [row.place.line for row in dataset.bad_rows] == [5]


# --- Bad rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("array", [False, True])
def test_a_bad_row_is_reported_with_its_line_and_reason(tmp_path, images, name, array):
    row, reason = BAD_ROWS[name]
    path = write(tmp_path, [GOOD, GOOD, row, GOOD], array)
    with pytest.raises(BadRowsError) as caught:
        LlavaDataset(path, images)
    (bad,) = caught.value.bad_rows
    assert (bad.place.line, bad.place.entry) == ((4, 3) if array else (3, None))
    assert reason in bad.reason
    where = "entry 3 (line 4): " if array else "line 3: "
    assert f"{where}{bad.reason}" in str(caught.value) and str(path) in str(caught.value)
    skipping = LlavaDataset(path, images, "skip")
    assert len(skipping) == 3 and skipping.bad_rows == (bad,)
    assert all(sample.sample_id == "good" for sample in skipping)


@pytest.mark.parametrize("name", BROKEN_LINES)
def test_a_line_that_is_not_json_is_a_bad_row(tmp_path, images, name):
    path = write(tmp_path, [GOOD, BROKEN_LINES[name], GOOD])
    with pytest.raises(BadRowsError, match="1 bad row; .*\n  - line 2: not valid JSON"):
        LlavaDataset(path, images)
    assert len(LlavaDataset(path, images, "skip")) == 2


def test_all_bad_rows_are_refused_in_one_error_and_skipped_with_a_log_line_each(tmp_path, images, caplog):
    rows = [row for name in BAD_ROWS for row in (GOOD, BAD_ROWS[name][0])] + list(BROKEN_LINES.values())
    path = write(tmp_path, rows)
    lines = [2 * i + 2 for i in range(len(BAD_ROWS))] + [2 * len(BAD_ROWS) + 1 + i for i in range(len(BROKEN_LINES))]
    with pytest.raises(BadRowsError) as caught:
        LlavaDataset(path, images)
    assert [row.place.line for row in caught.value.bad_rows] == lines
    assert f"{len(lines)} bad rows" in str(caught.value)
    assert len(str(caught.value).splitlines()) == len(lines) + 1
    with caplog.at_level(logging.WARNING):
        dataset = LlavaDataset(path, images, "skip")
    assert len(dataset) == len(BAD_ROWS)
    logged = [record.getMessage() for record in caplog.records]
    assert all(f"left out line {line}: " in text for line, text in zip(lines, logged, strict=True))


def test_entries_of_an_array_have_the_line_on_which_they_begin(tmp_path, images):
    path = tmp_path / "data.json"
    text = json.dumps([GOOD, {"id": 1}, GOOD, {"id": 2}], indent=2)
    path.write_text(text)
    begins = [number for number, line in enumerate(text.splitlines(), start=1) if line == "  {"]
    dataset = LlavaDataset(path, images, "skip")
    assert [(row.place.entry, row.place.line) for row in dataset.bad_rows] == [(2, begins[1]), (4, begins[3])]


@pytest.mark.parametrize(
    ("text", "line"),
    [('[\n{"id": 1},\n{"id": \n', 3), ('[\n{"id": 1}\n{"id": 2}]', 3), ('[\n\n{"id": 1},\n', 4), ("[", 1)],
    ids=["cut entry", "no comma", "cut after a comma", "open"],
)
def test_an_array_that_breaks_off_is_refused_even_when_bad_rows_are_skipped(tmp_path, images, text, line):
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(ValueError, match=rf"line {line}\b.*breaks off"):
        LlavaDataset(tmp_path / "data.json", images, "skip")


def test_a_file_of_bad_rows_alone_is_refused_even_when_they_are_skipped(tmp_path, images):
    with pytest.raises(BadRowsError, match="line 1: the key"):
        LlavaDataset(write(tmp_path, [{}]), images, "skip")


@pytest.mark.parametrize("text", ["", "[]", "\n\n"])
def test_a_file_without_rows_is_refused(tmp_path, images, text):
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(ValueError, match=r"has no rows: set data\.path"):
        LlavaDataset(tmp_path / "data.json", images)


def test_missing_files_folders_and_unknown_policies_are_refused(tmp_path, images):
    path = write(tmp_path, [GOOD])
    with pytest.raises(FileNotFoundError, match=r"no conversation file .*data\.path"):
        LlavaDataset(tmp_path / "no.json", images)
    with pytest.raises(FileNotFoundError, match=r"no image folder .*data\.image_dir"):
        LlavaDataset(path, tmp_path / "no")
    with pytest.raises(ValueError, match="must be 'refuse' or 'skip'"):
        LlavaDataset(path, images, "ignore")  # pyright: ignore[reportArgumentType]
    (tmp_path / "latin.json").write_bytes(b'{"id": "\xff"}')
    with pytest.raises(ValueError, match="not UTF-8"):
        LlavaDataset(tmp_path / "latin.json", images)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "bmp", "webp", "tiff"])
def test_an_image_damaged_anywhere_is_either_readable_later_or_reported(tmp_path, images, suffix):
    draw = random.Random(suffix)
    Image.open(images / "a.png").resize((24, 16)).save(tmp_path / f"whole.{suffix}")
    whole = (tmp_path / f"whole.{suffix}").read_bytes()
    rows = []
    for i in range(80):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 8)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        cut = draw.choice((len(damaged), draw.randrange(1, len(damaged))))
        (images / f"{i}.{suffix}").write_bytes(damaged[:cut])
        rows.append(GOOD | {"id": str(i), "image": f"{i}.{suffix}"})
    dataset = LlavaDataset(write(tmp_path, [GOOD, *rows]), images, "skip")
    assert len(dataset) + len(dataset.bad_rows) == 81
    assert dataset.bad_rows and all(sample.images[0].mode == "RGB" for sample in dataset)
