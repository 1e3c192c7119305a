"""How long DeepSpeed's Adam for main memory takes to compile here, and whether it computes what PyTorch's does.

    python bench/op_build.py

Compiles `cpu_adam` into an empty folder, loads it again in another process, and updates the same weights by it and by
PyTorch's fused AdamW. Prints seconds and the largest difference; asserts nothing about time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

STEPS = 20
NUM_ELEMENTS = 1_000_000


def load_and_compare() -> None:
    """Load the operation from TORCH_EXTENSIONS_DIR, compiling where it is missing, and print one line."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    from vlmcourse.parallel.engine_offload import as_cpu_adam
    from vlmcourse.parallel.op_builds import find_build_problem, get_builder, load_op
    from vlmcourse.parallel.ranks import Ranks

    if problem := find_build_problem():
        raise SystemExit(problem)
    alone = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
    started_s = time.perf_counter()
    load_op(get_builder("CPUAdamBuilder"), alone)
    load_s = time.perf_counter() - started_s
    torch.manual_seed(0)
    start = torch.randn(NUM_ELEMENTS)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    theirs = torch.optim.AdamW([weights[0]], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    own = as_cpu_adam(torch.optim.AdamW([weights[1]], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1))
    seconds = [0.0, 0.0]
    for _ in range(STEPS):
        gradient = torch.randn(NUM_ELEMENTS)
        for i, optimizer in enumerate((theirs, own)):
            weights[i].grad = gradient.clone()
            started_s = time.perf_counter()
            optimizer.step()
            seconds[i] += time.perf_counter() - started_s
    gap = float((weights[0] - weights[1]).detach().abs().max())
    per_step = ", ".join(
        f"{name} {1e3 * s / STEPS:.2f} ms" for name, s in zip(("PyTorch", "DeepSpeed"), seconds, strict=True)
    )
    print(f"loaded in {load_s:.1f} s; a step of {NUM_ELEMENTS:,} weights: {per_step}; largest difference {gap:.1e}")
    assert gap < 1e-5, "the two do not compute the same"


def main() -> None:
    if sys.argv[1:] == ["--once"]:
        load_and_compare()
        return
    with tempfile.TemporaryDirectory() as folder:
        for what in ("compiled", "found again"):
            print(f"{what}: ", end="", flush=True)
            environment = os.environ | {"TORCH_EXTENSIONS_DIR": folder}
            subprocess.run([sys.executable, __file__, "--once"], check=True, env=environment)


if __name__ == "__main__":
    main()
