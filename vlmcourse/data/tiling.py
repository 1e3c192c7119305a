"""Pictures of any size to the square tiles that the vision tower takes, as InternVL does it.

Enters: a PIL picture. Leaves: one or more RGB tiles, or their normalised pixels. A large picture is stretched to the
grid of tiles whose shape is nearest to its own, cut, and followed by a thumbnail of the whole (Chen et al. 2024, arXiv
2404.16821, section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of red, green and blue from 0 to 1 over ImageNet, which InternViT was trained with."""
IMAGENET_STD = (0.229, 0.224, 0.225)


def choose_grid(width_px: int, height_px: int, tile_size_px: int, max_tiles: int) -> tuple[int, int]:
    """Return the grid of tiles whose aspect ratio is nearest to the picture's.

    Among grids of the same ratio (1 x 1 and 2 x 2) the larger is taken while the picture covers more than half of it,
    so that a small picture is not blown up.

    Args:
        width_px: width of the picture.
        height_px: height of the picture.
        tile_size_px: height and width of a tile.
        max_tiles: largest number of tiles in the grid.

    Returns:
        Columns and rows.

    Raises:
        ValueError: if `max_tiles` is below 1.
    """
    if max_tiles < 1:
        raise ValueError(f"max_tiles = {max_tiles}: must be 1 or greater; set data.max_tiles_per_image")
    grids = [(n, m) for n in range(1, max_tiles + 1) for m in range(1, max_tiles + 1) if n * m <= max_tiles]
    best, best_gap = (1, 1), float("inf")
    for columns, rows in sorted(grids, key=lambda grid: (grid[0] * grid[1], grid[0])):
        gap = abs(width_px / height_px - columns / rows)
        covered = width_px * height_px > 0.5 * tile_size_px**2 * columns * rows
        if gap < best_gap or (gap == best_gap and covered):
            best, best_gap = (columns, rows), gap
    return best


def count_tiles(width_px: int, height_px: int, tile_size_px: int, max_tiles: int) -> int:
    """Return how many tiles `tile_image` makes of a picture of this size, the thumbnail included."""
    columns, rows = choose_grid(width_px, height_px, tile_size_px, max_tiles)
    return columns * rows + (columns * rows > 1)


def tile_image(image: Image.Image, tile_size_px: int, max_tiles: int = 1) -> list[Image.Image]:
    """Cut a picture into square RGB tiles.

    Args:
        image: a picture of any size and mode.
        tile_size_px: height and width of a tile.
        max_tiles: largest number of tiles in the grid; 1 resizes the whole picture to one tile. A grid of more than one
            is followed by a thumbnail, which comes on top of `max_tiles`, as in InternVL.

    Returns:
        The tiles, row by row, and the thumbnail last.
    """
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    columns, rows = choose_grid(rgb.width, rgb.height, tile_size_px, max_tiles)
    whole = _resize(rgb, tile_size_px, tile_size_px)
    if columns * rows == 1:
        return [whole]
    canvas = _resize(rgb, tile_size_px * columns, tile_size_px * rows)
    corners = [(tile_size_px * column, tile_size_px * row) for row in range(rows) for column in range(columns)]
    tiles = [canvas.crop((x_px, y_px, x_px + tile_size_px, y_px + tile_size_px)) for x_px, y_px in corners]
    return [*tiles, whole]


def _resize(image: Image.Image, width_px: int, height_px: int) -> Image.Image:
    if image.size == (width_px, height_px):
        return image
    return image.resize((width_px, height_px), Image.Resampling.BICUBIC)


def normalise_tiles(tiles: Sequence[Image.Image], tile_size_px: int) -> Tensor:
    """Return the pixels of RGB tiles, normalised with ImageNet's mean and standard deviation.

    Args:
        tiles: RGB pictures of `tile_size_px` x `tile_size_px`; may be empty.
        tile_size_px: height and width of each.

    Returns:
        float32 [tiles, 3, height, width] on the CPU.
    """
    if not tiles:
        return torch.zeros(0, 3, tile_size_px, tile_size_px)
    pixels_IHWC = torch.from_numpy(np.stack([np.asarray(tile) for tile in tiles]))
    pixels_ICHW = pixels_IHWC.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return pixels_ICHW.div_(255.0).sub_(mean).div_(std)
