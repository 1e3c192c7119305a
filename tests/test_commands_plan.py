"""`vlmcourse plan`, and the picture of what memory buys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmcourse import cli
from vlmcourse.commands.plan import build_cluster
from vlmcourse.planner.choice import Task
from vlmcourse.planner.pareto import find_front
from vlmcourse.planner.search_space import SearchSpace
from vlmcourse.planner.workload import Workload
from vlmcourse.plots import plot_pareto
from vlmcourse.presets import get_cluster, get_model

BASE = [
    "plan",
    "internvl2-1b",
    "--gpus",
    "2",
    "--device",
    "h100",
    "--global-batch",
    "4",
    "--seq-len",
    "512",
    "--tiles",
    "1",
]


def test_a_table_says_which_plan_why_and_what_the_others_broke(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*BASE, "--top", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("1 x 2 h100, 4 samples of 512 tokens", "s/step", "MFU", "Lost to", "1 is ", "Memory: ", "[sharding]"):
        assert words in shown, shown
    assert "All numbers are predictions." in shown


def test_json_has_the_plans_the_rejected_and_the_misses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "front.png"
    assert cli.main([*BASE, "--json", "--pareto", str(picture), "--runnable", "--freeze", "vision,projector"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"best", "rejected", "misses", "num_plans", "examples", "search_s"} <= set(told)
    best = told["best"][0]
    plan = best["plan"]
    assert plan["dp_replicate"] * plan["dp_shard"] * plan["cp"] * plan["tp"] * plan["pp"] == 2
    assert best["tokens_per_s"] == pytest.approx(4 * 512 / best["step_s"])
    assert best["beats_next"] and picture.stat().st_size > 10_000


def test_no_plan_that_fits_is_exit_code_1_with_the_nearest_misses(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "internvl2-76b", "--gpus", "4", "--device", "a100-40", "--global-batch", "4", "--seq-len", "512"]
    assert cli.main(argv) == 1
    shown = capsys.readouterr().out
    assert "No plan fits." in shown and "Nearest misses:" in shown and "of 40.0 GB" in shown


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--gpus", "0"], "gpus"),
        (["--device", "h1000"], "There is no device 'h1000': did you mean"),
        (["--gpus", "12"], "--gpus 12 in machines of 8: some would have fewer"),
        (["--gpus", "16", "--device", "b200"], "set --network-gb-per-s"),
        (["--tiles", "1,x"], "--tiles '1,x': must be a whole number"),
        (["--freeze", "vision,eyes"], "frozen names 'eyes'"),
        (["--device", "v100-32"], "has no hardware"),
    ],
)
def test_nonsense_is_refused_with_what_to_change(
    changed: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*BASE, *changed]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_without_a_model_and_an_unknown_preset_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in ((str(tmp_path), "config.json"), ("internvl9", "There is no model preset")):
        assert cli.main(["plan", name, *BASE[2:]]) == 2
        assert words in capsys.readouterr().err


def test_a_cluster_is_like_the_preset_with_the_same_devices() -> None:
    two, preset = build_cluster("h100", 16), get_cluster("h100x16")
    assert (two.num_nodes, two.devices_per_node, two.network_bytes_per_s) == (2, 8, preset.network_bytes_per_s)
    assert two.host_memory_bytes == preset.host_memory_bytes
    half = build_cluster("h100", 4)
    assert half.num_nodes == 1 and half.host_memory_bytes == preset.host_memory_bytes / 2
    assert build_cluster("b200", 16, 4, 25.0).network_bytes_per_s == 25e9


def test_the_picture_names_the_leanest_the_best_that_fits_and_the_fastest() -> None:
    task = Task(
        model=get_model("internvl2-8b"),
        cluster=build_cluster("h100", 4),
        global_batch_size=8,
        workload=Workload(seq_len=4096, tiles_per_sample=6),
    )
    front = find_front(task, SearchSpace(schedules=("1f1b",), zero_stages=(3,), max_cp=1))
    figure = plot_pareto(front, 80e9, title="a model")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [label.split(":")[0] for label in labels[2:]] == ["leanest", "best that fits", "fastest of all"]
    axes = figure.axes[0]
    assert "GB" in axes.get_xlabel() and "tokens/s" in axes.get_ylabel()
    everything = plot_pareto(front, 1e12).legends[0].get_texts()
    assert len([text for text in everything if ":" in text.get_text()]) == 2  # the fastest is the best that fits
    with pytest.raises(ValueError, match="the front is empty"):
        plot_pareto([], 80e9)
