"""The model on its own: placing of features, masks, cache, gradients without images, seeds, errors."""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import vlmcourse.models
from vlmcourse.models import VLM, build_model, generate
from vlmcourse.models.cache import KVCache
from vlmcourse.models.decoder import apply_rope, is_right_padded, plan_attention, rope_tables
from vlmcourse.models.projector import pixel_shuffle
from vlmcourse.presets import MODELS, LanguageShape, VisionShape, VLMShape

# float32 sums in another order, through a few layers.
FP32_ATOL = 1e-5
SHAPE = VLMShape(
    name="test",
    vision=VisionShape(
        image_size_px=16, patch_size_px=4, num_layers=2, hidden_size=16, num_heads=2, mlp_size=24, layer_scale_init=1.0
    ),
    language=LanguageShape(
        vocab_size=64, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, mlp_size=24, rope_theta=1e4
    ),
    image_token_id=3,
)
TOKENS_PER_TILE = 4


def build(seed: int = 0, **changes: object) -> VLM:
    return build_model(dataclasses.replace(SHAPE, **changes), seed=seed)  # type: ignore[arg-type]


def batch(*tiles: int, seed: int = 0, length: int = 18) -> tuple[Tensor, Tensor]:
    """Ids [batch, seq] without padding and tiles, one row for each number of tiles."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, 64, (len(tiles), length), generator=generator)
    for row, count in enumerate(tiles):
        ids[row, 2 : 2 + count * TOKENS_PER_TILE] = 3
    return ids, torch.randn(sum(tiles), 3, 16, 16, generator=generator)


def test_each_sample_sees_its_own_tiles_and_no_other():
    model = build().eval()
    ids, pixels = batch(1, 0, 2)
    together = model(ids, pixels)
    apart = [model(ids[:1], pixels[:1]), model(ids[1:2]), model(ids[2:], pixels[1:])]
    torch.testing.assert_close(together, torch.cat(apart), rtol=0, atol=FP32_ATOL)
    changed = pixels.clone()
    changed[2] += 1
    moved = (model(ids, changed) - together).abs().amax(dim=(1, 2))
    assert moved[0] == 0 and moved[1] == 0 and moved[2] > 1e-3


def test_features_stand_in_order_at_the_image_tokens():
    model = build().eval()
    ids, pixels = batch(0, 2)
    ids[1, :] = torch.randint(6, 64, (18,))
    ids[1, [1, 3, 5, 7, 9, 11, 13, 15]] = 3
    seen: list[Tensor] = []
    model.language.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(ids, pixels)
    features = model.projector(model.vision(pixels), 4, 4).flatten(0, 1)
    torch.testing.assert_close(seen[0][1, 1:16:2], features, rtol=0, atol=0)
    text = ids != 3
    torch.testing.assert_close(seen[0][text], model.language.embedding(ids)[text], rtol=0, atol=0)


def test_logits_do_not_look_into_the_future():
    model = build().eval()
    ids, _ = batch(0, 0)
    later = ids.clone()
    later[:, 10] = (ids[:, 10] + 1 - 6) % 58 + 6
    change = (model(ids) - model(later)).abs().amax(dim=(0, 2))
    assert change[:10].max() == 0 and change[10:].min() > 0


def test_pixel_shuffle_orders_channels_by_row_then_column_then_channel():
    # Patch (row, column) carries [10 * row + column, 100 + 10 * row + column]: a 4 x 6 grid, 2 channels.
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(6), indexing="ij")
    patches = torch.stack((10 * rows + columns, 100 + 10 * rows + columns), dim=-1).flatten(0, 1)[None].float()
    folded = pixel_shuffle(patches, 4, 6, 2)
    assert folded.shape == (1, 6, 8)
    assert folded[0, 0].tolist() == [0, 100, 1, 101, 10, 110, 11, 111]
    assert folded[0, 4].tolist() == [22, 122, 23, 123, 32, 132, 33, 133]


def test_right_padding_changes_no_real_logit():
    model = build().eval()
    ids, pixels = batch(1, 2)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 9:] = False
    padded = torch.where(mask, ids, 0)
    logits = model(padded, pixels, mask)
    alone = model(ids[:1, :9], pixels[:1])
    torch.testing.assert_close(logits[:1, :9], alone, rtol=0, atol=FP32_ATOL)
    torch.testing.assert_close(logits[1], model(ids[1:], pixels[1:])[0], rtol=0, atol=FP32_ATOL)


def test_left_padding_changes_no_real_logit():
    model = build().eval()
    ids, pixels = batch(1, 2)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :9] = False
    padded = ids.clone()
    padded[0, 9:] = ids[0, :9]
    padded[0, :9] = 0
    logits = model(padded, pixels, mask)
    torch.testing.assert_close(logits[0, 9:], model(ids[:1, :9], pixels[:1])[0], rtol=0, atol=FP32_ATOL)
    assert logits.isfinite().all()


def test_right_padding_needs_no_mask_and_left_padding_gets_one():
    right = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    assert is_right_padded(right) and not is_right_padded(right.flip(1))
    assert not is_right_padded(torch.tensor([[1, 0, 1, 1]]).bool())
    assert is_right_padded(right.flip(1).to("meta"))
    positions, mask = plan_attention(right, 4, 0, right.device)
    assert mask is None and positions.tolist() == [[0, 1, 2, 3]]
    positions, mask = plan_attention(right.flip(1), 4, 0, right.device)
    assert positions.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert mask is not None
    assert mask[1, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_rope_depends_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(query_at: int, key_at: int) -> Tensor:
        rotated = []
        for x, position in ((q, query_at), (k, key_at)):
            rotated.append(apply_rope(x, *rope_tables(torch.tensor([[position]]), 8, 1e4)))
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(9, 5), score(104, 100), rtol=1e-4, atol=1e-4)
    assert abs(score(9, 5) - score(9, 6)) > 1e-2
    torch.testing.assert_close(score(0, 0), (q * k).sum())


def test_cache_gives_the_same_logits_as_one_pass():
    model = build().eval()
    ids, pixels = batch(1, 2)
    whole = model(ids, pixels)
    cache = KVCache(18)
    parts = [model(ids[:, :12], pixels, kv_cache=cache)]
    parts += [model(ids[:, 12:15], kv_cache=cache)]  # several tokens at once behind a cache
    parts += [model(ids[:, i : i + 1], kv_cache=cache) for i in range(15, 18)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=FP32_ATOL)
    with pytest.raises(ValueError, match="18 tokens cannot hold 19"):
        model(ids[:, :1], kv_cache=cache)


def greedy_without_cache(model: VLM, ids: Tensor, pixels: Tensor | None, steps: int) -> list[int]:
    new: list[int] = []
    for _ in range(steps):
        row = torch.cat((ids, torch.tensor(new, dtype=torch.long)))[None]
        new.append(int(model(row, pixels)[0, -1].argmax()))
    return new


def test_generation_equals_greedy_search_without_a_cache_or_padding():
    model = build(seed=2).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)  # answers that vary
    ids, pixels = batch(1, 0, 2)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :4], mask[1, :7] = False, False
    prompts = [ids[0, :14], ids[1, :11], ids[2]]
    padded = torch.stack([F.pad(p, (18 - len(p), 0)) for p in prompts])
    new = generate(model, padded, pixels, mask, max_new_tokens=6, eos_token_id=63, tiles_per_sample=(1, 0, 2))
    tiles = [pixels[:1], None, pixels[1:]]
    expected = [greedy_without_cache(model, p, t, 6) for p, t in zip(prompts, tiles, strict=True)]
    assert len({token for row in expected for token in row}) > 4
    assert new.tolist() == expected


def test_generation_stops_at_the_end_of_each_answer():
    model = build(seed=2).eval()
    ids, pixels = batch(1, 0)
    free = generate(model, ids, pixels, None, max_new_tokens=8, eos_token_id=-1)
    end = int(free[0, 0])
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    alone = generate(model, ids[:1], pixels, None, max_new_tokens=8, eos_token_id=end)
    assert alone.tolist() == [[end]] and len(calls) == 1
    calls.clear()
    full = generate(model, ids[:1], pixels, None, max_new_tokens=8, eos_token_id=end, stop_early=False)
    assert full.tolist() == [[end] * 8] and len(calls) == 8


def test_a_written_image_token_is_text_and_not_an_error():
    model = build().eval()
    with torch.no_grad():
        model.language.lm_head.weight.zero_()  # type: ignore[union-attr]
        model.language.norm.weight.zero_()
    ids, pixels = batch(1)
    with torch.no_grad():
        model.language.lm_head = torch.nn.Linear(16, 64)
        model.language.lm_head.bias[3] = 10
    assert generate(model, ids, pixels, None, max_new_tokens=3, eos_token_id=2).tolist() == [[3, 3, 3]]


def test_generation_refuses_prompts_that_end_in_padding():
    model = build().eval()
    ids, pixels = batch(1, 0)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, -1] = False
    with pytest.raises(ValueError, match=r"Prompts \[1\] end in padding"):
        generate(model, ids, pixels, mask, max_new_tokens=3, eos_token_id=2)
    with pytest.raises(ValueError, match="max_new_tokens = 0"):
        generate(model, ids, pixels, None, max_new_tokens=0, eos_token_id=2)


def trainable_without_gradient(model: VLM) -> list[str]:
    return [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]


@pytest.mark.parametrize("pixels", [None, torch.zeros(0, 3, 16, 16)], ids=["none", "zero tiles"])
def test_training_without_images_gives_zero_gradients_rather_than_none(pixels):
    model = build()
    ids, _ = batch(0, 0)
    model(ids, pixels).square().mean().backward()
    assert trainable_without_gradient(model) == []
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all()
        zero = not weight.grad.any()
        assert zero == name.startswith(("vision.", "projector.")), name


def test_the_blank_tile_changes_no_logit_and_no_other_gradient():
    ids, _ = batch(0, 0)
    train, plain = build(), build().eval()
    logits, expected = train(ids), plain(ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    logits.square().mean().backward()
    expected.square().mean().backward()
    for (name, weight), other in zip(train.language.named_parameters(), plain.language.parameters(), strict=True):
        assert weight.grad is not None and other.grad is not None
        torch.testing.assert_close(weight.grad, other.grad, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("training", "grad", "every_batch", "calls"),
    [(True, True, False, 1), (True, False, False, 0), (False, True, False, 0), (False, False, True, 1)],
)
def test_the_vision_tower_runs_without_images_only_when_it_must(training, grad, every_batch, calls):
    model = build().train(training)
    model.vision_on_every_batch = every_batch
    seen: list[int] = []
    model.vision.register_forward_hook(lambda *_: seen.append(1))
    with torch.set_grad_enabled(grad):
        model(batch(0, 0)[0])
    assert len(seen) == calls


@pytest.mark.parametrize("num_tiles", [1, 2])
def test_every_gradient_lies_in_memory_as_its_weight_does(num_tiles: int):
    model = build()
    ids, pixels = batch(num_tiles)
    model(ids, pixels).sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.stride() == weight.stride(), name


def saved_bytes(model: VLM, ids: Tensor, pixels: Tensor, tower: str) -> int:
    """Bytes that autograd keeps from the forward pass of one tower."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    module = getattr(model, tower)
    plain = module.forward

    def counted(*args: object, **kwargs: object) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return plain(*args, **kwargs)

    module.forward = counted
    model(ids, pixels)
    module.forward = plain
    return kept


def test_a_frozen_vision_tower_keeps_no_graph():
    model = build()
    ids, pixels = batch(1, 2)
    assert saved_bytes(model, ids, pixels, "vision") > 0
    model.vision.requires_grad_(False)
    assert saved_bytes(model, ids, pixels, "vision") == 0
    assert saved_bytes(model, ids, pixels, "projector") > 0
    assert not model.vision(pixels).requires_grad
    model(ids, pixels).mean().backward()
    assert all(weight.grad is None for weight in model.vision.parameters())
    assert trainable_without_gradient(model) == []
    model.zero_grad()
    model(batch(0, 0)[0]).mean().backward()
    assert trainable_without_gradient(model) == []


def test_frozen_vision_and_projector_keep_no_graph_and_the_language_tower_still_learns():
    model = build()
    model.vision.requires_grad_(False)
    model.projector.requires_grad_(False)
    ids, pixels = batch(1, 2)
    assert saved_bytes(model, ids, pixels, "vision") == saved_bytes(model, ids, pixels, "projector") == 0
    for tiles in (pixels, None):
        model.zero_grad()
        model(ids if tiles is not None else batch(0, 0)[0], tiles).mean().backward()
        assert trainable_without_gradient(model) == []


def test_a_frozen_language_tower_still_passes_gradients_to_the_image():
    model = build()
    model.language.requires_grad_(False)
    model(*batch(1, 2)).square().mean().backward()
    assert trainable_without_gradient(model) == []
    assert model.vision.patch_embedding.weight.grad is not None and model.vision.patch_embedding.weight.grad.any()


def test_a_wrong_number_of_image_tokens_names_both_counts_and_the_sample():
    model = build()
    ids, pixels = batch(1, 2)
    ids[1, 4] = 9
    with pytest.raises(ValueError, match=r"'boat-17' has 7 image tokens but 8 image features \(2 tiles x 4\)"):
        model(ids, pixels, tiles_per_sample=(1, 2), sample_ids=("cat-1", "boat-17"))
    with pytest.raises(ValueError, match="sample 1 has 7 image tokens but 8"):
        model(ids, pixels, tiles_per_sample=(1, 2))
    with pytest.raises(ValueError, match=r"11 image tokens \(sample 0: 4, sample 1: 7\) but 12 image features"):
        model(ids, pixels)
    with pytest.raises(ValueError, match="11 image tokens .* but 0 image features"):
        model(ids)


def test_equal_totals_do_not_hide_a_sample_with_the_wrong_number():
    ids, pixels = batch(2, 1)
    with pytest.raises(ValueError, match="sample 0 has 8 image tokens but 4"):
        build()(ids, pixels, tiles_per_sample=(1, 2))


def test_tiles_per_sample_must_describe_the_batch():
    ids, pixels = batch(1, 2)
    with pytest.raises(ValueError, match="lists 4 tiles of 2 samples, but the batch has 3 tiles"):
        build()(ids, pixels, tiles_per_sample=(2, 2))
    with pytest.raises(ValueError, match="3 samples, but"):
        build()(ids, pixels, tiles_per_sample=(1, 1, 1))


@pytest.mark.parametrize(
    ("ids", "pixels", "mask", "words"),
    [
        (torch.ones(4, dtype=torch.long), None, None, r"input_ids has shape \[4\]"),
        (torch.ones(1, 4, dtype=torch.long), None, torch.ones(1, 4), "torch.float32"),
        (torch.ones(1, 4, dtype=torch.long), None, torch.ones(1, 5, dtype=torch.bool), r"shape \[1, 4\]"),
        (torch.ones(1, 4, dtype=torch.long), torch.zeros(1, 1, 16, 16), None, r"\[1, 1, 16, 16\]"),
        (torch.ones(1, 4, dtype=torch.long), torch.zeros(1, 3, 18, 16), None, "18 x 16 px"),
        (torch.ones(1, 4, dtype=torch.long), torch.zeros(1, 3, 12, 16), None, "3 x 4 patches"),
        (torch.ones(1, 9000, dtype=torch.long), None, None, "9000 tokens is longer than the 8192"),
    ],
)
def test_tensors_of_the_wrong_shape_are_refused_in_words(ids, pixels, mask, words):
    with pytest.raises(ValueError, match=words):
        build()(ids, pixels, mask)


def test_tiles_need_not_be_square():
    model = build().eval()
    ids = torch.full((1, 10), 9)
    ids[0, 1:9] = 3
    pixels = torch.randn(1, 3, 16, 32, generator=torch.Generator().manual_seed(0))
    logits = model(ids, pixels, tiles_per_sample=(1,))
    assert not torch.equal(logits, model(ids, pixels.flip(3)))


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, same, other = build(seed=1), build(seed=1), build(seed=2)
    assert torch.equal(torch.rand(3), expected)
    for (name, weight), again in zip(one.named_parameters(), same.parameters(), strict=True):
        assert torch.equal(weight, again), name
    assert not torch.equal(one.language.embedding.weight, other.language.embedding.weight)
    torch.manual_seed(5)
    drawn = build_model(SHAPE).language.embedding.weight
    torch.manual_seed(5)
    assert torch.equal(drawn, build_model(SHAPE).language.embedding.weight)


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_fresh_model_is_finite_and_starts_near_a_uniform_guess(name):
    shape = MODELS[name]
    model = build_model(shape, seed=0)
    side, vocab = shape.vision.image_size_px, shape.language.vocab_size
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(6, vocab, (2, 1, 90), generator=generator)
    ids[:, 2 : 2 + shape.num_visual_tokens_per_tile] = shape.image_token_id
    logits = model(ids, torch.randn(1, 3, side, side, generator=generator))
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert abs(loss.item() - math.log(vocab)) < 1.0
    loss.backward()
    for tower, child in model.named_children():
        squares = [weight.grad.square().sum() for weight in child.parameters() if weight.grad is not None]
        assert 1e-4 < sum(squares) ** 0.5 < 20, tower


def test_the_model_learns_to_read_an_image():
    """Name one of eight random pictures: only the path from pixels to logits can give the answer."""
    model = build()
    pixels = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    ids = torch.full((8, 7), 9)
    ids[:, 1:5] = 3
    answers = torch.arange(8) + 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = F.cross_entropy(model(ids, pixels)[:, -1], answers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.05
    assert torch.equal(generate(model.eval(), ids, pixels, None, max_new_tokens=1, eos_token_id=2)[:, 0], answers)


def test_bf16_autocast_and_bf16_weights_run_forward_and_backward():
    ids, pixels = batch(1, 2)
    exact = build()(ids, pixels)
    model = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids, pixels)
    logits.float().square().mean().backward()
    assert trainable_without_gradient(model) == []
    assert (logits.float() - exact).abs().max() < 0.2
    half = build_model(SHAPE, seed=0, dtype=torch.bfloat16)
    logits = half(ids, pixels)
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    generate(half.eval(), ids, pixels, None, max_new_tokens=2, eos_token_id=2)


def test_fake_tensors_run_the_whole_step():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = VLM(SHAPE)
        ids = torch.ones(2, 18, dtype=torch.long)
        mask = torch.ones(2, 18, dtype=torch.bool)
        for pixels in (torch.zeros(3, 3, 16, 16), None):
            logits = model(ids, pixels, mask)
            assert logits.shape == (2, 18, 64)
            logits.mean().backward()
        assert trainable_without_gradient(model) == []


def test_tied_embeddings_are_one_parameter():
    tied = build(language=dataclasses.replace(SHAPE.language, tied_embeddings=True))
    assert "language.lm_head.weight" not in tied.state_dict()
    assert sum(p.numel() for p in build().parameters()) - sum(p.numel() for p in tied.parameters()) == 64 * 16


def test_children_and_blocks_have_the_names_that_plans_wrap():
    model = build()
    assert [name for name, _ in model.named_children()] == ["vision", "projector", "language"]
    assert len(model.vision.blocks) == len(model.language.blocks) == 2
    assert list(model.buffers()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision": dataclasses.replace(SHAPE.vision, num_heads=3)}, "vision.num_heads = 3 must divide"),
        ({"language": dataclasses.replace(SHAPE.language, num_kv_heads=3)}, "num_kv_heads = 3 must divide"),
        ({"language": dataclasses.replace(SHAPE.language, num_heads=16)}, "num_kv_heads|RoPE"),
        ({"vision": dataclasses.replace(SHAPE.vision, patch_size_px=5)}, "patch_size_px = 5 must divide"),
        ({"vision": dataclasses.replace(SHAPE.vision, image_size_px=12)}, "3 patches a side do not fold by 2"),
        ({"vision": dataclasses.replace(SHAPE.vision, norm="batchnorm")}, "'batchnorm'"),
        ({"pixel_shuffle_fraction": 0.4}, "pixel_shuffle_fraction = 0.4"),
        ({"image_token_id": 64}, "image_token_id = 64"),
    ],
)
def test_a_shape_that_does_not_fit_together_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        build(**changes)


def test_models_never_speak_of_ranks():
    for path in Path(vlmcourse.models.__path__[0]).glob("*.py"):
        text = path.read_text(encoding="utf-8").lower()
        for word in ("rank", "world_size", "torch.distributed", "dtensor", "fsdp", "ddp"):
            assert word not in text, f"{path.name} mentions {word}"
        assert ast.get_docstring(ast.parse(text)), path.name
        assert text.count("\n") < 300, path.name
