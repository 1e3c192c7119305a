"""Chapter 7's first notebook: what towers weigh, choices as configurations, figures of plans, quoted numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from matplotlib.patches import Rectangle

from vlmcourse import plots
from vlmcourse.dryrun import BatchSize, DryRun
from vlmcourse.dryrun.ledger import Moment
from vlmcourse.labs import ch07
from vlmcourse.planner import Workload
from vlmcourse.planner.choice import Choice, Task
from vlmcourse.planner.job import describe_config
from vlmcourse.planner.rank_peak import OWNERS, Peak
from vlmcourse.planner.run_peak import estimate_run_peak
from vlmcourse.plots.planning import MEMORY_STYLES, PlayedPlan, by_style
from vlmcourse.presets import get_cluster, get_model

ROOT = Path(__file__).parents[1]
TASK = Task(
    model=get_model("internvl2-26b"),
    cluster=get_cluster("h100x8"),
    global_batch_size=128,
    workload=Workload(seq_len=4096, tiles_per_sample=7),
)
QUOTED = Choice(tp=2, dp_shard=4, zero_stage=2, grad_accum_steps=32, recompute_vision="full", recompute_language="full")
SHARDED = Choice(dp_shard=8, zero_stage=3, grad_accum_steps=16, recompute_vision="full", recompute_language="full")


def test_towers_weigh_what_a_person_counts() -> None:
    amounts = ch07.count_towers(TASK)
    assert amounts["parameters (billion)"]["language"] == pytest.approx(19.861260288)
    # 6 FLOPs a parameter and position of what is in layers and the output matrix, and attention, all without its mask.
    language = TASK.model.language
    matrices = 19.861260288e9 - language.vocab_size * language.hidden_size
    attention = 12 * language.num_layers * language.hidden_size * 4096**2
    flops = amounts["FLOPs of a sample (trillion)"]["language"]
    assert flops == pytest.approx((6 * matrices * 4096 + attention) / 1e12, rel=1e-3)
    kept = amounts["activations of a sample (GB)"]
    assert kept["vision"] / kept["language"] == pytest.approx(1, abs=0.02)
    one_tile = ch07.count_towers(replace(TASK, workload=Workload(seq_len=4096, tiles_per_sample=1)))
    assert one_tile["activations of a sample (GB)"]["vision"] == pytest.approx(kept["vision"] / 7)


@pytest.mark.parametrize("choice", [QUOTED, SHARDED, SHARDED._replace(micro_batch_size=2, recompute_vision="none")])
@pytest.mark.parametrize("frozen", [(), ("vision",)])
def test_a_choice_and_its_configuration_need_the_same_bytes(choice: Choice, frozen: tuple[str, ...]) -> None:
    task = replace(TASK, frozen=frozen, fixed_bytes=0)
    num = choice.grad_accum_steps
    choice = choice._replace(recompute_vision="none") if frozen else choice
    config = ch07.config_of(task, choice, played_micro_batches=num)
    job = describe_config(config, 8, task.model, task.workload)
    assert estimate_run_peak(job).total_bytes == ch07.cost_of(task, choice).peak_bytes
    assert config.data.max_tiles_per_image + 1 == task.workload.tiles_per_sample


@pytest.mark.parametrize(
    ("task", "choice"),
    [
        (replace(TASK, precision="fp32"), SHARDED),
        (TASK, Choice(pp=4, dp_shard=2, zero_stage=1, grad_accum_steps=64)),
        (TASK, Choice(dp_replicate=2, dp_shard=4, zero_stage=1, grad_accum_steps=16)),
        (replace(TASK, workload=Workload(seq_len=4096, tiles_per_sample=2)), SHARDED),
    ],
)
def test_what_is_not_played_so_is_refused_by_name(task: Task, choice: Choice) -> None:
    with pytest.raises(ValueError, match="choose"):
        ch07.config_of(task, choice)


def test_every_owner_of_a_played_step_and_of_the_planner_is_drawn() -> None:
    for owner in (*OWNERS[:-1], "recomputed", "loss", "other"):
        assert sum(by_style({owner: 5, "fixed": 9}).values()) == 5
    peak = Peak(stage=0, moment="head", owners=dict.fromkeys(OWNERS, 10**9))
    moments = tuple(
        Moment(phase, layer, i, {"weights": 10**9, "other": (i + 1) * 10**9})
        for i in range(2)
        for phase in ("forward", "backward")
        for layer in ("a", "b")
    )
    coordinates, size = {"dp_shard": 0}, BatchSize(1, 8, 1)
    found = DryRun(0, 8, coordinates, "tiny", 2, 3, size, True, moments, (), (), 0, 0.0)
    figure = plots.plot_played_memory({"plan": PlayedPlan(found=found, predicted=peak)}, 2 * 10**9)
    course, bar = figure.axes
    assert "3.0 GB played" in course.get_title(loc="left")
    assert f"{(len(OWNERS) - 1):.1f}" in bar.get_title()
    assert len(bar.patches) == len(MEMORY_STYLES)


def test_seconds_of_a_plan_add_up_in_its_bar() -> None:
    cost = ch07.cost_of(TASK, QUOTED)
    figure = plots.plot_step_seconds({"quoted": cost})
    drawn = sum(bar.get_width() for bar in figure.axes[0].patches if isinstance(bar, Rectangle))
    assert drawn == pytest.approx(cost.seconds, rel=0.01)
    shares = plots.plot_tower_shares(ch07.count_towers(TASK)).axes[0].patches
    assert sum(bar.get_width() for bar in shares if isinstance(bar, Rectangle)) == pytest.approx(300)
    for draw in (plots.plot_step_seconds, plots.plot_tower_shares):
        with pytest.raises(ValueError, match="to draw"):
            draw({})
    with pytest.raises(ValueError, match="to draw"):
        plots.plot_played_memory({}, 1)


def test_errors_that_the_notebook_quotes_stand_in_the_benchmarks() -> None:
    path = ROOT / "solutions/ch07_internvl/ch07_internvl.ipynb"
    text = next(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.id == "s3_doubt")
    rows = {
        "bench/validate_planner.md": ("| playbook | held back | 971 |", ("971", "5.8", "23.6")),
        "bench/planner_efficiency.md": ("| one node, held back |", ("72", "3.8", "10.9")),
    }
    for name, (start, numbers) in rows.items():
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        row = next(line for line in lines if line.startswith(start))
        for number in numbers:
            assert f" {number} " in row and number in text, (name, number)
    efficiency = (ROOT / "bench/planner_efficiency.md").read_text(encoding="utf-8")
    assert "| tp 1 to 8, pp 1 | 186 | 0.98 | 1.12 | 1.39 |" in efficiency and "1.39" in text
