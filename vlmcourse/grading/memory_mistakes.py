"""Exercise 4.4's misconceptions about the training state: wrong bytes a parameter, wrong splits, wrong ranks.

Enters: numbers that a learner's function gave. Leaves: sentences to stand behind "It looks as if". Those about
activations and the report are in `memory_mistakes_kept.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from vlmcourse.grading.assumptions import Aspects, Choice, find_assumptions
from vlmcourse.grading.memory_cases import GIB, STAGES, StateCase, Strategy
from vlmcourse.grading.state_bytes import SIXTEEN_OF_OPTIMIZER
from vlmcourse.planner.recipes import OPTIMIZERS, PRECISIONS, Precision

ADAMW_BYTES = OPTIMIZERS["adamw"]
FIRST_SPLIT = {"optimizer": 1, "gradients": 2, "weights": 3}
"""The ZeRO stage from which each is split."""
IS_ARE = {"optimizer": "the optimizer state is", "gradients": "gradients are", "weights": "weights are"}
THEM = {"optimizer": "the optimizer state", "gradients": "the gradients", "weights": "the weights"}

BytesOf = Callable[[Precision], float]
"""Bytes a parameter of one owner."""

NUMBERS_NOT_BYTES = "you counted numbers, not bytes: an fp32 number has 4 bytes, a 16-bit one 2"
GRADIENTS_TWICE = (
    "you counted gradients twice, as if DDP's buckets were a second copy: gradients can live in the buckets "
    "(gradient_as_bucket_view=True), and are counted once here"
)
WRONG_BYTES: dict[str, list[tuple[str, BytesOf]]] = {
    "weights": [
        (
            "you kept the weights at 4 bytes: in mixed precision those that forward reads have 2, and the fp32 master "
            "copy belongs to the optimizer",
            lambda r: 4,
        ),
        ("you gave the weights 2 bytes in fp32 too: there they have 4", lambda r: 2),
        (
            "you counted the fp32 master weights among the weights; they belong to the optimizer, which is split from "
            "stage 1 on",
            lambda r: r.weight_bytes + r.master_bytes,
        ),
        (NUMBERS_NOT_BYTES, lambda r: 1),
        ("you gave weights 8 bytes: those are Adam's two moments", lambda r: 8),
        ("you counted gradients among the weights", lambda r: r.weight_bytes + r.gradient_bytes),
        ("you returned the whole training state, not the weights alone", lambda r: r.state_bytes),
    ],
    "gradients": [
        (
            "you kept the gradients at 4 bytes; in fp16_mixed and bf16_mixed they have 2, as the weights that they "
            "belong to",
            lambda r: 4,
        ),
        (
            "you overlooked that bf16_fp32_grads adds gradients up in fp32, 4 bytes each: 18 bytes a parameter in all",
            lambda r: r.weight_bytes,
        ),
        ("you gave gradients 2 bytes in fp32 too: there they have 4", lambda r: 2),
        (
            "you counted gradients in 16 bits and in fp32 for bf16_fp32_grads; in this exercise they are kept once, as "
            "they are added up, in fp32",
            lambda r: r.gradient_bytes + (2 if r.gradient_bytes > r.weight_bytes else 0),
        ),
        (NUMBERS_NOT_BYTES, lambda r: 1),
        ("you counted weights among the gradients", lambda r: r.weight_bytes + r.gradient_bytes),
        (GRADIENTS_TWICE, lambda r: 2 * r.gradient_bytes),
        ("you left the gradients out", lambda r: 0),
    ],
    "optimizer": [
        (
            "you counted one Adam moment: it keeps two, of 4 bytes each. In fp32 that is four copies of 4 bytes with "
            "weights and gradients, not three: 112 GB for 7e9 parameters, not 84",
            lambda r: r.master_bytes + 4,
        ),
        (
            "in fp32 you counted one Adam moment, three copies of 4 bytes with weights and gradients in place of four: "
            "112 GB for 7e9 parameters, not 84",
            lambda r: r.master_bytes + 8 if r.master_bytes else 4,
        ),
        (
            "you forgot the fp32 master weights of mixed precision: the optimizer updates a copy of 4 bytes besides "
            "its two moments of 4 (which stay fp32 too)",
            lambda r: 8,
        ),
        ("you counted one Adam moment and no fp32 master weights: 4 + 4 bytes are missing", lambda r: 4),
        (
            "you counted master weights in fp32 too: there the weights are fp32 themselves, and no copy is needed",
            lambda r: 12,
        ),
        (SIXTEEN_OF_OPTIMIZER, lambda r: r.state_bytes),
        (SIXTEEN_OF_OPTIMIZER, lambda r: 16 if r.master_bytes else 8),
        (SIXTEEN_OF_OPTIMIZER, lambda r: 16),
        (
            "you counted the gradients among the optimizer state: they have a function of their own",
            lambda r: r.master_bytes + 8 + r.gradient_bytes,
        ),
        (
            "you counted the fp32 gradients of bf16_fp32_grads among the optimizer state: they are gradients, "
            "which are split from stage 2 on, and 4 bytes in gradient_bytes",
            lambda r: r.master_bytes + 8 + (r.gradient_bytes if r.gradient_bytes > r.weight_bytes else 0),
        ),
        (
            "you counted the 16-bit weights among the optimizer state: they have a function of their own",
            lambda r: r.master_bytes + 8 + r.weight_bytes,
        ),
        (
            "you kept the moments in the weights' format, and no master copy: both moments and the copy are fp32",
            lambda r: 2 * r.weight_bytes,
        ),
        (NUMBERS_NOT_BYTES, lambda r: 2 + bool(r.master_bytes)),
    ],
}
RIGHT_BYTES: dict[str, BytesOf] = {
    "weights": lambda r: r.weight_bytes,
    "gradients": lambda r: r.gradient_bytes,
    "optimizer": lambda r: r.master_bytes + ADAMW_BYTES,
}
RANKS: list[Choice] = [
    ("", lambda num_ranks: 1 / num_ranks),
    ("you multiplied by the number of ranks where you should divide", lambda num_ranks: num_ranks),
    (
        "you divided by 8 whatever the number of ranks is: the function is given it",
        lambda num_ranks: 1 / 8,
    ),
    ("you divided by N - 1: all N ranks hold a share", lambda num_ranks: 1 / max(1, num_ranks - 1)),
    ("you divided by the number of ranks twice", lambda num_ranks: num_ranks**-2),
]
UNITS: list[Choice] = [
    ("", 1),
    ("you returned GiB: return bytes", 1 / GIB),
    ("you returned GB: return bytes", 1e-9),
    ("you returned bits: a byte has 8 of them", 8),
]
GIB_UNITS: list[Choice] = [
    ("", 1 / GIB),
    ("you divided by 10^9, which gives GB: a GiB is 2^30 bytes, 7 % more", 1e-9),
    ("you returned bytes: the report is in GiB, 2^30 bytes", 1),
    ("you divided by 2^20, which gives MiB: a GiB is 2^30 bytes", 2**-20),
    ("you returned Gibit: a byte has 8 bits", 8 / GIB),
    ("you divided by 1000 x 2^20: a GiB is 2^30 bytes", 1 / (1000 * 2**20)),
]


def explain_stages(owner: str, split: Iterable[int]) -> str:
    """Say in which stages a learner split what must be whole, or left whole what is split; "" if all is right."""
    split, first = set(split), FIRST_SPLIT[owner]
    early = [stage for stage in STAGES if stage in split and stage < first]
    late = [stage for stage in STAGES if stage not in split and stage >= first]
    if not early and not late:
        return ""
    deeds = [f"split {THEM[owner]} in {_name(early)}"] if early else []
    deeds += [f"left {THEM[owner]} whole in {_name(late)}"] if late else []
    said = f"you {' and '.join(deeds)}: {IS_ARE[owner]} split from stage {first} on"
    if not split:
        return f"you never divide {THEM[owner]} by the number of ranks: {IS_ARE[owner]} split from stage {first} on"
    if owner == "gradients" and late == [2] and not early:
        return f"you took ZeRO-1 for ZeRO-2: {said}"
    if owner == "gradients" and early == [1] and not late:
        return f"you took ZeRO-2 for ZeRO-1: {said}"
    if (early == [first - 1] and not late) or (late == [first] and not early):
        return f"you are off by one stage: {said}"
    return said


def _name(stages: list[int]) -> str:
    """Name stages in a sentence."""
    *others, last = ["stage 0 (DDP)" if stage == 0 else f"ZeRO-{stage}" for stage in stages]
    return f"{', '.join(others)} and {last}" if others else last


def split_choices(owner: str) -> list[Choice]:
    """Return every set of stages in which something may be split, the right one first, the nearest ones next."""
    right = frozenset(range(FIRST_SPLIT[owner], 4))
    every = [frozenset(some) for count in range(5) for some in itertools.combinations(STAGES, count)]
    every.sort(key=lambda some: len(some ^ right))
    return [(explain_stages(owner, some), some) for some in every]


def state_aspects(owner: str, units: list[Choice]) -> Aspects:
    """Return what a learner may have taken for bytes, stages, ranks and unit of an owner."""
    return {
        "bytes_of": [("", RIGHT_BYTES[owner]), *WRONG_BYTES[owner]],
        "split": split_choices(owner),
        "ranks": RANKS,
        "unit": units,
        "scope": [
            ("", "one rank"),
            ("you added all ranks up: asked are the bytes of one", "all ranks"),
            ("you divided with // before you multiplied, which drops what is left over: use /", "floor"),
            *([(f"in DDP alone {GRADIENTS_TWICE}", "buckets")] if owner == "gradients" else []),
        ],
    }


def owned_bytes(
    num_params: float,
    num_ranks: int,
    strategy: Strategy,
    *,
    bytes_of: BytesOf,
    split: frozenset[int],
    ranks: Callable[[int], float],
    unit: float,
    scope: str,
) -> float:
    """Return the number that these assumptions give to one owner of the training state."""
    size, is_split = bytes_of(PRECISIONS[strategy.precision]), strategy.stage in split
    if scope == "floor" and is_split:
        return num_params * (size // num_ranks) * unit
    share = ranks(num_ranks) if is_split else 1.0
    copies = {"all ranks": num_ranks, "buckets": 1 if strategy.stage else 2}.get(scope, 1)
    return num_params * size * share * unit * copies


def _state_formula(case: tuple[StateCase, int], **assumed: Any) -> float:
    shape, stage = case
    return owned_bytes(shape.num_params, shape.num_ranks, Strategy(stage, shape.precision), **assumed)


def explain_state(owner: str, answers: list[tuple[Any, float]]) -> list[str]:
    """Name the wrong assumptions that give all of a learner's bytes of one owner.

    Args:
        owner: weights, gradients or optimizer.
        answers: pairs of (a `StateCase`, a stage) and the number.
    """
    return find_assumptions(answers, _state_formula, state_aspects(owner, UNITS))
