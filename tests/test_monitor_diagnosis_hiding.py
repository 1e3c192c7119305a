"""What one fix gains while other ranks go on, held against the same made-up run without the cause.

Steps are played through exchange by exchange: nobody goes on before the last rank has come. So what a fix gains is
known: the run is played again without what it removes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vlmcourse.monitor.diagnosis import Diagnosis, Finding, diagnose
from vlmcourse.monitor.diagnosis.exchanges import find_meetings
from vlmcourse.monitor.diagnosis.facts import read_run
from vlmcourse.monitor.diagnosis.findings import Fix
from vlmcourse.monitor.diagnosis.hiding import describe_places
from vlmcourse.monitor.step_log import EventRecord, StepLogWriter, StepRecord

EVENTS = ("checkpoint", "evaluation")
OWN_S = {"data": 0.0, "forward": 0.09, "update": 0.004, "callback": 0.0, **dict.fromkeys(EVENTS, 0.0)}
SENT_S, NUM_STEPS = 0.001, 15
Extra = Mapping[tuple[str, int], float]
"""What ranks take longer, by part of `OWN_S` and rank, in seconds."""
TOGETHER: Extra = {("data", 0): 0.3, ("callback", 1): 0.25}
EVEN_CALLBACK = {"callback": 0}


def play(
    folder: Path,
    extra: Extra,
    *,
    num_ranks: int = 2,
    waits: str = "each",
    has_rows: bool = False,
    parity: Mapping[str, int] | None = None,
) -> Diagnosis:
    """Diagnose a run whose ranks meet after loading and after forward, and in a row after each step if it has rows.

    With more than two ranks they meet after forward only.

    Args:
        extra: see `Extra`.
        waits: "each" is logged, or their "sum", or "none" (they count as forward, as on a GPU).
        parity: of parts that take longer in every second step only: 0 if in the even ones, 1 if in the odd.
    """
    writers, now_s = [StepLogWriter(folder, rank) for rank in range(num_ranks)], [0.0] * num_ranks

    def go(part: str, step: int) -> list[float]:
        is_longer = step % 2 == (parity or {}).get(part, step % 2)
        own = [OWN_S[part] + is_longer * extra.get((part, rank), 0.0) for rank in range(num_ranks)]
        now_s[:] = [moment + seconds for moment, seconds in zip(now_s, own, strict=True)]
        return own

    def meet() -> list[float]:
        end_s = max(now_s) + SENT_S
        waited = [end_s - moment for moment in now_s]
        now_s[:] = [end_s] * num_ranks
        return waited

    for step in range(1, NUM_STEPS + 1):
        began, data = list(now_s), go("data", step)
        waited_s = [meet()] if num_ranks == 2 else []
        forward, last_s, update = go("forward", step), meet(), go("update", step)
        each_s = list(zip(*waited_s, last_s, strict=True))
        ended = list(now_s)
        for rank, writer in enumerate(writers):
            record = StepRecord(
                step=step,
                start_s=began[rank],
                step_s=ended[rank] - began[rank],
                data_wait_s=data[rank],
                forward_s=forward[rank] + (sum(each_s[rank]) if waits == "none" else 0.0),
                communication_s=None if waits == "none" else sum(each_s[rank]),
                waits_s=list(each_s[rank]) if waits == "each" else None,
                optimizer_s=update[rank],
                world_size=num_ranks,
                text_tokens=400,
            )
            writer.write(record)
        go("callback", step)
        for kind in EVENTS:
            began = list(now_s)
            for rank, seconds in enumerate(go(kind, step)):
                if seconds > 0:
                    writers[rank].write(EventRecord(event=kind, step=step, start_s=began[rank], seconds=seconds))
        if has_rows:
            began = list(now_s)
            for rank, waited in enumerate(meet()):
                about: dict[str, Any] = {"start_s": began[rank], "seconds": waited, "communication_s": waited}
                writers[rank].write(EventRecord(event="log", step=step, **about))
    for writer in writers:
        writer.close()
    return diagnose(folder)


def without(extra: Extra, *parts: str) -> Extra:
    return {which: seconds for which, seconds in extra.items() if which[0] not in parts}


def best_alone(finding: Finding) -> Fix:
    return next(fix for fix in finding.fixes if "at once" not in fix.what)


def best_together(finding: Finding) -> Fix:
    return next(fix for fix in finding.fixes if "at once" in fix.what)


def said(finding: Finding) -> str:
    return next((sentence for sentence in finding.evidence if "Cured alone" in sentence), "")


@pytest.mark.parametrize("waits", ["each", "sum", "none"])
@pytest.mark.parametrize("extra", [TOGETHER, {("data", 0): 0.1, ("callback", 1): 0.4}], ids=["alike", "unequal"])
def test_a_fix_promises_what_is_left_while_the_other_rank_goes_on(tmp_path: Path, waits: str, extra: Extra) -> None:
    found = play(tmp_path / "both", extra, waits=waits)
    of_cause = {finding.cause: finding for finding in found.findings}
    assert {cause: finding.rank for cause, finding in of_cause.items()} == {"data_loading": 0, "callbacks": 1}
    neither = play(tmp_path / "neither", {}, waits=waits).tokens_per_s
    for cause, part in (("data_loading", "data"), ("callbacks", "callback")):
        one = play(tmp_path / part, without(extra, part), waits=waits).tokens_per_s
        finding = of_cause[cause]
        assert best_alone(finding).tokens_per_s == pytest.approx(one, rel=0.02)
        assert best_together(finding).tokens_per_s == pytest.approx(neither, rel=0.02)
        assert finding.fixes[0] == best_together(finding)
        low, high = best_together(finding).gain_range
        assert low < neither / found.tokens_per_s - 1 < high
        other = "callbacks on rank 1" if cause == "data_loading" else "data_loading on rank 0"
        assert f"still wait for {other}. Cured together" in said(finding) and "both must go" in said(finding)
    (halved,) = [fix for fix in of_cause["data_loading"].fixes if "halve what a sample costs" in fix.what]
    half = play(tmp_path / "half", {**extra, ("data", 0): extra["data", 0] / 2}, waits=waits).tokens_per_s
    assert halved.tokens_per_s == pytest.approx(half, rel=0.02)
    notes = [note for note in found.notes if note.startswith(("data_loading on rank 0", "callbacks on rank 1"))]
    assert ["taken to meet once a step" in note for note in notes] == ([True] if waits == "sum" else [])


def test_only_where_both_come_between_the_same_steps_does_one_hide_the_other(tmp_path: Path) -> None:
    found = play(tmp_path / "both", TOGETHER, parity=EVEN_CALLBACK)
    (loading,) = [finding for finding in found.findings if finding.cause == "data_loading"]
    cured = play(tmp_path / "cured", without(TOGETHER, "data"), parity=EVEN_CALLBACK).tokens_per_s
    assert best_alone(loading).tokens_per_s == pytest.approx(cured, rel=0.02) and said(loading)
    neither = play(tmp_path / "neither", {}).tokens_per_s
    assert best_together(loading).tokens_per_s == pytest.approx(neither, rel=0.02)
    (halved,) = [fix for fix in loading.fixes if "halve what a sample costs" in fix.what]
    half = play(tmp_path / "half", {**TOGETHER, ("data", 0): 0.15}, parity=EVEN_CALLBACK).tokens_per_s
    assert halved.tokens_per_s == pytest.approx(half, rel=0.02)


@pytest.mark.parametrize("loads_in", [0, 1], ids=["even", "odd"])
def test_samples_of_a_step_come_after_what_follows_the_step_before(tmp_path: Path, loads_in: int) -> None:
    """A callback after even steps comes together with the samples of odd ones, and not with those of even ones."""
    parity = EVEN_CALLBACK | {"data": loads_in}
    found = play(tmp_path / "both", TOGETHER, parity=parity)
    (loading,) = [finding for finding in found.findings if finding.cause == "data_loading"]
    cured = play(tmp_path / "cured", without(TOGETHER, "data"), parity=parity).tokens_per_s
    assert best_alone(loading).tokens_per_s == pytest.approx(cured, rel=0.02) and bool(said(loading)) == (loads_in == 1)


@pytest.mark.parametrize("waits", ["each", "none"])
@pytest.mark.parametrize("other", ["evaluation", "callback"])
def test_a_save_on_one_rank_hides_what_the_other_does_meanwhile(tmp_path: Path, other: str, waits: str) -> None:
    extra: Extra = {("checkpoint", 0): 0.3, (other, 1): 0.3}
    found = play(tmp_path / "both", extra, waits=waits)
    assert {finding.cause: finding.rank for finding in found.findings} == {"checkpoints": 0, f"{other}s": 1}
    neither = play(tmp_path / "neither", {}, waits=waits).tokens_per_s
    for finding in found.findings:
        assert best_alone(finding).gain_fraction < 0.03 and "both must go" in said(finding)
        assert best_together(finding).tokens_per_s == pytest.approx(neither, rel=0.02)


def test_causes_before_different_exchanges_keep_their_gains(tmp_path: Path) -> None:
    for extra, has_rows in (
        ({("callback", 0): 0.3, ("forward", 1): 0.3}, False),
        ({("data", 0): 0.3, ("callback", 1): 0.3}, True),  # rank 0 waits for the callback in a row, and then loads
    ):
        name = "rows" if has_rows else "forward"
        found = play(tmp_path / name, extra, has_rows=has_rows)
        assert len(found.findings) == 2
        for finding in found.findings:
            assert not said(finding) and not [fix for fix in finding.fixes if "at once" in fix.what]
            assert best_alone(finding).saved_share == pytest.approx(finding.share)
        part = "callback"
        one = play(tmp_path / f"{name}-cured", without(extra, part), has_rows=has_rows).tokens_per_s
        (callbacks,) = [finding for finding in found.findings if finding.cause == "callbacks"]
        assert callbacks.fixes[0].tokens_per_s == pytest.approx(one, rel=0.02)
    # Known by their sums alone, the two are taken to be at the same time, which is said.
    summed = play(tmp_path / "sum", {("callback", 0): 0.3, ("forward", 1): 0.3}, waits="sum")
    assert {f.cause for f in summed.findings if "both must go" in said(f)} == {"callbacks", "slow_rank"}
    assert any("where these come before different exchanges, each gains its own time alone" in n for n in summed.notes)


def test_of_three_causes_on_three_ranks_none_gains_before_all_are_gone(tmp_path: Path) -> None:
    extra = {("data", 0): 0.3, ("callback", 1): 0.3, ("forward", 2): 0.3}
    found = play(tmp_path / "three", extra, num_ranks=3)
    assert {finding.cause for finding in found.findings} == {"data_loading", "callbacks", "slow_rank"}
    neither = play(tmp_path / "none", {}, num_ranks=3).tokens_per_s
    for finding in found.findings:
        assert best_alone(finding).gain_fraction < 0.03 and "all must go" in said(finding)
        assert best_together(finding).tokens_per_s == pytest.approx(neither, rel=0.02)


def test_a_rank_that_no_finding_names_holds_the_others_too(tmp_path: Path) -> None:
    """Two of four ranks load for long: curing the data of both is one fix; of two slow machines only one is named."""
    both = play(tmp_path / "data", {("data", 0): 0.3, ("data", 1): 0.3}, num_ranks=4)
    assert not said(both.findings[0]) and best_alone(both.findings[0]).saved_share == both.findings[0].share
    extra: dict[tuple[str, int], float] = {("forward", 0): 0.3, ("forward", 1): 0.28}
    slow = play(tmp_path / "slow", extra, num_ranks=4).findings[0]
    cured = play(tmp_path / "cured", {("forward", 1): 0.28}, num_ranks=4).tokens_per_s
    assert slow.cause == "slow_rank" and best_alone(slow).tokens_per_s == pytest.approx(cured, rel=0.02)
    assert "another one, which comes to the exchanges hardly earlier" in said(slow)


@pytest.mark.parametrize("which", [("data", 0), ("callback", 1), ("forward", 1)])
@pytest.mark.parametrize("waits", ["each", "sum"])
def test_a_cause_alone_promises_all_of_it(tmp_path: Path, which: tuple[str, int], waits: str) -> None:
    extra = {which: 0.3}
    found = play(tmp_path / "one", extra, waits=waits)
    healthy = play(tmp_path / "none", {}, waits=waits).tokens_per_s
    (finding,) = found.findings
    assert not said(finding) and finding.fixes[0].saved_share == finding.share
    assert finding.fixes[0].tokens_per_s == pytest.approx(healthy, rel=0.02)


def test_where_waits_are_not_told_what_computing_hides_is_left_open(tmp_path: Path) -> None:
    play(tmp_path, TOGETHER, waits="none")
    facts = read_run(tmp_path)
    hot, callback = (
        Finding(cause=cause, share=0.4, rank=rank, evidence=(), fixes=())
        for cause, rank in (("throttling", 0), ("callbacks", 1))
    )
    meetings = find_meetings(facts)
    (note,) = describe_places(facts, meetings, [callback], [hot, callback])
    assert note.startswith("throttling on rank 0 and callbacks on rank 1 may go on at the same time, which cannot")
    assert describe_places(facts, meetings, [callback], [callback]) == []
