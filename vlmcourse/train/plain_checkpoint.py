"""Checkpoints of the plain model's tensors, whatever zeros a plan has added to them.

Enters: weights and moments of which some are longer than in the plain model (see `parallel/padding.py`). Leaves: a
checkpoint without those zeros, which every other plan can load; loading one leaves the zeros of the loading model as
they are. Chapter 1.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem

Sizes = Mapping[str, torch.Size]
"""Of the plain model's parameters, by name."""


class PlainSavePlanner(DefaultSavePlanner):
    """Writes of each tensor what the plain model has of it."""

    def __init__(self, sizes: Sizes) -> None:
        """Set what to cut to; a tensor that is not named is written as it is."""
        super().__init__()
        self._sizes = sizes

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes; a shard that is nothing but padding is left out."""
        plan = super().create_local_plan()
        items = [cut for cut in map(self._cut, plan.items) if cut is not None]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return the part of a shard that is written."""
        written = super().transform_object(write_item, object)
        if write_item.tensor_data is not None:
            for dim, length in enumerate(write_item.tensor_data.chunk.sizes):
                written = written.narrow(dim, 0, length)
        return written

    def _cut(self, item: WriteItem) -> WriteItem | None:
        data = item.tensor_data
        plain = _plain_size(item.index.fqn, self.mappings, self._sizes)
        if data is None or plain is None or len(plain) != len(data.size) or plain == data.size:
            return item
        chunk = data.chunk
        ends = zip(chunk.offsets, chunk.sizes, plain, strict=True)
        sizes = torch.Size([min(size, length - offset) for offset, size, length in ends])
        if min(sizes) <= 0:
            return None
        cut = dataclasses.replace(data, size=plain, chunk=dataclasses.replace(chunk, sizes=sizes))
        return dataclasses.replace(item, tensor_data=cut)


class PlainLoadPlanner(DefaultLoadPlanner):
    """Reads the plain model's tensors into the beginning of tensors that may be longer."""

    def __init__(self, sizes: Sizes) -> None:
        """Set which sizes a checkpoint must have; those of a tensor that is not named must be the tensor's own."""
        super().__init__()
        self._sizes = sizes

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads.

        Raises:
            ValueError: naming the first tensor that the checkpoint lacks or has in another size.
        """
        assert self.metadata is not None
        saved = dict(self.metadata.state_dict_metadata)
        problems = []
        for fqn, tensor in self.state_dict.items():
            found = saved.get(fqn)
            if not isinstance(found, TensorStorageMetadata) or not isinstance(tensor, Tensor):
                problems += [f"{fqn} is missing in it"] if found is None else []
                continue
            plain = _plain_size(fqn, self.mappings, self._sizes)
            expected = plain if plain is not None and len(plain) == tensor.ndim else tensor.size()
            if found.size != expected:
                problems.append(f"{fqn} is {list(found.size)} in it and {list(expected)} in this model")
            # The planner of torch wants equal sizes, and then reads what the saved and the present shards share.
            saved[fqn] = dataclasses.replace(found, size=tensor.size())
        if problems:
            raise ValueError(
                f"{len(problems)} of {len(self.state_dict)} tensors do not match, the first: {problems[0]}"
            )
        self.metadata = dataclasses.replace(self.metadata, state_dict_metadata=saved)
        return super().create_local_plan()


@contextmanager
def readable_errors(what: str, remedy: str) -> Iterator[None]:
    """Turn what torch raises, a BaseException with one traceback a rank, into an ordinary error of a few lines.

    Args:
        what: was tried, such as "the checkpoint 'x' cannot be loaded".
        remedy: what to do where tensors do not match.

    Raises:
        ValueError: if some rank's tensors do not match.
        RuntimeError: if something else went wrong, such as a file that cannot be read.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, ValueError):
            raise ValueError(f"{what}: rank {rank}: {cause}; {remedy}") from None
        raise RuntimeError(f"{what}: rank {rank}: {type(cause).__name__}: {cause}") from error


@contextmanager
def quiet_alone(alone: bool = True) -> Iterator[None]:
    """Hide PyTorch's remark that one process saves or loads alone: it is meant so."""
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", message=".*assum.*single process.*")
        yield


def _plain_size(fqn: str, mappings: Mapping[str, tuple[Any, ...]], sizes: Sizes) -> torch.Size | None:
    """Return the plain size of the parameter that an entry of a flattened state (`named_state`) belongs to."""
    return sizes.get(str(mappings[fqn][1])) if len(mappings[fqn]) > 1 else None
