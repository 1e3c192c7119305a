"""What went wrong with a ZeRO-1 optimizer on real ranks, in sentences for the learner.

Enters: the ranks' reports of all cases. Leaves: sentences, each under a key by which the same mistake in another case
is recognised. A mistake is named where it explains every case that is wrong; else the first wrong number is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmcourse.grading.pair_ranks import CaseReports
from vlmcourse.grading.zero_cases import STATE_BYTES
from vlmcourse.grading.zero_truths import BEHIND, MISTAKES, OTHER, RIGHT, ROUNDED, UNMOVED
from vlmcourse.notebook.rank_names import name_ranks

REDUCING = {"all-reduce", "reduce-scatter", "reduce", "all-to-all"}
"""Collectives that may be there to average gradients."""
PLAIN = {"frozen", "library"}
"""Keys of mistakes that are plain to see, whatever else is wrong."""
MOMENTS = 2
"""Copies of all parameters' numbers from which a rank counts as holding all moments."""
NEARLY_NONE = 0.05
"""Share of its due below which a rank counts as holding no moments, or as moving no numbers."""

UPDATES = {
    "summed": "gradients are added up over the ranks and not averaged: divide by the number of ranks. (Adam divides by "
    "the size of the gradient, so this hides well where eps is small.)",
    "over_ranks": "gradients are divided by the number of ranks once too often: a mean is a sum divided once",
    "kept": "gradients of earlier steps are still there: zero_grad() must drop them",
    "zeros": "a parameter without a gradient (grad is None) moved on by its momentum: leave it as it is, as "
    "torch.optim.AdamW does, so zero_grad() must set grad to None and step() must not put zeros in its place",
    "zeroed": "zero_grad() must set grad to None: it fills grad with zeros, so a parameter without a gradient was "
    "updated by its momentum and decayed; leave it as it is, as torch.optim.AdamW does",
    "decays_without": "a parameter without a gradient (grad is None) was decayed: leave it as it is in that step",
    "calls": "the bias is corrected by the number of calls of step(): count the steps of each parameter, for one "
    "without a gradient makes none",
    "ahead": "the bias is corrected by one step too many: the first step of a parameter is step 1",
    "no_correction": "the bias of the moments is not corrected: divide them by 1 - beta^t",
    "no_decay": "weight decay is missing: AdamW first multiplies weights by 1 - lr x weight_decay",
    "decay_twice": "weight decay is applied twice in a step: multiply by 1 - lr x weight_decay once, on the owner",
    "decay_per_rank": "weight decay is applied once for every rank: multiply by 1 - lr x weight_decay once, on the "
    "owner",
    "decay_without_lr": "weights are multiplied by 1 - weight_decay: it is 1 - lr x weight_decay",
    "coupled": "weight decay is added to the gradient, which is Adam with an L2 penalty: AdamW multiplies the weights "
    "by 1 - lr x weight_decay, and the moments see the gradient alone",
    "decay_after": "weight decay stands after Adam's change: AdamW multiplies the weights first",
    "eps_inside": "eps stands under the root: it is sqrt(v) + eps",
    "eps_before": "eps is added before the bias of v is corrected: it is sqrt(v / (1 - beta2^t)) + eps",
    "swapped": "the betas are swapped: the first is that of the mean, the second that of the squares",
    "no_root": "the root is missing: divide by sqrt(v) + eps",
    "fresh": "moments begin anew in every step: they must stay from one to the next",
    "decay_matrices": "weights of one dimension are not decayed: a recipe for training that leaves them out says so; "
    "here, as in torch.optim.AdamW, weight decay is for every parameter",
    "amsgrad": "v never falls from one step to the next, which is AMSGrad (amsgrad=True): AdamW divides by v as it is",
    "clipped": "each rank clips its own gradient to norm 1 before the mean: no clipping is asked for, and where it "
    "is, the norm is that of the mean",
    ROUNDED: "all weights are right to about three digits: gradients or moments are rounded to 16 bits on their way. "
    "Send gradients and keep both moments in fp32",
    "averaged": "weights are averaged over the ranks, of which one alone has made the step: send the owner's weights "
    "as they are",
}
NEVER_SHARED = (
    "each rank moves its own share of the weights and never gets the others': after the step, owners must share what "
    "they updated (all-gather, or a broadcast from each owner)"
)
SHARED_EARLY = (
    "weights of other ranks' shares are those of the step before: share them after the update, at the end of step()"
)
REMAINDER = (
    "{count} of {total} numbers never move on any rank: what is left over when N does not divide is dropped. Round "
    "shares up, or give the last rank the rest"
)
FEW_HOLD = (
    "{share:.0%} of the numbers never move on any rank, and {ranks} keep no moments: every rank has a share of the "
    "parameters to update"
)
WRONG_OWNER = (
    "{share:.0%} of the numbers never move on any rank although every rank keeps moments: what an owner updated is "
    "overwritten. Weights must be sent from the rank that updated them (src is the owner), after its step"
)
NOT_MOVED = "no number moves on any rank: step() must update the parameters in place"
OWN_GRADIENT = (
    "gradients are never averaged over the ranks: each number moves by one rank's gradient alone. In step(), average "
    "first (all-reduce or reduce-scatter, divided by the number of ranks)"
)
STEPS_FIRST = (
    "the step is made before gradients are averaged: each number moves by one rank's gradient alone, although you "
    "call {kinds}. Average first, then step (and use what the collective returns)"
)
PART_GRADIENT = (
    "gradients are divided by the number of ranks and not added up over them: each number moves by 1 / {n} of one "
    "rank's gradient. Sum over the ranks as well"
)
SHIFTED = (
    "numbers are put back {places} place(s) too {where}: put a share back where it was cut, and drop the padding there "
    "where you put it in"
)
OTHER_WEIGHTS = "weights are not those of torch.optim.AdamW on the mean of the ranks' gradients: {where}"
LIBRARY = "ZeroRedundancyOptimizer is what you are to write: use plain collectives"
FROZEN = "the parameter with requires_grad=False was changed: leave it out"
NOT_EQUAL = (
    "weights are right and differ between ranks in their last bits: each rank computed them itself. One owner computes "
    "a number, and the others take its result"
)
ALL_STATE = (
    "every rank keeps {kept:,} bytes besides weights and gradients; the moments of all parameters are {whole:,}, and "
    "that is DDP. Keep the moments of this rank's share alone, 1 / {n}, and no other buffers after step()"
)
TOO_MUCH_STATE = (
    "rank {rank} keeps {kept:,} bytes besides weights and gradients, and may keep {most:,.0f}: two moments of its "
    "share, a copy of it, and the moments of one large parameter. Buffers of all numbers must not outlive step()"
)
TOO_MUCH_SENT = (
    "a step moves {sent:,.0f} bytes a rank, and {most:,.0f} are enough: average each gradient once, send each weight "
    "once, and no moments (you call {kinds})"
)
ABORTED = (
    "gloo gave up: collectives of different ranks met that do not belong together, as their sizes differ. All ranks "
    "must make the same collectives in the same order, over the list of parameters"
)
HUNG = (
    "{ranks} waited for the others in vain: all ranks must make the same collectives in the same order, over the list "
    "of parameters. A loop over a rank's own share leaves a collective out, or meets another one"
)


def explain_cases(cases: Sequence[CaseReports]) -> dict[str, list[str]]:
    """Return what is wrong: key of the mistake -> a sentence for each case that shows it.

    Args:
        cases: all of an answer's.
    """
    by_case = [(case, explain_end(case) or _explain_weights(case)) for case in cases]
    common = _common_update([case for case in cases if case.is_done])
    wrong = [found for case, found in by_case if case.is_done and found]
    keys = set.intersection(*(set(found) for found in wrong)) - {"other"} if wrong else set[str]()
    shown: dict[str, list[str]] = {}
    for case, found in by_case:
        sentences = found
        if case.is_done and found and not PLAIN & set(found):
            named = {key: sentence for key, sentence in found.items() if key in keys}
            sentences = {common: UPDATES[common]} if common else named or _show_first_wrong(case)
        elif case.is_done and not found:
            sentences = _explain_costs(case)
        for key, sentence in sentences.items():
            shown.setdefault(key, []).append(f"{case.case}: {sentence}")
    return shown


def has_right_weights(case: CaseReports) -> bool:
    """Tell whether all ranks have the right weights after each step, by code of the learner's own."""
    return case.is_done and all("right" in v["fits"] and not v["library"] for v in _values(case).values())


def has_equal_weights(case: CaseReports) -> bool:
    """Tell whether weights are the same on all ranks, to the bit, after every step."""
    digests = [tuple(values["digests"]) for values in _values(case).values()]
    return case.is_done and len(set(digests)) == 1


def keeps_its_share(case: CaseReports) -> bool:
    """Tell whether no rank keeps more bytes between steps than its share."""
    return case.is_done and all(v["kept_bytes"] <= case.case.most_state_bytes for v in _values(case).values())


def sends_enough(case: CaseReports) -> bool:
    """Tell whether no rank sends more in a step than an all-reduce of gradients and a broadcast of weights take."""
    return case.is_done and all(v["sent_bytes"] <= case.case.most_sent_bytes for v in _values(case).values())


def explain_end(case: CaseReports) -> dict[str, str]:
    """Say why a case did not come to its end, where it did not."""
    if case.is_done:
        return {}
    statuses = case.statuses()
    by_status = {word: [rank for rank, status in statuses.items() if status == word] for word in statuses.values()}
    if "error" in by_status:
        rank = by_status["error"][0]
        return {"error": f"rank {rank} failed with {case.by_rank[rank]['error']}"}
    if "unsolved" in by_status:
        return {"unsolved": "Zero1AdamW is not solved yet"}
    waiting = by_status.get("hung", []) + by_status.get("lost", [])
    if waiting:
        return {"hung": HUNG.format(ranks=name_ranks(sorted(waiting)))}
    if "endless" in by_status:
        ranks = by_status["endless"]
        return {"endless": f"{name_ranks(ranks)} computed without end{case.by_rank[ranks[0]].get('where', '')}"}
    return {"gone": f"{name_ranks(by_status.get('gone', []))} ended early"}


def _values(case: CaseReports) -> dict[int, dict[str, Any]]:
    return {rank: report["values"] for rank, report in sorted(case.by_rank.items())}


def _common_update(cases: Sequence[CaseReports]) -> str:
    """Return the word for the wrong update that gives every rank's weights in all cases, right ones too; or ""."""
    fits = [set(values["fits"]) for case in cases for values in _values(case).values()]
    common = set.intersection(*fits) if fits else set[str]()
    return "" if "right" in common else next((word for word in (*MISTAKES, ROUNDED) if word in common), "")


def _explain_weights(case: CaseReports) -> dict[str, str]:
    """Say what the numbers of a case with wrong weights look like, in every way that holds; {} if they are right."""
    values = _values(case)
    if any(of_rank["library"] for of_rank in values.values()):
        return {"library": LIBRARY}
    if any(of_rank["frozen_moved"] for of_rank in values.values()):
        return {"frozen": FROZEN}
    if has_right_weights(case):
        return {}
    codes = {rank: str(of_rank["codes"]) for rank, of_rank in values.items()}
    seen = {code for of_rank in codes.values() for code in of_rank}
    if OTHER in seen:
        shifts = {of_rank["shift"] for of_rank in values.values()}
        if len(shifts) == 1 and (shift := int(next(iter(shifts)))):
            return {"shifted": SHIFTED.format(places=abs(shift), where="late" if shift > 0 else "early")}
        return {"other": ""}
    found: dict[str, str] = {}
    kinds = sorted({kind for of_rank in values.values() for kind in of_rank["kinds"]})
    if any(code.isdigit() for code in seen):
        reducing = REDUCING & set(kinds)
        found["own gradient"] = STEPS_FIRST.format(kinds=", ".join(sorted(reducing))) if reducing else OWN_GRADIENT
    if any(code.isalpha() and code != RIGHT for code in seen):
        found["part gradient"] = PART_GRADIENT.format(n=case.case.world_size)
    if BEHIND in seen and seen <= {RIGHT, BEHIND}:
        found["shared early"] = SHARED_EARLY
    if UNMOVED in seen:
        found |= _explain_unmoved(case, codes)
    return found or {"other": ""}


def _explain_unmoved(case: CaseReports, codes: Mapping[int, str]) -> dict[str, str]:
    """Say why numbers stay where they were."""
    total, n = len(codes[0]), case.case.world_size
    on_all = sum(all(codes[rank][index] == UNMOVED for rank in codes) for index in range(total))
    if on_all == total:
        return {"not moved": NOT_MOVED}
    if not on_all:
        return {"never shared": NEVER_SHARED}
    if any(codes[rank] != codes[0] for rank in codes):
        return {"other": ""}
    if on_all <= n * len(case.case.trained_sizes) and on_all < 0.5 * total / n:
        return {"remainder": REMAINDER.format(count=on_all, total=total)}
    due = STATE_BYTES * total / n
    without = [rank for rank, values in _values(case).items() if values["kept_bytes"] < NEARLY_NONE * due + 200]
    if without:
        return {"few hold": FEW_HOLD.format(share=on_all / total, ranks=name_ranks(without))}
    return {"wrong owner": WRONG_OWNER.format(share=on_all / total)}


def _show_first_wrong(case: CaseReports) -> dict[str, str]:
    """Show the first number that is wrong."""
    rank, where = next((rank, v["first_wrong"]) for rank, v in _values(case).items() if v["first_wrong"])
    return {"other": OTHER_WEIGHTS.format(where=f"rank {rank}, {where}")}


def _explain_costs(case: CaseReports) -> dict[str, str]:
    """Say what right weights cost too much: bytes kept or sent, or equality to the last bit."""
    found: dict[str, str] = {}
    values, of_case = _values(case), case.case
    if not has_equal_weights(case):
        found["not equal"] = NOT_EQUAL
    if not keeps_its_share(case):
        whole = STATE_BYTES * sum(of_case.trained_sizes)
        rank, kept = max(((rank, int(v["kept_bytes"])) for rank, v in values.items()), key=lambda pair: pair[1])
        if all(v["copies"] >= MOMENTS for v in values.values()):
            found["all state"] = ALL_STATE.format(kept=kept, whole=whole, n=of_case.world_size)
        else:
            found["state"] = TOO_MUCH_STATE.format(rank=rank, kept=kept, most=of_case.most_state_bytes)
    if not sends_enough(case):
        sent = max(float(v["sent_bytes"]) for v in values.values())
        kinds = ", ".join(sorted({kind for v in values.values() for kind in v["kinds"]}))
        found["sent"] = TOO_MUCH_SENT.format(sent=sent, most=of_case.most_sent_bytes, kinds=kinds)
    return found
