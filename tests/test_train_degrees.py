"""Whole runs under tensor, context and pipeline parallelism: resumed, evaluated, saved, and resumed elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import Combination, config_of
from degrees_worker import ANSWERING, BENT, CROSSED, NUM_STEPS, RUNS, SAVED_STEP, build, model_of, recorded_answers
from parity import LOSS_TOLERANCE
from ranks import run_worker

from vlmcourse.parallel.ranks import Ranks
from vlmcourse.train.report import TrainResult

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
CLOSE = LOSS_TOLERANCE["fp32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("degrees")


MODELS = {
    "plain": Combination(1, {}),
    "tied": Combination(1, {}, tied=True),
    "padded": Combination(1, {}, heads=3, vocab_size=257),
}
"""Runs of one process, of the models that `model_of` names."""


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, tuple[TrainResult, dict[str, str]]]:
    """What one process does with each model, and its last answers; its checkpoints are in folders of the same names."""
    results = {}
    for name, combination in MODELS.items():
        with recorded_answers() as answers:
            results[name] = build(combination, ALONE, folder, name, seed=3).fit(), answers
    return results


@pytest.fixture(scope="module")
def found(folder: Path, alone: dict[str, tuple[TrainResult, dict[str, str]]]) -> list[dict[str, Any]]:
    run_worker("degrees_worker.py", str(folder), nproc=4, timeout_s=240)
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(4)]


def next_loss(folder: Path, source: str, combination: Combination) -> float:
    """Return the loss of the step that one process makes after the last checkpoint of a run."""
    trainer = build(combination, ALONE, folder, f"after-{source}", seed=9)
    assert trainer.resume(folder / source / "checkpoints" / f"step_{NUM_STEPS:06d}") == NUM_STEPS
    return trainer.train_step().loss


def check_answers(of_ranks: list[dict[str, str]], expected: dict[str, str]) -> None:
    """Compare what ranks generated with what one process did; how long they go on depends on who shares a batch."""
    assert {key for answers in of_ranks for key in answers} == expected.keys()
    assert len(set(expected.values())) > 1
    for answers in of_ranks:
        for key, text in answers.items():
            length = min(len(text), len(expected[key]))
            assert length and text[:length] == expected[key][:length], key


@pytest.mark.parametrize("name", ANSWERING)
def test_a_distributed_model_answers_as_one_process_does(
    found: list[dict[str, Any]], alone: dict[str, tuple[TrainResult, dict[str, str]]], name: str
) -> None:
    expected, answers = alone["plain"]
    check_answers([of_rank[name]["answers"] for of_rank in found], answers)
    for of_rank in found:
        assert of_rank[name]["exact"] == [expected.exact_match, expected.num_questions]
        assert of_rank[name]["trains on"]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_from_one_process_and_answers_as_it_does(
    found: list[dict[str, Any]], alone: dict[str, tuple[TrainResult, dict[str, str]]], name: str
) -> None:
    expected, answers = alone[model_of(RUNS[name])]
    check_answers([of_rank[name]["answers"] for of_rank in found], answers)
    for of_rank in found:
        assert of_rank[name]["losses"] == pytest.approx(expected.losses[SAVED_STEP:], abs=CLOSE)
        assert of_rank[name]["exact"] == [expected.exact_match, expected.num_questions]


@pytest.mark.parametrize("name", [name for name in RUNS if RUNS[name].parallel.get("pp", 1) > 1])
def test_a_pipeline_answers_no_more_questions_at_a_time_than_it_trains_on(
    found: list[dict[str, Any]], name: str
) -> None:
    for of_rank in found:
        assert max(of_rank[name]["at a time"]) == config_of(RUNS[name]).train.micro_batch_size


@pytest.mark.parametrize("name", BENT)
def test_an_image_token_in_an_answer_takes_no_feature_from_other_rows(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        bent = of_rank[f"bent {name}"]
        assert bent["begin with the image token"] == [True] + [False] * (len(bent["expected"]) - 1)
        assert bent["given"] == bent["expected"]


@pytest.mark.parametrize("name", BENT)
def test_a_pipeline_predicts_one_position_of_each_prompt(found: list[dict[str, Any]], name: str) -> None:
    bent = [of_rank[f"bent {name}"] for of_rank in found]
    each_pass = [[len(bent[0]["expected"]), 1]] * len(bent[0]["expected"][0])
    # The head is on the second stage alone.
    assert [of_rank["predicted"] for of_rank in bent] == [[], [], each_pass, each_pass]


@pytest.mark.parametrize("name", RUNS)
def test_one_process_goes_on_from_its_checkpoint(folder: Path, found: list[dict[str, Any]], name: str) -> None:
    model = model_of(RUNS[name])
    expected = next_loss(folder, model, MODELS[model])
    assert next_loss(folder, name, MODELS[model]) == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("name", CROSSED)
def test_a_checkpoint_of_shards_of_matrices_goes_on_in_a_pipeline(
    folder: Path, found: list[dict[str, Any]], name: str
) -> None:
    model = model_of(CROSSED[name])
    expected = next_loss(folder, model, MODELS[model])
    assert [of_rank[f"crossed {name}"] for of_rank in found] == [pytest.approx(expected, abs=CLOSE)] * 4


def test_what_cannot_be_is_refused_by_every_rank_with_the_reason(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        said = of_rank["refusals"]
        for name, words in {
            "schedule over fsdp": "leaves gradients out in silence",
            "too few micro-batches": "dualpipev needs at least 4",
            "odd heads": "vision_tp=2 does not divide 3 vision heads: set vision_tp=1, or vision_heads to 'mlp_only'",
            "too many stages": "each needs at least one block; lower pp",
            "another model": "this is a Linear: use ddp or fsdp",
            "another model in a pipeline": "this is a Linear: use ddp or fsdp",
            "unresolved": "'auto' is not chosen yet: planner.degrees.settle(",
            "unresolved, in a place": "'auto' is not chosen yet",
            "unresolved, checked": "'auto' is not chosen yet",
            "unresolved place": "'auto' is not chosen yet",
            "another place": "makes dp_shard 4 of 4 ranks, but the place is of dp_replicate 4: call find_place",
            "another place, checked": "makes dp_shard 4 of 4 ranks, but the place is of dp_replicate 4",
            "no loss": "the last stage of a pipeline needs loss_sum",
            "checkpoint of another shape": "tensors do not match, the first: model.vision.",
            "file lost": "FileNotFoundError",
        }.items():
            assert words in said[name], name
