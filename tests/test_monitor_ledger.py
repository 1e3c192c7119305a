"""The ledger of a step against PyTorch's profiler, and what layers keep against the derived formula, to the byte."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from vlmcourse.labs.ch04 import GeluDropoutLayer
from vlmcourse.models.decoder import LanguageBlock, rope_tables
from vlmcourse.models.vit import VisionBlock
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.monitor.activations import ActivationMeter
from vlmcourse.monitor.ledger import StepLedger, measure_ledger
from vlmcourse.monitor.storages import OTHER, StorageBook
from vlmcourse.planner.layer_activations import (
    count_language_layer_bytes,
    count_vision_layer_bytes,
    korthikanti_layer_bytes,
)
from vlmcourse.presets import get_model
from vlmcourse.recompute import plan_segments
from vlmcourse.train.activations import cover_blocks

TINY = get_model("tiny")


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[VLM, torch.optim.Optimizer, Tensor, Tensor]]:
    """A model, an optimizer that has made a step, ids and tiles."""
    model = build_model(TINY, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(4, 200, (4, 40))
    ids[:, :4] = TINY.image_token_id
    parts = model, optimizer, ids, torch.randn(4, 3, 32, 32)
    step(*parts)
    yield parts


def step(model: VLM, optimizer: torch.optim.Optimizer, ids: Tensor, tiles: Tensor) -> None:
    optimizer.zero_grad()
    logits = model(ids, tiles)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    del logits
    loss.backward()
    del loss
    optimizer.step()


def profiled_bytes(run) -> tuple[int, int]:
    """Return how many bytes more were allocated at the end of a run, and at its fullest moment, as PyTorch records."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return total, peak


@pytest.mark.parametrize("policy", ["none", "full", "sqrt", "selective"])
def test_ledger_misses_no_byte_that_the_allocator_gave_out(policy: str, parts) -> None:
    model, optimizer, ids, tiles = parts
    for tower in (model.vision, model.language):
        cover_blocks(tower, plan_segments(policy, len(tower.blocks)))
    optimizer.zero_grad()
    total, peak = profiled_bytes(lambda: step(*parts))
    optimizer.zero_grad()
    with StepLedger(model, optimizer) as ledger:
        step(*parts)
    there_before = ledger.samples[0].total_bytes + ids.nbytes + tiles.nbytes
    assert ledger.samples[-1].total_bytes - there_before == total
    # Between operations nothing is missed; within one a kernel may need more, and does where recomputation is highest.
    missing = peak - (ledger.peak().total_bytes - there_before)
    assert 0 <= missing <= (0 if policy == "none" else 0.01 * peak)
    last = ledger.samples[-1].by_owner()
    state = measure_ledger(model, optimizer)
    assert (last["weights"], last["gradients"], last["optimizer"]) == (
        state.weights_bytes,
        state.gradients_bytes,
        state.optimizer_bytes,
    )
    assert set(last) <= {"weights", "gradients", "optimizer", "other", "temporary"}
    assert last.get("temporary", 0) < 100
    phases = list(dict.fromkeys(sample.phase for sample in ledger.samples))
    assert phases[:3] == ["forward", "backward", "update"]


def test_activations_of_a_layer_in_the_ledger_are_those_of_the_formula(parts) -> None:
    model, optimizer, ids, tiles = parts
    for tower in (model.vision, model.language):
        cover_blocks(tower, [])
    optimizer.zero_grad()
    with StepLedger(model, optimizer) as ledger:
        step(*parts)
    kept = ledger.end_of_forward().by_layer("activations")
    vision = count_vision_layer_bytes(TINY.vision, 4, 17, 4)
    assert kept["vision.blocks.1"] == sum(vision.values())
    language = count_language_layer_bytes(TINY.language, 4, 40, 4)
    tables = 2 * 40 * 24 * 4  # of rotations: the first block that keeps them counts them
    assert kept["language.blocks.0"] == sum(language.values()) + tables
    assert kept["language.blocks.1"] == kept["language.blocks.2"] == sum(language.values())
    assert ledger.end_of_forward().total_bytes == sum(ledger.end_of_forward().by_owner().values())


def test_ledger_under_checkpointing_names_what_is_kept_and_what_is_made_again(parts) -> None:
    model, optimizer, ids, _ = parts
    kept, made_again = {}, {}
    for policy in ("none", "full", "selective"):
        cover_blocks(model.vision, [])
        cover_blocks(model.language, plan_segments(policy, 3))
        optimizer.zero_grad()
        with StepLedger(model, optimizer) as ledger:
            step(*parts)
        kept[policy] = ledger.end_of_forward().by_layer("activations")["language.blocks.1"]
        made_again[policy] = max(s.by_layer("recomputed").get("language.blocks.1", 0) for s in ledger.samples)
    boundary = ids.numel() * TINY.language.hidden_size * 4
    assert kept["full"] == boundary
    assert kept["full"] < kept["selective"] < kept["none"]
    assert made_again["none"] == 0 and made_again["selective"] < made_again["full"]
    # What runs again is the layer; its input is there already, and its last temporary comes on top.
    formula = sum(count_language_layer_bytes(TINY.language, 4, 40, 4).values())
    assert formula - boundary <= made_again["full"] <= 1.2 * formula


def test_ledger_leaves_no_hook_behind_and_wants_a_backward_pass(parts) -> None:
    model, optimizer, ids, tiles = parts
    with pytest.raises(ValueError, match="saw no operation: run a step inside it"):
        StepLedger(model).peak()
    with StepLedger(model) as ledger, torch.no_grad():
        model(ids, tiles)
    num_samples = len(ledger.samples)
    with pytest.raises(ValueError, match="saw no backward pass"):
        ledger.end_of_forward()
    step(*parts)
    assert len(ledger.samples) == num_samples
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_two_operations_keep_is_an_activation_until_both_have_let_go() -> None:
    model = nn.Linear(64, 64, bias=False)
    with StepLedger(model) as ledger:
        x = model.weight * 1.0
        y = x.sin().exp()  # x is kept by sin and the product, y by exp and the product
        (x * y).sum().backward()
    held = [sample.by_owner().get("activations", 0) for sample in ledger.samples if sample.phase == "backward"]
    assert list(dict.fromkeys(held)) == [x.nbytes + y.nbytes, x.nbytes, 0]


def test_frozen_tower_keeps_nothing(parts) -> None:
    model, _, ids, tiles = parts
    model.vision.requires_grad_(False)
    try:
        with StepLedger(model) as ledger:
            F.cross_entropy(model(ids, tiles).flatten(0, 1), ids.flatten()).backward()
    finally:
        model.vision.requires_grad_(True)
        model.zero_grad()
    assert not [layer for layer in ledger.end_of_forward().by_layer("activations") if layer.startswith("vision")]


VISION = {
    "tiny": TINY.vision,
    "as the 6B tower": dataclasses.replace(TINY.vision, norm="rmsnorm", qk_norm=True, qkv_bias=False),
    "other sizes": dataclasses.replace(TINY.vision, hidden_size=48, num_heads=3, mlp_size=100),
}
LANGUAGE = {
    "tiny": TINY.language,
    "biases, no groups": dataclasses.replace(TINY.language, num_kv_heads=4, qkv_bias=True),
    "other sizes": dataclasses.replace(TINY.language, hidden_size=60, num_heads=6, num_kv_heads=3, mlp_size=77),
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16 autocast": torch.float32}
"""Of weights and of what enters."""


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize(("num_tiles", "num_positions"), [(1, 5), (3, 17)])
def test_vision_layer_keeps_what_the_formula_says(name: str, dtype: str, num_tiles: int, num_positions: int) -> None:
    shape, kind = VISION[name], TYPES[dtype]
    block = fill(VisionBlock(shape), kind)
    x = torch.randn(num_tiles, num_positions, shape.hidden_size, dtype=kind, requires_grad=True) * 1
    auto = dtype == "bf16 autocast"
    with ActivationMeter() as meter, torch.autocast("cpu", torch.bfloat16, enabled=auto):
        kept = block(x)
    element_bytes = 2 if auto else kind.itemsize
    counted = count_vision_layer_bytes(shape, num_tiles, num_positions, element_bytes, autocast=auto)
    assert meter.live_bytes == sum(counted.values())
    kept.sum().backward()
    assert meter.live_bytes == 0


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize(("batch_size", "seq_len"), [(1, 7), (2, 20)])
def test_decoder_layer_keeps_what_the_formula_says(name: str, dtype: str, batch_size: int, seq_len: int) -> None:
    shape, kind = LANGUAGE[name], TYPES[dtype]
    block = fill(LanguageBlock(shape), kind)
    x = torch.randn(batch_size, seq_len, shape.hidden_size, dtype=kind, requires_grad=True) * 1
    cos, sin = rope_tables(torch.arange(seq_len)[None], shape.hidden_size // shape.num_heads, 1e4)
    auto = dtype == "bf16 autocast"
    with ActivationMeter() as meter, torch.autocast("cpu", torch.bfloat16, enabled=auto):
        kept = block(x, cos, sin)
    tables = cos.nbytes + sin.nbytes if dtype == "fp32" else 0  # one pair for all blocks
    counted = count_language_layer_bytes(shape, batch_size, seq_len, 2 if auto else kind.itemsize, autocast=auto)
    assert meter.live_bytes - tables == sum(counted.values())
    kept.sum().backward()
    assert meter.live_bytes == 0


def test_blocks_of_a_model_under_autocast_keep_what_the_formula_says(parts) -> None:
    """The stream of a whole model is fp32 under autocast: the formula holds for its blocks, not for a single one."""
    model, _, ids, tiles = parts
    found: dict[str, int] = {}
    with ActivationMeter() as meter, torch.autocast("cpu", torch.bfloat16), contextlib.ExitStack() as hooks:
        for name, tower in (("vision", model.vision), ("language", model.language)):
            cover_blocks(tower, [])

            def note(*_: object, name: str = name, sign: int = 1) -> None:
                found[name] = found.get(name, 0) + sign * meter.live_bytes

            hooks.callback(tower.blocks[1].register_forward_pre_hook(functools.partial(note, sign=-1)).remove)
            hooks.callback(tower.blocks[1].register_forward_hook(note).remove)
        model(ids, tiles)
    assert found["vision"] == sum(count_vision_layer_bytes(TINY.vision, 4, 17, 2, autocast=True).values())
    assert found["language"] == sum(count_language_layer_bytes(TINY.language, 4, 40, 2, autocast=True).values())


@pytest.mark.parametrize(("element_bytes", "fused_norms"), [(4, False), (2, True)])
def test_autocast_is_counted_in_16_bits_on_a_cpu_only(element_bytes: int, fused_norms: bool) -> None:
    sentence = f"element_bytes = {element_bytes}, fused_norms = {fused_norms}: .* set element_bytes = 2"
    with pytest.raises(ValueError, match=sentence):
        count_vision_layer_bytes(TINY.vision, 1, 5, element_bytes, fused_norms=fused_norms, autocast=True)
    with pytest.raises(ValueError, match=sentence):
        count_language_layer_bytes(TINY.language, 1, 5, element_bytes, fused_norms=fused_norms, autocast=True)


def fill(block: nn.Module, kind: torch.dtype) -> nn.Module:
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    return block.to(kind)


@pytest.mark.parametrize("writes_scores", [False, True])
def test_layer_of_the_paper_keeps_what_its_formula_says(writes_scores: bool) -> None:
    """Exactly s b h (34 + 5 a s / h) in 16 bits, or its first term where attention is fused, besides the statistics."""
    s, b, h, a = 24, 2, 64, 4
    block = GeluDropoutLayer(h, a, writes_scores=writes_scores).to(torch.bfloat16)
    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True) * 1
    with ActivationMeter() as meter:
        kept = block(x)
    statistics = 2 * 2 * s * b * 2 + (0 if writes_scores else s * b * a * 4)
    assert meter.live_bytes - statistics == korthikanti_layer_bytes(s, b, h, a, keeps_scores=writes_scores)
    assert korthikanti_layer_bytes(2048, 1, 6144, 48, keeps_scores=True) == 2048 * 6144 * 34 + 5 * 48 * 2048**2
    del kept


def test_a_storage_may_go_while_the_sizes_of_others_are_read() -> None:
    book = StorageBook("cpu", lambda _: None)
    kept, going = torch.empty(4), [torch.empty(2)]
    for tensor in (kept, *going):
        book.enter(tensor, OTHER)
    del tensor
    book.on_change = lambda _, entry: going.clear() if entry.size_bytes == 32 else None
    kept.untyped_storage().resize_(32)
    with book:
        torch.empty(0)
    assert book.live_bytes[OTHER] == 32


def test_gradients_of_a_second_step_are_found_though_those_of_the_first_were() -> None:
    layer = nn.Linear(8, 8)
    with StepLedger(layer) as ledger:
        for _ in range(2):
            layer.zero_grad()
            layer(torch.ones(2, 8)).sum().backward()
    assert ledger.samples[-1].by_owner()["gradients"] == 4 * (64 + 8)
