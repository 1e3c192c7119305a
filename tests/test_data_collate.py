import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from vlmcourse.data.collate import Collator
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import IGNORE_LABEL, Message, Sample
from vlmcourse.data.tokenizer import load_tokenizer
from vlmcourse.presets import get_model

_PRESET = get_model("tiny")
_VISION = dataclasses.replace(_PRESET.vision, image_size_px=32, patch_size_px=4)
TINY = dataclasses.replace(_PRESET, name="tiny", vision=_VISION, pixel_shuffle_fraction=0.5, image_token_id=3)
"""A shape with 16 visual tokens a tile, whatever the preset has."""
TOKENIZER = load_tokenizer("builtin")


def text_sample(name: str, answer: str = "9") -> Sample:
    return Sample(name, (), (Message("user", "which digit?"), Message("assistant", answer)))


def image_sample(name: str, *sizes: tuple[int, int]) -> Sample:
    images = tuple(Image.new("RGB", size, (200, 20 * i, 0)) for i, size in enumerate(sizes))
    question = "<image>" * len(sizes) + "read them"
    return Sample(name, images, (Message("user", question), Message("assistant", "1" * len(sizes))))


MIXED = [text_sample("t"), image_sample("one", (32, 32)), image_sample("three", (64, 32), (8, 8), (40, 90))]


def test_a_mixed_batch_has_the_promised_shapes_and_types():
    batch = Collator(TOKENIZER, TINY, 256)(MIXED)
    rows, length = batch.input_ids_BS.shape
    assert rows == 3 and length % 8 == 0
    assert batch.labels_BS.shape == batch.attention_mask_BS.shape == (3, length)
    assert batch.input_ids_BS.dtype == batch.labels_BS.dtype == torch.int64
    assert batch.attention_mask_BS.dtype == torch.bool
    assert batch.pixel_values_ICHW.shape == (4, 3, 32, 32) and batch.pixel_values_ICHW.dtype == torch.float32
    assert batch.tiles_per_sample == (0, 1, 3)
    assert batch.sample_ids == ("t", "one", "three")
    per_row = (batch.input_ids_BS == TINY.image_token_id).sum(1).tolist()
    assert per_row == [0, 16, 48]
    assert batch.num_visual_tokens == 64 and batch.num_tokens == int(batch.attention_mask_BS.sum())
    assert batch.num_supervised_tokens == 2 + 2 + 4


def test_training_rows_are_padded_on_the_right_and_padding_is_never_learned():
    samples = DigitsDataset(16, 0, "train")[:] + MIXED
    batch = Collator(TOKENIZER, TINY, 256)(samples)
    for row, sample in enumerate(samples):
        ids, labels = TOKENIZER.encode_conversation(sample.messages, [16] * len(sample.images))
        assert batch.input_ids_BS[row, : len(ids)].tolist() == ids
        assert batch.labels_BS[row, : len(ids)].tolist() == labels
        assert batch.attention_mask_BS[row, : len(ids)].all()
        assert (batch.input_ids_BS[row, len(ids) :] == TOKENIZER.pad_token_id).all()
        assert (batch.labels_BS[row, len(ids) :] == IGNORE_LABEL).all()
        assert not batch.attention_mask_BS[row, len(ids) :].any()


def test_the_supervised_labels_of_each_row_are_its_answers():
    samples = DigitsDataset(40, 1, "train")[:]
    batch = Collator(TOKENIZER, TINY, 256)(samples)
    for row, sample in zip(batch.labels_BS, samples, strict=True):
        answers = "".join(m.text + "<|im_end|>" for m in sample.messages if m.role == "assistant")
        assert TOKENIZER.decode(row[row != IGNORE_LABEL].tolist(), skip_special_tokens=False) == answers
    counts = (batch.labels_BS != IGNORE_LABEL).sum(1)
    assert len(counts.unique()) > 3, "rows must differ in supervised tokens, or a wrong mean of means does not show"


def test_prompts_are_padded_on_the_left_and_end_where_the_answer_begins():
    samples = DigitsDataset(16, 0, "heldout")[:] + MIXED
    batch = Collator(TOKENIZER, TINY, 256).prompts(samples)
    for row, sample in enumerate(samples):
        ids = TOKENIZER.encode_prompt(sample.messages, [16] * len(sample.images))
        assert batch.input_ids_BS[row, -len(ids) :].tolist() == ids
        assert batch.attention_mask_BS[row, -len(ids) :].all()
        assert not batch.attention_mask_BS[row, : -len(ids)].any()
        assert (batch.input_ids_BS[row, : -len(ids)] == TOKENIZER.pad_token_id).all()
    assert (batch.labels_BS == IGNORE_LABEL).all() and batch.num_supervised_tokens == 0


def test_a_batch_of_text_alone_has_an_empty_tensor_of_pixels():
    batch = Collator(TOKENIZER, TINY, 256)([text_sample("a"), text_sample("b", "four")])
    assert batch.pixel_values_ICHW.shape == (0, 3, 32, 32)
    assert batch.tiles_per_sample == (0, 0) and batch.num_visual_tokens == 0


def test_large_pictures_become_tiles_in_the_order_of_the_samples():
    collator = Collator(TOKENIZER, TINY, 256, max_tiles_per_image=4)
    batch = collator([image_sample("wide", (128, 32)), image_sample("two", (32, 32), (64, 64)), text_sample("t")])
    assert batch.tiles_per_sample == (5, 6, 0)
    assert batch.pixel_values_ICHW.shape[0] == 11
    assert (batch.input_ids_BS == TINY.image_token_id).sum(1).tolist() == [80, 96, 0]
    green = batch.pixel_values_ICHW[:, 1].mean((1, 2))
    assert (green[6:] > green[:6].max()).all(), "only the second picture of 'two' is greener"
    assert batch.num_visual_tokens == 176


def test_pixels_are_those_of_the_picture():
    sample = DigitsDataset(1, 0, "train")[0]
    pixels = Collator(TOKENIZER, TINY, 256)([sample]).pixel_values_ICHW[0]
    restored = pixels * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1) + torch.tensor([0.485, 0.456, 0.406]).view(
        3, 1, 1
    )
    rgb = (restored.permute(1, 2, 0) * 255).round().to(torch.uint8)
    assert np.array_equal(rgb.numpy(), np.asarray(sample.images[0]))


@pytest.mark.parametrize("method", ["__call__", "prompts"])
def test_a_sample_that_is_too_long_is_refused_with_its_name_length_and_remedy(method):
    sample = image_sample("photo-7", (32, 32), (32, 32))
    longest = {"__call__": TOKENIZER.encode_conversation(sample.messages, [16, 16])[0]}
    length = len(longest.get(method, TOKENIZER.encode_prompt(sample.messages, [16, 16])))
    assert getattr(Collator(TOKENIZER, TINY, length), method)([sample])
    message = rf"'photo-7' has {length} tokens \(32 of them image tokens in 2 tiles\), more than the {length - 1} of "
    with pytest.raises(ValueError, match=message + r"data\.max_seq_len: raise it"):
        getattr(Collator(TOKENIZER, TINY, length - 1), method)([text_sample("short"), sample])


def test_a_sample_whose_markers_and_images_differ_is_refused_by_name():
    sample = dataclasses.replace(image_sample("row-3", (32, 32)), images=())
    with pytest.raises(ValueError, match="Sample 'row-3': The conversation has 1 <image> markers .* and 0 pictures"):
        Collator(TOKENIZER, TINY, 256)([text_sample("a"), sample])


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        Collator(TOKENIZER, TINY, 256)([])


def test_a_tokenizer_that_does_not_belong_to_the_model_is_refused():
    with pytest.raises(ValueError, match=r"image token has id 3, the model 'tiny' expects 7.*data\.tokenizer"):
        Collator(TOKENIZER, dataclasses.replace(TINY, image_token_id=7), 256)
    language = dataclasses.replace(TINY.language, vocab_size=100)
    with pytest.raises(ValueError, match="tokens, the model 'tiny' has embeddings for 100"):
        Collator(TOKENIZER, dataclasses.replace(TINY, language=language), 256)


def test_a_batch_moves_to_a_device_as_a_whole():
    batch = Collator(TOKENIZER, TINY, 256)(MIXED)
    moved = batch.to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 4 and all(tensor.is_meta for tensor in tensors)
    assert moved.sample_ids == batch.sample_ids and moved.num_visual_tokens == batch.num_visual_tokens
    assert not batch.input_ids_BS.is_meta
