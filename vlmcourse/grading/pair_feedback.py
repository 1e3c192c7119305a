"""What went wrong with a column/row pair on real ranks, in sentences for the learner.

Enters: the ranks' reports of one case. Leaves: sentences, each under a key by which the same mistake in another case is
recognised.
"""

from __future__ import annotations

from itertools import zip_longest

from vlmcourse.grading.pair_cases import PARTS
from vlmcourse.grading.pair_ranks import CaseReports
from vlmcourse.notebook.rank_names import name_ranks

WHOLE_OUTPUTS = ("right", "bias_on_every_rank", "no_bias", "mean", "mean_of_all")
"""Words for an output that every rank's channels went into."""

OUTPUTS = {
    "bias_on_every_rank": "b_out is in the output {n} times, once for each rank: every rank adds it before the sum; "
    "add it once, after the sum",
    "own_part": "each rank returns the sum over its own F / {n} channels: the all-reduce over the ranks is missing in "
    "forward",
    "own_part_no_bias": "each rank returns the sum over its own F / {n} channels, without b_out: the all-reduce over "
    "the ranks is missing in forward",
    "no_bias": "b_out is missing in the output",
    "mean": "the ranks' partial outputs are averaged: they are parts of one sum, so add them up",
    "mean_of_all": "the ranks' partial outputs are averaged: they are parts of one sum, so add them up",
    "x_summed": "x is added up over the ranks in front: it is the same on every rank already, and becomes {n} times as "
    "large",
    "x_over_ranks": "x is divided by the number of ranks in front: it is the same on every rank, leave it as it is",
    "only_x_summed": "the two places are swapped: x is added up over the ranks, and the outputs are not. In forward x "
    "is the same on every rank, and the outputs are to be added up; in backward it is the other way round",
    "no_gelu": "gelu is missing between the two layers",
    "gelu_after_sum": "gelu stands after the sum: it belongs between the two layers, on each rank's own channels",
    "gelu_after_sum_and_bias": "gelu stands after the sum: it belongs between the two layers, on each rank's own "
    "channels",
    "gelu_twice": "gelu is applied to the output too: it stands between the two layers only",
    "no_b_in": "b_in is missing: it is added before gelu",
    "max": "of the ranks' partial outputs the largest is taken (ReduceOp.MAX): they are summands, so add them up",
    "min": "of the ranks' partial outputs the least is taken (ReduceOp.MIN): they are summands, so add them up",
    "product": "the ranks' partial outputs are multiplied (ReduceOp.PRODUCT): they are summands, so add them up",
    "relu": "between the layers stands relu: the task's MLP has gelu",
    "silu": "between the layers stands silu: the task's MLP has gelu",
    "tanh": "between the layers stands tanh: the task's MLP has gelu",
    "sigmoid": "between the layers stands sigmoid: the task's MLP has gelu",
    "gelu_by_tanh": "gelu is approximated by tanh, and differs from F.gelu(x): leave `approximate` out",
    "missing": "return the output as a tensor",
    "nan": "the output holds NaN or infinity",
}
INPUT_GRAD_NOT_SUMMED = (
    "x.grad holds only what came back through a rank's own F / {n} channels: x goes into every rank's part, so "
    "backward has to add its gradient up over the ranks"
)
INPUT_GRADS = {
    "own_part": INPUT_GRAD_NOT_SUMMED,
    "own_part_times_ranks": INPUT_GRAD_NOT_SUMMED,
    "over_ranks": "x.grad is 1 / {n} of what it must be: its parts are to be added up, not averaged",
    "missing": "x.grad is None: nothing leads from the output back to x",
}
NOT_WAITED_FOR = (
    "the all-reduce in {phase} is begun with async_op=True and not waited for: what it returns has a wait(), and until "
    "that is called the tensor holds this rank's own numbers"
)
NOT_USED = (
    "an all-reduce is called in {phase}, and its result is not used: each rank goes on with its own part. "
    "dist.all_reduce changes the tensor that it is given"
)
AVERAGED_IN_FRONT = (
    "x.grad is 1 / {n} of what it must be: x is averaged over the ranks in front, and autograd sees the division only. "
    "x is the same on every rank already, leave it as it is"
)
SUMMED_AGAIN = (
    "gradients are {n} times too large: the sum of forward adds up again in backward (as the all_reduce of "
    "torch.distributed.nn.functional does). Every rank holds the whole gradient of the output already: pass it on as "
    "it is"
)
FIRST_RANK_ONLY = (
    "{what} is right on rank 0 only: a sum that ends on one rank (reduce) is not enough, every rank needs it "
    "(all_reduce)"
)


def explain_case(reports: CaseReports) -> dict[str, str]:
    """Return what is wrong in one case: key of the mistake -> sentence; nothing if all is right."""
    if not reports.is_done:
        return _explain_end(reports)
    found = _explain_output(reports)
    if has_whole_output(reports):
        found |= _explain_gradients(reports)
    changed = sorted({name for report in reports.by_rank.values() for name in report["values"]["changed"]})
    if changed:
        found["changed"] = f"{', '.join(changed)} was changed in place: leave the arguments as they are"
    return found | _explain_sent(reports)


def words(reports: CaseReports, quantity: str) -> dict[int, str]:
    """Return what a quantity equals on each rank ("not computed" where the output's shape was wrong)."""
    return {rank: report["values"].get(quantity, "not computed") for rank, report in sorted(reports.by_rank.items())}


def is_right(reports: CaseReports, quantity: str) -> bool:
    """Tell whether a quantity is right on all ranks."""
    return reports.is_done and set(words(reports, quantity).values()) == {"right"}


def has_whole_output(reports: CaseReports) -> bool:
    """Tell whether all ranks returned one and the same output, made from every rank's channels."""
    outputs = set(words(reports, "y").values())
    return reports.is_done and len(outputs) == 1 and outputs <= set(WHOLE_OUTPUTS)


def sends_too_much(reports: CaseReports) -> bool:
    """Tell whether a rank handed more numbers to collectives, in one direction, than the task allows."""
    return bool(_explain_sent(reports))


def _explain_output(reports: CaseReports) -> dict[str, str]:
    """Say what the output equals in place of the right one."""
    num_ranks, outputs = reports.case.world_size, words(reports, "y")
    wrong = {rank: word for rank, word in outputs.items() if word != "right"}
    if not wrong:
        return {}
    unused = _explain_unused(reports, "forward", list(wrong.values()))
    if unused:
        return {"y unused": unused}
    if 0 not in wrong and len(wrong) == num_ranks - 1:
        return {"first rank": FIRST_RANK_ONLY.format(what="the output")}
    rank, word = next(iter(wrong.items()))
    if word in OUTPUTS:
        return {f"y {word}": OUTPUTS[word].format(n=num_ranks)}
    if word.removesuffix("_no_bias") in OUTPUTS:
        sentence = OUTPUTS[word.removesuffix("_no_bias")].format(n=num_ranks)
        return {f"y {word}": f"{sentence}; and b_out is missing in the output"}
    if word.startswith("shape"):
        expected = [*reports.case.lead, reports.case.width]
        return {"y shape": f"rank {rank} returns a tensor of {word}, and must return one of shape {expected}"}
    if len(wrong) < num_ranks:
        return {"y some": f"the output is right on some ranks only, not on {name_ranks(list(wrong))}"}
    return {"y off": "the output is not that of one process"}


def _count_all_reduces(reports: CaseReports, phase: str) -> int:
    """Return how many all-reduces every rank calls in a direction."""
    calls = [report["calls"] for report in reports.by_rank.values()]
    return min(
        sum(when == phase and name.replace("_", "").startswith("allreduce") for when, name, _ in one) for one in calls
    )


def _explain_unused(reports: CaseReports, phase: str, wrong: list[str]) -> str:
    """Say why ranks go on with their own part (words of what is wrong) although they call an all-reduce, or ""."""
    are_own = [word in ("own_part", "own_part_no_bias") for word in wrong]
    if not _count_all_reduces(reports, phase) or not any(are_own):
        return ""
    if any(phase in report["later"] for report in reports.by_rank.values()):
        return NOT_WAITED_FOR.format(phase=phase)  # some ranks may have found it ended
    return NOT_USED.format(phase=phase) if all(are_own) and len(wrong) == reports.case.world_size else ""


def _explain_gradients(reports: CaseReports) -> dict[str, str]:
    """Say what the gradients equal in place of the right ones."""
    num_ranks, found = reports.case.world_size, {}
    if not all(report["values"]["graph"] for report in reports.by_rank.values()):
        return {
            "no graph": "the output is cut off from autograd (its requires_grad is False), so backward reaches "
            "nothing: give the collective a backward"
        }
    grads = {name: set(words(reports, f"{name}.grad").values()) for name in PARTS}
    inputs = words(reports, "x.grad")
    input_words = set(inputs.values())
    inner = grads["w_in"] | grads["b_in"] | grads["w_out"]
    if "times_ranks" in input_words | inner or "own_part_times_ranks" in input_words:
        found["summed again"] = SUMMED_AGAIN.format(n=num_ranks)
    unused = _explain_unused(reports, "backward", [word for word in inputs.values() if word != "right"])
    if unused:
        found["x.grad unused"] = unused
    elif {"over_ranks", "own_part_over_ranks"} & input_words and _count_all_reduces(reports, "forward") > 1:
        found["x.grad averaged"] = AVERAGED_IN_FRONT.format(n=num_ranks)
    elif input_words - {"right"} and inputs[0] == "right":
        found["x.grad first rank"] = FIRST_RANK_ONLY.format(what="x.grad")
    else:
        known = next((word for word in inputs.values() if word in INPUT_GRADS), "")
        if known:
            found[f"x.grad {known}"] = INPUT_GRADS[known].format(n=num_ranks)
        elif input_words - {"right", "times_ranks"}:
            found["x.grad off"] = "x.grad is not that of one process"
    for name in PARTS:
        sentence = _explain_part(name, grads[name], num_ranks, "summed again" in found)
        if sentence:
            found[f"{name}.grad"] = sentence
    return found


def _explain_part(name: str, found: set[str], num_ranks: int, summed_again: bool) -> str:
    """Say what is wrong with the gradient of one part of the weights, or ""."""
    found = found - {"right"} - ({"times_ranks"} if summed_again else set())
    if not found:
        return ""
    if name == "b_out" and "missing" in found:
        return (
            "b_out.grad is missing on some ranks: a rank that does not add b_out never learns it; add it after the sum"
        )
    if name == "b_out" and "over_ranks" in found:
        return (
            f"b_out.grad is 1 / {num_ranks} of the whole: b_out / {num_ranks} on every rank gives the right output, "
            "but each rank must get the whole gradient; add b_out after the sum"
        )
    if "missing" in found:
        return f"{name}.grad is None: nothing leads from the output back to it"
    if "times_ranks" in found:
        return f"{name}.grad is {num_ranks} times too large"
    if "over_ranks" in found:
        return f"{name}.grad is 1 / {num_ranks} of what it must be"
    return f"{name}.grad is not the part of one process's gradient"


def _explain_sent(reports: CaseReports) -> dict[str, str]:
    """Say what was sent beyond the limit of the task."""
    case = reports.case
    for rank, report in sorted(reports.by_rank.items()):
        for phase in ("forward", "backward"):
            calls = [
                (name, numbers)
                for when, name, numbers in report["calls"]
                if when == phase and not name.startswith("recv")  # only what is handed in counts
            ]
            total = sum(numbers for _, numbers in calls)
            if total <= case.most_numbers:
                continue
            weights = case.hidden * case.width
            is_weight = any(numbers in (weights, weights // case.world_size) for _, numbers in calls)
            what = (
                "you send weights around. They may be many times larger than x, and a rank that gathers them needs the "
                "memory and the arithmetic of the whole layer: nothing is saved. Send outputs and their gradients only"
                if is_weight
                else "send outputs of the pair and gradients of its input only, not the F channels in between"
            )
            return {
                "sent": f"rank {rank} hands {total:,} numbers to collectives in {phase} (x has "
                f"{case.num_inputs:,}, the limit is {case.most_numbers:,}): {what}"
            }
    return {}


def _explain_end(reports: CaseReports) -> dict[str, str]:
    """Say why a case did not end on all ranks."""
    statuses = reports.statuses()

    def having(status: str) -> list[int]:
        return [rank for rank, word in statuses.items() if word == status]

    if having("unsolved"):
        return {"unsolved": "tp_mlp is not solved yet"}
    for status in ("error", "lost"):
        if having(status) and not (status == "lost" and having("gone")):
            rank = having(status)[0]
            others = [other for other in statuses if other not in having(status)]
            waited = f"; {name_ranks(others)} did not fail, and waited for it" if others and having("hung") else ""
            return {"error": f"{name_ranks(having(status))}: {reports.by_rank[rank]['error']}{waited}"}
    if having("endless"):
        where = reports.by_rank[having("endless")[0]].get("where", "")
        return {"endless": f"{name_ranks(having('endless'))} computed without end{where}, and the case was stopped"}
    if having("hung"):
        return {"hung": _explain_hang(reports, having("hung"))}
    return {"gone": f"the process of {name_ranks(having('gone'))} ended in the middle of the case"}


def _explain_hang(reports: CaseReports, hung: list[int]) -> str:
    """Say who waited in which collective, and what the others did."""
    rule = "every rank of the group must call the same collectives in the same order, whatever its rank"
    calls = {rank: [tuple(call) for call in report["calls"]] for rank, report in sorted(reports.by_rank.items())}
    first = hung[0]
    for other in calls:
        for number, (ours, theirs) in enumerate(zip_longest(calls[first], calls[other]), start=1):
            if ours != theirs:
                return f"this hangs: {_name_difference(number, first, ours, other, theirs)}; {rule}"
    return f"this hangs: {name_ranks(hung)} waited for the other ranks in vain; {rule}"


Call = tuple[str, str, int]


def _name_difference(number: int, rank: int, ours: Call | None, other: int, theirs: Call | None) -> str:
    """Say how the collectives of two ranks part at the one of a number."""
    made = ours or theirs
    if made and not (ours and theirs):
        phase, name, numbers = made
        caller, silent = (rank, other) if ours else (other, rank)
        what = f"{name} of {numbers} numbers in {phase}"
        return f"rank {caller} waits in collective {number} ({what}), and rank {silent} never calls it"
    texts = [f"{call[1]} of {call[2]} numbers in {call[0]}" for call in (ours, theirs) if call]
    return f"collective {number} of rank {rank} is {texts[0]}, and of rank {other} {texts[1]}"
