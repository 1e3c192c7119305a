from __future__ import annotations

import dataclasses

import pytest

from vlmcourse.planner import Plan, Workload
from vlmcourse.planner.efficiency import Speeds, measured_speeds
from vlmcourse.planner.fabric import Fabric, exposed_s
from vlmcourse.planner.flops import StepFlops, Work, count_tower_flops
from vlmcourse.planner.hardware import calibrated_device
from vlmcourse.planner.layer_times import Compute, projector_time
from vlmcourse.planner.memory import local_params
from vlmcourse.planner.network import Link
from vlmcourse.planner.schedules import SCHEDULES, ideal_bubble_fraction
from vlmcourse.planner.stage_times import stage_costs
from vlmcourse.planner.stages import split_at, split_evenly
from vlmcourse.planner.step_result import PARTS, StepTime
from vlmcourse.planner.step_settings import Ranks, StepSettings
from vlmcourse.planner.step_time import decoder_alone, estimate_step_time
from vlmcourse.plots.timeline import plot_timeline
from vlmcourse.presets import Cluster, LanguageShape, get_cluster, get_model

TINY, BIG = get_model("tiny"), get_model("internvl2-26b")
H100X8, H100X16 = get_cluster("h100x8"), get_cluster("h100x16")
FREE = Link(latency_s=0.0, bytes_per_s=float("inf"))
FREE_FABRIC = Fabric(node=FREE, network=FREE, devices_per_node=8, call_s=0.0)
PEAK = 1e12
CORE = dataclasses.replace(
    calibrated_device("core", memory_bytes=10**12, flop_per_s=PEAK, memory_bytes_per_s=1e30, link_bytes_per_s=1e30),
)
IDEAL = measured_speeds()
"""All of the peak and memory that takes no time: seconds are FLOPs."""
IMAGES = Workload(seq_len=512, tiles_per_sample=2)


def ideal(plan: Plan, settings: StepSettings | None = None, workload: Workload = IMAGES, model=TINY) -> StepTime:
    return estimate_step_time(plan, model, H100X8, workload, settings, device=CORE, speeds=IDEAL, fabric=FREE_FABRIC)


def fp32(**fields) -> Plan:
    return Plan(precision="fp32", activation_checkpointing=False, **fields)


def executed(flops: StepFlops, attention: float) -> tuple[float, float]:
    """Return FLOPs of forward and backward with a causal mask of which half is computed, and scores computed again."""
    return flops.forward - attention / 2, flops.input_gradients + flops.weight_gradients + (2.5 / 2 - 2) * attention


@pytest.mark.parametrize("frozen", [(), ("vision",), ("vision", "language"), ("language",)])
def test_at_the_peak_a_step_takes_the_flops_that_are_counted_elsewhere(frozen: tuple[str, ...]) -> None:
    """`flops.py` counts them tower by tower from formulas; here they come from single products and their sizes."""
    step = ideal(fp32(micro_batch_size=3, frozen=frozen), StepSettings(grad_accum_steps=2))
    trained = [tower for tower in ("vision", "projector", "language") if tower not in frozen]
    flops = count_tower_flops(TINY, Work.of_sequences([512] * 6, 12), trained)
    pairs = 6 * 512**2
    text = 4 * pairs * TINY.language.num_layers * TINY.language.hidden_size
    images = 4 * 12 * 17**2 * TINY.vision.num_layers * TINY.vision.hidden_size
    forward, backward = executed(flops["language"], text)
    forward += flops["vision"].forward + flops["projector"].forward
    backward += flops["projector"].input_gradients + flops["projector"].weight_gradients
    backward += flops["vision"].input_gradients + flops["vision"].weight_gradients
    backward += 0.0 if "vision" in frozen else (2.5 - 2) * images
    assert step.parts["forward"] * PEAK == pytest.approx(forward)
    assert step.parts["backward"] * PEAK == pytest.approx(backward)
    assert step.seconds == pytest.approx((forward + backward) / PEAK)


def test_recomputation_repeats_the_blocks_that_it_covers() -> None:
    full, none = ideal(Plan(precision="fp32")), ideal(fp32())
    blocks = count_tower_flops(TINY, Work.of_sequences([512], 2), recompute={"vision": "full", "language": "full"})
    again = sum(of_tower.recomputed for of_tower in blocks.values())
    # Counted there without each block's last product, and with attention under the mask.
    again += 512 * 2 * TINY.language.num_layers * TINY.language.hidden_size * TINY.language.mlp_size
    again -= 512**2 * 2 * TINY.language.num_layers * TINY.language.hidden_size
    assert full.parts["recompute"] * PEAK == pytest.approx(again)
    assert full.seconds - none.seconds == pytest.approx(full.parts["recompute"])
    every_third = ideal(dataclasses.replace(fp32(), recompute_language="every:3"))
    assert every_third.parts["recompute"] * 3 == pytest.approx(
        ideal(dataclasses.replace(fp32(), recompute_language="full")).parts["recompute"]
    )
    frozen = ideal(Plan(precision="fp32", frozen=("vision",)))
    assert frozen.parts["recompute"] < full.parts["recompute"]


def test_ranks_that_split_matrices_or_sequences_split_the_flops() -> None:
    whole = ideal(fp32(micro_batch_size=2))
    both = ideal(fp32(micro_batch_size=2, tp=2, vision_tp=2))
    text = ideal(fp32(micro_batch_size=2, tp=2))
    context = ideal(fp32(micro_batch_size=2), StepSettings(cp=2))
    # Projector and patches are not split by tensor ranks.
    assert whole.seconds / 2 < both.seconds < whole.seconds * 0.55
    assert both.seconds < text.seconds < whole.seconds
    assert context.seconds == pytest.approx(whole.seconds / 2)
    assert (both.num_ranks, context.num_ranks) == (2, 2)
    assert both.num_tokens == whole.num_tokens == 1024


def test_more_data_parallel_ranks_take_as_long_and_do_more() -> None:
    one, eight = ideal(fp32()), ideal(fp32(dp_shard=8))
    assert eight.seconds == pytest.approx(one.seconds)
    assert eight.tokens_per_s == pytest.approx(8 * one.tokens_per_s)
    assert eight.tokens_per_s_per_device == pytest.approx(one.tokens_per_s_per_device)
    assert eight.mfu == pytest.approx(one.mfu)


def test_mfu_is_one_where_nothing_is_hidden_by_the_mask_or_repeated() -> None:
    step = ideal(fp32(micro_batch_size=4), workload=Workload(seq_len=1, tiles_per_sample=0))
    # One token has one pair: half of it under the mask and scores again in backward change next to nothing.
    assert step.mfu == pytest.approx(1.0, rel=2e-3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_wait_as_the_formula_says(schedule: str) -> None:
    # Without vision, head and embedding next to nothing: 8 equal blocks. Backward takes twice the forward.
    shape = LanguageShape(
        vocab_size=1, num_layers=8, hidden_size=64, num_heads=4, num_kv_heads=4, mlp_size=171, tied_embeddings=True
    )
    model = decoder_alone(shape)
    num_stages = 4 * SCHEDULES[schedule].stages_per_rank
    cuts = [2 + 8 * stage // num_stages for stage in range(1, num_stages)]
    step = estimate_step_time(
        fp32(pp=4, micro_batch_size=1),
        model,
        H100X8,
        Workload(seq_len=1, tiles_per_sample=0),
        StepSettings(grad_accum_steps=8, schedule=schedule),
        split=split_at(model, cuts),
        device=CORE,
        speeds=IDEAL,
        fabric=FREE_FABRIC,
    )
    assert step.pipeline is not None
    assert step.pipeline.bubble_fraction() == pytest.approx(ideal_bubble_fraction(schedule, 4, 8), abs=2e-3)


def test_parts_add_up_to_the_step_on_every_rank() -> None:
    plans = (
        Plan(dp_shard=4, tp=2, zero_stage=2),
        Plan(dp_shard=8, zero_stage=3, frozen=("vision",)),
        Plan(dp_replicate=2, dp_shard=4, zero_stage=3),
        Plan(dp_shard=2, pp=4, zero_stage=1),
        Plan(dp_shard=8, offload_optimizer=True, zero_stage=2),
    )
    for plan in plans:
        step = estimate_step_time(plan, BIG, H100X8, Workload(seq_len=4096), StepSettings(grad_accum_steps=8))
        assert len(step.ranks) == plan.pp
        for parts in step.ranks:
            assert tuple(parts) == PARTS and min(parts.values()) >= 0
            assert sum(parts.values()) == pytest.approx(step.seconds)
        assert sum(span.end_s == pytest.approx(step.seconds) for span in step.spans()) >= plan.pp
        assert max(span.end_s for span in step.spans()) == pytest.approx(step.seconds)
        plot_timeline({"predicted": step.spans()})


def test_the_parts_of_each_plan_are_those_that_it_has() -> None:
    settings = StepSettings(grad_accum_steps=4)

    def used(plan: Plan, settings: StepSettings = settings) -> set[str]:
        return {name for name, s in estimate_step_time(plan, BIG, H100X8, None, settings).parts.items() if s > 1e-12}

    always = {"forward", "backward", "optimizer"}
    assert used(Plan(activation_checkpointing=False)) == always
    assert used(Plan()) == always | {"recompute"}
    assert used(Plan(tp=2)) == always | {"recompute", "tensor_parallel"}
    assert used(Plan(dp_shard=8)) == used(Plan(dp_shard=8, zero_stage=1)) == always | {"recompute", "data_parallel"}
    assert used(Plan(dp_shard=8, zero_stage=3)) == always | {"recompute", "sharding"}
    assert used(Plan(), StepSettings(cp=2, cp_method="allgather")) == always | {
        "recompute",
        "context_parallel",
        "data_parallel",
    }
    assert "overhead" in used(Plan(), StepSettings(micro_batch_overhead_s=0.1))


def test_data_parallel_ranks_send_the_bytes_of_the_papers() -> None:
    # On a link of 1 byte a second and without computing to hide behind, seconds are bytes.
    link = Fabric(node=Link(latency_s=0.0, bytes_per_s=1.0), devices_per_node=8, call_s=0.0)
    fast = dataclasses.replace(CORE, dense_flop_per_s={"bf16": 1e30})

    def sent(settings: StepSettings | None = None, **fields) -> float:
        plan = Plan(dp_shard=4, **fields)
        step = estimate_step_time(plan, TINY, H100X8, IMAGES, settings, device=fast, speeds=IDEAL, fabric=link)
        return step.seconds

    params = sum(local_params(Plan(), TINY, 0).values())
    once = 2 * params * 3 / 4
    assert sent() == pytest.approx(2 * once) == sent(zero_stage=1) == sent(zero_stage=2)
    assert sent(zero_stage=3) == pytest.approx(3 * once)  # gathered twice, scattered once (F3)
    twice = StepSettings(grad_accum_steps=2)
    assert sent(twice) == pytest.approx(2 * once)
    assert sent(twice, zero_stage=2) == pytest.approx(3 * once)  # shards of gradients are kept, so each is scattered
    assert sent(dataclasses.replace(twice, gradient_sync="last"), zero_stage=2) == pytest.approx(2 * once)
    assert sent(twice, zero_stage=3) == pytest.approx(6 * once)
    replicas = Plan(dp_replicate=2, dp_shard=4, zero_stage=3)
    step = estimate_step_time(replicas, TINY, H100X8, IMAGES, device=fast, speeds=IDEAL, fabric=link)
    assert step.seconds == pytest.approx(3 * once + 2 * params / 4)


def test_context_ranks_hold_shards_as_well() -> None:
    link = Fabric(node=Link(latency_s=0.0, bytes_per_s=1.0), devices_per_node=8, call_s=0.0)
    fast = dataclasses.replace(CORE, dense_flop_per_s={"bf16": 1e30})
    plan, settings = Plan(dp_shard=2, zero_stage=3), StepSettings(cp=2)
    short = Workload(seq_len=2, tiles_per_sample=0)  # so that context ranks send next to nothing else
    step = estimate_step_time(plan, TINY, H100X8, short, settings, device=fast, speeds=IDEAL, fabric=link)
    params = sum(local_params(Plan(), TINY, 0).values())
    assert step.parts["sharding"] == pytest.approx(3 * 2 * params * 3 / 4, rel=0.02)


def test_gradients_of_weights_multiply_over_the_positions() -> None:
    compute = Compute(CORE, dataclasses.replace(IDEAL, half_inner=1000.0), "fp32", 4)
    time = projector_time(TINY, compute, 10)
    rows, wide, width = 40, 256, 96
    flops = 2 * rows * (wide * width + width * width)
    assert time.weight_s * PEAK == pytest.approx(flops * (1 + 1000 / rows))
    assert time.forward_s * PEAK == pytest.approx(
        2 * rows * (wide * width * (1 + 1000 / wide) + width * width * (1 + 1000 / width))
    )


def test_messages_between_stages_take_the_network_where_stages_fill_nodes() -> None:
    settings = StepSettings(grad_accum_steps=2)

    def message_s(plan: Plan, cluster: Cluster) -> float:
        pipeline = estimate_step_time(plan, BIG, cluster, None, settings).pipeline
        assert pipeline is not None
        start_s, end_s = pipeline.messages[0]
        return end_s - start_s

    inside, between = message_s(Plan(pp=2, dp_shard=4), H100X8), message_s(Plan(pp=2, dp_shard=8), H100X16)
    assert between > 5 * inside  # 50 instead of 450 GB/s
    alike = Plan(pp=4, dp_shard=4), Plan(pp=4, dp_shard=2)  # ranks 0-3 to 4-7 are of one node
    assert message_s(alike[0], H100X16) == message_s(alike[1], H100X8)


def test_the_step_ends_when_the_rank_with_most_to_update_has_done_so() -> None:
    plan, settings = Plan(pp=2), StepSettings(grad_accum_steps=4)
    step = estimate_step_time(plan, BIG, H100X8, None, settings, split=split_at(BIG, [90]))
    first, last = step.ranks
    assert first["optimizer"] > 3 * last["optimizer"]
    assert sum(first.values()) == pytest.approx(sum(last.values())) == pytest.approx(step.seconds)
    assert step.pipeline is not None
    assert step.seconds == pytest.approx(step.pipeline.step_s + first["optimizer"])


def test_the_optimizer_reads_and_writes_its_share_of_the_state() -> None:
    params = sum(local_params(Plan(), TINY, 0).values())

    def seconds(**fields) -> float:
        slow = dataclasses.replace(CORE, memory_bytes_per_s=1.0, dense_flop_per_s={"bf16": 1e30})
        step = estimate_step_time(Plan(**fields), TINY, H100X8, IMAGES, device=slow, speeds=IDEAL, fabric=FREE_FABRIC)
        return step.parts["optimizer"]

    # Master weights and two moments in fp32 both ways, the weight written, the gradient for norm, update and zero.
    assert seconds() == pytest.approx(params * (2 * 12 + 2 + 3 * 2))
    assert seconds(dp_shard=4) == pytest.approx(seconds())
    assert seconds(dp_shard=4, zero_stage=1) == pytest.approx(seconds() / 4)


def test_tensor_ranks_send_four_all_reduces_a_block_and_six_with_recomputation() -> None:
    link = Fabric(node=Link(latency_s=0.0, bytes_per_s=1.0), devices_per_node=8, call_s=0.0)
    fast = dataclasses.replace(CORE, dense_flop_per_s={"bf16": 1e30})
    workload = Workload(seq_len=100, tiles_per_sample=0)

    def sent(settings: StepSettings | None = None, **fields) -> float:
        plan = Plan(tp=2, **fields)
        step = estimate_step_time(plan, TINY, H100X8, workload, settings, device=fast, speeds=IDEAL, fabric=link)
        return step.parts["tensor_parallel"]

    one = 2 * 100 * 96 * 2 / 2  # an all-reduce over 2 ranks sends the payload once
    assert sent(activation_checkpointing=False) == pytest.approx(3 * 4 * one)
    assert sent() == pytest.approx(3 * 6 * one)
    assert sent(StepSettings(sequence_parallel=False)) == pytest.approx(3 * 6 * one)


def test_a_faster_network_helps_a_plan_that_spans_nodes_and_no_other() -> None:
    fast = dataclasses.replace(H100X16, network_bytes_per_s=100e9)

    def both(plan: Plan) -> tuple[float, float]:
        settings = StepSettings(grad_accum_steps=8)
        return tuple(estimate_step_time(plan, BIG, cluster, None, settings).seconds for cluster in (H100X16, fast))  # type: ignore[return-value]

    slow_s, fast_s = both(Plan(dp_shard=16, zero_stage=1))
    assert fast_s < slow_s
    slow_s, fast_s = both(Plan(dp_shard=8, zero_stage=1))
    assert fast_s == slow_s
    # Sixteen tensor ranks over two nodes are the plan that nobody should choose.
    settings = StepSettings(grad_accum_steps=8)
    wide, narrow = (
        estimate_step_time(plan, BIG, H100X16, None, settings) for plan in (Plan(tp=16), Plan(tp=8, dp_shard=2))
    )
    assert narrow.tokens_per_s > 1.5 * wide.tokens_per_s


def test_a_pipeline_of_unequal_stages_waits_for_the_slow_one() -> None:
    plan, settings = Plan(pp=2, dp_shard=4, zero_stage=1), StepSettings(grad_accum_steps=16)
    even = split_evenly(BIG, 2)
    step = estimate_step_time(plan, BIG, H100X8, Workload(seq_len=4096, tiles_per_sample=7), settings)
    lone = split_at(BIG, [46])  # all of the vision tower on the first rank
    apart = estimate_step_time(plan, BIG, H100X8, Workload(seq_len=4096, tiles_per_sample=7), settings, split=lone)
    assert even.num_stages == lone.num_stages and step.seconds != apart.seconds
    busiest = min(apart.ranks, key=lambda parts: parts["waiting"])
    assert apart.seconds >= busiest["forward"] + busiest["backward"] + busiest["recompute"]
    fewer = estimate_step_time(plan, BIG, H100X8, None, StepSettings(grad_accum_steps=2))
    more = estimate_step_time(plan, BIG, H100X8, None, StepSettings(grad_accum_steps=64))
    assert more.bubble_fraction < fewer.bubble_fraction and more.tokens_per_s > fewer.tokens_per_s


def test_a_frozen_vision_tower_has_no_backward_and_gets_no_gradient_messages() -> None:
    cuts = [46]
    split = split_at(BIG, cuts)
    plan = Plan(pp=2, frozen=("vision",))
    step = estimate_step_time(plan, BIG, H100X8, None, StepSettings(grad_accum_steps=4), split=split)
    assert step.ranks[0]["backward"] == step.ranks[0]["recompute"] == step.ranks[0]["optimizer"] == 0
    assert step.pipeline is not None
    backward = [
        m
        for m, (_, _, goes_back) in zip(step.pipeline.messages, step.pipeline.order.messages, strict=True)
        if goes_back
    ]
    assert all(start == end for start, end in backward)


def test_micro_batches_of_context_ranks_share_tiles_and_fill_up_with_blanks() -> None:
    compute = Compute(CORE, IDEAL, "fp32", 4)

    def vision_s(tiles: int, cp: int) -> float:
        ranks = Ranks(
            fp32(), StepSettings(cp=cp), TINY, Workload(seq_len=512, tiles_per_sample=tiles), FREE_FABRIC, compute
        )
        return stage_costs(ranks, split_at(TINY, [3]))[0].forward_s

    assert vision_s(4, 2) == pytest.approx(vision_s(2, 1)) == pytest.approx(vision_s(3, 2))


def test_cost_energy_and_throughput_by_hand() -> None:
    step = StepTime(
        seconds=2.0,
        ranks=({"forward": 1.5, "waiting": 0.5},),
        num_samples=10,
        num_tokens=1000,
        num_ranks=4,
        model_flops=2e12,
        peak_flop_per_s=1e12,
        power_w=700.0,
    )
    assert (step.tokens_per_s, step.tokens_per_s_per_device, step.samples_per_s) == (500, 125, 5)
    assert step.mfu == 0.25 and step.bubble_fraction == 0.25
    # A million samples take 200,000 s on 4 devices at 3.60 an hour each: 0.001 a device second.
    assert step.cost_per_million_samples(3.6) == pytest.approx(800)
    assert step.energy_per_million_samples_j() == 200_000 * 4 * 700
    assert step.energy_per_million_samples_j(100.0) == 200_000 * 4 * 100
    assert "MFU 25 %" in str(step)
    with pytest.raises(ValueError, match="price_per_device_hour = -1"):
        step.cost_per_million_samples(-1)
    with pytest.raises(ValueError, match="say what it draws"):
        dataclasses.replace(step, power_w=0.0).energy_per_million_samples_j()


def test_what_is_not_described_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="offload_optimizer with pp = 2"):
        estimate_step_time(Plan(pp=2, offload_optimizer=True), BIG, H100X8)
    with pytest.raises(ValueError, match="spans 2 nodes"):
        estimate_step_time(Plan(dp_shard=16), BIG, H100X8)
    with pytest.raises(ValueError, match="choose one of gpipe"):
        estimate_step_time(Plan(pp=2), BIG, H100X8, None, StepSettings(schedule="2f2b"))
    with pytest.raises(ValueError, match="no hardware path for 'bf16'"):
        estimate_step_time(Plan(), BIG, get_cluster("v100-32x8"))
    with pytest.raises(ValueError, match="cp = 0.*choose every or last"):
        StepSettings(cp=0, gradient_sync="never")
    with pytest.raises(ValueError, match="micro_batch_overhead_s = -1"):
        StepSettings(micro_batch_overhead_s=-1)


def test_devices_that_wait_for_python_take_as_long_as_its_launches() -> None:
    slow = Speeds(product_fraction=1.0, attention_fraction=1.0, launch_s=1.0)
    step = estimate_step_time(fp32(), TINY, H100X8, IMAGES, speeds=slow)
    # 2 vision, 3 language blocks, projector and head: 20 launches forward and 35 backward each.
    assert step.parts["forward"] == pytest.approx(7 * 20, rel=1e-3)
    assert step.parts["backward"] == pytest.approx(7 * 35, rel=1e-3)


def test_on_a_cpu_launches_come_on_top_of_computing() -> None:
    plain = ideal(fp32()).seconds
    slow = dataclasses.replace(IDEAL, launch_s=1.0, launches_add=True)
    step = estimate_step_time(fp32(), TINY, H100X8, IMAGES, device=CORE, speeds=slow, fabric=FREE_FABRIC)
    assert step.seconds == pytest.approx(plain + 7 * (20 + 35))


def test_what_is_lost_beside_sending_counts_for_hidden_time_only() -> None:
    assert exposed_s(4.0, 8.0, 4, 0.5) == pytest.approx(1.0 + 0.5 * 3.0)
