"""The offload tree against numbers worked by hand, against the papers, and against what must always hold."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest

from vlmcourse.engine_rules import engine_problems
from vlmcourse.layout import ParallelConfig
from vlmcourse.planner import Machine, Plan, Workload, decide_offload, estimate_rank_memory, machine_of
from vlmcourse.planner.memory import ALLOWANCE_BYTES, RankMemory
from vlmcourse.planner.offload import DOES_NOT_FIT, Decision
from vlmcourse.planner.offload_cost import OffloadCost, estimate_offload_cost
from vlmcourse.planner.offload_memory import OFFLOAD_LEVELS, estimate_offloaded_memory
from vlmcourse.planner.offload_runs import describe_runs, find_strategies
from vlmcourse.planner.shapes import count_language_layer_params, count_params
from vlmcourse.presets import CLUSTERS, MODELS, Cluster, VLMShape, get_cluster, get_model
from vlmcourse.recompute import ActivationsConfig
from vlmcourse.state_offload import OffloadConfig

GB = 10**9
ORDER = (*OFFLOAD_LEVELS, DOES_NOT_FIT)


def machine(**changes: Any) -> Machine:
    """Return a node with room for everything, whose speeds make round numbers."""
    values: dict[str, Any] = {
        "name": "a node",
        "device_bytes": 80 * GB,
        "devices_per_node": 8,
        "host_bytes": 10**15,
        "host_bytes_per_s": 400e9,
        "link_bytes_per_s": 32e9,
    }
    return Machine(**values | changes)


def device_bytes(decision: Decision) -> list[int | None]:
    return [level.device_bytes for level in decision.levels]


# --- By hand --------------------------------------------------------------------------------------------------------


def test_zero_2_with_adam_keeps_2_bytes_a_parameter_on_the_device_and_14_off_it():
    # ZeRO-Offload, section 3: fp16 weights stay, 2 bytes; gradients, master weights and moments leave, 2 + 12 bytes.
    model = get_model("internvl2-8b")
    P = count_params(model).total
    (memory,) = estimate_offloaded_memory(Plan(zero_stage=2), model, level="optimizer")
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * P, 0, 0)
    assert memory.host_total == 14 * P


def test_13_billion_parameters_fit_a_v100_with_the_optimizer_off_it_and_not_otherwise():
    # ZeRO-Offload's abstract: 13 billion parameters on one GPU of 32 GB. 13.0e9 x 2 bytes = 26 GB of weights.
    model = get_model("vlm-13b")
    P = count_params(model).total
    assert round(P / 1e9) == 13
    small = Workload(seq_len=512)
    plan = Plan(zero_stage=2, precision="fp16_mixed")
    alone = dataclasses.replace(machine_of(get_cluster("v100-32x8")), devices_per_node=1)
    decision = decide_offload(plan, model, alone, small)
    assert decision.answer == "optimizer"
    assert (device_bytes(decision)[0] or 0) - (device_bytes(decision)[1] or 0) == 14 * P
    kept = decide_offload(dataclasses.replace(plan, zero_stage=0), model, alone, small)  # gradients stay: 52 GB
    assert kept.answer == DOES_NOT_FIT and "zero_stage=3" in kept.reason


def test_nothing_leaves_under_stage_0_as_no_strategy_of_it_offloads():
    plan, model = Plan(dp_replicate=8), get_model("internvl2-8b")
    decision = decide_offload(plan, model, machine())
    assert decision.answer == DOES_NOT_FIT and device_bytes(decision)[1:] == [None] * 3
    assert "only with zero_stage=1 to 3: no" in str(decision) and "only with zero_stage=3: no" in str(decision)
    assert "under zero_stage=0 nothing can leave it (that takes 1 to 3)" in decision.reason
    for stage in (0, 1, 2):  # what the tree says is what a run accepts
        strategy = f"deepspeed-zero{stage}"
        refused = OffloadConfig(optimizer="cpu").contradictions(ParallelConfig(strategy=strategy))
        split = dataclasses.replace(plan, dp_shard=8 if stage else 1, dp_replicate=1 if stage else 8, zero_stage=stage)
        assert (decide_offload(split, model, machine()).levels[1].memory is None) == bool(refused)


@pytest.mark.parametrize(
    ("precision", "stage", "device", "host"),
    [
        # Of P parameters on N = 8 ranks in bytes x P: weights and gradients here; gradients and what is updated there.
        ("bf16_mixed", 0, 2 + 2, 2 + 12),
        ("bf16_mixed", 1, 2 + 2, (2 + 12) / 8),
        ("bf16_mixed", 2, 2, (2 + 12) / 8),
        ("bf16_mixed", 3, 2 / 8, (2 + 12) / 8),
        ("bf16_fp32_grads", 2, 2, (4 + 12) / 8),
        # fp32 weights that are updated are a second copy of those on the device.
        ("fp32", 2, 4, (4 + 4 + 8) / 8),
    ],
)
def test_bytes_on_both_sides_under_each_stage(precision: str, stage: int, device: float, host: float):
    model = get_model("internvl2-8b")
    P = count_params(model).total
    plan = Plan(dp_shard=8, zero_stage=stage, precision=precision)
    (memory,) = estimate_offloaded_memory(plan, model, level="optimizer")
    assert memory.state / P == pytest.approx(device, rel=1e-6)
    assert memory.host_total / P == pytest.approx(host, rel=1e-6)


def test_only_units_that_pass_through_are_on_the_device_with_parameters_off_it():
    model = get_model("internvl2-26b")
    plan = Plan(dp_shard=8, zero_stage=3)
    V, D = 92553, 6144
    ahead, layered = (
        estimate_offloaded_memory(plan, model, level=level)[0] for level in ("optimizer+parameters", "layered")
    )
    assert ahead.state == layered.state == 0
    assert ahead.gathered == estimate_rank_memory(plan, model).gathered  # what ZeRO-3 gathers anyway
    assert count_language_layer_params(model.language) < V * D
    # The largest unit, the output matrix, and what is in none: patch, class and position embedding of a width of 3200,
    # and a norm; weights and gradients of each.
    beside = 3200 * (3 * 14 * 14 + 1 + 1 + 1025) + D
    assert layered.gathered == (V * D + beside) * (2 + 2) < ahead.gathered
    assert ahead.host_total / count_params(model).total == pytest.approx(16 / 8, rel=1e-6)


def test_frozen_towers_leave_as_weights_only_and_are_never_updated():
    model = get_model("internvl2-26b")
    params = count_params(model)
    plan = Plan(dp_shard=8, zero_stage=3, frozen=("vision", "language"))
    for level, frozen_bytes in (("optimizer", 0), ("optimizer+parameters", 2)):
        (memory,) = estimate_offloaded_memory(plan, model, level=level)
        expected = (2 + 12 + frozen_bytes) * params.projector + frozen_bytes * (params.vision + params.language)
        assert memory.host_total == pytest.approx(expected / 8, rel=1e-6)
    (memory,) = estimate_offloaded_memory(dataclasses.replace(plan, precision="fp32"), model, level="optimizer")
    assert memory.host_total == pytest.approx(16 * params.projector / 8, rel=1e-6)  # no copy of frozen weights


def test_a_single_rank_of_zero_3_streams_units_through_its_device():
    model = get_model("internvl2-8b")
    needs = [
        estimate_offloaded_memory(Plan(zero_stage=3), model, level=level)[0].device_total for level in OFFLOAD_LEVELS
    ]
    assert needs == sorted(needs, reverse=True) and len(set(needs)) == 4


# --- Costs ----------------------------------------------------------------------------------------------------------

S = 10**9
MOVED = RankMemory(
    weights=0, gradients=0, optimizer=0, gathered=0, activations=0, host_gradients=2 * S, host_optimizer=12 * S
)


def test_the_cost_of_a_billion_parameters_worked_by_hand():
    plan = Plan(dp_shard=4, zero_stage=2)
    cost = estimate_offload_cost(MOVED, plan, machine(), level="optimizer", grad_accum_steps=3)
    assert (cost.down_bytes, cost.up_bytes, cost.update_bytes) == (3 * 2 * S, 2 * S, 28 * S)
    assert cost.down_s == pytest.approx(6 / 32)
    assert cost.update_s == pytest.approx(4 * 28 / 400)  # four ranks share the memory of the node
    assert cost.added_s(0) == pytest.approx(6 / 32 + 2 / 32 + 4 * 28 / 400)
    assert cost.added_s(0.15) == pytest.approx(6 / 32 - 0.1 + 2 / 32 + 4 * 28 / 400)
    assert cost.added_s(math.inf) == pytest.approx(2 / 32 + 4 * 28 / 400)


def test_gradients_that_stay_until_the_step_go_down_once():
    whole = Plan(dp_shard=4, zero_stage=1)
    assert estimate_offload_cost(MOVED, whole, machine(), level="optimizer", grad_accum_steps=3).down_bytes == 2 * S


def test_streamed_weights_go_up_twice_a_micro_batch_and_hide_behind_compute_unless_layered():
    plan = Plan(dp_shard=4, zero_stage=3)
    memory = dataclasses.replace(MOVED, host_weights=3 * S)
    ahead, layered = (
        estimate_offload_cost(memory, plan, machine(), level=level, grad_accum_steps=5)
        for level in ("optimizer+parameters", "layered")
    )
    assert ahead.up_bytes == layered.up_bytes == 2 * 5 * 3 * S
    assert ahead.down_bytes == 5 * 2 * S
    update_s = 4 * 28 / 400
    assert ahead.added_s(0) == pytest.approx(30 / 32 + update_s)  # both directions at once
    assert ahead.added_s(math.inf) == pytest.approx(update_s)
    assert layered.added_s(0) == layered.added_s(math.inf) == pytest.approx(30 / 32 + 10 / 32 + update_s)


def test_eight_bit_moments_and_fp32_weights_change_what_the_update_touches():
    def touched(**changes: Any) -> float:
        plan = Plan(dp_shard=4, zero_stage=2, **changes)
        return estimate_offload_cost(MOVED, plan, machine(), level="optimizer").update_bytes / MOVED.host_gradients

    assert touched() == (2 * 12 + 2 + 2) / 2
    assert touched(optimizer="adamw_8bit") == (2 * 6 + 2 + 2) / 2
    assert touched(precision="fp32") == (2 * 12 + 4) / 4  # no cast is written


def test_files_are_read_and_written_once_and_weights_in_them_as_often_as_they_go_up():
    disks = machine(nvme_bytes=10**15, nvme_bytes_per_s=10e9)
    plan = Plan(dp_shard=4, zero_stage=3)
    memory = dataclasses.replace(MOVED, host_weights=2 * S)
    cost = estimate_offload_cost(memory, plan, disks, level="optimizer", in_files=True)
    assert cost.nvme_bytes == 2 * 12 * S and cost.nvme_s == pytest.approx(4 * 24 / 10)
    cost = estimate_offload_cost(memory, plan, disks, level="layered", in_files=True, grad_accum_steps=2)
    assert cost.nvme_bytes == 2 * 12 * S + (4 + 1) * 2 * S


def test_a_link_is_no_faster_than_a_ranks_part_of_main_memory():
    slow = machine(host_bytes_per_s=40e9)
    assert estimate_offload_cost(MOVED, Plan(dp_shard=4, zero_stage=2), slow, level="optimizer").up_s == 2 / 10


def test_nothing_costs_nothing():
    assert estimate_offload_cost(MOVED, Plan(), machine(), level="none") == OffloadCost(level="none")


# --- What must always hold ------------------------------------------------------------------------------------------


def random_case(seed: int) -> tuple[Plan, VLMShape, Workload, int]:
    rng = random.Random(seed)
    model = rng.choice([shape for name, shape in MODELS.items() if name not in ("tiny", "small")])
    stage = rng.choice([0, 1, 2, 3, 3, 3])
    plan = Plan(
        dp_replicate=rng.choice([1, 2]),
        dp_shard=rng.choice([2, 4, 8, 16]) if stage else 1,
        tp=rng.choice([1, 2]),
        pp=rng.choice([1, 1, 3]),
        zero_stage=stage,
        precision=rng.choice(["bf16_mixed", "fp32", "bf16_fp32_grads", "bf16_autocast"]),
        optimizer=rng.choice(["adamw", "adamw_8bit", "sgd_momentum"]),
        frozen=rng.choice([(), ("vision",), ("language",)]),
        micro_batch_size=rng.choice([1, 4]),
        offload_optimizer=rng.choice([True, False]),
    )
    return plan, model, Workload(seq_len=rng.choice([512, 4096])), rng.choice([1, 4])


@pytest.mark.parametrize("seed", range(40))
def test_more_device_memory_never_leads_to_more_offload_and_the_answer_fits_by_its_own_numbers(seed: int):
    plan, model, workload, steps = random_case(seed)
    rng = random.Random(1000 + seed)
    host = rng.choice([100, 1000, 10_000]) * GB
    disks = rng.choice([0, 10**15])
    answers = []
    for size in [GB * 2**i // 4 for i in range(14)]:
        given = machine(device_bytes=size, host_bytes=host, nvme_bytes=disks, nvme_bytes_per_s=disks / 1e5)
        decision = decide_offload(plan, model, given, workload, grad_accum_steps=steps)
        answers.append(ORDER.index(decision.answer))
        level = decision.level
        if level is None:
            assert not any(level.fits for level in decision.levels)
            assert decision.reason
            continue
        assert level.memory is not None and level.memory.device_total <= size
        assert level.node_bytes <= host and level.nvme_bytes <= disks
        for stage in estimate_offloaded_memory(plan, model, workload, level=level.name):
            assert stage.device_total <= size
            assert min(8, plan.num_ranks) * stage.host_total <= level.node_bytes + level.nvme_bytes
        assert not any(earlier.fits for earlier in decision.path[:-1])
        assert decision.cost.added_s(0) >= decision.cost.added_s(1) >= decision.cost.added_s(math.inf) >= 0
        assert (decision.cost.added_s(0) == 0) == (level.name == "none")
    assert answers == sorted(answers, reverse=True)


@pytest.mark.parametrize("seed", range(25))
def test_more_ranks_never_need_more_offload_under_zero_3(seed: int):
    plan, model, workload, _ = random_case(seed)
    for size in (16 * GB, 40 * GB, 80 * GB):
        answers = []
        for shard in (2, 4, 8, 16, 64, 256):
            split = dataclasses.replace(plan, dp_shard=shard, dp_replicate=1, zero_stage=3)
            # Uneven shards round up: a node's room must not end within those few bytes.
            given = machine(device_bytes=size, host_bytes=10**15)
            answers.append(ORDER.index(decide_offload(split, model, given, workload).answer))
        assert answers == sorted(answers, reverse=True)


@pytest.mark.parametrize("seed", range(25))
def test_each_level_needs_less_on_the_device_and_no_less_off_it(seed: int):
    plan, model, workload, _ = random_case(seed)
    levels = [
        estimate_offloaded_memory(plan, model, workload, level=level)
        for level in OFFLOAD_LEVELS
        if plan.zero_stage == 3 or level in OFFLOAD_LEVELS[:2]
    ]
    for before, after in zip(levels, levels[1:], strict=False):
        for less, more in zip(after, before, strict=True):
            assert less.device_total <= more.device_total
            assert less.host_total >= more.host_total
    everything = estimate_rank_memory(dataclasses.replace(plan, offload_optimizer=False), model, workload)
    assert max(memory.device_total for memory in levels[0]) == everything.device_total
    kept = estimate_rank_memory(dataclasses.replace(plan, offload_optimizer=True), model, workload)
    gradients_left = plan.zero_stage >= 2
    of_level = max(levels[1], key=lambda memory: memory.device_total)
    if plan.pp == 1:
        assert of_level.device_total == kept.device_total - (kept.gradients if gradients_left else 0)


# --- What is said ---------------------------------------------------------------------------------------------------


def test_a_decision_shows_its_path_question_by_question():
    text = str(decide_offload(Plan(dp_shard=8, zero_stage=3), get_model("internvl2-76b"), get_cluster("h100x8")))
    assert "offload on h100x8: optimizer (in main memory)" in text
    assert "everything on the device?" in text and ": no" in text and ": yes" in text
    assert "parameters off it too?" not in text  # never asked
    assert "a step gets" in text


@pytest.mark.parametrize(
    ("changed", "answer", "said"),
    [
        ({}, "optimizer", "'deepspeed-zero3' would with precision='fp32', no recomputation: "),
        ({"precision": "fp32", "activation_checkpointing": False}, "", ""),
        (
            {"dp_shard": 2, "tp": 2, "precision": "fp32", "activation_checkpointing": False},
            "",
            "tp=1, dp_shard=4:",
        ),
        (
            {"dp_shard": 2, "pp": 2, "precision": "fp32", "activation_checkpointing": False},
            "",
            "pp=1, dp_shard=4:",
        ),
        ({"dp_replicate": 2, "dp_shard": 2, "precision": "fp32"}, "", "dp_replicate=1, dp_shard=4,"),
        ({"dp_shard": 1, "precision": "fp32", "activation_checkpointing": False}, "", "offloads on one rank: "),
        ({"dp_shard": 1, "tp": 4, "zero_stage": 0}, DOES_NOT_FIT, "'deepspeed-zero3' would with tp=1, dp_shard=4,"),
    ],
)
def test_an_answer_that_no_strategy_runs_says_which_would(changed: dict[str, Any], answer: str, said: str):
    plan = Plan(**{"dp_shard": 4, "zero_stage": 3, **changed})
    decision = decide_offload(plan, get_model("internvl2-8b"), machine(device_bytes=36 * GB))
    assert decision.answer == answer or not answer
    assert (said in str(decision)) and ("No strategy here" in str(decision)) == bool(said)


@pytest.mark.parametrize("level", OFFLOAD_LEVELS[1:])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("precision", "trained"), [("fp32", "fp32"), ("bf16_autocast", "bf16"), ("bf16_mixed", "")])
def test_a_plan_is_run_by_whom_the_configuration_of_a_run_accepts(level: str, tp: int, precision: str, trained: str):
    plan = Plan(dp_shard=4, tp=tp, zero_stage=3, precision=precision, activation_checkpointing=False)
    parts = {"optimizer": "cpu", "parameters": "none" if level == "optimizer" else "cpu", "layered": level == "layered"}
    for strategy in ("fsdp", "deepspeed-zero3"):
        parallel = ParallelConfig(strategy=strategy, tp=tp)
        refused = not trained or parallel.problems() or OffloadConfig(**parts).contradictions(parallel, trained)
        refused = refused or engine_problems(strategy, trained, ActivationsConfig())
        assert (strategy in find_strategies(plan, level)) != bool(refused)
    assert (describe_runs(plan, level) == "") == bool(find_strategies(plan, level))
    in_files = find_strategies(plan, level, in_files=True)
    assert ("deepspeed-zero3" in in_files) == (precision == "fp32" and tp == 1) and "fsdp" not in in_files


def test_main_memory_or_disks_decide_where_devices_have_room():
    plan, model = Plan(dp_shard=4, zero_stage=3), get_model("internvl2-76b")
    cluster = get_cluster("a100-40x4")
    decision = decide_offload(plan, model, cluster)
    assert decision.answer == DOES_NOT_FIT and "a node needs 1,220.2 GB" in decision.reason
    disks = machine_of(cluster, nvme_bytes=4_000 * GB, nvme_bytes_per_s=6e9)
    decision = decide_offload(plan, model, disks)
    assert (decision.answer, decision.level and decision.level.home) == ("optimizer+parameters", "files")
    assert "files" in str(decision) and decision.cost.nvme_s > 0
    # ZeRO-1 and 2 keep to main memory: 8.08e9 x 14 bytes = 113.1 GB, gradients 16.2 GB of it.
    small = dataclasses.replace(disks, host_bytes=100 * GB)
    eight = get_model("internvl2-8b")
    assert decide_offload(dataclasses.replace(plan, zero_stage=2), eight, small).answer == DOES_NOT_FIT
    halved = dataclasses.replace(small, device_bytes=20 * GB)
    in_files = decide_offload(plan, eight, halved)
    assert (in_files.answer, in_files.level and in_files.level.home) == ("optimizer", "files")


@pytest.mark.parametrize("owner", ["activations", "gathered"])
def test_what_fits_at_no_level_says_which_owner_and_what_to_change(owner: str):
    workload = Workload(seq_len=32768) if owner == "activations" else Workload(seq_len=128)
    small = machine(device_bytes=ALLOWANCE_BYTES + GB)
    decision = decide_offload(Plan(dp_shard=8, zero_stage=3), get_model("internvl2-76b"), small, workload)
    assert decision.answer == DOES_NOT_FIT and f"most of it {owner}" in decision.reason
    assert str(decision).startswith("offload on a node: does not fit")


def test_wrong_values_are_refused_by_name():
    model, plan = get_model("internvl2-8b"), Plan()
    with pytest.raises(ValueError, match=r"device_bytes = 0.*\n.*nvme_bytes_per_s = 0"):
        machine(device_bytes=0, nvme_bytes=1)
    with pytest.raises(ValueError, match="grad_accum_steps = 0"):
        decide_offload(plan, model, machine(), grad_accum_steps=0)
    with pytest.raises(ValueError, match="optimizer\\+parameters.*zero_stage=3"):
        estimate_offloaded_memory(plan, model, level="optimizer+parameters")
    with pytest.raises(ValueError, match="choose one of none"):
        estimate_offloaded_memory(plan, model, level="all")
    with pytest.raises(ValueError, match="how fast its main memory is"):
        machine_of(Cluster(name="mine", device="h100", num_nodes=1, devices_per_node=8, host_memory_bytes=GB))
    with pytest.raises(ValueError, match="nvme_bytes = 0"):
        estimate_offload_cost(MOVED, plan, machine(), level="optimizer", in_files=True)
    with pytest.raises(ValueError, match="compute_s"):
        OffloadCost(level="none").added_s(math.nan)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_says_how_fast_its_link_and_its_main_memory_are(name: str):
    given = machine_of(get_cluster(name))
    assert 10e9 < given.link_bytes_per_s < given.host_bytes_per_s
