"""`monitor/profiler.py` on two ranks: what was planted is what the traces show."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from profiler_worker import CASES, DIAGNOSED, FIRST_STEP, LONG_SLEEP_S, NUM_STEPS, SLEEP_S
from ranks import run_worker
from torch.profiler import profile

from vlmcourse import cli
from vlmcourse.config import ConfigError, parse_config
from vlmcourse.monitor.diagnosis import diagnose
from vlmcourse.monitor.profile_summary import SUMMARY_JSON, read_summary
from vlmcourse.monitor.profiler import profile_steps
from vlmcourse.monitor.trace_activity import interval_of, read_activities, read_step_spans
from vlmcourse.monitor.trace_files import STEP_PREFIX, find_format_problems, read_traces
from vlmcourse.monitor.trace_merge import ABOUT, MERGED_NAME, read_merged
from vlmcourse.monitor.trace_summary import EXPOSED, IDLE, TraceSummary, summarise, summarise_folder
from vlmcourse.parallel.overlap import intersect, subtract, total_s
from vlmcourse.parallel.phases import PHASE_PREFIX, phase
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.spans import BACKWARD, DATA_WAIT, FORWARD, LANES, OPTIMIZER, PHASES
from vlmcourse.train.profiling import SUMMARY_NAME, profile_folder, profile_training
from vlmcourse.train.trainer import Trainer

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
Found = dict[str, tuple[Path, dict[str, Any], TraceSummary]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("profiler")
    run_worker("profiler_worker.py", str(made))
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """By case, the folder of traces, the merged trace, and what it says."""
    runs = {name: folder / name.replace(" ", "_") / "profile" for name in CASES}
    traces = {name: read_merged(of_run / MERGED_NAME) for name, of_run in runs.items()}
    return {name: (of_run, traces[name], summarise(traces[name])) for name, of_run in runs.items()}


@pytest.mark.slow
def test_every_rank_writes_a_trace_that_names_steps_and_phases(found: Found) -> None:
    for name, (of_run, trace, summary) in found.items():
        assert [rank.rank for rank in read_traces(of_run)] == [0, 1]
        assert summary.steps == tuple(range(FIRST_STEP, NUM_STEPS + 1)), name
        for activity in read_activities(trace):
            assert all(activity.phases[part] for part in PHASES), name
            waits = 1 if name == "pipeline" else 2  # loading, and the way of a micro-batch to the device
            assert len(activity.phases[DATA_WAIT]) == waits * len(summary.steps), name
            forwards, backwards = activity.phases[FORWARD], activity.phases[BACKWARD]
            assert forwards[0] < backwards[0] < activity.phases[OPTIMIZER][-1], name
        assert (of_run / "summary.txt").read_text(encoding="utf-8") == f"{summary}\n"
        assert read_summary(of_run / SUMMARY_JSON) == summary


@pytest.mark.slow
def test_what_engines_of_other_projects_send_is_named(found: Found) -> None:
    sent: dict[str, set[str]] = {}
    for name in ("accelerate", "deepspeed"):
        for activity in read_activities(found[name][1]):
            inside = [span for span in activity.sent if intersect((interval_of(span),), activity.windows)]
            sent.setdefault(name, set()).update(span["name"] for span in inside)
    assert "gloo:all_reduce" in sent["accelerate"] and "gloo:all_gather" not in sent["accelerate"]
    # ZeRO-3: weights are gathered before they are used, gradients reduced to who owns them
    assert {"gloo:all_gather", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"} <= sent["deepspeed"]


@pytest.mark.slow
def test_a_diagnosis_reads_the_profile_that_a_run_leaves(found: Found) -> None:
    diagnosed = diagnose(found[DIAGNOSED][0].parent)
    assert diagnosed.profile[0].startswith(f"Profile of steps {FIRST_STEP} to {NUM_STEPS}: ")
    assert diagnosed.first_step == NUM_STEPS + 1 and any("are left out" in note for note in diagnosed.notes)
    bubble = [finding for finding in (*diagnosed.findings, *diagnosed.below) if finding.cause == "pipeline_bubble"]
    assert bubble and any("The profile of steps" in sentence for sentence in bubble[0].evidence)


@pytest.mark.slow
def test_the_merged_trace_has_the_form_that_viewers_read_under_every_strategy(found: Found) -> None:
    for name, (_, trace, _) in found.items():
        assert find_format_problems(trace) == [], name
        assert {row["rank"] for row in trace[ABOUT]["rows"]} == {0, 1}
        clocks = trace[ABOUT]["clocks"]
        assert clocks[1]["uncertainty_s"] < 0.02, "less than what these tests tell apart"
        spans = read_step_spans(trace)
        assert {(span.rank, span.lane) for span in spans} == {(rank, lane) for rank in (0, 1) for lane in LANES}


@pytest.mark.slow
def test_times_of_a_rank_add_up_to_its_steps(found: Found) -> None:
    for name, (_, _, summary) in found.items():
        for of_rank in summary.ranks:
            parts = of_rank.compute_s, of_rank.exposed_s, of_rank.stall_s, of_rank.idle_s
            assert sum(parts) == pytest.approx(of_rank.seconds) and min(parts) >= -1e-9, name
            assert of_rank.exposed_s <= of_rank.communication_s and of_rank.exposed_s > 0, name


def together_s(trace: dict[str, Any]) -> float:
    """Seconds in which rank 1 did neither compute nor communicate, and rank 0 waited for communication."""
    first, second = read_activities(trace)
    sleeping = subtract(subtract(second.windows, second.compute), second.communication)
    return total_s(intersect(first.exposed, sleeping))


@pytest.mark.slow
def test_a_loader_that_sleeps_is_a_data_stall_there_and_exposed_communication_elsewhere(found: Found) -> None:
    _, trace, summary = found["slow loader"]
    waiting, slow = summary.ranks
    asleep_s = len(summary.steps) * SLEEP_S
    assert slow.stall_s >= asleep_s and slow.stall_s > waiting.stall_s + 0.5 * asleep_s
    assert together_s(trace) >= 0.5 * asleep_s, "on one clock"
    assert summary.longest_gap is not None and summary.longest_gap.seconds >= 0.8 * SLEEP_S


@pytest.mark.slow
def test_a_rank_that_sleeps_is_idle_there_and_exposed_communication_elsewhere(found: Found) -> None:
    _, trace, summary = found["sleeping rank"]
    waiting, slow = summary.ranks
    asleep_s = len(summary.steps) * LONG_SLEEP_S
    assert slow.idle_s >= asleep_s and slow.idle_s > waiting.idle_s + 0.5 * asleep_s
    assert together_s(trace) >= 0.5 * asleep_s, "on one clock"
    assert summary.slowest.rank == 1
    gap = summary.longest_gap
    assert gap is not None and (gap.rank, gap.kind) in ((1, IDLE), (0, EXPOSED)) and gap.before != gap.after


@pytest.mark.slow
def test_a_loop_of_ones_own_is_recorded_and_one_that_is_too_short_is_refused(folder: Path) -> None:
    for rank in range(2):
        said = json.loads((folder / f"found{rank}.json").read_text(encoding="utf-8"))
        assert said["loop"] == ""
        assert said["short loop"].startswith(f"rank {rank}: the loop called profiler.step() 1 times")
    names = [{event.get("name") for event in trace.events} for trace in read_traces(folder / "loop")]
    assert all({f"{STEP_PREFIX}1", PHASE_PREFIX + FORWARD, PHASE_PREFIX + BACKWARD} <= of_rank for of_rank in names)
    assert not (folder / "short").exists()


def run_alone(folder: Path, **profile: int) -> Trainer:
    config = parse_config(
        {
            "run": {"output_dir": str(folder)},
            "train": {"num_steps": 3, "micro_batch_size": 2, "checkpoint_every": 1},
            "data": {"num_train_samples": 16, "num_eval_samples": 2},
            "profile": profile,
        }
    )
    return Trainer(config, ALONE, show_progress=False)


def test_a_run_that_was_resumed_with_too_few_steps_left_says_so_before_any(tmp_path: Path) -> None:
    trainer = run_alone(tmp_path, wait=0, active=2)
    trainer.step = 1
    with pytest.raises(ConfigError, match=r"num_steps = 3, of which 1 are done: .* 0 \+ 1 \+ 2 = 3 steps"):
        trainer.fit()
    assert trainer.step == 1 and not trainer.after_step


def test_an_earlier_profile_is_replaced_and_a_loop_that_fails_leaves_none(tmp_path: Path) -> None:
    old = tmp_path / "rank0003.1.pt.trace.json"
    old.write_text("{}", encoding="utf-8")

    def loop(fails_at: int) -> None:
        with profile_steps(tmp_path, wait=0, warmup=1, active=1, ranks=ALONE, first_step=7) as profiler:
            for step in range(3):
                if step == fails_at:
                    raise KeyError(step)
                torch.ones(2).sum()
                profiler.step()

    with pytest.raises(KeyError):
        loop(0)
    assert old.exists(), "nothing was recorded yet"
    with pytest.raises(KeyError):
        loop(1)
    assert list(tmp_path.iterdir()) == []
    loop(3)
    [path] = tmp_path.iterdir()
    assert path.name.startswith("rank0000.") and path.name.endswith(".pt.trace.json")
    [trace] = read_traces(tmp_path)
    assert {event["name"] for event in trace.events if event.get("name", "").startswith(STEP_PREFIX)} == {"step 8"}


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond 64 KiB, and writing more fails as on a full disk: in C++ too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def end_step(trainer: Trainer) -> None:
    """Say to the profiler that a step has ended, which needs no report of it."""
    step_done: Callable[..., None] = trainer.after_step[-1]
    step_done()


def test_a_disk_that_is_full_costs_the_trace_and_not_the_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = run_alone(tmp_path, wait=0, warmup=1, active=1)
    folder = profile_folder(trainer.config)
    folder.mkdir(parents=True)
    for name in (SUMMARY_NAME, SUMMARY_JSON, MERGED_NAME):
        (folder / name).write_text("of an earlier profile", encoding="utf-8")
    num_steps = 0
    with full_disk(), profile_training(trainer):
        for _ in range(3):
            for _ in range(1000):
                torch.ones(2).sum()
            end_step(trainer)
            num_steps += 1
    assert num_steps == 3 and list(folder.iterdir()) == [], "nothing half-written, nothing of an earlier profile"
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert (
        said.startswith("rank 0: no trace of this rank was written: torch wrote 0.0")
        and " free: make room there" in said
    )


def test_a_trace_that_was_cut_off_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = profile.export_chrome_trace

    def export_and_cut(self: profile, path: str, **options: Any) -> None:
        export(self, path, **options)
        os.truncate(path, Path(path).stat().st_size // 2 // 4096 * 4096 or 64)

    monkeypatch.setattr(profile, "export_chrome_trace", export_and_cut)
    with profile_steps(tmp_path, wait=0, warmup=1, active=1, ranks=ALONE) as profiler:
        for _ in range(2):
            torch.ones(2).sum()
            profiler.step()
    assert profiler.trace_path is None and list(tmp_path.iterdir()) == []
    assert "no trace of this rank was written: torch wrote 0.0" in caplog.text


def test_a_run_that_fails_says_what_becomes_of_its_profile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = run_alone(tmp_path, wait=0, warmup=1, active=1)
    said: list[str] = []
    said_by_stop: list[int] = []  # which takes a while: a rank that is interrupted may be killed in it
    stop = profile.stop
    monkeypatch.setattr(profile, "stop", lambda self: said_by_stop.append(len(caplog.records)) or stop(self))
    for num_steps in (1, 2):
        caplog.clear()
        with pytest.raises(KeyboardInterrupt), profile_training(trainer):
            for _ in range(num_steps):
                torch.ones(2).sum()
                end_step(trainer)
            raise KeyboardInterrupt
        said += [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    folder = profile_folder(trainer.config)
    assert len(said) == 2 and said_by_stop[0] == 1 and not trainer.after_step
    assert said[0].startswith(f"no trace was written to {folder}: the loop ended after 1 of the 2 steps that ")
    assert said[1].startswith(f"the run ended before its traces were merged; they lie in {folder}, and ")
    assert summarise_folder(folder).steps == (2,), "as the message says"


@pytest.mark.parametrize(
    ("wrong", "said"), [({"warmup": 0}, "warmup = 0"), ({"active": 0}, "active = 0"), ({"wait": -1}, "wait = -1")]
)
def test_a_schedule_that_records_nothing_right_is_refused(tmp_path: Path, wrong: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said), profile_steps(tmp_path, ranks=ALONE, **wrong):
        pass


def test_a_phase_that_there_is_not_is_refused_and_costs_nothing_without_a_profiler() -> None:
    with pytest.raises(ValueError, match="phase 'forwards': must be one of data_wait, forward"):
        phase("forwards")
    assert phase(FORWARD) is phase(BACKWARD)


def test_the_section_is_checked_like_the_rest() -> None:
    assert parse_config({}).profile.active == 0
    with pytest.raises(ConfigError, match="profile.warmup = 0: must be 1 or greater"):
        parse_config({"profile": {"active": 2, "warmup": 0}})
    with pytest.raises(ConfigError, match="profile.activ: there is no such key; did you mean 'active'"):
        parse_config({"profile": {"activ": 2}})
    with pytest.raises(ConfigError, match="profile.active = 2 with train.num_steps = 3: .* = 4 steps"):
        parse_config({"profile": {"active": 2}, "train": {"num_steps": 3}})


@pytest.mark.slow
def test_a_flag_of_the_command_line_profiles_and_says_what_was_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    argv = ["train", str(Path(__file__).parents[1] / "configs" / "tiny.toml"), "--profile"]
    values = {"run.output_dir": tmp_path, "run.name": "seen", "train.micro_batch_size": 2, "optimizer.warmup_steps": 1}
    values |= {"data.num_train_samples": 16, "data.num_eval_samples": 2, "parallel.strategy": "single"}
    for key, value in values.items():
        argv += ["--set", f"{key}={value}"]
    assert cli.main([*argv, "--set", "train.num_steps=3"]) == 2
    assert "1 + 1 + 2 = 4 steps" in capsys.readouterr().err
    assert cli.main([*argv, "--set", "train.num_steps=4", "--json"]) == 0
    *said, outcome = capsys.readouterr().out.splitlines()
    assert json.loads(outcome)["num_steps"] == 4
    assert any(line.startswith("steps 3 to 4: ") for line in said)
    assert "clocks" not in "".join(said), "one rank has one clock"
    names = {path.name for path in (tmp_path / "seen" / "profile").iterdir()}
    assert {MERGED_NAME, "summary.txt", SUMMARY_JSON, "timeline.png"} < names and len(names) == 5
