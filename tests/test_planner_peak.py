"""The most memory of a decoder's run: hand-worked sums, relations, and a table's rows that were measured."""

from __future__ import annotations

import dataclasses

import pytest

from vlmcourse.planner.decoder_run import DecoderRun, Software
from vlmcourse.planner.figure_rows import playbook_run
from vlmcourse.planner.layer_activations import count_language_layer_bytes, korthikanti_layer_bytes
from vlmcourse.planner.peak import (
    build_load,
    estimate_peak,
    estimate_state,
    layer_bytes,
    layer_of,
    list_moments,
    stage_params,
)
from vlmcourse.planner.rank_peak import most_stored
from vlmcourse.planner.recipes import PRECISIONS
from vlmcourse.presets import LanguageShape

GIB = 2**30
PLAIN = Software(name="plain", head_bytes=10.0)
SHAPE = LanguageShape(
    vocab_size=1000, num_layers=8, hidden_size=64, num_heads=8, num_kv_heads=4, mlp_size=160, tied_embeddings=False
)
RUN = DecoderRun(
    shape=SHAPE, precision=PRECISIONS["bf16_mixed"], software=PLAIN, seq_len=128, micro_batch_size=2, grad_accum_steps=8
)


def change(**values: object) -> DecoderRun:
    """Return the run with other values."""
    return dataclasses.replace(RUN, **values)  # pyright: ignore[reportArgumentType]


def moments_of(run: DecoderRun, stage: int = 0) -> dict[str, dict[str, int]]:
    """Return bytes by owner of each moment of a stage."""
    return {peak.moment: peak.owners for peak in list_moments(run, stage)}


def test_a_layer_is_what_the_exact_count_of_this_package_says() -> None:
    exact = count_language_layer_bytes(SHAPE, batch_size=2, seq_len=128, element_bytes=2, fused_norms=True)
    assert layer_bytes(RUN) == sum(exact.values()) - exact["rotations, in 16 bits"]


def test_a_packed_product_keeps_its_keys_and_values_once_more() -> None:
    packed = change(software=dataclasses.replace(PLAIN, packed_qkv=True))
    assert layer_bytes(packed) - layer_bytes(RUN) == 256 * 2 * (4 * 8) * 2


def test_a_gelu_layer_is_korthikantis_without_dropout_and_input_gradients() -> None:
    shape = dataclasses.replace(SHAPE, mlp_size=256, num_kv_heads=8)
    run = change(shape=shape, mlp="gelu")
    rows, width = 256, 64
    # Equation 1 has 34 s b h: two of them are the masks of two dropouts. Sums and norms' statistics are not in it.
    sums = rows * (shape.num_heads + 2) * 4
    assert layer_bytes(run) - sums == korthikanti_layer_bytes(128, 2, width, 8) - 2 * rows * width


def test_state_is_18_bytes_with_fp32_gradients_and_buckets_make_it_20() -> None:
    precision = PRECISIONS["bf16_fp32_grads"]
    alone = change(precision=precision)
    assert sum(estimate_state(alone, 0).values()) == 18 * stage_params(alone, 0)
    software = dataclasses.replace(PLAIN, bucket_bytes=2)
    both = change(precision=precision, software=software, dp=4)
    assert sum(estimate_state(both, 0).values()) == 20 * stage_params(both, 0)
    split = dataclasses.replace(both, zero_stage=1)
    assert sum(estimate_state(split, 0).values()) == (2 + 4 + 2 + 12 / 4) * stage_params(split, 0)


def test_whole_gradients_are_late_only_without_buckets() -> None:
    software = dataclasses.replace(PLAIN, bucket_bytes=2, late_gradient_bytes=2)
    late = {dp: moments_of(change(software=software, dp=dp))["gradients"]["temporary"] for dp in (1, 2)}
    assert late == {1: 2 * stage_params(RUN, 0), 2: 0}


def test_tensor_parallelism_with_sequence_parallelism_divides_activations_and_alone_leaves_the_streams() -> None:
    whole = layer_bytes(RUN)
    assert layer_bytes(change(tp=4, sequence_parallel=True)) == whole / 4
    streams = 256 * (4 * 64 * 2 + 2 * 4)  # inputs and outputs of two norms, and their statistics
    assert layer_bytes(change(tp=4)) == streams + (whole - streams) / 4
    assert layer_bytes(change(cp=2)) == whole / 2


def test_the_first_stage_holds_most_micro_batches_and_gpipe_all() -> None:
    run = change(pp=4)
    assert [run.micro_batches_in_flight(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert change(pp=4, grad_accum_steps=2).micro_batches_in_flight(0) == 2
    assert change(pp=4, schedule="gpipe").micro_batches_in_flight(3) == 8
    first, second = (build_load(run, stage) for stage in (0, 1))
    of_layer, stream = layer_bytes(run), 256 * 64 * 2
    assert (most_stored(first), most_stored(second)) == (4 * (3 * of_layer + stream), 3 * (2 * of_layer + stream))


def test_recomputation_keeps_inputs_and_needs_one_layer_again() -> None:
    full = change(recompute="full")
    none_kept, full_kept = (most_stored(build_load(run, 0)) for run in (RUN, full))
    assert full_kept == 9 * 256 * 64 * 2
    selective = most_stored(build_load(change(recompute="selective"), 0))
    assert full_kept < selective < none_kept
    again = {run.recompute: moments_of(run)["language layer"]["temporary"] for run in (RUN, full)}
    assert again["full"] - again["none"] == layer_bytes(RUN) - 256 * 64 * 2


def test_the_fullest_stage_is_found_and_stages_are_cut_by_cost() -> None:
    run = change(pp=4)
    peaks = [estimate_peak(run, stage).total_bytes for stage in range(4)]
    assert estimate_peak(run).total_bytes == max(peaks)
    assert sum(run.layers_of_stages()) == 8
    # The output matrix costs as much as 64,000 / 43,136 = 1.5 layers of these: 9.5 in all, 2.4 a stage.
    assert run.layers_of_stages() == (3, 2, 3, 0)


def test_gathered_inputs_are_kept_only_by_software_that_does() -> None:
    keeps = dataclasses.replace(PLAIN, keeps_gathered=True)
    run = change(tp=4, sequence_parallel=True)
    kept = dataclasses.replace(run, software=keeps)
    more = estimate_peak(kept).total_bytes - estimate_peak(run).total_bytes
    assert more == 8 * 2 * 256 * 64 * 2 * 3 // 4
    without = [dataclasses.replace(each, sequence_parallel=False) for each in (kept, run)]
    assert layer_of(without[0]) == layer_of(without[1])


@pytest.mark.parametrize(
    ("plan", "measured_gib"),
    [
        # Rows of the playbook's table, as they stand in it: model, tp, pp, dp, micro-batch, accumulation, ZeRO stage.
        (("1B", 1, 1, 32, 1, 8, 0), 36.7),
        (("3B", 8, 1, 4, 1, 64, 0), 12.3),
        (("8B", 8, 1, 2, 8, 16, 0), 66.5),
        (("8B", 32, 2, 8, 16, 2, 1), 16.4),
    ],
)
def test_measured_peaks_are_met_within_five_per_cent(
    plan: tuple[str, int, int, int, int, int, int], measured_gib: float
) -> None:
    names = ("model", "tp", "pp", "dp", "micro_batch", "grad_accum", "zero_stage")
    run = playbook_run({name: str(value) for name, value in zip(names, plan, strict=True)})
    assert estimate_peak(run, 0).total_bytes / GIB == pytest.approx(measured_gib, rel=0.05)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 3}, "tp = 3: must divide num_heads = 8"),
        ({"pp": 9}, "pp = 9: at most num_layers = 8"),
        ({"mlp": "relu"}, "mlp = 'relu': choose one of swiglu, gelu"),
        ({"dp": 0}, "dp"),
        ({"zero_stage": 4}, "zero_stage = 4: choose one of 0, 1, 2, 3"),
    ],
)
def test_impossible_runs_are_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change(**values)


def test_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stage = 1: must be 0 to 0"):
        estimate_peak(RUN, 1)
