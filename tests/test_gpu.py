"""What only GPUs can show: parity of every strategy over NCCL, ranks that are forked onto CUDA, and `bench/`'s table.

Everything here is skipped, with the reason, where there are too few GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from notebook_kernel import Kernel, loaded_kernel
from parity import CASES, Recording, build_trainer, check_parity, load, parity_config, record
from parity_worker import BUGS, WEIGHT_SEED

from vlmcourse.notebook.failure import RankFailure
from vlmcourse.notebook.launcher import run_ranks
from vlmcourse.parallel.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DEVICE = "cuda"
FULL_PRECISION = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Without it convolutions round their inputs to 10 bits, which is more than the tolerances of the parity tests."""


@cache
def single(case: str) -> Recording:
    """One process on one GPU."""
    alone = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device(DEVICE, 0), backend="none")
    with torch.backends.cudnn.flags(allow_tf32=False):
        return record(build_trainer(parity_config("single", 1, 1, case), alone, WEIGHT_SEED))


@pytest.fixture(scope="module")
def both_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks with a GPU each recorded."""
    folder = tmp_path_factory.mktemp("parity")
    argv = [sys.executable, str(Path(__file__).parent / "parity_worker.py"), str(folder)]
    lines: list[str] = []
    try:
        run_ranks(argv, 2, timeout_s=500, env=FULL_PRECISION, on_line=lambda rank, line: lines.append(line))
    except RankFailure as error:
        raise AssertionError("\n".join([*lines[-80:], str(error)])) from error
    return [load(folder / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_gpus_match_one_at_every_step(both_ranks: list[dict[str, Any]], case: str, strategy: str) -> None:
    for recordings in both_ranks:
        for steps in (1, 4):
            run = recordings["runs"][case, strategy, steps]
            check_parity(single(case), run, CASES[case].get("train.precision", "fp32"))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_on_gpus_too(both_ranks: list[dict[str, Any]], bug: str) -> None:
    for recordings in both_ranks:
        recorded: Recording | str = recordings["bugs"][bug]
        if isinstance(recorded, str):
            continue  # refused before it trained
        with pytest.raises(AssertionError):
            check_parity(single("all towers"), recorded, "fp32")


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    with loaded_kernel(tmp_path) as kernel:
        yield kernel


@pytest.mark.notebook
@pytest.mark.gpu(2)
def test_ranks_forked_from_the_server_use_a_gpu_each_in_one_cell_after_another(kernel: Kernel) -> None:
    cell = """%%torchrun -n 2
        import os, psutil, torch, torch.distributed as dist
        numbers = torch.full((4,), rank + 1.0, device=device)
        dist.all_reduce(numbers)
        server = psutil.Process(psutil.Process(os.getppid()).ppid())
        print(device, numbers.tolist(), "fork_server" in " ".join(server.cmdline()))
    """
    for _ in range(2):  # the first must leave the server as it was, with no CUDA in it
        shown = kernel.run(cell)
        assert shown.error == ""
        for rank in (0, 1):
            assert shown.lines(rank) == [f"{DEVICE}:{rank} [3.0, 3.0, 3.0, 3.0] True"]
