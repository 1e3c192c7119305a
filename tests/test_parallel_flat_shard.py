"""A stretch of a flattened tensor is a few boxes of the tensor, which a checkpoint writes and reads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from vlmcourse.parallel.flat_shard import FlatShard, cut_into_boxes
from vlmcourse.train.plain_checkpoint import quiet_alone

SIZES = [(), (1,), (7,), (3, 5), (1, 6), (4, 1), (2, 3, 4), (3, 1, 2, 2), (2, 0, 3)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_boxes_of_every_stretch_hold_its_elements_in_order(size: tuple[int, ...]) -> None:
    num_elements = math.prod(size)
    whole = torch.arange(num_elements).reshape(size)
    for start in range(num_elements + 1):
        for stop in range(start, num_elements + 1):
            boxes = cut_into_boxes(start, stop, size)
            assert len(boxes) <= max(1, 2 * len(size) - 1)
            found = []
            for box in boxes:
                assert box.num_elements > 0
                part = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
                assert part.shape == box.sizes
                found += part.flatten().tolist()
            assert found == list(range(start, stop))


def test_a_stretch_of_a_matrix_is_at_most_three_boxes() -> None:
    boxes = cut_into_boxes(3, 23, (6, 5))
    assert [(box.offsets, box.sizes) for box in boxes] == [((0, 3), (1, 2)), ((1, 0), (3, 5)), ((4, 0), (1, 3))]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_stretch_outside_its_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"elements {start} to {stop} of a tensor of .*within its 6 elements"):
        cut_into_boxes(start, stop, (2, 3))


def test_a_whole_tensor_is_read_into_stretches_in_place_and_nothing_else_changes(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 2, 3)
    with quiet_alone():
        dcp.save({"a": whole}, checkpoint_id=tmp_path, no_dist=True)
        for start, stop in ((0, 24), (5, 17), (7, 8), (9, 9)):
            line = torch.full((30,), -1.0)
            dcp.load(
                {"a": FlatShard(line[2 : 2 + stop - start], start, whole.shape)}, checkpoint_id=tmp_path, no_dist=True
            )
            assert line.tolist() == [-1.0, -1.0, *range(start, stop), *[-1.0] * (28 - stop + start)]


def test_a_whole_tensor_is_read_from_a_stretch_that_is_all_of_it(tmp_path: Path) -> None:
    whole, found = torch.arange(15.0), torch.zeros(3, 5)
    with quiet_alone():
        dcp.save({"a": FlatShard(whole, 0, (3, 5))}, checkpoint_id=tmp_path, no_dist=True)
        dcp.load({"a": found}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found.flatten(), whole)


def test_arithmetic_with_a_stretch_is_refused() -> None:
    shard = FlatShard(torch.zeros(4), 1, (2, 3))
    assert shard.shape == (2, 3) and "4 elements of [2, 3] in 2 boxes" in repr(shard)
    with pytest.raises(TypeError, match=r"FlatShard is for checkpoints; compute with its \.flat"):
        shard.sum()
