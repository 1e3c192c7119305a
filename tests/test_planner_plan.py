"""Plans, and what `check_plan` finds wrong with them."""

from __future__ import annotations

import dataclasses

import pytest

from vlmcourse.planner import Plan, check_plan
from vlmcourse.planner.validate import CODES
from vlmcourse.presets import get_cluster, get_model

MODEL = get_model("vlm-13b")
A100X4 = get_cluster("a100-40x4")
H100X8 = get_cluster("h100x8")
H100X16 = get_cluster("h100x16")


def problems(plan: Plan, model=MODEL, cluster=H100X8) -> dict[str, str]:
    return {problem.code: problem.message for problem in check_plan(plan, model, cluster).problems}


# --- A plan by itself -----------------------------------------------------------------------------------------------


def test_global_batch_counts_data_parallel_ranks_only():
    # InternVL2-26B with tp=2 on 8 devices: dp is 4, so 1 x 16 x 4 = 64; 128 needs accumulation 32 (F4, F5).
    plan = Plan(dp_shard=4, tp=2, zero_stage=2)
    assert plan.num_ranks == 8
    assert plan.global_batch_size(grad_accum_steps=16) == 64
    assert plan.global_batch_size(grad_accum_steps=32) == 128
    with pytest.raises(ValueError, match="grad_accum_steps = 0"):
        plan.global_batch_size(0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 2.0}, "tp = 2.0: must be a whole number (use //"),
        ({"dp_shard": True}, "dp_shard = True: must be a whole number"),
        ({"pp": 0}, "pp = 0: must be 1 or greater"),
        ({"zero_stage": 4}, "zero_stage = 4: must be from 0 to 3"),
        ({"zero_stage": False}, "zero_stage = False"),
        ({"optimizer": "adam"}, "optimizer = 'adam': choose one of adamw"),
        ({"precision": "bf16"}, "precision = 'bf16': choose one of fp32"),
        ({"offload_optimizer": 1}, "offload_optimizer = 1: must be True or False"),
        ({"frozen": "vision"}, "must be a tuple of tower names"),
        ({"frozen": ("vit",)}, "frozen names 'vit'"),
        ({"frozen": ("vision", "projector", "language")}, "nothing would train"),
        ({"micro_batch_size": float("nan")}, "micro_batch_size = nan"),
    ],
)
def test_what_is_no_plan_is_refused_by_name(fields, words):
    with pytest.raises(ValueError) as error:
        Plan(**fields)
    assert words in str(error.value)


def test_all_problems_of_a_plan_are_listed_together():
    with pytest.raises(ValueError) as error:
        Plan(tp=0, pp=-1, optimizer="x")
    assert str(error.value).count("\n  - ") == 3


def test_plans_are_equal_whatever_the_order_of_frozen_towers():
    assert Plan(frozen=("projector", "vision")) == Plan(frozen=["vision", "projector"])  # type: ignore[arg-type]


# --- A plan, a model and a cluster ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_shard=4, zero_stage=3, offload_optimizer=True),
        Plan(dp_shard=4, zero_stage=3, optimizer="adamw_8bit"),
        Plan(dp_shard=4, zero_stage=2, offload_optimizer=True),
    ],
)
def test_13b_on_four_a100_40_is_possible_with_a_remedy(plan):
    assert check_plan(plan, MODEL, A100X4).ok


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_replicate=4),
        Plan(dp_shard=4, zero_stage=1),
        Plan(dp_shard=4, zero_stage=2),
        Plan(dp_shard=4, zero_stage=3),
        Plan(dp_shard=4, zero_stage=3, frozen=("vision",)),
        Plan(tp=4),
        Plan(pp=4),
        Plan(dp_shard=2, tp=2, zero_stage=3),
    ],
)
def test_13b_on_four_a100_40_does_not_fit_without_one(plan):
    verdict = check_plan(plan, MODEL, A100X4)
    assert verdict.codes == ("memory",)
    assert not verdict  # so that `if check_plan(...)` asks what it seems to
    assert verdict.memory.device_total > verdict.available_bytes == 40 * 10**9


def test_memory_message_says_needed_available_and_owner():
    message = problems(Plan(dp_shard=4, zero_stage=3), cluster=A100X4)["memory"]
    assert "58.1 GB" in message and "40.0 GB" in message and "optimizer 39.0" in message
    assert message.endswith(": make the optimizer state smaller, or move the optimizer state off the device")


@pytest.mark.parametrize(
    ("plan", "advice"),
    [
        (Plan(dp_replicate=4), "split the optimizer state over more ranks (a larger dp_shard), or make"),
        (Plan(dp_shard=4, zero_stage=1), "split weights and gradients too (zero_stage=3), or make"),
        (Plan(dp_shard=4, zero_stage=3, optimizer="adamw_8bit", micro_batch_size=2), "move the optimizer state off"),
        (Plan(dp_replicate=4, offload_optimizer=True), "split the weights (zero_stage=3 over dp_shard, tp or pp)"),
        (
            Plan(dp_replicate=4, zero_stage=3, offload_optimizer=True),
            "split the weights over more ranks (a larger dp_shard)",
        ),
        (
            Plan(dp_replicate=4, precision="bf16_fp32_grads", offload_optimizer=True),
            "split the gradients (zero_stage of 2 or more over dp_shard)",
        ),
        (
            Plan(dp_replicate=4, precision="bf16_fp32_grads", zero_stage=2, offload_optimizer=True),
            "split the gradients over more ranks (a larger dp_shard)",
        ),
        (
            Plan(dp_shard=4, zero_stage=3, micro_batch_size=64, activation_checkpointing=False, offload_optimizer=True),
            "checkpoint activations, or lower micro_batch_size, or raise tp",
        ),
    ],
)
def test_advice_about_memory_is_what_the_plan_does_not_do_yet(plan, advice):
    assert f": {advice}" in problems(plan, cluster=A100X4)["memory"]


def test_split_over_every_rank_already_a_plan_is_told_to_choose_another_size():
    large = dataclasses.replace(MODEL, language=dataclasses.replace(MODEL.language, num_layers=300))
    message = problems(Plan(dp_shard=4, zero_stage=3, offload_optimizer=True), large, A100X4)["memory"]
    assert message.endswith(": choose a smaller model, or more or larger devices")
    host = problems(Plan(dp_shard=4, zero_stage=3, optimizer="adamw_8bit", offload_optimizer=True), large, A100X4)[
        "host_memory"
    ]
    assert host.endswith(": keep it on the devices")


def test_25_vision_heads_do_not_divide_by_two_and_need_not():
    split = Plan(dp_shard=4, tp=2, vision_tp=2, zero_stage=3)
    assert problems(split)["vision_heads"] == "vision_tp=2 does not divide 25 vision heads: set vision_tp=1"
    assert "vision_heads" not in problems(dataclasses.replace(split, vision_tp=1))


@pytest.mark.parametrize(
    ("plan", "code", "words"),
    [
        (Plan(dp_replicate=4), "ranks", "4 x 1 x 1 x 1 = 4, but h100x8 has 1 x 8 = 8 devices"),
        (Plan(dp_shard=8), "sharding", "zero_stage=0 splits nothing, but dp_shard=8"),
        (Plan(dp_replicate=8, zero_stage=3), "sharding", "zero_stage=3 splits over dp_shard=1 rank"),
        (Plan(pp=64), "layers", "pp=64 stages for 52 blocks: each stage needs at least one"),
        (Plan(tp=2, vision_tp=4, dp_replicate=4), "vision_tp", "vision_tp=4 with tp=2: must be 1 or equal to tp"),
    ],
)
def test_each_mistake_has_its_code_and_says_the_numbers(plan, code, words):
    assert words in problems(plan)[code]


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("num_heads", 20, "heads"),
        ("num_kv_heads", 4, "kv_heads"),
        ("hidden_size", 5124, "hidden"),
        ("mlp_size", 15100, "mlp"),
    ],
)
def test_tp_must_divide_every_size_it_splits(field, value, code):
    model = dataclasses.replace(MODEL, language=dataclasses.replace(MODEL.language, **{field: value}))
    assert code in problems(Plan(tp=8), model)
    assert code not in problems(Plan(tp=4, dp_replicate=2), model)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [("hidden_size", 3202, "vision_hidden"), ("mlp_size", 12802, "vision_mlp"), ("num_heads", 26, "vision_heads")],
)
def test_vision_tp_must_divide_every_size_it_splits(field, value, code):
    vision = dataclasses.replace(MODEL.vision, **{"num_heads": 24, field: value})
    model = dataclasses.replace(MODEL, vision=vision)
    assert code in problems(Plan(tp=4, vision_tp=4, dp_replicate=2), model)
    assert code not in problems(Plan(tp=2, vision_tp=2, dp_replicate=4), model)


def test_tensor_parallel_groups_stay_inside_a_node():
    assert "tp_nodes" in problems(Plan(tp=16), cluster=H100X16)
    assert "tp_nodes" not in problems(Plan(tp=8, dp_replicate=2), cluster=H100X16)


def test_bf16_is_refused_where_there_is_none():
    v100 = get_cluster("v100-32x8")
    said = problems(Plan(dp_shard=8, zero_stage=3), cluster=v100)["precision"]
    assert said.endswith("computes in bf16, which v100-32 does not: use fp16_mixed or fp32")
    for precision in ("fp16_mixed", "fp32"):
        assert "precision" not in problems(Plan(dp_shard=8, zero_stage=3, precision=precision), cluster=v100)


def test_offloaded_state_of_all_ranks_must_fit_the_node():
    # DDP offloads a whole copy from every rank: 4 x 13.0e9 x 12 bytes = 624 GB, more than 512.
    message = problems(Plan(dp_replicate=4, offload_optimizer=True), cluster=A100X4)["host_memory"]
    assert "4 x 156.1 = 624.4 GB" in message and "512.0 GB" in message
    assert "host_memory" not in problems(Plan(dp_shard=4, zero_stage=1, offload_optimizer=True), cluster=A100X4)


def test_a_batch_that_counts_ranks_of_a_tensor_parallel_group_is_refused_with_the_reason():
    model, plan = get_model("internvl2-26b"), Plan(tp=2, dp_shard=4, zero_stage=3)
    wrong = check_plan(plan, model, H100X8, grad_accum_steps=16, global_batch_size=128)
    assert wrong.codes == ("batch",)
    assert wrong.problems[0].message == (
        "micro-batch x accumulation x data-parallel degree = 1 x 16 x 4 = 64 samples a step, not 128: that would count "
        "all 8 ranks; tp x pp = 2 ranks share their samples; set grad_accum_steps to 32 (128 samples)"
    )
    assert check_plan(plan, model, H100X8, grad_accum_steps=32, global_batch_size=128)
    assert check_plan(plan, model, H100X8, grad_accum_steps=16, global_batch_size=64)
    assert check_plan(plan, model, H100X8, grad_accum_steps=16)  # nothing is said about the batch
    flat = check_plan(Plan(dp_shard=8, zero_stage=3), model, H100X8, grad_accum_steps=1, global_batch_size=100)
    message = next(problem.message for problem in flat.problems if problem.code == "batch")
    assert message.endswith("not 100; set grad_accum_steps to 12 (96 samples) or 13 (104 samples)")
    with pytest.raises(ValueError, match="grad_accum_steps = 0"):
        check_plan(plan, model, H100X8, grad_accum_steps=0)
    with pytest.raises(ValueError, match="global_batch_size = -1"):
        check_plan(plan, model, H100X8, global_batch_size=-1)


def test_verdict_prints_its_problems_and_codes_are_known():
    verdict = check_plan(Plan(tp=16, vision_tp=16), MODEL, H100X8)
    assert str(verdict).startswith("not possible: a rank needs")
    assert set(verdict.codes) <= set(CODES) and len(verdict.codes) >= 4
    assert all(f"[{code}]" in str(verdict) for code in verdict.codes)
    assert str(check_plan(Plan(dp_shard=8, zero_stage=3), MODEL, H100X8)).startswith("possible")


def test_what_is_not_a_plan_is_a_type_error():
    with pytest.raises(TypeError, match="needs a Plan, not dict"):
        check_plan({"dp_shard": 8}, MODEL, H100X8)  # type: ignore[arg-type]


def test_unknown_cluster_is_an_error_that_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'h100x8'"):
        get_cluster("h100x9")
