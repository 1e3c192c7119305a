"""What ranks wait for: late ranks in rows and at several exchanges, slow messages in a pipeline, two causes at once.

All logs here are made up, so that what is right is known exactly; `bench/diagnosis_runs.py --lookalikes` plants the
same in real runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_up_logs import USUAL, only, write_log

from vlmcourse.config import parse_config
from vlmcourse.monitor.diagnosis import Diagnosis, Finding, diagnose, thresholds
from vlmcourse.monitor.diagnosis.facts import read_run
from vlmcourse.monitor.diagnosis.waiting import find_imbalance, find_slow_rank
from vlmcourse.monitor.step_log import EventRecord, StepLogWriter, StepRecord, parse_record
from vlmcourse.planner.flops import TOWERS, Work, count_step_flops
from vlmcourse.presets import get_model

STEP_S, CALLBACK_S, ROW_S, SENT_S = 0.1, 0.2, 0.04, 0.06


def seen(found: Diagnosis, cause: str) -> Finding | None:
    return next((finding for finding in (*found.findings, *found.below) if finding.cause == cause), None)


# --- Events ---------------------------------------------------------------------------------------------------------


def write_late_callback(folder: Path, event: str, row_s: float, sent_s: float) -> Path:
    """Rank 1 has a callback after each step; rank 0 waits for it in an event, whose data take `sent_s` on their way."""
    for rank in (0, 1):
        writer, cycle_s = StepLogWriter(folder, rank), STEP_S + CALLBACK_S + row_s + sent_s
        for step in range(1, 20):
            start_s = cycle_s * step
            writer.write(StepRecord(step=step, start_s=start_s, step_s=STEP_S, world_size=2, **USUAL))
            began_s, late_s = (STEP_S, CALLBACK_S) if rank == 0 else (STEP_S + CALLBACK_S, 0.0)
            waits: dict[str, Any] = {"seconds": row_s + sent_s + late_s, "communication_s": sent_s + late_s}
            writer.write(EventRecord(event=event, step=step, start_s=start_s + began_s, **waits))
        writer.close()
    return folder


@pytest.mark.parametrize(("event", "cause"), [("log", "logging"), ("evaluation", "evaluations")])
def test_a_rank_that_waits_in_a_row_for_a_late_one_is_not_at_fault(tmp_path: Path, event: str, cause: str) -> None:
    found = diagnose(write_late_callback(tmp_path / "late", event, 0.0, 0.0))
    finding = only(found)
    assert finding.cause == "callbacks" and finding.rank == 1
    assert finding.share == pytest.approx(CALLBACK_S / (STEP_S + CALLBACK_S))
    assert any("No other rank spent more than 0% of the time" in sentence for sentence in finding.evidence)
    assert seen(found, cause) is None and sum(found.shares.values()) == pytest.approx(1)
    assert found.shares["communication"] > 0.3  # the mean of the ranks, of which one waits
    # What the row takes itself, and what its data take on their way, is the row's: no rank is late for that.
    slow = diagnose(write_late_callback(tmp_path / "slow", event, ROW_S, SENT_S))
    of_row = seen(slow, cause)
    assert slow.cause == "callbacks" and of_row is not None
    assert (
        of_row.share == pytest.approx((ROW_S + SENT_S) / (STEP_S + CALLBACK_S + ROW_S + SENT_S)) and of_row.rank is None
    )
    assert any("Waits in events for ranks that came late" in sentence for sentence in of_row.evidence)


def test_an_event_that_one_rank_alone_has_is_its_own_whatever_it_waits(tmp_path: Path) -> None:
    folder = write_log(tmp_path, between=lambda rank, step: ("log", 0.1) if rank == 0 else ("nothing", 0.1))
    assert seen(diagnose(folder), "logging") is not None


def test_rarer_rows_gain_what_is_left_out(tmp_path: Path) -> None:
    """Rows of 0.1 s between steps of 0.1 s; one of 50 steps keeps 0.1 s of 5.1 s."""
    found = diagnose(write_log(tmp_path, between=lambda rank, step: ("log", 0.1)))
    fix = next(fix for fix in only(found).fixes if "train.log_every = 50" in fix.what)
    assert fix.tokens_per_s == pytest.approx(found.tokens_per_s * 0.2 / 0.102)


# --- Exchanges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows_waits", [True, False])
def test_two_ranks_that_are_late_at_different_exchanges_are_no_communication(tmp_path: Path, knows_waits: bool) -> None:
    """Rank 0 is late for the first exchange of a step (a callback), rank 1 for the second (forward)."""
    for rank in (0, 1):
        writer = StepLogWriter(tmp_path, rank)
        for step in range(1, 20):
            late = {"forward_s": 0.03 + (0.1 if rank == 1 else 0.0), "communication_s": 0.104}
            waits_s = [0.1, 0.004] if rank == 1 else [0.002, 0.102]
            own: dict[str, Any] = USUAL | late | ({"waits_s": waits_s} if knows_waits else {})
            start_s = 0.3 * step - (0.1 if rank == 1 else 0.0)
            seconds = 0.3 if rank == 1 else 0.2
            writer.write(StepRecord(step=step, start_s=start_s, step_s=seconds, world_size=2, **own))
        writer.close()
    found = diagnose(tmp_path)
    sent = seen(found, "communication")
    assert {"callbacks": 0, "slow_rank": 1}.items() <= {f.cause: f.rank for f in found.findings}.items()
    assert sent is not None and sent.share == pytest.approx((0.006 if knows_waits else 0.104) / 0.3)
    assert ("upper bound" in sent.evidence[0]) != knows_waits


def test_lists_in_a_log_are_of_numbers() -> None:
    line = '{"step": 1, "start_s": 0.0, "step_s": 1.0, "waits_s": %s}'
    record = parse_record(line % "[0.5, 1]", "here")
    assert isinstance(record, StepRecord) and record.waits_s == [0.5, 1]
    for wrong in ('["a"]', "[true]", "0.5", '"0.5"'):
        with pytest.raises(ValueError, match="waits_s"):
            parse_record(line % wrong, "here")


@pytest.mark.parametrize(
    ("parallel", "advised"),
    [
        ({"strategy": "ddp"}, "train.accumulation_steps = 4"),
        ({"strategy": "zero1"}, "train.accumulation_steps = 4"),
        ({"strategy": "fsdp"}, "train.micro_batch_size = 16"),
        ({"strategy": "deepspeed-zero1"}, "train.accumulation_steps = 4"),
        ({"strategy": "deepspeed-zero2"}, "train.micro_batch_size = 16"),
        ({"strategy": "single", "tp": 2}, "train.micro_batch_size = 16"),
        ({"strategy": "fsdp", "cp": 2}, "train.micro_batch_size = 16"),
    ],
)
def test_fewer_exchanges_are_advised_as_the_strategy_makes_them(
    tmp_path: Path, parallel: dict[str, Any], advised: str
) -> None:
    config = {"parallel": parallel, "train": {"accumulation_steps": 2, "micro_batch_size": 8}}
    found = diagnose(write_log(tmp_path, lambda rank, step: {"communication_s": 0.1}, config=config))
    fixes = [fix.what for finding in found.findings if finding.cause == "communication" for fix in finding.fixes]
    assert [what for what in fixes if what.startswith(("train.accum", "train.micro"))][0].startswith(f"{advised}:")


# --- Pipelines ------------------------------------------------------------------------------------------------------


def pipeline(num_microbatches: int, **parallel: Any) -> dict[str, Any]:
    degrees = {"strategy": "single", "pp": 2, "pp_schedule": "1f1b"} | parallel
    return {"parallel": degrees, "train": {"accumulation_steps": num_microbatches, "micro_batch_size": 4}}


def test_slow_messages_of_a_pipeline_are_no_bubble_and_more_of_them_are_not_advised(tmp_path: Path) -> None:
    """Equal stages of 94 ms and 8 micro-batches: 12 ms of bubble, however long the stages wait."""
    change = lambda rank, step: {"micro_batches": 8, "communication_s": 0.412}  # noqa: E731
    found = diagnose(write_log(tmp_path, change, config=pipeline(8)))
    finding = only(found)
    assert finding.cause == "communication" and finding.detail == "pipeline"
    assert finding.share == pytest.approx((0.412 - 0.094 / 8) / 0.508)
    assert "50.0 ms for each of 8 micro-batch(es)" in finding.evidence[0]
    # Four micro-batches have half of the messages, a longer bubble, and start a stage's operations four times less.
    (fewer,) = [fix for fix in finding.fixes if "fewer messages" in fix.what]
    assert fewer.what.startswith("train.accumulation_steps = 4, train.micro_batch_size = 8 (as many samples a step)")
    less_s = 4 * 500 * thresholds.CPU_OPERATOR_S
    step_s = (0.094 - less_s) * 5 / 4 + (0.412 - 0.094 / 8) / 2
    assert fewer.tokens_per_s == pytest.approx(432 / (0.508 - (0.094 * 9 / 8 + 0.412 - 0.094 / 8 - step_s)), rel=1e-3)
    bubble = seen(found, "pipeline_bubble")
    assert bubble is not None and bubble.share == pytest.approx(0.094 / 8 / 0.508)
    assert not [fix for fix in bubble.fixes if "accumulation_steps" in fix.what]


def test_a_slow_rank_of_a_stage_is_held_against_the_other_ranks_of_that_stage(tmp_path: Path) -> None:
    """Four ranks, two a stage; the second stage is longer for all, and its second rank 0.8 s slower."""

    def change(rank: int, step: int) -> dict[str, Any]:
        second = {"backward_s": 0.09} if rank in (2, 3) else {}
        return {"micro_batches": 4, **second} | ({"optimizer_s": 0.804} if rank == 3 else {})

    found = diagnose(write_log(tmp_path, change, config=pipeline(4, strategy="fsdp"), world_size=4))
    finding = only(found)
    assert (finding.cause, finding.rank) == ("slow_rank", 3) and finding.share == pytest.approx(0.8 / 0.93)
    bubble = seen(found, "pipeline_bubble")
    assert bubble is not None and bubble.share < 0.05 and "the mean stage 109.0 ms" in bubble.evidence[1]
    assert (sent := seen(found, "communication")) is None or sent.share < 0.02
    even = diagnose(
        write_log(
            tmp_path / "even", lambda r, s: change(min(r, 2), s), config=pipeline(4, strategy="fsdp"), world_size=4
        )
    )
    assert (slow := seen(even, "slow_rank")) is None or slow.share < 0.01


def test_a_late_rank_before_the_step_is_no_slow_message(tmp_path: Path) -> None:
    """Rank 0 loads for 0.3 s and the next stage waits for it: the rank itself waits for nothing more."""

    def change(rank: int, step: int) -> dict[str, Any]:
        return {"micro_batches": 8, "communication_s": 0.012} | ({"data_wait_s": 0.302} if rank == 0 else {})

    found = diagnose(write_log(tmp_path, change, config=pipeline(8)))
    assert only(found).cause == "data_loading" and only(found).rank == 0


def test_a_callback_on_one_stage_is_no_slow_message(tmp_path: Path) -> None:
    """Rank 0 spends 0.3 s between its steps; the next stage begins at once, and waits for it."""
    write_log(tmp_path, config=pipeline(8))
    for rank in (0, 1):
        writer, late_s = StepLogWriter(tmp_path, rank), 0.3 * rank
        for step in range(1, 20):
            own: dict[str, Any] = USUAL | {"communication_s": 0.012 + late_s, "micro_batches": 8}
            start_s = 0.412 * step - late_s
            writer.write(StepRecord(step=step, start_s=start_s, step_s=0.108 + late_s, world_size=2, **own))
        writer.close()
    finding = only(diagnose(tmp_path))
    assert finding.cause == "callbacks" and finding.rank == 0


# --- Larger images on a slow machine --------------------------------------------------------------------------------

LARGE = {"tiles": 96, "image_tokens": 384}
"""2.71 x the FLOPs of `write_log`'s usual step."""


def test_a_slow_machine_that_has_larger_images_too_is_named_and_so_are_they(tmp_path: Path) -> None:
    """Rank 1 takes 0.2545 s for 2.71 x the work of 0.094 s, and 0.4 s more than that."""
    change = lambda rank, step: LARGE | {"forward_s": 0.4905, "backward_s": 0.16} if rank == 1 else {}  # noqa: E731
    found = diagnose(write_log(tmp_path, change))
    shares = {finding.cause: (finding.rank, finding.share) for finding in found.findings}
    assert list(shares) == ["slow_rank", "imbalance"] and {rank for rank, _ in shares.values()} == {1}
    step_s, work_s = 0.002 + 0.6545 + 0.004, 0.2545 - 0.094
    assert shares["imbalance"][1] == pytest.approx(work_s / 2 / step_s, rel=0.02)
    doubt = thresholds.MODEL_ERRORS["imbalance"] * work_s
    assert shares["slow_rank"][1] == pytest.approx((0.4 - doubt) / step_s, rel=0.02)


def test_a_little_more_than_flops_say_is_listed_but_not_blamed_on_the_machine(tmp_path: Path) -> None:
    change = lambda rank, step: LARGE | {"forward_s": 0.2, "backward_s": 0.16} if rank == 1 else {}  # noqa: E731
    found = diagnose(write_log(tmp_path, change))
    assert only(found).cause == "imbalance"
    (slow,) = [finding for finding in found.below if finding.rank == 1]
    assert slow.cause == "slow_rank" and "is not counted" in slow.evidence[-1]


def test_imbalance_costs_no_more_than_was_measured_nor_than_flops_say(tmp_path: Path) -> None:
    """A rank with 2.71 x the FLOPs that takes only 20 ms longer costs 20 ms, shared out; see the test above too."""
    change = lambda rank, step: LARGE | {"forward_s": 0.05} if rank == 1 else {}  # noqa: E731
    finding = find_imbalance(read_run(write_log(tmp_path, change)))
    assert finding is not None and finding.share == pytest.approx(0.01 / 0.12)


def test_flops_of_a_step_are_those_of_its_samples(tmp_path: Path) -> None:
    facts = read_run(write_log(tmp_path))
    record = facts.steps[3][0]
    config = parse_config({})
    positions = 448  # of 8 samples, 56 each: attention is a matter of one sample
    recompute = {"vision": config.activations.vision, "language": config.activations.language}
    expected = count_step_flops(get_model("tiny"), Work(8, positions, 8 * 56**2), list(TOWERS), recompute)
    assert facts.count_flops(record) == expected
    assert (slow := find_slow_rank(facts)) is not None and slow.share == 0


# --- A GPU that is always at its power cap --------------------------------------------------------------------------


@pytest.mark.parametrize(("reason", "is_fault"), [("software power cap", False), ("hardware thermal slowdown", True)])
def test_a_gpu_that_is_always_held_back_is_at_fault_only_where_heat_is_why(
    tmp_path: Path, reason: str, is_fault: bool
) -> None:
    rows = [{"step": s, "hardware/gpu_is_throttled": 1.0, "hardware/throttle_reasons": reason} for s in range(2, 24, 2)]
    jitter = lambda rank, step: {"backward_s": 0.045 if step == 9 else 0.06}  # noqa: E731
    found = diagnose(write_log(tmp_path / "jitter", jitter, hardware={"device": "cuda"}, rows=rows))
    assert found.is_healthy and any("power cap is no fault" in note for note in found.notes) != is_fault
    slows = lambda rank, step: {"backward_s": 0.06 + 0.01 * step}  # noqa: E731
    hot = diagnose(write_log(tmp_path / "slows", slows, hardware={"device": "cuda"}, rows=rows))
    assert (hot.cause == "throttling") == is_fault
    if is_fault:
        assert "in the fast ones (lower quartile)" in hot.findings[0].evidence[0]


def test_a_slow_rank_is_named_beside_one_with_less_work_that_is_no_faster(tmp_path: Path) -> None:
    """Rank 1 computes 50 ms longer at the same work; rank 2 has half the work in as much time, and keeps nobody."""
    half = {"samples": 4, "tiles": 4, "text_tokens": 200, "image_tokens": 16, "padding_tokens": 8}
    change = lambda rank, step: {1: {"backward_s": 0.11}, 2: half}.get(rank, {})  # noqa: E731
    found = diagnose(write_log(tmp_path, change, world_size=3))
    slow = [finding for finding in found.findings if finding.cause == "slow_rank"]
    assert [finding.rank for finding in slow] == [1]
