"""Images that are larger on some ranks than on others: the same number of samples, more tiles and tokens.

Enters: a dataset. Leaves: the same conversations about pictures so wide that each is cut into several tiles, as a shard
of a dataset has them that was sorted by size. Chapter 6.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vlmcourse.data.samples import Sample


class LargeImages(Sequence[Sample]):
    """A dataset whose pictures are enlarged to a row of tiles."""

    def __init__(self, samples: Sequence[Sample], num_tiles: int) -> None:
        """Take the dataset.

        Args:
            samples: the dataset.
            num_tiles: width of each picture in those of before; `data.max_tiles_per_image` must allow as many.
        """
        self._samples, self._num_tiles = samples, num_tiles

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample with wide pictures."""
        sample = self._samples[index]
        images = tuple(image.resize((image.width * self._num_tiles, image.height)) for image in sample.images)
        return dataclasses.replace(sample, images=images)
