"""A training configuration to its training or held-out samples."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

from vlmcourse.config import TrainConfig
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.llava import BadRowPolicy, LlavaDataset
from vlmcourse.data.samples import Sample

log = logging.getLogger(__name__)
HELDOUT_SEED = 0
"""Held-out questions do not follow the run's seed: every run is measured on the same ones."""


class Subset(Sequence[Sample]):
    """Some samples of a dataset, in a given order."""

    def __init__(self, samples: Sequence[Sample], indices: Sequence[int]) -> None:
        self.samples, self.indices = samples, tuple(indices)

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self.samples[i] for i in self.indices[index]]
        return self.samples[self.indices[index]]


def build_dataset(config: TrainConfig, split: Literal["train", "heldout"]) -> Sequence[Sample]:
    """Return the samples that a configuration asks for.

    Digits give exactly `num_train_samples` and `num_eval_samples`. A LLaVA file is split by image
    (`split_by_image`) and gives at most these numbers.

    Raises:
        ValueError: if `split` is neither of the two, or a LLaVA file is broken or too small to be split.
        FileNotFoundError: if a LLaVA file or its image folder is missing.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split = {split!r}: must be 'train' or 'heldout'")
    data, is_train = config.data, split == "train"
    if data.dataset == "digits":
        size = data.num_train_samples if is_train else data.num_eval_samples
        return DigitsDataset(size, config.run.seed if is_train else HELDOUT_SEED, split)
    policy: BadRowPolicy = "skip" if data.on_bad_row == "skip" else "refuse"
    image_dir = data.image_dir or str(Path(data.path).parent)
    samples = _load_llava(data.path, image_dir, policy, (_changed_at(data.path), _changed_at(image_dir)))
    train, heldout = split_by_image([samples.image_names(i) for i in range(len(samples))], data.num_eval_samples)
    if not train:
        raise ValueError(
            f"{data.path} has {len(samples)} usable rows, and none is left to train on after {len(heldout)} are held "
            "out with every row that shares an image with them: use a file with more rows and more images"
        )
    return Subset(samples, train[: data.num_train_samples] if is_train else heldout)


@functools.lru_cache(maxsize=2)
def _load_llava(path: str, image_dir: str, policy: BadRowPolicy, changed_at: tuple[int, int]) -> LlavaDataset:
    """Read a file once for both splits, since checking its images takes time, and again once something has changed."""
    return LlavaDataset(path, image_dir, policy)


def _changed_at(path: str) -> int:
    """Return when a file or folder last changed, in ns; 0 where there is none, which `LlavaDataset` reports."""
    return Path(path).stat().st_mtime_ns if Path(path).exists() else 0


def split_by_image(images_of_rows: Sequence[Sequence[str]], num_heldout: int) -> tuple[list[int], list[int]]:
    """Split rows so that no image of a held-out row is trained on.

    Args:
        images_of_rows: the image names of each row.
        num_heldout: most rows to hold out; never more than a tenth of all, but at least one.

    Returns:
        Training rows and held-out rows, the same on every call. Rows that share an image with a held-out row are in
        neither.
    """
    order = sorted(range(len(images_of_rows)), key=lambda i: random.Random(f"heldout {i}").random())
    heldout = sorted(order[: min(num_heldout, max(1, len(order) // 10))])
    seen = {name for i in heldout for name in images_of_rows[i]}
    rest = sorted(set(order) - set(heldout))
    train = [i for i in rest if seen.isdisjoint(images_of_rows[i])]
    if len(train) < len(rest):
        log.warning("%d rows share an image with a held-out row and are not trained on", len(rest) - len(train))
    return train, heldout
