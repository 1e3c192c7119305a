"""Parameter counts by arithmetic against the models that are built."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from vlmcourse.models import build_model
from vlmcourse.planner import count_params
from vlmcourse.planner.shapes import count_language_layer_params, count_vision_layer_params
from vlmcourse.presets import MODELS, VLMShape, get_model


def built_counts(shape: VLMShape) -> dict[str, int]:
    model = build_model(shape, device="meta")
    return {tower: sum(p.numel() for p in child.parameters()) for tower, child in model.named_children()}


@pytest.mark.parametrize("name", MODELS)
def test_counts_equal_the_built_model_for_every_preset(name):
    assert dataclasses.asdict(count_params(get_model(name))) == built_counts(get_model(name))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_counts_equal_the_built_model_for_every_switch(tied, bias, norm):
    tiny = get_model("tiny")
    shape = dataclasses.replace(
        tiny,
        vision=dataclasses.replace(tiny.vision, norm=norm, qkv_bias=bias, qk_norm=not bias),
        language=dataclasses.replace(tiny.language, qkv_bias=bias, tied_embeddings=tied),
    )
    assert dataclasses.asdict(count_params(shape)) == built_counts(shape)


def test_layer_counts_equal_the_built_layers():
    shape = get_model("tiny")
    model = build_model(shape, device="meta")
    vision_block, language_block = model.vision.blocks[0], model.language.blocks[0]
    assert count_vision_layer_params(shape.vision) == sum(p.numel() for p in vision_block.parameters())
    assert count_language_layer_params(shape.language) == sum(p.numel() for p in language_block.parameters())


def test_internvl2_26b_has_the_published_size_by_tower():
    params = count_params(get_model("internvl2-26b"))
    in_billions = [round(count / 1e9, 2) for count in (params.vision, params.language, params.total)]
    assert in_billions == [5.54, 19.86, 25.51]
    assert round(params.projector / 1e9, 3) == 0.116


def test_exercise_model_has_2b_of_vision_and_11b_of_language():
    params = count_params(get_model("vlm-13b"))
    assert round(params.vision / 1e9, 1) == 2.0
    assert round(params.language / 1e9, 1) == 10.9
    assert round(params.total / 1e9, 1) == 13.0


def test_planner_works_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from vlmcourse.planner import Plan, check_plan\n"
        "from vlmcourse.presets import get_cluster, get_model\n"
        "print(check_plan(Plan(dp_shard=8, zero_stage=3), get_model('vlm-13b'), get_cluster('h100x8')).ok)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "True", done.stderr
