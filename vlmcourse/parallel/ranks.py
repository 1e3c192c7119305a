"""Who is this process among the ranks, which device is its own, and how do the ranks talk.

Enters: the environment that a launcher sets (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
Leaves: a `Ranks` value that everything else is handed, and an initialised process group where there is more than one
rank. PyTorch keeps the process groups until they are destroyed, and so the meshes on them are kept here as long.
"""

from __future__ import annotations

import atexit
import gc
import logging
import math
import os
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vlmcourse.machine import num_usable_cores

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
FAKE = "fake"
"""PyTorch's backend that sends nothing: one process plays a rank of any number of them."""
Grid = tuple[str, tuple[int, ...], tuple[str, ...]]
_meshes: dict[tuple[dist.ProcessGroup, Grid], DeviceMesh] = {}
"""By the group of all ranks and the kind of device, sizes and names of the axes; see `share_mesh`."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks."""

    rank: int
    """0 .. world_size - 1, unique in the whole run."""
    local_rank: int
    """0 .. ranks on this machine - 1; chooses the GPU."""
    world_size: int
    device: torch.device
    backend: str
    """nccl, gloo, or none (one process without a process group)."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes files and shows progress."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.device} ({self.backend})"


def init_ranks(timeout_s: float = 60) -> Ranks:
    """Join the process group that the environment describes, or stay alone where it describes none.

    With RANK unset this is one process without a group. Calling it again returns the same answer. The cores of the
    machine are shared between its ranks (OMP_NUM_THREADS wins where it is set). Ranks on 127.0.0.1 talk over the
    loopback interface only.

    Args:
        timeout_s: seconds that joining, and later every collective, may take before it raises instead of hanging.

    Returns:
        This process's `Ranks`: NCCL and one GPU a rank where this machine has a GPU for each of its ranks, else gloo
        and CPU.

    Raises:
        RuntimeError: if the environment is incomplete or inconsistent, or the other ranks do not appear in time.
    Communicates: a rendezvous at MASTER_ADDR:MASTER_PORT; a few hundred bytes a rank.
    """
    if "RANK" not in os.environ:
        _share_cores(1)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        return Ranks(rank=0, local_rank=0, world_size=1, device=device, backend="none")

    rank, world_size = _read_int("RANK"), _read_int("WORLD_SIZE")
    local_rank = _read_int("LOCAL_RANK", default=rank)
    num_local_ranks = _read_int("LOCAL_WORLD_SIZE", default=world_size)
    if not 0 <= rank < world_size or not 0 <= local_rank < num_local_ranks:
        raise RuntimeError(
            f"rank {rank}: RANK={rank} of WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} of "
            f"LOCAL_WORLD_SIZE={num_local_ranks}: a rank must be at least 0 and below its size; "
            "start the ranks with %%torchrun, vlmcourse train --nproc or torchrun"
        )
    device, backend = _choose_device(rank, local_rank, num_local_ranks)
    _share_cores(num_local_ranks)
    if not dist.is_initialized():
        _join_group(rank, world_size, backend, device, timeout_s)
    return Ranks(rank=rank, local_rank=local_rank, world_size=world_size, device=device, backend=backend)


def shutdown_ranks() -> None:
    """Leave the process group; does nothing where there is none.

    Wrapped models hold their groups, often in reference cycles. They are collected here: a group that lives until the
    interpreter is gone can abort the process in its last moment, although all its work is done.
    """
    _meshes.clear()
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
        gc.collect()


def group_timeout_s(group: dist.ProcessGroup | None = None) -> float:
    """Return the seconds that a collective of a group may take now.

    It is the group's own limit: that of `init_ranks` counts only for the call that has made the group, and a notebook's
    cell may have changed it since.

    Args:
        group: None is all ranks.

    Returns:
        The shortest of its backends; infinite where there is no group to wait for, or nobody answers (see `answers`).
    """
    live = group or (dist.group.WORLD if dist.is_initialized() else None)
    backends = [live._get_backend(device) for device in live._device_types] if live is not None else []
    options = [backend.options for backend in backends if backend.options is not None]  # PyTorch's fake one has none
    return min((option._timeout.total_seconds() for option in options), default=math.inf)


def share_mesh(ranks: Ranks, sizes: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of all ranks with these axes: one for all models of this process, which share its groups.

    PyTorch keeps a group until it is destroyed, and a group of gloo has threads that wake a hundred times a second:
    with groups of its own, each model of a notebook's session would leave some behind.

    Args:
        ranks: this process's place; all ranks call this alike.
        sizes: ranks on each axis.
        axes: their names.
    Communicates: the first time, what PyTorch's groups need to find each other.
    """
    grid, world = (ranks.device.type, sizes, axes), dist.group.WORLD
    if world is None:  # one process, or a group that `init_device_mesh` makes
        return init_device_mesh(ranks.device.type, sizes, mesh_dim_names=axes)
    for old in [key for key in _meshes if key[0] is not world]:
        del _meshes[old]  # the ranks have left that group without `shutdown_ranks`
    if not _meshes:
        atexit.register(_meshes.clear)  # before the interpreter is gone, see `shutdown_ranks`
    if (world, grid) not in _meshes:
        _meshes[world, grid] = init_device_mesh(ranks.device.type, sizes, mesh_dim_names=axes)
    return limit_mesh(_meshes[world, grid])


def limit_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Give the groups of a mesh the time limit of all ranks: PyTorch gives them 30 minutes; return the mesh."""
    if answers():
        limit_groups(mesh.get_all_groups(), group_timeout_s())
    return mesh


def answers() -> bool:
    """Whether other ranks really take part in collectives: on PyTorch's `fake` backend (a dry run) none is there.

    What a collective returns there is made up, so that nothing may be compared with it.
    """
    return not (dist.is_initialized() and dist.get_backend() == FAKE)


def limit_groups(groups: Iterable[dist.ProcessGroup], timeout_s: float) -> None:
    """Let every collective that begins from now on in these groups take at most so many seconds."""
    for group in groups:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def _join_group(rank: int, world_size: int, backend: str, device: torch.device, timeout_s: float) -> None:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise RuntimeError(
            f"rank {rank}: RANK={rank} is set but MASTER_ADDR={address!r}, MASTER_PORT={port!r}: both must say where "
            "rank 0 listens; start the ranks with %%torchrun, vlmcourse train --nproc or torchrun"
        )
    if address in (LOOPBACK, "localhost"):
        _prefer_loopback()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            # CPU tensors (such as the counts and names that a checkpoint exchanges) travel by gloo beside NCCL.
            "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
            store=_open_store(rank, world_size, address, int(port), timeout_s),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        # A rank that leaves before the others have connected would make them fail: nobody goes on until all are here.
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    except dist.DistError as error:
        raise RuntimeError(
            f"rank {rank}: {world_size} ranks did not meet at {address}:{port} within {timeout_s:g} s: all of them "
            f"must be started, with the same address and a free port (torch says: {error})"
        ) from error


def _open_store(rank: int, world_size: int, address: str, port: int, timeout_s: float) -> dist.Store | None:
    """Open the store in which ranks find each other; None for PyTorch's own, in rank 0."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    if agent == "True":
        return _connect_to_torchrun(address, port, world_size, timeout_s)
    return _open_private_store(rank, world_size, port, timeout_s) if address == LOOPBACK and agent is None else None


def _open_private_store(rank: int, world_size: int, port: int, timeout_s: float) -> dist.TCPStore:
    """Open the store in which ranks of one machine find each other, for this machine alone.

    PyTorch's own listens on every network interface, and whoever reaches it may write to it.

    Raises:
        RuntimeError: on rank 0, if the port is taken.
    """
    listener = None
    if rank == 0:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            listener.close()
            raise RuntimeError(
                f"rank 0: cannot listen on {LOOPBACK}:{port} ({error}): choose another MASTER_PORT"
            ) from error
        listener.listen(socket.SOMAXCONN)
    return dist.TCPStore(
        LOOPBACK,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_s),
        multi_tenant=True,  # a second group in the same process finds this store again, as with PyTorch's own
        master_listen_fd=listener.detach() if listener is not None else None,
    )


def _connect_to_torchrun(address: str, port: int, world_size: int, timeout_s: float) -> dist.Store:
    """Open a part of the store in `torchrun` that belongs to this start of its ranks.

    `torchrun` keeps one store for all its restarts. Without a prefix, ranks that are started again find in it the
    addresses of those before, and wait for processes that are gone.
    """
    attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-of-{world_size}-ranks"
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    return dist.PrefixStore(attempt, store)


def _choose_device(rank: int, local_rank: int, num_local_ranks: int) -> tuple[torch.device, str]:
    """Return the device of a rank and the backend that serves it; all ranks of one machine choose alike."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus >= num_local_ranks and dist.is_nccl_available():
        return torch.device("cuda", local_rank), "nccl"
    if num_gpus and rank == 0:
        logger.warning(
            "%d GPUs for %d ranks on this machine: all ranks run on CPU with gloo", num_gpus, num_local_ranks
        )
    return torch.device("cpu"), "gloo"


def _share_cores(num_local_ranks: int) -> None:
    """Give each rank its share of the cores: more threads than cores make every rank slower."""
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, num_usable_cores() // num_local_ranks))


def _prefer_loopback() -> None:
    """Keep gloo's sockets off the network, and clear of slow host name look-ups, when all ranks are on this machine."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    if name in (interface for _, interface in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _read_int(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise RuntimeError(
            f"{name}={text!r} in the environment of a rank: it must be a whole number; start the ranks with "
            "%%torchrun, vlmcourse train --nproc or torchrun"
        ) from None
