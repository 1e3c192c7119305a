"""What needs two ranks besides parity: checkpoints across world sizes, evaluation, refusals, bytes a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import AwkwardTrainer, build_trainer, small_shape
from ranks import run_worker
from ranks_worker import QUESTION_COUNTS, config_in, questions, train_lefty

from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.ranks import Ranks

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
LOSS_TOLERANCE = 1e-5
"""fp32 sums added in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process trained 3 steps and saved, and two ranks then did all of their checks."""
    folder = tmp_path_factory.mktemp("ranks")
    saved = build_trainer(config_in(folder, "single", "single", world_size=1), ALONE, seed=1)
    for _ in range(3):
        saved.train_step()
    saved.save()
    train_lefty(folder, ALONE)
    run_worker("ranks_worker.py", str(folder), timeout_s=240)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def single_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    config = config_in(tmp_path_factory.mktemp("single"), "single", "single", world_size=1)
    return build_trainer(config, ALONE, seed=1).fit().losses


def test_sums_and_maxima_are_equal_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["sum"] == [1.0, 5.0]
        assert of_rank["max"] == [1.0, 0.0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_a_resumed_run_has_exactly_the_losses_of_an_uninterrupted_one(
    found: list[dict[str, Any]], strategy: str, single_losses: list[float]
) -> None:
    for of_rank in found:
        losses = of_rank["resume"][strategy]
        assert losses["rest"] == losses["whole"][3:]
        assert losses["whole"] == pytest.approx(single_losses, abs=LOSS_TOLERANCE)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_a_checkpoint_of_one_process_goes_on_on_two_ranks(
    found: list[dict[str, Any]], strategy: str, single_losses: list[float]
) -> None:
    assert found[0]["other world"][strategy] == pytest.approx(single_losses[3:], abs=LOSS_TOLERANCE)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(
    folder: Path, found: list[dict[str, Any]], strategy: str, single_losses: list[float]
) -> None:
    trainer = build_trainer(config_in(folder, "single", f"{strategy}-to-single", world_size=1), ALONE, seed=9)
    step = trainer.resume(folder / f"{strategy}-parts" / "checkpoints" / "step_000003")
    losses = [trainer.train_step().loss for _ in range(3)]
    assert step == 3
    assert losses == pytest.approx(single_losses[3:], abs=LOSS_TOLERANCE)


def lefty(folder: Path) -> AwkwardTrainer:
    trainer = build_trainer(config_in(folder, "single", "evaluation", world_size=1), ALONE, seed=5)
    trainer.resume(folder / "lefty")
    return trainer


@pytest.mark.parametrize("name", QUESTION_COUNTS)
def test_ranks_with_unequal_questions_count_what_one_process_counts(
    folder: Path, found: list[dict[str, Any]], name: str
) -> None:
    trainer = lefty(folder)
    trainer.eval_data = questions(*QUESTION_COUNTS[name])
    expected = trainer.evaluate()
    assert expected.num_questions == sum(QUESTION_COUNTS[name])
    num_left = sum(question.messages[-1].text == "left" for question in trainer.eval_data)
    assert expected.num_correct == num_left  # it answers "left" to every text
    for of_rank in found:
        for strategy in ("ddp", "fsdp", "zero2"):
            outcome = of_rank["evaluation"][f"{strategy} {name}"]
            assert outcome == [expected.num_questions, expected.num_correct], strategy


def test_training_goes_on_after_an_evaluation(folder: Path, found: list[dict[str, Any]]) -> None:
    expected = lefty(folder).train_step().loss
    for strategy in ("ddp", "fsdp", "zero2"):
        assert found[0]["evaluation"][f"{strategy} stores the same after"], "gathered weights were kept"
        assert found[0]["evaluation"][f"{strategy} loss after"] == pytest.approx(expected, abs=LOSS_TOLERANCE)


def test_a_strategy_that_is_not_what_it_says_is_refused(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        said = of_rank["refusals"]
        assert said["ddp"] == said["fsdp"] == said["zero2"] == said["fsdp with prefetch"] == "accepted"
        for name, words in {
            "ddp not wrapped": "RuntimeError: rank",
            "fsdp not wrapped": "not wrapped by fully_shard",
            "single on two ranks": "ValueError: parallel.strategy = 'single' with 2 ranks",
            "ddp that wraps nothing": "the model is a VLM, not a DistributedDataParallel",
            "ddp called fsdp": "not wrapped by fully_shard",
            "ddp with other weights": "weights of rank 1 differ from rank 0's, the first is vision.",
            "fsdp called ddp": "not a DistributedDataParallel",
            "fsdp called zero2": "units free their gathered weights",
            "zero2 called fsdp": "units keep their gathered weights",
            "fsdp called fsdp with prefetch": "4 blocks do not ask for weights as prefetch=1 says",
            "prefetch of 2 called 1": "blocks do not ask for weights as prefetch=1 says",
            "wrong size": "the process group has 2 ranks instead of 3",
            "fsdp over one rank": "parameters are not sharded over",
        }.items():
            assert words in said[name], name


@pytest.mark.parametrize(
    ("strategy", "exchange"), [("ddp", "all-reduce"), ("fsdp", "reduce-scatter"), ("zero2", "reduce-scatter")]
)
def test_four_micro_batches_exchange_gradients_as_often_as_one(
    found: list[dict[str, Any]], strategy: str, exchange: str
) -> None:
    for of_rank in found:
        one, four = (
            of_rank["exchanges"][f"{strategy}, {steps} micro-batches, prefetch=0, all towers"][exchange]
            for steps in (1, 4)
        )
        # FSDP: 4 blocks, the embedding, the output matrix and the rest.
        assert one == four and (strategy == "ddp" or one == 7)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_no_backward_gathers_the_blocks_of_a_frozen_vision_tower(found: list[dict[str, Any]], prefetch: int) -> None:
    forward = 2 + 2 + 3  # blocks of both towers; embedding, output matrix and the rest
    backward = 2 + 2  # blocks of the language tower, its embedding and output matrix; the rest has been kept
    for of_rank in found:
        calls = of_rank["exchanges"][f"fsdp, 1 micro-batches, prefetch={prefetch}, vision frozen"]
        assert calls["all-gather"] == forward + backward


def test_a_trainer_of_shards_builds_its_own_model_without_weights_on_all_ranks_but_0(
    found: list[dict[str, Any]],
) -> None:
    for rank, of_rank in enumerate(found):
        start = of_rank["own start"]
        assert start["devices"] == ["meta" if rank else "cpu"] * 2 + ["cpu"]
        for strategy in ("fsdp", "zero2", "ddp"):
            assert start["losses"][f"{strategy}, own"] == start["losses"][f"{strategy}, handed in"], strategy


def test_ddp_stores_16_bytes_a_weight_on_every_rank_and_fsdp_half_of_it(found: list[dict[str, Any]]) -> None:
    model = build_model(small_shape(), seed=0)
    num_weights = sum(p.numel() for p in model.parameters())
    num_tensors = len(list(model.parameters()))
    step_bytes = 4 * num_tensors
    for of_rank in found:
        assert of_rank["ledgers"]["ddp"] == [4 * num_weights, 4 * num_weights, 8 * num_weights + step_bytes]
        assert of_rank["ledgers"]["fsdp sum"] == [4 * num_weights, 4 * num_weights, 8 * num_weights + 2 * step_bytes]
        assert of_rank["ledgers"]["fsdp"][0] == pytest.approx(2 * num_weights, rel=0.1)


def test_a_step_without_any_supervised_token_is_a_clear_error(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        assert of_rank["empty step"].startswith(f"rank {rank}: no sample of this step has a supervised token")


def test_files_are_written_once_and_by_rank_0(folder: Path, found: list[dict[str, Any]]) -> None:
    run = folder / "ddp-parts"
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "config.json",
        "energy",
        "log.csv",
        "log.jsonl",
        "result.json",
        "run.json",
        "steps",
    ]
    assert sorted(path.name for path in (run / "steps").iterdir()) == ["rank0000.jsonl", "rank0001.jsonl"]
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 6
    assert 0 <= rows[-1]["eval/exact_match"] <= 1
    assert (run / "checkpoints" / "latest").read_text() == "step_000006"
