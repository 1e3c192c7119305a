"""State in files, for real: DeepSpeed's async_io compiled, files written, and the losses of a run without.

Compiling takes minutes. So these run where the operation lies built already (TORCH_EXTENSIONS_DIR, or the user's
cache), or where VLMCOURSE_TEST_NVME=1 asks for it. Everywhere else a stand-in writes the files, see
`test_engine_offload.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from parity import load
from ranks import run_worker

from vlmcourse.parallel.nvme import find_folder_problem
from vlmcourse.parallel.op_builds import is_built

ASKED = "VLMCOURSE_TEST_NVME"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if os.environ.get(ASKED) != "1" and not is_built("async_io"):
        pytest.skip(f"DeepSpeed's async_io is not compiled here, which takes minutes: set {ASKED}=1")
    folder: Path = tmp_path_factory.mktemp("nvme")
    if problem := find_folder_problem(folder):
        pytest.skip(f"{problem}: give pytest --basetemp on a disk")
    run_worker("nvme_worker.py", str(folder), timeout_s=1800)
    return [load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_weights_and_optimizer_in_real_files_train_alike(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        both = of_rank["both"]
        assert both["files"] == pytest.approx(both["memory"], abs=1e-5)
        places = both["places"]
        assert places["moments"]["nvme"] == 2 * places["updated"]["nvme"] > 2**20
        assert both["num_bytes"] == places["moments"]["nvme"] + places["updated"]["nvme"]
        assert places["parameters"]["nvme"] > 2**20
        assert sum(both["parameter files"]) >= places["parameters"]["nvme"]  # of both ranks
        assert both["saved"] and "cannot be loaded with offload.optimizer = 'nvme'" in both["resume"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optimizer", "through accelerate"])
def test_the_optimizer_alone_in_real_files_trains_alike(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        alone = of_rank[name]
        assert alone["losses"] == pytest.approx(of_rank["both"]["memory"], abs=1e-5)
        assert alone["num_files"] >= 3 and alone["moments"] == 2 * alone["weights"] > 2**20
