"""The roofline of a decoder's run: hand-worked parts, and what must grow with what."""

from __future__ import annotations

import dataclasses

import pytest

from vlmcourse.planner.decoder_run import DecoderRun, Software
from vlmcourse.planner.hardware import get_device
from vlmcourse.planner.peak import stage_params
from vlmcourse.planner.recipes import PRECISIONS
from vlmcourse.planner.roofline import Speeds, estimate_step_parts, estimate_tokens_per_s, model_flops_per_token
from vlmcourse.presets import LanguageShape

A100, H100 = get_device("a100-80"), get_device("h100")
SHAPE = LanguageShape(vocab_size=32000, num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32, mlp_size=11008)
RUN = DecoderRun(
    shape=SHAPE,
    precision=PRECISIONS["bf16_mixed"],
    software=Software(name="plain", head_bytes=10.0, layer_s=0.001),
    seq_len=2048,
    grad_accum_steps=8,
)
PLAIN = Speeds(product_fraction=0.5, half_width=0.0, network_latency_s=0.001, hopper_fraction=0.8)


def change(**values: object) -> DecoderRun:
    """Return the run with other values."""
    return dataclasses.replace(RUN, **values)  # pyright: ignore[reportArgumentType]


def test_flops_of_llama_2_7b_are_six_a_weight_and_attention() -> None:
    # 6.607e9 weights without the embedding, and 12 x 32 x 4096 x 2048 of attention.
    assert model_flops_per_token(RUN) == pytest.approx(6 * 6.607e9 + 3.221e9, rel=1e-3)


def test_products_take_model_flops_over_the_rate_and_a_third_more_with_recomputation() -> None:
    products = estimate_step_parts(RUN, A100, PLAIN)["products"]
    assert products == pytest.approx(8 * 2048 * model_flops_per_token(RUN) / (0.5 * 312e12), rel=1e-9)
    head = 8 * 6 * 2048 * SHAPE.vocab_size * 4096 / (0.5 * 312e12)
    again = estimate_step_parts(change(recompute="full"), A100, PLAIN)["products"]
    assert again - head == pytest.approx((products - head) * 4 / 3)
    on_hopper = estimate_step_parts(RUN, H100, PLAIN)["products"]
    assert on_hopper == pytest.approx(products * 312 / (989.5 * 0.8))


def test_a_bubble_is_the_time_of_pp_minus_one_micro_batches() -> None:
    parts = estimate_step_parts(change(pp=4), A100, PLAIN)
    of_micro_batches = sum(parts[name] for name in ("products", "traffic", "tensor_parallel", "launches"))
    assert parts["bubble"] == pytest.approx(3 * of_micro_batches / 8)
    assert parts["launches"] == pytest.approx(8 * max(change(pp=4).layers_of_stages()) * 0.001)
    assert estimate_step_parts(RUN, A100, PLAIN)["bubble"] == 0


def test_gradients_cross_the_link_twice_and_zero_3_shows_only_what_products_do_not_hide() -> None:
    added = estimate_step_parts(change(dp=8), A100, PLAIN)["data_parallel"]
    assert added == pytest.approx(2 * 2 * stage_params(RUN, 0) / (300e9 * PLAIN.link_fraction))
    assert estimate_step_parts(change(dp=8, zero_stage=3), A100, PLAIN)["data_parallel"] == 0
    slow = dataclasses.replace(PLAIN, network_bytes_per_s=1e9)
    split = estimate_step_parts(change(dp=16, zero_stage=3), A100, slow)
    assert split["data_parallel"] == pytest.approx(6 * 8 * stage_params(RUN, 0) / 1e9 - split["products"])


def test_tensor_parallelism_over_nodes_pays_the_network_and_its_latency() -> None:
    near, far = (estimate_step_parts(change(tp=tp), A100, PLAIN)["tensor_parallel"] for tp in (8, 16))
    sent = 8 * 2048 * 4096 * 2
    assert near == pytest.approx(8 * 32 * sent * 7 / 8 / (300e9 * PLAIN.link_fraction))
    assert far == pytest.approx(8 * 32 * (sent * 15 / 16 / PLAIN.network_bytes_per_s + 8 * 0.001))


def test_tokens_a_second_are_of_one_gpu() -> None:
    run = change(dp=4)
    seconds = sum(estimate_step_parts(run, A100, PLAIN).values())
    assert estimate_tokens_per_s(run, A100, PLAIN) == pytest.approx(8 * 2048 / seconds)
    with pytest.raises(ValueError, match="no hardware path for 'bf16'"):
        estimate_tokens_per_s(run, get_device("v100-32"))
