import collections
import re
import time

import numpy as np
import pytest
from sklearn.datasets import load_digits

from vlmcourse.data.digits import (
    HALF_PX,
    SIDE_PX,
    DigitsDataset,
    Placed,
    draw_picture,
    load_scans,
    scan_indices,
)
from vlmcourse.data.questions import KINDS, PLURALS
from vlmcourse.data.tokenizer import load_tokenizer


def answer_from_the_picture(question: str, placed: list[Placed]) -> str:
    """Answer a question by looking at positions and labels: written apart from the code under test."""
    labels = load_scans()[1]
    ordered = sorted(placed, key=lambda p: (p.y_px >= HALF_PX, p.x_px) if len(placed) > 2 else (False, p.x_px))
    digits = [int(labels[p.scan]) for p in ordered]
    question = question.removeprefix("<image>\n")
    if question == "read them":
        return "".join(map(str, digits))
    if question == "what is their sum?":
        return f"{digits[0]}+{digits[1]}={digits[0] + digits[1]}"
    if match := re.fullmatch(r"how many (\w+)\?", question):
        return str(digits.count(PLURALS.index(match[1])))
    match = re.fullmatch(r"which digit is (?:on|at) the (.+)\?", question)
    assert match, f"no such question: {question}"
    where = match[1].split()
    found = [
        int(labels[p.scan])
        for p in placed
        if ("left" in where) == (p.x_px < HALF_PX)
        and ("top" not in where or p.y_px < HALF_PX)
        and ("bottom" not in where or p.y_px >= HALF_PX)
    ]
    assert len(found) == 1, f"{question} does not name one digit"
    return str(found[0])


def test_scans_are_those_of_scikit_learn():
    scans, labels = load_scans()
    pixels, digits = load_digits(return_X_y=True)
    assert scans.shape == (1797, 8, 8)
    np.testing.assert_array_equal(scans.reshape(-1, 64), pixels)
    np.testing.assert_array_equal(labels, digits)


def test_no_scan_is_in_both_splits_and_none_is_left_out():
    train, heldout = set(scan_indices("train").tolist()), set(scan_indices("heldout").tolist())
    assert not train & heldout
    assert train | heldout == set(range(1797))
    assert 200 < len(heldout) < 400
    assert min(np.bincount(load_scans()[1][sorted(heldout)], minlength=10)) >= 20


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_pictures_show_only_scans_of_their_split(split):
    dataset = DigitsDataset(3000, 0, split)
    shown = {item.scan for i in range(3000) for item in dataset.plan(i)[1]}
    assert shown <= set(scan_indices(split).tolist())
    assert len(shown) > 0.95 * len(scan_indices(split))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_answer_is_what_the_picture_shows(split):
    dataset = DigitsDataset(2000, 3, split)
    for i in range(2000):
        messages, placed = dataset.plan(i)
        for asked, answered in zip(messages[::2], messages[1::2], strict=True):
            assert (asked.role, answered.role) == ("user", "assistant")
            assert answered.text == answer_from_the_picture(asked.text, placed), asked.text


def test_a_sample_depends_on_split_seed_and_index_alone():
    in_order = [DigitsDataset(50, 7, "train").plan(i) for i in range(50)]
    dataset = DigitsDataset(5000, 7, "train")
    assert [dataset.plan(i) for i in reversed(range(50))] == in_order[::-1]
    again, other = dataset[3], DigitsDataset(5000, 8, "train")[3]
    assert again.messages == in_order[3][0]
    assert again.images[0].tobytes() == dataset[3].images[0].tobytes()
    assert again.images[0].tobytes() != other.images[0].tobytes()


def test_samples_are_the_same_on_every_machine():
    messages, placed = DigitsDataset(10, 0, "train").plan(1)
    assert [(item.scan, item.x_px, item.y_px, item.size_px) for item in placed] == GOLDEN_PLACED
    assert [message.text for message in messages] == GOLDEN_TEXTS


def test_a_picture_shows_each_scan_at_its_place_and_nothing_else():
    placed = [Placed(5, 1, 2, 14), Placed(40, 16, 16, 16)]
    picture = draw_picture(placed)
    assert picture.size == (SIDE_PX, SIDE_PX) and picture.mode == "RGB"
    pixels = np.array(picture)
    for item in placed:
        spot = pixels[item.y_px : item.y_px + item.size_px, item.x_px : item.x_px + item.size_px]
        assert spot.max() > 200
        assert (spot == spot[..., :1]).all(), "white ink has three equal channels"
        small = load_scans()[0][item.scan].astype(float)
        rows = np.linspace(0, 7, item.size_px).round().astype(int)
        similarity = np.corrcoef(small[rows][:, rows].ravel(), spot.max(-1).ravel())[0, 1]
        assert similarity > 0.9, "the enlarged scan does not look like the scan"
        spot[:] = 0
    assert not pixels.any()


def test_pictures_differ_in_number_of_digits_position_and_size():
    items = [DigitsDataset(500, 0, "train").plan(i)[1] for i in range(500)]
    assert {len(placed) for placed in items} == {1, 2, 3, 4}
    flat = [item for placed in items for item in placed]
    assert len({(item.x_px, item.y_px) for item in flat}) > 30
    assert len({item.size_px for item in flat}) >= 3


def test_heldout_samples_are_single_questions_spread_evenly_over_the_kinds():
    samples = DigitsDataset(8 * len(KINDS), 0, "heldout")[:]
    assert all(len(sample.messages) == 2 for sample in samples)
    starts = {
        "read": "read them",
        "sum": "what is their sum?",
    }
    for i, sample in enumerate(samples):
        question = sample.messages[0].text.removeprefix("<image>\n")
        name = KINDS[i % len(KINDS)].name
        assert name not in starts or question == starts[name]
    texts = collections.Counter(sample.messages[0].text for sample in samples)
    assert texts["<image>\nread them"] == 8


def test_training_samples_hold_several_questions_about_one_picture_and_one_image_marker():
    samples = DigitsDataset(300, 0, "train")[:]
    turns = collections.Counter(len(sample.messages) // 2 for sample in samples)
    assert set(turns) <= {3, 4} and turns[4] > 270
    for sample in samples:
        texts = [message.text for message in sample.messages]
        assert len(sample.images) == 1
        assert texts[0].startswith("<image>\n") and "".join(texts).count("<image>") == 1
        assert len(set(texts[::2])) == len(texts[::2]), "a question is asked twice"


def test_no_kind_of_question_can_be_answered_without_looking():
    answers = collections.defaultdict(collections.Counter)
    dataset = DigitsDataset(4000, 0, "heldout")
    for i in range(4000):
        messages, _ = dataset.plan(i)
        answers[KINDS[i % len(KINDS)].name][messages[1].text] += 1
    for name, counts in answers.items():
        assert counts.most_common(1)[0][1] / sum(counts.values()) < 0.65, f"{name}: one answer is right too often"


def test_answers_differ_in_length_so_that_token_weighting_matters():
    tokenizer = load_tokenizer("builtin")
    messages = [m for i in range(400) for m in DigitsDataset(400, 0, "train").plan(i)[0] if m.role == "assistant"]
    lengths = collections.Counter(len(tokenizer.encode(message.text)) for message in messages)
    assert {1, 2, 3, 4, 5} <= set(lengths)
    totals = collections.Counter()
    for i in range(400):
        samples = DigitsDataset(400, 0, "train").plan(i)[0]
        totals[sum(len(tokenizer.encode(m.text)) for m in samples if m.role == "assistant")] += 1
    assert len(totals) >= 5


def test_training_sequences_are_short():
    tokenizer = load_tokenizer("builtin")
    dataset = DigitsDataset(1000, 0, "train")
    lengths = [len(tokenizer.encode_conversation(dataset.plan(i)[0], [4])[0]) for i in range(1000)]
    assert max(lengths) <= 96


def test_slices_and_negative_indices_and_the_end_work_as_in_a_list():
    dataset = DigitsDataset(10, 0, "train")
    assert [sample.sample_id for sample in dataset[8:]] == ["digits-train-8", "digits-train-9"]
    assert dataset[-1].messages == dataset[9].messages and dataset[-1].sample_id == "digits-train-9"
    assert len(list(dataset)) == 10
    with pytest.raises(IndexError):
        dataset[10]


@pytest.mark.parametrize(
    "arguments", [(0, 0, "train"), (5, 0, "test"), (5, 0, "train", 0)], ids=["no samples", "no such split", "no turns"]
)
def test_impossible_datasets_are_refused(arguments):
    with pytest.raises(ValueError, match="must be"):
        DigitsDataset(*arguments)


def test_making_samples_costs_far_less_than_training_on_them():
    dataset = DigitsDataset(400, 0, "train")
    dataset[:]  # enlarges the scans
    start = time.process_time()
    dataset[:]
    assert (time.process_time() - start) / 400 < 2e-3, "a sample should take about 0.1 ms"


GOLDEN_PLACED = [(600, 0, 0, 16), (211, 16, 1, 15), (774, 0, 16, 15), (1503, 18, 18, 14)]
GOLDEN_TEXTS = [
    "<image>\nhow many fours?",
    "0",
    "which digit is at the top right?",
    "7",
    "read them",
    "2796",
    "how many sixes?",
    "1",
]
