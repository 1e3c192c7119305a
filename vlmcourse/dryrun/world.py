"""A world for one process: a process group in which nobody else is, and tensors that have no memory.

Enters: a rank and a number of ranks. Leaves: a `Ranks` whose collectives return at once with made-up values, and a mode
in which every tensor is fake. Both are undone at the end of their `with` block.

Source: torch.testing._internal.distributed.fake_pg and torch._subclasses.fake_tensor of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from vlmcourse.parallel.ranks import FAKE, Ranks, shutdown_ranks

_PROPAGATE = "_propagate_tensor_meta_non_cached"


@contextmanager
def played_rank(rank: int, world_size: int) -> Iterator[Ranks]:
    """Be one rank of `world_size` for a while, with nobody else there.

    Args:
        rank: 0 .. world_size - 1.
        world_size: ranks of the imagined run.

    Raises:
        ValueError: if there is no such rank.
        RuntimeError: if this process belongs to a real group.
    Communicates: nothing.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank = {rank} with world_size = {world_size}: must be from 0 to {world_size - 1}")
    if dist.is_initialized():
        raise RuntimeError(
            f"a dry run plays rank {rank} of {world_size}, but this process is a rank of a group of "
            f"{dist.get_world_size()} ({dist.get_backend()}) already: run it in a process of its own, such as "
            "`vlmcourse dry-run`, or call shutdown_ranks first"
        )
    # Here, and not above: the import registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    new_group: Callable[..., Any] = device_mesh.new_group

    def new_own_group(ranks: list[int] | None = None, **options: Any) -> Any:
        # A mesh makes the groups of all ranks: of 1,024 some 5,000, and this process is in five.
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks=ranks, **options)

    dist.init_process_group(FAKE, rank=rank, world_size=world_size, store=FakeStore())
    try:
        with mock.patch.object(device_mesh, "new_group", new_own_group):
            yield Ranks(rank, rank, world_size, torch.device("cpu"), FAKE)
    finally:
        shutdown_ranks()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make every tensor of this block fake: it has a shape and a type, and its storage a size, but no memory."""
    original: Callable[..., Any] = getattr(ShardingPropagator, _PROPAGATE)

    def propagate(*args: Any, **kwargs: Any) -> Any:
        # DTensor asks what an operation would return by running it on fake tensors of the whole, unsharded size. Left
        # in our modes, these would count as this rank's memory.
        with _disable_current_modes():
            return original(*args, **kwargs)

    with (
        mock.patch.object(ShardingPropagator, _PROPAGATE, propagate),
        mock.patch.object(_fsdp_param, "_chunk_with_empty", _Chunks),
        FakeTensorMode(),
    ):
        yield


class _Chunks(Sequence[Tensor]):
    """The shards of a tensor, made when they are asked for.

    FSDP2 cuts each parameter into a tensor a rank and uses two of them: of 1,024 ranks that would be most of the time.
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._num_chunks, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._num_chunks

    def __getitem__(self, index: Any) -> Any:
        num_rows = self._tensor.shape[self._dim]
        length = -(-num_rows // self._num_chunks)
        start = index * length
        if start >= num_rows:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(length, num_rows - start))


def imagine_weights(model: nn.Module) -> None:
    """Replace the parameters of a model on the meta device by fake ones on the CPU, in place; tied ones stay tied.

    Call it inside `fake_tensors`. `Module.to` cannot do it: it exchanges fake tensors in a way that they refuse.

    Raises:
        RuntimeError: if the model has buffers, which this does not know how to make.
    """
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        if any(True for _ in module.buffers(recurse=False)):
            raise RuntimeError(f"{name or type(model).__name__} has buffers: a dry run makes parameters only")
        for own, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) not in made:
                new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
            setattr(module, own, made[id(old)])
