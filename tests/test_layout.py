"""How ranks share the work, as numbers: every grid of ranks, and everything that is refused before a rank starts."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from vlmcourse.config import ConfigError, parse_config
from vlmcourse.layout import AXES, SCHEDULES, Layout, ParallelConfig, find_layout, sequence_multiple
from vlmcourse.parallel.apply import apply_strategy, check_strategy
from vlmcourse.parallel.mesh import find_place
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.degrees import check_shape_divides, resolve_auto, settle
from vlmcourse.planner.grid import list_shares
from vlmcourse.presets import get_model
from vlmcourse.strategies import STRATEGIES


@pytest.mark.parametrize(
    ("config", "world_size", "expected"),
    [
        (ParallelConfig(), 1, Layout()),
        (ParallelConfig(tp=2), 2, Layout(tp=2)),
        (ParallelConfig(strategy="ddp"), 3, Layout(dp_replicate=3)),
        (ParallelConfig(strategy="zero1", cp=2), 4, Layout(dp_replicate=2, cp=2)),
        (ParallelConfig(strategy="ddp", cp=2), 2, Layout(cp=2)),
        (ParallelConfig(strategy="zero2"), 2, Layout(dp_shard=2)),
        (ParallelConfig(strategy="fsdp", tp=2, pp=2, cp=2), 16, Layout(pp=2, dp_shard=2, cp=2, tp=2)),
        (ParallelConfig(strategy="fsdp", cp=2), 2, Layout(cp=2)),
        (ParallelConfig(strategy="hsdp", dp_replicate=2), 8, Layout(dp_replicate=2, dp_shard=4)),
        (ParallelConfig(strategy="hsdp", dp_shard=2, tp=2), 8, Layout(dp_replicate=2, dp_shard=2, tp=2)),
        (ParallelConfig(strategy="hsdp", dp_replicate=2, dp_shard=1, cp=2), 4, Layout(dp_replicate=2, cp=2)),
    ],
)
def test_ranks_are_spread_over_the_axes(config: ParallelConfig, world_size: int, expected: Layout) -> None:
    assert config.problems() == []
    layout = find_layout(config, world_size)
    assert layout == expected
    assert layout.world_size == world_size


@pytest.mark.parametrize(
    ("config", "world_size", "words"),
    [
        (ParallelConfig(), 2, "'single' with 2 ranks: each would train a model of its own"),
        (ParallelConfig(tp=2), 4, "each group of 2 (tp x cp x pp) would train a model of its own"),
        (ParallelConfig(strategy="ddp"), 1, "'ddp' with 1 rank: .*start 2 with '--nproc 2'"),
        (
            ParallelConfig(strategy="fsdp", tp=2),
            2,
            "'fsdp' with 2 ranks: it shares samples between 2 or more; tp x cp x pp = 2 x 1 x 1 = 2 takes all of them, "
            "and nothing is left to share; start 4 with '--nproc 4'",
        ),
        (ParallelConfig(strategy="fsdp", tp=2), 3, "= 2 does not divide 3 rank"),
        (ParallelConfig(strategy="fsdp", tp=2, cp=2, pp=2), 4, "2 x 2 x 2 = 8 does not divide 4"),
        (ParallelConfig(strategy="hsdp", dp_replicate=3), 8, "3 x 2 with 8 data-parallel"),
        (ParallelConfig(strategy="hsdp", dp_replicate=4), 4, "4 x 1 with 4 data-parallel"),
        (ParallelConfig(strategy="hsdp", dp_shard=4), 4, "1 x 4 with 4 data-parallel"),
    ],
)
def test_numbers_of_ranks_that_do_not_fit_are_refused(config: ParallelConfig, world_size: int, words: str) -> None:
    assert config.problems() == []
    with pytest.raises(ValueError, match=words.replace("(", "\\(").replace(")", "\\)")):
        find_layout(config, world_size)


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"strategy": "dpp"}, "did you mean 'ddp'"),
        ({"strategy": "ZeRO-3"}, "it is called 'fsdp', or 'zero3'"),
        ({"strategy": "deepspeed"}, "add its stage, 'deepspeed-zero0' to 'deepspeed-zero3'"),
        ({"strategy": "accelerate-zero3"}, "it is called 'accelerate-deepspeed-zero3'"),
        ({"strategy": "deepspeed-zero4"}, "did you mean 'deepspeed-zero0' or .* or 'deepspeed-zero3'"),
        ({"strategy": "ddp", "tp": 2}, "exchange the gradients of a whole model"),
        ({"strategy": "zero1", "pp": 2}, "exchange the gradients of a whole model"),
        ({"strategy": "single", "cp": 2}, "must add up their gradients"),
        ({"strategy": "fsdp", "dp_shard": 2}, "only strategy = 'hsdp' reads it"),
        ({"strategy": "hsdp"}, "say how many copies there are"),
        ({"strategy": "fsdp", "tp": 4, "vision_tp": 2}, "must be 1 or equal to tp"),
        ({"strategy": "fsdp", "pp": 2, "vision_stages": 2}, "at least one stage must be left"),
        ({"strategy": "auto", "tp": 2}, "strategy = 'auto' chooses it"),
        ({"strategy": "fsdp", "adaptive": True}, "pp must be 2 or more and tp 1"),
        ({"strategy": "fsdp", "compression": "fp16"}, "only ddp has a hook for it"),
        ({"strategy": "ddp", "prefetch": 1}, "it gathers no weights ahead"),
        ({"strategy": "auto", "vision_heads": "mlp_only"}, "vision_heads = 'mlp_only': strategy = 'auto' chooses it"),
        ({"strategy": "auto", "cp_order": "contiguous"}, "cp_order = 'contiguous' with cp = 1"),
        (
            {"strategy": "fsdp", "tp": 2, "vision_tp": 1, "vision_heads": "mlp_only"},
            "with vision_tp = 1: each rank",
        ),
        ({"strategy": "fsdp", "vision_heads": "pad_heads"}, "'pad_heads' with tp = 1: .* leave it out"),
        ({"strategy": "fsdp", "cp_method": "ulysses"}, "cp_method = 'ulysses' with cp = 1: .* leave it out"),
        ({"strategy": "fsdp", "cp_order": "contiguous"}, "cp_order = 'contiguous' with cp = 1: .* leave it out"),
        ({"strategy": "fsdp", "pp_schedule": "gpipe"}, "pp_schedule = 'gpipe' with pp = 1: .* leave it out"),
        ({"strategy": "fsdp", "tp": 0}, "must be 1 or greater"),
        ({"strategy": "fsdp", "cp_method": "rings"}, "did you mean 'ring'"),
        ({"strategy": "fsdp", "pp_schedule": "1F1B"}, "choose one of gpipe, 1f1b"),
        ({"strategy": "fsdp", "vision_heads": "pad"}, "choose one of split, pad_heads"),
    ],
)
def test_values_that_do_not_go_together_are_refused_from_a_file_and_in_python(
    parallel: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"parallel": parallel})
    config, ranks = ParallelConfig(**parallel), Ranks(0, 0, 1, torch.device("cpu"), "none")
    for refuse in (
        lambda: apply_strategy(nn.Linear(2, 2), config, ranks),
        lambda: check_strategy(nn.Linear(2, 2), config, ranks),
        lambda: find_place(config, ranks),
        lambda: list_shares(config, 8, get_model("tiny")),
    ):
        with pytest.raises(ConfigError, match=words):
            refuse()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tp": "2"}, "parallel.tp = '2': must be of type int, not str"),
        ({"tp": 2.0}, "parallel.tp = 2.0: must be of type int, not float"),
        ({"adaptive": 1}, "parallel.adaptive = 1: must be of type bool, not int"),
        (
            {"strategy": None},
            "parallel.strategy = None: must be of type str, not NoneType; choose one of single, ddp, zero1, zero2, "
            "fsdp, hsdp, auto, deepspeed-zero0, deepspeed-zero1, deepspeed-zero2, deepspeed-zero3, "
            "accelerate-deepspeed-zero1, accelerate-deepspeed-zero2, accelerate-deepspeed-zero3, accelerate-ddp",
        ),
        ({"timeout_s": True}, "parallel.timeout_s = True: must be of type float, not bool"),
        ({"timeout_s": 60, "tp": 0}, "parallel.tp = 0: must be 1 or greater"),
    ],
)
def test_values_of_another_type_are_named(values: dict[str, Any], words: str) -> None:
    assert ParallelConfig(**values).problems() == [words]


LAYOUTS = [Layout(**dict(zip(AXES, sizes, strict=True))) for sizes in product((1, 2), (1, 2), (1, 3), (1, 2), (1, 2))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_has_a_position_of_its_own_and_groups_are_its_lines(layout: Layout) -> None:
    ranks = range(layout.world_size)
    assert len({tuple(layout.coordinates(rank).values()) for rank in ranks}) == layout.world_size
    for axis, size in zip(AXES, layout.sizes, strict=True):
        groups = {layout.group_of(rank, axis) for rank in ranks}
        assert sorted(rank for group in groups for rank in group) == list(ranks)
        for group in groups:
            assert [layout.coordinates(rank)[axis] for rank in group] == list(range(size))
    # The innermost axis talks most, so its ranks are neighbours.
    assert layout.group_of(0, "tp") == tuple(range(layout.tp))
    assert {layout.dp_rank(rank) for rank in ranks} == set(range(layout.dp_degree))


def test_a_layout_prints_itself_as_ranks_coordinates_and_samples() -> None:
    assert Layout(pp=2, dp_shard=2).table() == (
        "rank  pp  dp_shard  samples\n"
        "0     0   0         part 0 of 2\n"
        "1     0   1         part 1 of 2\n"
        "2     1   0         part 0 of 2\n"
        "3     1   1         part 1 of 2"
    )
    assert Layout(tp=2).table() == "rank  tp  samples\n0     0   all\n1     1   all"
    assert Layout().table() == "rank  samples\n0     all"
    long = Layout(dp_replicate=1000).table().splitlines()
    assert len(long) == 34 and long[-1] == "... and 968 ranks more"


def test_a_rank_outside_the_grid_is_refused() -> None:
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="from 0 to 1"):
            Layout(tp=2).coordinates(rank)


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        ("tiny", ParallelConfig(tp=4), ["tp=4 does not divide 2 key/value heads", "vision_tp=4 does not divide 2"]),
        ("tiny", ParallelConfig(tp=4, vision_tp=1), ["tp=4 does not divide 2 key/value heads: lower tp"]),
        (
            "internvl2-26b",
            ParallelConfig(tp=2),
            ["vision_tp=2 does not divide 25 vision heads: set vision_tp=1, or vision_heads to 'mlp_only' or"],
        ),
        ("tiny", ParallelConfig(tp=2, cp=4, cp_method="ulysses"), ["cp=4 does not divide the 2 query heads of a rank"]),
        (
            "tiny",
            ParallelConfig(pp=6),
            ["5 blocks cannot be split into 6 stages: each needs at least one block; lower pp"],
        ),
    ],
)
def test_degrees_that_do_not_divide_a_model_are_all_named(model: str, config: ParallelConfig, words: list[str]) -> None:
    with pytest.raises(ValueError, match=f"The model '{model}' cannot be split") as caught:
        check_shape_divides(config, get_model(model))
    for part in words:
        assert part in str(caught.value)
    assert str(caught.value).count("\n  - ") == len(words)


def test_other_plans_for_25_vision_heads_are_accepted() -> None:
    shape = get_model("internvl2-26b")
    for config in (
        ParallelConfig(tp=2, vision_tp=1),
        ParallelConfig(tp=2, vision_heads="mlp_only"),
        ParallelConfig(tp=2, vision_heads="pad_heads"),
    ):
        check_shape_divides(config, shape)


@pytest.mark.parametrize(
    ("world_size", "expected", "reason"),
    [
        (1, ParallelConfig(), "nothing to share"),
        (2, ParallelConfig(strategy="ddp"), "at most 4"),
        (4, ParallelConfig(strategy="ddp"), "at most 4"),
        (8, ParallelConfig(strategy="fsdp", tp=2, vision_tp=1), "at most 16"),
        (9, ParallelConfig(strategy="fsdp"), "does not divide 9"),
        (16, ParallelConfig(strategy="fsdp", tp=2, vision_tp=1), "at most 16"),
        (32, ParallelConfig(strategy="fsdp", tp=4, pp=4, vision_heads="mlp_only"), "more than 16"),
        (24, ParallelConfig(strategy="fsdp"), "does not divide 24"),
    ],
)
def test_auto_chooses_by_the_number_of_ranks_and_says_why(
    world_size: int, expected: ParallelConfig, reason: str
) -> None:
    asked = ParallelConfig(strategy="auto", timeout_s=7)
    assert asked.problems() == []
    find_layout(asked, world_size)
    chosen, why = resolve_auto(asked, world_size, get_model("internvl2-26b"))
    assert chosen == replace(expected, timeout_s=7)
    assert reason in why
    assert chosen.problems() == []
    find_layout(chosen, world_size)


@pytest.mark.parametrize(
    ("world_size", "parallel", "accumulation_steps", "expected", "reason"),
    [
        (32, {}, 4, {"tp": 4, "pp": 4, "vision_heads": "mlp_only"}, "32 ranks, more than 16: .* over the rest$"),
        (32, {}, 1, {}, "; but a step of 1 micro-batch with pp=4, and 1f1b needs at least 4, so shards .fsdp. alone$"),
        (
            32,
            {"pp_schedule": "gpipe"},
            1,
            {"tp": 4, "pp": 4, "vision_heads": "mlp_only", "pp_schedule": "gpipe"},
            "over the rest$",
        ),
        (
            32,
            {"pp_schedule": "zbv"},
            8,
            {},
            "; but zbv over fsdp leaves gradients out in silence, so shards .fsdp. alone; parallel.pp_schedule = 'zbv' "
            "is not used, since there is no pipeline$",
        ),
        (8, {"pp_schedule": "gpipe"}, 1, {"tp": 2, "vision_tp": 1}, "'gpipe' is not used"),
        (1000, {}, 8, {}, "^1,000 ranks, more than 16: .*; but 16 does not divide 1,000, so shards .fsdp. alone$"),
    ],
)
def test_auto_never_chooses_what_the_checks_refuse(
    world_size: int, parallel: dict[str, Any], accumulation_steps: int, expected: dict[str, Any], reason: str
) -> None:
    asked = parse_config({"parallel": {"strategy": "auto", **parallel}}).parallel
    chosen, why = settle(asked, world_size, get_model("internvl2-26b"), accumulation_steps)
    assert chosen == ParallelConfig(strategy="fsdp", **expected)
    assert re.search(reason, why), why
    assert chosen.problems() == []
    assert settle(chosen, world_size, get_model("internvl2-26b"), accumulation_steps) == (chosen, "")


@pytest.mark.parametrize("model", ["tiny", "internvl2-1b", "internvl2-26b"])
def test_auto_can_be_used_with_every_number_of_ranks_and_schedule(model: str) -> None:
    for world_size, steps, schedule in product((*range(1, 20), 32, 48, 1000), (1, 4, 7, 8), SCHEDULES):
        asked = ParallelConfig(strategy="auto", pp_schedule=schedule)
        chosen, why = settle(asked, world_size, get_model(model), steps)
        assert chosen.strategy != "auto" and why and chosen.problems() == []
        assert settle(chosen, world_size, get_model(model), steps) == (chosen, "")


def test_a_named_strategy_is_left_alone() -> None:
    for strategy in set(STRATEGIES) - {"auto"}:
        assert resolve_auto(ParallelConfig(strategy=strategy), 2, get_model("tiny")) == (
            ParallelConfig(strategy=strategy),
            "",
        )


def test_sequences_are_padded_to_what_their_ranks_can_split() -> None:
    assert sequence_multiple(ParallelConfig()) == 8
    assert sequence_multiple(ParallelConfig(tp=3)) == 24
    assert sequence_multiple(ParallelConfig(strategy="fsdp", cp=4, tp=2)) == 16
    assert sequence_multiple(ParallelConfig(strategy="fsdp", cp=3)) == 24


def test_zero3_is_the_papers_name_of_fsdp() -> None:
    assert ParallelConfig(strategy="zero3") == ParallelConfig(strategy="fsdp")
    assert ParallelConfig(strategy="zero3").problems() == []
