"""The command lines that run a cell's script outside the notebook: options in, `torchrun` and Slurm text out."""

from __future__ import annotations

import math
import shlex
import socket

from vlmcourse.notebook.options import CellOptions

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29400
"""Where machines meet unless the person says otherwise; also `torchrun`'s own choice."""
SECONDS_PER_MINUTE = 60


RUN_ID = "vlmcourse"
"""What every machine calls the run; always the same, so that a command can be used again."""


def find_endpoint(options: CellOptions) -> str:
    """Return `HOST:PORT` where the `torchrun` processes of several machines find each other: here, unless said."""
    return options.rdzv_endpoint or f"{socket.gethostname()}:{DEFAULT_PORT}"


def torchrun_flags(options: CellOptions) -> list[str]:
    """Return what `torchrun` is told on the command line, before the script."""
    flags = ["--nproc-per-node", str(options.nproc)]
    if options.max_restarts:
        flags += ["--max-restarts", str(options.max_restarts)]
    if options.nnodes[1] == 1:
        return ["--standalone", *flags]
    flags = ["--nnodes", _name_nodes(options), *flags]
    endpoint = find_endpoint(options)
    flags += ["--rdzv-backend", "c10d", "--rdzv-id", RUN_ID, "--rdzv-endpoint", endpoint]
    if endpoint.rpartition(":")[0] in (LOOPBACK, "localhost"):
        flags += ["--local-addr", LOOPBACK]
    return flags


def format_command(options: CellOptions, script: str) -> str:
    """Return the command that runs a script as the cell runs."""
    return shlex.join(["torchrun", *torchrun_flags(options), script])


def format_slurm(options: CellOptions, script: str) -> str:
    """Return a Slurm batch script that runs a script on as many machines, each with as many GPUs, as the cell has."""
    job_name = script.removesuffix(".py").rpartition("/")[2]
    restarts = f" --max-restarts {options.max_restarts}" if options.max_restarts else ""
    nodes = '"$SLURM_NNODES"' if options.nnodes[0] == options.nnodes[1] else _name_nodes(options)
    return f"""#!/bin/bash
#SBATCH --job-name={shlex.quote(job_name)}
#SBATCH --nodes={options.nnodes[1]}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={options.nproc}
#SBATCH --time={math.ceil(options.timeout_s / SECONDS_PER_MINUTE)}
# One torchrun a machine (--ntasks-per-node=1), which starts {options.nproc} ranks there. Without GPUs, remove the line
# --gpus-per-node. --time is in minutes.

first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes {nodes} --nproc-per-node {options.nproc}{restarts} \\
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first_host:{DEFAULT_PORT}" \\
    {shlex.quote(script)}
"""


def _name_nodes(options: CellOptions) -> str:
    fewest, most = options.nnodes
    return str(most) if fewest == most else f"{fewest}:{most}"
