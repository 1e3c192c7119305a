"""Exercise 4.5's misconceptions: what an answer to a trace takes for what.

Enters: traces with the answers to them. Leaves: sentences, those that explain most first; a mistake is named where it
shows in two traces or more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from vlmcourse.grading.trace_answers import RIGHT_FIXES, Answer
from vlmcourse.grading.trace_cases import TraceCase
from vlmcourse.grading.trace_faults import HEALTHY
from vlmcourse.grading.trace_sources import WARMUP_STEPS

Answers = Sequence[tuple[TraceCase, Answer]]
FEWEST = 2
LOADING = ("slow_decoder", "slow_storage", "queue_runs_empty")
PAUSES = ("frequent_saves", "frequent_evaluation")
STRAGGLERS = ("slow_rank", "imbalance")

# --- The cause ------------------------------------------------------------------------------------------------------


def _takes(rights: Sequence[str], *answered: str) -> Callable[[TraceCase, Answer], bool]:
    return lambda case, answer: case.cause in rights and answer.cause in answered and case.cause != answer.cause


def _blames_links(case: TraceCase, answer: Answer) -> bool:
    return answer.cause == "slow_links" and case.rank is not None


CAUSE_MISTAKES: tuple[tuple[Callable[[TraceCase, Answer], bool], str], ...] = (
    (
        lambda case, answer: answer.cause == "tiny_micro_batches",
        "low GPU use was taken for work that is too small: a GPU that waits is little used too; look for waits first, "
        "and only what is left of the use, while nothing is waited for, speaks of its work",
    ),
    (
        _blames_links,
        "communication was blamed for one late rank: the others' communication_s is their wait for it; even the rank "
        "that waits least waits long only if the links are slow",
    ),
    (
        lambda case, answer: answer.cause == "memory_thrash",
        "memory was blamed although it is steady: memory that is nearly full costs nothing; it costs time where it "
        "fills, falls at once, and the step of the fall is long",
    ),
    (
        _takes(("queue_runs_empty",), "slow_decoder", "slow_storage"),
        "the mean hid the period: the wait for data is short in most steps and long in a few that come regularly",
    ),
    (
        _takes(PAUSES, "logging_every_step"),
        "the mean hid the period: the time between steps is short after most steps and long after every n-th",
    ),
    (
        _takes(PAUSES, *LOADING),
        "pauses for saves or evaluations were taken for a data stall: data_wait_s stays short there, the time goes "
        "between steps, in between_s",
    ),
    (
        _takes(("queue_runs_empty",), *PAUSES),
        "a queue that runs empty was taken for saves or evaluations: nothing happens between the steps, the spikes "
        "are in data_wait_s",
    ),
    (
        _takes(PAUSES, *PAUSES),
        "saves and evaluations were mixed up: a save writes to disk while the GPU idles, an evaluation keeps the GPU "
        "busy and writes nothing",
    ),
    (
        _takes(STRAGGLERS, *STRAGGLERS),
        "a slow rank and one with more work were mixed up: compare tokens and tiles of the ranks, then their seconds",
    ),
    (
        _takes(("slow_decoder", "slow_storage"), "slow_decoder", "slow_storage"),
        "decoding and storage were mixed up: loaders that decode use their cores, loaders that wait for a disk do not",
    ),
    (
        _takes(("slow_decoder", "slow_storage"), "queue_runs_empty"),
        "a steady wait for data was taken for a queue that runs empty now and then: look at the wait of each step",
    ),
    (
        _takes(("logging_every_step",), *PAUSES),
        "work after every step was taken for a periodic pause: look at between_s of each step",
    ),
    (
        _takes((*LOADING, "logging_every_step"), *STRAGGLERS),
        "a rank that waits for data, or works between steps, was taken for one that computes slowly: add forward_s and "
        "backward_s of each rank and compare",
    ),
    (
        lambda case, answer: case.cause == HEALTHY and answer.cause != HEALTHY,
        "a healthy run was called ill: a save every twenty steps, a first long step and some percent of waiting are "
        "what all runs have",
    ),
    (
        lambda case, answer: case.cause != HEALTHY and answer.cause == HEALTHY,
        "a run was called healthy although a cause takes a fifth of its time or more",
    ),
)
"""What an answer has to be for a sentence to hold; of each wrong answer the first that fits is counted."""


def explain_causes(answers: Answers) -> list[str]:
    """Return what the wrong causes have been taken for."""
    return _most(
        next((said for fits, said in CAUSE_MISTAKES if fits(case, answer)), "")
        for case, answer in answers
        if answer.cause != case.cause
    )


# --- The evidence ---------------------------------------------------------------------------------------------------


def explain_evidence(answers: Answers) -> list[str]:
    """Return what is wrong with quantities, ranks and periods, where the same is wrong with several."""
    return _most(said for case, answer in answers for said in _evidence_mistakes(case, answer))


def _evidence_mistakes(case: TraceCase, answer: Answer) -> list[str]:
    found: list[str] = []
    if answer.quantity == "communication_s" and case.cause != "slow_links":
        found.append(
            "the quantity named is a symptom: communication_s is how long a rank waits for others; name the key in "
            "which the late rank spends the time"
        )
    elif answer.quantity == "gpu_percent" and case.cause != "tiny_micro_batches":
        found.append("the quantity named is a symptom: gpu_percent falls with any wait; name the key of the wait")
    if "rank" in answer.blanks:
        pass
    elif case.rank is not None and answer.rank is not None and answer.rank != case.rank and _waits(case, answer.rank):
        found.append(
            "a waiting rank was taken for the slow one: the rank with the most communication_s is not late, it waits"
        )
    elif case.rank is None and answer.rank is not None:
        found.append("a rank was named though all do alike: then rank is None")
    elif case.rank is not None and answer.rank is None:
        found.append("no rank was named though one alone causes it: compare the ranks in that quantity")
    if "period" in answer.blanks:
        pass
    elif case.period is None and answer.period is not None:
        found.append("a period was named of what happens in every step: then period is None")
    elif case.period is not None and answer.period is None:
        found.append("no period was named of what comes every few steps: the mean hides it, look at each step")
    elif case.period is not None and answer.period is not None and not is_period(case.period, answer.period):
        found.append(
            "the period is off: it is the number of steps from one spike to the next, not of spikes or seconds"
        )
    return found


def _waits(case: TraceCase, rank: int) -> bool:
    """Whether a rank waits more for others than the rank that is the cause."""
    ranks = case.trace["ranks"]
    if case.rank is None or not 0 <= rank < len(ranks):
        return False
    waits = [fmean(each["communication_s"][WARMUP_STEPS:]) for each in ranks]
    return waits[rank] > 2 * waits[case.rank]


def is_period(right: int | None, got: float | None) -> bool:
    """Tell whether a number of steps is the period up to one step; None is where there is none."""
    if right is None or got is None:
        return right is None and got is None
    return abs(got - right) <= 1.0


# --- The fix --------------------------------------------------------------------------------------------------------

SYMPTOM_FIXES: dict[str, tuple[tuple[str, ...], str]] = {
    "deeper_queue": (
        LOADING,
        "deeper_queue treats the symptom: a longer queue takes longer to run empty and longer to fill; loaders that "
        "make fewer samples than steps take stay behind",
    ),
    "raise_timeout": (
        (*STRAGGLERS, *LOADING, "slow_links", "logging_every_step"),
        "raise_timeout treats the symptom: it lets the others wait, and the late rank is as late as before",
    ),
    "larger_model": (
        (),
        "larger_model treats the symptom: GPU use rises, and tokens a second do not",
    ),
    "overlap_communication": (
        (*STRAGGLERS, *LOADING, "logging_every_step"),
        "overlap_communication treats the symptom: nothing is on its way while ranks wait for one that is late",
    ),
    "balance_by_tokens": (
        ("slow_rank",),
        "balance_by_tokens treats the symptom: the work is equal already, the machine is not",
    ),
    "more_workers": (
        ("slow_storage",),
        "more_workers treats the symptom: the loaders' cores idle, and more of them wait for the same disk",
    ),
    "replace_rank": (
        ("imbalance",),
        "replace_rank treats the symptom: any machine takes longer for more tokens",
    ),
    "larger_micro_batches": (
        (*LOADING, "slow_rank", "imbalance", *PAUSES),
        "larger_micro_batches treats the symptom: the GPU waits, it is not short of work while it computes",
    ),
}
"""By fix: of which causes it treats a symptom (all where it is empty), and what to say."""


def explain_fixes(answers: Answers) -> list[str]:
    """Return which fixes treat a symptom; one trace is enough, as a fix either removes a cause or does not."""
    found: list[str] = []
    for case, answer in answers:
        causes, said = SYMPTOM_FIXES.get(answer.fix, ((), ""))
        if answer.fix in RIGHT_FIXES[case.cause]:
            continue
        if case.cause == HEALTHY:
            found.append("a healthy run was given a fix: there the fix is 'nothing'")
        elif answer.fix == "nothing":
            found.append(
                "a run that loses a fifth of its time or more was left as it is: 'nothing' is for healthy runs"
            )
        elif said and (not causes or case.cause in causes):
            found.append(said)
    return _most(found, fewest=1)


def _most(said: Iterable[str], fewest: int = FEWEST) -> list[str]:
    counted = Counter(sentence for sentence in said if sentence)
    return [sentence for sentence, count in counted.most_common() if count >= fewest]
