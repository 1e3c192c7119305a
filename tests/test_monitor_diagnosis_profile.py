"""What a profile adds to a diagnosis: made-up logs with made-up profiles, a GPU's among them; real ones are profiled in
`test_monitor_profiler.py`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from handmade_traces import gpu_trace, rank_trace, span
from made_up_logs import GIB, only, write_log

from vlmcourse import cli
from vlmcourse.commands.diagnose import describe_gain
from vlmcourse.monitor.diagnosis import Diagnosis, diagnose, thresholds
from vlmcourse.monitor.diagnosis.findings import build_fix
from vlmcourse.monitor.profile_summary import (
    PROFILE_FOLDER,
    SUMMARY_JSON,
    CopyTime,
    OperatorTime,
    RankTime,
    TraceSummary,
    read_summary,
    write_summary,
)
from vlmcourse.monitor.trace_files import RankTrace
from vlmcourse.monitor.trace_merge import merge_traces
from vlmcourse.monitor.trace_summary import summarise

GPU = {"device": "cuda", "gpu_memory_bytes": 80 * GIB}
STEPS = (4, 5)
WAITS_S = ([0.05, 0.01], [0.02, 0.04])
"""Of a step with two exchanges, by rank."""


def rank_time(rank: int, step_s: float = 0.1, **changes: Any) -> RankTime:
    """What a rank of `made_up_logs.USUAL` does in two steps, exposed 4 ms and stalled 2 ms of 100 each."""
    parts: dict[str, Any] = {"exposed_s": 0.008, "stall_s": 0.004, "idle_s": 0.02, "communication_s": 0.02} | changes
    seconds = 2 * step_s
    compute_s = seconds - parts["exposed_s"] - parts["stall_s"] - parts["idle_s"]
    counts: dict[str, Any] = {"num_operators": 4000, "operators_s": 0.02, "num_short": 3800}
    return RankTime(rank=rank, compute_s=compute_s, seconds=seconds, **counts | parts)


def add_profile(folder: Path, *ranks: RankTime, steps: tuple[int, ...] = STEPS, **changes: Any) -> Path:
    """Write the summary of a profile into a run's folder."""
    found = ranks or (rank_time(0), rank_time(1))
    summary = TraceSummary(
        steps=steps,
        step_s=max(of_rank.seconds for of_rank in found) / len(steps),
        ranks=found,
        operators=(OperatorTime(name="aten::mm", self_s=0.08, calls=400),),
        longest_gap=None,
        clock_uncertainty_s=1e-4,
    )
    (folder / PROFILE_FOLDER).mkdir()
    write_summary(dataclasses.replace(summary, **changes), folder / PROFILE_FOLDER)
    return folder


def said(found: Diagnosis, words: str) -> bool:
    """Whether the evidence of the first finding says so."""
    return any(words in sentence for sentence in found.findings[0].evidence)


def noted(found: Diagnosis, words: str) -> bool:
    return any(words in note for note in found.notes)


def test_a_summary_survives_its_file_and_another_versions_is_refused(tmp_path: Path) -> None:
    trace = merge_traces([rank_trace(0), rank_trace(1)])
    summary = summarise(trace)
    assert summary.longest_gap is not None
    path = write_summary(summary, tmp_path)
    assert path.name == SUMMARY_JSON and read_summary(path) == summary
    held = json.loads(path.read_text())
    for broken in ([], {}, held | {"steps": []}, held | {"more": 1}, held | {"ranks": [{"rank": 0}]}):
        path.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=r"no summary of this version .*make it again with .*summarise_folder"):
            read_summary(path)


def test_operators_that_call_no_other_are_counted_and_short_ones_among_them() -> None:
    """Rank 0 has linear with mm in it, mul, and a later mm; one of 5 us is planted in step 6, one outside of it."""
    more = [span("aten::view", 150, 150.005, tid=9999), span("aten::view", 215, 215.005)]
    first, other = summarise(merge_traces([rank_trace(0, more=more), rank_trace(1)])).ranks
    assert (first.num_operators, first.num_short) == (4, 1)  # mm, mul, mm, view
    assert first.operators_s == pytest.approx((10 + 40 + 100 + 0.005) / 1e3)
    assert first.copies == () and other.num_short == 0


def test_copies_of_a_gpu_count_by_direction_and_what_hides_behind_kernels_does_not() -> None:
    """10 ms of which 5 hide behind a kernel (50-80 ms), 4 ms that hide behind NCCL (to 95), 3 ms that hide nowhere."""

    def copy(name: str, start_ms: float, end_ms: float, num_bytes: int) -> dict[str, Any]:
        args = {"bytes": num_bytes, "stream": 7}
        return span(f"Memcpy {name}", start_ms, end_ms, 11, "gpu_memcpy", args=args) | {"pid": 0}

    traces: list[RankTrace] = []
    for rank in (0, 1):
        trace = gpu_trace(rank)
        copies = [
            copy("HtoD (Pageable -> Device)", 15, 25, 4_000_000),
            copy("DtoH (Device -> Pinned)", 90, 94, 1_000_000),
            copy("HtoD (Pinned -> Device)", 96, 99, 2_000_000),
        ]
        traces.append(dataclasses.replace(trace, events=trace.events + copies))
    summary = summarise(merge_traces(traces))
    assert summary.on_gpu
    down, up = summary.ranks[0].copies
    assert (down.direction, down.num_bytes, down.exposed_s) == ("DtoH", 1_000_000, 0.0)
    assert (up.direction, up.calls, up.num_bytes) == ("HtoD", 2, 6_000_000)
    assert (up.seconds, up.exposed_s) == (pytest.approx(0.013), pytest.approx(0.008))
    assert summary.ranks[0].num_operators == 2, "two kernels; NCCL's and copies are none"
    assert "HtoD 6.0 MB a step in 13.0 ms, 8.0 ms of it exposed" in str(summary)


def test_exposed_communication_is_that_of_the_rank_that_waits_least_in_each_collective() -> None:
    """Rank 0 waits 20 ms in its all-reduce and 1 in a broadcast, rank 1 10 and 20; one within another counts once."""

    def sent(name: str, start_ms: float, end_ms: float) -> dict[str, Any]:
        return span(f"gloo:{name}", start_ms, end_ms, tid=7001, cat="user_annotation")

    first = rank_trace(0, more=[sent("broadcast", 100, 101), sent("barrier", 95, 99)])
    other = rank_trace(1, more=[sent("broadcast", 90, 110), sent("barrier", 95, 99)])
    summary = summarise(merge_traces([first, other]))
    assert min(of_rank.exposed_s for of_rank in summary.ranks) == pytest.approx(0.021)
    assert summary.shared_exposed_s == pytest.approx(0.011) and summary.shared_exposed_share == pytest.approx(
        0.011 / 0.2
    )
    once_more = rank_trace(1, more=[sent("broadcast", 90, 110)])
    assert summarise(merge_traces([first, once_more])).shared_exposed_s is None, "a barrier on one rank only"
    # What is exposed in no collective is a rank's that has least of it: 2 ms of a call on rank 0, 10 on rank 1.
    called = [rank_trace(rank, more=[span("c10d::wait", 100, 102 if rank == 0 else 110)]) for rank in (0, 1)]
    assert summarise(merge_traces(called)).shared_exposed_s == pytest.approx(0.012)


def test_without_a_profile_all_is_as_before_and_one_that_agrees_is_quoted(tmp_path: Path) -> None:
    change = lambda rank, step: {"data_wait_s": 0.1}  # noqa: E731
    plain = diagnose(write_log(tmp_path / "plain", change))
    stalled = (rank_time(0, 0.198, stall_s=0.2), rank_time(1, 0.198, stall_s=0.196))
    found = diagnose(add_profile(write_log(tmp_path / "profiled", change), *stalled))
    assert plain.profile == () and found.cause == plain.cause == "data_loading"
    assert found.findings[0].share == pytest.approx(plain.findings[0].share)
    assert said(
        found, "The profile of steps 4 to 5 shows data stalls for 51% of the time of rank 0, the most of all ranks"
    )
    assert said(found, "(100.0 ms a step); the step log agrees (51% in the steps looked at)")
    assert found.profile[0] == "Profile of steps 4 to 5: 198.0 ms a step."
    assert "Rank 1: compute" in found.profile[2] and "2,000 operators a step of 5.0 us on the mean" in found.profile[2]
    assert "95% of them below 10 us" in found.profile[2] and "aten::mm 20.0 ms" in found.profile[3]


def test_where_log_and_profile_disagree_both_are_said_with_where(tmp_path: Path) -> None:
    change = lambda rank, step: {"data_wait_s": 0.1}  # noqa: E731
    everywhere = diagnose(add_profile(write_log(tmp_path / "same", change)))
    assert said(everywhere, "data stalls for 2% of the time of rank 0") and said(everywhere, "they disagree")
    assert said(everywhere, "the step log 51% in the same steps and 51% in those looked at")

    late = lambda rank, step: {"data_wait_s": 0.1} if step > 6 else {}  # noqa: E731
    later = diagnose(add_profile(write_log(tmp_path / "late", late)))
    assert later.cause == "data_loading" and said(later, "The step log agrees for these steps (2%), but has")
    assert said(later, "record later ones with profile.wait")

    stalled = (rank_time(0, stall_s=0.1), rank_time(1, stall_s=0.1))
    unseen = diagnose(add_profile(write_log(tmp_path / "unseen"), *stalled))
    assert unseen.is_healthy and noted(unseen, "data stalls for 50% of the time of rank 0")
    exposed = (rank_time(0, exposed_s=0.12), rank_time(1, exposed_s=0.1))
    unheard = diagnose(add_profile(write_log(tmp_path / "unheard"), *exposed))
    assert unheard.is_healthy and noted(unheard, "exposed communication for 50% of the time of rank 1, the least")


def test_the_slowest_rank_of_a_profile_is_held_against_the_logs(tmp_path: Path) -> None:
    change = lambda rank, step: {"forward_s": 0.13} if rank == 1 else {}  # noqa: E731
    ranks = rank_time(0, 0.2, exposed_s=0.208), rank_time(1, 0.2)
    found = diagnose(add_profile(write_log(tmp_path / "same", change), *ranks))
    assert only(found).cause == "slow_rank" and said(found, "rank 1 has the most time of its own, 196.0 ms a step")
    assert not said(found, "disagree")
    swapped = [dataclasses.replace(of_rank, rank=1 - of_rank.rank) for of_rank in reversed(ranks)]
    other = diagnose(add_profile(write_log(tmp_path / "other", change), *swapped))
    assert said(other, "rank 0 has the most time of its own") and said(
        other, "names rank 1 over all its steps: they disagree"
    )


def test_work_between_steps_is_idle_there_or_came_in_no_recorded_step(tmp_path: Path) -> None:
    busy = diagnose(add_profile(write_log(tmp_path / "busy", between=lambda rank, step: ("nothing", 0.1))))
    assert only(busy).cause == "callbacks" and said(busy, "idle for 10% of the time at most, though about 25%")
    save = lambda rank, step: ("checkpoint", 0.5) if step % 8 == 0 else None  # noqa: E731
    rare = diagnose(add_profile(write_log(tmp_path / "rare", between=save)))
    assert only(rare).cause == "checkpoints" and said(rare, "does not show it: none came between these steps")


def test_steps_with_the_profiler_on_are_left_out_or_said_to_be_in(tmp_path: Path) -> None:
    """Recorded steps take three times as long, and the trace is written for 2 s after step 5."""

    def write(folder: Path, num_steps: int, config: Mapping[str, Any]) -> Path:
        return write_log(
            folder,
            lambda rank, step: {"forward_s": 0.23} if 4 <= step <= 5 else {},
            num_steps=num_steps,
            between=lambda rank, step: ("nothing", 2.0) if step == 5 else None,
            config=config,
        )

    config = {"profile": {"wait": 2, "warmup": 1, "active": 2}}
    found = diagnose(add_profile(write(tmp_path / "long", 23, config)))
    assert found.is_healthy and found.step_s == pytest.approx(0.1) and found.first_step == 6
    assert noted(found, "3 steps (3 to 5) are left out")
    unwritten = diagnose(write(tmp_path / "unwritten", 23, config))
    assert unwritten.is_healthy and unwritten.step_s == pytest.approx(0.1), "the settings say which steps"
    assert noted(unwritten, "3 steps (3 to 5) are left out")
    short = diagnose(add_profile(write(tmp_path / "short", 9, config)))
    assert short.cause == "callbacks" and noted(short, "the profiler was on in 3 steps (3 to 5) of the 6")


def test_a_profile_that_cannot_be_used_is_named_and_changes_nothing(tmp_path: Path) -> None:
    runs = {name: write_log(tmp_path / name) for name in ("empty", "broken", "ranks", "steps", "settings")}
    (runs["empty"] / PROFILE_FOLDER).mkdir()
    add_profile(runs["broken"])
    (runs["broken"] / PROFILE_FOLDER / SUMMARY_JSON).write_text('{"steps": [4')
    add_profile(runs["ranks"], rank_time(0))
    add_profile(runs["steps"], steps=(400, 401))
    add_profile(runs["settings"])
    for path in (runs["settings"] / "steps").iterdir():
        mark = {"event": "resume", "step": 10, "start_s": 1.0, "seconds": 0.0, "changed": "parallel.pp 1 -> 2"}
        path.write_text(path.read_text() + json.dumps(mark) + "\n")
    expected = {
        "empty": "has no summary.json, so no profile is looked at",
        "broken": "no summary of this version",
        "ranks": "the profile of 1 rank(s) in steps 4 to 5 is not looked at",
        "steps": "in steps 400 to 401 is not looked at: the step log has not all of these steps",
        "settings": "in steps 4 to 5 is not looked at: the step log has not all of these steps",
    }
    for name, words in expected.items():
        found = diagnose(runs[name])
        assert found.is_healthy and found.profile == () and noted(found, words), (name, found.notes)


def test_small_operators_are_counted_where_they_were_guessed(tmp_path: Path) -> None:
    config = {"train": {"micro_batch_size": 1, "accumulation_steps": 8}}
    folder = write_log(tmp_path, lambda rank, step: {"cpu_percent": 96.0}, config=config)
    found = diagnose(add_profile(folder))
    assert only(found).cause == "small_kernels" and said(found, "2,000 operators a step of 5.0 us on the mean")
    assert said(found, "10% of the time pass, of which one micro-batch would save 9% at least")


# --- What only a GPU's profile shows --------------------------------------------------------------------------------


def test_a_gpu_that_runs_nothing_is_seen_in_its_profile_and_held_against_its_use(tmp_path: Path) -> None:
    idle = (rank_time(0, idle_s=0.12), rank_time(1, idle_s=0.12))
    found = diagnose(add_profile(write_log(tmp_path / "alone", hardware=GPU), *idle, on_gpu=True))
    assert only(found).cause == "small_kernels" and only(found).share == pytest.approx(0.6)
    assert said(found, "the GPUs run nothing for 60% of the time") and said(found, "2,000 kernels a step of 5.0 us")
    rows = [{"step": step, "performance/gpu_util": 95.0} for step in range(5, 24, 5)]
    both = diagnose(add_profile(write_log(tmp_path / "both", hardware=GPU, rows=rows), *idle, on_gpu=True))
    assert said(both, "By the profile it is 60% and by the GPU's use 0%: they disagree")


def test_copies_that_nothing_hides_are_the_share_and_traffic_is_only_an_upper_bound(tmp_path: Path) -> None:
    copy = CopyTime(direction="HtoD", calls=8, num_bytes=8_000_000, seconds=0.06, exposed_s=0.05)
    within = dataclasses.replace(copy, direction="DtoD", exposed_s=0.1)
    ranks = (rank_time(0), rank_time(1, copies=(within, copy)))
    rows = [{"step": step, "hardware/pcie_rx_bytes_per_s": 20e9} for step in range(5, 24, 5)]
    found = diagnose(add_profile(write_log(tmp_path / "a", hardware=GPU, rows=rows), *ranks, on_gpu=True))
    assert only(found).cause == "copies" and only(found).share == pytest.approx(0.25), "not the 80 % of a busy link"
    assert said(found, "rank 1 only copies for 25% of the time") and said(found, "HtoD 4.0 MB in 4 copies, 30.0 ms")
    assert said(found, "at most so much of the time") and not said(found, "disagree")
    slow = [row | {"hardware/pcie_rx_bytes_per_s": 1e9} for row in rows]
    more = diagnose(add_profile(write_log(tmp_path / "b", hardware=GPU, rows=slow), *ranks, on_gpu=True))
    assert said(more, "more than a busy link could take: they disagree")


def test_communication_that_the_log_cannot_tell_is_found_by_the_profile(tmp_path: Path) -> None:
    change = lambda rank, step: {"communication_s": 0.0, "backward_s": 0.064}  # noqa: E731
    folder = write_log(tmp_path, change, hardware=GPU, config={"parallel": {"strategy": "fsdp"}})
    for path in (folder / "steps").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(
            "".join(json.dumps({k: v for k, v in r.items() if k != "communication_s"}) + "\n" for r in rows)
        )
    assert noted(diagnose(folder), "communication cannot be told")
    ranks = (rank_time(0, exposed_s=0.1, communication_s=0.14), rank_time(1, exposed_s=0.08, communication_s=0.14))
    found = diagnose(add_profile(folder, *ranks, on_gpu=True))
    assert only(found).cause == "communication" and only(found).share == pytest.approx(0.4)
    assert said(found, "even rank 1, which has least, has exposed communication for 40%") and said(
        found, "30.0 ms more hide"
    )
    assert said(found, "an upper bound") and said(found, "does not compare the ranks by collective")
    assert not noted(found, "cannot be told")
    # The ranks are late at different collectives: of 40 and 50 ms a step, 30 are waited by both.
    (folder / PROFILE_FOLDER / SUMMARY_JSON).unlink()
    (folder / PROFILE_FOLDER).rmdir()
    found = diagnose(add_profile(folder, *ranks, on_gpu=True, shared_exposed_s=0.06))
    assert only(found).cause == "communication" and only(found).share == pytest.approx(0.3)
    assert said(found, "even the rank that waits least in a collective has exposed communication for 30%")
    assert said(found, "30.0 ms a step: no rank is late then") and not said(found, "upper bound")


def hide_waits(folder: Path) -> Path:
    """Make a run's log one of FSDP on a GPU: what a rank waits for the others counts as its backward."""
    for path in (folder / "steps").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            if "backward_s" in row:
                row["backward_s"] += row.pop("communication_s")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


TWICE = {"tiles": 16, "text_tokens": 800, "image_tokens": 64, "padding_tokens": 32, "samples": 16}


def two_ranks(tmp_path: Path, own_s: float, waited_s: float, change: Any = None, **more: Any) -> Diagnosis:
    """Diagnose a run whose rank 1 has `own_s` of its own in two recorded steps, while rank 0 waits `waited_s`."""
    seconds, config = own_s + 0.008, more.pop("config", {"parallel": {"strategy": "fsdp"}})
    longer_s = own_s / 2 - 0.096
    slower = lambda rank, step: {"backward_s": 0.06 + longer_s * rank} | (change or {} if rank == 1 else {})  # noqa: E731
    folder = hide_waits(write_log(tmp_path, slower, hardware=GPU, config=config, between=more.pop("between", NOTHING)))
    ranks = [rank_time(0, seconds / 2, exposed_s=waited_s + 0.008), rank_time(1, seconds / 2, **more)]
    return diagnose(add_profile(folder, *ranks, on_gpu=True, shared_exposed_s=0.008))


NOTHING = lambda rank, step: None  # noqa: E731


def test_a_slow_rank_that_the_log_cannot_tell_is_found_by_the_profile(tmp_path: Path) -> None:
    """Rank 1 has 40 ms a step more of its own."""
    assert noted(
        diagnose(hide_waits(write_log(tmp_path / "none", hardware=GPU, config={"parallel": {"strategy": "fsdp"}}))),
        "neither it nor a slow rank nor unequal work was looked for",
    )
    found = two_ranks(tmp_path / "slow", 0.272, 0.08)
    assert (only(found).cause, only(found).rank) == ("slow_rank", 1)
    assert only(found).share == pytest.approx(0.08 / 0.28, abs=0.02)
    assert said(found, "they wait for the rest") and not said(found, "has the most time of its own")
    assert not said(found, "larger work explains")  # both have the same
    healthy = two_ranks(tmp_path / "healthy", 0.192, 0.0)
    assert not healthy.findings


def test_more_work_at_equal_pace_is_unequal_work_by_the_profile(tmp_path: Path) -> None:
    found = two_ranks(tmp_path / "twice", 0.384, 0.192, TWICE)
    assert (only(found).cause, only(found).rank) == ("imbalance", 1)
    assert only(found).share == pytest.approx(0.192 / 0.392 / 2, abs=0.02)
    # Twice the work in hardly more time: hardly anybody waits, so nobody is named, least of all rank 0 with less work.
    assert not two_ranks(tmp_path / "bound", 0.2, 0.008, TWICE).findings


def test_where_flops_are_not_known_or_stages_differ_the_profile_names_no_work(tmp_path: Path) -> None:
    unknown = {"parallel": {"strategy": "fsdp"}, "model": {"hf_folder": "weights"}}
    found = two_ranks(tmp_path / "unknown", 0.384, 0.192, TWICE, config=unknown)
    assert only(found).cause == "slow_rank" and said(found, "FLOPs are not known here")
    staged = {"parallel": {"strategy": "single", "pp": 2}, "train": {"accumulation_steps": 2}}
    found = two_ranks(tmp_path / "staged", 0.272, 0.08, config=staged)
    assert not {"slow_rank", "imbalance"} & {finding.cause for finding in (*found.findings, *found.below)}


@pytest.mark.parametrize("waits", [0, 1])
def test_a_rank_is_not_slow_for_what_it_does_between_recorded_steps(tmp_path: Path, waits: int) -> None:
    """After step 4 both are in a save for 300 ms, in which one writes and the other waits for it."""
    save = lambda rank, step: ("checkpoint", 0.3) if step == 4 else None  # noqa: E731
    folder = hide_waits(write_log(tmp_path, hardware=GPU, config={"parallel": {"strategy": "fsdp"}}, between=save))
    ranks = [
        rank_time(rank, 0.25, exposed_s=0.288 if rank == waits else 0.008, idle_s=0.02 if rank == waits else 0.3)
        for rank in (0, 1)
    ]
    found = diagnose(add_profile(folder, *ranks, on_gpu=True, shared_exposed_s=0.008))
    assert not {"slow_rank", "imbalance"} & {finding.cause for finding in found.findings}


def test_log_and_profile_compare_the_same_part_of_the_waits(tmp_path: Path) -> None:
    """Each rank waits 60 ms a step, but of the two exchanges only 20 and 10 are waited by both."""
    folder = write_log(tmp_path / "alike", lambda rank, step: {"communication_s": 0.06, "waits_s": WAITS_S[rank]})
    ranks = [rank_time(rank, 0.156, exposed_s=0.12) for rank in (0, 1)]
    alike = diagnose(add_profile(folder, *ranks, shared_exposed_s=0.06))
    (sent,) = [finding for finding in (*alike.findings, *alike.below) if finding.cause == "communication"]
    assert sent.share == pytest.approx(0.03 / 0.156)
    assert (
        "shows exposed communication for 19% of the time, with the rank that waits least in each" in sent.evidence[-1]
    )
    assert "the step log agrees (19% in the steps looked at)" in sent.evidence[-1]
    # The steps after the recorded ones wait 0.1 s more in their last exchange: 130 of 256 ms.
    later = write_log(
        tmp_path / "later",
        lambda rank, step: {
            "communication_s": 0.06 + (0.1 if step > 6 else 0.0),
            "waits_s": [waited + (0.1 if i and step > 6 else 0.0) for i, waited in enumerate(WAITS_S[rank])],
        },
    )
    changed = diagnose(add_profile(later, *ranks, shared_exposed_s=0.06))
    assert only(changed).cause == "communication"
    assert said(changed, "The step log agrees for these steps (19%), but has 50% in those looked at")
    for path in (folder / PROFILE_FOLDER).iterdir():
        path.unlink()
    (folder / PROFILE_FOLDER).rmdir()
    all_waits = diagnose(add_profile(folder, *ranks))
    (sent,) = [finding for finding in (*all_waits.findings, *all_waits.below) if finding.cause == "communication"]
    assert "38% of the time of rank 0, the least of all ranks, with its waits for late ranks" in sent.evidence[-1]
    assert "the step log agrees (38% in the steps looked at)" in sent.evidence[-1]


# --- The command, and what fixes leave open ---------------------------------------------------------------------------


def test_the_command_prints_the_profile_and_json_holds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(add_profile(write_log(tmp_path, lambda rank, step: {"communication_s": 0.1})))
    assert cli.main(["diagnose", folder]) == 0
    assert "Profile of steps 4 to 5: 100.0 ms a step." in capsys.readouterr().out
    assert cli.main(["diagnose", folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["profile"]) == 4 and found["cause"] == "communication"


def test_fixes_say_how_far_off_they_may_be(tmp_path: Path) -> None:
    between = lambda rank, step: ("nothing", 0.1)  # noqa: E731
    steady = only(diagnose(write_log(tmp_path / "steady", between=between))).fixes[0]
    assert steady.uncertainty_share == pytest.approx(0) and steady.saved_share == pytest.approx(0.5)
    assert steady.gain_range == pytest.approx((steady.gain_fraction, steady.gain_fraction))
    # Computing alternates between 74 and 114 ms: half of the difference over the mean, of what the fix leaves.
    noisy = lambda rank, step: {"forward_s": 0.01 + 0.04 * (step % 2)}  # noqa: E731
    fix = only(diagnose(write_log(tmp_path / "noisy", noisy, between=between))).fixes[0]
    assert fix.uncertainty_share == pytest.approx(0.02 / 0.094 * (1 - fix.saved_share))
    low, high = fix.gain_range
    assert low < fix.gain_fraction < high
    shared = lambda rank, step: {"cpu_percent": 30.0}  # noqa: E731
    loaded = only(diagnose(write_log(tmp_path / "loaded", shared, between=between))).fixes[0]
    assert loaded.uncertainty_share == pytest.approx(thresholds.SHARED_CORE_NOISE * (1 - loaded.saved_share))
    waits = lambda rank, step: {"communication_s": 0.1}  # noqa: E731
    modelled = only(diagnose(write_log(tmp_path / "modelled", waits))).fixes[0]
    error = thresholds.MODEL_ERRORS["communication"]
    assert modelled.uncertainty_share == pytest.approx(error * modelled.saved_share)


def test_an_upper_end_that_says_nothing_is_left_out() -> None:
    unsure = dataclasses.replace(build_fix("a fix", 100.0, 0.76), uncertainty_share=0.25)
    assert unsure.gain_range[1] == math.inf and describe_gain(unsure) == "+317%, at least +104%"
    sure = dataclasses.replace(build_fix("a fix", 100.0, 0.5), uncertainty_share=0.1)
    assert sure.gain_range == pytest.approx((1 / 0.6 - 1, 1 / 0.4 - 1))
    assert describe_gain(sure) == "+100%, +67% to +150%"
