"""Why a plan is the best, and what the others broke, in words and in plain data.

Enters: a `Search`. Leaves: sentences for a terminal, a log and a notebook; a dictionary for programs. Imports no torch.
Chapter 7.

Times are those of the rank that waits least, whose parts add up to the step; a difference of two plans is therefore
explained whole by the differences of their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from vlmcourse.planner.choice import Choice
from vlmcourse.planner.choice_cost import Cost, split_seconds
from vlmcourse.planner.memory import GB
from vlmcourse.planner.search import Miss, Search

SMALL_FRACTION = 0.005
"""Of a step: parts below it are not worth a word."""
EQUAL_FRACTION = 1e-3
"""Times nearer to each other than this are called equal: no model of time is that exact."""
ALIKE_FRACTION = 0.01
"""Plans of one kind nearer to each other than this are shown once."""
RULE_WORDS = {
    "sharding": "ZeRO that splits nothing, or shards without ZeRO",
    "heads": "tp does not divide the query heads",
    "kv_heads": "tp does not divide the key/value heads",
    "hidden": "tp does not divide the language width",
    "mlp": "tp does not divide the language MLP",
    "layers": "more pipeline ranks than blocks",
    "vision_tp": "vision_tp is neither 1 nor tp",
    "vision_heads": "vision_tp does not divide the vision heads",
    "vision_hidden": "vision_tp does not divide the vision width",
    "vision_mlp": "vision_tp does not divide the vision MLP",
    "tp_nodes": "tp groups cross nodes",
    "batch": "the batch is no multiple of the data-parallel ranks",
    "sequence": "the sequence cannot be split evenly",
    "stages": "fewer layers than stages",
    "schedule": "the schedule cannot run it",
    "offload": "an offloaded optimizer in a pipeline or beside context ranks is not described",
    "package": "this package cannot run it",
    "memory": "does not fit the device's memory",
    "host_memory": "the optimizer does not fit the node's main memory",
    "slower": "not among the best",
}
"""What each rule of `Search.rejected` is about."""


def say_losses(cost: Cost) -> str:
    """Return what of the step is not computing, largest first, such as "recomputation 12 %, bubble 9 %"."""
    parts = split_seconds(cost)
    lost = sorted(((s, name) for name, s in parts.items() if name != "computing"), reverse=True)
    words = [f"{name} {100 * s / cost.seconds:.0f} %" for s, name in lost if s > SMALL_FRACTION * cost.seconds]
    return ", ".join(words) or "nothing to speak of"


def say_memory(cost: Cost) -> str:
    """Return the peak by owner, largest first, such as "weights 12.3, activations 9.1 GB"."""
    owners = sorted(((size, owner) for owner, size in cost.peak.owners.items()), reverse=True)
    words = [f"{owner} {size / GB:.1f}" for size, owner in owners if size > SMALL_FRACTION * cost.peak_bytes]
    return f"{', '.join(words)} GB, at the moment {cost.peak.moment!r} of pipeline rank {cost.peak.stage}"


def split_gain(one: Cost, other: Cost) -> dict[str, float]:
    """Return the seconds of each part that one plan's step saves over another's work on as many samples."""
    scale = one.step.num_samples / other.step.num_samples
    mine, theirs = split_seconds(one), split_seconds(other)
    return {name: theirs[name] * scale - mine[name] for name in mine}


def say_why_faster(one: Cost, other: Cost) -> str:
    """Return why a plan is faster than another, by the parts of their steps, each for as many samples.

    Args:
        one: the faster.
        other: the slower.
    """
    scale = one.step.num_samples / other.step.num_samples
    saved_s = other.seconds * scale - one.seconds
    if saved_s <= EQUAL_FRACTION * one.seconds:
        spared = (other.peak_bytes - one.peak_bytes) / GB
        reason = (
            f"{abs(spared):.1f} GB {'less' if spared > 0 else 'more'} memory" if abs(spared) >= 0.1 else "equal memory"
        )
        return f"as fast as the next ({reason})"
    gains = sorted(((gain, name) for name, gain in split_gain(one, other).items()), reverse=True)
    shown = SMALL_FRACTION * saved_s
    less = [f"{_seconds(gain)} less {name}" for gain, name in gains[:2] if gain > shown]
    more = [f"{_seconds(-gain)} more {name}" for gain, name in reversed(gains[-2:]) if -gain > shown]
    though = f", though {' and '.join(more)}" if more else ""
    return f"{_seconds(saved_s)} ({100 * saved_s / other.seconds / scale:.1f} %) faster: {' and '.join(less)}{though}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def say_stages(cost: Cost) -> str:
    """Return how unequal the ranks of a pipeline are, "" without one."""
    if cost.choice.pp == 1:
        return ""
    busy = [
        sum(
            parts[name]
            for name in ("forward", "backward", "recompute", "tensor_parallel", "context_parallel", "sharding")
        )
        for parts in cost.step.ranks
    ]
    slowest, mean_s = max(range(len(busy)), key=busy.__getitem__), sum(busy) / len(busy)
    return f"rank {slowest} of the pipeline has {max(busy) / mean_s:.2f} x the mean work"


def say_miss(miss: Miss, best: Cost | None = None) -> str:
    """Return how near a plan is to fitting, what would help and, given the best that fits, what it would gain."""
    needed, available = miss.needed_bytes / GB, miss.available_bytes / GB
    where = "of a node's main memory" if miss.is_host else ""
    head = f"{miss.cost.choice}: needs {needed:.1f} of {available:.1f} GB {where}".rstrip()
    text = f"{head}, {needed - available:.1f} too much"
    if best is not None:
        gain = miss.cost.samples_per_s / best.samples_per_s - 1
        text += f", and {100 * abs(gain):.1f} % {'faster' if gain > 0 else 'slower'} than the best"
    if miss.remedy is None:
        return f"{text}; no single change of recomputation, micro-batch or ZeRO would make it fit"
    return f"{text}; {say_change(miss.cost.choice, miss.remedy)} would fit"


def say_change(before: Choice, after: Choice) -> str:
    """Return what differs between two choices, in words."""
    words: list[str] = []
    old, new = before._asdict(), after._asdict()
    full = [t for t in ("language", "vision") if old[f"recompute_{t}"] != new[f"recompute_{t}"]]
    if full:
        words.append(f"{new[f'recompute_{full[0]}']} recomputation of {' and '.join(full)}")
    if old["micro_batch_size"] != new["micro_batch_size"]:
        words.append(f"a micro-batch of {new['micro_batch_size']} with accumulation {new['grad_accum_steps']}")
    if old["zero_stage"] != new["zero_stage"]:
        words.append(f"ZeRO-{new['zero_stage']}")
    if old["gradient_sync"] != new["gradient_sync"]:
        words.append(f"exchanging gradients with {new['gradient_sync']} micro-batch")
    return ", ".join(words) or "the same"


def count_rejected(search: Search) -> list[tuple[str, int, str, str]]:
    """Return rule, plans, what the rule is about and an example, the most frequent first."""
    return [
        (rule, number, RULE_WORDS.get(rule, rule), search.examples.get(rule, ""))
        for rule, number in sorted(search.rejected.items(), key=lambda item: (-item[1], item[0]))
    ]


def drop_alike(costs: Sequence[Cost]) -> list[Cost]:
    """Leave out plans that differ from a better one in nothing that matters.

    Such have the same pipeline, tensor ranks, ZeRO and recomputation, about the same time, and share samples and
    sequences out between data-parallel and context ranks in another way.
    """
    found: list[Cost] = []
    for cost in costs:
        if not any(_kind(cost) == _kind(known) and _is_about(cost, known) for known in found):
            found.append(cost)
    return found


def _kind(cost: Cost) -> tuple[object, ...]:
    chosen = cost.choice
    return chosen.tp, chosen.pp, chosen.vision_tp, *chosen[6:9], *chosen[11:]


def _is_about(one: Cost, other: Cost) -> bool:
    return abs(one.samples_per_s - other.samples_per_s) <= ALIKE_FRACTION * one.samples_per_s


def say_reasons(costs: Sequence[Cost]) -> list[str]:
    """Return for each of several ranked plans why it beats the next; nothing for the last."""
    return [say_why_faster(one, other) for one, other in pairwise(costs)]


def say_search(search: Search) -> str:
    """Return the outcome in a few lines, for a log."""
    looked = f"{search.num_plans:,} plans looked at"
    if not search.best:
        nearest = f"; the nearest: {say_miss(search.misses[0])}" if search.misses else ""
        return f"{looked}, none can be run{nearest}"
    best = search.best[0]
    lines = [
        f"{best.choice}: {best.seconds:.3g} s a step predicted, {best.tokens_per_s:,.0f} tokens/s, MFU "
        f"{100 * best.mfu:.0f} %, {best.peak_bytes / GB:.1f} GB a rank; lost to {say_losses(best)}"
    ]
    if len(search.best) > 1:
        lines.append(f"next {search.best[1].choice}: the first is {say_why_faster(*search.best[:2])}")
    broken = ", ".join(f"{number:,} {words}" for rule, number, words, _ in count_rejected(search) if rule != "slower")
    lines.append(f"{looked}; rejected: {broken or 'none'}")
    lines += [f"nearest miss: {say_miss(miss, best)}" for miss in search.misses[:1]]
    return "\n".join(lines)


def as_json(search: Search) -> dict[str, Any]:
    """Return a search as plain data."""
    reasons = say_reasons(search.best)
    return {
        "num_plans": search.num_plans,
        "num_costed": search.num_costed,
        "best": [
            {**_cost_as_json(cost), "beats_next": reasons[place] if place < len(reasons) else ""}
            for place, cost in enumerate(search.best)
        ],
        "rejected": dict(search.rejected),
        "examples": dict(search.examples),
        "misses": [
            {
                **_cost_as_json(miss.cost),
                "needed_bytes": miss.needed_bytes,
                "available_bytes": miss.available_bytes,
                "remedy": miss.remedy._asdict() if miss.remedy else None,
            }
            for miss in search.misses
        ],
    }


def _cost_as_json(cost: Cost) -> dict[str, Any]:
    return {
        "plan": cost.choice._asdict(),
        "step_s": cost.seconds,
        "tokens_per_s": cost.tokens_per_s,
        "samples_per_s": cost.samples_per_s,
        "mfu": cost.mfu,
        "peak_bytes": cost.peak_bytes,
        "peak_by_owner": dict(cost.peak.owners),
        "seconds_by_part": dict(split_seconds(cost)),
        "host_bytes": cost.host_bytes,
    }
