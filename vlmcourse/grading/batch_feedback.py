"""Which wrong idea explains wrong batch sizes and accumulations (parts a and b of exercise 4.2).

Enters: a learner's numbers. Leaves: sentences to stand behind "It looks as if". A wrong formula has to give every
answer, so a right one is never accused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlmcourse.grading.ex04_2 import BatchCase

Pairs = list[tuple[float, float]]


# --- a. Samples of a step -------------------------------------------------------------------------------------------

WORLD_SIZE = (
    "you multiplied by all GPUs: those of one tensor, pipeline or context-parallel group share their samples, so only "
    "num_gpus / (tp x pp x cp) have samples of their own"
)
WRONG_BATCHES: tuple[tuple[Callable[[BatchCase], float], str], ...] = (
    (lambda c: c.micro_batch * c.accumulation * c.num_gpus, WORLD_SIZE),
    (lambda c: c.micro_batch * c.dp_degree, "you left out the accumulation: a step adds up that many micro-batches"),
    (lambda c: c.micro_batch * c.num_gpus, f"you left out the accumulation, and {WORLD_SIZE}"),
    (lambda c: c.accumulation * c.dp_degree, "you left out the micro-batch: the samples of one forward pass"),
    (lambda c: c.micro_batch * c.accumulation, "you counted one rank: every data-parallel rank has samples of its own"),
    (
        lambda c: c.micro_batch * c.accumulation * c.dp_degree * c.pp,
        "you counted the stages of a pipeline as data-parallel ranks: micro-batches pass through all of them",
    ),
    (
        lambda c: c.micro_batch * c.accumulation * c.dp_degree * c.cp,
        "you counted context-parallel ranks as data-parallel ones: they hold parts of the same sequences",
    ),
    (
        lambda c: c.micro_batch * c.accumulation * c.dp_degree * c.tp,
        "you counted tensor-parallel ranks as data-parallel ones: they hold parts of the matrices for the same samples",
    ),
    (
        lambda c: c.micro_batch * c.accumulation * c.dp_degree * c.pp * c.cp,
        "you divided by tp only: ranks of a pipeline or context-parallel group share their samples as well",
    ),
    (
        lambda c: c.micro_batch * c.accumulation * c.dp_degree * c.tp * c.cp,
        "you divided by pp only: ranks of a tensor or context-parallel group share their samples as well",
    ),
    (
        lambda c: c.micro_batch * c.accumulation * c.dp_degree * c.tp * c.pp,
        "you divided by cp only: ranks of a tensor-parallel group or a pipeline share their samples as well",
    ),
    (
        lambda c: c.micro_batch * c.accumulation * c.num_gpus // max(1, c.tp + c.pp + c.cp),
        "you divided by the sum of the degrees: a grid of ranks has their product",
    ),
    (lambda c: c.micro_batch + c.accumulation + c.dp_degree, "you added the three factors: multiply them"),
    (
        lambda c: c.micro_batch * c.dp_degree / c.accumulation,
        "you divided by the accumulation: more micro-batches make a step larger",
    ),
    (
        lambda c: c.micro_batch * c.accumulation * c.tp * c.pp * c.cp,
        "you multiplied by the ranks that share samples, tp x pp x cp, instead of those that do not",
    ),
)


def explain_batches(answers: Sequence[tuple[BatchCase, float | None]]) -> list[str]:
    """Name the wrong formula that gives all answers of part a; nothing if none does."""
    numbers = [(case, got) for case, got in answers if got is not None]
    if len(numbers) < 2:
        return []
    for formula, sentence in WRONG_BATCHES:
        if all(abs(got - formula(case)) < 1e-6 for case, got in numbers):
            return [sentence]
    return []


# --- b. How to reach a target ---------------------------------------------------------------------------------------

BOTH = "you gave one choice where the target lies between two: give both neighbors, each with its error"


def _around(case: BatchCase, one_round: int) -> Pairs:
    """Return the right kind of answer if a round of micro-batches had `one_round` samples."""
    below, left = divmod(case.target, max(1, one_round))
    steps = [below] if not left else [s for s in (below, below + 1) if s]
    return [(float(s), float(s * one_round - case.target)) for s in steps]


def _right(case: BatchCase) -> Pairs:
    return _around(case, case.micro_batch * case.dp_degree)


def _only(choose: Callable[[Pairs], tuple[float, float]]) -> Callable[[BatchCase], Pairs]:
    return lambda case: [choose(_right(case))]


def _map(change: Callable[[BatchCase, float, float], tuple[float, float]]) -> Callable[[BatchCase], Pairs]:
    return lambda case: [change(case, steps, error) for steps, error in _right(case)]


WRONG_CHOICES: tuple[tuple[Callable[[BatchCase], Pairs], str], ...] = (
    (lambda c: _around(c, c.micro_batch * c.num_gpus), WORLD_SIZE),
    (lambda c: _around(c, c.micro_batch), "you counted one rank: every data-parallel rank has samples of its own"),
    (lambda c: _around(c, c.dp_degree), "you left out the micro-batch: the samples of one forward pass"),
    (_only(lambda pairs: pairs[0]), f"{BOTH}; you always gave the smaller batch (//)"),
    (_only(lambda pairs: pairs[-1]), f"{BOTH}; you always gave the larger batch (a division rounded up)"),
    (_only(lambda pairs: min(pairs, key=lambda pair: abs(pair[1]))), f"{BOTH}; you gave the nearer one"),
    (_map(lambda _, s, e: (s, -e)), "the sign of your error is turned: it is the batch minus the target"),
    (_map(lambda _, s, e: (s, abs(e))), "your error has no sign: say whether the batch is smaller (-) or larger (+)"),
    (_map(lambda c, s, e: (s, e / c.target)), "your error is a share of the target: state it in samples"),
    (_map(lambda c, s, e: (s, 100 * e / c.target)), "your error is in percent of the target: state it in samples"),
    (_map(lambda c, s, e: (s, e + c.target)), "you state the batch itself: the error is the batch minus the target"),
    (
        lambda c: [(s, e) for s, e in [(float(c.target // (c.micro_batch * c.dp_degree)) + k, 0.0) for k in (0, 1)]],
        "your errors are all 0: state how far each batch is from the target",
    ),
    (
        lambda c: [
            (float(s), float(s * c.micro_batch * c.dp_degree - c.target))
            for s in (c.target // (c.micro_batch * c.dp_degree), c.target // (c.micro_batch * c.dp_degree) + 1)
        ],
        "you gave two choices everywhere: where one meets the target it is the only one, and a step of 0 is none",
    ),
    (
        lambda c: [
            (float(s), float(s * c.micro_batch * c.dp_degree - c.target))
            for s in {c.target // (c.micro_batch * c.dp_degree), -(-c.target // (c.micro_batch * c.dp_degree))}
        ],
        "you gave an accumulation of 0 where the target is below one round of micro-batches: a step has at least one",
    ),
    (
        lambda c: _right(c) if c.target % (c.micro_batch * c.dp_degree) == 0 else [],
        "you gave nothing where the target does not divide: give the nearest choices, each with its error",
    ),
)


def explain_choices(answers: Sequence[tuple[BatchCase, Pairs | None]]) -> list[str]:
    """Name the wrong idea that gives all answers of part b; nothing if none does."""
    numbers = [(case, pairs) for case, pairs in answers if pairs is not None]
    if len(numbers) < 2:
        return []
    for formula, sentence in WRONG_CHOICES:
        if all(_same(pairs, formula(case)) for case, pairs in numbers):
            return [sentence]
    return []


def _same(got: Pairs, expected: Pairs) -> bool:
    if len(got) != len(expected):
        return False
    pairs = zip(sorted(got), sorted(expected), strict=True)
    return all(abs(a - b) < 1e-6 and abs(x - y) < 1e-4 for (a, x), (b, y) in pairs)
