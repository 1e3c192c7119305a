"""The profile of a run that has one, and what the step log says of the same steps.

Enters: the run's folder, and its step log. Leaves: `Profiled`; or nothing, with a note where a profile is there and
cannot be used. What recorded it may still be writing: a live run's is taken when it is whole. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vlmcourse.monitor.profile_summary import PROFILE_FOLDER, SUMMARY_JSON, TraceSummary, read_summary
from vlmcourse.monitor.step_log import RankLog, StepRecord
from vlmcourse.profile_schedule import ProfileConfig


@dataclass(frozen=True)
class Profiled:
    """Steps that a profiler recorded."""

    summary: TraceSummary
    steps: Mapping[int, Mapping[int, StepRecord]]
    """The step log's records of the recorded steps: by step, then by rank."""
    events: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """After which of the recorded steps an event came, by its kind."""


def read_profile(
    folder: Path, steps: Mapping[int, Mapping[int, StepRecord]], logs: Mapping[int, RankLog], notes: list[str]
) -> Profiled | None:
    """Return a run's profile, or None.

    Args:
        folder: of the run.
        steps: that all ranks have written under the present settings.
        logs: of all ranks.
        notes: gets a sentence where a profile cannot be used.
    """
    place = folder / PROFILE_FOLDER
    if not place.is_dir():
        return None
    path = place / SUMMARY_JSON
    if not path.is_file():
        notes.append(
            f"{place} has no {SUMMARY_JSON}, so no profile is looked at: the run is still recording it, or an older "
            f"version wrote it; vlmcourse.monitor.trace_summary.summarise_folder({str(place)!r}) writes it from "
            "the traces"
        )
        return None
    try:
        summary = read_summary(path)
    except (OSError, ValueError) as error:
        notes.append(f"the profile is not looked at: {error}")
        return None
    recorded = {step: steps[step] for step in summary.steps if step in steps}
    ranks = [of_rank.rank for of_rank in summary.ranks]
    if len(recorded) < len(summary.steps) or any(sorted(of_step) != ranks for of_step in recorded.values()):
        notes.append(
            f"the profile of {len(ranks)} rank(s) in steps {summary.steps[0]} to {summary.steps[-1]} is not "
            "looked at: the "
            "step log has not all of these steps with these ranks and the present settings, so it is another run's, or "
            "of the time before a resume"
        )
        return None
    events: dict[str, set[int]] = {}
    for log in logs.values():
        for event in log.events:
            if event.step in recorded:
                events.setdefault(event.event, set()).add(event.step)
    return Profiled(summary, recorded, {kind: frozenset(found) for kind, found in events.items()})


def find_disturbed(profiled: Profiled | None, profile: ProfileConfig | None, first_step: int) -> range:
    """Return the steps in which the profiler was on, or after which it wrote its trace.

    Args:
        profiled: what it recorded, if that is known.
        profile: settings of the run, if they are known.
        first_step: of the run; without a summary, what the settings say is counted from here.
    """
    warmup = profile.warmup if profile is not None else 1
    if profiled is not None:
        return range(profiled.summary.steps[0] - warmup, profiled.summary.steps[-1] + 1)
    if profile is None or not profile.active:
        return range(0)
    return range(first_step + profile.wait, first_step + profile.num_steps)
