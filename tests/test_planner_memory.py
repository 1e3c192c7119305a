"""Bytes of a rank against numbers worked by hand and against the papers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vlmcourse.planner import (
    ALLOWANCE_BYTES,
    Plan,
    Workload,
    count_params,
    estimate_rank_memory,
    estimate_state_bytes,
    get_device,
)
from vlmcourse.planner.activations import estimate_activation_bytes
from vlmcourse.planner.job import describe_plan
from vlmcourse.planner.memory import estimate_gathered_bytes, local_params
from vlmcourse.planner.rank_peak import most_stored
from vlmcourse.planner.run_peak import build_run_load
from vlmcourse.planner.stages import find_split
from vlmcourse.presets import VLMShape, get_model

GB = 10**9
MODEL = get_model("vlm-13b")
PARAMS = count_params(MODEL)


# --- F1 and F2: the training state ----------------------------------------------------------------------------------


def test_fp32_adam_keeps_112_gb_for_7b_not_84():
    state = estimate_state_bytes(7 * 10**9, precision="fp32")
    assert (state.weights, state.gradients, state.optimizer) == (28 * GB, 28 * GB, 56 * GB)
    assert state.total == 112 * GB
    assert estimate_state_bytes(7 * 10**9, precision="fp32", optimizer="sgd_momentum").total == 84 * GB


@pytest.mark.parametrize(
    ("precision", "optimizer", "bytes_per_param"),
    [
        ("fp32", "adamw", 16),
        ("bf16_mixed", "adamw", 16),
        ("fp16_mixed", "adamw", 16),
        ("bf16_fp32_grads", "adamw", 18),
        ("bf16_autocast", "adamw", 16),
        ("bf16_mixed", "adamw_8bit", 10),
        ("bf16_mixed", "sgd_momentum", 12),
    ],
)
def test_bytes_per_parameter_of_each_recipe(precision, optimizer, bytes_per_param):
    state = estimate_state_bytes(10**9, precision=precision, optimizer=optimizer)
    assert state.total == bytes_per_param * GB


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_stages_match_figure_1_of_rajbhandari_2020(stage, gigabytes):
    state = estimate_state_bytes(7_500_000_000, zero_stage=stage, shard_degree=64)
    assert round(state.total / GB, 1) == gigabytes


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_zero_formulas_for_p_parameters_on_n_ranks(num_ranks):
    P = 8 * 10**8
    totals = [estimate_state_bytes(P, zero_stage=stage, shard_degree=num_ranks).total for stage in range(4)]
    assert totals == [16 * P, 4 * P + 12 * P / num_ranks, 2 * P + 14 * P / num_ranks, 16 * P / num_ranks]


def test_uneven_shards_round_up_to_the_fullest_rank():
    assert estimate_state_bytes(10, zero_stage=3, shard_degree=4).weights == 3 * 2


def test_frozen_parameters_have_weights_only():
    state = estimate_state_bytes(1000, zero_stage=0, trainable=False)
    assert (state.weights, state.gradients, state.optimizer) == (2000, 0, 0)


@pytest.mark.parametrize(
    "changes",
    [{"zero_stage": 4}, {"zero_stage": -1}, {"shard_degree": 0}, {"precision": "int4"}, {"optimizer": "adam"}],
)
def test_state_bytes_refuse_what_they_do_not_know(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        estimate_state_bytes(1000, **changes)


# --- F13: the 13B model on 4 x A100-40GB ----------------------------------------------------------------------------


def state_gb(plan: Plan) -> float:
    return round(estimate_rank_memory(plan, MODEL).state / GB, 1)


def test_13b_state_is_52_gb_a_rank_under_full_sharding_on_four():
    assert state_gb(Plan(dp_shard=4, zero_stage=3)) == 52.0


def test_13b_with_frozen_vision_still_needs_45_gb():
    memory = estimate_rank_memory(Plan(dp_shard=4, zero_stage=3, frozen=("vision",)), MODEL)
    by_hand = ((PARAMS.total - PARAMS.vision) * 16 + PARAMS.vision * 2) / 4
    assert memory.state == pytest.approx(by_hand, abs=64)
    assert round(memory.state / GB) == 45


def test_13b_remedies_bring_the_state_to_13_and_32_5_gb():
    offloaded = estimate_rank_memory(Plan(dp_shard=4, zero_stage=3, offload_optimizer=True), MODEL)
    assert round(offloaded.state / GB, 1) == 13.0
    assert round(offloaded.host_optimizer / GB, 1) == 39.0
    assert offloaded.optimizer == 0
    assert state_gb(Plan(dp_shard=4, zero_stage=3, optimizer="adamw_8bit")) == 32.5


# --- Sharding by tp and pp ------------------------------------------------------------------------------------------


def test_doubling_tp_halves_language_and_leaves_vision_whole():
    one, two = (local_params(Plan(tp=tp), MODEL, stage=0) for tp in (1, 2))
    norms = 36 * 2 * 5120 + 5120  # every rank of the group has them
    assert two["language"] - norms == (one["language"] - norms) / 2
    assert two["vision"] == one["vision"] == PARAMS.vision
    # Of a vision layer without biases on q, k, v: norms, layer scales, and the biases of the two rows of matrices.
    whole = PATCHES_OF_6B + 16 * (2 * 3200 + 2 * 3200 + 2 * 3200)
    both = local_params(Plan(tp=2, vision_tp=2), MODEL, stage=0)
    assert both["vision"] - whole == (PARAMS.vision - whole) / 2
    beside_sums = 2 * 12800 + 5120  # the projector's norm, and the bias added to the sum of its second matrix
    assert two["projector"] - beside_sums == (PARAMS.projector - beside_sums) / 2


def test_pipeline_stages_hold_every_parameter_once():
    stages = [local_params(Plan(pp=4), MODEL, stage) for stage in range(4)]
    for tower in ("vision", "projector", "language"):
        assert sum(stage[tower] for stage in stages) == getattr(PARAMS, tower)
    # 16 vision and 36 language blocks on four stages of 13: the second has three of the one and ten of the other.
    assert [stage["vision"] > 0 for stage in stages] == [True, True, False, False]
    assert [stage["language"] > 0 for stage in stages] == [False, True, True, True]
    assert [stage["projector"] > 0 for stage in stages] == [False, True, False, False]
    assert stages[2]["language"] == 13 * LAYER_13B


def test_tied_embeddings_are_copied_to_the_last_pipeline_stage():
    tied = dataclasses.replace(MODEL, language=dataclasses.replace(MODEL.language, tied_embeddings=True))
    total = sum(local_params(Plan(pp=2), tied, stage)["language"] for stage in range(2))
    assert total == count_params(tied).language + tied.language.vocab_size * tied.language.hidden_size


def test_fullest_pipeline_stage_is_reported():
    memory = estimate_rank_memory(Plan(pp=4), MODEL)
    last = local_params(Plan(pp=4), MODEL, stage=3)["language"]
    assert last == 13 * LAYER_13B + 5120 + 32064 * 5120
    assert memory.weights == 2 * last  # as many blocks as any other stage, all of the language tower, and the output


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_plan_holds_on_each_stage_what_the_trainer_puts_there(is_tied):
    from parity import small_shape

    from vlmcourse.models.vlm import build_model
    from vlmcourse.parallel.stages import VLMStage
    from vlmcourse.train.loss import token_loss_sum

    shape = small_shape(is_tied)
    for stage in range(3):
        cut = VLMStage(build_model(shape, seed=0), find_split(Plan(pp=3), shape), stage, token_loss_sum)
        held = sum(parameter.numel() for parameter in cut.parameters())
        assert sum(local_params(Plan(pp=3), shape, stage).values()) == held


# --- Activations and working memory ---------------------------------------------------------------------------------


def language_layer_by_hand(element: int, rotations: bool = True) -> int:
    """Return what a decoder layer of the 13B model keeps: inputs and outputs of norms, q, k, v, and so on."""
    s, h, kv, f, heads = 2048, 5120, 1024, 15104, 40
    tables = 4 * s * 128 * element if rotations else 0  # 16-bit copies, for queries and keys
    return s * element * (4 * h + h + 2 * kv + h + 4 * f) + s * 4 * (heads + 2) + tables


def vision_layer_by_hand(element: int) -> int:
    """Return what a vision layer of the 13B model keeps of one tile, with queries and keys normalised."""
    s, h, f, heads = 1025, 3200, 12800, 25
    return s * element * (4 * h + 2 * h + 3 * h + h + 2 * h + 2 * f) + s * 4 * (heads + 4)


def ends_by_hand(element: int) -> int:
    """Return what the 13B model keeps around its layers, without the loss."""
    s, h, folded, tokens = 2048, 5120, 12800, 256
    pixels, tables = 3 * 448**2 * 4, 2 * s * 128 * 4
    projector = tokens * (2 * folded + 2 * h) * element + 2 * tokens * 4
    placed = tokens * (h * element + 8) + s * 8
    return pixels + tables + projector + placed + 2 * s * h * element + s * 4  # the last norm's input and output


LOGITS_13B = 2048 * 32064
LOSS_13B = 4 * LOGITS_13B + 2048 * 8


def test_activations_with_checkpointing_worked_by_hand():
    s, h, f = 2048, 5120, 15104
    boundaries = 2 * s * h * 36 + 2 * 1025 * 3200 * 16
    again = language_layer_by_hand(2) - 2 * s * h + 2 * s * (3 * f + h)  # and gradients of product, gate, value, input
    logits = 8 * LOGITS_13B + LOSS_13B
    assert logits > again  # so the fullest moment is that of the logits, not of the layer that is made again
    assert estimate_activation_bytes(Plan(), MODEL, Workload(), stage=0) == boundaries + ends_by_hand(2) + logits
    fewer_words = dataclasses.replace(MODEL, language=dataclasses.replace(MODEL.language, vocab_size=8192))
    assert estimate_activation_bytes(Plan(), fewer_words, Workload(), stage=0) == boundaries + ends_by_hand(2) + again


def test_activations_without_checkpointing_worked_by_hand():
    layers = language_layer_by_hand(2) * 36 + vision_layer_by_hand(2) * 16
    plan = Plan(activation_checkpointing=False)
    logits = LOSS_13B + 8 * LOGITS_13B
    assert estimate_activation_bytes(plan, MODEL, Workload(), stage=0) == layers + ends_by_hand(2) + logits


def test_fp32_activations_worked_by_hand():
    layers = language_layer_by_hand(4, rotations=False) * 36 + vision_layer_by_hand(4) * 16
    whole = Plan(precision="fp32", activation_checkpointing=False)
    logits = LOSS_13B + 8 * LOGITS_13B
    assert estimate_activation_bytes(whole, MODEL, Workload(), stage=0) == layers + ends_by_hand(4) + logits
    autocast = Plan(precision="bf16_autocast")  # fp32 weights, but activations are bf16
    assert estimate_activation_bytes(autocast, MODEL, Workload(), stage=0) == estimate_activation_bytes(
        Plan(), MODEL, Workload(), stage=0
    )


def test_activations_scale_with_batch_and_fall_with_tp():
    def estimate(plan):
        return estimate_activation_bytes(plan, MODEL, Workload(), stage=0)

    tables = 2 * 2048 * 128 * 4  # of rotations: one pair for all samples
    assert estimate(Plan(micro_batch_size=3)) == 3 * estimate(Plan()) - 2 * tables
    assert estimate(Plan(tp=4, activation_checkpointing=False)) < estimate(Plan(activation_checkpointing=False))


def test_frozen_vision_tower_keeps_no_activations():
    trained = estimate_activation_bytes(Plan(), MODEL, Workload(), stage=0)
    frozen = estimate_activation_bytes(Plan(frozen=("vision",)), MODEL, Workload(), stage=0)
    assert trained - frozen == 2 * 1025 * 3200 * 16 + 3 * 448**2 * 4


def test_more_tiles_keep_more_and_text_alone_runs_a_blank_one():
    one, two, none = (
        estimate_activation_bytes(Plan(), MODEL, Workload(tiles_per_sample=tiles), stage=0) for tiles in (1, 2, 0)
    )
    projector = 256 * ((2 * 12800 + 2 * 5120) * 2 + 2 * 4 + 5120 * 2 + 8)
    assert two - one == 2 * 1025 * 3200 * 16 + 3 * 448**2 * 4 + projector
    assert none == one
    with pytest.raises(ValueError, match="seq_len = 0"):
        Workload(seq_len=0)


def test_early_pipeline_stages_hold_more_micro_batches():
    loads = [build_run_load(describe_plan(Plan(pp=3), MODEL, Workload()), stage) for stage in range(2)]
    per_layer, tables = 2 * 2048 * 5120, 2 * 2048 * 128 * 4
    vision, pixels = 2 * 1025 * 3200 * 16, 3 * 448**2 * 4
    around = ends_by_hand(2) - tables - pixels - 2 * per_layer - 2048 * 4  # projector and fusion
    # 52 blocks on three stages: all of the vision tower and one language block, then 17, then 18. The pictures of all
    # three micro-batches lie on the first stage all the time.
    assert most_stored(loads[0]) == 3 * (per_layer + vision + around + tables) + 3 * pixels
    assert most_stored(loads[1]) == 2 * (17 * per_layer + tables)


# --- What ZeRO-3 gathers --------------------------------------------------------------------------------------------

PROJECTOR_13B = 2 * 12800 + 12800 * 5120 + 5120 + 5120**2 + 5120
PATCHES_OF_6B = 3 * 14**2 * 3200 + 3200 + 3200 + 1025 * 3200
LAYER_13B = 2 * 5120**2 + 2 * 5120 * 1024 + 3 * 5120 * 15104 + 2 * 5120
ROOT_13B = PATCHES_OF_6B + PROJECTOR_13B + 5120


def gathered(plan: Plan, model=MODEL) -> int:
    return estimate_rank_memory(plan, model).gathered


def tied(model: VLMShape) -> VLMShape:
    return dataclasses.replace(model, language=dataclasses.replace(model.language, tied_embeddings=True))


def test_only_zero_3_gathers_the_root_unit_and_two_layers():
    stages = [gathered(Plan(dp_shard=4, zero_stage=stage)) for stage in (1, 2, 3)]
    assert stages == [0, 0, ROOT_13B * (2 + 2) + LAYER_13B * (2 * 2 + 2)]
    assert gathered(Plan(dp_replicate=4, zero_stage=3)) == 0


def test_26b_gathers_its_embedding_as_the_largest_unit():
    matrix = 92553 * 6144
    layer = 2 * 6144**2 + 2 * 6144 * 1024 + 3 * 6144 * 16384 + 2 * 6144
    projector = 2 * 12800 + 12800 * 6144 + 6144 + 6144**2 + 6144
    root = PATCHES_OF_6B + projector + 6144
    assert matrix > layer
    assert gathered(Plan(dp_shard=8, zero_stage=3), get_model("internvl2-26b")) == root * 4 + matrix * 6


def test_a_tied_embedding_is_part_of_the_root_unit():
    assert gathered(Plan(dp_shard=4, zero_stage=3), tied(MODEL)) == (ROOT_13B + 32064 * 5120) * 4 + LAYER_13B * 6


@pytest.mark.parametrize(
    ("precision", "weight", "gradient"),
    [("bf16_autocast", 4, 4), ("fp32", 4, 4), ("bf16_fp32_grads", 2, 4), ("fp16_mixed", 2, 2)],
)
def test_what_is_gathered_has_the_type_that_weights_are_exchanged_in(precision, weight, gradient):
    expected = ROOT_13B * (weight + gradient) + LAYER_13B * (2 * weight + gradient)
    assert gathered(Plan(dp_shard=4, zero_stage=3, precision=precision)) == expected


def test_gathered_units_shrink_with_tp_and_only_trained_ones_have_a_gradient():
    # Four ways over tp, a language layer is smaller than a whole one of the vision tower.
    vision_layer = 4 * 3200**2 + 3200 + 2 * 3200 * 12800 + 12800 + 3200 + 6 * 3200
    assert LAYER_13B / 4 < vision_layer < LAYER_13B / 2
    beside_sums = 2 * 12800 + 5120
    root = PATCHES_OF_6B + (PROJECTOR_13B - beside_sums) // 4 + beside_sums + 5120
    assert gathered(Plan(dp_shard=2, tp=4, zero_stage=3)) == root * 4 + vision_layer * 6
    frozen = Plan(dp_shard=4, zero_stage=3, frozen=("vision",))
    assert gathered(frozen) == ROOT_13B * 4 - PATCHES_OF_6B * 2 + LAYER_13B * 6
    frozen = Plan(dp_shard=4, zero_stage=3, frozen=("projector", "language"))
    assert gathered(frozen) == ROOT_13B * 2 + PATCHES_OF_6B * 2 + max(LAYER_13B * 4, vision_layer * 6)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_pipeline_stage_gathers_what_stands_on_it(is_tied):
    model = tied(MODEL) if is_tied else MODEL
    plan, matrix = Plan(dp_shard=2, pp=2, zero_stage=3), 32064 * 5120 * is_tied
    first, last = (estimate_gathered_bytes(plan, model, stage) for stage in (0, 1))
    assert first == (PATCHES_OF_6B + PROJECTOR_13B + matrix) * 4 + LAYER_13B * 6
    assert last == (5120 + matrix) * 4 + LAYER_13B * 6


@pytest.mark.parametrize("is_tied", [False, True])
def test_gathered_units_are_those_that_apply_fsdp_makes(is_tied):
    from parity import small_shape

    from vlmcourse.models.vlm import build_model
    from vlmcourse.parallel.fsdp import find_units

    model = build_model(small_shape(is_tied), seed=0)
    units = [sum(p.numel() for p in unit.parameters()) for unit in find_units(model)]
    root = sum(p.numel() for p in model.parameters()) - sum(units)
    plan = Plan(dp_shard=2, zero_stage=3, precision="fp32")
    assert gathered(plan, small_shape(is_tied)) == root * 8 + max(units) * 12


def test_device_total_is_the_sum_of_its_owners_with_the_allowance():
    memory = estimate_rank_memory(Plan(dp_shard=4, zero_stage=3, offload_optimizer=True), MODEL)
    assert memory.device_total == sum(memory.by_owner().values())
    assert memory.allowance == ALLOWANCE_BYTES == 2 * 2**30
    assert "weights 6.5" in str(memory) and "optimizer" not in str(memory)


# --- Devices --------------------------------------------------------------------------------------------------------


def test_devices_give_dense_peaks_and_refuse_what_they_lack():
    assert get_device("a100-40").peak_flop_per_s("bf16") == 312e12
    assert get_device("h100").peak_flop_per_s("bf16") == pytest.approx(989e12, rel=1e-3)  # 1979 with sparsity
    assert get_device("v100-32").memory_bytes == 32 * GB
    assert not get_device("v100-32").supports("bf16")
    with pytest.raises(ValueError, match="no hardware path for 'bf16'"):
        get_device("v100-32").peak_flop_per_s("bf16")


def test_unknown_device_is_an_error_that_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'a100-40'"):
        get_device("a100-41")
    with pytest.raises(ValueError, match="choose one of"):
        get_device("mi300x")


def test_every_device_names_its_source():
    from vlmcourse.planner import DEVICES
    from vlmcourse.presets import CLUSTERS

    papers = ("datasheet", "product brief", "white paper", "taken as")
    assert all(any(paper in device.source for paper in papers) for device in DEVICES.values())
    assert all(cluster.source and cluster.device in DEVICES for cluster in CLUSTERS.values())


def test_policies_of_a_plan_keep_between_everything_and_inputs():
    def activations(**policies: Any) -> int:
        return estimate_activation_bytes(Plan(**policies), MODEL, Workload(), stage=0)

    assert activations(recompute_vision="full", recompute_language="full") == activations()
    everything = estimate_activation_bytes(Plan(activation_checkpointing=False), MODEL, Workload(), stage=0)
    assert activations(recompute_vision="none", recompute_language="none") == everything
    each_other = activations(recompute_language="every:2")
    selective = activations(recompute_language="selective")
    assert activations() < each_other < everything and activations() < selective < everything
    # Exactly: half of the layers whole, inputs of the others, and one layer made again.
    stream, n = 2 * 2048 * 5120, MODEL.language.num_layers
    layer = language_layer_by_hand(2)
    assert each_other - activations() == (layer - stream) * (n // 2)
    # Input, q, k, v, attention's output with its sums, both branches' results, gate and value.
    kept = 3 * stream + 2 * 2048 * (2 * 5120 + 2 * 1024 + 2 * 15104) + 4 * 40 * 2048
    assert selective - activations() == (kept - stream) * n
    with pytest.raises(ValueError, match="recompute_vision"):
        Plan(recompute_vision="all")
