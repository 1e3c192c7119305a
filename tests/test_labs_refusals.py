"""What the labs' helpers do with arguments that cannot be: each is refused by name, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vlmcourse.batch import effective_batch_size, nearest_accumulation
from vlmcourse.labs import ch02, ch03, ch04
from vlmcourse.labs.batch_norm import load_pictures
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.ledger import StepLedger
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.formats import FORMATS
from vlmcourse.planner.layer_activations import (
    count_language_layer_bytes,
    count_vision_layer_bytes,
    korthikanti_layer_bytes,
)
from vlmcourse.presets import get_model
from vlmcourse.recompute import Segment
from vlmcourse.train.activations import cover_blocks, uncover_blocks
from vlmcourse.train.activations_report import report_activations
from vlmcourse.train.fp8 import to_fp8
from vlmcourse.train.nan_finder import find_nonfinite
from vlmcourse.train.scaler import LossScaler


@pytest.mark.parametrize("policy", ["sqrt", "every:2", "selective", "ful", None])
@pytest.mark.parametrize("tower", ["vision", "language"])
def test_bytes_of_towers_are_counted_for_the_policies_that_the_formula_knows(tower: str, policy: str) -> None:
    """Another one's answer would be that of none."""
    policies = {"vision": "full", "language": "none"} | {tower: policy}
    with pytest.raises(ValueError, match=rf"policies\['{tower}'\] = .*none and full"):
        ch04.tower_bytes(get_model("tiny"), 1, 5, policies)


def test_bytes_of_towers_without_a_policy_for_each_are_refused() -> None:
    with pytest.raises(ValueError, match=r"policies\['language'\] = None"):
        ch04.tower_bytes(get_model("tiny"), 1, 5, {"vision": "full", "langauge": "full"})


@pytest.mark.parametrize("counts", [(0, -5), (-1, 5), (1.5, 5), (1, True)])
def test_bytes_of_fewer_than_no_tiles_or_tokens_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be a whole number, 0 or greater"):
        ch04.tower_bytes(get_model("tiny"), *counts, {"vision": "none", "language": "none"})
    alone = ch04.tower_bytes(get_model("tiny"), 0, 5, {"vision": "none", "language": "full"})
    assert alone["vision"] == 0 < alone["language"], "a sample without a picture is no mistake"


def test_log_of_zero_is_planted_in_the_formats_that_it_names() -> None:
    with pytest.raises(ValueError, match="precision = 'fp8': .* one of fp16, bf16, fp32"):
        ch03.plant_log_of_zero("fp8")


@pytest.mark.parametrize("name", ["fp16", "e4m3fn"])
def test_bits_of_no_number_are_not_those_of_a_large_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"nan is no number .* in {name}"):
        ch03.bits_of(float("nan"), FORMATS[name])


@pytest.mark.parametrize(
    "options",
    [
        {"initial_scale": -1.0},
        {"initial_scale": 0.0, "min_scale": 0.0},
        {"initial_scale": float("inf")},
        {"initial_scale": float("nan")},
        {"initial_scale": 0.5},  # below min_scale, to which the first overflow would raise it
        {"min_scale": -2.0},
        {"growth_factor": float("nan")},
        {"growth_interval": 2.5},  # a count of steps never meets it
        {"num_averaged": 0},
    ],
)
def test_scale_that_gradients_cannot_be_divided_by_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} = .* must"):
        LossScaler(ch03.ALONE, **options)
    LossScaler(ch03.ALONE, initial_scale=0.5, min_scale=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fnuz])
def test_cast_to_a_format_that_is_not_among_the_course_s_fp8_ones_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="dtype = .* choose torch.float8_e4m3fn or torch.float8_e5m2"):
        to_fp8(torch.ones(3), dtype)


# --- Losses ---------------------------------------------------------------------------------------------------------


class OneWeight(nn.Module):
    """A model whose loss a test makes up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("loss_of", "found"),
    [
        (lambda model, batch: 1.5, "returned a float"),
        (lambda model, batch: "loss", "returned a str"),
        (lambda model, batch: None, "returned a NoneType"),
        (lambda model, batch: model.weight, r"returned a tensor of shape \[2\]"),
        (lambda model, batch: (model.weight * torch.nan).sum().detach(), "returned a tensor without a gradient"),
    ],
)
def test_loss_that_backward_cannot_start_from_is_refused(loss_of: Callable[..., Any], found: str) -> None:
    _, batch = ch04.load_deep(1, 1)
    with pytest.raises(ValueError, match=f"loss_of {found}: .* must return a scalar tensor with a gradient"):
        find_nonfinite(OneWeight(), batch, loss_of=loss_of)


def test_model_without_a_trained_weight_is_refused_by_the_finder() -> None:
    _, batch = ch04.load_deep(1, 1)
    with pytest.raises(ValueError, match="OneWeight has 0 trained parameters"):
        find_nonfinite(OneWeight().requires_grad_(False), batch, loss_of=lambda model, batch: torch.ones(()))


# --- Models of other forms ------------------------------------------------------------------------------------------


def test_report_by_tower_is_refused_before_the_run_where_there_are_no_towers() -> None:
    ran = []
    half = nn.ModuleDict({"vision": nn.Linear(2, 2), "language": nn.Linear(2, 2)})
    for model, missing in ((nn.Linear(2, 2), "Linear has no vision, projector, language"), (half, "has no projector:")):
        with pytest.raises(ValueError, match=f"{missing}.*StepLedger"):
            report_activations(model, lambda: ran.append(1))
    assert not ran


def test_ledger_of_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="ReLU has 0 parameters"):
        StepLedger(nn.ReLU())


def test_blocks_are_covered_only_where_a_list_of_them_is() -> None:
    projector, other = build_model(get_model("tiny")).projector, nn.Module()
    other.blocks = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for tower, found in ((projector, "Projector needs .* it has none"), (other, "its `blocks` is a Sequential")):
        for change in (lambda tower: cover_blocks(tower, [Segment(0, 1)]), uncover_blocks):
            with pytest.raises(ValueError, match=found):
                change(tower)


# --- Sizes ----------------------------------------------------------------------------------------------------------

TINY, NOTHING = get_model("tiny"), nn.Module()
PAIR = Ranks(rank=0, local_rank=0, world_size=2, device=ch03.ALONE.device, backend="gloo")
WRONG_SIZES: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (ch02.ragged_samples, (4,), {"period": 0}, "period = 0"),
    (ch02.ragged_samples, (-1,), {}, "num_samples = -1"),
    (ch02.cut, ([1, 2], len, 0), {}, "micro_batch_size = 0"),
    (ch02.cut, ([1, 2], len, -1), {}, "micro_batch_size = -1"),
    (ch02.measure_cuts, (2, (2,)), {"repeats": 0}, "repeats = 0"),
    (ch02.measure_cuts, (4, (2, 3)), {}, r"micro_batch_sizes\[1\] = 3: must divide num_samples = 4"),
    (ch02.measure_cuts, (4, (2, -2)), {}, r"micro_batch_sizes\[1\] = -2"),
    (ch02.measure_cuts, (4, ()), {}, "num_sizes = 0"),
    (ch02.train_three_ways, (PAIR, 0), {}, "num_steps = 0"),
    (ch02.train_three_ways, (PAIR, 1), {"measure_every": 0}, "measure_every = 0"),
    (ch02.train_three_ways, (PAIR, 1), {"samples_per_step": 2, "micro_batch_size": 2}, "are 1 for 2 ranks"),
    (load_pictures, (-1,), {}, "num_samples = -1"),
    (load_pictures, (10**6,), {}, "there are 1797 scans"),
    (ch03.follow_updates, (1.0, 0.1, -3), {}, "num_updates = -3"),
    (ch03.life_of_a_scale, (PAIR, 0, 1.0, 1), {}, "num_steps = 0"),
    (ch04.load_deep, (2, -1), {}, "num_layers = -1"),
    (ch04.load_deep, (0, 1), {}, "num_samples = 0"),
    (ch04.deep_shape, (0,), {}, "num_layers = 0"),
    (ch04.Chain, (-1, 4), {}, "num_layers = -1"),
    (ch04.measure_chain, ((1,), 0), {}, "num_layers = 0"),
    (ch04.measure_chain, ((0,), 4), {}, r"lengths\[0\] = 0"),
    (ch04.measure_chain, ((5,), 4), {}, "a segment of 4 layers has at most all"),
    (ch04.measure_chain, ((1,), 4), {"num_runs": 0}, "num_runs = 0"),
    (ch04.theory_peak, (36, 0), {}, "length = 0"),
    (ch04.theory_peak, (-36, 6), {}, "num_layers = -36"),
    (ch04.measure_policies, (NOTHING, None, ("none",)), {"num_runs": 0}, "num_runs = 0"),
    (ch04.measure_policies, (NOTHING, None, ()), {}, "num_policies = 0"),
    (ch04.measure_policies, (NOTHING, None, ("none", "ful")), {}, "did you mean 'full'"),
    (korthikanti_layer_bytes, (-24, 1, 128, 2), {}, "seq_len = -24"),
    (count_vision_layer_bytes, (TINY.vision, -1, 5, 4), {}, "num_tiles = -1"),
    (count_language_layer_bytes, (TINY.language, 1, 5, 0), {}, "element_bytes = 0"),
    (effective_batch_size, (2.5, 1, 1), {}, "micro_batch_size = 2.5: must be a whole number"),
    (effective_batch_size, (2, True, 1), {}, "accumulation_steps = True: must be a whole number"),
    (nearest_accumulation, (2.5, 1, 1), {}, "target = 2.5: must be a whole number"),
]


@pytest.mark.parametrize(("function", "args", "options", "found"), WRONG_SIZES)
def test_wrong_size_is_refused_by_name(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], found: str
) -> None:
    with pytest.raises(ValueError, match=found):
        function(*args, **options)


def test_length_between_whole_ones_is_allowed_for_a_curve() -> None:
    assert ch04.theory_peak(36, 4.5) == 12.5
