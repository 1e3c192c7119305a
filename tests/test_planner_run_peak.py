"""Peaks of this package's runs: against the ledger of real steps, against sums worked by hand, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_worker

from vlmcourse.config import TrainConfig, parse_config
from vlmcourse.labs.memory_check import CHECKED, OWNERS, TOLERANCE, Comparison, compare, comparison_table
from vlmcourse.parallel.ranks import init_ranks
from vlmcourse.planner.job import Job, describe_config
from vlmcourse.planner.layer_activations import count_language_layer_bytes, count_vision_layer_bytes
from vlmcourse.planner.layer_kept import LayerBytes, Lying, keep_tower, language_layer, vision_layer
from vlmcourse.planner.pipeline_held import list_fullest
from vlmcourse.planner.rank_peak import RankLoad, StageLoad, TowerLoad, find_peak, list_moments, most_stored
from vlmcourse.planner.run_peak import build_run_load, estimate_run_peak
from vlmcourse.planner.shapes import (
    count_language_layer_params,
    count_params,
    count_projector_params,
    count_vision_embedding_params,
)
from vlmcourse.planner.workload import Workload
from vlmcourse.presets import get_model

ON_RANKS = (*("zero1", "fsdp, recomputed", "tp, sequence parallel", "cp, allgather", "pp, 1f1b", "pp, gpipe"),)
"""What is run here on two ranks; all of `CHECKED` is in bench/planner_vs_ledger.py."""
SHAPE = get_model("internvl2-26b")
WORKLOAD = Workload(seq_len=4096, tiles_per_sample=6)


# --- Against the ledger ---------------------------------------------------------------------------------------------


def check_owners(found: Comparison) -> None:
    """Check that every owner is met; state to the byte but for counters of steps, padding and uneven shares."""
    errors = {owner: round(found.error(owner), 4) for owner in OWNERS}
    assert found.worst <= TOLERANCE, f"{found.strategy}, rank {found.rank}: {errors}"
    assert abs(found.peak_error) <= 0.05, f"{found.strategy}, rank {found.rank}: peak {found.peak_error:+.3f}"


@pytest.mark.parametrize("strategy", CHECKED[1])
def test_one_rank_holds_what_the_planner_says_owner_by_owner(strategy: str) -> None:
    check_owners(compare(strategy, CHECKED[1][strategy], init_ranks()))


def test_two_ranks_hold_what_the_planner_says_under_six_strategies(tmp_path: Path) -> None:
    run_worker("memory_worker.py", str(tmp_path), *ON_RANKS)
    for rank in range(2):
        rows = json.loads((tmp_path / f"found{rank}.json").read_text(encoding="utf-8"))
        assert [row["strategy"] for row in rows] == list(ON_RANKS)
        for row in rows:
            check_owners(Comparison(**row))


def test_a_comparison_says_what_is_off() -> None:
    measured: dict[str, float] = dict.fromkeys(OWNERS, 100.0)
    found = Comparison("ddp", 1, measured | {"gradients": 90.0}, measured, 110, 100)
    assert found.worst == pytest.approx(0.1)
    assert found.peak_error == pytest.approx(0.1)
    assert "-10.0%" in comparison_table([found])


# --- Layers on ranks ------------------------------------------------------------------------------------------------


def test_one_rank_keeps_all_that_is_counted_of_a_layer() -> None:
    language, vision = SHAPE.language, SHAPE.vision
    exact = count_language_layer_bytes(language, 2, 128, 2, fused_norms=True)
    assert language_layer(language, 2, 128, 2, Lying()).whole == sum(exact.values())
    of_vision = count_vision_layer_bytes(vision, 3, 1025, 2, fused_norms=True)
    assert vision_layer(vision, 3, 2, Lying()).whole == sum(of_vision.values())


def test_sequence_parallelism_divides_norms_but_not_what_is_gathered_for_products() -> None:
    language = SHAPE.language
    width = 2 * 128 * language.hidden_size * 2

    def kept(**how: Any) -> float:
        return language_layer(language, 2, 128, 2, Lying(attention_tp=4, mlp_tp=4, **how)).whole

    alone, split = kept(), kept(sequence_parallel=True)
    statistics = 2 * 2 * 128 * 4
    assert alone - split == (2 * width + statistics) * 3 / 4
    gathered_again = kept(sequence_parallel=True, keeps_gathered=False)
    assert split - gathered_again == 2 * width * 3 / 4


def test_a_vision_layer_whose_mlp_alone_is_split_keeps_attention_whole() -> None:
    vision, rows = SHAPE.vision, 1025
    whole, mlp_only, both = (
        vision_layer(vision, 1, 2, Lying(attention_tp=attention, mlp_tp=mlp)).whole
        for attention, mlp in ((1, 1), (1, 5), (5, 5))
    )
    width, hidden = rows * vision.hidden_size * 2, rows * vision.mlp_size * 2
    assert whole - mlp_only == pytest.approx(2 * hidden * 4 / 5)
    # Queries, keys, values, attention's output and its sums; before their norms queries and keys once more.
    of_attention = 4 * width + rows * vision.num_heads * 4 + 2 * (width + rows * 4)
    assert mlp_only - both == pytest.approx(of_attention * 4 / 5)


def test_context_parallel_attention_keeps_its_output_twice_and_by_allgather_all_keys() -> None:
    language, tp = SHAPE.language, 2
    lying = Lying(attention_tp=tp, mlp_tp=tp)
    alone, ring, ulysses, gathered = (
        language_layer(language, 1, 128, 2, lying, cp=cp, cp_method=method).whole
        for cp, method in ((1, "ring"), (4, "ring"), (4, "ulysses"), (4, "allgather"))
    )
    width, kv_width = language.hidden_size, language.hidden_size // language.num_heads * language.num_kv_heads
    assert ring - alone == ulysses - alone == 128 * width * 2 / tp
    # Rank r of 4 has the chunks r and 7 - r of 64 positions, and a mask of 2 bytes for each key up to their ends.
    masks = 64 * 64 * (2 + 7) * 2
    assert gathered - ring == 3 * 2 * 128 * kv_width * 2 / tp + masks


def test_frozen_layers_keep_no_inputs_of_products() -> None:
    trained, frozen = (language_layer(SHAPE.language, 1, 128, 2, Lying(), trained=each) for each in (True, False))
    width, mlp = SHAPE.language.hidden_size, SHAPE.language.mlp_size
    assert trained.whole - frozen.whole == 128 * 2 * (2 * width + mlp)


LAYER = LayerBytes(whole=100.0, input=10.0, selective=40.0, backward=7.0)


@pytest.mark.parametrize(
    ("policy", "stored", "again", "longest"),
    [
        ("none", 900, 0, 1),
        ("full", 90, 90, 1),
        ("selective", 360, 60, 1),
        ("sqrt", 30, 290, 3),
        ("every:3", 6 * 100 + 3 * 10, 90, 1),
    ],
)
def test_policies_of_nine_layers_by_hand(policy: str, stored: float, again: float, longest: int) -> None:
    found = keep_tower(policy, 9, LAYER)
    assert (found.stored, found.again, found.longest) == (stored, again, longest)


# --- Moments --------------------------------------------------------------------------------------------------------

LANGUAGE = TowerLoad(name="language", stored=60, temporary=9, unit=5, unit_after=8, share=0.5, gradients=30)
VISION = TowerLoad(name="vision", stored=20, temporary=4, gradients=10)
STAGE = StageLoad(towers=(LANGUAGE, VISION), ends=3, head_kept=7, head_temporary=14, head_unit=2)
LOAD = RankLoad(
    stage=0, weights=100, gradients=40, optimizer=200, stages=(STAGE,), num_microbatches=1, gradients_stay=False
)


def test_moments_of_one_micro_batch_by_hand() -> None:
    found = {peak.moment: peak.owners for peak in list_moments(LOAD)}
    shown = {
        moment: tuple(owners[name] for name in ("gradients", "gathered", "activations", "logits", "temporary"))
        for moment, owners in found.items()
    }
    assert shown == {
        "head": (0, 2, 83, 21, 0),
        "language layer": (0, 5, 83, 0, 9),
        "language, first layers": (15, 5, 53, 0, 9),
        "language, exchange": (0, 8, 53, 0, 0),
        "vision layer": (30, 0, 23, 0, 4),
        "vision, first layers": (30, 0, 23, 0, 4),
        "vision, exchange": (30, 0, 3, 0, 0),
        "gradients": (40, 0, 0, 0, 0),
        "step": (40, 0, 0, 0, 0),
    }
    assert find_peak(LOAD).moment == "head"
    assert find_peak(LOAD).total_bytes == 300 + 2 + 83 + 21


def test_gradients_stay_from_the_second_micro_batch_on() -> None:
    pipeline = dataclasses.replace(LOAD, num_microbatches=4, in_flight=((4,), (3,)))
    heads = [peak.owners for peak in list_moments(pipeline) if peak.moment == "head"]
    assert [owners["gradients"] for owners in heads] == [0, 40]
    assert [owners["activations"] for owners in heads] == [4 * 90 - 7, 3 * 90 - 7]
    last = dataclasses.replace(pipeline, gradients_last=True)
    assert {peak.owners["gradients"] for peak in list_moments(last) if peak.moment == "head"} == {0}


@pytest.mark.parametrize(
    ("schedule", "pp", "num_microbatches", "pp_rank", "expected"),
    [
        ("1f1b", 4, 8, 0, {(4,)}),
        ("1f1b", 4, 8, 3, {(1,)}),
        ("1f1b", 4, 2, 0, {(2,)}),
        ("gpipe", 4, 8, 3, {(8,)}),
        # Narayanan et al. 2021: (pp - rank - 1) 2 + (stages - 1) pp forwards before the first backward, and one more.
        ("interleaved", 2, 4, 0, {(3, 2), (4, 1)}),
        ("dualpipev", 2, 4, 0, {(4, 1)}),
        ("1f1b", 1, 8, 0, {(1,)}),
    ],
)
def test_micro_batches_in_flight(
    schedule: str, pp: int, num_microbatches: int, pp_rank: int, expected: set[tuple[int, ...]]
) -> None:
    assert set(list_fullest(schedule, pp, num_microbatches, pp_rank)) == expected


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "dualpipev"])
def test_more_micro_batches_than_enough_hold_no_more(schedule: str) -> None:
    for rank in range(3):
        assert list_fullest(schedule, 3, 12, rank) == list_fullest(schedule, 3, 15, rank)
        assert list_fullest(schedule, 3, 12, rank) == list_fullest(schedule, 3, 300, rank)


# --- Whole runs -----------------------------------------------------------------------------------------------------


def config_of(**settings: Any) -> TrainConfig:
    """Return a run in 16 bits with fp32 masters; in names "__" stands for a dot."""
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    return parse_config({"train": {"precision": "bf16_master"}}, dotted)


def job_of(world_size: int, **settings: Any) -> Job:
    return describe_config(config_of(**settings), world_size, SHAPE, WORKLOAD)


def test_state_of_26b_over_eight_ranks_is_16_bytes_a_parameter() -> None:
    load = build_run_load(job_of(8, parallel__strategy="fsdp"), 0)
    total = load.weights + load.gradients + load.optimizer
    assert total == pytest.approx(16 * count_params(SHAPE).total / 8, rel=1e-6)


def test_the_update_of_16_bit_weights_costs_copies_of_the_largest_tensors_shard() -> None:
    load = build_run_load(job_of(8, parallel__strategy="fsdp"), 0)
    head = SHAPE.language.vocab_size * SHAPE.language.hidden_size
    assert load.step_temporary == 4 * 4 * head / 8
    in_fp32 = build_run_load(describe_config(parse_config({}), 1, SHAPE, WORKLOAD), 0)
    assert in_fp32.step_temporary == 0


def test_first_ranks_of_a_pipeline_hold_more_micro_batches_and_gpipe_all() -> None:
    deep = {"parallel__pp": 4, "train__accumulation_steps": 8}
    job = job_of(4, **deep)
    assert [build_run_load(job, rank).in_flight for rank in range(4)] == [((4,),), ((3,),), ((2,),), ((1,),)]
    gpipe = job_of(4, **deep, parallel__pp_schedule="gpipe")
    assert build_run_load(gpipe, 3).in_flight == ((8,), (7,))
    by_rank = [estimate_run_peak(job, rank).total_bytes for rank in range(4)]
    assert estimate_run_peak(job).total_bytes == max(by_rank)


def test_every_way_to_split_makes_activations_smaller() -> None:
    one = most_stored(build_run_load(job_of(2, parallel__strategy="ddp"), 0))
    for settings in (
        {"parallel__strategy": "ddp", "parallel__cp": 2},
        {"parallel__tp": 2, "parallel__vision_tp": 1},
        {"parallel__strategy": "ddp", "activations__language": "full"},
        {"parallel__strategy": "ddp", "activations__vision": "full"},
        {"parallel__strategy": "ddp", "model__freeze": ["vision"]},
    ):
        assert most_stored(build_run_load(job_of(2, **settings), 0)) < one, settings
    more = {"parallel__strategy": "ddp", "train__micro_batch_size": 2 * config_of().train.micro_batch_size}
    assert most_stored(build_run_load(job_of(2, **more), 0)) > 1.9 * one


def test_shards_are_gathered_and_whole_gradients_wait_for_the_last_micro_batch() -> None:
    fsdp, several, every, whole = (
        build_run_load(job_of(8, **settings), 0)
        for settings in (
            {"parallel__strategy": "fsdp"},
            {"parallel__strategy": "fsdp", "train__accumulation_steps": 4},
            {"parallel__strategy": "fsdp", "train__accumulation_steps": 4, "parallel__gradient_sync": "every"},
            {"parallel__strategy": "zero2"},
        )
    )
    total = count_params(SHAPE).total
    assert several.gathered - fsdp.gathered == 2 * total
    assert every.gathered == fsdp.gathered < whole.gathered == 2 * total


def test_units_are_gathered_and_their_gradients_exchanged_by_hand() -> None:
    layer = count_language_layer_params(SHAPE.language)
    fsdp, whole, frozen, two_ahead = (
        build_run_load(job_of(8, **settings), 0)
        for settings in (
            {"parallel__strategy": "fsdp"},
            {"parallel__strategy": "zero2"},
            {"parallel__strategy": "fsdp", "model__freeze": ["vision"]},
            {"parallel__strategy": "fsdp", "parallel__prefetch": 2},
        )
    )
    language, vision = fsdp.stages[0].towers
    # Weights of the layer at work and of one fetched ahead, its gradient, and a copy of that in the exchange.
    assert (language.unit, language.unit_after) == (2 * layer * 3, 2 * layer * 4)
    assert whole.stages[0].towers[0].unit == 2 * layer
    assert two_ahead.stages[0].towers[0].unit == 2 * layer * 4
    assert frozen.stages[0].towers[1].unit == vision.unit * 2 / 3
    assert frozen.stages[0].towers[1].gradients == 0
    matrix = SHAPE.language.vocab_size * SHAPE.language.hidden_size
    assert fsdp.stages[0].head_unit == 2 * matrix * 3
    root = count_vision_embedding_params(SHAPE.vision) + count_projector_params(SHAPE) + SHAPE.language.hidden_size
    assert fsdp.gathered == 2 * root
    assert fsdp.late_gradients == 2 * root + 2 * 2 * matrix


def test_state_is_split_over_what_the_strategy_splits_it_over() -> None:
    alone, zero1, cp, ddp = (
        build_run_load(job_of(4, **settings), 0)
        for settings in (
            {"parallel__strategy": "ddp"},
            {"parallel__strategy": "zero1"},
            {"parallel__strategy": "fsdp", "parallel__cp": 2},
            {"parallel__strategy": "ddp", "train__accumulation_steps": 2},
        )
    )
    assert zero1.optimizer == pytest.approx(alone.optimizer / 4, rel=1e-6)
    assert (zero1.weights, zero1.gradients) == (alone.weights, alone.gradients)
    assert cp.weights == pytest.approx(alone.weights / 4, rel=1e-6)  # ranks that share a sequence split state too
    assert alone.gradients_stay and ddp.gradients_stay and not cp.gradients_stay  # DDP's buckets hold them


def test_tensor_parallelism_divides_logits_and_the_projectors_hidden_layer() -> None:
    one, two = (
        build_run_load(job_of(2, **settings), 0).stages[0]
        for settings in ({"parallel__strategy": "ddp"}, {"parallel__tp": 2, "parallel__vision_tp": 1})
    )
    words, rows = 4096 * config_of().train.micro_batch_size, 4096 * config_of().train.micro_batch_size
    per_rank = -(-SHAPE.language.vocab_size // 2)
    assert one.head_temporary == 8 * words * SHAPE.language.vocab_size
    assert two.head_temporary == 8 * words * per_rank
    assert two.head_kept == 4 * words * per_rank + 8 * rows
    width = SHAPE.language.hidden_size
    hidden = 6 * config_of().train.micro_batch_size * 256 * width * 2  # before and after GELU, half of each is gone
    norm = rows * (width * 2 + 4)  # the last norm works on this rank's positions
    assert one.ends - two.ends == hidden + norm / 2


def test_every_rank_of_a_pipeline_has_all_pictures_and_a_buffer_for_each_message() -> None:
    job = job_of(2, parallel__pp=2, train__accumulation_steps=4)
    first, last = (build_run_load(job, rank) for rank in (0, 1))
    size = config_of().train.micro_batch_size
    pictures = 4 * size * 6 * 3 * 448**2 * 4
    messages = last.buffers - 2 * pictures
    assert first.always_stored == pictures and last.always_stored == 0
    assert first.buffers == pictures + messages
    is_text = job.split.fusion_stage == 0
    rows = size * (4096 * SHAPE.language.hidden_size if is_text else 6 * 1025 * SHAPE.vision.hidden_size)
    assert messages == 4 * rows * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"parallel__strategy": "deepspeed-zero2", "train__precision": "fp32"},
            "'deepspeed-zero2': what its engine keeps is not counted",
        ),
        ({"parallel__strategy": "ddp", "parallel__compression": "powersgd"}, "compression = 'powersgd'"),
        ({"parallel__strategy": "ddp", "train__precision": "fp8"}, "train.precision = 'fp8'"),
        ({"parallel__strategy": "fsdp", "offload__parameters": "cpu", "offload__optimizer": "cpu"}, "main memory"),
    ],
)
def test_what_is_not_counted_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job_of(2, **settings)


def test_schedules_that_hold_more_than_their_order_asks_for_say_so() -> None:
    deep = {"parallel__pp": 2, "train__accumulation_steps": 4}
    assert job_of(2, **deep).caveats == ()
    (caveat,) = job_of(2, **deep, parallel__pp_schedule="zbv").caveats
    assert caveat.startswith("zbv: ") and "1.9 times" in caveat


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="pp_rank = 1: must be 0 to 0"):
        estimate_run_peak(job_of(1), 1)
