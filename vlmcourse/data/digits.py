"""Visual questions over real scanned digits, made on the fly: the task that the tiny model learns in two minutes.

Enters: a split, a seed and an index. Leaves: a `Sample` with a 32 x 32 px picture of one to four scans and a
conversation about it. The scans are the 1,797 handwritten digits of 8 x 8 px that ship with scikit-learn (Alpaydin and
Kaynak, UCI Optical Recognition of Handwritten Digits, 1998). A scan belongs either to training or to the held-out
questions, never to both.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vlmcourse.data.questions import KINDS, Draws, Scene
from vlmcourse.data.samples import IMAGE_MARKER, Message, Sample

Split = Literal["train", "heldout"]
SIDE_PX = 32
"""Height and width of a picture."""
HALF_PX = SIDE_PX // 2
HELDOUT_EVERY = 7
"""Every seventh scan is held out: 257 of 1,797, about 26 of each digit."""
SIZES_PX = (14, 15, 16)
"""Heights and widths that a scan is enlarged to."""
TRAIN_COUNTS = (1, 2, 2, 3, 4)
"""Digits in a training picture, drawn evenly from this list."""
NUM_TURNS = 4
CORNERS = ("top left", "top right", "bottom left", "bottom right")


@functools.cache
def load_scans() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the scans and their digits.

    Returns:
        Ink from 0 to 16, uint8 [1797, 8, 8], and the digit that each shows, int64 [1797].
    """
    spec = importlib.util.find_spec("sklearn")
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    path = folder / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():  # importing scikit-learn takes seconds, reading the file that it reads does not
        with gzip.open(path, "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.int64)
        return table[:, :64].astype(np.uint8).reshape(-1, 8, 8), table[:, 64]
    from sklearn.datasets import load_digits

    pixels, labels = (np.asarray(part) for part in load_digits(return_X_y=True))
    return pixels.astype(np.uint8).reshape(-1, 8, 8), labels.astype(np.int64)


def scan_indices(split: Split) -> NDArray[np.int64]:
    """Return the scans of one split, as positions in `load_scans()`."""
    all_scans = np.arange(len(load_scans()[1]))
    is_heldout = all_scans % HELDOUT_EVERY == 0
    return all_scans[is_heldout if split == "heldout" else ~is_heldout]


@functools.cache
def _scans_by_digit(split: Split) -> tuple[tuple[int, ...], ...]:
    labels = load_scans()[1]
    return tuple(tuple(i for i in scan_indices(split).tolist() if labels[i] == digit) for digit in range(10))


@functools.cache
def _enlarged(size_px: int) -> NDArray[np.uint8]:
    """Every scan at `size_px`, ink from 0 to 255, uint8 [1797, size_px, size_px]."""
    bright = (load_scans()[0].astype(np.uint16) * 255 // 16).astype(np.uint8)
    large = [Image.fromarray(scan).resize((size_px, size_px), Image.Resampling.BILINEAR) for scan in bright]
    return np.stack([np.asarray(scan) for scan in large])


@dataclass(frozen=True)
class Placed:
    """One scan in a picture."""

    scan: int
    """Position in `load_scans()`."""
    x_px: int
    y_px: int
    size_px: int


def draw_picture(placed: Sequence[Placed]) -> Image.Image:
    """Return an RGB picture of `SIDE_PX` x `SIDE_PX` with the scans in white in their places on black."""
    canvas = np.zeros((SIDE_PX, SIDE_PX), np.uint8)
    for item in placed:
        rows, columns = slice(item.y_px, item.y_px + item.size_px), slice(item.x_px, item.x_px + item.size_px)
        canvas[rows, columns] = _enlarged(item.size_px)[item.scan]
    return Image.fromarray(canvas).convert("RGB")


def _compose(split: Split, num_digits: int, draws: Draws) -> tuple[Scene, list[Placed]]:
    """Draw what a picture shows and where: each digit in a quarter of its own, not always in the middle of it."""
    digits = [draws.below(10) for _ in range(num_digits)]
    if num_digits > 1 and draws.chance(0.3):  # repeats make "how many sevens?" worth asking
        digits[-1] = digits[0]
        digits = draws.shuffled(digits)
    if num_digits == 1:
        places, quarters = ("",), [draws.below(4)]
    elif num_digits == 2:
        upper = 2 * draws.below(2)
        places, quarters = ("left", "right"), [upper, upper + 1]
    else:
        quarters = sorted(draws.shuffled(range(4))[:num_digits])
        places = tuple(CORNERS[quarter] for quarter in quarters)
    placed = []
    for digit, quarter in zip(digits, quarters, strict=True):
        size_px = draws.pick(SIZES_PX)
        x_px = HALF_PX * (quarter % 2) + draws.below(HALF_PX - size_px + 1)
        y_px = HALF_PX * (quarter // 2) + draws.below(HALF_PX - size_px + 1)
        placed.append(Placed(draws.pick(_scans_by_digit(split)[digit]), x_px, y_px, size_px))
    return Scene(tuple(digits), places), placed


class DigitsDataset(Sequence[Sample]):
    """Pictures of digits with questions; sample `i` depends on the split, the seed and `i` alone.

    A training sample is a conversation of `num_turns` different questions about one picture, of each kind once before
    any comes twice. A held-out sample is a single question, whose kind is `KINDS[i % len(KINDS)]`. Each answer says of
    which kind its question is.
    """

    def __init__(self, num_samples: int, seed: int, split: Split, num_turns: int = NUM_TURNS) -> None:
        """Make nothing yet.

        Args:
            num_samples: length of the dataset.
            seed: another seed gives other pictures and questions of the same scans.
            split: which scans to use.
            num_turns: questions of a training conversation.

        Raises:
            ValueError: if a number is too small or there is no such split.
        """
        if split not in ("train", "heldout"):
            raise ValueError(f"split = {split!r}: must be 'train' or 'heldout'")
        if num_samples < 1 or num_turns < 1:
            raise ValueError(f"num_samples = {num_samples} and num_turns = {num_turns}: must be 1 or greater")
        self.num_samples, self.seed, self.num_turns = num_samples, seed, num_turns
        self.split: Split = split

    def __len__(self) -> int:
        return self.num_samples

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.num_samples))]
        messages, placed = self.plan(index)
        return Sample(f"digits-{self.split}-{index % self.num_samples}", (draw_picture(placed),), messages)

    def plan(self, index: int) -> tuple[tuple[Message, ...], list[Placed]]:
        """Return the conversation of a sample and the scans in its picture, without drawing it.

        Raises:
            IndexError: if there is no such sample.
        """
        if not -self.num_samples <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        index %= self.num_samples
        draws = Draws(f"{self.split} {self.seed} {index}")
        if self.split == "heldout":
            kinds = [KINDS[index % len(KINDS)]]
            num_digits, num_turns = draws.pick(kinds[0].counts), 1
        else:
            num_digits, num_turns = draws.pick(TRAIN_COUNTS), self.num_turns
            kinds = [kind for kind in draws.shuffled(KINDS) if num_digits in kind.counts]
        scene, placed = _compose(self.split, num_digits, draws)
        answers: dict[str, tuple[str, str]] = {}
        for turn in range(4 * num_turns):  # a kind asks the same again now and then, so a few tries are spare
            kind = kinds[turn % len(kinds)]
            question, answer = kind.ask(scene, draws)
            answers.setdefault(question, (answer, kind.name))
            if len(answers) == num_turns:
                break
        messages: list[Message] = []
        for question, (answer, kind_name) in answers.items():
            user_text = question if messages else f"{IMAGE_MARKER}\n{question}"
            messages += [Message("user", user_text), Message("assistant", answer, kind_name)]
        return tuple(messages), placed
