"""Every precision under every strategy on two ranks: gradients and answers of one process, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import KEY_BIAS, Recording, load
from precision_cases import (
    ALONE,
    ANSWERS,
    BAD_GRADIENTS,
    EVERY,
    NUM_STEPS,
    POLICIES,
    RESUMED,
    RUNS,
    SAME_SUMS,
    STRATEGIES,
    answer,
    learn,
    run,
    run_with_policy,
)
from ranks import run_worker

from vlmcourse.config import ConfigError, parse_config

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
SAME = 1e-6
"""Relative, for strategies that add up the same products in the same formats; measured: 1.2e-7."""
ROUNDED = {
    ("tp", "fp16"): 6e-3,
    ("tp", "bf16_master"): 4.2e-2,
    ("tp", "bf16_pure"): 4.2e-2,
    ("pp", "fp16"): SAME,
    ("pp", "bf16_master"): 1.1e-2,
    ("pp", "bf16_pure"): 1.1e-2,
    ("cp", "fp16"): 6e-3,
    ("cp", "bf16_master"): 4.2e-2,
    ("cp", "bf16_pure"): 4.2e-2,
}
"""Relative, for those that cut or pad products or sequences elsewhere; measured 2.9e-3 and 2.1e-2 under tp, 9.6e-8 and
5.5e-3 under pp, 3.1e-3 and 1.7e-2 under cp. A gradient that is missing is off by 1, one of half the length by 0.5.
Losses and norms may be off by a tenth of that; measured: 6e-4 and 7.5e-4."""
ANSWERED = {"fp16": 3e-4, "bf16": 2e-3, "bf16_master": 2e-3, "bf16_pure": 2e-3, "fp8": SAME}
"""Absolute, of a loss of 0.047 after the questions; measured: 5e-5, 1.2e-4 and twice 4e-4, and 0 under fsdp."""
KEY_BIAS_TOLERANCE = 1e-4
"""Absolute; the true gradient is 0."""


@pytest.fixture(scope="module")
def learned() -> dict[str, torch.Tensor]:
    """Weights of a model that knows its answers."""
    return learn()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, learned: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """What each of two ranks recorded."""
    folder = tmp_path_factory.mktemp("precision")
    torch.save(learned, folder / "learned.pt")
    run_worker("precision_worker.py", str(folder), timeout_s=300)
    return [load(Path(folder) / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Recording]:
    return {precision: run("single", precision, ALONE) for precision in ("fp32", "bf16", *EVERY)}


@pytest.mark.parametrize(("strategy", "precision"), [(s, p) for s, every in RUNS.items() for p in every])
def test_gradients_are_those_of_one_process(
    found: list[dict[str, Any]], alone: dict[str, Recording], strategy: str, precision: str
) -> None:
    of_rank, expected = found[0]["runs"][strategy, precision], alone[precision]
    allowed = SAME if strategy in SAME_SUMS else ROUNDED[strategy, precision]
    for step, gradients in enumerate(of_rank.gradients):
        assert gradients.keys() == expected.gradients[step].keys()
        for name, gradient in gradients.items():
            right = expected.gradients[step][name].double()
            off = float((gradient.double() - right).norm())
            limit = KEY_BIAS_TOLERANCE if name.endswith(KEY_BIAS) else allowed * float(right.norm())
            assert off <= limit, f"step {step}: {name} is off by {off}; it is {float(right.norm())} long"
        assert of_rank.losses[step] == pytest.approx(expected.losses[step], abs=max(allowed / 10, 1e-6))
        assert of_rank.grad_norms[step] == pytest.approx(expected.grad_norms[step], rel=max(allowed / 10, 1e-5))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("precision", ["bf16_master", "bf16_pure"])
def test_bf16_weights_are_rounded_to_the_same_bits_however_they_are_stored(
    found: list[dict[str, Any]], alone: dict[str, Recording], strategy: str, precision: str
) -> None:
    for of_rank in found:
        weights = of_rank["runs"][strategy, precision].weights
        assert all(torch.equal(weight, alone[precision].weights[name]) for name, weight in weights.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_on_one_rank_skips_the_step_on_all(found: list[dict[str, Any]], strategy: str) -> None:
    for of_rank in found:
        seen = of_rank["overflow"][strategy]
        assert seen["skipped"] == [True, False]
        assert seen["scales"] == [2.0**16, 2.0**15, 2.0**15]
        assert seen["kept"] and seen["moved"] and seen["finite"]
        assert seen["state"] == {"scale": 2.0**15, "good_steps": 1, "num_skipped": 1}


@pytest.mark.parametrize(("strategy", "precision"), RESUMED)
def test_a_resumed_run_goes_on_to_the_same_bits(found: list[dict[str, Any]], strategy: str, precision: str) -> None:
    for of_rank in found:
        seen = of_rank["resume"][strategy, precision]
        assert seen["losses"][0] == seen["losses"][1]
        assert seen["same weights"]
        assert seen["scalers"][0] == seen["scalers"][1]
        assert bool(seen["scalers"][0]) == (precision == "fp16")
    if precision == "fp16":
        assert found[0]["resume"][strategy, precision]["scalers"][0]["num_skipped"] == 1


@pytest.fixture(scope="module")
def answered(learned: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    return {precision: answer("single", precision, learned, ALONE) for precision in {*sum(ANSWERS.values(), ())}}


@pytest.mark.parametrize(("strategy", "precision"), [(s, p) for s, every in ANSWERS.items() for p in every])
def test_ranks_answer_as_one_process_does(
    found: list[dict[str, Any]], answered: dict[str, dict[str, Any]], strategy: str, precision: str
) -> None:
    expected = answered[precision]
    assert expected["exact"] == (11, 8), "it has learned its eight answers, and three are asked for with wrong ones"
    for of_rank in found:
        seen = of_rank["answers"][strategy, precision]
        assert seen["exact"] == expected["exact"]
        assert seen["loss"] == pytest.approx(expected["loss"], abs=ANSWERED[precision])


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("precision", EVERY)
@pytest.mark.parametrize("policy", POLICIES)
def test_recomputing_and_offloading_change_no_bit_of_a_precision(
    found: list[dict[str, Any]], alone: dict[str, Recording], strategy: str, precision: str, policy: str
) -> None:
    if strategy == "single":
        seen = [(run_with_policy("single", precision, policy, ALONE), alone[precision])]
    else:
        seen = [(of_rank["policies"][precision, policy], of_rank["runs"]["fsdp", precision]) for of_rank in found]
    for (recording, num_calls), plain in seen:
        assert num_calls > 0, "nothing was recomputed or moved"
        assert recording.losses == plain.losses[: len(recording.losses)]
        for step, gradients in enumerate(recording.gradients):
            assert gradients.keys() == plain.gradients[step].keys()
            for name, gradient in gradients.items():
                assert torch.equal(gradient, plain.gradients[step][name]), f"step {step}: {name}"
        if len(recording.losses) == NUM_STEPS:
            assert all(torch.equal(weight, plain.weights[name]) for name, weight in recording.weights.items())


@pytest.mark.parametrize("precision", ["bf16_master", "bf16_pure"])
def test_layers_on_the_move_keep_every_bit_of_bf16_weights_and_their_state(
    found: list[dict[str, Any]], precision: str
) -> None:
    """The pipeline that stays is compared with one process above."""
    for of_rank in found:
        stayed, moved = of_rank["moved"][precision]
        assert stayed == moved
        assert any(name.startswith("master of ") for name in stayed) == (precision == "bf16_master")


def test_a_fault_is_found_under_every_strategy_with_its_rank_and_sample(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for strategy, (said, guilty) in of_rank["faults"].items():
            assert said == found[0]["faults"][strategy][0], "ranks disagree"
            assert said, strategy
            assert all("input in pixel_values: a pixel is not finite" in sentence for sentence in said)
            assert any(guilty in sentence for sentence in said), f"{strategy}: {said} without {guilty}"


def test_a_fault_past_the_input_is_found_where_ranks_share_their_sequences(found: list[dict[str, Any]]) -> None:
    """No rank waits for another that makes fewer forward passes, and one picture of several is guilty."""
    for rank, of_rank in enumerate(found):
        said, guilty = of_rank["late faults"]["cp"]
        assert len(said) == 2 and said == found[0]["late faults"]["cp"][0]
        assert said[rank].startswith(f"rank {rank}, step 0, micro-batch ")
        assert f": inf in fp16 from numbers up to 1e+06, with {guilty}" in said[rank] and "vision" in said[rank]
        said, guilty = of_rank["late faults"]["ddp"]
        assert len(said) == 1 and said[0].endswith(f"with {guilty}")


@pytest.mark.parametrize("strategy", BAD_GRADIENTS)
def test_a_gradient_that_is_not_finite_stops_all_ranks_before_a_weight_changes(
    found: list[dict[str, Any]], strategy: str
) -> None:
    for rank, of_rank in enumerate(found):
        seen = of_rank["gradients"][strategy]
        assert seen["said"].startswith(
            f"rank {rank}: the loss of this step is finite, but the norm of its gradient is "
        )
        assert seen["kept"] and seen["step"] == 0
        assert seen["found"] == found[0]["gradients"][strategy]["found"] and len(seen["found"]) == 2
        assert seen["found"][rank].startswith(f"rank {rank}, step 0, micro-batch 0: backward in language.lm_head")


@pytest.mark.parametrize(
    ("precision", "parallel", "words"),
    [
        ("fp8", {"strategy": "single", "tp": 2}, "a tensor's scale comes from its largest element"),
        ("fp8", {"strategy": "single", "pp": 2}, "padding is looked at too; choose bf16, or pp = 1"),
        ("fp8", {"strategy": "ddp", "cp": 2}, "its own positions of a sequence only; choose bf16, or cp = 1"),
        ("fp8", {"strategy": "single", "pp": 2, "adaptive": True}, "padding is looked at too; choose bf16, or pp = 1"),
        ("bf16_master", {"strategy": "ddp", "compression": "fp16"}, "gradients are bf16 already; leave compression"),
        ("bf16_pure", {"strategy": "ddp", "compression": "powersgd"}, "gradients are bf16 already; leave compression"),
        ("fp8", {"strategy": "auto"}, "it may choose tp, cp or pp; name one"),
    ],
)
def test_what_a_precision_does_not_go_with_is_refused_by_name(precision: str, parallel: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"train": {"precision": precision}, "parallel": parallel})
