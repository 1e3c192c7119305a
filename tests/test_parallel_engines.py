"""DeepSpeed and accelerate behind the same Trainer: losses, norms and gradients of one process; no silent fallback."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_worker import AT_FIRST, BAD_GRADIENTS, NUM_STEPS, RUNS, SAVED_STEP, WEIGHT_SEED, build, run
from parity import Recording, check_parity, load, parity_config
from ranks import run_worker

from vlmcourse.config import ConfigError, parse_config
from vlmcourse.parallel.apply import apply_strategy
from vlmcourse.parallel.engines import build_deepspeed_settings
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.grid import share_table
from vlmcourse.presets import get_model
from vlmcourse.strategies import DEEPSPEED, ENGINES

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")


@cache
def alone(case: str) -> Recording:
    """Return the same steps of one process, each one big batch."""
    return run(next(name for name, (_, of, _) in RUNS.items() if of == case), ALONE, "single")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("engines")
    run_worker("engines_worker.py", str(folder))
    return [load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_engine_has_the_losses_norms_and_gradients_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    reference = alone(RUNS[name][1])
    for of_rank in found:
        recording: Recording = of_rank[name]
        assert len(recording.losses) == NUM_STEPS
        check_parity(reference, recording, "fp32")
        assert recording.weights.keys() == reference.weights.keys()
        for key, weight in recording.weights.items():
            assert torch.allclose(weight, reference.weights[key], atol=2e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ENGINES)
def test_a_run_goes_on_from_an_engines_checkpoint_with_the_same_losses(
    found: list[dict[str, Any]], strategy: str
) -> None:
    for of_rank in found:
        resumed = of_rank["resume"][strategy]
        assert resumed["step"] == SAVED_STEP
        assert resumed["losses"] == resumed["expected"]
        assert 0 <= resumed["exact"] <= 1


@pytest.mark.slow
def test_zero_3_that_shards_nothing_is_refused(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        assert of_rank["whole"].startswith(f"rank {rank}: deepspeed-zero3: this rank holds")
        assert "not all is sharded" in of_rank["whole"]


@pytest.mark.slow
def test_accelerate_is_not_turned_aside_by_variables_and_leaves_its_surroundings_alone(
    found: list[dict[str, Any]],
) -> None:
    assert [of_rank["variables"] for of_rank in found] == [{"is_same": True, "stage": 2}] * 2


@pytest.mark.slow
def test_accelerate_that_falls_back_to_ddp_is_refused(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        assert of_rank["fallback"].startswith(f"rank {rank}: accelerate runs (processes, kind, wrapper, device) (2, ")
        assert "instead of (2, 'DEEPSPEED', 'DeepSpeedEngine', 'cpu')" in of_rank["fallback"]


@pytest.mark.slow
def test_the_nan_finder_looks_into_an_engine(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        [said] = of_rank["nan"]
        assert said.startswith("rank 1, step 0, micro-batch ")


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD_GRADIENTS)
def test_a_gradient_that_is_not_finite_stops_an_engine_before_a_weight_changes(
    found: list[dict[str, Any]], case: str
) -> None:
    for rank, of_rank in enumerate(found):
        seen = of_rank["gradients"][case]
        assert seen["said"].startswith(
            f"rank {rank}: the loss of this step is finite, but the norm of its gradient is "
        )
        step = 0 if case.endswith(AT_FIRST) else 1
        assert seen["kept"] and seen["step"] == step
        assert seen["found"][rank].startswith(f"rank {rank}, step {step}, micro-batch 0: backward in language.lm_head")


@pytest.mark.parametrize("strategy", ENGINES)
@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_an_engine_refuses_any_other_axis_by_name(strategy: str, axis: str) -> None:
    with pytest.raises(ConfigError, match=rf"parallel.strategy = '{strategy}' with .*{axis} = 2"):
        parse_config({"parallel": {"strategy": strategy, axis: 2}})


@pytest.mark.parametrize("strategy", ENGINES)
def test_an_engine_refuses_what_it_would_not_do(strategy: str) -> None:
    with pytest.raises(ConfigError, match=r"adaptive = true with pp = 1"):
        parse_config({"parallel": {"strategy": strategy, "adaptive": True}})
    for precision in ("fp8", "bf16_master", "bf16_pure"):
        with pytest.raises(ConfigError, match=f"train.precision = '{precision}' with parallel.strategy = '{strategy}'"):
            parse_config({"parallel": {"strategy": strategy}, "train": {"precision": precision}})
    for wrong in ({"compression": "fp16"}, {"prefetch": 1}, {"gradient_sync": "every"}, {"dp_shard": 2}):
        with pytest.raises(ConfigError, match=f"parallel.{next(iter(wrong))} = .*'{strategy}'"):
            parse_config({"parallel": {"strategy": strategy} | wrong})
    for key in ({"train": {"precision": "bf16"}}, {"activations": {"language": "full"}}):
        table = {"parallel": {"strategy": strategy}} | key
        if strategy in DEEPSPEED:
            with pytest.raises(ConfigError, match=f"parallel.strategy = '{strategy}'"):
                parse_config(table)
        else:
            parse_config(table)


def test_an_engine_needs_two_ranks() -> None:
    with pytest.raises(ValueError, match="'deepspeed-zero2' with 1 rank: .*--nproc 2"):
        build(parity_config("deepspeed-zero2", 1, 1, "all towers"), ALONE, WEIGHT_SEED)


def test_deepspeeds_settings_are_those_of_the_run() -> None:
    train = {"micro_batch_size": 3, "accumulation_steps": 5, "max_grad_norm": 0.25}
    settings = build_deepspeed_settings(parse_config({"train": train, "parallel": {"strategy": "deepspeed-zero2"}}))
    assert settings["train_micro_batch_size_per_gpu"] == 3 and settings["gradient_accumulation_steps"] == 5
    assert settings["gradient_clipping"] == 0.25 and settings["zero_optimization"]["stage"] == 2


def test_an_engine_is_not_applied_without_its_optimizer() -> None:
    config = parse_config({"parallel": {"strategy": "deepspeed-zero1"}}).parallel
    with pytest.raises(ValueError, match="call engines.start_deepspeed"):
        apply_strategy(torch.nn.Linear(2, 2), config, ALONE)


def test_the_table_of_shares_says_what_an_engine_splits() -> None:
    shape = get_model("tiny")
    for strategy, words in {
        "deepspeed-zero1": "1/2 of the optimizer's state",
        "deepspeed-zero3": "in shards of 1/2",
        "accelerate-ddp": "whole",
        "deepspeed-zero0": "whole",
        "accelerate-deepspeed-zero2": "1/2 of the optimizer's state",
        "accelerate-deepspeed-zero3": "in shards of 1/2",
    }.items():
        assert words in share_table(parse_config({"parallel": {"strategy": strategy}}).parallel, 2, shape)
