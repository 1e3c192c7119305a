"""The types that data is passed around in: one question-and-answer sample, and one batch of tensors.

A dataset gives `Sample` (pictures and text, no tensors); `collate.Collator` turns a list of them into a `Batch`.
Labels are already shifted: `labels_BS[b, s]` is the token to predict after position `s`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from vlmcourse.data.kinds import KindSpan, find_kind_problem

IGNORE_LABEL = -100
"""The label of a position where nothing is learned: prompt, image tokens, padding."""
IMAGE_MARKER = "<image>"
"""What stands in a user's text where a picture goes (LLaVA's convention)."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; `<image>` in a user's text marks where a picture goes."""

    role: Literal["user", "assistant"]
    text: str
    kind: str = ""
    """Of an answer, what kind it is: `loss/<kind>` of a run's rows is the mean loss of its tokens. Empty: of none."""

    def __post_init__(self) -> None:
        if self.kind and self.role != "assistant":
            raise ValueError(
                f"kind = {self.kind!r} on a message of the {self.role}: give it to the answer, which is learned"
            )
        if problem := find_kind_problem(self.kind):
            raise ValueError(f"kind = {self.kind!r}: {problem}")


@dataclass(frozen=True)
class Sample:
    """Pictures and a conversation about them."""

    sample_id: str
    """What error messages and logs call this sample."""
    images: tuple[Image.Image, ...]
    """RGB pictures of any size, in the order of their `<image>` markers; empty for text only."""
    messages: tuple[Message, ...]
    """Turns, oldest first."""


@dataclass
class Batch:
    """What one forward pass of one rank takes; every tensor is on one device."""

    input_ids_BS: Tensor
    """int64 [B, S]."""
    labels_BS: Tensor
    """int64 [B, S], shifted; `IGNORE_LABEL` where nothing is learned."""
    attention_mask_BS: Tensor
    """bool [B, S], True at real tokens, False at padding."""
    pixel_values_ICHW: Tensor
    """float32 [tiles, 3, height, width], normalised; [0, 3, height, width] where no sample has a picture."""
    tiles_per_sample: tuple[int, ...]
    """Tiles of each sample; they sum to the first dimension of `pixel_values_ICHW`."""
    sample_ids: tuple[str, ...]
    tokens_per_tile: int = 0
    """Positions of the sequence that one tile takes."""
    kind_spans: tuple[KindSpan, ...] = ()
    """Which labels belong to answers of which kind, on the host; none where no answer has a kind."""
    is_mute: bool = False
    """Whether it only fills a place in a short step and its sample is another rank's (`train/batches.py`)."""

    @property
    def num_supervised_tokens(self) -> int:
        """Labels that the loss counts (waits for the device; ask before `to` where that matters)."""
        return int((self.labels_BS != IGNORE_LABEL).sum())

    @property
    def num_tokens(self) -> int:
        """Real tokens, image tokens included, padding excluded (waits for the device)."""
        return int(self.attention_mask_BS.sum())

    @property
    def num_visual_tokens(self) -> int:
        """Positions that image features fill."""
        return sum(self.tiles_per_sample) * self.tokens_per_tile

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return this batch with its tensors on `device`.

        Args:
            device: where the tensors go.
            non_blocking: do not wait for the copy (of use only from pinned memory).
        """
        moved = {
            name: value.to(device, non_blocking=non_blocking)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **moved)
