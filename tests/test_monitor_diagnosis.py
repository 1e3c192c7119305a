"""Why a run is slow: faults planted in real runs on two ranks, and made-up logs for what only a GPU shows.

Logs made up here are named so: throttling, copies, an allocator that starts over, low GPU use, swapping.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diagnosis_worker import SHORT
from made_up_logs import GIB, USUAL, only, write_log
from ranks import run_worker
from torch.utils._python_dispatch import TorchDispatchMode

from vlmcourse import cli
from vlmcourse.config import parse_config
from vlmcourse.faults.catalog import BASE, FAULTS
from vlmcourse.faults.lookalikes import LOOKALIKES
from vlmcourse.faults.planted import run_name, run_planted
from vlmcourse.monitor.diagnosis import CAUSES, HEALTHY, Diagnosis, diagnose, thresholds
from vlmcourse.monitor.diagnosis.facts import read_run
from vlmcourse.monitor.recorded import recorded_causes, recorded_run
from vlmcourse.monitor.step_log import RESUME, EventRecord, StepLogWriter, StepRecord, read_step_log
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.presets import get_model
from vlmcourse.train.accumulate import micro_batch_loss_sum
from vlmcourse.train.step_settings import name_changes
from vlmcourse.train.trainer import Trainer

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
pytestmark = pytest.mark.timeout(600)  # runs take minutes where others use the cores
KINDS = [name for name, fault in FAULTS.items() if fault.cause != HEALTHY]


# --- Real runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Diagnosis]:
    folder = tmp_path_factory.mktemp("planted")
    run_worker("diagnosis_worker.py", str(folder), timeout_s=560)
    return {name: diagnose(folder / run_name(name)) for name in (*FAULTS, *SHORT)}


@pytest.mark.slow
def test_the_planted_cause_comes_first_in_nine_of_ten_kinds(runs: dict[str, Diagnosis]) -> None:
    wrong = {name: str(runs[name]) for name in KINDS if runs[name].cause != FAULTS[name].cause}
    assert len(KINDS) >= 10 and len(wrong) <= len(KINDS) / 10, wrong


@pytest.mark.slow
def test_healthy_runs_are_healthy(runs: dict[str, Diagnosis]) -> None:
    healthy = [name for name, fault in FAULTS.items() if fault.cause == HEALTHY]
    assert len(healthy) >= 3 and not {name: str(runs[name]) for name in healthy if not runs[name].is_healthy}


@pytest.mark.slow
def test_faults_that_look_like_others_are_told_from_them(runs: dict[str, Diagnosis]) -> None:
    for name in SHORT:
        causes = {finding.cause: finding.rank for finding in runs[name].findings}
        fault = LOOKALIKES[name]
        assert {fault.cause, *fault.also} <= causes.keys(), (name, causes)
        assert causes[fault.cause] == fault.rank, (name, causes)
        assert runs[name].cause in (fault.cause, *fault.also), (name, causes)
        assert not {"logging", "communication"} & (causes.keys() - {fault.cause}), (name, causes)
    assert all(fault.cause == HEALTHY or fault.cause in CAUSES for fault in LOOKALIKES.values())


@pytest.mark.slow
def test_findings_of_real_runs_are_whole(runs: dict[str, Diagnosis]) -> None:
    for found in runs.values():
        assert sum(found.shares.values()) == pytest.approx(1)
        for finding in found.findings:
            assert finding.cause in CAUSES and finding.evidence and finding.fixes and 0 < finding.share <= 1
            assert all(any(letter.isdigit() for letter in finding.evidence[i]) for i in (0,))
            gains = [fix.gain_fraction for fix in finding.fixes]
            assert gains == sorted(gains, reverse=True)
            for fix in finding.fixes:
                assert fix.tokens_per_s == pytest.approx(found.tokens_per_s * (1 + fix.gain_fraction))


def test_recorded_runs_have_their_cause_and_hold_no_path() -> None:
    causes = recorded_causes()
    assert causes == {name: fault.cause for name, fault in FAULTS.items()}
    assert {name: diagnose(recorded_run(name)).cause for name in causes} == causes
    details = {name: diagnose(recorded_run(name)).findings[0].detail for name in causes if causes[name] != HEALTHY}
    assert details["slow decoder"] == "decode" and details["slow storage"] == "storage"
    assert details["queue that runs empty"] == "queue" and details["sleeping rank"] == "rank 1"
    files = [path for path in recorded_run("healthy").parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    assert not [path for path in files if "/tmp" in path.read_text() or "output_dir" in path.read_text()]
    with pytest.raises(ValueError, match="did you mean 'slow links'"):
        recorded_run("slow link")


def test_a_fault_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'slow storage'"):
        run_planted("slow storag", tmp_path, ALONE)


def test_operations_of_a_micro_batch_are_as_many_as_assumed() -> None:
    class Counter(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counter.num += 1
            return func(*args, **(kwargs or {}))

    config = parse_config({}, {**BASE, "parallel.strategy": "single", "train.micro_batch_size": 1})
    trainer = Trainer(config, ALONE, show_progress=False)
    (batch,) = trainer.load_step(0)
    with Counter():
        micro_batch_loss_sum(trainer.model, batch, "fp32").backward()
    shape = get_model("tiny")
    num_blocks = shape.vision.num_layers + shape.language.num_layers
    assert pytest.approx(Counter.num, rel=0.1) == thresholds.OPERATORS_PER_BLOCK * num_blocks


# --- Made-up logs: the order of reasoning ---------------------------------------------------------------------------


def test_nothing_wrong_is_healthy_and_numbers_are_those_of_the_log(tmp_path: Path) -> None:
    found = diagnose(write_log(tmp_path))
    assert found.is_healthy and found.cause == HEALTHY and (found.first_step, found.last_step) == (3, 22)
    assert found.step_s == pytest.approx(0.1) and found.tokens_per_s == pytest.approx(2 * 432 / 0.1)
    assert found.shares["backward"] == pytest.approx(0.6) and found.world_size == 2


def test_ranks_that_wait_for_a_slow_one_are_no_communication_problem(tmp_path: Path) -> None:
    found = diagnose(write_log(tmp_path, lambda rank, step: {"forward_s": 0.13} if rank == 2 else {}, world_size=4))
    finding = only(found)
    assert finding.cause == "slow_rank" and finding.rank == 2
    assert finding.share == pytest.approx(0.5)
    assert finding.fixes[0].tokens_per_s == pytest.approx(2 * found.tokens_per_s)
    assert any("Rank 2 waits for others 2% of the time, the others 52%" in sentence for sentence in finding.evidence)
    assert all(below.cause != "communication" or below.share < 0.03 for below in found.below)


def test_waits_of_all_ranks_are_communication(tmp_path: Path) -> None:
    found = diagnose(write_log(tmp_path, lambda rank, step: {"communication_s": 0.1}))
    assert only(found).cause == "communication" and only(found).share == pytest.approx(0.1 / 0.196)
    assert any("compression" in fix.what for fix in only(found).fixes)


def test_of_two_causes_the_one_that_explains_more_comes_first(tmp_path: Path) -> None:
    found = diagnose(write_log(tmp_path, lambda rank, step: {"communication_s": 0.3, "data_wait_s": 0.1}))
    assert [finding.cause for finding in found.findings] == ["communication", "data_loading"]
    assert found.cause == "communication"


@pytest.mark.parametrize("alternates", [False, True])
def test_larger_images_are_told_from_a_slow_machine(tmp_path: Path, alternates: bool) -> None:
    def change(rank: int, step: int) -> dict[str, Any]:
        heavy = step % 2 if alternates else 1
        return {"tiles": 96, "image_tokens": 384, "forward_s": 0.075, "backward_s": 0.154} if rank == heavy else {}

    finding = only(diagnose(write_log(tmp_path, change)))
    assert finding.cause == "imbalance"
    assert finding.detail == ("changing ranks" if alternates else "rank 1")
    assert finding.share == pytest.approx(
        0.5 * 0.139 / 0.239, rel=0.02
    )  # balance shares the surplus out, it does not go


def test_the_same_work_at_another_speed_is_no_imbalance_and_noise_is_neither(tmp_path: Path) -> None:
    noisy = write_log(tmp_path / "noise", lambda rank, step: {"forward_s": 0.06} if step % 2 == rank else {})
    assert diagnose(noisy).is_healthy
    late = write_log(tmp_path / "late", lambda rank, step: {"forward_s": 0.13} if rank == 1 and step > 6 else {})
    assert diagnose(late).is_healthy  # not all the time
    assert only(diagnose(late, last_steps=15)).cause == "slow_rank"


def test_what_one_rank_does_between_steps_is_its_cause_and_the_wait_of_others_a_symptom(tmp_path: Path) -> None:
    """Rank 0 writes a row of 50 ms after each step; rank 1 begins the next step at once, and waits in it."""
    writers = [StepLogWriter(tmp_path, rank) for rank in (0, 1)]
    for step in range(1, 20):
        start_s = 0.15 * step
        writers[0].write(StepRecord(step=step, start_s=start_s, step_s=0.1, **USUAL))
        writers[0].write(EventRecord(event="log", step=step, start_s=start_s + 0.1, seconds=0.05))
        waits: dict[str, Any] = USUAL | {"communication_s": 0.054}
        writers[1].write(StepRecord(step=step, start_s=start_s - 0.05, step_s=0.15, **waits))
    finding = only(diagnose(tmp_path))
    assert finding.cause == "logging" and finding.rank == 0 and finding.share == pytest.approx(1 / 3)


@pytest.mark.parametrize(("event", "cause"), [("checkpoint", "checkpoints"), ("evaluation", "evaluations")])
def test_saves_and_evaluations_count_where_they_are_frequent_not_at_the_end(
    tmp_path: Path, event: str, cause: str
) -> None:
    frequent = write_log(tmp_path / "often", between=lambda rank, step: (event, 0.3) if step % 5 == 0 else None)
    finding = only(diagnose(frequent))
    assert finding.cause == cause and finding.share == pytest.approx(4 * 0.3 / (20 * 0.1 + 4 * 0.3))
    assert "every 5 steps" in finding.fixes[0].what
    at_end = write_log(tmp_path / "end", between=lambda rank, step: (event, 9.0) if step == 23 else None)
    assert diagnose(at_end).is_healthy


def test_work_that_no_event_names_is_a_callback_and_a_pause_is_nothing(tmp_path: Path) -> None:
    steady = write_log(tmp_path / "steady", between=lambda rank, step: ("nothing", 0.05))
    assert only(diagnose(steady)).cause == "callbacks"
    paused = diagnose(write_log(tmp_path / "paused", between=lambda rank, step: ("nothing", 60) if step == 9 else None))
    assert paused.is_healthy and "after step 9 are left out" in paused.notes[0]


def test_a_queue_that_runs_empty_is_seen_behind_the_mean_and_one_hiccup_is_not_taken_for_it(tmp_path: Path) -> None:
    periodic = write_log(tmp_path / "queue", lambda rank, step: {"data_wait_s": 0.4} if step % 4 == 0 else {})
    finding = only(diagnose(periodic))
    assert finding.cause == "data_loading" and finding.detail == "queue"
    assert any("every 4 steps (steps 4, 8, 12" in sentence for sentence in finding.evidence)
    once = write_log(tmp_path / "once", lambda rank, step: {"data_wait_s": 0.9} if step == 8 else {})
    assert diagnose(once).is_healthy


@pytest.mark.parametrize(("busy", "detail"), [(0.9, "decode"), (0.05, "storage"), (0.35, "")])
@pytest.mark.parametrize("speed", [1.0, 0.25])
def test_decoding_is_told_from_storage_on_a_busy_machine_too(
    tmp_path: Path, busy: float, detail: str, speed: float
) -> None:
    def change(rank: int, step: int) -> dict[str, Any]:
        cpu_s = speed * (busy * 0.1 + 0.094)
        return {"data_wait_s": 0.1, "data_cpu_s": speed * busy * 0.1, "cpu_percent": 100 * cpu_s / 0.198}

    finding = only(diagnose(write_log(tmp_path, change)))
    assert (finding.cause, finding.detail, finding.rank) == ("data_loading", detail, None)


def test_recomputation_is_named_only_where_memory_is_free(tmp_path: Path) -> None:
    config = {"activations": {"vision": "full", "language": "full"}}
    change = lambda rank, step: {"rss_bytes": GIB}  # noqa: E731
    free = write_log(tmp_path / "free", change, config=config)
    assert only(diagnose(free)).cause == "recomputation"
    full = write_log(tmp_path / "full", change, config=config, hardware={"memory_bytes": 2 * GIB})
    assert diagnose(full).is_healthy
    unknown = diagnose(write_log(tmp_path / "unknown", config=config))
    assert unknown.is_healthy and "the memory of the device is not known" in unknown.notes[0]


def test_a_bubble_is_no_straggler_and_its_fixes_know_the_longest_stage(tmp_path: Path) -> None:
    config = {"parallel": {"strategy": "single", "pp": 2, "pp_schedule": "gpipe"}, "train": {"accumulation_steps": 2}}

    def change(rank: int, step: int) -> dict[str, Any]:
        return {"communication_s": 0.05, "micro_batches": 2} | ({"forward_s": 0.02} if rank == 1 else {})

    found = diagnose(write_log(tmp_path, change, config=config))
    finding = only(found)
    assert finding.cause == "pipeline_bubble" and "data-parallel" in finding.fixes[0].what
    equal, longest = finding.fixes[1:]
    assert "equal stages" in equal.what and "equal stages" not in longest.what
    # Two more than now start 500 operations a stage each; eight in all would have a smaller bubble, and start too many.
    longer_s = 2 * 500 * thresholds.CPU_OPERATOR_S
    assert longest.what.startswith("train.accumulation_steps = 4, train.micro_batch_size = 4")
    # Without messages a step would take 94 ms, and half of the other stage's 84 ms; rank 0 waits 8 ms more than that.
    now_s, then_s = 0.094 + 0.084 / 2 + 0.008, 0.094 + longer_s + (0.084 + longer_s) / 4 + 2 * 0.008
    assert longest.tokens_per_s == pytest.approx(432 / (found.step_s - (now_s - then_s)))
    assert found.tokens_per_s == pytest.approx(432 / found.step_s)  # both ranks have the same samples
    assert any("a bubble of 33%" in sentence for sentence in finding.evidence)


def test_small_micro_batches_are_named_where_they_could_be_one(tmp_path: Path) -> None:
    change = lambda rank, step: {"cpu_percent": 96.0}  # noqa: E731
    many = {"train": {"micro_batch_size": 1, "accumulation_steps": 8}}
    finding = only(diagnose(write_log(tmp_path / "many", change, config=many)))
    assert finding.cause == "small_kernels" and "train.micro_batch_size = 8" in finding.fixes[0].what
    assert finding.share == pytest.approx(7 * 1000 * thresholds.CPU_OPERATOR_S / 0.1, rel=0.05)
    assert diagnose(write_log(tmp_path / "one", change)).is_healthy


# --- Made-up logs: what only a GPU shows, or a machine without memory -------------------------------------------------


def gpu_rows(**values: Any) -> list[dict[str, Any]]:
    return [{"step": step, **{name.replace("__", "/"): v for name, v in values.items()}} for step in range(5, 24, 5)]


GPU = {"device": "cuda", "gpu_memory_bytes": 80 * GIB}


def test_a_throttled_gpu_explains_its_slow_rank(tmp_path: Path) -> None:
    rows = [
        {"step": step, "hardware/gpu_is_throttled": float(step > 4), "hardware/gpu_celsius": 60.0 + 2 * step}
        | ({"hardware/throttle_reasons": "hardware thermal slowdown"} if step > 4 else {})
        for step in range(2, 24, 2)
    ]
    change = lambda rank, step: {"backward_s": 0.16} if rank == 0 and step > 4 else {}  # noqa: E731
    found = diagnose(write_log(tmp_path, change, hardware=GPU, rows=rows))
    finding = found.findings[0]
    assert (finding.cause, finding.detail, finding.rank) == ("throttling", "thermal", 0)
    assert "throttled in 18 of 20 steps (hardware thermal slowdown)" in finding.evidence[0]
    assert "slow_rank" not in [f.cause for f in (*found.findings, *found.below)]
    cool = write_log(tmp_path / "cool", hardware=GPU, rows=gpu_rows(hardware__gpu_is_throttled=0.0))
    assert diagnose(cool).is_healthy


def test_copies_are_named_with_what_moves(tmp_path: Path) -> None:
    rows = gpu_rows(hardware__pcie_rx_bytes_per_s=10e9, hardware__pcie_tx_bytes_per_s=9e9)
    config = {"parallel": {"strategy": "fsdp"}, "offload": {"optimizer": "cpu", "parameters": "cpu"}}
    finding = only(diagnose(write_log(tmp_path, config=config, hardware=GPU, rows=rows)))
    assert finding.cause == "copies" and finding.share == pytest.approx(0.4)
    assert any("offload.optimizer = 'cpu'" in sentence for sentence in finding.evidence)


@pytest.mark.parametrize("has_count", [True, False])
def test_an_allocator_that_starts_over_is_seen(tmp_path: Path, has_count: bool) -> None:
    def change(rank: int, step: int) -> dict[str, Any]:
        hit = rank == 1 and step % 3 == 0
        fields: dict[str, Any] = {"forward_s": 0.13 if hit else 0.03, "reserved_bytes": (70 if hit else 78) * GIB}
        return fields | ({"alloc_retries": step // 3} if has_count and rank == 1 else {})

    finding = diagnose(write_log(tmp_path, change, hardware=GPU)).findings[0]
    assert (finding.cause, finding.detail, finding.rank) == ("memory_thrash", "retries", 1)
    assert any("78.0 of 80.0 GiB" in sentence for sentence in finding.evidence)


def test_swapping_is_seen(tmp_path: Path) -> None:
    def change(rank: int, step: int) -> dict[str, Any]:
        hit = rank == 0 and step % 4 == 0
        return {"backward_s": 0.36 if hit else 0.06, "major_faults": 2000 * (step // 4) if rank == 0 else 3}

    finding = diagnose(write_log(tmp_path, change)).findings[0]
    assert (finding.cause, finding.detail, finding.rank) == ("memory_thrash", "swapping", 0)


def test_a_gpu_that_is_little_used_while_nothing_is_waited_for_starts_small_kernels(tmp_path: Path) -> None:
    low = write_log(tmp_path / "low", hardware=GPU, rows=gpu_rows(performance__gpu_util=30.0))
    assert only(diagnose(low)).cause == "small_kernels" and only(diagnose(low)).detail == "low GPU use"
    waiting = write_log(
        tmp_path / "waiting",
        lambda rank, step: {"data_wait_s": 0.2},
        hardware=GPU,
        rows=gpu_rows(performance__gpu_util=30.0),
    )
    assert only(diagnose(waiting)).cause == "data_loading"  # low use is its symptom


def test_a_strategy_whose_waits_cannot_be_told_says_so(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = StepLogWriter(tmp_path, rank)
        for step in range(1, 20):
            writer.write(StepRecord(step=step, start_s=0.1 * step, step_s=0.1, forward_s=0.04, backward_s=0.06))
    found = diagnose(tmp_path)
    assert found.is_healthy and any("communication cannot be told" in note for note in found.notes)


# --- Files and the command -------------------------------------------------------------------------------------------


def test_a_live_run_is_diagnosed_up_to_what_all_ranks_have(tmp_path: Path) -> None:
    folder = write_log(tmp_path, lambda rank, step: {"communication_s": 0.1})
    path = folder / "steps" / "rank0001.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-3]) + "\n" + lines[-3][:40])
    (folder / "config.json").write_text('{"parallel": {"str')
    found = diagnose(folder)
    assert found.last_step == 19 and found.cause == "communication"
    assert "rank 1 has written up to step 20, rank 0 up to step 23" in found.notes[0]
    assert "no config.json" in found.notes[1]


def test_too_few_steps_and_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="5 steps that all ranks have written: a diagnosis needs 2 of warm-up"):
        diagnose(write_log(tmp_path, num_steps=5))
    with pytest.raises(ValueError, match="last_steps = 3: must be 5 or greater"):
        diagnose(tmp_path, last_steps=3)
    with pytest.raises(FileNotFoundError, match="give the folder of a run"):
        diagnose(tmp_path / "nowhere")


def test_a_resumed_run_of_other_ranks_is_judged_by_its_last_part(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = StepLogWriter(tmp_path, rank)
        for step in range(1, 31 if rank == 0 else 11):
            size = 2 if step <= 10 else 1
            writer.write(StepRecord(step=step, start_s=0.1 * step, step_s=0.1, world_size=size, **USUAL))
    found = diagnose(tmp_path)
    assert found.world_size == 1 and (found.first_step, found.last_step) == (13, 29) and found.is_healthy
    assert "steps up to 10 are left out: then the run was resumed with other settings (2 -> 1 rank(s))" in found.notes
    assert set(read_step_log(tmp_path)) == {0, 1}


def test_a_run_that_was_killed_and_went_on_with_fewer_ranks_is_judged_by_what_it_made_again(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = StepLogWriter(tmp_path, rank)
        for step in range(1, 21):
            writer.write(StepRecord(step=step, start_s=0.1 * step, step_s=0.1, world_size=2, **USUAL))
        writer.close()
    writer = StepLogWriter(tmp_path, 0, keep_until_step=10)  # nobody cuts the file of rank 1
    for step in range(11, 25):
        writer.write(StepRecord(step=step, start_s=50 + 0.1 * step, step_s=0.1, world_size=1, **USUAL))
    writer.close()
    found = diagnose(tmp_path)
    assert (found.world_size, found.first_step, found.last_step) == (1, 13, 23) and found.is_healthy


def write_resumed(folder: Path, marks: list[tuple[int, str]], num_steps: int) -> None:
    """Write a run of steps that wait for samples up to the first mark; a mark is a step, and what changed after it."""
    for rank in (0, 1):
        for mark, changed in ((None, ""), *marks):
            writer = StepLogWriter(folder, rank, keep_until_step=mark, changed=changed)
            for step in range(1 + (mark or 0), num_steps + 1):
                slow: dict[str, Any] = {} if mark else {"data_wait_s": 0.05, "forward_s": 0.0}
                writer.write(StepRecord(step=step, start_s=0.1 * step, step_s=0.1, world_size=2, **(USUAL | slow)))
            writer.close()


def test_a_run_that_was_resumed_with_other_settings_is_judged_from_there_on(tmp_path: Path) -> None:
    write_resumed(tmp_path / "same", [(15, "")], 23)
    assert (diagnose(tmp_path / "same").first_step, diagnose(tmp_path / "same").cause) == (3, "data_loading")
    write_resumed(tmp_path / "other", [(15, "parallel.strategy 'ddp' -> 'fsdp'"), (18, "")], 30)
    rows = "".join(json.dumps({"step": step}) + "\n" for step in (10, 15, 20))
    (tmp_path / "other" / "log.jsonl").write_text(rows, encoding="utf-8")
    assert [row["step"] for row in read_run(tmp_path / "other").rows] == [20]
    found = diagnose(tmp_path / "other")
    assert found.is_healthy and (found.first_step, found.last_step) == (21, 29)  # 18: warm-up again
    assert found.notes[0] == (
        "steps up to 15 are left out: then the run was resumed with other settings (parallel.strategy 'ddp' -> 'fsdp')"
    )
    write_resumed(tmp_path / "set back", [(15, "train.log_every 20 -> 5"), (15, "")], 23)
    assert diagnose(tmp_path / "set back").first_step == 3
    write_resumed(tmp_path / "short", [(15, "train.log_every 20 -> 5")], 20)
    with pytest.raises(ValueError, match=r"steps up to 15 are left out: .* \(train.log_every 20 -> 5\); wait"):
        diagnose(tmp_path / "short")


def test_a_resume_leaves_in_the_step_log_which_settings_make_other_steps(tmp_path: Path) -> None:
    def run(num_steps: int, **train: int) -> Trainer:
        train = {"num_steps": num_steps, "micro_batch_size": 4, **train}
        config = parse_config({"run": {"output_dir": str(tmp_path)}, "train": train, "data": {"num_eval_samples": 1}})
        trainer = Trainer(config, ALONE, show_progress=False)
        if num_steps > 3:
            trainer.resume()
        trainer.fit()
        return trainer

    run(3)
    run(7)  # as before, but for its length
    trainer = run(17, micro_batch_size=2, accumulation_steps=2)
    marks = [
        (event.step, event.changed) for event in read_step_log(tmp_path / "run")[0].events if event.event == RESUME
    ]
    changed = "train.micro_batch_size 4 -> 2, train.accumulation_steps 1 -> 2"
    assert marks == [(3, ""), (7, changed)]
    found = diagnose(tmp_path / "run")
    assert (found.first_step, found.last_step) == (10, 16) and changed in found.notes[0]
    freed = dataclasses.replace(trainer.config.parallel, timeout_s=9.0)
    assert name_changes(dataclasses.asdict(trainer.config), dataclasses.replace(trainer.config, parallel=freed)) == ""
    saved = json.loads(json.dumps(dataclasses.asdict(trainer.config)))  # as a checkpoint keeps it: no tuples
    assert name_changes(saved, trainer.config) == ""


def test_the_pause_of_a_resumed_run_and_the_warm_up_after_it_are_nobodys_fault(tmp_path: Path) -> None:
    """A pause of only 25 steps, and a slow first step after it; the same pause without a mark is time of the run."""
    for rank in (0, 1):
        writer = StepLogWriter(tmp_path, rank)
        for step in range(1, 11):
            writer.write(StepRecord(step=step, start_s=0.1 * step, step_s=0.1, world_size=2, **USUAL))
        writer.close()
        writer = StepLogWriter(tmp_path, rank, keep_until_step=10)
        for step in range(11, 21):
            first: dict[str, Any] = {"step_s": 1.1, "data_wait_s": 1.004} if step == 11 else {"step_s": 0.1}
            start_s = 2.5 + 0.1 * step + (0.0 if step == 11 else 1.0)
            writer.write(StepRecord(step=step, start_s=start_s, world_size=2, **(USUAL | first)))
        writer.close()
    found = diagnose(tmp_path)
    assert found.is_healthy and found.step_s == pytest.approx(0.1)
    assert [note for note in found.notes if "resumed" in note] == [
        "2.5 s after step 10 are left out, and warm-up then: the run was resumed"
    ]
    for path in (tmp_path / "steps").iterdir():
        path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "resume" not in line))
    assert not diagnose(tmp_path).is_healthy


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    run = str(recorded_run("sleeping rank"))
    assert cli.main(["diagnose", run]) == 0
    shown = capsys.readouterr().out
    assert "slow_rank" in shown and "rank 1" in shown and "tokens/s" in shown and "estimate" in shown
    assert max(map(len, shown.splitlines())) <= 120 + len(run)
    assert cli.main(["diagnose", run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cause"] == "slow_rank" and found["findings"][0]["fixes"][0]["gain_fraction"] > 0
    assert cli.main(["diagnose", run, "--json", "--last", "6"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["first_step"], found["last_step"]) == (10, 15)
    assert cli.main(["diagnose", str(recorded_run("healthy"))]) == 0
    assert "Healthy" in capsys.readouterr().out
    assert cli.main(["diagnose", "nowhere"]) == 2
    assert "vlmcourse diagnose: nowhere/steps has no file" in capsys.readouterr().err


def test_the_command_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None\nfrom vlmcourse.cli import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "diagnose", str(recorded_run("slow links"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "communication" in done.stdout, done.stderr
