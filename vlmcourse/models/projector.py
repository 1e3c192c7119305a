"""From the vision tower's patches to the language tower's width.

Pixel shuffle first folds neighbouring patches into one longer vector (2 x 2 patches become one visual token at
fraction 0.5), then a LayerNorm and a two-layer MLP map it.
Source: Chen et al. 2024, "How Far Are We to GPT-4V?" (arXiv:2404.16821), section 3.1.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from vlmcourse.presets import VLMShape


def pixel_shuffle(patches_IPD: Tensor, rows: int, columns: int, block_side: int, version: str = "v2") -> Tensor:
    """Fold each square of neighbouring patches into one position with more channels.

    Args:
        patches_IPD: [tiles, rows * columns, width], patches row by row.
        rows: patches from top to bottom.
        columns: patches from left to right.
        block_side: patches along one side of a square; 2 turns 4 patches into 1 position.
        version: v2 orders positions row by row, v1 column by column.

    Returns:
        [tiles, rows * columns / block_side**2, width * block_side**2]. The channels are ordered by the row inside the
        square, then its column, then the channel, as in both of InternVL's `ps_version`s.
    """
    squares = patches_IPD.unflatten(1, (rows // block_side, block_side, columns // block_side, block_side))
    folded = squares.transpose(2, 3).flatten(3)
    return (folded.transpose(1, 2) if version == "v1" else folded).flatten(1, 2)


class Projector(nn.Module):
    """Pixel shuffle, LayerNorm and a two-layer MLP with GELU."""

    def __init__(self, shape: VLMShape) -> None:
        super().__init__()
        self.block_side = round(1 / shape.pixel_shuffle_fraction)
        self.version = shape.pixel_shuffle_version
        folded_width = shape.vision.hidden_size * self.block_side**2
        self.norm = nn.LayerNorm(folded_width)
        self.up_proj = nn.Linear(folded_width, shape.language.hidden_size)
        self.down_proj = nn.Linear(shape.language.hidden_size, shape.language.hidden_size)

    def tokens_per_tile(self, rows: int, columns: int) -> int:
        """Return how many visual tokens a tile of `rows` x `columns` patches becomes.

        Raises:
            ValueError: if the squares of pixel shuffle do not cover the patches exactly.
        """
        if rows % self.block_side or columns % self.block_side:
            raise ValueError(
                f"A tile of {rows} x {columns} patches cannot be folded into squares of {self.block_side} x "
                f"{self.block_side}: use tiles whose sides hold a multiple of {self.block_side} patches"
            )
        return rows * columns // self.block_side**2

    def forward(self, patches_IPD: Tensor, rows: int, columns: int) -> Tensor:
        """Map patches to visual tokens.

        Args:
            patches_IPD: the vision tower's output [tiles, rows * columns, vision width].
            rows: patches from top to bottom.
            columns: patches from left to right.

        Returns:
            Visual tokens [tiles, tokens a tile, language width].
        """
        folded = pixel_shuffle(patches_IPD, rows, columns, self.block_side, self.version)
        return self.down_proj(F.gelu(self.up_proj(self.norm(folded))))
