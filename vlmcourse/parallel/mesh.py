"""The grid of ranks, live: which axis a rank shares with whom, on process groups that PyTorch has made.

Enters: a `Layout`, plain numbers. Leaves: a `Place`, this process's position in it with the groups to talk over.
Everything that splits a model or a batch is handed a `Place` or one axis of its mesh. Tables of who holds what need no
process: `Layout.table` and, with a model, `planner.grid.share_table`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vlmcourse.layout import AXES, Layout, ParallelConfig, check_usable, find_layout
from vlmcourse.parallel.comm import check_alike
from vlmcourse.parallel.ranks import Ranks, limit_mesh, share_mesh
from vlmcourse.planner.degrees import check_shape_divides
from vlmcourse.presets import VLMShape
from vlmcourse.strategies import WHOLE_WEIGHTS


@dataclass(frozen=True)
class Place:
    """This process's position in the grid of ranks."""

    layout: Layout
    rank: int
    mesh: DeviceMesh | None
    """All axes of `AXES`; None where nothing but whole copies exists, over all ranks or on one."""

    @property
    def dp_rank(self) -> int:
        """Which of the `layout.dp_degree` sets of samples this rank works on."""
        return self.layout.dp_rank(self.rank)

    @property
    def cp_rank(self) -> int:
        """Which parts of the sequence this rank works on."""
        return self.layout.coordinates(self.rank)["cp"]

    @property
    def has_loss(self) -> bool:
        """Whether the output, and so the loss, is computed here: on the last stage of a pipeline."""
        return self.layout.coordinates(self.rank)["pp"] == self.layout.pp - 1

    def axis(self, name: str) -> DeviceMesh:
        """Return one axis of the mesh.

        Raises:
            RuntimeError: if there is no mesh.
        """
        return self._live_mesh()[name]

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of one axis: the ranks that differ from this one on it alone."""
        return self.axis(name).get_group()

    def shard_mesh(self) -> DeviceMesh:
        """Return what FSDP shards over: dp_shard and cp as one axis, below dp_replicate where there are copies.

        Ranks of one cp group hold the same weights and see other positions, so their gradients are added up like those
        of data-parallel ranks, and the weights are sharded over them too.
        """
        mesh = self._live_mesh()
        flat = self.layout.cp > 1
        shards = limit_mesh(mesh["dp_shard", "cp"]._flatten("dp_shard_cp")) if flat else mesh["dp_shard"]
        if self.layout.dp_replicate == 1:
            return shards
        name = "dp_shard_cp" if self.layout.cp > 1 else "dp_shard"
        return mesh["dp_replicate", name]

    def _live_mesh(self) -> DeviceMesh:
        if self.mesh is None:
            raise RuntimeError(f"rank {self.rank}: whole copies alone have no mesh; choose another strategy or degree")
        return self.mesh


def find_place(config: ParallelConfig, ranks: Ranks, shape: VLMShape | None = None) -> Place:
    """Spread the ranks over the axes of `config`; places of one layout share the process groups of each axis.

    Args:
        config: the degrees.
        ranks: this process's place in the run.
        shape: of the model; what the degrees must divide is then checked too.

    Raises:
        ValueError: on all ranks, if one has another configuration; if the degrees do not fit the number of ranks or
            the model, or the strategy is still auto.
    Communicates: see `check_alike` and `share_mesh`.
    """
    # First: a refusal of one rank alone would let the others wait.
    check_alike(describe_config(config) | {"the model's shape": repr(shape)}, ranks)
    check_usable(config)
    layout = find_layout(config, ranks.world_size)
    if shape is not None:
        check_shape_divides(config, shape)
    mesh = None
    if config.strategy not in WHOLE_WEIGHTS or config.tp * config.cp * config.pp > 1:
        mesh = share_mesh(ranks, layout.sizes, AXES)
    return Place(layout, ranks.rank, mesh)


def describe_config(config: ParallelConfig) -> dict[str, str]:
    """Return the fields of a configuration that must be alike on all ranks by name, in words: all but a file's path."""
    names = [field.name for field in dataclasses.fields(config) if field.name != "deepspeed_config"]
    return {f"parallel.{name}": repr(getattr(config, name)) for name in names}
