"""Samples that take long to get: an expensive decoder, or a storage that is slow.

Enters: a dataset. Leaves: one with the same samples. The decoder keeps this process's CPU busy; the storage lets it
wait, for every sample or only now and then, as a prefetch queue does that runs empty. Chapter 6.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

from vlmcourse.data.samples import Sample

DECODED_SIDE_PX = 256
"""Of the picture that an expensive decoder decodes again and again."""


class SlowSamples(Sequence[Sample]):
    """A dataset in front of which something slow happens."""

    def __init__(self, samples: Sequence[Sample], before_each: Callable[[], None]) -> None:
        """Take the dataset.

        Args:
            samples: the dataset.
            before_each: called before each sample is handed out.
        """
        self._samples, self._before_each = samples, before_each

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample, late."""
        self._before_each()
        return self._samples[index]


def decode_for(cpu_s: float) -> Callable[[], None]:
    """Return a function that decodes a PNG of 256 x 256 px over and over until `cpu_s` of this process's CPU is spent.

    CPU seconds and not those of a clock: on a busy machine a decoder takes longer, as all other work does.
    """
    file = io.BytesIO()
    Image.effect_noise((DECODED_SIDE_PX, DECODED_SIDE_PX), 64).save(file, format="PNG")
    png = file.getvalue()

    def decode() -> None:
        end_s = time.process_time() + cpu_s
        while time.process_time() < end_s:
            Image.open(io.BytesIO(png)).convert("RGB")

    return decode


def wait_for_storage(seconds: float, every: int = 1) -> Callable[[], None]:
    """Return a function that waits, without using the CPU, at every `every`-th call.

    Args:
        seconds: of one wait.
        every: 1 for a storage that is always slow; the samples of several steps for a queue that runs empty.
    """
    calls = 0

    def wait() -> None:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            time.sleep(seconds)

    return wait
