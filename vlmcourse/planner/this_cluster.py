"""The GPUs of this machine as the planner's cluster, if it is one whose speed is known.

Enters: what `nvidia-smi` prints, the environment of a process that starts ranks or is one. Leaves: a `DeviceSpec` with
the memory that there is, and a `Cluster`; or why there is none. No torch: it is asked before anything may touch a GPU,
and all ranks of a machine get the same answer. Chapter 7.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from vlmcourse.planner.hardware import DEVICES, REPORTED, DeviceSpec
from vlmcourse.presets import Cluster

MIB = 2**20
TIMEOUT_S = 20.0
ON_CPU_CORES = "ranks run on CPU cores, whose speed no datasheet says"
OTHER_LINKS = ("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe")
"""Cards in `REPORTED` whose links are others than those of the device they stand for."""


@dataclass(frozen=True)
class ThisCluster:
    """The machine that ranks run on."""

    cluster: Cluster
    device: DeviceSpec
    """With the memory that the driver reports."""


def find_cluster(world_size: int, environ: Mapping[str, str]) -> ThisCluster | str:
    """Return this machine's GPUs, one for each rank, or why they cannot be described.

    Links between them are taken to be those of the datasheet.

    Args:
        world_size: ranks of the run.
        environ: of this process, with LOCAL_WORLD_SIZE where it is one rank of several machines.
    """
    if int(environ.get("LOCAL_WORLD_SIZE") or world_size) != world_size:
        return "ranks stand on several machines, and how fast their network is, is not known"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    program = shutil.which("nvidia-smi")
    if program is None or (visible is not None and not visible.strip()):
        return ON_CPU_CORES
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"`nvidia-smi` cannot be asked ({error})"
    if done.returncode:
        return ON_CPU_CORES
    found = describe_gpus(done.stdout, world_size)
    num_visible = None if visible is None else len([part for part in visible.split(",") if part.strip()])
    if num_visible is not None and num_visible < world_size:
        return f"there are {num_visible} GPUs for {world_size} ranks, which therefore run on CPU cores"
    return found


def describe_gpus(printed: str, world_size: int) -> ThisCluster | str:
    """Return the cluster of the GPUs that `nvidia-smi --query-gpu=name,memory.total` prints, or why there is none.

    Args:
        printed: a line for each GPU, name and MiB with a comma between.
        world_size: ranks, each with a GPU of its own.
    """
    rows = [tuple(part.strip() for part in line.rsplit(",", 1)) for line in printed.splitlines() if line.strip()]
    if len(rows) < world_size:
        return f"there are {len(rows)} GPUs for {world_size} ranks, which therefore run on CPU cores"
    if len({row[0] for row in rows}) > 1:
        return f"GPUs are of several kinds ({', '.join(sorted({row[0] for row in rows}))})"
    name, memory = rows[0][0], rows[0][-1]
    if name not in REPORTED or name in OTHER_LINKS:
        return f"peak or links of {name!r} are not in planner/hardware.py"
    if not memory.isdigit():
        return f"the driver does not say how much memory {name!r} has ({memory!r})"
    device = dataclasses.replace(DEVICES[REPORTED[name]], memory_bytes=int(memory) * MIB)
    cluster = Cluster(
        name=f"{world_size} x {name}",
        device=device.name,
        num_nodes=1,
        devices_per_node=world_size,
        host_memory_bytes=0,
        source="nvidia-smi",
    )
    return ThisCluster(cluster, device)
