"""What `apply_strategy` and `check_strategy` refuse: one start of two ranks, see `strategy_worker.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_worker
from strategy_worker import CHECKED

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("strategy")
    run_worker("strategy_worker.py", str(folder), timeout_s=120)
    return [json.loads((folder / f"found{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


OTHERWISE = {
    "no cp, ddp": "attentions are not context-parallel instead of context-parallel over 2 ranks (ring, zigzag)",
    "no cp, fsdp": "attentions are not context-parallel instead of context-parallel over 2 ranks (ring, zigzag)",
    "cp": "attentions are context-parallel over 2 ranks (ring, zigzag) instead of not context-parallel",
    "cp method": "over 2 ranks (ring, zigzag) instead of context-parallel over 2 ranks (ulysses, zigzag)",
    "cp order": "over 2 ranks (ring, zigzag) instead of context-parallel over 2 ranks (ring, contiguous)",
    "no compression": "gradients travel with compression 'none', not 'fp16'",
    "compression": "gradients travel with compression 'fp16', not 'none'",
    "kind of compression": "gradients travel with compression 'bf16', not 'powersgd'",
    "schedule": "pp_schedule='1f1b' instead of pp=2 and pp_schedule='gpipe'",
    "sequence_parallel": "sequence_parallel=False, but the model was split with True",
    "no sequence_parallel": "sequence_parallel=True, but the model was split with False",
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_model_that_is_distributed_otherwise_is_refused_by_a_check(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        as_applied, otherwise = of_rank["checked"][name]
        assert as_applied == "accepted"
        assert otherwise.startswith("RuntimeError") and OTHERWISE[name] in otherwise, otherwise


TWICE = {
    "ddp": "DistributedDataParallel around all of it",
    "fsdp": "FSDPModule around all of it",
    "fsdp, then ddp": "FSDPModule around all of it",
    "tp": "parameters are DTensors, the first ",
    "pp": "PipelinedModel around all of it",
    "cp": "context parallelism",
}


@pytest.mark.parametrize("name", TWICE)
def test_a_strategy_is_applied_once(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        said = of_rank["twice"][name]
        assert said.startswith("ValueError") and "is distributed already" in said and TWICE[name] in said, said


DISAGREE = {
    "strategy": "parallel.strategy is 'ddp' on rank 0 and 'fsdp' on rank 1",
    "strategies of places": "parallel.strategy is 'ddp' on rank 0 and 'fsdp' on rank 1",
    "one wrong": "parallel.strategy is 'ddp' on rank 0 and 'single' on rank 1",
    "blocks": "blocks.2.",
    "frozen": "trained on rank 0 and",
    "place of one": "the place is",
    "offload of one": "offload is",
    "shapes of places": "the model's shape is",
    "class": "trained on rank 0 and not there on rank 1",
}


def test_every_group_has_the_time_limit_of_the_ranks_and_follows_a_change(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        own, made, shorter, again = of_rank["limits"]
        assert own == [5, 20]
        assert len(made) > 6
        assert set(made) == {20} and set(shorter) == {7} and set(again) == {20}


@pytest.mark.parametrize("name", DISAGREE)
def test_ranks_that_distribute_different_things_are_all_told_at_once(found: list[dict[str, Any]], name: str) -> None:
    for rank, of_rank in enumerate(found):
        said = of_rank["disagree"][name]
        assert said.startswith(f"ValueError: rank {rank}: rank(s) 1 distribute something else than rank 0"), said
        assert DISAGREE[name] in said, said


def test_a_place_of_another_rank_is_refused(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        said = of_rank["disagree"]["place"]
        assert said.startswith(f"ValueError: rank {rank}: the place is that of rank {1 - rank}"), said


def test_models_of_one_layout_share_their_groups_until_the_ranks_leave(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        first, *others = of_rank["groups"]
        assert first > 1 and others == [first, first], "each model leaves groups, and their threads, behind"
        assert of_rank["again"] == "accepted"
