"""What went wrong with an accumulation step on real ranks, in sentences for the learner.

Enters: the ranks' reports of one case. Leaves: sentences, each under a key by which the same mistake in another case is
recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vlmcourse.grading.pair_ranks import CaseReports
from vlmcourse.grading.step_truths import NOT_CLIPPED
from vlmcourse.notebook.rank_names import name_ranks

MAX_SHOWN = 3
"""Mistakes that the feedback names."""

AVERAGE = (
    "DDP averages gradients over the ranks, and your loss is a part of the sum over all of them: multiply it by the "
    "number of ranks"
)
MEANS = (
    "a mean of means: micro-batches with few supervised tokens weigh as much as those with many. Add up token losses "
    "(reduction='sum') and divide by the supervised tokens of the whole step, of all micro-batches and ranks"
)
GLOBAL_MEANS = (
    "each micro-batch is divided by its own supervised tokens, of all ranks: that is still a mean of means. Divide by "
    "the supervised tokens of all micro-batches of all ranks, known before the first backward"
)
SHIFTED = (
    "logits and labels are shifted against each other: a label already stands at the position that predicts it, so "
    "compare them as they are"
)
OWN_NORM = (
    "each rank clips its own gradient, before the exchange: clip once, after the last micro-batch, by the norm of the "
    "exchanged gradient"
)
COUNT_ALL = (
    "each rank divides by its own supervised tokens, which is a mean of the ranks' means: divide by the number of all "
    "ranks (an all-reduce of the count)"
)
KEPT = "gradients of the step before are still there: zero them once a step, before its first micro-batch"
GRADIENTS = {
    "over_ranks": f"the gradient is 1 / {{n}} of what it must be: {AVERAGE}",
    "times_ranks": "the gradient is {n} times too large: it was multiplied by the number of ranks once too often",
    "mean_of_means": MEANS,
    "sum_of_means": f"the means of the micro-batches are added up: {MEANS}",
    "rank_means": COUNT_ALL,
    "rank_means_times_ranks": COUNT_ALL,
    "rank_means_over_steps": "each rank divides by its own supervised tokens and by the number of micro-batches: "
    "divide once, by the supervised tokens of all ranks",
    "means_over_ranks": GLOBAL_MEANS,
    "means_over_ranks_summed": GLOBAL_MEANS,
    "over_steps": "the gradient is divided by the number of micro-batches too: the count of all tokens has them all",
    "over_steps_and_ranks": "the gradient is divided by the number of micro-batches too, and DDP's average over the "
    "ranks is left in: the count of all tokens has them all; multiply by the number of ranks",
    "all_positions": "you divide by all positions: prompts and padding (label -100) are not supervised",
    "all_positions_over_ranks": "you divide by all positions: prompts and padding (label -100) are not supervised; and "
    + AVERAGE,
    "positive_labels": "you count the labels above 0: 0 is a token too, and only -100 is not supervised",
    "last_count": "you divide by the supervised tokens of the last micro-batch: count those of all micro-batches",
    "not_divided": "the sums of token losses are not divided at all: divide by the supervised tokens of the whole step",
    "summed": "the sums of token losses are not divided at all: divide by the supervised tokens of the whole step",
    "over_samples": "you divide by the number of samples: the loss is a mean over supervised tokens",
    "shifted": SHIFTED,
    "shifted_and_counted": SHIFTED,
    "shifted_over_ranks": f"{SHIFTED}. And {AVERAGE}",
    "own_only": "the gradient holds this rank's own samples only: no_sync was still on in the last micro-batch, so "
    "nothing was exchanged",
    "own_only_over_tokens": "the gradient holds this rank's own samples only: no_sync was still on in the last "
    "micro-batch, so nothing was exchanged",
    "last_only": "only the last micro-batch is in the gradient: zero gradients before the loop, not in it",
    "factor_on_last": "only the last micro-batch's loss is multiplied by the number of ranks: DDP averages all that "
    "was added up, so every micro-batch needs the factor",
    "first_exchanged": "no_sync is the wrong way round: the first micro-batch was exchanged and the others were not. "
    "Leave the last one outside no_sync: its exchange takes along what was added up before",
    "right_not_clipped": "the gradient is right, but not clipped: scale it down to max_norm before the optimizer steps",
    "clipped_each_time": "gradients are clipped after every micro-batch: clip once, after the last, when all of the "
    "step is in them",
    "clipped_early": "gradients are clipped before the last micro-batch: clip once, after it, when all is in them",
    "clipped_before_the_exchange": OWN_NORM,
    "clipped_before_the_sum": OWN_NORM,
    "clipped_by_parameter": "each parameter is clipped by itself: clip once, by the norm of all gradients together",
    "clipped_by_value": "each number of the gradient is limited to max_norm (clip_grad_value_): scale all of them by "
    "one factor, so that the norm is max_norm (clip_grad_norm_)",
    "clipped_by_largest": "the gradient is clipped by its largest number: clip by its norm, the root of the sum of "
    "squares",
    "scaled_to_norm": "the gradient is always scaled to max_norm: clipping only shortens, a shorter one stays as it is",
    "kept_from_before": "gradients were left before your first step, and are still there: zero them before a step's "
    "first micro-batch, not only after its last",
    "kept": KEPT,
    "kept_over_ranks": KEPT,
    "scaled": "the gradient has the right direction and a wrong length: look at what you divide by, multiply "
    "with and clip to",
    "nan": "the gradient holds NaN: a micro-batch or a rank without any supervised token has a mean of 0 / 0; add up, "
    "and divide by the count of the whole step",
    "none": "the gradient is zero everywhere: did backward run, and zero_grad before it?",
    "no_step": "the optimizer did not step: call optimizer.step() once, at the end",
    "other": "the gradient is none of those that a known mistake gives: compare with one big batch in one process",
}
LOSSES = {
    "times_ranks": "the returned loss is {n} times too large: the factor for DDP belongs to backward only",
    "over_ranks": "the returned loss is 1 / {n} of what it must be: add up over the ranks, do not average",
    "mean_of_means": "the returned loss is a mean of means, not the mean over all supervised tokens",
    "own_mean_of_means": "the returned loss is a mean of this rank's means: add up the sums of all ranks first",
    "own": "the returned loss is that of this rank's samples: add up the sums of all ranks first",
    "own_part": "the returned loss is this rank's part of it: add it up over the ranks",
    "own_part_times_ranks": "the returned loss is this rank's part of it, times {n}: add the parts up over the ranks",
    "mean_of_own": "the returned loss is the mean of the ranks' means: divide the sum of all by the tokens of all",
    "last": "the returned loss is that of the last micro-batch: it must be that of the whole step",
    "last_parts": "the returned loss holds the last micro-batches only: add up all of them",
    "last_part": "the returned loss is the last micro-batch's part: add up all of them, over micro-batches and ranks",
    "last_part_times_ranks": "the returned loss is the last micro-batch's part: add up all of them, over all ranks",
    "summed": "the returned loss is not divided by the supervised tokens",
    "own_sum": "the returned loss is this rank's sum, not divided by the supervised tokens of all ranks",
    "over_steps": "the returned loss is divided by the number of micro-batches besides",
    "missing": "return the step's loss as a number",
    "nan": "the returned loss is NaN: a micro-batch without any supervised token has a mean of 0 / 0; add up instead",
    "other": "the returned loss is not the mean over the supervised tokens of all ranks and micro-batches",
}
EVERY_TIME = (
    "gradients are exchanged {times:.0f} times: only the last micro-batch may stand outside model.no_sync(); forward "
    "*and* backward of the others must stand inside"
)
FORWARD_OUTSIDE = (
    "gradients are exchanged {times:.0f} times: your backward stands inside model.no_sync(), its forward does not, and "
    "DDP decides in the forward. Forward *and* backward of all micro-batches but the last must stand inside"
)
TOO_MANY = (
    "activations of {kept} samples are kept at once, and the largest micro-batch has {largest}: that is the memory of "
    "a larger batch, not accumulation. Give each micro-batch a forward of its own, and run its backward before the next"
)
UNEQUAL = (
    "the returned loss differs between ranks: it is right on {right} and not on {wrong}; every rank must return it"
)
NOT_SEEN = (
    "the gradient is right, but the collectives of the step carry {times:.0%} of its numbers: exchange it by "
    "collectives of torch.distributed"
)
FACTS = ("nan", "no_step", "missing")
"""Words that are true whatever the mistake is."""
_WORDS = {
    "gradient": (*GRADIENTS, *(word + NOT_CLIPPED for word in GRADIENTS if word + NOT_CLIPPED not in GRADIENTS)),
    "loss": tuple(LOSSES),
}
"""Mistakes, the likelier one first."""
SKIPPED = (
    "{ranks} waited for the other in vain: every rank must run backward on each micro-batch, also on one without a "
    "supervised token, and call every collective"
)


def _steps(case: CaseReports) -> list[dict[str, Any]]:
    """Return what the ranks found, step by step, all ranks together."""
    return [step for _, report in sorted(case.by_rank.items()) for step in report.get("values", {}).get("steps", ())]


def is_right(case: CaseReports, name: str) -> bool:
    """Tell whether a quantity is right in every step on every rank; a gradient counts if the optimizer stepped once."""
    steps = _steps(case)
    if not case.is_done or len(steps) != case.case.num_steps * case.case.world_size:
        return False
    return all(step[name] == "right" and step["num_steps"] == 1 for step in steps)


def num_exchanges(case: CaseReports) -> list[float]:
    """Return how many times the gradient's size each step handed to all-reduces, on every rank."""
    return [step["exchanges"] for step in _steps(case)]


def is_accumulated(case: CaseReports) -> bool:
    """Tell whether no rank ever kept activations of more samples than its largest micro-batch has."""
    return all(step["kept_samples"] <= step["largest"] for step in _steps(case))


def find_common_mistake(cases: Sequence[CaseReports], name: str = "gradient") -> str:
    """Return the word for the mistake that gives what was found in all cases, also in those that are right; or "".

    A single case may fit several: where each rank has one micro-batch, a mean of micro-batches is one of ranks. Steps
    behind the first wrong one begin with spoilt weights and do not count, nor does a NaN, which fits everything.

    Args:
        cases: of one answer.
        name: "gradient", or "loss", which counts where the gradient is right.
    """
    common: set[str] | None = None
    is_wrong = False
    for step in (step for case in cases if case.is_done for step in _until_wrong(case, name)):
        if step[name] in FACTS or (step[name] == "none" and not step["fits"]):
            continue
        is_wrong |= step[name] != "right"
        fits = set(step["fits" if name == "gradient" else "loss_fits"])
        common = fits if common is None else common & fits
    return next((word for word in _WORDS[name] if word in (common or ())), "") if is_wrong else ""


def _until_wrong(case: CaseReports, name: str) -> list[dict[str, Any]]:
    """Return what the ranks found in a case's steps, up to the first step in which one of them is wrong."""
    found: list[dict[str, Any]] = []
    for of_ranks in zip(*(report["values"]["steps"] for _, report in sorted(case.by_rank.items())), strict=False):
        has_gradient = all(step["gradient"] == "right" for step in of_ranks)
        found += of_ranks if name == "gradient" or has_gradient else ()
        if not has_gradient:
            break
    return found


def explain_step_case(case: CaseReports, common: str = "", common_loss: str = "") -> dict[str, str]:
    """Return what is wrong with one case; nothing if all is right.

    Args:
        case: what the ranks found.
        common: the answer's `find_common_mistake`; only a mistake that gives all cases is named.
        common_loss: the same for the returned loss.
    """
    problem = _explain_end(case)
    if problem:
        return problem
    found: dict[str, str] = {}
    n, steps = case.case.world_size, _steps(case)
    if not is_accumulated(case):
        worst = max(steps, key=lambda step: step["kept_samples"] - step["largest"])
        found["kept"] = TOO_MANY.format(kept=worst["kept_samples"], largest=worst["largest"])
    counts = {step["num_steps"] for step in steps} - {0, 1}
    wrong = [step["gradient"] for step in _until_wrong(case, "gradient") if step["gradient"] != "right"]
    if counts:
        found["stepped"] = (
            f"the optimizer stepped {max(counts)} times: add up the micro-batches of a step first, then step once"
        )
    elif wrong:
        word = _choose_word(wrong, common)
        stepped = _ranks_by(case, lambda step: step["num_steps"] > 0)
        if word == "no_step" and all(stepped):
            found["stepped"] = "the optimizer stepped on {} and not on {}: every rank must step".format(*stepped)
        else:
            ending = "; and the gradient is not clipped" if word not in GRADIENTS else ""
            sentence = GRADIENTS[word.removesuffix(NOT_CLIPPED) if ending else word].format(n=n)
            found[f"gradient {word}"] = sentence + ending
    times = max(num_exchanges(case), default=0.0)
    if times >= 1.5:
        is_outside = any(step["forward_outside"] for step in steps)
        found["exchanges"] = (FORWARD_OUTSIDE if is_outside else EVERY_TIME).format(times=times)
    elif not counts and not wrong and times < 0.9:
        found["exchanges"] = NOT_SEEN.format(times=times)
    if not counts and not wrong:
        wrong = [step["loss"] for step in steps if step["loss"] != "right"]
        right_on, wrong_on = _ranks_by(case, lambda step: step["loss"] == "right")
        if right_on and wrong_on:
            found["loss unequal"] = UNEQUAL.format(right=right_on, wrong=wrong_on)
        elif wrong:
            word = _choose_word(wrong, common_loss)
            found[f"loss {word}"] = LOSSES[word].format(n=n)
    return found


def _ranks_by(case: CaseReports, is_so: Callable[[dict[str, Any]], bool]) -> tuple[str, str]:
    """Name the ranks on which something is so in the first step, and the others; "" for none."""
    first = {rank: is_so(report["values"]["steps"][0]) for rank, report in sorted(case.by_rank.items())}
    yes, no = ([rank for rank, so in first.items() if so is wanted] for wanted in (True, False))
    return (name_ranks(yes) if yes else ""), (name_ranks(no) if no else "")


def _choose_word(wrong: Sequence[str], common: str) -> str:
    """Return what to say of a quantity: what is plain to see, else the mistake behind all cases, else how it looks."""
    plain = next((word for word in wrong if word in FACTS), "")
    if plain or common:
        return plain or common
    return wrong[0] if len(set(wrong)) == 1 else "other"


def _explain_end(case: CaseReports) -> dict[str, str]:
    """Say why a case did not come to its end, where it did not."""
    statuses = case.statuses()
    if case.is_done:
        return {}
    errors = {rank: case.by_rank[rank]["error"] for rank, status in statuses.items() if status == "error"}
    if errors:
        rank, text = next(iter(errors.items()))
        return {"error": f"rank {rank} failed with {text}"}
    if "unsolved" in statuses.values():
        return {"unsolved": "accumulation_step is not solved yet"}
    hung = [rank for rank, status in statuses.items() if status in ("hung", "lost")]
    if hung:
        return {"hung": SKIPPED.format(ranks=name_ranks(hung))}
    endless = [rank for rank, status in statuses.items() if status == "endless"]
    if endless:
        return {"endless": f"{name_ranks(endless)} computed without end{case.by_rank[endless[0]].get('where', '')}"}
    return {"gone": f"{name_ranks([rank for rank, status in statuses.items() if status == 'gone'])} ended early"}
