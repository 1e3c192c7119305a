"""The rule for every strategy: the same losses and gradients as one process, at every step.

Two ranks are started once and run everything; the tests compare what they wrote down with a single process here.
Weights start from another seed on each rank, so equality also shows that rank 0's were shared. Planted bugs prove that
the comparison can fail.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import (
    CASES,
    GLOBAL_BATCH_SIZE,
    KEY_BIAS,
    MAX_GRAD_NORM,
    NUM_STEPS,
    Recording,
    awkward_samples,
    build_trainer,
    check_gradient,
    check_parity,
    load,
    parity_config,
    record,
)
from parity_worker import BUGS, REFUSALS, WEIGHT_SEED
from ranks import run_worker
from torch.nn import functional as F

from vlmcourse.data.samples import IGNORE_LABEL
from vlmcourse.parallel.ranks import Ranks

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
VARIANTS = [(strategy, steps) for strategy in ("ddp", "fsdp") for steps in (1, 4)]


@cache
def single(case: str, accumulation_steps: int = 1) -> Recording:
    return record(build_trainer(parity_config("single", accumulation_steps, 1, case), ALONE, WEIGHT_SEED))


@pytest.fixture(scope="module")
def both_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What rank 0 and rank 1 recorded."""
    folder: Path = tmp_path_factory.mktemp("parity")
    run_worker("parity_worker.py", str(folder), timeout_s=240)
    return [load(folder / f"rank{rank}.pt") for rank in (0, 1)]


def precision_of(case: str) -> str:
    return CASES[case].get("train.precision", "fp32")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("strategy", "steps"), VARIANTS)
def test_two_ranks_match_one_process_at_every_step(
    both_ranks: list[dict[str, Any]], case: str, strategy: str, steps: int
) -> None:
    for recordings in both_ranks:
        run: Recording = recordings["runs"][case, strategy, steps]
        assert len(run.losses) == CASES[case].get("train.num_steps", NUM_STEPS)
        check_parity(single(case), run, precision_of(case))


@pytest.mark.parametrize("case", CASES)
def test_one_process_with_accumulation_matches_the_big_batch(case: str) -> None:
    check_parity(single(case), single(case, 4), precision_of(case))


def test_one_process_matches_a_loss_written_out_by_hand() -> None:
    trainer = build_trainer(parity_config("single", 1, 1, "all towers"), ALONE, WEIGHT_SEED)
    (batch,) = trainer.load_step(0)
    logits = trainer.model(batch.input_ids_BS, batch.pixel_values_ICHW, batch.attention_mask_BS)
    log_p = F.log_softmax(logits, dim=-1)
    places = [(b, s) for b, s in (batch.labels_BS != IGNORE_LABEL).nonzero().tolist()]
    loss = -sum(log_p[b, s, batch.labels_BS[b, s]] for b, s in places) / len(places)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]).norm()
    assert abs(loss.item() - single("all towers").losses[0]) < 1e-5
    assert abs(float(norm) - single("all towers").grad_norms[0]) < 1e-5
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None
        clipped = parameter.grad * (MAX_GRAD_NORM / norm)
        check_gradient(name, clipped, single("all towers").gradients[0][name], "fp32")


@pytest.mark.parametrize("case", ["all towers", "bf16"])
def test_a_gradient_that_is_missing_or_half_as_long_is_no_parity(case: str) -> None:
    for expected in single(case).gradients:
        for name, gradient in expected.items():
            check_gradient(name, gradient, gradient, precision_of(case))
            for factor in () if name.endswith(KEY_BIAS) else (0.0, 0.5):
                with pytest.raises(AssertionError, match="is off by"):
                    check_gradient(name, factor * gradient, gradient, precision_of(case))


@pytest.mark.parametrize("case", [case for case in CASES if precision_of(case) == "fp32"])
def test_weights_agree_after_the_last_update(both_ranks: list[dict[str, Any]], case: str) -> None:
    for recordings in both_ranks:
        for strategy, steps in VARIANTS:
            for name, weight in recordings["runs"][case, strategy, steps].weights.items():
                assert torch.allclose(weight, single(case).weights[name], rtol=0, atol=1e-5), (strategy, steps, name)


def test_frozen_towers_get_no_gradient_and_do_not_move(both_ranks: list[dict[str, Any]]) -> None:
    for case in ("vision frozen", "vision and projector frozen", "language frozen"):
        frozen = tuple(f"{tower}." for tower in CASES[case]["model.freeze"])
        start = build_trainer(parity_config("single", 1, 1, case), ALONE, WEIGHT_SEED).model.state_dict()
        for strategy, steps in VARIANTS:
            run: Recording = both_ranks[0]["runs"][case, strategy, steps]
            assert not any(name.startswith(frozen) for step in run.gradients for name in step)
            for name, weight in run.weights.items():
                assert torch.equal(weight, start[name]) == name.startswith(frozen), (case, strategy, name)


def test_the_data_was_awkward_enough(both_ranks: list[dict[str, Any]]) -> None:
    of_rank = [recordings["runs"]["all towers", "ddp", 1] for recordings in both_ranks]
    tiles = [[sum(step) for step in run.num_tiles] for run in of_rank]
    assert any((a == 0) != (b == 0) for a, b in zip(*tiles, strict=True)), "no step had pictures on one rank only"
    quarters = [recordings["runs"]["all towers", "ddp", 4] for recordings in both_ranks]
    supervised = [count for run in quarters for step in run.num_supervised for count in step]
    assert 0 in supervised, "no micro-batch was without supervised tokens"
    last = [step[-1] for run in quarters for step in run.num_supervised]
    assert 0 in last, "no micro-batch with gradient exchange was without supervised tokens"
    assert len(set(supervised)) > 4
    assert all(norm > MAX_GRAD_NORM for norm in single("all towers").grad_norms), "clipping was not active"


def test_ranks_take_disjoint_samples_that_make_up_the_single_batch(both_ranks: list[dict[str, Any]]) -> None:
    assert len(awkward_samples()) >= 3 * GLOBAL_BATCH_SIZE
    for strategy, steps in VARIANTS:
        parts = [recordings["runs"]["all towers", strategy, steps].sample_ids for recordings in both_ranks]
        for step, whole in enumerate(single("all towers").sample_ids):
            assert sorted(parts[0][step] + parts[1][step]) == sorted(whole)


def test_reports_count_the_tokens_of_all_ranks(both_ranks: list[dict[str, Any]]) -> None:
    for strategy, steps in VARIANTS:
        runs: list[Recording] = [recordings["runs"]["all towers", strategy, steps] for recordings in both_ranks]
        for step, (of_0, of_1) in enumerate(zip(*(run.num_tokens for run in runs), strict=True)):
            assert of_0 != of_1 and of_0.supervised and of_1.supervised and of_0.visual + of_1.visual
            for run in (*runs, single("all towers")):
                assert run.reported_tokens[step] == of_0 + of_1, (strategy, steps, step)


def test_random_draws_of_a_step_differ_by_rank_and_step_and_not_by_strategy(both_ranks: list[dict[str, Any]]) -> None:
    runs = [[recordings["runs"]["all towers", *variant] for variant in VARIANTS] for recordings in both_ranks]
    for of_rank in runs:
        assert all(run.draws == of_rank[0].draws for run in of_rank)
    assert runs[0][0].draws == single("all towers").draws
    assert len({*runs[0][0].draws, *runs[1][0].draws}) == 2 * NUM_STEPS


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(both_ranks: list[dict[str, Any]], bug: str) -> None:
    for recordings in both_ranks:
        recorded: Recording | str = recordings["bugs"][bug]
        if bug in REFUSALS:
            assert isinstance(recorded, str), "it trained"
            assert REFUSALS[bug] in recorded
            continue
        assert isinstance(recorded, Recording), f"it did not train: {recorded}"
        assert len(recorded.losses) == 3
        with pytest.raises(AssertionError) as caught:
            check_parity(single("all towers"), recorded, "fp32")
        print(f"{bug}: {caught.value}")
