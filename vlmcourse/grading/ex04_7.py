"""Exercise 4.7, graded: a controller that keeps a training run fast and alive on a simulated cluster.

Enters: a learner's class with a method `observe(metrics)`, or such a function. Leaves: points (always a number from 0
to the cell's maximum) and printed feedback that names the misconception. The runs of the hidden tests come from the
same generator under another seed. A baseline that never acts is worth 0, an oracle that knows what comes 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from vlmcourse.control.episodes import Episode, Result, find_bounds, make_episodes, run_episode, score_speed
from vlmcourse.control.simulation import RunLog, first_settings
from vlmcourse.grading.checks import Outcome, award, explain_signature, show_first
from vlmcourse.grading.control_feedback import explain_controller
from vlmcourse.grading.plain import call_plainly
from vlmcourse.grading.traces import show_printed

ANSWERED_BY = ("vlmcourse.control.controller", "vlmcourse.control.oracle")
"""Modules that hold the answer."""
FULL_SPEED = 0.35
"""Score of speed that earns all points; a plain controller of some 50 lines has about 0.5."""
CALM_LOSS = 0.05
"""Share of the baseline's speed in quiet runs whose loss costs all points; a fifth of it costs none."""
LIMIT_S = 30.0
"""For one run, some 500 calls of `observe` and the simulation itself."""
ADVICE = "observe is called after each of some hundred steps; keep a window of steps, not all"

__all__ = ["check_calm", "check_safety", "check_speed", "play_run"]


def play_run(answer: Any, number: int = 0, seed: int = 1) -> Result:
    """Run a controller on one of the runs that the visible checks use; for trying things out and for a picture.

    Args:
        answer: a class with a method `observe(metrics)`, made anew for the run, or a function.
        number: of the run; by it the kinds of trouble change.
        seed: of the checks.

    Raises:
        ValueError: if the number is not one of a run.
    """
    if not isinstance(number, int) or number < 0:
        raise ValueError(f"number = {number!r}: must be a whole number of 0 or more")
    return run_episode(make_episodes(seed, number + 1)[number], lambda: _observe_of(answer))


def check_speed(answer: Any, points: float, seed: int, num_runs: int = 6) -> float:
    """Grade useful samples a second of wall time, 0 for the baseline's, all points from `FULL_SPEED` on.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    results = _ask(answer, seed, num_runs)
    if not results:
        return 0.0
    score = score_speed(results)
    print(f"speed {score:.2f}: 0 is doing nothing, 1 knows all that comes; all points from {FULL_SPEED} on")
    worst = min(results, key=lambda result: result.log.samples_per_s / result.oracle.samples_per_s)
    if score < FULL_SPEED:
        print(f"furthest behind: {_compare(worst)}")
        _show_ideas(results)
    return award(points, score / FULL_SPEED, 1)


def check_safety(answer: Any, points: float, seed: int, num_runs: int = 6) -> float:
    """Grade steps out of memory (two thirds) and samples lost to announced evictions (one third).

    All points for memory where at most one step in twenty of the baseline's ran out; a run in which the baseline does
    not run out and the controller does costs as much as five. All points for lost work up to a quarter of what is lost
    on average by saving as often as the run does in the beginning. What an eviction without notice costs is luck, and
    part of the speed.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    results = _ask(answer, seed, num_runs)
    if not results or not any(result.log.asked for result in results):
        _show_ideas(results)
        return 0.0
    own = sum(result.log.num_oom if result.baseline.num_oom else 5 * result.log.num_oom for result in results)
    theirs = sum(result.baseline.num_oom for result in results)
    memory = _share_avoided(own, theirs, tolerated=0.05)
    lost = sum(result.log.lost_announced for result in results)
    usual = sum(_usual_loss(result.episode) for result in results)
    saved = _share_avoided(lost, usual, tolerated=0.25)
    print(
        f"out of memory: {sum(result.log.num_oom for result in results)} steps, doing nothing {theirs}; lost to "
        f"announced evictions: {lost} samples, without a thought of them about {usual:.0f}"
    )
    if memory + saved < 2:
        _show_ideas(results)
    return award(points, 2 * memory + saved, 3)


def check_calm(answer: Any, points: float, seed: int, num_runs: int = 6) -> float:
    """Grade that quiet runs are left in peace, and that no action is refused; only a controller that acts has points.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    results = _ask(answer, seed, num_runs)
    if not results or score_speed(results) < FULL_SPEED / 4:
        if results:
            print("points for calm are only for a controller that is faster than doing nothing where there is trouble")
        return 0.0
    calm = [result for result in results if result.episode.world.kinds == ("quiet",)]
    kept = min(result.log.samples_per_s / result.baseline.samples_per_s for result in calm)
    worth = min(1.0, max(0.0, (kept - (1 - CALM_LOSS)) / (0.8 * CALM_LOSS)))
    refused = [sentence for result in results for sentence in result.log.refused]
    if worth < 1:
        print(f"in a quiet run it has {100 * kept:.1f} % of the speed of doing nothing")
        _show_ideas(results)
    if refused:
        show_first([f"refused {len(refused)} actions: {refused[0]}"])
    return award(points, worth * (0.5 if refused else 1.0), 1)


# --- Asking ---------------------------------------------------------------------------------------------------------


def _observe_of(answer: Any) -> Callable[[dict[str, Any]], Any]:
    """Return what is called after each step of one run."""
    made = answer() if isinstance(answer, type) else answer
    return getattr(made, "observe", made)


def _ask(answer: Any, seed: int, num_runs: int) -> list[Result]:
    """Run a controller on all runs; nothing, with a line printed, where it cannot be run."""
    if not callable(answer) and not hasattr(answer, "observe"):
        print(f"this is neither a class with a method observe nor a function, but {type(answer).__name__}")
        return []
    method = getattr(answer, "observe", None) if isinstance(answer, type) else answer
    names = ("self", "metrics") if isinstance(answer, type) else ("metrics",)
    if method is None:
        print(f"{answer.__name__} has no method observe(self, metrics)")
        return []
    if wrong := explain_signature(method, *names):
        print(wrong)
        return []
    results, wrong = _run_all(answer, seed, num_runs)
    if wrong:
        print(wrong)
    return list(results)


@lru_cache(maxsize=2)
def _run_all(answer: Any, seed: int, num_runs: int) -> tuple[tuple[Result, ...], str]:
    """Run a controller once for all checks that ask about it; or say why it cannot be run."""
    found: list[Result] = []
    for episode in make_episodes(seed, num_runs):
        outcome = _run(answer, episode)
        show_printed([(outcome.printed, bool(outcome.error))] if outcome.error or not found else [])
        if outcome.error:
            where = "observe is" if outcome.unsolved else f"{episode}:"
            return (), f"{where} {outcome.error}"
        found.append(Result(episode, outcome.value, *find_bounds(episode)))
    return tuple(found), ""


def _run(answer: Any, episode: Episode) -> Outcome:
    def play() -> RunLog:
        return episode.simulation().run(_observe_of(answer))

    return call_plainly(play, module=ANSWERED_BY, limit_s=LIMIT_S, advice=ADVICE)


# --- Telling --------------------------------------------------------------------------------------------------------


def _share_avoided(own: float, theirs: float, tolerated: float) -> float:
    """Return 1 if at most a tolerated share of what the baseline suffers is left, and 0 if all of it is."""
    left = own / theirs if theirs else float(own > 0)
    return min(1.0, max(0.0, (1 - left) / (1 - tolerated)))


def _usual_loss(episode: Episode) -> float:
    """Return the samples that announced evictions cost on average if the first settings save: half an interval each."""
    num_announced = sum(event.announced for event in episode.world.events)
    return num_announced * first_settings(episode.job).save_every / 2 * episode.job.global_batch_size


def _compare(result: Result) -> str:
    speeds = [log.samples_per_s for log in (result.log, result.baseline, result.oracle)]
    return f"{result.episode}: {speeds[0]:.1f} useful samples/s, doing nothing {speeds[1]:.1f}, oracle {speeds[2]:.1f}"


def _show_ideas(results: Sequence[Result]) -> None:
    """Print what the controller looks like."""
    for sentence in explain_controller(results)[:3] if results else []:
        print(f"It looks as if your controller {sentence}.")
