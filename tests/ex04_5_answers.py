"""Whole answers to exercise 4.5: right ones in four styles, and wrong ones with the words that they should be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median
from typing import Any

import numpy as np

SECONDS = ("data_wait_s", "forward_s", "backward_s", "optimizer_s", "other_s", "communication_s", "between_s")
FIX = {
    "healthy": "nothing",
    "slow_decoder": "cache_decoded",
    "slow_storage": "local_shards",
    "queue_runs_empty": "more_workers",
    "slow_rank": "replace_rank",
    "imbalance": "balance_by_tokens",
    "slow_links": "overlap_communication",
    "frequent_saves": "save_asynchronously",
    "frequent_evaluation": "evaluate_less_often",
    "logging_every_step": "log_less_often",
    "tiny_micro_batches": "larger_micro_batches",
    "memory_thrash": "free_memory",
}


def share(trace, key):
    """Part of the time that each rank spends on one key, without warm-up."""
    return [sum(r[key][2:]) / sum(sum(r[k][2:]) for k in SECONDS) for r in trace["ranks"]]


def find_period(seconds):
    usual = median(seconds)
    spikes = [i for i, s in enumerate(seconds) if s > 4 * usual]
    gaps = [b - a for a, b in zip(spikes, spikes[1:], strict=False)]
    return median(gaps) if len(gaps) >= 2 else None


# --- Right ----------------------------------------------------------------------------------------------------------


def find_evidence(trace):
    lost = {key: share(trace, key) for key in SECONDS}
    spread = {key: max(lost[key]) - min(lost[key]) for key in SECONDS}
    work = max(("forward_s", "backward_s"), key=lambda key: spread[key])
    memory, one = trace["ranks"][0]["memory_gb"][2:], trace["ranks"][0]
    if max(lost["data_wait_s"]) > 0.15:
        key = "data_wait_s"
    elif max(lost["between_s"]) > 0.15:
        key = "between_s"
    elif spread[work] > 0.1:
        key = work
    elif min(lost["communication_s"]) > 0.15:
        key = "communication_s"
    elif max(memory) - min(memory) > 0.1 * trace["memory_limit_gb"]:
        return "memory_gb", None, find_period(one["forward_s"][2:])
    else:
        return "gpu_percent" if median(one["gpu_percent"]) < 60 else None, None, None
    rank = lost[key].index(max(lost[key])) if spread[key] > 0.1 else None
    return key, rank, find_period(trace["ranks"][rank or 0][key][2:])


def find_cause(trace, key, rank, period):
    ranks = trace["ranks"]
    one = ranks[rank or 0]
    if key == "data_wait_s":
        busy = fmean(one["loader_cpu_percent"]) > 60
        return "queue_runs_empty" if period else "slow_decoder" if busy else "slow_storage"
    if key == "between_s":
        saves = any(one["disk_write_mb"])
        return "logging_every_step" if not period else "frequent_saves" if saves else "frequent_evaluation"
    if key in ("forward_s", "backward_s"):
        tokens = [median(r["tokens"]) for r in ranks]
        return "imbalance" if tokens[rank] > 1.08 * min(tokens) else "slow_rank"
    named = {
        None: "healthy",
        "communication_s": "slow_links",
        "memory_gb": "memory_thrash",
        "gpu_percent": "tiny_micro_batches",
    }
    return named[key]


def plain(trace):
    evidence = find_evidence(trace)
    cause = find_cause(trace, *evidence)
    return cause, evidence, FIX[cause]


def in_dicts(trace):
    """With synonyms, keys of a dict in another order, and other words for nothing."""
    cause, (key, rank, period), fix = plain(trace)
    other = {
        "slow_rank": "straggler",
        "frequent_saves": "Checkpoints",
        "slow_links": "communication",
        "healthy": None,
        "tiny_micro_batches": "small kernels",
        "logging_every_step": "logging",
    }
    evidence = {"period": period, "quantity": key and key.removesuffix("_s"), "rank": rank}
    named = other.get(cause, cause) or "none"
    return {"fix": None if fix == "nothing" else fix, "cause": named, "evidence": evidence if key else None}


class Cause(Enum):
    HEALTHY = 0
    SLOW_DECODER = 1
    SLOW_STORAGE = 2
    QUEUE_RUNS_EMPTY = 3
    SLOW_RANK = 4
    IMBALANCE = 5
    SLOW_LINKS = 6
    FREQUENT_SAVES = 7
    FREQUENT_EVALUATION = 8
    LOGGING_EVERY_STEP = 9
    TINY_MICRO_BATCHES = 10
    MEMORY_THRASH = 11


@dataclass
class Evidence:
    quantity: str | None
    rank: Any = None
    period: Any = None


@dataclass
class Diagnosis:
    cause: Cause
    evidence: Evidence
    fix: str


def in_numpy(trace):
    """With arrays and an object, other rules in another order: memory first, waits last."""
    ranks = trace["ranks"]
    table = {key: np.array([r[key][2:] for r in ranks], dtype=float) for key in ranks[0]}
    total = np.sum([table[key] for key in SECONDS], axis=0)
    late = int((total - table["communication_s"]).sum(axis=1).argmax())

    def spikes(values):
        where = np.flatnonzero(values > np.median(values) + 0.25 * (values.max() - np.median(values)))
        gaps = np.diff(where)
        steady = values.max() < 3 * np.median(values) or len(gaps) < 2
        return None if steady else np.median(gaps)

    def mean(key, rank=None):
        return float((table[key] / total.mean()).mean(axis=1)[late if rank is None else rank])

    compute = table["forward_s"] + table["backward_s"]
    least = min(range(len(ranks)), key=lambda r: table["communication_s"][r].sum())
    fall = np.diff(table["memory_gb"][0]).min() / trace["memory_limit_gb"]
    work = compute.mean(axis=1)
    if fall < -0.1:
        return Diagnosis(Cause.MEMORY_THRASH, Evidence("forward_s", None, spikes(table["forward_s"][0])), "free_memory")
    if mean("communication_s", least) > 0.18:
        return Diagnosis(Cause.SLOW_LINKS, Evidence("communication_s"), "overlap-communication")
    if work.max() > 1.25 * work.min():
        tiles = np.median(table["tiles"], axis=1)
        key = max(("forward_s", "backward_s"), key=lambda key: np.ptp(table[key].mean(axis=1)))
        rank = np.int64(work.argmax())
        if tiles[rank] > 1.3 * tiles.min():
            return Diagnosis(Cause.IMBALANCE, Evidence("tiles", rank), "balance_by_tokens")
        return Diagnosis(Cause.SLOW_RANK, Evidence(key, rank), "replace_rank")
    if mean("between_s") > 0.18:
        period = spikes(table["between_s"][late])
        if period is None:
            return Diagnosis(Cause.LOGGING_EVERY_STEP, Evidence("between_s", 0), "log_less_often")
        pause = table["between_s"][late] > table["between_s"][late].mean()
        if table["gpu_percent"][late][pause].mean() < 55:
            return Diagnosis(Cause.FREQUENT_SAVES, Evidence("disk_write_mb", None, period), "save_less_often")
        return Diagnosis(Cause.FREQUENT_EVALUATION, Evidence("between_s", None, period), "Evaluate less often")
    if mean("data_wait_s") > 0.18:
        waits = table["data_wait_s"]
        rank = late if np.ptp(waits.mean(axis=1)) > 0.1 * total.mean() else None
        period = spikes(waits[late])
        busy = table["loader_cpu_percent"][late].mean() > 50
        if period is not None:
            return Diagnosis(Cause.QUEUE_RUNS_EMPTY, Evidence("data_wait_s", rank, period), "cache_decoded")
        cause, fix = (Cause.SLOW_DECODER, "more_workers") if busy else (Cause.SLOW_STORAGE, "local_shards")
        return Diagnosis(cause, Evidence("data_wait_s", rank), fix)
    if np.median(table["gpu_percent"]) < 55:
        return Diagnosis(Cause.TINY_MICRO_BATCHES, Evidence("micro_batches"), "larger_micro_batches")
    return Diagnosis(Cause.HEALTHY, Evidence(None), "nothing")


def in_lists(trace):
    """Lists, and the evidence without what is None at its end."""
    cause, evidence, fix = plain(trace)
    kept = list(evidence)
    while kept and kept[-1] is None:
        kept.pop()
    return [cause.upper(), kept, fix]


RIGHT: tuple[Callable[[Any], Any], ...] = (plain, in_dicts, in_numpy, in_lists)

# --- Wrong ----------------------------------------------------------------------------------------------------------


def _instead(change: Callable[[Any, str, tuple[Any, Any, Any], str], Any]) -> Callable[[Any], Any]:
    return lambda trace: change(trace, *plain(trace))


def blames_small_work(trace, cause, evidence, fix):
    low = min(min(r["gpu_percent"][2:]) for r in trace["ranks"]) < 60
    return ("tiny_micro_batches", ("gpu_percent", None, None), "larger_model") if low else (cause, evidence, fix)


def blames_links(trace, cause, evidence, fix):
    if max(share(trace, "communication_s")) > 0.2:
        return "slow_links", ("communication_s", None, None), "overlap_communication"
    return cause, evidence, fix


def takes_the_mean(trace, cause, evidence, fix):
    key, rank, _ = evidence
    hidden = {
        "queue_runs_empty": "slow_decoder",
        "frequent_saves": "logging_every_step",
        "frequent_evaluation": "logging_every_step",
    }
    return hidden.get(cause, cause), (key, rank, None), fix


def sees_a_stall_in_pauses(trace, cause, evidence, fix):
    if cause in ("frequent_saves", "frequent_evaluation"):
        return "queue_runs_empty", ("data_wait_s", None, evidence[2]), "more_workers"
    return cause, evidence, fix


def blames_memory(trace, cause, evidence, fix):
    full = max(trace["ranks"][0]["memory_gb"]) > 0.7 * trace["memory_limit_gb"]
    return ("memory_thrash", ("memory_gb", None, None), "free_memory") if full else (cause, evidence, fix)


def names_the_waiting_rank(trace, cause, evidence, fix):
    key, rank, period = evidence
    waits = share(trace, "communication_s")
    return cause, (key, waits.index(max(waits)) if rank is not None else None, period), fix


def overlooks_tokens(trace, cause, evidence, fix):
    return ("slow_rank", evidence, "replace_rank") if cause == "imbalance" else (cause, evidence, fix)


def never_healthy(trace, cause, evidence, fix):
    return ("slow_links", ("communication_s", None, None), fix) if cause == "healthy" else (cause, evidence, fix)


def mixes_saves_and_evaluations(trace, cause, evidence, fix):
    pauses = ("frequent_saves", "frequent_evaluation")
    return (pauses[0] if cause == pauses[1] else pauses[1] if cause == pauses[0] else cause), evidence, fix


def mends_symptoms(trace, cause, evidence, fix):
    symptoms = {
        "queue_runs_empty": "deeper_queue",
        "slow_storage": "more_workers",
        "slow_rank": "balance_by_tokens",
        "imbalance": "raise_timeout",
        "tiny_micro_batches": "larger_model",
        "logging_every_step": "overlap_communication",
    }
    return cause, evidence, symptoms.get(cause, fix)


def names_symptoms(trace, cause, evidence, fix):
    _, rank, period = evidence
    if rank is not None:
        return cause, ("communication_s", rank, period), fix
    return cause, ("gpu_percent" if cause != "healthy" else None, rank, period), fix


WRONG: dict[str, tuple[Callable[[Any], Any], dict[str, str]]] = {
    "low use is small work": (
        _instead(blames_small_work),
        {"cause": "low GPU use was taken for work that is too small", "fix": "larger_model treats the symptom"},
    ),
    "others' waits are links": (
        _instead(blames_links),
        {
            "cause": "communication was blamed for one late rank",
            "evidence": "communication_s is how long a rank waits for others",
            "fix": "nothing is on its way while ranks wait for one that is late",
        },
    ),
    "means only": (
        _instead(takes_the_mean),
        {"cause": "the mean hid the period", "evidence": "no period was named"},
    ),
    "pauses are data stalls": (
        _instead(sees_a_stall_in_pauses),
        {"cause": "pauses for saves or evaluations were taken for a data stall"},
    ),
    "full memory is at fault": (
        _instead(blames_memory),
        {"cause": "memory was blamed although it is steady"},
    ),
    "who waits is slow": (
        _instead(names_the_waiting_rank),
        {"evidence": "a waiting rank was taken for the slow one"},
    ),
    "tokens overlooked": (
        _instead(overlooks_tokens),
        {
            "cause": "a slow rank and one with more work were mixed up",
            "fix": "any machine takes longer for more tokens",
        },
    ),
    "never healthy": (_instead(never_healthy), {"cause": "a healthy run was called ill"}),
    "saves are evaluations": (
        _instead(mixes_saves_and_evaluations),
        {"cause": "saves and evaluations were mixed up"},
    ),
    "symptoms mended": (_instead(mends_symptoms), {"fix": "deeper_queue treats the symptom"}),
    "symptoms named": (_instead(names_symptoms), {"evidence": "the quantity named is a symptom"}),
}
