"""A checkpoint of any strategy loads under every other, on other numbers of ranks, and as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crossing_worker import (
    FROM_FOUR,
    NATIVE,
    ON_FOUR,
    OTHER_CASES,
    SINGLE,
    STRATEGIES,
    build_trainer,
    configure,
    resume,
    train_and_save,
)
from exported import check_exported
from parity import LOSS_TOLERANCE, load
from ranks import run_worker

from vlmcourse.parallel.ranks import Ranks

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the runs of one, two and four ranks."""
    folder = tmp_path_factory.mktemp("crossing")
    _, losses = train_and_save(configure("single", 1, folder, SINGLE), ALONE)
    torch.save(losses, folder / "single.pt")
    for nproc in (2, 4, 1):
        run_worker("crossing_worker.py", str(folder), nproc=nproc, timeout_s=400)
    return folder


@pytest.fixture(scope="module")
def expected(runs: Path) -> list[float]:
    """Return the losses of one process that was not interrupted."""
    return load(runs / "single.pt")


def check(losses: list[float], expected: list[float], what: str) -> None:
    for step, (loss, other) in enumerate(zip(losses, expected, strict=True)):
        assert abs(loss - other) <= LOSS_TOLERANCE["fp32"], f"{what}: loss {step} is {loss} instead of {other}"


def found_on(runs: Path, world_size: int) -> list[dict[str, Any]]:
    return [load(runs / f"found{world_size}_{rank}.pt") for rank in range(world_size)]


@pytest.mark.slow
@pytest.mark.parametrize("source", [*STRATEGIES, SINGLE])
def test_every_strategy_goes_on_from_the_checkpoint_of_every_other(
    runs: Path, expected: list[float], source: str
) -> None:
    for of_rank in found_on(runs, 2):
        row = of_rank["table"][source]
        assert set(row) >= set(STRATEGIES)
        for target, losses in row.items():
            check(losses, expected, f"{source} -> {target}")
        if source != SINGLE:
            assert row[source] == row["expected"], "the same strategy goes on with the same bits"


@pytest.mark.slow
def test_frozen_towers_and_tied_embeddings_cross_too(runs: Path) -> None:
    for of_rank in found_on(runs, 2):
        assert len(of_rank["others"]) == sum(len(pairs) for pairs in OTHER_CASES.values())
        for name, (losses, resumed) in of_rank["others"].items():
            check(resumed, losses, name)


@pytest.mark.slow
def test_four_ranks_go_on_from_checkpoints_of_one_and_two(runs: Path, expected: list[float]) -> None:
    for of_rank in found_on(runs, 4):
        for target in ON_FOUR:
            for source in (*ON_FOUR, SINGLE):
                check(of_rank[f"{source} -> {target}"], expected, f"{source} -> {target} on 4 ranks")


@pytest.mark.slow
@pytest.mark.parametrize("source", [*STRATEGIES, FROM_FOUR])
def test_one_process_goes_on_from_and_exports_checkpoints_of_two_and_four_ranks(
    runs: Path, expected: list[float], source: str, tmp_path: Path
) -> None:
    trainer = build_trainer(configure("single", 1, runs, "x"), ALONE, 7)
    trainer.resume(runs / source)
    check_exported(runs / source, tmp_path / "out", trainer)
    check(resume(trainer, runs / source), expected, source)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", NATIVE)
def test_deepspeeds_universal_checkpoint_of_two_ranks_loads_on_one_and_four(
    runs: Path, expected: list[float], strategy: str
) -> None:
    native = runs / f"native-{strategy}"
    assert (native / "latest_universal").read_text(encoding="utf-8") == "state_universal"
    for of_rank in found_on(runs, 4):
        check(of_rank[f"universal {strategy}"], expected, "on 4 ranks")
        assert f"native {strategy}" in of_rank, "what DeepSpeed writes by itself loads on as many ranks only"
    check(found_on(runs, 1)[0]["universal"][strategy], expected, "on 1 rank")
