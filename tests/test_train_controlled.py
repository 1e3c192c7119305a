"""A controller steers a real run of two ranks: what it does happens, and the losses are those of the run left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from controlled_worker import SLOW_RANK
from parity import load
from ranks import run_worker

from vlmcourse.data.sampler import GlobalBatchSampler
from vlmcourse.train.balanced_sampler import BalancedSampler

LOSS_TOLERANCE = 1e-4
"""Of a loss after dozens of steps in fp32, sums in another order; a sample left out makes 1e-2 and more."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("controlled")
    run_worker("controlled_worker.py", str(folder))
    return [load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["slow", "tight", "asks"])
def test_a_steered_run_has_the_losses_and_gradient_norms_of_the_run_left_alone(
    found: list[dict[str, Any]], case: str
) -> None:
    alone = found[0]["alone"]
    for of_rank in found:
        count = len(of_rank[case]["losses"])
        assert of_rank[case]["losses"] == pytest.approx(alone["losses"][:count], abs=LOSS_TOLERANCE)
        assert of_rank[case]["norms"] == pytest.approx(alone["norms"][:count], abs=100 * LOSS_TOLERANCE)
    for step in range(len(found[0][case]["losses"])):
        assert sum(of_rank[case]["samples"][step] for of_rank in found) == 8
        tokens, expected = (sum(of_rank[name]["tokens"][step] for of_rank in found) for name in (case, "alone"))
        assert tokens == expected


@pytest.mark.slow
def test_a_slow_rank_is_given_less_of_the_work(found: list[dict[str, Any]]) -> None:
    assert found[0]["slow"]["done"] == found[1]["slow"]["done"]
    assert any("balance = tokens" in done for _, done in found[0]["slow"]["done"])
    shares = found[0]["slow"]["settings"]["shares"]
    assert shares and shares[SLOW_RANK] < 0.45
    slow, other = (sum(found[rank]["slow"]["tokens"][-6:]) for rank in (SLOW_RANK, 1 - SLOW_RANK))
    assert slow < 0.8 * other


@pytest.mark.slow
def test_an_announced_end_is_met_with_a_checkpoint(found: list[dict[str, Any]]) -> None:
    assert (30, "save") in found[0]["slow"]["done"]
    assert any("30" in name for name in found[0]["checkpoints"])


@pytest.mark.slow
def test_tight_memory_is_relieved_by_recomputation_and_smaller_micro_batches(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        tight = of_rank["tight"]
        assert tight["settings"]["recompute_vision"] == "full" and tight["settings"]["recompute_language"] == "full"
        assert (tight["settings"]["micro_batch_size"], tight["settings"]["accumulation_steps"]) == (1, 4)
        assert tight["covered"][0] is False and tight["covered"][-1] is True
        assert tight["micro_batches"][0] == 2 and tight["micro_batches"][-1] == 4


@pytest.mark.slow
def test_what_a_running_process_cannot_do_is_refused_by_name(found: list[dict[str, Any]]) -> None:
    asks = found[0]["asks"]
    assert not asks["done"] and [sentence.split(":")[0] for sentence in asks["refused"]] == [
        "compress",
        "shard",
        "replace",
        "move_layers",
        "micro_batch",
        "go faster",
    ]
    assert "the global batch is 8 and must stay it" in asks["refused"][4]
    assert "parallel.strategy = 'fsdp'" in found[0]["fsdp"] and "choose one of these" in found[0]["fsdp"]


@pytest.mark.slow
def test_a_samples_tiles_and_tokens_are_known_without_its_tensors(found: list[dict[str, Any]]) -> None:
    assert found[0]["measured"] == found[0]["counted"]
    assert {tiles for tiles, _ in found[0]["measured"]} == {0, 1}


@pytest.mark.parametrize("shares", [(), (0.2, 0.5, 0.3)])
@pytest.mark.parametrize("last_group", ["fill", "short", "drop"])
def test_a_balanced_sampler_deals_the_samples_of_the_plain_one_each_once(
    shares: tuple[float, ...], last_group: str
) -> None:
    plain = GlobalBatchSampler(40, 12, 7, last_group)
    balanced = BalancedSampler.of(plain, lambda index: 1.0 + index % 5, shares)
    for step in range(5):
        count = plain.num_micro_batches(step, 4)
        parts = [
            [index for m in range(count) for index in balanced.micro_batch(step, m, 4, rank, 3)] for rank in range(3)
        ]
        assert sorted(index for part in parts for index in part) == sorted(plain.indices(step))
        if len(plain.indices(step)) == 12:
            work = [sum(1.0 + index % 5 for index in part) for part in parts]
            wanted = [share * sum(work) for share in shares or (1 / 3,) * 3]
            assert all(abs(one - other) <= 5 for one, other in zip(work, wanted, strict=True))


def test_a_balanced_sampler_refuses_shares_of_another_number_of_ranks() -> None:
    balanced = BalancedSampler.of(GlobalBatchSampler(8, 4, 0), float, (0.5, 0.5))
    with pytest.raises(ValueError, match="2 shares for 4 data-parallel ranks"):
        balanced.micro_batch(0, 0, 1, 0, 4)
