import random

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)

from vlmcourse.data.tiling import choose_grid, count_tiles, normalise_tiles, tile_image


def noise(width_px: int, height_px: int, mode: str = "RGB") -> Image.Image:
    """Return a picture in which every pixel differs."""
    pixels = np.random.default_rng(width_px * height_px).integers(0, 256, (height_px, width_px, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def test_grids_are_those_that_transformers_chooses_for_internvl():
    draw = random.Random(0)
    for _ in range(500):
        width_px, height_px = draw.randint(1, 3000), draw.randint(1, 3000)
        max_tiles, size_px = draw.randint(1, 12), draw.choice((32, 448))
        expected = get_optimal_tiled_canvas((height_px, width_px), (size_px, size_px), 1, max_tiles)
        assert choose_grid(width_px, height_px, size_px, max_tiles) == tuple(expected), (width_px, height_px, max_tiles)


@pytest.mark.parametrize(
    ("width_px", "height_px", "max_tiles", "grid"),
    [
        (448, 448, 1, (1, 1)),
        (1344, 448, 6, (3, 1)),
        (448, 1344, 6, (1, 3)),
        (1344, 896, 6, (3, 2)),
        (600, 600, 6, (1, 1)),  # 600^2 is less than half of 896^2: not blown up
        (700, 700, 6, (2, 2)),
        (10000, 100, 6, (6, 1)),
    ],
)
def test_grids_worked_by_hand(width_px, height_px, max_tiles, grid):
    assert choose_grid(width_px, height_px, 448, max_tiles) == grid


@pytest.mark.parametrize(("width_px", "height_px"), [(100, 100), (200, 64), (64, 200), (90, 33), (32, 32), (130, 61)])
def test_tile_pixels_are_those_of_transformers(width_px, height_px):
    image = noise(width_px, height_px)
    processor = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=6, do_convert_rgb=True,
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip
    expected = torch.from_numpy(np.stack(processor(images=[image])["pixel_values"]))
    ours = normalise_tiles(tile_image(image, 32, 6), 32)
    assert ours.shape == expected.shape
    torch.testing.assert_close(ours, expected.float(), atol=1e-5, rtol=0)


def test_a_grid_is_cut_row_by_row_and_followed_by_a_thumbnail():
    image = Image.new("RGB", (64, 32))
    image.paste((255, 0, 0), (0, 0, 32, 32))
    image.paste((0, 255, 0), (32, 0, 64, 32))
    left, right, whole = tile_image(image, 32, max_tiles=2)
    assert np.asarray(left)[16, 16].tolist() == [255, 0, 0]
    assert np.asarray(right)[16, 16].tolist() == [0, 255, 0]
    assert np.asarray(whole)[16, 2].tolist() == [255, 0, 0] and np.asarray(whole)[16, 29].tolist() == [0, 255, 0]


def test_the_count_is_the_number_of_tiles():
    draw = random.Random(1)
    for _ in range(60):
        width_px, height_px, max_tiles = draw.randint(1, 200), draw.randint(1, 200), draw.randint(1, 9)
        tiles = tile_image(noise(width_px, height_px), 16, max_tiles)
        assert len(tiles) == count_tiles(width_px, height_px, 16, max_tiles) <= max_tiles + 1
        assert all(tile.size == (16, 16) and tile.mode == "RGB" for tile in tiles)


def test_one_tile_is_the_resized_picture_and_a_fitting_one_is_untouched():
    image = noise(32, 32)
    assert tile_image(image, 32)[0].tobytes() == image.tobytes()
    (tile,) = tile_image(noise(300, 20), 32)
    assert tile.tobytes() == noise(300, 20).resize((32, 32), Image.Resampling.BICUBIC).tobytes()


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_every_mode_becomes_rgb(mode):
    assert all(tile.mode == "RGB" for tile in tile_image(noise(40, 40, mode), 32, 4))


def test_pixels_are_normalised_with_the_statistics_of_imagenet():
    grey = Image.new("RGB", (8, 8), (255, 0, 51))
    pixels = normalise_tiles([grey], 8)
    assert pixels.shape == (1, 3, 8, 8) and pixels.dtype == torch.float32 and pixels.is_contiguous()
    expected = [(1 - 0.485) / 0.229, (0 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]
    torch.testing.assert_close(pixels[0, :, 3, 4], torch.tensor(expected), atol=1e-6, rtol=0)


def test_no_tiles_give_an_empty_tensor_of_the_right_shape():
    assert normalise_tiles([], 32).shape == (0, 3, 32, 32)


def test_fewer_than_one_tile_is_refused():
    with pytest.raises(ValueError, match=r"max_tiles = 0.*data\.max_tiles_per_image"):
        choose_grid(10, 10, 32, 0)
