"""On which GPU of its machine each local rank runs: tensor-parallel groups go inside a fast domain.

Enters: the layout of a run and the environment of a rank. Leaves: variables to set before anything asks for a GPU, and
a sentence for people. Every rank of a machine comes to the same answer, whichever launcher started it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from vlmcourse.layout import AXES, ParallelConfig, find_layout
from vlmcourse.planner.topology import find_domains, place_axes, read_topology

VISIBLE = "CUDA_VISIBLE_DEVICES"


def order_gpus(config: ParallelConfig, environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Choose the order of this machine's GPUs.

    Nothing is changed where there is no tensor parallelism, no `nvidia-smi`, or a list of GPUs that a person has
    written; a list of all of them in their own order, as schedulers set it, is taken as no choice.

    Args:
        config: how the ranks share the work, without auto.
        environ: of this process, with WORLD_SIZE where it is one rank of several.

    Returns:
        Variables to set, and what to tell; both empty where nothing is changed. Where no order keeps the groups inside
        a fast domain there is nothing to set, and the text says what that costs.

    Raises:
        ValueError: if the degrees do not fit the number of ranks.
    """
    world_size = int(environ.get("WORLD_SIZE", "1"))
    if config.tp == 1 or world_size == 1:
        return {}, ""
    layout = find_layout(config, world_size)
    try:
        topology = read_topology()
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        return {}, f"GPUs stay in their own order: `nvidia-smi topo -m` cannot be read ({error})"
    if topology is None or environ.get(VISIBLE) not in (None, ",".join(map(str, range(topology.num_gpus)))):
        return {}, ""
    num_local_ranks = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    if topology.num_gpus < num_local_ranks:
        return {}, ""  # the ranks run on CPU cores
    degrees = {axis: getattr(layout, axis) for axis in AXES}
    try:
        placement = place_axes(degrees, find_domains(topology), num_local_ranks)
    except ValueError as error:
        return {}, f"GPUs stay in their own order, and tensor parallelism may be slow: {error}"
    return placement.environment, str(placement)
