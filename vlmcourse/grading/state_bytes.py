"""Which wrong idea explains wrong bytes of a rank's training state (parts a and b of exercise 4.1).

Enters: a learner's numbers. Leaves: sentences to stand behind "It looks as if", which say what the learner did. A wrong
formula has to give every answer, or every wrong one of a stage, so a right answer is never accused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

GB, GIB = 10**9, 2**30

Case = tuple[float, int, int]
"""Parameters, ranks and stage."""
Answer = tuple[Case, float]
"""A case, and the bytes that a learner's function gave for it."""
StateFormula = Callable[[float, int, int], float]
"""Bytes a rank from parameters, ranks and stage."""

OPTIMIZER, GRADIENTS, WEIGHTS = "the optimizer state", "the gradients", "the weights"
BYTES = {OPTIMIZER: 12, GRADIENTS: 2, WEIGHTS: 2}
"""Bytes a parameter in mixed precision."""
FIRST_SPLIT = {OPTIMIZER: 1, GRADIENTS: 2, WEIGHTS: 3}
"""The ZeRO stage from which each is split."""


# --- Sentences ------------------------------------------------------------------------------------------------------


def explain_split(stage: int, split: Collection[str]) -> str:
    """Say what a learner split in a stage or left whole, where that is wrong, and what is right; "" if all is right.

    Args:
        stage: the ZeRO stage; 0 is DDP.
        split: those of OPTIMIZER, GRADIENTS and WEIGHTS that the learner split.
    """
    early = [owner for owner in BYTES if owner in split and FIRST_SPLIT[owner] > stage]
    late = [owner for owner in BYTES if owner not in split and FIRST_SPLIT[owner] <= stage]
    if not early and not late:
        return ""
    deeds = ([f"split {_list(early)}"] if early else []) + ([f"left {_list(late)} whole"] if late else [])
    if stage == 0:
        return f"you {deeds[0]} in stage 0; that is plain DDP, where every rank holds everything"
    first, *rest = early + late
    subject = first if rest else "they" if first != OPTIMIZER else "it"
    verb = "is" if first == OPTIMIZER else "are"
    facts = [f"{subject} {verb} split from stage {FIRST_SPLIT[first]} on"]
    facts += [f"{owner} from stage {FIRST_SPLIT[owner]} on" for owner in rest]
    return f"you {' and '.join(deeds)} in ZeRO-{stage}; {', '.join(facts)}"


def _list(owners: Sequence[str]) -> str:
    *others, last = owners
    return f"{', '.join(others)} and {last}" if others else last


TWELVE_BYTES = (
    "12 bytes a parameter, with which 7e9 parameters would train in 84 GB. Adam keeps two moments: 16 bytes, 112 GB"
)
ONE_MOMENT = f"you counted one Adam moment (or left out the fp32 master weights): {TWELVE_BYTES}"
ONE_MOMENT_IN_FP32 = f"you counted one Adam moment: {TWELVE_BYTES}"
GRADIENTS_IN_STAGE_1 = explain_split(1, (OPTIMIZER, GRADIENTS))
WEIGHTS_IN_STAGE_2 = explain_split(2, (OPTIMIZER, GRADIENTS, WEIGHTS))
SIXTEEN_OF_OPTIMIZER = (
    "you gave the optimizer all 16 bytes of mixed-precision Adam; 4 of them are weights and gradients, so stage 1 is "
    "4P + 12P/N, not 4P + 16P/N"
)
FP32_SPLIT = (
    "you counted weights and gradients in fp32 (4 + 4 + 8); in mixed precision they are 2 + 2, and the optimizer's "
    "12 bytes hold the fp32 master copy and two moments"
)
MASTER_COPY_WHOLE = (
    "you split the two moments and left the fp32 master weights whole; they are among the optimizer's 12 bytes, all of "
    "which stage 1 splits"
)
UNIT = "your numbers are right in another unit: return bytes, not GB or GiB"
SHIFTED = (
    "your stages are shifted by one: stage 0 splits nothing, stage 1 the optimizer state, stage 2 the gradients too, "
    "and stage 3 the weights too"
)


# --- Formulas -------------------------------------------------------------------------------------------------------


def split_state(
    weights: float, gradients: float, optimizer: float, *, first_split: tuple[int, int, int]
) -> StateFormula:
    """Build a formula from bytes a parameter of each owner and the stage from which each is split."""

    def formula(num_params: float, num_ranks: int, stage: int) -> float:
        owners = zip((weights, gradients, optimizer), first_split, strict=True)
        return sum(size * num_params / (num_ranks if stage >= first else 1) for size, first in owners)

    return formula


RIGHT_STATE = split_state(2, 2, 12, first_split=(3, 2, 1))


def floor_state(num_params: float, num_ranks: int, stage: int) -> float:
    """Divide the bytes of a parameter by the ranks with `//`."""
    owners = ((BYTES[owner], FIRST_SPLIT[owner]) for owner in BYTES)
    split = whole = 0
    for size, first in owners:
        split, whole = (split + size, whole) if stage >= first else (split, whole + size)
    return num_params * (whole + split // num_ranks)


def moments_split_state(num_params: float, num_ranks: int, stage: int) -> float:
    """Split the moments only, and leave the fp32 master weights whole until stage 3."""
    if stage == 3:
        return RIGHT_STATE(num_params, num_ranks, stage)
    return RIGHT_STATE(num_params, num_ranks, stage) + (4 * num_params * (1 - 1 / num_ranks) if stage else 0)


WRONG_BYTES: tuple[tuple[StateFormula, str], ...] = (
    (split_state(2, 2, 8, first_split=(3, 2, 1)), ONE_MOMENT),
    (split_state(2, 2, 16, first_split=(3, 3, 1)), SIXTEEN_OF_OPTIMIZER),
    (split_state(2, 2, 16, first_split=(3, 2, 1)), SIXTEEN_OF_OPTIMIZER),
    (split_state(4, 4, 8, first_split=(3, 2, 1)), FP32_SPLIT),
    (split_state(2, 0, 12, first_split=(3, 2, 1)), "you left out the gradients, 2 bytes a parameter"),
    (split_state(2, 2, 0, first_split=(3, 2, 1)), "you left out the optimizer's 12 bytes a parameter"),
)
"""Wrong bytes a parameter; a learner may have them in one stage only."""

WRONG_STATES: tuple[tuple[StateFormula, str], ...] = (
    *WRONG_BYTES,
    (
        split_state(4, 4, 12, first_split=(3, 2, 1)),
        "you counted weights and gradients in fp32, 4 bytes each; in mixed precision they are 2 bytes each, and the "
        "fp32 copy is among the optimizer's 12",
    ),
    (
        split_state(2, 4, 12, first_split=(3, 2, 1)),
        "you counted the gradients in fp32, 4 bytes; in this exercise they are in bf16, 2 bytes",
    ),
    (moments_split_state, MASTER_COPY_WHOLE),
    (floor_state, "you divided with //, which drops what is left over: use /"),
    (split_state(2, 2, 12, first_split=(4, 3, 2)), SHIFTED),
    (split_state(2, 2, 12, first_split=(2, 1, 0)), SHIFTED),
    (
        split_state(2, 2, 12, first_split=(0, 0, 0)),
        "you divided everything by the number of ranks in every stage; stage 0 splits nothing, stage 1 the optimizer "
        "state, stage 2 the gradients too, and only stage 3 everything",
    ),
    (
        split_state(2, 2, 12, first_split=(4, 4, 4)),
        "your answer does not depend on the number of ranks; from stage 1 on they share the optimizer state",
    ),
)
"""Wrong ideas of all stages at once."""


# --- Explanations ---------------------------------------------------------------------------------------------------


def explain_state(answers: Iterable[Answer]) -> list[str]:
    """Name the wrong formula that gives all of the answers, or else what is wrong in each stage.

    Args:
        answers: all of a learner's answers, right ones too.

    Returns:
        Sentences; none if no known idea gives the wrong answers.
    """
    answers = list(answers)
    wrong = [(case, got) for case, got in answers if not _near(got, RIGHT_STATE(*case))]
    if not wrong:
        return []
    for unit in (GB, GIB):
        if _all_near([(case, got * unit) for case, got in wrong], RIGHT_STATE):
            return [UNIT]
    for formula, sentence in WRONG_STATES:
        if _all_near(answers, formula):
            return [sentence]
    by_stage = [[pair for pair in wrong if pair[0][2] == stage] for stage in range(4)]
    sentences = [_explain_split(stage, pairs) or _explain_bytes(pairs) for stage, pairs in enumerate(by_stage) if pairs]
    if not all(sentences):  # one stage alone proves no wrong bytes where another speaks against them
        sentences = [_explain_split(stage, pairs) for stage, pairs in enumerate(by_stage) if pairs]
    return list(dict.fromkeys(sentence for sentence in sentences if sentence))


def _explain_split(stage: int, wrong: Sequence[Answer]) -> str:
    """Return which parts a learner split where that gives every wrong answer of one stage; "" if none does."""
    # Weights and gradients are of one size: of two explanations the one that splits in the order of the stages holds.
    for count in range(len(BYTES) + 1):
        for split in itertools.combinations(BYTES, count):
            if _all_near(wrong, _splitting(split)):
                return explain_split(stage, split)
    return ""


def _explain_bytes(wrong: Sequence[Answer]) -> str:
    """Return which wrong bytes a parameter give every wrong answer of one stage; "" if none does."""
    return next((sentence for formula, sentence in WRONG_BYTES if _all_near(wrong, formula)), "")


def _splitting(split: Collection[str]) -> StateFormula:
    """Return the formula that divides some owners by the number of ranks, whatever the stage."""

    def formula(num_params: float, num_ranks: int, stage: int) -> float:
        return sum(size * num_params / (num_ranks if owner in split else 1) for owner, size in BYTES.items())

    return formula


def _all_near(answers: Sequence[Answer], formula: StateFormula) -> bool:
    return all(_near(got, formula(*case)) for case, got in answers)


def _near(got: float, expected: float) -> bool:
    return abs(got - expected) <= 1e-4 * abs(expected)
