"""How fast the ranks of this machine exchange data, as a table: collective, latency, bandwidth, time by size.

    python bench/comm.py                    # 2 ranks here; NCCL where there are as many GPUs, else gloo
    python bench/comm.py --nproc 8 --out links.md
    torchrun --nnodes 2 ... bench/comm.py   # on the ranks that torchrun started

Where `nvidia-smi` knows GPUs, their fast domains are printed too. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path

from vlmcourse.machine import num_usable_cores
from vlmcourse.notebook.launcher import check_rank_count, run_ranks
from vlmcourse.planner.topology import find_domains, read_topology

TIMEOUT_S = 600
MIB = 2**20
GPU_SIZES_MIB = (64, 256)


def measure(out: Path | None) -> None:
    """Measure as one rank of a group; rank 0 prints."""
    import torch

    from vlmcourse.parallel.links import DEFAULT_SIZES, LinkFit, measure_links
    from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks

    ranks = init_ranks(TIMEOUT_S / 2)
    on_gpu = ranks.device.type == "cuda"
    sizes = (*DEFAULT_SIZES, *(size * MIB for size in GPU_SIZES_MIB)) if on_gpu else DEFAULT_SIZES
    fits: dict[str, LinkFit] = measure_links(ranks, sizes=sizes)
    device = torch.cuda.get_device_name() if on_gpu else f"{num_usable_cores()} cores, {platform.machine()}"
    shutdown_ranks()
    if not ranks.is_main:
        return
    shown = [samples.payload_bytes for samples in next(iter(fits.values())).samples]
    lines = [
        f"Machine: {ranks.world_size} ranks, {ranks.backend}, {device}, torch {torch.__version__}",
        "",
        "| collective | latency (us) | bandwidth (GB/s) | off by | " + " | ".join(map(name_size, shown)) + " |",
        "|---|---|---|---|" + "---|" * len(shown),
    ]
    for kind, fit in fits.items():
        times = [f"{1e3 * sample.seconds:.3g} ms" for sample in fit.samples]
        off = f"{100 * fit.residual_fraction:.0f} %{'' if fit.is_good else ', poor fit'}"
        cells = [kind, f"{1e6 * fit.link.latency_s:.0f}", f"{fit.link.bytes_per_s / 1e9:.3g}", off, *times]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Latency is that of one message, bandwidth what one rank sends, off by: typical error of the two."]
    topology = read_topology()
    if topology is not None:
        lines += ["", f"Fast domains: {'; '.join(map(str, find_domains(topology)))}"]
    text = "\n".join(lines) + "\n"
    print(text, end="", flush=True)
    if out is not None:
        out.write_text(text, encoding="utf-8")


def name_size(size_bytes: int) -> str:
    """Return a power of two of bytes as people write it."""
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // 2**10} KiB"


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    args = parser.parse_args(argv)
    if "RANK" in os.environ:
        measure(args.out)
        return 0
    check_rank_count(args.nproc)
    command = [sys.executable, str(Path(__file__).resolve())]
    command += ["--out", str(args.out.resolve())] if args.out else []
    run_ranks(command, args.nproc, timeout_s=TIMEOUT_S, on_line=lambda rank, line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
