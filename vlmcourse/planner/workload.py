"""What one sample looks like to the model: how many tokens and tiles.

Enters: two numbers. Leaves: a `Workload`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one sample looks like to the model."""

    seq_len: int = 2048
    """Tokens of one sample in the language tower, image tokens included."""
    tiles_per_sample: int = 1
    """Tiles of one sample in the vision tower."""

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.tiles_per_sample < 0:
            raise ValueError(
                f"seq_len = {self.seq_len}, tiles_per_sample = {self.tiles_per_sample}: "
                "a sample needs 1 token or more and no negative number of tiles"
            )
