"""A stretch of a flattened tensor, saved and loaded under the tensor's own name and size.

Enters: the elements `start .. start + n` of a tensor laid out row by row, which is how DeepSpeed deals weights and
moments out: it flattens tensors, joins them, and cuts the line into equal pieces wherever the cuts fall. Leaves: a
`FlatShard`, which PyTorch's distributed checkpoint writes and reads like any other shard. A checkpoint knows boxes only
(an offset and a size along each dim), and a stretch is none; but it is a few of them: the end of a row, whole rows, the
beginning of a row. Nothing is gathered and nothing copied. Chapter 5.

Source: torch.distributed.checkpoint, `_Checkpointable` (what a tensor subclass must answer) and DTensor, which does so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a tensor whose elements follow each other in memory."""

    offsets: tuple[int, ...]
    """First index along each dim."""
    sizes: tuple[int, ...]
    """Elements along each dim."""

    @property
    def num_elements(self) -> int:
        """Return how many elements the box holds."""
        return math.prod(self.sizes)


def cut_into_boxes(start: int, stop: int, size: Sequence[int]) -> list[Box]:
    """Cut a stretch of a flattened tensor into boxes of the tensor, in the order of their elements.

    Args:
        start: first element of the stretch.
        stop: one past its last; equal to `start` for nothing.
        size: of the whole tensor.

    Returns:
        At most 2 n - 1 boxes for n dims: of a matrix the end of a row, whole rows, and the beginning of a row.

    Raises:
        ValueError: if the stretch does not lie in the tensor.
    """
    if not 0 <= start <= stop <= math.prod(size):
        raise ValueError(
            f"elements {start} to {stop} of a tensor of {list(size)}: a stretch must lie within its "
            f"{math.prod(size)} elements"
        )
    if start == stop:
        return []
    if len(size) <= 1:
        return [Box(offsets=(start,) if size else (), sizes=(stop - start,) if size else ())]
    per_row = math.prod(size[1:])
    first_whole, end_whole = -(-start // per_row), stop // per_row
    if first_whole > end_whole:  # within one row
        return _in_row(end_whole, start % per_row, stop % per_row, size)
    boxes = _in_row(first_whole - 1, start % per_row, per_row, size) if start % per_row else []
    if first_whole < end_whole:
        offsets = (first_whole,) + (0,) * (len(size) - 1)
        boxes.append(Box(offsets=offsets, sizes=(end_whole - first_whole, *size[1:])))
    return boxes + _in_row(end_whole, 0, stop % per_row, size)


def _in_row(row: int, start: int, stop: int, size: Sequence[int]) -> list[Box]:
    """Return the boxes of a stretch that lies in one index of the first dim."""
    inner = cut_into_boxes(start, stop, size[1:])
    return [Box(offsets=(row, *box.offsets), sizes=(1, *box.sizes)) for box in inner]


class FlatShard(Tensor):
    """Stands for a whole tensor of which this rank has one stretch; only a checkpoint can do something with it."""

    flat: Tensor
    """This rank's elements, [n]: a view of what is in use, so that loading overwrites it."""
    boxes: list[Box]
    """What they are in the whole tensor."""

    @staticmethod
    def __new__(cls, flat: Tensor, start: int, size: Sequence[int]) -> FlatShard:
        """Make a shard.

        Args:
            cls: this class.
            flat: this rank's elements, [n]; any number of them, also none.
            start: the place of the first in the flattened whole.
            size: of the whole tensor.
        """
        boxes = cut_into_boxes(start, start + flat.numel(), size)
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        shard: FlatShard = make(cls, torch.Size(size), dtype=flat.dtype, device=flat.device)
        shard.flat, shard.boxes = flat, boxes
        return shard

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the sizes, without the elements."""
        return f"FlatShard({self.flat.numel()} elements of {list(self.shape)} in {len(self.boxes)} boxes)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse arithmetic: this rank does not have the whole tensor."""
        raise TypeError(f"{func} on a {args[0]!r}: a FlatShard is for checkpoints; compute with its .flat")

    # What torch.distributed.checkpoint asks for, under names that begin and end in underscores as Python's own do.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return one item to write for each box."""
        properties = TensorProperties.create_from_tensor(self.flat)
        chunks = self.__create_chunk_list__()
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return where the boxes lie."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the elements of the box that begins at `index.offset`, as a view."""
        position = 0
        for box in self.boxes:
            if index.offset is None or torch.Size(box.offsets) == index.offset:
                return self.flat[position : position + box.num_elements].view(box.sizes)
            position += box.num_elements
        raise ValueError(f"{index}: no box of {self!r} begins there")
