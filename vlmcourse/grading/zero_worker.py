"""Runs learners' ZeRO-1 optimizers of lab 5.1 on one rank; `pair_ranks` starts it on each.

Enters and leaves: as in `pair_worker`, whose ranks, time limits and reports it uses; only what a case is differs: some
parameters make a few steps.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlmcourse.grading.checks import quiet, time_limit
from vlmcourse.grading.pair_ranks import LOOP_FACTOR
from vlmcourse.grading.pair_worker import Run, describe_error, main
from vlmcourse.grading.traces import Printed, places_of
from vlmcourse.grading.zero_cases import ZeroCase, flatten, make_gradients, make_params
from vlmcourse.grading.zero_kept import find_held, measure_kept
from vlmcourse.grading.zero_truths import ROUNDED, find_fits, find_shift, is_rounded, is_same, make_paths, read_codes
from vlmcourse.parallel.counting import SEND, CollectiveCall, CollectiveCounter

LIBRARY = "ZeroRedundancyOptimizer"
"""PyTorch's own ZeRO-1, which is what is to be written."""


class ZeroRun(Run):
    """One rank's runs of ZeRO-1 optimizers."""

    @staticmethod
    def warm_up(case: Any, rank: int) -> None:
        """Import and compute once what every case needs."""
        make_paths(case)
        gc.collect()
        gc.freeze()  # a collection per case is quick where it need not go through what has been imported

    def run_case(self, function: Any, case: ZeroCase) -> dict[str, Any]:
        """Make the steps of one case here; whatever the answer does becomes a report."""
        report: dict[str, Any] = {"status": "done", "error": "", "values": {}}
        started_s, printed = time.monotonic(), Printed()
        make_paths(case)
        for step in range(case.num_steps):
            make_gradients(case, step, self.rank)
        try:
            with quiet(printed), warnings.catch_warnings(), time_limit(LOOP_FACTOR * self.timeout_s):
                warnings.simplefilter("ignore")
                report["values"] = self._run_steps(function, case)
        except NotImplementedError as error:
            report["status"] = "error" if str(error) else "unsolved"
            report |= {"error": f"NotImplementedError: {error}", "places": places_of(error)}
        except (Exception, SystemExit) as error:  # the boundary to code that is not ours: any error is a wrong answer
            report |= describe_error(error)
        report["seconds"], report["printed"] = round(time.monotonic() - started_s, 2), printed.getvalue()
        return report

    def _run_steps(self, function: Any, case: ZeroCase) -> dict[str, Any]:
        """Return what the weights became, what was kept, and what was sent."""
        params, held = make_params(case), find_held(function)
        gc.collect()
        gc.freeze()  # what is alive now is not the optimizer's: `gc` no longer lists it
        optimizer = function(params, case.lr, case.betas, case.eps, case.weight_decay)
        weights: list[Tensor] = []
        calls: list[list[CollectiveCall]] = []
        for step in range(case.num_steps):
            optimizer.zero_grad()
            _backward(params, make_gradients(case, step, self.rank))
            with CollectiveCounter() as counter:
                optimizer.step()
            _check_params(case, params)
            calls.append(counter.calls)
            weights.append(flatten(list(params)))
        not_kept = [*params, *weights, *(p.grad for p in params if p.grad is not None)]
        kept = measure_kept(case, function, held, not_kept)
        return describe_steps(case, weights) | {
            "library": any(type(item).__name__ == LIBRARY for item in gc.get_objects()),
            "kept_bytes": kept.num_bytes,
            "copies": kept.copies,
            "sent_bytes": max(sum(map(sent_bytes, of_step)) for of_step in calls),
            "kinds": sorted({call.kind for of_step in calls for call in of_step}),
        }


def describe_steps(case: ZeroCase, weights: list[Tensor]) -> dict[str, Any]:
    """Return in words and codes what weights after each step are; see `zero_truths`."""
    paths = make_paths(case)
    right = paths["right"]
    found: dict[str, Any] = {
        "fits": find_fits(weights, paths) or [ROUNDED] * is_rounded(weights, right),
        "codes": read_codes(case, weights[-1], paths),
        "shift": find_shift(weights[0], right[0]),
        "digests": [hashlib.sha256(each.numpy().tobytes()).hexdigest()[:16] for each in weights],
        "frozen_moved": False,
        "first_wrong": "",
    }
    if case.frozen is not None:
        begin = sum(case.sizes[: case.frozen])
        block = slice(begin, begin + case.sizes[case.frozen])
        found["frozen_moved"] = not is_same(weights[-1][block], flatten(list(make_params(case)))[block])
    wrong = next((step for step, each in enumerate(weights) if not is_same(each, right[step])), None)
    if wrong is not None:
        place = int((weights[wrong] - right[wrong]).abs().nan_to_num(nan=torch.inf).argmax())
        index, begin = 0, 0
        while place >= begin + case.sizes[index]:
            begin, index = begin + case.sizes[index], index + 1
        found["first_wrong"] = (
            f"after step {wrong + 1}, parameter {index} (shape {list(case.shapes[index])}), number {place - begin} in "
            f"flat order: expected {right[wrong][place]:.6f}, got {weights[wrong][place]:.6f}"
        )
    return found


def _backward(params: list[nn.Parameter], gradients: list[Tensor | None]) -> None:
    """Add this rank's gradients to what is in `grad`, as a backward pass does."""
    pairs = [(p, g) for p, g in zip(params, gradients, strict=True) if g is not None]
    torch.autograd.backward([p * 1 for p, _ in pairs], [g.clone() for _, g in pairs])


def _check_params(case: ZeroCase, params: list[nn.Parameter]) -> None:
    """Raise a ValueError where a parameter no longer has its shape or type."""
    for index, (parameter, shape) in enumerate(zip(params, case.shapes, strict=True)):
        if tuple(parameter.shape) != shape or parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter {index} has shape {list(parameter.shape)} and type {parameter.dtype} after step(): it must "
                f"keep {list(shape)} and torch.float32; update parameters in place"
            )


def sent_bytes(call: CollectiveCall) -> float:
    """Return what a rank sends on average in one call: by the ring's formula, and for the kinds without one as much.

    A reduce, a gather and a scatter move what a broadcast does, to or from one rank.
    """
    if call.kind in ("reduce", "gather", "scatter"):
        return call.payload_bytes * (call.num_ranks - 1) / call.num_ranks
    return float(call.payload_bytes) if call.kind == SEND else call.sent_bytes


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]), ZeroRun)
