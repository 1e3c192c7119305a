"""Number formats, loss scaler, bf16 optimizer, fp8, the number microscope and the NaN finder, in one process."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from precision_cases import ALONE, build, precision_config
from torch import nn

from vlmcourse.labs import ch03
from vlmcourse.monitor.exponents import count_exponents, gradient_exponents
from vlmcourse.monitor.ledger import measure_ledger
from vlmcourse.monitor.op_dtypes import OpPolicy, OpRecorder, measure_autocast_policy
from vlmcourse.planner import TRAINED, choose_precision, get_device, precision_problem
from vlmcourse.planner.formats import FORMATS, FloatFormat
from vlmcourse.precision_rules import PRECISIONS
from vlmcourse.train import fp8, precision
from vlmcourse.train.fp8 import Fp8Linear, convert_to_fp8, from_fp8, to_fp8
from vlmcourse.train.low_precision import LowPrecisionAdamW
from vlmcourse.train.nan_finder import find_nonfinite
from vlmcourse.train.rounding import rounding_key, stochastic_round
from vlmcourse.train.scaler import LossScaler

CPU = torch.device("cpu")
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e5m2": torch.float8_e5m2,
    "e4m3fn": torch.float8_e4m3fn,
}


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.parametrize("name", DTYPES)
def test_a_format_has_the_numbers_that_torch_says(name: str) -> None:
    spec, info = FORMATS[name], torch.finfo(DTYPES[name])
    assert (spec.max, spec.smallest_normal, spec.epsilon) == (info.max, info.smallest_normal, info.eps)
    bits = torch.tensor([1], dtype={8: torch.uint8, 16: torch.int16, 32: torch.int32}[spec.bits])
    assert spec.smallest_subnormal == float(bits.view(DTYPES[name]).double())


@pytest.mark.parametrize("name", DTYPES)
def test_a_format_rounds_as_torch_casts(name: str) -> None:
    spec, draw = FORMATS[name], random.Random(3)
    numbers = [math.copysign(2 ** draw.uniform(-30, 20), draw.random() - 0.5) for _ in range(500)]
    numbers += [spec.smallest_subnormal / 2, spec.smallest_subnormal * 0.51, 1 + spec.epsilon / 2, spec.max, 0.0]
    inside = [x for x in numbers if abs(x) <= spec.max]
    cast = torch.tensor(inside, dtype=torch.float64).to(DTYPES[name]).double().tolist()
    assert [spec.round(x) for x in inside] == cast
    assert len(inside) > 200
    outside = spec.round(spec.max * 1.1)
    assert math.isinf(outside) if spec.has_infinity else math.isnan(outside)


def test_facts_about_formats() -> None:
    fp16, bf16, e4m3 = FORMATS["fp16"], FORMATS["bf16"], FORMATS["e4m3fn"]
    assert (fp16.max, fp16.smallest_subnormal) == (65504, 2**-24)
    assert (fp16.significant_bits, bf16.significant_bits) == (11, 8)
    assert (round(fp16.decimal_digits, 1), round(bf16.decimal_digits, 1)) == (3.3, 2.4)
    assert (e4m3.max, FORMATS["e5m2"].max) == (448, 57344)
    tf32, fp32 = FORMATS["tf32"], FORMATS["fp32"]  # the range of fp32 with the digits of fp16
    assert (tf32.significant_bits, tf32.max_exponent) == (fp16.significant_bits, fp32.max_exponent)
    assert fp16.round(1e-8) == 0  # F9
    assert [bf16.fate(x) for x in (1e-8, 1e-39, 1e-45, 1e39)] == ["normal", "subnormal", "zero", "overflow"]


@pytest.mark.parametrize(
    ("exponent_bits", "mantissa_bits", "words"),
    [
        (1, 3, "exponent_bits = 1: must be a whole number, 2 or greater"),
        (5, 0, "mantissa_bits = 0"),
        (5, -1, "mantissa_bits = -1"),
        (12, 3, "exponent_bits = 12: must be at most 11"),
        (8, 53, "mantissa_bits = 53: must be at most 52"),
    ],
)
def test_a_format_without_normal_numbers_or_beyond_fp64_is_refused(
    exponent_bits: int, mantissa_bits: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        FloatFormat(name="odd", exponent_bits=exponent_bits, mantissa_bits=mantissa_bits)


def test_the_smallest_and_the_largest_format_have_their_numbers() -> None:
    small = FloatFormat(name="e2m1", exponent_bits=2, mantissa_bits=1, has_infinity=False)
    assert (small.max, small.smallest_normal, small.smallest_subnormal) == (4, 1, 0.5)
    fp64, info = FloatFormat(name="fp64", exponent_bits=11, mantissa_bits=52), torch.finfo(torch.float64)
    assert (fp64.max, fp64.smallest_normal, fp64.epsilon) == (info.max, info.smallest_normal, info.eps)
    with pytest.raises(ValueError, match="exponent_bits = 11: must be at most 10"):
        FloatFormat(name="odd", exponent_bits=11, mantissa_bits=3, has_infinity=False)


def test_the_scaler_is_torchs_step_by_step() -> None:
    """Scale, skipped steps, unscaled gradients and weights, over steps of which some overflow."""
    draw = torch.Generator().manual_seed(5)
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    scaler = LossScaler(ALONE, growth_interval=3, min_scale=0.0)
    reference = torch.amp.GradScaler("cpu", growth_interval=3)
    scales, num_skipped = [], 0
    for step in range(40):
        x = torch.randn(2, 4, generator=draw)
        factor = torch.inf if step in (4, 5, 11, 29) else 1.0
        for model, scale in ((ours, scaler.scale), (theirs, reference.get_scale())):
            model.zero_grad()
            ((model(x).square().sum()) * scale).backward()
            gradient_of(model.weight)[0, 0] *= factor
        may_step = scaler.unscale(ours)
        reference.scale(torch.ones(()))  # makes its scale a tensor, as its own users do
        reference.unscale_(optimizers[1])
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(*(gradient_of(p).nan_to_num(7, 7, 7) for p in (a, b))), step
        before = theirs.bias.clone()
        if may_step:
            optimizers[0].step()
        reference.step(optimizers[1])
        assert may_step == (not torch.equal(before, theirs.bias))
        scaler.update()
        reference.update()
        assert scaler.scale == reference.get_scale()
        assert torch.equal(ours.weight, theirs.weight)
        scales.append(scaler.scale)
        num_skipped += not may_step
    assert num_skipped == scaler.num_skipped == 4
    assert len(set(scales)) > 5


def test_the_scaler_starts_at_2_to_the_16_grows_after_2000_steps_and_never_falls_below_1() -> None:
    scaler = LossScaler(ALONE)
    assert (scaler.scale, scaler.growth_interval, scaler.min_scale) == (2.0**16, 2000, 1.0)
    for _ in range(1999):
        scaler.update()
    assert scaler.scale == 2.0**16
    scaler.update()
    assert scaler.scale == 2.0**17
    for _ in range(20):
        assert not scaler.unscale([torch.tensor([torch.nan])])
        scaler.update()
    assert scaler.scale == 1.0


def test_the_scale_ends_where_fp32_ends() -> None:
    scaler, seen = LossScaler(ALONE, initial_scale=2.0**126, growth_interval=1), []
    for _ in range(3):
        scaler.update()
        seen.append(scaler.scale)
    assert seen == [2.0**127] * 3


def test_a_scaler_goes_on_from_its_state_and_a_disabled_one_does_nothing() -> None:
    scaler = LossScaler(ALONE, growth_interval=5)
    scaler.unscale([torch.tensor([torch.inf])])
    scaler.update()
    scaler.unscale([torch.ones(1)])
    scaler.update()
    other = LossScaler(ALONE, growth_interval=5)
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert other.state_dict() == scaler.state_dict()
    off = LossScaler(ALONE, enabled=False)
    gradient = torch.tensor([torch.inf])
    assert off.unscale([gradient]) and off.scale == off.grad_scale == 1
    off.update()
    assert off.state_dict() == {}


@pytest.mark.parametrize("options", [{"growth_factor": 1.0}, {"backoff_factor": 1.5}, {"growth_interval": 0}])
def test_a_scaler_that_cannot_work_is_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="must"):
        LossScaler(ALONE, **options)


def test_stochastic_rounding_is_unbiased_and_gives_neighbors_only() -> None:
    low, high = 1.0, 1.0 + 2**-7
    for fraction in (0.05, 0.3, 0.5, 0.9):
        x = torch.full((40_000,), low + fraction * (high - low))
        for sign in (1, -1):
            rounded = stochastic_round(sign * x, rounding_key(0, 1, f"{fraction}")).float() * sign
            assert set(rounded.tolist()) == {low, high}
            share = float((rounded == high).float().mean())
            assert share == pytest.approx(fraction, abs=5 * math.sqrt(0.25 / 40_000))


def test_stochastic_rounding_keeps_what_bf16_can_hold_and_what_is_no_number() -> None:
    x = torch.tensor([1.0, -2.5, 0.0, torch.inf, -torch.inf, 2.0**-130])
    assert torch.equal(stochastic_round(x, 7), x.bfloat16())
    assert stochastic_round(torch.tensor([torch.nan]), 7).isnan().all()


def test_roundings_differ_by_step_name_and_place_and_repeat() -> None:
    x = torch.full((64,), 1.003)
    keys = [rounding_key(0, 1, "a"), rounding_key(0, 2, "a"), rounding_key(0, 1, "b"), rounding_key(1, 1, "a")]
    draws = [stochastic_round(x, key) for key in keys]
    assert all(not torch.equal(draws[0], other) for other in draws[1:])
    assert torch.equal(draws[0], stochastic_round(x, keys[0]))
    part = stochastic_round(x[10:20], keys[0], torch.arange(10, 20))
    assert torch.equal(part, draws[0][10:20])  # a shard rounds as that part of the whole


def test_master_copies_make_bf16_training_follow_fp32() -> None:
    torch.manual_seed(0)
    start = torch.randn(50, 3).bfloat16()
    twin, low = nn.Parameter(start.float()), nn.Parameter(start.clone())
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    reference = torch.optim.AdamW([twin], **options)
    ours = LowPrecisionAdamW([low], keeps_master=True, **options)
    for step in range(30):
        gradient = torch.randn(50, 3, generator=torch.Generator().manual_seed(step)).bfloat16()
        twin.grad, low.grad = gradient.float(), gradient
        reference.step()
        ours.step()
    assert torch.allclose(ours.state[low]["master"], twin, rtol=1e-6, atol=1e-7)
    assert torch.equal(low, ours.state[low]["master"].bfloat16())


def test_pure_bf16_moves_where_rounding_to_nearest_stands_still() -> None:
    low = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
    optimizer = LowPrecisionAdamW([low], keeps_master=False, lr=1e-4)
    for _ in range(20):
        low.grad = torch.ones_like(low)
        optimizer.step()
    # 20 updates of 1e-4 each; half a step of bf16 below 1 is 2e-3, so rounding to nearest would keep 1.
    assert float(low.detach().float().mean()) == pytest.approx(1 - 20e-4, abs=3e-4)
    assert {state.dtype for key, state in optimizer.state[low].items() if key != "step"} == {torch.bfloat16}
    with pytest.raises(ValueError, match="cast them first"):
        LowPrecisionAdamW([nn.Parameter(torch.ones(1))], keeps_master=False)


@pytest.mark.parametrize("keeps_master", [True, False])
def test_a_step_is_adamws_in_weight_and_moments_with_decay_and_a_large_eps(keeps_master: bool) -> None:
    """On the mean over many equal elements; half a step of bf16 is up to 0.4 %, and decay and eps do 5 % each."""
    options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 0.5, "weight_decay": 0.5}
    twin, low = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
    twin.grad, low.grad = torch.full_like(twin, 0.5), torch.full_like(low, 0.5)
    reference = torch.optim.AdamW([twin], **options)
    ours = LowPrecisionAdamW([low], keeps_master=keeps_master, **options)
    reference.step()
    ours.step()
    state, expected = ours.state[low], reference.state[twin]
    stored = state["master"] if keeps_master else low.detach()
    pairs = [(stored, twin.detach()), *((state[key], expected[key]) for key in ("exp_avg", "exp_avg_sq"))]
    for tensor, right in pairs:
        assert float(tensor.double().mean()) == pytest.approx(float(right), rel=3e-4)
    if keeps_master:
        return
    went_up = [(tensor > tensor.min()).tolist() for tensor, _ in pairs]
    for one, other in itertools.combinations(
        went_up, 2
    ):  # with the same bits for two, one of the four would be missing
        assert len(set(zip(one, other, strict=True))) == 4


def test_pure_bf16_rounds_each_step_anew() -> None:
    """Each element alone follows the true line; with one draw for all steps few would run away and the rest stand."""
    low, lr, num_steps, spacing = nn.Parameter(torch.ones(64, dtype=torch.bfloat16)), 4e-4, 100, 2**-8
    optimizer = LowPrecisionAdamW([low], keeps_master=False, lr=lr, betas=(0.0, 0.0))
    for _ in range(num_steps):
        low.grad = torch.ones_like(low)
        optimizer.step()
    moved = 1 - low.detach().float()
    chance = lr / spacing  # of a step down, in which the weight moves by `spacing`
    deviation = spacing * math.sqrt(num_steps * chance * (1 - chance))
    assert float((moved - num_steps * lr).abs().max()) < 5 * deviation < 0.06
    assert bool((moved > 0).all())  # for one element to stand still through 100 draws: 2e-5


@pytest.mark.parametrize("name", PRECISIONS)
def test_ledger_and_planner_agree_on_the_bytes_of_every_precision(name: str) -> None:
    trainer = build(precision_config("single", name), ALONE)
    trainer.train_step()
    num, num_tensors = sum(p.numel() for p in trainer.model.parameters()), len(list(trainer.model.parameters()))
    ledger, recipe = measure_ledger(trainer.model, trainer.optimizer), TRAINED[name]
    assert ledger.weights_bytes == num * recipe.weight_bytes
    assert ledger.gradients_bytes == num * recipe.gradient_bytes
    assert ledger.optimizer_bytes - 4 * num_tensors == num * (recipe.master_bytes + recipe.moment_bytes)
    assert recipe.state_bytes == (8 if name == "bf16_pure" else 16)


def test_fp8_casts_scale_the_largest_element_to_the_largest_number() -> None:
    above = torch.tensor([1e-9, -3e-8, 2e-7, 0.0])
    for x, (dtype, name) in itertools.product(
        (above, -above), ((torch.float8_e4m3fn, "e4m3fn"), (torch.float8_e5m2, "e5m2"))
    ):
        numbers, scale = to_fp8(x, dtype)
        assert numbers.dtype == dtype and float(numbers.float().abs().max()) == FORMATS[name].max
        assert float((from_fp8(numbers, scale) - x).abs().max()) <= FORMATS[name].epsilon * 2e-7
    numbers, scale = to_fp8(torch.zeros(3), torch.float8_e4m3fn)
    assert scale == 1 and not numbers.float().any()


def test_an_fp8_layer_multiplies_what_its_casts_leave() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(16, 8)
    layer = copy.deepcopy(plain)
    layer.__class__ = Fp8Linear
    x, given = torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 5, 8)
    y = layer(x)
    y.backward(given)
    x8, w8 = (from_fp8(*to_fp8(t.detach(), torch.float8_e4m3fn)) for t in (x, plain.weight))
    g8 = from_fp8(*to_fp8(given, torch.float8_e5m2))
    assert torch.allclose(y, x8 @ w8.T + plain.bias, atol=1e-6)
    assert torch.allclose(gradient_of(x), g8 @ w8, atol=1e-6)
    assert torch.allclose(gradient_of(layer.weight), torch.einsum("bso,bsi->oi", g8, x8), atol=1e-5)
    assert torch.allclose(gradient_of(layer.bias), given.sum((0, 1)), atol=1e-6)
    assert not torch.allclose(y, plain(x), atol=1e-6)


def test_fp8_converts_the_blocks_and_leaves_the_output_matrix() -> None:
    trainer = build(precision_config("single", "fp8"), ALONE)
    kinds = {name: type(m) for name, m in trainer.model.named_modules() if isinstance(m, nn.Linear)}
    assert kinds.pop("language.lm_head") is nn.Linear
    assert set(kinds.values()) == {Fp8Linear} and len(kinds) > 20
    with pytest.raises(ValueError, match="nothing to convert"):
        convert_to_fp8(nn.Sequential(nn.GELU()), CPU)


def test_torchao_is_called_by_its_names_and_pads_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signatures of `torchao.float8`, whose layers need a GPU."""

    @dataclass(frozen=True)
    class Float8LinearConfig:
        pad_inner_dim: bool = False

    class Float8Linear(nn.Linear):
        pass

    used: list[Float8LinearConfig] = []

    def convert_to_float8_training(
        module: nn.Module,
        *,
        module_filter_fn: Callable[[nn.Module, str], bool],
        config: Float8LinearConfig,
    ) -> nn.Module:
        used.append(config)
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear) and module_filter_fn(layer, name):
                layer.__class__ = Float8Linear
        return module

    float8 = ModuleType("torchao.float8")
    float8.__dict__.update(Float8LinearConfig=Float8LinearConfig, convert_to_float8_training=convert_to_float8_training)
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
    monkeypatch.setattr(fp8, "has_real_fp8", lambda device: True)
    model = nn.ModuleDict({"up": nn.Linear(64, 32), "odd": nn.Linear(32, 24), "lm_head": nn.Linear(32, 64)})
    assert convert_to_fp8(model, torch.device("cuda", 0)) == ["up", "odd"]
    assert [type(layer) for layer in model.values()] == [Float8Linear, nn.Linear, nn.Linear]
    assert used == [Float8LinearConfig(pad_inner_dim=True)]


@pytest.mark.parametrize(
    ("capability", "installed", "real"),
    [((9, 0), True, True), ((8, 9), True, True), ((9, 0), False, False), ((8, 0), True, False)],
)
def test_real_fp8_needs_a_gpu_that_has_it_and_torchao(
    capability: tuple[int, int],
    installed: bool,
    real: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    assert fp8.has_real_fp8(torch.device("cuda", 0)) == real
    assert ("torchao is not installed" in caplog.text) == (not installed)
    assert not fp8.has_real_fp8(CPU)


@pytest.mark.parametrize("name", ["bf16", "bf16_pure", "bf16_master", "fp8"])
def test_a_gpu_without_bf16_is_told_to_take_fp16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(
        ValueError, match="Tesla V100: it has no native bf16.*choose fp16, which brings its loss scaler"
    ):
        precision.check_precision(name, torch.device("cuda", 0))
    precision.check_precision("fp16", torch.device("cuda", 0))


def test_the_planner_gives_a_v100_fp16_and_newer_devices_bf16() -> None:
    assert [choose_precision(get_device(d)) for d in ("v100-32", "t4-16", "a100-40", "h100")] == ["fp16"] * 2 + [
        "bf16"
    ] * 2
    assert precision_problem("bf16", get_device("v100-32")).endswith(
        "choose 'fp16', which brings its loss scaler, or 'fp32'"
    )
    assert "choose 'bf16' or 'fp32'" in precision_problem("fp8", get_device("a100-80"))
    assert precision_problem("fp8", get_device("h100")) == precision_problem("fp16", get_device("v100-32")) == ""
    with pytest.raises(ValueError, match="choose one of"):
        precision_problem("int8", get_device("h100"))


def test_the_doctor_sends_a_v100_to_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlmcourse.commands import doctor

    for name, value in (("is_available", True), ("device_count", 1), ("get_device_capability", (7, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    v100 = SimpleNamespace(name="Tesla V100", total_memory=32 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: v100)
    finding = next(f for f in doctor.check_backends() if f.name == "gpu 0")
    assert finding.state == "note" and "train.precision = 'fp16' (with a loss scaler) or 'fp32'" in finding.fix


def test_exponents_are_counted_and_their_fates_are_those_of_the_numbers() -> None:
    found = count_exponents(torch.tensor([1.0, 1.5, -2.0, 0.75, 0.0, torch.inf, 2.0**-140]))
    assert found.counts == {-140: 1, -1: 1, 0: 2, 1: 1}
    assert (found.num_zero, found.num_nonfinite) == (1, 1)
    torch.manual_seed(0)
    numbers = torch.randn(4000) * torch.exp2(torch.randint(-35, 20, (4000,)).float())
    for name in ("fp16", "bf16", "e5m2", "e4m3fn"):
        spec, fates = FORMATS[name], count_exponents(numbers).fates(FORMATS[name])
        for fate in fates:
            right = sum(spec.fate(x) == fate for x in numbers.tolist()) / 4000
            assert fates[fate] == pytest.approx(right, abs=0.01), (name, fate)
    assert count_exponents(numbers).scaled(7).counts == count_exponents(numbers * 128).counts


def test_gradients_are_counted_by_tower() -> None:
    trainer = build(precision_config("single", "fp32"), ALONE)
    counted: dict = {}
    trainer.before_update.append(lambda t: counted.update(gradient_exponents(t.model)))
    trainer.train_step()
    for tower in ("vision", "projector", "language"):
        found = counted[tower]
        num = sum(p.numel() for name, p in trainer.model.named_parameters() if name.startswith(tower))
        assert found.num_nonzero + found.num_zero == num and not found.num_nonfinite


def test_a_step_is_recorded_with_its_formats() -> None:
    trainer = build(precision_config("single", "bf16"), ALONE)
    with OpRecorder() as recorder:
        trainer.train_step()
    written = {(c.phase, c.module.partition(".")[0], c.op, c.output) for c in recorder.calls}
    assert ("forward", "language", "mm", "bf16") in written or ("forward", "language", "addmm", "bf16") in written
    assert ("backward", "vision", "mm", "bf16") in written
    assert not any(
        phase == "forward" and op in ("mm", "addmm", "convolution") and out == "fp32" for phase, _, op, out in written
    )
    assert any(phase == "loss" and out == "fp32" for phase, _, _, out in written)
    assert {out for phase, _, op, out in written if phase == "update" and "adamw" in op} == {"fp32"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_policy_of_autocast_is_measured(dtype: torch.dtype) -> None:
    policy = {row.op: row for row in measure_autocast_policy(dtype)}
    assert all(policy[op].policy == "lowers" for op in ("linear", "matmul", "conv2d", "attention"))
    assert policy["add"].policy == policy["silu"].policy == "keeps"
    assert OpPolicy("log", from_fp32="fp32", from_low="fp32").policy == "raises"  # GPUs have such operations


FOUND = {
    "fp16 overflow in attention logits": ("forward", "language.blocks.1.attention", "bmm", 4),
    "log of zero behind + 1e-8": ("loss", "", "log", 4),
    "division by zero supervised tokens": ("loss", "", "div", 1),
    "too high learning rate": ("forward", "vision.blocks.0.attention.out_proj", "addmm", 4),
    "bad image": ("input", "pixel_values", "", 1),
    "bad label": ("input", "labels", "", 1),
}


@pytest.mark.parametrize("plant", ch03.PLANTS)
def test_the_finder_names_module_operation_and_sample(plant) -> None:
    case = plant()
    found = find_nonfinite(case.model, case.batch, case.precision, loss_of=case.loss_of)
    assert found is not None, case.cause
    assert (found.phase, found.module, found.op, len(found.samples)) == FOUND[case.cause]
    number = {"division by zero supervised tokens": 2, "bad image": 1, "bad label": 3}.get(case.cause)
    if number is not None:
        assert found.samples == (case.batch.sample_ids[number],)
        assert case.batch.sample_ids[number] in str(found)
    zero = {"log": ", a zero among them", "div": ", with a zero to divide by"}.get(found.op, "")
    assert found.what.endswith(zero) and ("zero" in found.what) == bool(zero)
    assert all(p.grad is None or p.grad.isfinite().all() for p in case.model.parameters())


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (ch03.plant_attention_overflow, "bf16"),
        (ch03.plant_attention_overflow, "fp32"),
        (ch03.plant_log_of_zero, "fp32"),
        (ch03.plant_log_of_zero, "bf16"),
        (ch03.plant_high_learning_rate, "bf16"),
    ],
)
def test_the_finder_finds_nothing_where_the_format_has_room(plant, name: str) -> None:
    case = plant(name)
    assert find_nonfinite(case.model, case.batch, case.precision, loss_of=case.loss_of) is None


def test_the_finder_names_a_backward_that_overflows() -> None:
    trainer = ch03.lab_trainer(ch03.lab_config("fp16"))
    (batch,) = trainer.load_step(0)
    found = find_nonfinite(trainer.model, batch, "fp16", loss_scale=2.0**24)
    assert found is not None and found.phase == "backward" and "inf in fp16" in found.what
    assert find_nonfinite(trainer.model, batch, "fp16", loss_scale=1.0) is None
    with torch.no_grad():
        trainer.model.get_parameter("language.norm.weight")[3] = torch.nan
    broken = find_nonfinite(trainer.model, batch, "fp16")
    assert broken is not None and (broken.phase, broken.module) == ("weights", "language.norm.weight")


def test_bits_are_those_of_torch() -> None:
    for name, kind in (("fp16", torch.int16), ("bf16", torch.int16), ("e4m3fn", torch.uint8), ("e5m2", torch.uint8)):
        for value in (1.0, -0.375, 3.1, 2.0**-9, 0.0, 448.0, -1e-3):
            pattern = int(torch.tensor([value]).to(DTYPES[name]).view(kind)) % 2 ** FORMATS[name].bits
            assert int(ch03.bits_of(value, FORMATS[name]).replace(" ", ""), 2) == pattern, (name, value)
    with pytest.raises(ValueError, match="largest number is 65504"):
        ch03.bits_of(70000, FORMATS["fp16"])


def test_a_skipped_step_is_logged_without_a_norm_and_the_run_goes_on_from_its_checkpoint(tmp_path) -> None:
    config = ch03.lab_config("fp16", num_steps=2, log_every=1)
    config = replace(config, run=replace(config.run, output_dir=str(tmp_path)))
    trainer = ch03.lab_trainer(config)
    result = trainer.fit()
    assert trainer.scaler.num_skipped == 1  # 2^16 is too much for the first step of this model
    assert "gradients/norm" not in result.history[0] and result.history[1]["gradients/norm"] > 0
    json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0], parse_constant=pytest.fail)
    other = ch03.lab_trainer(config)
    assert other.resume() == 2
    assert (
        other.scaler.state_dict()
        == trainer.scaler.state_dict()
        == {"scale": 2.0**15, "good_steps": 1, "num_skipped": 1}
    )


def test_the_glue_of_the_notebook_measures_what_it_says() -> None:
    kept = ch03.follow_updates(start=1.0, update=0.001, num_updates=100)
    assert kept["fp32"][-1] == pytest.approx(1.1, abs=1e-4) and set(kept["bf16, to nearest"]) == {1.0}
    assert kept["bf16 + fp32 master"][-1] == pytest.approx(1.1, abs=2**-8)
    assert kept["bf16, at random (mean of 64)"][-1] == pytest.approx(1.1, abs=0.02)
    assert ch03.measured_bytes("fp16") == pytest.approx({"weights": 4, "gradients": 4, "optimizer": 8})
    assert ch03.activation_bytes("bf16") < 0.8 * ch03.activation_bytes("fp32")
    life = ch03.life_of_a_scale(ALONE, 4, 2.0**24, 2)
    assert life["skipped"] == [True] * 4 and life["scales"] == [2.0**24, 2.0**23, 2.0**22, 2.0**21]
    fused = ch03.plant_attention_overflow("fp16", fused=True)
    assert find_nonfinite(fused.model, fused.batch, "fp16") is None
