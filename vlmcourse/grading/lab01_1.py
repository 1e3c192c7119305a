"""Lab 1.1, graded: the column/row pair of tensor parallelism, first its parts, then on real ranks.

Enters: a learner's functions. Leaves: points (always a number from 0 to the cell's maximum) and printed feedback that
names the misconception. The cases of the hidden tests come from the same generators under another seed, and from more
ranks.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlmcourse.grading.checks import award, call, explain_signature
from vlmcourse.grading.pair_cases import PARTS, cut, is_near, make_pair_cases, make_weights
from vlmcourse.grading.pair_feedback import explain_case, has_whole_output, is_right, sends_too_much
from vlmcourse.grading.pair_ranks import (
    COLLECTIVE_LIMIT_S,
    AnswerReports,
    run_answers,
    show_kinds,
    show_rank_prints,
    show_unfinished,
)
from vlmcourse.grading.traces import show_printed

MAX_SHOWN = 4
"""Mistakes that the feedback names."""

SHAPES = {"w_in": "[F / N, D]", "w_out": "[D, F / N]"}
"""Shapes of a rank's weights."""

SHARE_OF_OUTPUT, SHARE_OF_INPUT_GRAD, SHARE_OF_PART_GRADS = 4, 3, 2
"""How the points of `tp_mlp` are shared out."""


# --- a. The parts of a rank -----------------------------------------------------------------------------------------


def check_shards(function: Any, points: float, seed: int, num_cases: int = 6) -> float:
    """Grade `shard_mlp(w_in, b_in, w_out, b_out, rank, world_size)`: two thirds for parts, one for refusing a size.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    wrong_signature = explain_signature(function, *PARTS, "rank", "world_size")
    if wrong_signature:
        print(wrong_signature)
        return 0.0
    rng = random.Random(f"shards:{seed}")
    num_right, said, printed = 0, set[str](), list[tuple[str, str]]()
    for number in range(num_cases):
        world_size = (2, 4, 3, 1, 8)[number % 5]
        width, hidden = rng.choice((5, 8, 12)), world_size * rng.randrange(2, 6)
        weights = make_weights(width, hidden, torch.Generator().manual_seed(rng.randrange(10**6)))
        problem = ""
        for rank in range(world_size):
            outcome = call(function, *(weights[name].clone() for name in PARTS), rank, world_size)
            if outcome.unsolved:
                print("shard_mlp is not solved yet")
                return 0.0
            problem = outcome.error or _find_wrong_part(outcome.value, weights, rank, world_size)
            if problem:
                break
        num_right += not problem
        printed.append((outcome.printed, problem))
        if problem and problem not in said and len(said) < MAX_SHOWN:
            print(f"F = {hidden}, D = {width}, rank {rank} of {world_size}: {problem}")
            said.add(problem)
        if outcome.timed_out:
            break
    show_printed(printed)
    refused = _refuses_uneven(function, rng)
    return award(points, num_right * 2 / num_cases + refused, 3) if num_right else 0.0


def _refuses_uneven(function: Any, rng: random.Random) -> bool:
    """Tell whether a number of channels that cannot be shared equally is refused, on each rank."""
    for hidden, world_size in ((rng.randrange(2, 9) * 4 + rng.randrange(1, 4), 4), (9, 2)):
        weights = make_weights(8, hidden, torch.Generator().manual_seed(0))
        for rank in (0, world_size - 1):
            outcome = call(function, *(weights[name] for name in PARTS), rank, world_size)
            if not outcome.refused:
                got = outcome.error or "an uneven part was returned"
                print(
                    f"F = {hidden} on {world_size} ranks: raise a ValueError, since {world_size} does not divide "
                    f"{hidden} and ranks with fewer channels would wait in every layer ({got})"
                )
                return False
    return True


def _find_wrong_part(answer: Any, weights: Mapping[str, Tensor], rank: int, world_size: int) -> str:
    """Say which of a rank's parts is wrong, or ""."""
    if isinstance(answer, Mapping):
        answer = [answer.get(name) for name in PARTS]
    if not isinstance(answer, Sequence) or len(answer) != 4 or not all(isinstance(part, Tensor) for part in answer):
        return f"return four tensors (w_in, b_in, w_out, b_out), not {type(answer).__name__}"
    expected = cut(weights, rank, world_size)
    got = dict(zip(PARTS, (part.detach() for part in answer), strict=True))
    wrong = [name for name in PARTS if not _equal(got[name], expected[name])]
    if not wrong:
        return ""
    if world_size > 1 and all(_equal(got[name], weights[name]) for name in PARTS):
        return "every rank keeps the whole weights: nothing is saved"
    sentence = _name_wrong_cut(got, weights, rank, world_size)
    if sentence:
        return sentence
    shapes = ", ".join(f"{name} {list(got[name].shape)}" for name in wrong)
    return f"{shapes}: not the part asked for, which has shape " + " and ".join(
        f"{list(expected[name].shape)}" for name in wrong
    )


def _name_wrong_cut(got: Mapping[str, Tensor], weights: Mapping[str, Tensor], rank: int, world_size: int) -> str:
    """Say which known mistake the parts show, or ""."""
    width, hidden = weights["w_in"].shape[1], weights["w_in"].shape[0]
    inner = cut(weights, rank, world_size)
    for name in ("w_in", "w_out"):
        if _equal(got[name].T, inner[name]):
            return f"{name} is transposed: keep the order of dimensions that torch.nn.Linear gives it, {SHAPES[name]}"
    columns = list(weights["w_in"].tensor_split(world_size, dim=1))
    rows = list(weights["w_out"].tensor_split(world_size, dim=0))
    if world_size > 1 and (_equal(got["w_in"], columns[rank]) or got["w_in"].shape == (hidden, width // world_size)):
        return (
            "w_in is cut along its inputs (dim 1). A rank would then have a part of each channel's sum, and gelu of a "
            "sum is not the sum of gelus: cut its outputs, the F channels (dim 0 of a weight [F, D])"
        )
    if world_size > 1 and (_equal(got["w_out"], rows[rank]) or got["w_out"].shape == (width // world_size, hidden)):
        return (
            "w_out is cut along its outputs (dim 0). A rank has only its own F / N channels to multiply it with: cut "
            "its inputs (dim 1 of a weight [D, F])"
        )
    if world_size > 1 and _equal(got["w_in"], weights["w_in"][rank::world_size]):
        return "you took every N-th channel: take one block of neighbouring channels, rank 0 the first"
    if _equal(got["b_in"], weights["b_in"]) and world_size > 1:
        return "b_in is whole: each channel's bias belongs to the rank that computes the channel"
    whole = weights["b_out"]
    if got["b_out"].shape != whole.shape:
        return "b_out is cut: the output has all D numbers on every rank, so b_out stays whole"
    if not _equal(got["b_out"], whole) and all(_equal(got[name], inner[name]) for name in PARTS[:3]):
        return "b_out must stay whole and unchanged on every rank; that it is added once is the task of tp_mlp"
    return ""


def _equal(got: Tensor, expected: Tensor) -> bool:
    return got.shape == expected.shape and is_near(got.float(), expected)


# --- b. The pair on real ranks --------------------------------------------------------------------------------------


def check_pair(
    function: Any,
    points: float,
    seed: int,
    num_cases: int = 3,
    world_sizes: Sequence[int] = (2,),
    collective_limit_s: float = COLLECTIVE_LIMIT_S,
) -> float:
    """Grade `tp_mlp(x, w_in, b_in, w_out, b_out)` on real ranks against one process.

    Args:
        function: the learner's function.
        points: the cell's maximum.
        seed: of the cases.
        num_cases: how many for each number of ranks.
        world_sizes: numbers of ranks.
        collective_limit_s: seconds that a collective may wait for the other ranks.

    Returns:
        Points from 0 to `points`; feedback is printed.
    """
    wrong_signature = explain_signature(function, "x", *PARTS)
    if wrong_signature:
        print(wrong_signature)
        return 0.0
    if is_blank(function):
        print("tp_mlp is not solved yet")
        return 0.0
    cases = [case for size in world_sizes for case in make_pair_cases(seed, size, num_cases)]
    try:
        (reports,) = run_answers([function], cases, collective_limit_s=collective_limit_s)
    except (ValueError, RuntimeError) as error:
        print(error)
        return 0.0
    show_rank_prints(reports)
    return grade_reports(reports, points, len(cases))


def is_blank(function: Any) -> bool:
    """Tell whether a function is the release's, which does nothing but raise; no rank need be started for it."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_names == ("NotImplementedError",)


def grade_reports(reports: AnswerReports, points: float, num_cases: int) -> float:
    """Print what was wrong in an answer's cases and return its points."""
    earned, counts = 0.0, {"output": 0, "x.grad": 0, "gradients of the parts": 0}
    shown: dict[str, list[str]] = {}
    for case in reports.cases:
        for key, sentence in explain_case(case).items():
            shown.setdefault(key, []).append(sentence if key == "unsolved" else f"{case.case}: {sentence}")
        whole = has_whole_output(case)
        share = SHARE_OF_OUTPUT * is_right(case, "y")
        share += SHARE_OF_INPUT_GRAD * (whole and is_right(case, "x.grad"))
        right_parts = sum(whole and is_right(case, f"{name}.grad") for name in PARTS)
        share += SHARE_OF_PART_GRADS * right_parts / len(PARTS)
        earned += share / 2 if sends_too_much(case) else share
        counts["output"] += is_right(case, "y")
        counts["x.grad"] += whole and is_right(case, "x.grad")
        counts["gradients of the parts"] += right_parts == len(PARTS)
    show_kinds(shown, MAX_SHOWN)
    if "unsolved" in shown:
        return 0.0
    show_unfinished(reports, num_cases)
    print("; ".join(f"{name} right in {count} of {num_cases} cases" for name, count in counts.items()))
    return award(points, earned / (SHARE_OF_OUTPUT + SHARE_OF_INPUT_GRAD + SHARE_OF_PART_GRADS), num_cases)
