"""Seconds of a decoder's run: hand-worked parts on a device that takes no time, and what is the plan's own time."""

from __future__ import annotations

import dataclasses

import pytest

from vlmcourse.planner.decoder_run import DecoderRun, Software
from vlmcourse.planner.efficiency import Speeds, measured_speeds
from vlmcourse.planner.figure_software import MEGATRON_DEEPSPEED, NanotronConstants, nanotron
from vlmcourse.planner.hardware import get_device
from vlmcourse.planner.layer_times import BACKWARD_LAUNCHES, FORWARD_LAUNCHES, Compute, language_layer_time
from vlmcourse.planner.network import Link
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.recipes import PRECISIONS, TRAINED
from vlmcourse.planner.run_time import estimate_run_time
from vlmcourse.planner.stages import StageSplit
from vlmcourse.planner.step_settings import StepSettings
from vlmcourse.planner.step_time import decoder_alone, estimate_step_time
from vlmcourse.planner.workload import Workload
from vlmcourse.presets import LanguageShape, get_cluster

H100 = get_device("h100")
INSTANT = dataclasses.replace(H100, dense_flop_per_s={"bf16": 1e30}, memory_bytes_per_s=1e30)
"""Computes in no time: what is left is the host's, the network's."""
SHAPE = LanguageShape(vocab_size=32000, num_layers=4, hidden_size=4096, num_heads=32, num_kv_heads=32, mlp_size=11008)
PLAIN = Software(name="plain", head_bytes=10.0)
RUN = DecoderRun(
    shape=SHAPE, precision=PRECISIONS["bf16_mixed"], software=PLAIN, seq_len=2048, grad_accum_steps=2, tp=1
)
SLOW_SPEEDS = Speeds(product_fraction=0.3, attention_fraction=0.1, memory_fraction=0.1)
SLOW_MESSAGES = Link(latency_s=1.0, bytes_per_s=float("inf"))


def change(run: DecoderRun = RUN, **values: object) -> DecoderRun:
    """Return a run with other values, those of its software among them."""
    own = {field.name for field in dataclasses.fields(Software)}
    software = dataclasses.replace(run.software, **{k: v for k, v in values.items() if k in own})  # pyright: ignore
    rest = {name: value for name, value in values.items() if name not in own}
    return dataclasses.replace(run, software=software, **rest)  # pyright: ignore[reportArgumentType]


def seconds(run: DecoderRun, network: Link | None = None) -> float:
    """Return the seconds of a run on a device that computes in no time."""
    return estimate_run_time(run, INSTANT, network).seconds


def test_flops_of_llama_2_7b_are_six_a_weight_and_attention() -> None:
    # 6.607e9 weights without the embedding, and 12 x 32 x 4096 x 2048 of attention.
    run = change(shape=dataclasses.replace(SHAPE, num_layers=32))
    assert run.model_flops_per_token == pytest.approx(6 * 6.607e9 + 3.221e9, rel=1e-3)


def test_a_run_takes_what_the_plan_of_the_same_words_takes() -> None:
    run = change(dp=4, tp=2, zero_stage=3, recompute="full", sequence_parallel=True, micro_batch_size=2)
    plan = Plan(
        dp_shard=4, tp=2, zero_stage=3, precision="bf16_mixed", activation_checkpointing=True, micro_batch_size=2
    )
    workload = Workload(seq_len=2048, tiles_per_sample=0)
    step = estimate_step_time(
        plan, decoder_alone(SHAPE), get_cluster("h100x8"), workload, StepSettings(grad_accum_steps=2)
    )
    found = estimate_run_time(run, H100)
    assert found.seconds == step.seconds
    assert found.tokens_per_s_per_device == pytest.approx(run.step_tokens / 8 / step.seconds)


@pytest.mark.parametrize(
    ("of_run", "of_settings"),
    [
        ({"recompute": "none", "cp": 2}, StepSettings(cp=2)),
        ({"recompute": "selective"}, StepSettings()),
        ({"pp": 2, "schedule": "gpipe"}, StepSettings(schedule="gpipe")),
        ({"tp": 2, "sequence_parallel": False}, StepSettings(sequence_parallel=False)),
    ],
)
def test_each_word_of_a_run_is_that_of_a_plan(of_run: dict[str, object], of_settings: StepSettings) -> None:
    run = change(RUN, grad_accum_steps=4, micro_batch_size=2, host_layer_s=0.01, **of_run)
    plan = Plan(
        tp=run.tp,
        pp=run.pp,
        precision="bf16_mixed",
        activation_checkpointing=False,
        recompute_language="selective" if run.recompute == "selective" else "",
        micro_batch_size=2,
    )
    layers = [2 + run.layers_of_stages()[0], *run.layers_of_stages()[1:]]
    layers[-1] += 1
    split = StageSplit(num_vision_layers=0, num_language_layers=4, layers_per_stage=tuple(layers))
    step = estimate_step_time(
        plan,
        decoder_alone(SHAPE),
        get_cluster("h100x8"),
        Workload(seq_len=2048, tiles_per_sample=0),
        dataclasses.replace(of_settings, grad_accum_steps=4, host_layer_s=0.01),
        split=split if run.pp > 1 else None,
        speeds=SLOW_SPEEDS,
    )
    assert estimate_run_time(run, H100, speeds=SLOW_SPEEDS).seconds == step.seconds
    assert step.seconds != estimate_run_time(run, H100).seconds


def test_a_gelu_mlp_takes_as_long_as_a_gated_one_of_its_flops() -> None:
    gelu, gated = (change(shape=dataclasses.replace(SHAPE, mlp_size=size)) for size in (12288, 8192))
    assert estimate_run_time(change(gelu, mlp="gelu"), H100).seconds == estimate_run_time(gated, H100).seconds


def test_what_no_plan_says_is_refused() -> None:
    with pytest.raises(ValueError, match="no plan has the recipe fp8_autocast"):
        estimate_run_time(change(precision=TRAINED["fp8"]), H100)
    with pytest.raises(ValueError, match="no hardware path for 'bf16'"):
        estimate_run_time(RUN, get_device("v100-32"))
    with pytest.raises(ValueError, match="host_layer_s = -1"):
        StepSettings(host_layer_s=-1)


def test_a_stage_takes_the_longer_of_launching_and_computing() -> None:
    # Four layers, two micro-batches, a second each.
    assert seconds(change(host_layer_s=1.0)) == pytest.approx(8, rel=1e-3)
    again = FORWARD_LAUNCHES / (FORWARD_LAUNCHES + BACKWARD_LAUNCHES)
    assert seconds(change(host_layer_s=1.0, recompute="full")) == pytest.approx(8 * (1 + again), rel=1e-3)
    plain, ahead = (estimate_run_time(change(host_layer_s=host), H100) for host in (0.0, 1e-4))
    assert ahead.seconds == plain.seconds
    waited = estimate_run_time(change(host_layer_s=1.0), H100)
    # Both passes wait for the host, and what they wait is the overhead.
    assert waited.parts["overhead"] == pytest.approx(8 - plain.parts["forward"] - plain.parts["backward"])
    assert waited.seconds == pytest.approx(8 + plain.parts["optimizer"])


def test_the_host_steps_once_for_each_block_the_embedding_and_the_output() -> None:
    assert seconds(change(host_step_layer_s=1.0)) == pytest.approx(4 + 2, rel=1e-3)
    parts = estimate_run_time(change(host_step_layer_s=1e-9), H100).parts
    assert parts["optimizer"] == estimate_run_time(RUN, H100).parts["optimizer"]


def test_parts_of_shards_are_copied_one_by_one_where_zero_1_gathers() -> None:
    def added(dp: int, zero_stage: int) -> float:
        with_copies, without = (
            estimate_run_time(change(shard_copies_per_layer=copies, dp=dp, zero_stage=zero_stage), H100)
            for copies in (2, 0)
        )
        return with_copies.parts["data_parallel"] - without.parts["data_parallel"]

    assert added(dp=8, zero_stage=1) == pytest.approx(2 * 6 * 8 * 6e-6)
    assert added(dp=8, zero_stage=0) == added(dp=1, zero_stage=1) == 0


def test_tensor_ranks_on_two_nodes_pay_a_message_for_each_collective() -> None:
    # Two exchanges forward and two backward, each an all-gather and a reduce-scatter, in each of four layers.
    run = change(tp=16, sequence_parallel=True)
    assert seconds(run, SLOW_MESSAGES) == pytest.approx(2 * 4 * 8, rel=1e-2)
    assert seconds(change(tp=8, sequence_parallel=True), SLOW_MESSAGES) < 0.1


def test_messages_that_block_take_the_time_of_both_stages() -> None:
    run = change(pp=2, dp=8, grad_accum_steps=4)  # stages on two nodes
    # Two on their way at once: the last of four forwards leaves after three seconds.
    assert seconds(run, SLOW_MESSAGES) == pytest.approx(5, rel=1e-2)
    # Each of both stages spends a second on each forward and backward, and waits for one of each.
    assert seconds(change(run, blocking_messages=True), SLOW_MESSAGES) == pytest.approx((4 + 1) * 2, rel=1e-2)
    three = change(run, pp=3, blocking_messages=True)
    # The one in the middle exchanges on both sides.
    assert seconds(three, SLOW_MESSAGES) > 4 * 4


def test_stages_may_be_empty_and_pass_on_what_they_get() -> None:
    shape = dataclasses.replace(SHAPE, vocab_size=131072)
    run = change(shape=shape, pp=4, grad_accum_steps=4, host_layer_s=1.0)
    assert run.layers_of_stages() == (2, 2, 0, 0)
    # Two stages of two layers: a pipeline of two, whatever stands behind.
    assert seconds(run) == pytest.approx((4 + 1) * 2, rel=1e-3)
    # One micro-batch goes through both, over three borders and back.
    one = change(run, dp=8, grad_accum_steps=1)
    assert seconds(one, SLOW_MESSAGES) == pytest.approx(2 * 2 + 6, rel=1e-2)
    with pytest.raises(ValueError, match="each stage needs a layer"):
        StageSplit(num_vision_layers=0, num_language_layers=4, layers_per_stage=(5, 1, 0, 1))
    with pytest.raises(ValueError, match="layers_per_stage"):
        StageSplit(num_vision_layers=0, num_language_layers=4, layers_per_stage=(8, 0, -1, 0), may_be_empty=True)


def test_attention_that_writes_scores_moves_them_in_every_product_and_pass() -> None:
    memory = dataclasses.replace(H100, dense_flop_per_s={"bf16": 1e30}, memory_bytes_per_s=1.0)
    compute = Compute(memory, dataclasses.replace(measured_speeds(), attention_fraction=1.0), "bf16", 2)
    tokens, positions, width = 3 * 2048, 2048, 128
    fused, written = (
        language_layer_time(SHAPE, compute, tokens, tokens * positions, 4, True, fused_attention=kind)
        for kind in (True, False)
    )
    rows = tokens * 32 / 4
    product, scores = rows * width + positions * width + rows * positions, rows * positions
    assert written.forward_s - fused.forward_s == pytest.approx(2 * (2 * product + 2 * scores))
    assert written.input_s - fused.input_s == pytest.approx(2 * (4 * product + 3 * scores))
    assert written.weight_s == fused.weight_s
    fast = dataclasses.replace(H100, memory_bytes_per_s=1e30)
    compute = Compute(fast, Speeds(product_fraction=1.0, attention_fraction=1.0, half_inner=0.0, tile=1), "bf16", 2)
    fused, written = (
        language_layer_time(SHAPE, compute, tokens, tokens * positions, 4, True, fused_attention=kind)
        for kind in (True, False)
    )
    # Scores under the mask are computed too: twice the FLOPs; backward recomputes none.
    assert written.attention_s == pytest.approx(2 * fused.attention_s, rel=1e-3)


def test_megatron_writes_scores_and_blocks() -> None:
    assert not MEGATRON_DEEPSPEED.fused_attention and MEGATRON_DEEPSPEED.blocking_messages
    run = change(micro_batch_size=4)
    with_scores = estimate_run_time(change(run, fused_attention=False), H100).seconds
    assert with_scores > estimate_run_time(run, H100).seconds


def test_nanotrons_host_is_slower_where_a_pipeline_of_tensor_ranks_spans_nodes() -> None:
    constants = NanotronConstants(host_layer_s=0.004, host_rank_s=0.002)

    def host_s(pp: int, tp: int, num_ranks: int) -> float:
        return nanotron(constants, pp=pp, tp=tp, num_ranks=num_ranks).host_layer_s

    software = nanotron(constants, pp=1, tp=2, num_ranks=8)
    assert (software.blocking_messages, software.shard_copies_per_layer) == (True, 6)
    assert software.host_step_layer_s == constants.host_step_layer_s > 0
    assert host_s(2, 4, 16) == pytest.approx(0.004 + 4 * 0.002)
    assert host_s(1, 8, 16) == host_s(2, 1, 16) == host_s(2, 4, 8) == 0.004
