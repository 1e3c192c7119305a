"""Who will hold what, in words, before any rank starts; `test_parallel_holdings.py` compares it with live ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from vlmcourse.layout import ParallelConfig
from vlmcourse.planner.grid import list_shares, share_table
from vlmcourse.presets import get_model

TINY = get_model("tiny")


def test_a_table_names_samples_positions_layers_and_weights_of_every_rank() -> None:
    config = ParallelConfig(strategy="fsdp", pp=2, cp=2)
    rows = [re.split(r"  +", line) for line in share_table(config, 8, TINY).splitlines()]
    assert rows[0] == ["rank", "pp", "dp_shard", "cp", "samples", "positions", "layers", "weights"]
    shards = "whole, in shards of 1/4"
    assert rows[2] == ["1", "0", "0", "1", "part 0 of 2", "chunks 1 and 2 of 4", "patches, vision 0-1", shards]
    second = "projector and embedding, language 0-2, norm and output"
    assert rows[7] == ["6", "1", "1", "0", "part 1 of 2", "chunks 0 and 3 of 4", second, shards]
    assert len(rows) == 9


@pytest.mark.parametrize(
    ("world_size", "parallel", "words"),
    [
        (2, {"strategy": "ddp"}, ["whole"] * 2),
        (2, {"strategy": "zero1"}, ["whole, 1/2 of the optimizer's state"] * 2),
        (4, {"strategy": "zero2"}, ["whole, in shards of 1/4 between steps"] * 4),
        (4, {"strategy": "hsdp", "dp_replicate": 2}, ["whole, in shards of 1/2"] * 4),
        (2, {"tp": 2}, ["1/2 of each matrix"] * 2),
        (2, {"tp": 2, "vision_tp": 1}, ["1/2 of each matrix, the vision tower whole"] * 2),
        (4, {"strategy": "fsdp", "tp": 2}, ["1/2 of each matrix, in shards of 1/2"] * 4),
        (
            4,
            {"tp": 2, "pp": 2, "vision_stages": 1, "vision_heads": "mlp_only"},
            ["1/2 of each matrix, vision attention whole"] * 2 + ["1/2 of each matrix"] * 2,
        ),
        (4, {"tp": 2, "pp": 2, "vision_stages": 1, "vision_tp": 1}, ["whole"] * 2 + ["1/2 of each matrix"] * 2),
    ],
)
def test_weights_are_told_as_the_strategy_leaves_them(
    world_size: int, parallel: dict[str, Any], words: list[str]
) -> None:
    config = ParallelConfig(**parallel)
    assert config.problems() == []
    assert [share.weights for share in list_shares(config, world_size, TINY)] == words


def test_a_v_shaped_schedule_gives_the_first_rank_both_ends() -> None:
    first, second = list_shares(ParallelConfig(pp=2, pp_schedule="zbv"), 2, TINY)
    assert first.layers.startswith("patches, vision 0; ") and first.layers.endswith("norm and output")
    assert ";" in second.layers and "output" not in second.layers


def test_what_cannot_be_has_no_table() -> None:
    for config, words in {
        ParallelConfig(strategy="auto"): "not chosen yet",
        ParallelConfig(tp=4): "cannot be split",
        ParallelConfig(pp=2): "would train a model of its own",
    }.items():
        with pytest.raises(ValueError, match=words):
            list_shares(config, 4, TINY)


def test_a_long_table_is_cut_and_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from vlmcourse.planner.grid import *; from vlmcourse.presets import get_model\n"
        "print(share_table(ParallelConfig(strategy='fsdp'), 1000, get_model('tiny')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 34 and done.stdout.endswith("... and 968 ranks more\n")
