"""Chapter 6's bad runs: who waits for whom, in numbers that can be worked out by hand, and what the figures show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab_cells import ROOT
from matplotlib.figure import Figure

from vlmcourse import plots
from vlmcourse.grading import ex04_5
from vlmcourse.labs.bad_runs import FixGain, find_spans, find_waits, measure_gains
from vlmcourse.monitor.diagnosis import diagnose, read_run
from vlmcourse.monitor.recorded import recorded_causes, recorded_run
from vlmcourse.monitor.step_log import read_step_log
from vlmcourse.plots.steps import LOOKS, find_parts

CYCLE_S = 1.0
NUM_STEPS = 9


def write_run(folder: Path, waits_s: dict[int, list[float]], *, event_s: float = 0.0) -> Path:
    """Write a run of steps of `CYCLE_S` each in which ranks wait as said, in turns, and compute for the rest."""
    (folder / "steps").mkdir(parents=True)
    for rank, waits in waits_s.items():
        lines = []
        for step in range(1, NUM_STEPS + 1):
            wait_s = waits[step % len(waits)]
            computing_s = CYCLE_S - wait_s - event_s
            lines.append(
                {"step": step, "start_s": step * CYCLE_S, "step_s": CYCLE_S - event_s, "world_size": len(waits_s)}
                | {"data_wait_s": 0.0, "forward_s": computing_s, "backward_s": 0.0, "optimizer_s": 0.0, "other_s": 0.0}
                | {"communication_s": wait_s}
            )
            if event_s:
                start_s = (step + 1) * CYCLE_S - event_s
                lines.append({"event": "evaluation", "step": step, "start_s": start_s, "seconds": event_s})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "steps" / f"rank{rank:04d}.jsonl").write_text(text)
    return folder


def test_what_even_the_readiest_rank_waits_is_the_way_of_data_also_if_ranks_take_turns(tmp_path: Path) -> None:
    one_is_late = read_run(write_run(tmp_path / "one", {0: [0.5], 1: [0.1]}))
    assert find_waits(one_is_late) == pytest.approx({"data on their way": 0.1, "late ranks": 0.2})
    turns = read_run(write_run(tmp_path / "turns", {0: [0.5, 0.1], 1: [0.1, 0.5]}))
    assert find_waits(turns) == pytest.approx({"data on their way": 0.1, "late ranks": 0.2})
    three = read_run(write_run(tmp_path / "three", {0: [0.4], 1: [0.1], 2: [0.1]}))
    assert find_waits(three) == pytest.approx({"data on their way": 0.1, "late ranks": 0.1})


def test_the_way_of_data_is_what_the_diagnosis_calls_communication() -> None:
    for name in ("slow links", "sleeping rank", "healthy"):
        found = diagnose(recorded_run(name))
        shares = {finding.cause: finding.share for finding in (*found.findings, *found.below)}
        assert find_waits(read_run(recorded_run(name)))["data on their way"] == pytest.approx(shares["communication"])


def test_spans_of_a_step_follow_each_other_and_fill_it() -> None:
    run = recorded_run("sleeping rank")
    spans = find_spans(run, 8)
    for rank, record in read_run(run).steps[8].items():
        mine = [span for span in spans if span.rank == rank]
        assert all(a.end_s == b.start_s for a, b in zip(mine, mine[1:], strict=False))
        assert mine[-1].end_s - mine[0].start_s == pytest.approx(record.step_s, rel=1e-3)
    assert min(span.start_s for span in spans) == 0
    with pytest.raises(ValueError, match="step 2: the run has steps 3 to 15"):
        find_spans(run, 2)
    with pytest.raises(ValueError, match="several micro-batches"):
        find_spans(recorded_run("tiny micro-batches"), 8)


def test_parts_of_a_step_add_up_to_the_time_to_the_next_one(tmp_path: Path) -> None:
    facts = read_run(write_run(tmp_path, {0: [0.3], 1: [0.1]}, event_s=0.2))
    assert find_parts(facts, 4, 0)["evaluation"] == pytest.approx(0.2)
    for folder in (tmp_path, *(recorded_run(name) for name in recorded_causes())):
        facts = read_run(folder)
        for step, ranks in facts.cycles_s.items():
            for rank, seconds in ranks.items():
                parts = find_parts(facts, step, rank)
                assert set(parts) <= set(LOOKS)
                assert sum(parts.values()) == pytest.approx(seconds, rel=0.02, abs=1e-3)


def test_figures_have_a_bar_a_rank_and_a_panel_a_run() -> None:
    runs = {name: recorded_run(name) for name in ("healthy", "frequent saves")}
    steps = plots.plot_steps(runs, ranks=[1], title="t")
    assert [axes.get_title(loc="left") for axes in steps.axes] == ["healthy, rank 1", "frequent saves, rank 1"]
    ranks = plots.plot_rank_times(runs, title="t")
    assert _rows_of(ranks) == ["healthy  rank 0", "rank 1", "frequent saves  rank 0", "rank 1"]
    verdicts = plots.plot_diagnoses({name: diagnose(folder) for name, folder in runs.items()}, title="t")
    assert [text.get_text() for text in verdicts.axes[0].texts] == ["healthy", "checkpoints"]
    gain = FixGain(fault="saves", fix="save less often", predicted=0.5, uncertainty=0.1, measured=(0.4, -0.1))
    shown = plots.plot_gains([gain], title="t").axes[0]
    assert shown.patches[0].get_width() == pytest.approx(50)  # pyright: ignore[reportAttributeAccessIssue]
    assert [list(line.get_xdata()) for line in shown.lines[:2]] == [[40, 60], [40, -10]]  # pyright: ignore


def test_a_phase_has_one_name_in_all_figures_and_in_the_text() -> None:
    names = {"waits for data", "forward", "backward", "waits for ranks", "optimizer", "other"}
    run = recorded_run("slow storage")
    figures = {
        "phases": plots.plot_phases(read_step_log(run)),
        "steps": plots.plot_steps({"run": run}, title="t"),
        "timeline": plots.plot_timeline({"run": find_spans(run, 8)}),
        "symptoms": plots.plot_trace(ex04_5.first_trace()),
    }
    for name, figure in figures.items():
        legend = figure.legends[0] if figure.legends else figure.axes[-1].get_legend()
        assert legend is not None
        said = {text.get_text() for text in legend.get_texts()} - {"mean", "median", "between steps"}
        assert {"waits for data", "waits for ranks"} <= said <= names, (name, said)
    opening = (ROOT / "solutions/ch06_monitoring/ch06_monitoring.ipynb").read_text()
    assert not [name for name in names if f"**{name}**" not in opening]
    assert '*(PHASE_LABELS[name] for name in phases), \\"sum\\"' in opening, "the headings of the first table"
    assert " waited for data " in diagnose(run).findings[0].evidence[0]


def _rows_of(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_gains_are_measured_of_faults_that_can_be_mended_only() -> None:
    with pytest.raises(ValueError, match="healthy"):
        measure_gains(["healthy"])
