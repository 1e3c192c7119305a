"""Tensor parallelism: the same losses, norms and gradients as one process, for every plan of the vision tower.

Two ranks and four ranks are started once each and run everything; the tests compare what they wrote down with the plain
model here. Planted bugs prove that the comparison can fail.
"""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Recording, check_bf16_parity, check_parity, load
from ranks import run_worker
from tensor_cases import CASES, MAX_GRAD_NORM, Case, build_case, case_shape, load_batches, train_plain
from tensor_worker import BUGS, FOUR, ON_TWO, TWO_BY_TWO, far_logits
from torch.nn import functional

from vlmcourse.data.samples import IGNORE_LABEL
from vlmcourse.parallel.padding import plain_sizes
from vlmcourse.planner.degrees import tensor_problems
from vlmcourse.presets import get_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
REFUSED_BUGS = {"MLP not split": "7 parameters are not split as planned, the first: vision.blocks.0.mlp.up_proj.weight"}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return start(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return start(tmp_path_factory.mktemp("four"), 4)


def start(folder: Path, nproc: int) -> list[dict[str, Any]]:
    run_worker("tensor_worker.py", str(folder), nproc=nproc, timeout_s=240)
    return [load(folder / f"rank{rank}.pt") for rank in range(nproc)]


@cache
def plain(name: str) -> Recording:
    return train_plain({**CASES, **FOUR}[name])


def precision_of(name: str) -> str:
    return CASES[name].precision if name in CASES else "fp32"


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_match_the_plain_model(two: list[dict[str, Any]], name: str) -> None:
    for seen in two:
        check_run(name, seen["runs"][name][0])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_match_the_plain_model(four: list[dict[str, Any]], name: str) -> None:
    for seen in four:
        check_run(name, seen["runs"][name][0])


@pytest.mark.parametrize("name", TWO_BY_TWO)
def test_fsdp_over_tensor_parallelism_matches_the_plain_model(four: list[dict[str, Any]], name: str) -> None:
    for seen in four:
        check_run(name, seen["fsdp"][name][0])


def check_run(name: str, run: Recording) -> None:
    expected = plain(name)
    if precision_of(name) == "bf16":
        check_bf16_parity(expected, run)
        return
    check_parity(expected, run, "fp32")
    assert len(run.losses) == 3
    assert run.weights.keys() == expected.weights.keys()
    for parameter, weight in run.weights.items():
        assert torch.allclose(weight, expected.weights[parameter], rtol=0, atol=1e-5), parameter


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(two: list[dict[str, Any]], bug: str) -> None:
    found = [seen["bugs"][bug] for seen in two]
    if bug in REFUSED_BUGS:
        assert all(isinstance(said, str) and REFUSED_BUGS[bug] in said for said in found), found
        return
    assert all(isinstance(run, Recording) for run in found), found
    with pytest.raises(AssertionError) as caught:
        for run in found:
            check_parity(plain(BUGS[bug][0]), run, "fp32")
    print(f"{bug}: {caught.value}")


def test_the_loss_holds_where_the_logits_of_the_ranks_lie_far_apart(two: list[dict[str, Any]]) -> None:
    logits_BSV, labels_BS = far_logits()
    logits_BSV.requires_grad_()
    expected = functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")
    expected.backward()
    assert logits_BSV.grad is not None
    for rank, seen in enumerate(two):
        loss, gradient_BSV = seen["far losses"]["real"]
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert torch.allclose(gradient_BSV, logits_BSV.grad.chunk(2, dim=-1)[rank], atol=1e-6)
        assert not math.isfinite(seen["far losses"]["smallest logit subtracted"][0])


def test_no_module_of_a_split_model_returns_a_view_that_torch_warns_of(four: list[dict[str, Any]]) -> None:
    assert [message for seen in four for message in seen["warnings"] if "returned a view" in message] == []


def test_the_data_was_awkward_enough() -> None:
    batches = load_batches()
    tiles = [batch.tiles_per_sample for batch in batches]
    assert any(2 in of_batch and 0 in of_batch for of_batch in tiles) and sum(tiles[1]) == 0
    supervised = {int((row != IGNORE_LABEL).sum()) for batch in batches for row in batch.labels_BS}
    assert 0 in supervised and len(supervised) > 4, supervised
    assert all(norm > MAX_GRAD_NORM for norm in plain("split").grad_norms), "clipping was not active"


def test_padding_stays_zero_through_updates_with_weight_decay(
    two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    runs = [seen["runs"][name] for seen in two for name in ON_TWO] + [
        run for seen in four for run in seen["fsdp"].values()
    ]
    padded = [found["padding"] for _, found in runs if found["padding"]]
    names = {name for found in padded for name in found}
    assert "language.embedding.weight" in names
    for layer in ("q_proj.weight", "v_proj.bias", "out_proj.weight", "k_norm.weight"):
        assert f"vision.blocks.0.attention.{layer}" in names
    for found in padded:
        assert all(sizes == (0.0, 0.0) for sizes in found.values()), found


def test_the_plan_is_read_from_the_parameters(two: list[dict[str, Any]], four: list[dict[str, Any]]) -> None:
    plan = two[0]["runs"]["pad_heads, 3 heads, norms"][1]["plan"]
    sizes = plain_sizes(case_shape(CASES["pad_heads, 3 heads, norms"]))
    assert {name: split.plain_size for name, split in plan.items()} == {name: tuple(s) for name, s in sizes.items()}
    split = plan["vision.blocks.0.attention.out_proj.weight"]
    assert (split.placement, split.padded_size, split.local_size) == ("Shard(1)", (24, 32), (24, 16))
    assert plan["vision.blocks.0.attention.out_proj.bias"].placement == "Replicate"
    assert plan["vision.blocks.0.attention.q_norm.weight"].placement == "Shard(0)"
    assert plan["language.blocks.0.norm1.weight"].placement == "Replicate"
    assert plan["language.embedding.weight"].local_size == (128, 32)
    mlp_only = two[0]["runs"]["mlp_only, 3 heads"][1]["plan"]
    assert mlp_only["vision.blocks.0.attention.q_proj.weight"].placement == "Replicate"
    assert mlp_only["vision.blocks.0.mlp.up_proj.weight"].placement == "Shard(0)"
    replicate = two[0]["runs"]["replicate, 3 heads"][1]["plan"]
    assert {split.placement for name, split in replicate.items() if name.startswith("vision.")} == {"Replicate"}
    assert replicate["projector.down_proj.weight"].placement == "Shard(1)"
    assert four[0]["fsdp"]["split, whole sequence"][1]["plan"]["language.blocks.0.mlp.up_proj.weight"].local_size == (
        12,
        32,
    )


def test_generation_is_that_of_the_plain_model(two: list[dict[str, Any]]) -> None:
    for seen in two:
        for name, found in seen["generated"].items():
            assert torch.equal(found["plain"], found["split"]), name
            assert torch.allclose(found["plain logits"], found["split logits"], atol=1e-5), name


def test_collectives_of_a_step_are_those_of_the_formula(two: list[dict[str, Any]]) -> None:
    shape = case_shape(CASES["split"])
    L, L_vision = shape.language.num_layers, shape.vision.num_layers
    # Everywhere: the embedding, two of the loss, two branches a vision block and the projector in both directions.
    common = 1 + 2 + 4 * L_vision + 2
    for seen in two:
        counts = seen["collectives"]["split"]
        # A gather begins and a scatter ends each branch, and the other way round backward; the head gathers too, the
        # cut before the first block gathers backward, and the gradient of each norm's weight is summed.
        assert counts["allgatherintotensor"] == 4 * L + 2
        assert counts["reducescattertensor"] == 4 * L + 1
        assert counts["allreduce"] == common + 2 * L + 1 and len(counts) == 3
        assert sum(seen["collectives"]["split, whole sequence"].values()) == common + 4 * L + 1


def test_what_cannot_be_split_is_refused_before_anything_is_sent(two: list[dict[str, Any]]) -> None:
    for seen in two:
        said = seen["refusals"]
        assert all(message.endswith("[0 collectives]") for message in said.values()), said
        assert said["3 vision heads"].startswith("vision_tp=2 does not divide 3 vision heads: set vision_tp=1")
        assert "tp=2 does not divide 1 key/value heads" in said["1 key/value head"]
        assert "tp=2 does not divide 45 as the language MLP width" in said["odd widths"]
        assert "vision_tp=2 does not divide 31 as the vision MLP width" in said["odd widths"]
        assert "vision = 'half': choose one of 'split', 'pad_heads'" in said["no such plan"]
        assert "tp=2 does not divide a sequence of 33 positions" in said["33 positions"]


def test_internvl2_26b_needs_a_plan_of_its_own_for_the_vision_tower() -> None:
    shape = get_model("internvl2-26b")
    (problem,) = tensor_problems(shape, 2, "split")
    assert re.match(r"vision_tp=2 does not divide 25 vision heads: set vision_tp=1", problem)
    assert all(not tensor_problems(shape, 8, plan) for plan in ("pad_heads", "mlp_only", "replicate"))
    assert len(tensor_problems(shape, 16, "replicate")) == 1, "8 key/value heads"


def test_norms_see_the_weights_they_were_given() -> None:
    model = build_case(Case())
    assert model.language.norm.weight.std() > 0.1, "weights of norms must differ for their gradients to"
