"""The dry run: against real ranks, against the planner, full depth against a few layers, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from dryrun_worker import CASES, config_of
from ranks import run_worker

from vlmcourse.cli import main
from vlmcourse.config import parse_config
from vlmcourse.dryrun import BatchSize, DryRun, dry_run, extrapolate_run
from vlmcourse.dryrun.against_planner import compare_with_planner
from vlmcourse.dryrun.depths import with_depth
from vlmcourse.planner.flops import Work, count_step_flops
from vlmcourse.presets import get_model
from vlmcourse.values import ConfigError

RELATIVE = 0.03
"""By owner: what a dry run may be off."""
SMALL_BYTES = 4096
"""Below this an owner is a matter of counters and single losses."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("dryrun")
    run_worker("dryrun_worker.py", str(folder))
    return [json.loads((folder / f"found{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def close(found: float, expected: float) -> bool:
    return abs(found - expected) <= max(SMALL_BYTES, RELATIVE * expected)


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_holds_and_sends_what_a_real_rank_does(name: str, real: list[dict[str, Any]]) -> None:
    rank = list(CASES).index(name) % 2
    measured = real[rank][name]
    played = dry_run(config_of(name), rank, 2, size=BatchSize(*measured["size"]))
    live, expected = played.peak.live_bytes, measured["peak"]["live_bytes"]
    differences = {
        owner: (live.get(owner, 0), expected.get(owner, 0))
        for owner in {**live, **expected}
        if not close(live.get(owner, 0), expected.get(owner, 0))
    }
    assert not differences, f"{name}: played and measured bytes at the peak"
    assert played.peak.phase == measured["peak"]["phase"]
    most = {owner: max(m.live_bytes.get(owner, 0) for m in played.moments) for owner in ("weights", "gradients")}
    assert close(most["weights"], measured["state"]["weights_bytes"])
    assert close(most["gradients"], measured["state"]["gradients_bytes"])
    assert close(played.peak.live_bytes["optimizer"], measured["state"]["optimizer_bytes"])
    if name in ("fsdp", "tp"):  # DDP's buckets are always there, and the monitor's own ledger sees them in backward
        assert close(played.peak.total_bytes, measured["plain_peak_bytes"])
    assert played.flops == measured["flops"]
    sent = {kind: numbers for kind, numbers in measured["calls"].items() if kind in ("all-gather", "reduce-scatter")}
    by_kind: dict[str, list[int]] = {}
    for one in played.collectives:
        sums = by_kind.setdefault(one.kind, [0, 0])
        by_kind[one.kind] = [sums[0] + one.calls, sums[1] + one.payload_bytes]
    # A Trainer adds up token counts, losses and norms over all ranks besides: a few all-reduces of some bytes.
    assert {kind: numbers for kind, numbers in by_kind.items() if kind in sent} == sent
    wanted = measured["calls"].get("all-reduce", [0, 0])[1]
    assert close(by_kind.get("all-reduce", [0, 0])[1], wanted)


DEEP: dict[str, Any] = {
    "parallel": {"strategy": "fsdp"},
    "train": {"precision": "bf16", "micro_batch_size": 2},
    "activations": {"vision": "full"},
    "data": {"max_seq_len": 64},
}


@pytest.fixture(scope="module")
def deep() -> tuple[DryRun, DryRun]:
    config, shape = parse_config(DEEP), with_depth(get_model("tiny"), 5, 6)
    return dry_run(config, 1, 4, shape=shape), extrapolate_run(config, 1, 4, shape=shape)


def test_a_few_layers_say_what_all_of_them_need(deep: tuple[DryRun, DryRun]) -> None:
    full, few = deep
    assert few.peak.total_bytes == pytest.approx(full.peak.total_bytes, rel=0.01)
    for owner, size in full.peak.live_bytes.items():
        assert few.peak.live_bytes[owner] == pytest.approx(size, rel=0.01)
    assert (few.peak.phase, few.peak.layer) == (full.peak.phase, full.peak.layer)
    of_full = [(moment.phase, moment.layer, moment.total_bytes) for moment in full.course()]
    assert [(moment.phase, moment.layer, moment.total_bytes) for moment in few.course()] == of_full
    assert few.flops == full.flops
    assert few.collectives == full.collectives


def test_the_planners_formulas_agree_on_the_training_state(deep: tuple[DryRun, DryRun]) -> None:
    config = parse_config(DEEP)
    rows = compare_with_planner(deep[0], config, config.parallel, with_depth(get_model("tiny"), 5, 6))
    by_owner = {row.owner: row for row in rows}
    for owner in ("weights", "optimizer"):
        assert by_owner[owner].dry_run_bytes == pytest.approx(by_owner[owner].formula_bytes, rel=RELATIVE)
    most = max(moment.live_bytes.get("gradients", 0) for moment in deep[0].moments)
    assert most == pytest.approx(by_owner["gradients"].formula_bytes, rel=RELATIVE)


def test_accumulated_micro_batches_count_as_often_as_they_run() -> None:
    table: dict[str, Any] = {"parallel": {"strategy": "single"}, "data": {"max_seq_len": 32}}
    table["train"] = {"micro_batch_size": 1, "accumulation_steps": 7}
    played = dry_run(parse_config(table), 0, 1)
    assert max(moment.micro_batch for moment in played.moments) == 2
    assert played.flops == 7 * count_step_flops(get_model("tiny"), Work.of_sequences([32], num_tiles=1)).hardware


def test_what_is_not_played_is_refused_by_name() -> None:
    table: dict[str, Any] = {
        "parallel": {"strategy": "fsdp", "pp": 2},
        "train": {"precision": "fp16", "accumulation_steps": 4},
    }
    with pytest.raises(ConfigError) as refused:
        dry_run(parse_config(table), 0, 4)
    assert "parallel.pp = 2" in str(refused.value)
    assert "train.precision = 'fp16'" in str(refused.value)
    with pytest.raises(ConfigError, match="every:2"):
        extrapolate_run(parse_config({"activations": {"language": "every:2"}, "parallel": {"strategy": "fsdp"}}), 0, 2)
    with pytest.raises(ValueError, match="from 0 to 1"):
        dry_run(parse_config({"parallel": {"strategy": "fsdp"}}), 2, 2)
    with pytest.raises(ValueError, match="raise data.max_seq_len"):
        dry_run(parse_config({"parallel": {"strategy": "single"}}), 0, 1, size=BatchSize(1, 8, 4))
    assert not dist.is_initialized()


def test_the_command_prints_json_and_says_whether_a_cluster_is_large_enough(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[parallel]\nstrategy = "fsdp"\n[data]\nmax_seq_len = 32\n[train]\nmicro_batch_size = 1\n')
    assert main(["dry-run", str(path), "--cluster", "h100x8", "--rank", "7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["fits"]
    assert found["coordinates"]["dp_shard"] == 7
    assert sum(found["peak"]["bytes"].values()) == found["peak"]["total_bytes"]
    assert main(["dry-run", str(path)]) == 2
    assert main(["dry-run", str(path), "--cluster", "h100x8", "--world-size", "4"]) == 2
    assert "leave --world-size out" in capsys.readouterr().err
