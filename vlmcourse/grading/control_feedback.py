"""What a controller of exercise 4.7 seems to believe, told from what it did in its runs.

Enters: `Result`s. Leaves: sentences, each a misconception with what it cost. A sentence is said only where runs show
it in several places; which lines of the controller do it is for the learner to find.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from vlmcourse.control.actions import Settings
from vlmcourse.control.episodes import Result
from vlmcourse.control.rates import checkpoint_s, restart_s
from vlmcourse.control.simulation import NEW_MACHINE_S, Row

SPIKE = 1.3
"""Times the median of the steps around it that a single step takes to be one."""
SOON_S = 60.0
"""Within which what was changed is changed back by a controller that oscillates."""
AFTER_S = 240.0
"""Within which a run that was made to need more memory runs out of it."""
MEMORY = ("micro_batch_size", "recompute_vision", "recompute_language", "zero_stage")


def explain_controller(results: Sequence[Result]) -> list[str]:
    """Return sentences about a controller, the gravest first; at most one of each kind."""
    if not any(result.log.asked for result in results):
        return [
            "never acts: what fits the calm beginning is too large, too uneven or too rarely saved when the run changes"
        ]
    tests = (_brim, _too_late, _by_samples, _one_step, _oscillates, _replaces, _never_saves, _saves_too_often, _timid)
    return [sentence for sentence in (test(results) for test in tests) if sentence]


def _changes(result: Result) -> list[tuple[int, Settings, Settings]]:
    """Return where settings changed: the number of the last step under the old ones, these, and the new ones."""
    rows = result.log.rows
    return [
        (number, row.settings, after.settings)
        for number, (row, after) in enumerate(zip(rows, rows[1:], strict=False))
        if row.settings != after.settings
    ]


def _needs_more(old: Settings, new: Settings) -> bool:
    """Whether a change makes a run need more memory."""
    keeps_more = any(
        getattr(old, f"recompute_{tower}") == "full" and getattr(new, f"recompute_{tower}") == "none"
        for tower in ("vision", "language")
    )
    return keeps_more or new.micro_batch_size > old.micro_batch_size or new.zero_stage < old.zero_stage


def _brim(results: Sequence[Result]) -> str:
    found = 0
    for result in results:
        grown_s = [result.log.rows[number].now_s for number, old, new in _changes(result) if _needs_more(old, new)]
        found += sum(
            row.stopped == "out of memory" and any(0 < row.now_s - at_s < AFTER_S for at_s in grown_s)
            for row in result.log.rows
        )
    if found < 2:
        return ""
    return (
        f"fills memory up to the brim: {found} times it ran out within {AFTER_S:g} s of a larger micro-batch or less "
        "recomputation; the next batch may be larger than all that you have seen, so leave room"
    )


def _too_late(results: Sequence[Result]) -> str:
    tight = [result for result in results if result.log.num_oom and result.baseline.num_oom]
    if len(tight) < 2 or sum(result.log.num_oom for result in tight) < 3:
        return ""
    stops = sum(result.log.num_oom for result in tight)
    relieved = [any(_relieves(old, new) for _, old, new in _changes(result)) for result in tight]
    what = "acts on memory only when it has run out" if any(relieved) else "never relieves memory"
    return (
        f"{what}: {stops} steps ran out of memory, each for a restart and all work since the last checkpoint; "
        "peak_bytes over device_bytes grows before that"
    )


def _relieves(old: Settings, new: Settings) -> bool:
    return any(getattr(old, name) != getattr(new, name) for name in (*MEMORY, "balance")) and not _needs_more(old, new)


def _by_samples(results: Sequence[Result]) -> str:
    asked = [name for result in results for _, name in result.log.asked]
    if "balance samples" not in asked or "balance tokens" in asked:
        return ""
    return (
        "balances by samples: every rank has equally many from the beginning; what differs is their tiles and tokens, "
        "so deal by tokens"
    )


def _one_step(results: Sequence[Result]) -> str:
    changes, after_spikes = 0, 0
    for result in results:
        rows = result.log.rows
        for number, old, new in _changes(result):
            if old.save_every != new.save_every:
                continue
            changes += 1
            after_spikes += _is_spike(rows, number)
        after_spikes += sum(_was_spike(rows, at_s) for at_s in _asked_at(result, "replace"))
        changes += len(_asked_at(result, "replace"))
    if after_spikes < 3 or after_spikes < 0.4 * changes:
        return ""
    return (
        f"acts on one noisy step: {after_spikes} of its {changes} changes follow a single slow step with fast ones "
        "around it; decide on the median of several"
    )


def _asked_at(result: Result, name: str) -> list[float]:
    return [at_s for at_s, asked in result.log.asked if asked == name]


def _was_spike(rows: Sequence[Row], at_s: float) -> bool:
    """Whether the last step before a moment is a spike."""
    before = [number for number, row in enumerate(rows) if row.now_s < at_s]
    return bool(before) and _is_spike(rows, before[-1])


def _is_spike(rows: Sequence[Row], number: int) -> bool:
    """Whether a step is much slower than those before and after it."""
    around = [rows[at].step_s for at in range(number - 4, number) if at >= 0]
    return len(around) >= 2 and rows[number].step_s > SPIKE * median(around)


def _oscillates(results: Sequence[Result]) -> str:
    names = [name for name in vars(results[0].log.rows[0].settings) if name not in ("save_every", "shares")]
    back = 0
    for result in results:
        changes, rows = _changes(result), result.log.rows
        for (first, old, _), (second, _, new) in zip(changes, changes[1:], strict=False):
            is_soon = rows[second].now_s - rows[first].now_s < SOON_S
            # Not of what it tries once: a controller that measures may well take a thing back.
            back += is_soon and all(getattr(old, name) == getattr(new, name) for name in names)
    if back < 2 * len(results):
        return ""
    return (
        f"oscillates: {back} times it took back within {SOON_S:g} s what it had done; use two thresholds, one to act "
        "and another, well away from it, to undo"
    )


def _replaces(results: Sequence[Result]) -> str:
    asked = sum(len(_asked_at(result, "replace")) for result in results)
    if asked < len(results):
        return ""
    wait_s = max(restart_s(result.episode.job) + NEW_MACHINE_S for result in results)
    return (
        f"replaces ranks {asked} times in {len(results)} runs: each costs up to {wait_s:.0f} s and a checkpoint; most "
        "slow ranks recover, or are helped by a smaller share of the work"
    )


def _never_saves(results: Sequence[Result]) -> str:
    hit = [result for result in results if result.log.num_evicted]
    warned = [result for result in hit if any(event.announced for event in result.episode.world.events)]
    never = sum(not _asked_at(result, "save") and not _asked_at(result, "save_every") for result in warned)
    lost = sum(result.log.lost_samples for result in hit)
    baseline = sum(result.baseline.lost_samples for result in hit)
    if not warned or never < len(warned) or lost < 0.6 * baseline:
        return ""
    return (
        f"never saves: {lost} samples were lost to evictions; notice_s announces every second one, and the more often "
        "a run stops the shorter the interval should be"
    )


def _saves_too_often(results: Sequence[Result]) -> str:
    share = fmean(result.log.num_saves * checkpoint_s(result.episode.job) / result.log.end_s for result in results)
    if share < 0.2:
        return ""
    return (
        f"saves too often: {100 * share:.0f} % of the time goes into checkpoints; Young's interval is "
        "sqrt(2 x seconds of a checkpoint x seconds between stops)"
    )


def _timid(results: Sequence[Result]) -> str:
    calm = [result for result in results if result.episode.world.kinds == ("quiet",)]
    slow = [result for result in calm if result.log.samples_per_s < 0.95 * result.baseline.samples_per_s]
    empty = [
        result
        for result in slow
        if median(row.peak_bytes for row in result.log.rows) < median(row.peak_bytes for row in result.baseline.rows)
        and any(not _needs_more(old, new) and _differs(old, new) for _, old, new in _changes(result))
    ]
    if not empty:
        return ""
    return (
        "gives speed away for memory that nobody needs: in the quiet runs it recomputes, or makes micro-batches smaller"
    )


def _differs(old: Settings, new: Settings) -> bool:
    return any(getattr(old, name) != getattr(new, name) for name in MEMORY)
