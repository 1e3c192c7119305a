"""Which wrong idea explains wrong batch sizes and accumulations (parts a and b of exercise 4.2).

Enters: a learner's numbers. Leaves: sentences to stand behind "It looks as if". A wrong formula has to give every
answer, so a right one is never accused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlmcourse.grading.batch_cases import BatchCase

Pairs = list[tuple[float, float]]


# --- a. Samples of a step -------------------------------------------------------------------------------------------

WORLD_SIZE = (
    "you multiplied by all GPUs: those of one tensor, pipeline or context-parallel group share their samples, so only "
    "num_gpus / (tp x pp x cp) have samples of their own"
)
WRONG_DEGREES: tuple[tuple[Callable[[BatchCase], float], str], ...] = (
    (lambda c: c.num_gpus, WORLD_SIZE),
    (lambda c: 1, "you counted one rank: every data-parallel rank has samples of its own"),
    (
        lambda c: c.dp_degree * c.pp,
        "you counted the stages of a pipeline as data-parallel ranks: micro-batches pass through all of them",
    ),
    (
        lambda c: c.dp_degree * c.cp,
        "you counted context-parallel ranks as data-parallel ones: they hold parts of the same sequences",
    ),
    (
        lambda c: c.dp_degree * c.tp,
        "you counted tensor-parallel ranks as data-parallel ones: they hold parts of the matrices for the same samples",
    ),
    (
        lambda c: c.dp_degree * c.pp * c.cp,
        "you divided by tp only: ranks of a pipeline or context-parallel group share their samples as well",
    ),
    (
        lambda c: c.dp_degree * c.tp * c.cp,
        "you divided by pp only: ranks of a tensor or context-parallel group share their samples as well",
    ),
    (
        lambda c: c.dp_degree * c.tp * c.pp,
        "you divided by cp only: ranks of a tensor-parallel group or a pipeline share their samples as well",
    ),
    (
        lambda c: c.num_gpus / (c.tp + c.pp + c.cp),
        "you divided by the sum of the degrees: a grid of ranks has their product",
    ),
    (
        lambda c: c.num_gpus / max(c.tp, c.pp, c.cp),
        "you divided by the largest degree only: ranks of the other groups share their samples as well",
    ),
    (
        lambda c: c.tp * c.pp * c.cp,
        "you multiplied by the ranks that share samples, tp x pp x cp, instead of those that do not",
    ),
)
"""What may be taken for the number of ranks with samples of their own; parts a and b both need it."""
WRONG_BATCHES: tuple[tuple[Callable[[BatchCase], float], str], ...] = (
    (lambda c: c.micro_batch * c.dp_degree, "you left out the accumulation: a step adds up that many micro-batches"),
    (lambda c: c.micro_batch * c.num_gpus, f"you left out the accumulation, and {WORLD_SIZE}"),
    (lambda c: c.accumulation * c.dp_degree, "you left out the micro-batch: the samples of one forward pass"),
    (lambda c: c.micro_batch + c.accumulation + c.dp_degree, "you added the three factors: multiply them"),
    (
        lambda c: c.micro_batch * c.dp_degree / c.accumulation,
        "you divided by the accumulation: more micro-batches make a step larger",
    ),
)


def explain_batches(answers: Sequence[tuple[BatchCase, float | None]]) -> list[str]:
    """Name the wrong formula that gives all answers of part a; nothing if none does."""
    numbers = [(case, got) for case, got in answers if got is not None]
    if len(numbers) < 2:
        return []
    for degree, sentence in WRONG_DEGREES:
        wrong = [case.micro_batch * case.accumulation * degree(case) for case, _ in numbers]
        if all(_is_near(got, number) or got == number // 1 for (_, got), number in zip(numbers, wrong, strict=True)):
            return [sentence]
    for formula, sentence in WRONG_BATCHES:
        if all(_is_near(got, formula(case)) for case, got in numbers):
            return [sentence]
    return []


def _is_near(got: float, expected: float) -> bool:
    return abs(got - expected) < 1e-6


# --- b. How to reach a target ---------------------------------------------------------------------------------------

BOTH = "you gave one choice where the target lies between two: give both neighbors, each with its error"


def _pairs(case: BatchCase, one_round: float, steps: Iterable[int]) -> Pairs:
    """Return pairs for numbers of micro-batches, if a round of them has `one_round` samples."""
    return [(float(step), float(step * one_round - case.target)) for step in steps]


def _around(case: BatchCase, one_round: float) -> Pairs:
    """Return the right kind of answer if a round of micro-batches had `one_round` samples."""
    one_round = max(1, one_round)
    below, left = divmod(case.target, one_round)
    return _pairs(case, one_round, [int(below)] if not left else [s for s in (int(below), int(below) + 1) if s])


def _right(case: BatchCase) -> Pairs:
    return _around(case, _round(case))


def _round(case: BatchCase) -> int:
    """Return the samples of one micro-batch on every rank."""
    return case.micro_batch * case.dp_degree


def _only(choose: Callable[[Pairs], tuple[float, float]]) -> Callable[[BatchCase], Pairs]:
    return lambda case: [choose(_right(case))]


def _map(change: Callable[[BatchCase, float, float], tuple[float, float]]) -> Callable[[BatchCase], Pairs]:
    return lambda case: [change(case, steps, error) for steps, error in _right(case)]


def _near(*offsets: int) -> Callable[[BatchCase], Pairs]:
    """Return an answer that gives the same neighbors of what // gives, wherever the target lies."""
    return lambda case: _pairs(case, _round(case), [case.target // _round(case) + offset for offset in offsets])


def _floor_and_ceil(least: int) -> Callable[[BatchCase], Pairs]:
    """Return an answer that gives both roundings of a division, at least this: the same pair twice where they meet."""
    return lambda case: _pairs(
        case, _round(case), (max(least, case.target // _round(case)), -(-case.target // _round(case)))
    )


def _above(case: BatchCase, count: int) -> Pairs:
    """Return the first batches that reach the target."""
    first = -(-case.target // _round(case))
    return _pairs(case, _round(case), range(first, first + count))


def _positive(pairs: Pairs) -> Pairs:
    return [pair for pair in pairs if pair[0] > 0]


TWICE = "you gave the same pair twice: where the target is met exactly, give it once"
BELOW_A_ROUND = "below one round of micro-batches there is one choice, accumulation 1"
MORE = "you gave more than the nearest choices: where one meets the target it is the only one, else the two neighbors"
IN_SAMPLES = "your error is not in samples: a micro-batch (or a round of them over all ranks) has several"
WRONG_CHOICES: tuple[tuple[Callable[[BatchCase], Pairs], str], ...] = (
    (lambda c: _around(c, c.dp_degree), "you left out the micro-batch: the samples of one forward pass"),
    (_only(lambda pairs: pairs[0]), f"{BOTH}; you always gave the smaller batch (//)"),
    (_only(lambda pairs: pairs[-1]), f"{BOTH}; you always gave the larger batch (a division rounded up)"),
    (_only(lambda pairs: min(pairs, key=lambda pair: abs(pair[1]))), f"{BOTH}; you gave the nearer one"),
    (_map(lambda _, s, e: (e, s)), "your pairs are turned round: first the accumulation, then the error"),
    (_map(lambda _, s, e: (s, -e)), "the sign of your error is turned: it is the batch minus the target"),
    (_map(lambda _, s, e: (s, abs(e))), "your error has no sign: say whether the batch is smaller (-) or larger (+)"),
    (_map(lambda c, s, e: (s, e / c.target)), "your error is a share of the target: state it in samples"),
    (_map(lambda c, s, e: (s, 100 * e / c.target)), "your error is in percent of the target: state it in samples"),
    (_map(lambda c, s, e: (s, e + c.target)), "you state the batch itself: the error is the batch minus the target"),
    (_map(lambda c, s, e: (s, e / c.micro_batch)), IN_SAMPLES),
    (_map(lambda c, s, e: (s, e // c.micro_batch)), IN_SAMPLES),
    (_map(lambda c, s, e: (s, e / _round(c))), IN_SAMPLES),
    (_map(lambda c, s, e: (s, e / c.dp_degree)), IN_SAMPLES),
    (
        lambda c: [(steps, 0.0) for steps, _ in _near(0, 1)(c)],
        "your errors are all 0: state how far each batch is from the target",
    ),
    (
        _near(0, 1),
        "you gave two choices everywhere: where one meets the target it is the only one, and a step of 0 is none",
    ),
    (
        lambda c: _positive(_near(0, 1)(c)),
        "you gave two choices where one meets the target: it is the only one there",
    ),
    (
        lambda c: _near(0)(c) if c.target % _round(c) == 0 else _near(0, 1)(c),
        "you gave an accumulation of 0 where the target is below one round of micro-batches: a step has at least one",
    ),
    (
        lambda c: _around(c, _round(c)) if c.target > _round(c) else _near(1, 2)(c),
        "where the target is below one round of micro-batches you gave two choices above it: nothing lies below, so "
        "only the nearest, one micro-batch, remains",
    ),
    (_floor_and_ceil(1), f"{TWICE}; and {BELOW_A_ROUND}: it stands there twice"),
    (_floor_and_ceil(0), f"{TWICE}; and {BELOW_A_ROUND}: 0 is none"),
    (lambda c: _positive(_floor_and_ceil(0)(c)), TWICE),
    (
        lambda c: _floor_and_ceil(1)(c) if c.target % _round(c) else _right(c),
        f"you gave the same pair twice: {BELOW_A_ROUND}",
    ),
    (lambda c: _right(c) if c.target >= _round(c) else [], f"you gave nothing there: {BELOW_A_ROUND}"),
    (lambda c: _above(c, 2), "your two choices both reach the target: where none meets it, give one on either side"),
    (lambda c: _pairs(c, _round(c), [round(c.target / _round(c))]), f"{BOTH}; you gave the nearer one"),
    (lambda c: _positive(_near(-1, 0, 1)(c)), MORE),
    (_near(-1, 0, 1), MORE),
    (lambda c: _positive(_near(-1, 0, 1)(c)) if c.target % _round(c) == 0 else _right(c), MORE),
    (
        lambda c: _right(c) if c.target % _round(c) == 0 else [],
        "you gave nothing where the target does not divide: give the nearest choices, each with its error",
    ),
)


def explain_choices(answers: Sequence[tuple[BatchCase, Pairs | None]]) -> list[str]:
    """Name the wrong idea that gives all answers of part b; nothing if none does."""
    numbers = [(case, pairs) for case, pairs in answers if pairs is not None]
    if len(numbers) < 2:
        return []
    for degree, sentence in WRONG_DEGREES:
        # With a floor too: micro_batch * num_gpus // (...), where that does not divide.
        rounds = [case.micro_batch * degree(case) for case, _ in numbers]
        for found in (rounds, [number // 1 for number in rounds]):
            if all(_same(got, _around(case, size)) for (case, got), size in zip(numbers, found, strict=True)):
                return [sentence]
    for formula, sentence in WRONG_CHOICES:
        if all(_same(pairs, formula(case)) for case, pairs in numbers):
            return [sentence]
    return []


def _same(got: Pairs, expected: Pairs) -> bool:
    if len(got) != len(expected):
        return False
    pairs = zip(sorted(got), sorted(expected), strict=True)
    return all(abs(a - b) < 1e-6 and abs(x - y) < 1e-4 for (a, x), (b, y) in pairs)
