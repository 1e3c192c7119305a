"""Why ranks hang, in words: what every rank was doing in, a few lines for the learner out. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmcourse.notebook.hang.rank_state import Collective, Group, RankState, Wait
from vlmcourse.notebook.hang.situation import Operation, Situation
from vlmcourse.notebook.rank_names import group_ranks, name_ranks

ADVICE = {
    "skipped": "Every rank must call every collective: take the call out of the condition, and give all ranks as many "
    "steps (uneven data ends sooner on one of them).",
    "different_order": "Every rank must call the same collectives in the same order: take them out of the branches.",
    "different_shape": "A collective needs the same shape on every rank: pad or drop the smaller last batch, or "
    "exchange the shapes first.",
    "different_dtype": "A collective needs the same dtype on every rank: convert before the call.",
    "different_root": "Every rank must name the same root rank, as src or dst.",
    "finished_early": "Every rank must call every collective: the finished one left a call out, or had fewer steps.",
    "save_on_one_rank": "To gather what is saved is a collective too: call state_dict() and save on every rank, and "
    "let only rank 0 write the file.",
    "died": "The others cannot go on without it: look for why it ended.",
    "slow": "It may still come: give all ranks the same work, or more time.",
    "point_to_point": "Every send needs a receive of its partner at the same time: let one rank send while the other "
    "receives.",
    "setup": "All ranks must make every process group in the same order, also those groups that they are not in.",
}
IN_BACKWARD = "DDP averages gradients in backward() (FSDP scatters them there): give every rank as many batches."
SHOWN_WHILE_RUNNING = ADVICE.keys() - {"setup"}
"""Kinds that a person is told of before anything is stopped; ranks that join their group are only starting."""
MAX_ERROR_CHARS = 100


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found."""

    kind: str
    """A key of `ADVICE`, or `in_progress` (nobody is missing), `waiting` (for something else), `computing`."""
    finding: str
    """Who waits where for whom."""

    is_in_backward: bool = False
    """Whether ranks wait for what DDP or FSDP began while gradients were computed."""

    @property
    def text(self) -> str:
        """The finding, and on lines of their own what to change."""
        told = [self.finding, f"  {ADVICE[self.kind]}"] if self.kind in ADVICE else [self.finding]
        return "\n".join([*told, f"  {IN_BACKWARD}"] if self.is_in_backward and self.kind in ADVICE else told)


def diagnose(
    states: Mapping[int, RankState],
    died: Mapping[int, str] | None = None,
    silent: Mapping[int, str] | None = None,
    *,
    is_over: bool = True,
) -> Diagnosis | None:
    """Explain who waits where for whom.

    Args:
        states: what the ranks were doing, by rank; a rank that left no answer is missing.
        died: ranks whose process ended by itself, each with how (`was killed by SIGKILL`).
        silent: why ranks left no answer, where that is known (`it is still starting`).
        is_over: whether the ranks are stopped now or wait for ever; else nobody is accused of what may yet come.
    Returns:
        The reason, if ranks wait for one another; else what they were doing; None if nothing is known.
    """
    here = Situation(states, died, silent, is_over=is_over)
    for operation in here.operations:
        difference = here.difference(operation)
        if difference:
            return _explain_difference(here, operation, difference)
    root = here.root_operation()
    if root is not None:
        finding = f"{_say_waiting(here, root.waiting, root)}; {_say_missing(here, root.missing, root)}"
        return Diagnosis(_judge_missing(here, root), finding, here.is_in_backward(root))
    for operation in here.operations:
        name = _name_call(here, operation.waiting[0], operation)
        return Diagnosis("in_progress", f"{name_ranks(operation.group.ranks)} are all in {name}: nobody is missing")
    return _explain_other_waits(here)


def describe_slow(states: Mapping[int, RankState]) -> str:
    """Say in one line who waits for whom while all of them run and may yet go on; empty if nobody waits so."""
    found = diagnose(states, is_over=False)
    return found.finding if found is not None and found.kind in SHOWN_WHILE_RUNNING else ""


def _explain_difference(here: Situation, operation: Operation, difference: str) -> Diagnosis:
    if difference == "op":
        return _explain_other_op(here, operation)
    is_one_place = len({name_place(here.states[rank]) for rank in operation.waiting}) == 1
    texts = group_ranks(
        {rank: _say_arguments(here, rank, operation, difference, not is_one_place) for rank in operation.entries}
    )
    parts = ", ".join(f"{name_ranks(ranks)} with {text}" for text, ranks in texts.items())
    name, where = _name_call(here, operation.waiting[0], operation).partition(" (")[::2]
    where = f" ({where}" if is_one_place and where else ""
    return Diagnosis(f"different_{difference}", f"ranks call {name} with different {difference}s{where}: {parts}")


def _say_arguments(here: Situation, rank: int, operation: Operation, difference: str, with_place: bool) -> str:
    entry, wait = operation.entries[rank], here.waits.get(rank)
    if difference == "root":
        text = f"root {wait.root}" if wait is not None and wait.root is not None else "an unknown root"
    else:
        tensors = [f"{dtype} {list(shape)}" for dtype, shape in zip(entry.dtypes, entry.sizes, strict=False)]
        text = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
    place = name_place(here.states[rank]) if with_place and wait is not None else ""
    return f"{text} ({place})" if place else text


def _explain_other_op(here: Situation, operation: Operation) -> Diagnosis:
    """Explain ranks whose collective of one number is not the same: some skipped one, or take another order."""
    by_op: dict[str, list[int]] = {}
    for rank, entry in sorted(operation.entries.items()):
        by_op.setdefault(entry.op, []).append(rank)
    classes = sorted(by_op.values(), key=lambda ranks: _order_of_skips(here, ranks, list(by_op.values())))
    entered, others = classes[0], [rank for ranks in classes[1:] for rank in ranks]
    if here.are_opposite(entered[0], others[0]):
        texts = [_say_waiting(here, ranks, operation) for ranks in classes]
        return Diagnosis("different_order", f"ranks call different collectives: {'; '.join(texts)}")
    kind = "save_on_one_rank" if here.is_saving(entered) and not here.is_saving(others) else "skipped"
    finding = f"{_say_waiting(here, entered, operation)}; {_say_missing(here, others, operation)}"
    return Diagnosis(kind, finding, here.is_in_backward(operation))


def _order_of_skips(here: Situation, ranks: Sequence[int], classes: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """Order classes of ranks so that the first one entered what the others skipped.

    A call under an `if` that the others are not under is one that they skip; else most ranks are right; else those who
    skip have come further in the source.
    """
    others = [rank for each in classes if each is not ranks for rank in each]
    ours = here.conditions(ranks[0]).keys()
    is_conditional = any(ours - here.conditions(rank).keys() for rank in others)
    place = here.states[ranks[0]].place
    if ranks[0] not in here.waits or place is None:
        return (2, 0, 0)
    return (0 if is_conditional else 1, -len(ranks), place.line)


def _judge_missing(here: Situation, operation: Operation) -> str:
    """Return the kind of a hang in which members have not entered an operation."""
    missing = operation.missing
    states = [here.states[rank] for rank in missing if rank in here.states]
    waits = [here.waits[rank] for rank in missing if rank in here.waits]
    if any(rank in here.died for rank in missing) or any(
        state.status == "failed" and state.rank not in here.waits for state in states
    ):
        return "died"
    if here.is_saving(operation.waiting) and not here.is_saving(missing):
        return "save_on_one_rank"
    if any(state.status == "finished" for state in states):
        return "finished_early"
    owns = [own for rank in missing if (own := here.operation_of(rank)) is not None]
    if any(not own.missing and not here.difference(own) for own in owns):
        return "slow"  # all are in that one, or have left it: it ends as soon as the machine comes to it
    for kind, of in (("point_to_point", ("send", "recv")), ("setup", ("setup",)), ("different_order", ("collective",))):
        if any(wait.kind in of for wait in waits):
            return kind
    return "slow" if states and not waits else "waiting"


def _say_waiting(here: Situation, ranks: Sequence[int], operation: Operation) -> str:
    verb = "waits" if len(ranks) == 1 else "wait"
    if ranks[0] not in here.waits:
        verb = "has passed" if len(ranks) == 1 else "have passed"
    return f"{name_ranks(ranks)} {verb} in {_name_call(here, ranks[0], operation)}".replace("passed in", "passed")


def _say_missing(here: Situation, ranks: Sequence[int], operation: Operation) -> str:
    """Say of each rank that is not in an operation what it does instead; those that do the same share a phrase."""
    phrases = []
    for of in group_ranks({rank: _say_activity(here, rank, operation) for rank in ranks}).values():
        state, is_one = here.states.get(of[0]), len(of) == 1
        if state is None and of[0] not in here.died:  # nobody knows whether it entered
            reason = here.silent.get(of[0], "")
            phrases.append(f"{name_ranks(of)} left no answer{f': {reason}' if reason else ''}")
            continue
        is_at_work = state is not None and of[0] not in here.waits and (state.uses_cpu or state.status == "silent")
        verb = "never entered it"
        if is_at_work or not here.is_over:
            verb = f"{'has' if is_one else 'have'} not entered it{'' if here.is_over else ' so far'}"
        activity = _say_activity(here, of[0], operation, not is_one)
        phrases.append(f"{name_ranks(of)} {verb}: {'it' if is_one else 'they'} {activity}")
    return "; ".join(phrases)


def _say_activity(here: Situation, rank: int, operation: Operation | None, are_many: bool = False) -> str:
    """Say what a rank does, with the verb for one rank or for many."""
    state, wait = here.states.get(rank), here.waits.get(rank)
    is_, waits = ("are", "wait") if are_many else ("is", "waits")
    if rank in here.died:
        return here.died[rank]
    if state is None:
        return here.silent.get(rank, "")
    if state.status == "finished":
        return "had finished"
    if wait is not None:
        return f"{waits} {_say_wait(here, rank, wait, operation)}"
    if state.status == "failed":
        return f"failed with {state.error[:MAX_ERROR_CHARS]}"
    place = name_place(state) or "code that is not the cell's"
    if state.status == "silent":
        return f"{is_} in compiled code, called from {place}"
    return f"{is_} still computing in {place}" if state.uses_cpu else f"{is_} in {place}"


def _say_wait(here: Situation, rank: int, wait: Wait, operation: Operation | None) -> str:
    own, place = here.operation_of(rank), name_place(here.states[rank])
    if own is not None:
        same_group = operation is not None and own.group.name == operation.group.name
        if not own.missing and not here.difference(own):
            return f"in {_name_call(here, rank, own)}, which nobody is missing in"
        has_number = not same_group or (operation is not None and own.number != operation.number)
        return f"in {_name_call(here, rank, own, with_number=has_number)}"
    if wait.kind in ("send", "recv"):
        peer = f"rank {wait.peer}" if wait.peer is not None else "any rank"
        return f"to {'send to' if wait.kind == 'send' else 'receive from'} {peer} ({place})"
    if wait.kind == "setup":
        return f"for all ranks in {wait.call or 'the making of a process group'} ({place})"
    return f"in {wait.call} ({place})" if wait.call else f"in {place}"


def _explain_other_waits(here: Situation) -> Diagnosis | None:
    """Explain ranks that wait in no collective, or say what they computed."""
    texts = group_ranks({rank: _say_activity(here, rank, None) for rank in here.states}).values()
    finding = "; ".join(f"{name_ranks(of)} {_say_activity(here, of[0], None, len(of) > 1)}" for of in texts)
    kinds = {wait.kind for wait in here.waits.values()}
    for kind, of in (("point_to_point", {"send", "recv"}), ("setup", {"setup"}), ("waiting", {"collective", "object"})):
        if kinds & of:
            return Diagnosis(kind, finding)
    return Diagnosis("computing", finding) if finding else None


def _name_call(
    here: Situation, rank: int, operation: Operation, with_number: bool = True, with_place: bool = True
) -> str:
    """Name a collective as a rank called it: `all_reduce #41 of group dp (trainer.py:118, called from cell line 9)`."""
    entry: Collective | None = operation.entries.get(rank)
    wait = here.waits.get(rank)
    name = (wait.call if wait is not None else "") or (entry.op if entry is not None else "a collective")
    if with_number:
        name += f" #{max(operation.number - operation.group.num_before, 1)}"
    if not operation.group.is_world:
        name += f" of {_name_group(operation.group)}"
    place = name_place(here.states[rank]) if with_place and wait is not None else ""
    return f"{name} ({place})" if place else name


def _name_group(group: Group) -> str:
    members = name_ranks(group.ranks)
    return f"the group of {members}" if group.label in ("", "undefined") else f"group {group.label} ({members})"


def name_place(state: RankState) -> str:
    """Name where a rank is: the line, its text, the cell's line that led there, the `if` about ranks around it."""
    place = state.place
    if place is None:
        return ""
    text = f"{place.name}, {place.code}" if place.code else place.name
    outer = next((each for each in state.stack[1:] if each.is_cell), None)
    if outer is not None and not place.is_cell:
        text += f", called from {outer.name}"
    about_ranks = [each for found in state.stack for each in found.conditions[::-1] if "rank" in each.test]
    if about_ranks and about_ranks[0].line not in (place.line, outer.line if outer else 0):
        first = about_ranks[0]
        text += f", under {'' if first.is_true else 'the `else` of '}`if {first.test}`"
    return text
