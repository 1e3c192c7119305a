"""A list of samples to one batch of tensors: tiles, image tokens, padding.

Enters: `Sample`s with any mixture of no, one and several pictures. Leaves: a `Batch`, padded on the right for training
or on the left for generation. A sample that does not fit is an error that names it; nothing is cut off in silence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image

from vlmcourse.data.kinds import KindSpan, find_kind_spans
from vlmcourse.data.samples import IGNORE_LABEL, Batch, Sample
from vlmcourse.data.tiling import count_tiles, normalise_tiles, tile_image
from vlmcourse.data.tokenizer import CourseTokenizer
from vlmcourse.presets import VLMShape

PAD_MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens, unless told otherwise: few shapes, of widths that devices like."""


class Collator:
    """Turns samples into batches for one model."""

    def __init__(
        self,
        tokenizer: CourseTokenizer,
        shape: VLMShape,
        max_seq_len: int,
        max_tiles_per_image: int = 1,
        pad_multiple: int = PAD_MULTIPLE,
    ) -> None:
        """Check that the tokenizer and the model fit together.

        Args:
            tokenizer: writes the text and the image tokens.
            shape: the model that takes the batches; says how large a tile is and how many tokens it takes.
            max_seq_len: tokens that a sample may have, image tokens included.
            max_tiles_per_image: grid tiles that a picture may be cut into; a thumbnail comes on top of more than one.
            pad_multiple: rows are padded to a multiple of this many tokens; more than the default where ranks split the
                sequence.

        Raises:
            ValueError: if the image token or the vocabulary of the two differ.
        """
        if tokenizer.image_token_id != shape.image_token_id:
            raise ValueError(
                f"The tokenizer's image token has id {tokenizer.image_token_id}, the model {shape.name!r} expects "
                f"{shape.image_token_id}: use the tokenizer that belongs to the model (data.tokenizer)"
            )
        if tokenizer.vocab_size > shape.language.vocab_size:
            raise ValueError(
                f"The tokenizer has {tokenizer.vocab_size} tokens, the model {shape.name!r} has embeddings for "
                f"{shape.language.vocab_size}: use the tokenizer that belongs to the model (data.tokenizer)"
            )
        self.tokenizer, self.shape = tokenizer, shape
        self.max_seq_len, self.max_tiles_per_image, self.pad_multiple = max_seq_len, max_tiles_per_image, pad_multiple

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Return a batch to train on, padded on the right.

        Raises:
            ValueError: if there are no samples, or one is too long or has other than one marker for each picture.
        """
        return self._batch(samples, for_generation=False)

    def prompts(self, samples: Sequence[Sample]) -> Batch:
        """Return a batch to generate from, padded on the left, without labels.

        Each row ends where the assistant begins to answer; an answer that a sample ends with is left out.

        Raises:
            ValueError: as in `__call__`.
        """
        return self._batch(samples, for_generation=True)

    def measure(self, sample: Sample) -> tuple[int, int]:
        """Return the tiles and the tokens of a sample, image tokens included, without making tensors of its pictures.

        Raises:
            ValueError: as in `__call__`.
        """
        size, most = self.shape.vision.image_size_px, self.max_tiles_per_image
        tiles = [count_tiles(image.width, image.height, size, most) for image in sample.images]
        return sum(tiles), len(self._encode(sample, tiles, False)[0])

    def _batch(self, samples: Sequence[Sample], *, for_generation: bool) -> Batch:
        if not samples:
            raise ValueError("A batch needs at least one sample, and the list is empty")
        tiles: list[Image.Image] = []
        tiles_per_sample: list[int] = []
        rows: list[tuple[list[int], list[int]]] = []
        for sample in samples:
            tiles_of_images = [
                tile_image(image, self.shape.vision.image_size_px, self.max_tiles_per_image) for image in sample.images
            ]
            tiles += [tile for tiles_of_image in tiles_of_images for tile in tiles_of_image]
            tiles_per_sample.append(sum(map(len, tiles_of_images)))
            rows.append(self._encode(sample, list(map(len, tiles_of_images)), for_generation))
        length = -(-max(len(ids) for ids, _ in rows) // self.pad_multiple) * self.pad_multiple
        input_ids_BS = torch.full((len(rows), length), self.tokenizer.pad_token_id)
        labels_BS = torch.full((len(rows), length), IGNORE_LABEL)
        attention_mask_BS = torch.zeros(len(rows), length, dtype=torch.bool)
        kind_spans: list[KindSpan] = []
        for row, (ids, labels) in enumerate(rows):
            columns = slice(length - len(ids), length) if for_generation else slice(len(ids))
            input_ids_BS[row, columns] = torch.tensor(ids)
            labels_BS[row, columns] = torch.tensor(labels)
            attention_mask_BS[row, columns] = True
            if not for_generation:  # rows begin in column 0
                kind_spans += find_kind_spans(row, samples[row].messages, labels, IGNORE_LABEL)
        return Batch(
            input_ids_BS=input_ids_BS,
            labels_BS=labels_BS,
            attention_mask_BS=attention_mask_BS,
            pixel_values_ICHW=normalise_tiles(tiles, self.shape.vision.image_size_px),
            tiles_per_sample=tuple(tiles_per_sample),
            sample_ids=tuple(sample.sample_id for sample in samples),
            tokens_per_tile=self.shape.num_visual_tokens_per_tile,
            kind_spans=tuple(kind_spans),
        )

    def _encode(self, sample: Sample, tiles_per_image: list[int], for_generation: bool) -> tuple[list[int], list[int]]:
        """Return the ids and labels of one sample, of which there are at most `max_seq_len`."""
        tokens_per_image = [tiles * self.shape.num_visual_tokens_per_tile for tiles in tiles_per_image]
        try:
            if for_generation:
                ids = self.tokenizer.encode_prompt(sample.messages, tokens_per_image)
                labels = [IGNORE_LABEL] * len(ids)
            else:
                ids, labels = self.tokenizer.encode_conversation(sample.messages, tokens_per_image)
        except ValueError as error:
            raise ValueError(f"Sample {sample.sample_id!r}: {error}") from error
        if len(ids) > self.max_seq_len:
            raise ValueError(
                f"Sample {sample.sample_id!r} has {len(ids)} tokens ({sum(tokens_per_image)} of them image tokens in "
                f"{sum(tiles_per_image)} tiles), more than the {self.max_seq_len} of data.max_seq_len: raise it, lower "
                "data.max_tiles_per_image, or shorten or drop the sample"
            )
        return ids, labels
