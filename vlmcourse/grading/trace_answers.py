"""What a learner's `diagnose` of exercise 4.5 may return, read as one form; the names that count, and their synonyms.

Enters: any value: tuple, list, dict or object of cause, evidence and fix, with a `Blank` where a helper of the
learner's is not solved yet. Leaves: an `Answer`, or what to change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from vlmcourse.grading.blanks import Blank, describe_need
from vlmcourse.grading.checks import as_number
from vlmcourse.grading.trace_faults import CAUSES, HEALTHY, SECONDS

CAUSE_MEANINGS: dict[str, str] = {
    HEALTHY: "no part costs 15 % of the time beyond what all runs have",
    "slow_decoder": "loaders decode too slowly, in every step",
    "slow_storage": "loaders wait for a disk, in every step",
    "queue_runs_empty": "loaders fall behind: the prefetch queue empties now and then",
    "slow_rank": "one rank computes longer on as much work",
    "imbalance": "one rank has more work",
    "slow_links": "ranks that are all ready wait for data on their way",
    "frequent_saves": "saving the state, every few steps",
    "frequent_evaluation": "evaluating on the GPUs, every few steps",
    "logging_every_step": "rank 0 writes metrics after every step",
    "tiny_micro_batches": "nothing is waited for, but kernels are too small for the GPU",
    "memory_thrash": "memory fills up, and the allocator gives it back and starts over",
}
"""Names of causes -> what they are."""
FIXES: dict[str, str] = {
    "nothing": "leave it as it is",
    "more_workers": "more loader processes (there are free cores; a disk gives no more to more readers)",
    "cache_decoded": "decode once, keep the pixels on the same disk (more bytes to read)",
    "deeper_queue": "let loaders prefetch more steps",
    "local_shards": "copy the data to a local disk, in few large files",
    "balance_by_tokens": "deal out samples so that all ranks have equal work",
    "replace_rank": "mend or leave out one rank's machine",
    "raise_timeout": "let ranks wait longer for each other",
    "overlap_communication": "overlap the all-reduce with backward, send fewer bytes",
    "save_less_often": "more steps from save to save",
    "save_asynchronously": "copy the state, write it while training goes on",
    "evaluate_less_often": "more steps between evaluations, or fewer samples",
    "log_less_often": "write metrics every 50 steps",
    "larger_micro_batches": "more samples at once, fewer at a time of accumulation",
    "larger_model": "give the GPU a larger model",
    "free_memory": "smaller micro-batches or recomputation, so that memory is no longer full",
}
"""Names of fixes -> what they are."""
RIGHT_FIXES: dict[str, tuple[str, ...]] = {
    HEALTHY: ("nothing",),
    "slow_decoder": ("more_workers", "cache_decoded"),
    "slow_storage": ("local_shards",),
    "queue_runs_empty": ("more_workers", "cache_decoded"),
    "slow_rank": ("replace_rank",),
    "imbalance": ("balance_by_tokens",),
    "slow_links": ("overlap_communication",),
    "frequent_saves": ("save_less_often", "save_asynchronously"),
    "frequent_evaluation": ("evaluate_less_often",),
    "logging_every_step": ("log_less_often",),
    "tiny_micro_batches": ("larger_micro_batches",),
    "memory_thrash": ("free_memory",),
}
"""By cause, the fixes that remove it; each is right."""
SYNONYMS = {
    "none": HEALTHY,
    "no_cause": HEALTHY,
    "ok": HEALTHY,
    "decoder": "slow_decoder",
    "decode": "slow_decoder",
    "decoding": "slow_decoder",
    "storage": "slow_storage",
    "slow_disk": "slow_storage",
    "queue": "queue_runs_empty",
    "empty_queue": "queue_runs_empty",
    "queue_that_runs_empty": "queue_runs_empty",
    "straggler": "slow_rank",
    "sleeping_rank": "slow_rank",
    "large_images": "imbalance",
    "load_imbalance": "imbalance",
    "communication": "slow_links",
    "checkpoint": "frequent_saves",
    "checkpoints": "frequent_saves",
    "saves": "frequent_saves",
    "saving": "frequent_saves",
    "evaluation": "frequent_evaluation",
    "evaluations": "frequent_evaluation",
    "frequent_evaluations": "frequent_evaluation",
    "logging": "logging_every_step",
    "callbacks": "logging_every_step",
    "small_kernels": "tiny_micro_batches",
    "small_micro_batches": "tiny_micro_batches",
    "memory": "memory_thrash",
    "out_of_memory": "memory_thrash",
}
"""Other names of causes."""
FIELDS = ("cause", "evidence", "fix")
EVIDENCE_FIELDS = ("quantity", "rank", "period")
NO_RANK = -1
"""Stands for a rank that is no whole number."""
NO_NUMBER = {"rank": float(NO_RANK), "period": math.nan}
"""Stand for those that a helper has not found; they are never right."""
ASKED = "return cause, evidence and fix: a tuple of three, a dict with these keys, or an object with these attributes"
ASKED_EVIDENCE = "evidence is a dict with quantity, rank and period, a tuple of these in this order, or an object"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was said of a trace."""

    cause: str
    quantity: str | None
    rank: int | None
    period: float | None
    fix: str
    problems: Mapping[str, str] = field(default_factory=dict)
    """By part (cause, evidence, fix): what to change where it cannot be read. The other parts count all the same."""
    blanks: Mapping[str, str] = field(default_factory=dict)
    """By part, or name of the evidence's own: the helper that it needs and that is not solved yet."""


def read_answer(value: Any) -> tuple[Answer | None, str]:
    """Read what `diagnose` returned.

    Returns:
        The answer and "", or None and what to change.
    """
    parts = _read_parts(value, FIELDS)
    if parts is None or len(parts) != len(FIELDS):
        return None, f"{ASKED}, not {value!r:.80}"
    cause, evidence, fix = (parts[name] for name in FIELDS)
    blanks = {name: part.helper for name, part in parts.items() if isinstance(part, Blank)}
    problems: dict[str, str] = {}
    read_cause = read_name(cause)
    if (read_cause := SYNONYMS.get(read_cause, read_cause)) not in CAUSES:
        problems["cause"] = f"no cause is named {cause!r:.40}: choose from {', '.join(CAUSES)}"
    read_fix = read_name(fix) or "nothing"
    if (read_fix := "nothing" if read_fix == "none" else read_fix) not in FIXES:
        problems["fix"] = f"no fix is named {fix!r:.40}: choose from {', '.join(FIXES)}"
    blanks |= _find_blanks(evidence)
    found = _read_evidence(evidence)
    if found is None:
        problems["evidence"] = f"{ASKED_EVIDENCE}, not {evidence!r:.80}"
    problems |= {name: describe_need(helper) for name, helper in blanks.items() if name in FIELDS}
    quantity, rank, period = found or (None, None, None)
    return Answer(
        cause=read_cause,
        quantity=quantity,
        rank=None if rank is None else int(rank) if rank == int(rank) else NO_RANK,
        period=period,
        fix=read_fix,
        problems=problems,
        blanks=blanks,
    ), ""


def _find_blanks(evidence: Any) -> dict[str, str]:
    """Return which of quantity, rank and period need a helper that is not solved yet; of all, where quantity does."""
    parts = _read_parts(evidence, EVIDENCE_FIELDS) or {}
    found = {name: part.helper for name, part in parts.items() if isinstance(part, Blank)}
    return {"evidence": found["quantity"]} if "quantity" in found else found


def read_name(value: Any) -> str:
    """Return a name in small letters with underscores, also of a member of an enum; "" for what is none."""
    if isinstance(value, Enum):
        value = value.value if isinstance(value.value, str) else value.name
    return value.strip().lower().replace("-", "_").replace(" ", "_") if isinstance(value, str) else ""


def _read_evidence(value: Any) -> tuple[str | None, float | None, float | None] | None:
    """Return quantity, rank and period; those left out are None."""
    if value is None or isinstance(value, (str, Enum)):
        value = (value,)
    parts = _read_parts(value, EVIDENCE_FIELDS)
    if parts is None:
        return None
    numbers: list[float | None] = []
    for name in EVIDENCE_FIELDS[1:]:
        number = NO_NUMBER[name] if isinstance(parts.get(name), Blank) else as_number(parts.get(name))
        if number is None and parts.get(name) is not None:
            return None
        numbers.append(number)
    quantity = read_name(parts.get("quantity"))
    quantity = f"{quantity}_s" if f"{quantity}_s" in SECONDS else quantity
    return quantity if quantity not in ("", "none", "nothing") else None, numbers[0], numbers[1]


def _read_parts(value: Any, names: tuple[str, ...]) -> dict[str, Any] | None:
    """Return named parts of a mapping, of an object, or of a sequence in this order, without those it lacks."""
    if isinstance(value, Mapping):
        known = {read_name(key): part for key, part in value.items()}
        return {name: known[name] for name in names if name in known} if known.keys() <= {*names, ""} else None
    if hasattr(value, names[0]):
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if not isinstance(value, (tuple, list)) or len(value) > len(names):
        return None
    return dict(zip(names, value, strict=False))
