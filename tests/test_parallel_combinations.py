"""Every combination of strategies and degrees trains as one process does: the same losses, norms and gradients."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from combinations import COMBINATIONS, NUM_STEPS, Combination, run
from parity import Recording, check_bf16_parity, check_parity, load
from ranks import run_worker

from vlmcourse.parallel.ranks import Ranks

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")


@cache
def single(heads: int, tied: bool, freeze: tuple[str, ...], precision: str) -> Recording:
    return run(Combination(1, {}, freeze=freeze, precision=precision, heads=heads, tied=tied), ALONE)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Recording | str]]:
    """What every rank recorded, by combination."""
    found: dict[str, list[Recording | str]] = {}
    for world_size in sorted({combination.world_size for combination in COMBINATIONS.values()}):
        folder: Path = tmp_path_factory.mktemp(f"ranks{world_size}")
        run_worker("combinations_worker.py", str(folder), nproc=world_size, timeout_s=300)
        for rank in range(world_size):
            for name, recording in load(folder / f"rank{rank}.pt").items():
                found.setdefault(name, []).append(recording)
    return found


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_combination_matches_one_process_at_every_step(recorded: dict[str, list[Recording | str]], name: str) -> None:
    combination = COMBINATIONS[name]
    expected = single(combination.heads, combination.tied, combination.freeze, combination.precision)
    assert len(recorded[name]) == combination.world_size
    for recording in recorded[name]:
        assert isinstance(recording, Recording), recording
        assert len(recording.losses) == len(expected.losses)
        if combination.precision == "bf16":
            check_bf16_parity(expected, recording)
            continue
        check_parity(expected, recording, combination.precision)
        for weight, value in recording.weights.items():
            assert torch.allclose(value, expected.weights[weight], rtol=0, atol=1e-5), weight


@pytest.mark.parametrize("name", COMBINATIONS)
def test_ranks_draw_the_same_random_numbers_exactly_where_they_share_samples(
    recorded: dict[str, list[Recording | str]], name: str
) -> None:
    draws: dict[str, list[list[float]]] = {}
    for recording in recorded[name]:
        assert isinstance(recording, Recording), recording
        draws.setdefault(str(recording.sample_ids), []).append(recording.draws)
    combination = COMBINATIONS[name]
    num_sharing = 1
    for axis in ("tp", "cp", "pp"):
        num_sharing *= combination.parallel.get(axis, 1)
    assert [len(of_group) for of_group in draws.values()] == [num_sharing] * (combination.world_size // num_sharing)
    assert all(drawn == of_group[0] for of_group in draws.values() for drawn in of_group)
    assert len({number for of_group in draws.values() for number in of_group[0]}) == len(draws) * NUM_STEPS
