"""The command lines that start ranks outside the notebook: what to run and where in, `torchrun` and Slurm text out.

A cell (`%%torchrun --save`, `--show`) and a training configuration (`vlmcourse launch`) become the same `TorchrunJob`.
"""

from __future__ import annotations

import math
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlmcourse.notebook.options import CellOptions

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29400
"""Where machines meet unless the person says otherwise; also `torchrun`'s own choice."""
SECONDS_PER_MINUTE = 60
JOB_PORTS = (20000, 10000)
"""Where jobs of a cluster meet, each on a port of its own: the first of these, and how many there are. They lie below
those that Linux gives to outgoing connections (32768 and up)."""
NO_GPUS = "CUDA_VISIBLE_DEVICES="
"""What hides a machine's GPUs from ranks that are to run on CPU cores."""

RUN_ID = "vlmcourse"
"""What every machine calls the run; always the same, so that a command can be used again."""


@dataclass(frozen=True, kw_only=True)
class TorchrunJob:
    """What one `torchrun` on each machine is told."""

    command: tuple[str, ...]
    """A script and its arguments, or `-m`, a module and its arguments."""
    nproc: int
    """Ranks on each machine."""
    nnodes: tuple[int, int] = (1, 1)
    """The fewest and the most machines that may take part."""
    max_restarts: int = 0
    endpoint: str = ""
    """`HOST:PORT` where several machines meet: the first one of them."""
    local_addr: str = ""
    """What the others call this machine, where its host name is not it."""
    is_meeting_place: bool | None = None
    """Whether this machine is the endpoint; None lets `torchrun` guess, which knows a machine by its host name only."""


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """What a Slurm batch script asks the cluster for, and does before the ranks start."""

    job_name: str
    minutes: int
    gpus_per_node: int
    """0 asks for none: ranks run on CPU cores."""
    cpus_per_task: int = 0
    """Cores of each machine; 0 leaves it to the cluster."""
    partition: str = ""
    account: str = ""
    setup: tuple[str, ...] = ()
    """Lines of shell, such as one that activates an environment."""
    port: int = 0
    """Where the machines meet, on the first of them; 0 takes one that follows from the job's number."""
    hides_gpus: bool = False
    """Whether ranks see no GPU, even on a machine that has some."""


def find_endpoint(options: CellOptions) -> str:
    """Return `HOST:PORT` where the `torchrun` processes of several machines find each other: here, unless said."""
    return options.rdzv_endpoint or f"{socket.gethostname()}:{DEFAULT_PORT}"


def build_cell_job(options: CellOptions, script: str) -> TorchrunJob:
    """Return the job that runs a script as the cell runs."""
    return TorchrunJob(
        command=(script,),
        nproc=options.nproc,
        nnodes=options.nnodes,
        max_restarts=options.max_restarts,
        endpoint=find_endpoint(options),
    )


def torchrun_flags(job: TorchrunJob) -> list[str]:
    """Return what `torchrun` is told on the command line, before the script."""
    flags = ["--nproc-per-node", str(job.nproc), *_restart_flags(job)]
    if job.nnodes[1] == 1:
        return ["--standalone", *flags]
    flags = ["--nnodes", _name_nodes(job), *flags]
    flags += ["--rdzv-backend", "c10d", "--rdzv-id", RUN_ID, "--rdzv-endpoint", job.endpoint]
    if job.is_meeting_place is not None:
        flags += ["--rdzv-conf", f"is_host={str(job.is_meeting_place).lower()}"]
    local_addr = job.local_addr
    if not local_addr and job.endpoint.rpartition(":")[0] in (LOOPBACK, "localhost"):
        local_addr = LOOPBACK
    return [*flags, "--local-addr", local_addr] if local_addr else flags


def join_command(job: TorchrunJob) -> str:
    """Return the command that starts a job's ranks on this machine."""
    return shlex.join(["torchrun", *torchrun_flags(job), *job.command])


def format_command(options: CellOptions, script: str) -> str:
    """Return the command that runs a script as the cell runs."""
    return join_command(build_cell_job(options, script))


def split_hosts(job: TorchrunJob, hosts: Sequence[str], port: int = DEFAULT_PORT) -> list[TorchrunJob]:
    """Return the job as each of several machines runs it; all are called by the names given, and meet at the first.

    Args:
        job: of any number of machines.
        hosts: their addresses, as they reach each other.
        port: on the first, free there.
    """
    nodes = (len(hosts), len(hosts))
    endpoint = f"{hosts[0]}:{port}"
    return [
        replace(job, nnodes=nodes, endpoint=endpoint, local_addr=host, is_meeting_place=number == 0)
        for number, host in enumerate(hosts)
    ]


def format_slurm(options: CellOptions, script: str) -> str:
    """Return a Slurm batch script that runs a script on as many machines, each with as many GPUs, as the cell has."""
    return slurm_script(
        build_cell_job(options, script),
        SlurmRequest(
            job_name=script.removesuffix(".py").rpartition("/")[2],
            minutes=math.ceil(options.timeout_s / SECONDS_PER_MINUTE),
            gpus_per_node=options.nproc,
        ),
    )


def slurm_script(job: TorchrunJob, request: SlurmRequest) -> str:
    """Return a batch script in which `srun` starts one `torchrun` a machine; they meet at the first of them.

    The script ends at the first line that fails. Two jobs may have the same first machine: each has its own port.
    """
    asked = {
        "--job-name": shlex.quote(request.job_name),
        "--nodes": str(job.nnodes[1]),
        "--ntasks-per-node": "1",
        "--gpus-per-node": str(request.gpus_per_node or ""),
        "--cpus-per-task": str(request.cpus_per_task or ""),
        "--time": str(request.minutes),
        "--partition": request.partition,
        "--account": request.account,
    }
    directives = "\n".join(f"#SBATCH {flag}={value}" for flag, value in asked.items() if value)
    about_gpus = " Without GPUs, remove the line\n# --gpus-per-node." if request.gpus_per_node else "\n#"
    nodes = '"$SLURM_NNODES"' if job.nnodes[0] == job.nnodes[1] else _name_nodes(job)
    restarts = "".join(f" {flag}" for flag in _restart_flags(job))
    setup = "".join(f"{line}\n" for line in request.setup)
    # srun does not inherit the batch script's --cpus-per-task.
    cores = f"--cpus-per-task {request.cpus_per_task} " if request.cpus_per_task else ""
    hidden = f"env {NO_GPUS} " if request.hides_gpus else ""
    port = str(request.port or f"$(({JOB_PORTS[0]} + SLURM_JOB_ID % {JOB_PORTS[1]}))")
    return f"""#!/bin/bash
{directives}
# One torchrun a machine (--ntasks-per-node=1), which starts {job.nproc} ranks there.{about_gpus} --time is in minutes.

set -eo pipefail
{setup}hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_host=${{hosts%%$'\\n'*}}
port={port}
srun {cores}{hidden}torchrun --nnodes {nodes} --nproc-per-node {job.nproc}{restarts} \\
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first_host:$port" \\
    {shlex.join(job.command)}
"""


def _restart_flags(job: TorchrunJob) -> list[str]:
    return ["--max-restarts", str(job.max_restarts)] if job.max_restarts else []


def _name_nodes(job: TorchrunJob) -> str:
    fewest, most = job.nnodes
    return str(most) if fewest == most else f"{fewest}:{most}"
