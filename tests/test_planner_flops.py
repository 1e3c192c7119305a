"""FLOPs of a step against PyTorch's counter, to the FLOP, and what MFU and HFU leave out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from parity import small_shape
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vlmcourse.config import parse_config
from vlmcourse.models.vlm import build_model
from vlmcourse.planner.flops import StepFlops, Work, count_projector_flops, count_step_flops, count_tower_flops
from vlmcourse.presets import MODELS, VLMShape, get_model
from vlmcourse.recompute import RECOMPUTING_TOWERS
from vlmcourse.train.activations import plan_activations
from vlmcourse.train.optimizer import freeze_towers

ALL = ("vision", "projector", "language")
NUM_TILES, NUM_SEQUENCES, LENGTH = 3, 4, 24


def counted_by_torch(shape: VLMShape, trained: tuple[str, ...], recompute: dict[str, str]) -> int:
    """Run a step with attention in single products, which the counter sees on a CPU as well."""
    model = build_model(shape, seed=0)
    freeze_towers(model, [tower for tower in ALL if tower not in trained])
    config = parse_config({"model": {"freeze": [t for t in ALL if t not in trained]}, "activations": recompute})
    cover = plan_activations(config, config.parallel, shape)
    if cover is not None:
        cover(model)
    ids = torch.zeros(NUM_SEQUENCES, LENGTH, dtype=torch.int64)
    per_tile = shape.num_visual_tokens_per_tile
    ids[:NUM_TILES, :per_tile] = shape.image_token_id
    side_px = shape.vision.image_size_px
    pixels = torch.zeros(NUM_TILES, 3, side_px, side_px)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, pixels).sum().backward()
    return counter.get_total_flops()


def shape_of(tied: bool, kv_heads: int) -> VLMShape:
    shape = small_shape(tied)
    heads = shape.language.num_heads
    return dataclasses.replace(
        shape, language=dataclasses.replace(shape.language, num_kv_heads=min(kv_heads, heads), num_layers=3)
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("trained", "recompute"),
    [
        (ALL, {}),
        (("projector", "language"), {}),
        (("vision", "projector"), {}),
        (("projector",), {}),
        (("vision",), {}),
        (("language",), {}),
        (ALL, {"vision": "full"}),
        (ALL, {"language": "full"}),
        (ALL, {"vision": "full", "language": "full"}),
        (ALL, {"vision": "sqrt", "language": "every:2"}),
        (ALL, {"language": "sqrt"}),
        (ALL, {"vision": "selective", "language": "selective"}),
        (("projector",), {"language": "full"}),
    ],
)
def test_flops_are_those_that_torch_counts(trained: tuple[str, ...], recompute: dict[str, str], tied: bool) -> None:
    shape = shape_of(tied, kv_heads=1)
    work = Work.of_sequences([LENGTH] * NUM_SEQUENCES, NUM_TILES)
    counted = count_step_flops(shape, work, trained, recompute)
    assert counted.hardware == counted_by_torch(shape, trained, recompute)
    assert counted.model == count_step_flops(shape, work, trained).model  # recomputation is in HFU only


def test_all_trained_is_three_times_forward_but_for_the_pixels_and_near_6_n() -> None:
    shape = get_model("internvl2-26b")
    work = Work.of_sequences([4096], 6)
    flops = count_tower_flops(shape, work)
    language = flops["language"]
    assert language.model == 3 * language.forward
    layers = shape.language.num_layers
    attention = 12 * layers * shape.language.hidden_size * 4096**2  # PaLM's 12 L H Q T for each of T tokens
    assert language.model - attention == pytest.approx(6 * 19.3e9 * 4096, rel=0.01)  # 19.86 B without the embedding
    pixels = 2 * 3 * 14**2 * 3200 * 1024 * 6
    assert flops["vision"].model == 3 * flops["vision"].forward - pixels


def test_work_adds_up_and_padding_is_work_of_its_own() -> None:
    first, second = Work.of_sequences([3, 5], 2), Work.of_sequences([8], 0)
    assert first + second == Work(2, 16, 9 + 25 + 64)
    shape = MODELS["tiny"]
    assert count_step_flops(shape, first) + count_step_flops(shape, second) == count_step_flops(shape, first + second)
    padded = Work.of_sequences([8, 8], 2)
    assert count_step_flops(shape, padded).hardware > count_step_flops(shape, first).hardware


def test_nothing_is_recomputed_where_nothing_goes_back() -> None:
    work = Work.of_sequences([8], 1)
    policies: dict[str, str] = dict.fromkeys(RECOMPUTING_TOWERS, "full")
    flops = count_tower_flops(MODELS["tiny"], work, ("projector",), policies)
    assert flops["vision"] == StepFlops(flops["vision"].forward) and flops["language"].recomputed > 0
    with pytest.raises(ValueError, match="trained = 'lanugage': a tower is one of vision, projector, language"):
        count_step_flops(MODELS["tiny"], work, ("lanugage",))


def test_the_projector_is_as_wide_as_the_shuffle_makes_it() -> None:
    """16 patches of 64 numbers: at 1/4 one visual token of 1024, at 1/2 four of 256; then 96 and 96 wide."""
    tiny = get_model("tiny")
    assert count_projector_flops(tiny) == 4 * 2 * (256 * 96 + 96 * 96)
    quarter = dataclasses.replace(tiny, pixel_shuffle_fraction=0.25)
    assert count_projector_flops(quarter) == 2 * (1024 * 96 + 96 * 96)
