"""Runs learners' accumulation steps of exercise 4.2 on one rank; `pair_ranks` starts it on each.

Enters and leaves: as in `pair_worker`, whose ranks, time limits and reports it uses; only what a case is differs: a
small model in DDP makes a few optimizer steps by the learner's function, whose forward passes are recorded too.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.grading.checks import quiet, time_limit
from vlmcourse.grading.pair_ranks import LOOP_FACTOR
from vlmcourse.grading.pair_worker import Run, describe_error, main
from vlmcourse.grading.step_cases import (
    LEARNING_RATE,
    StepCase,
    flat_gradient,
    leave_gradient,
    make_micro_batches,
    make_model,
)
from vlmcourse.grading.step_exchanges import RecordExchanges
from vlmcourse.grading.step_passes import RecordPasses
from vlmcourse.grading.step_truths import StepTruth, fit_gradient, fit_loss, make_truths, name_gradient, name_loss
from vlmcourse.grading.traces import Printed, places_of


class StepRun(Run):
    """One rank's runs of accumulation steps."""

    @staticmethod
    def warm_up(case: Any, rank: int) -> None:
        """Import and compute once what every case needs."""
        make_truths(case)

    def run_case(self, function: Any, case: StepCase) -> dict[str, Any]:
        """Make the steps of one case here; whatever the answer does becomes a report."""
        report: dict[str, Any] = {"status": "done", "error": "", "values": {"steps": []}}
        started_s = time.monotonic()
        truths = make_truths(case)
        model = DistributedDataParallel(make_model(case))
        leave_gradient(case, model.module)
        printed = Printed()
        try:
            with quiet(printed), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for step in range(case.num_steps):
                    found = self._run_step(function, case, model, step, truths[step][self.rank])
                    report["values"]["steps"].append(found)
        except NotImplementedError as error:
            report["status"] = "error" if str(error) else "unsolved"
            report |= {"error": f"NotImplementedError: {error}", "places": places_of(error)}
        except (Exception, SystemExit) as error:  # the boundary to code that is not ours: any error is a wrong answer
            report |= describe_error(error)
        report["seconds"], report["printed"] = round(time.monotonic() - started_s, 2), printed.getvalue()
        return report

    def _run_step(
        self,
        function: Any,
        case: StepCase,
        model: DistributedDataParallel,
        step: int,
        truth: StepTruth,
    ) -> dict[str, Any]:
        """Return the words for what one step found, how often it stepped and exchanged, and what it kept at once."""
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        seen: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(flat_gradient(model.module)))
        micro_batches = make_micro_batches(case, step, self.rank)
        record = RecordExchanges(sum(p.numel() for p in model.parameters()))
        passes = RecordPasses(model, on_forward=lambda number: setattr(record, "phase", f"forward {number}"))
        with time_limit(LOOP_FACTOR * self.timeout_s), record, passes:
            loss = function(
                model, optimizer, [tuple(t.clone() for t in batch) for batch in micro_batches], truth.max_norm
            )
        return {
            "gradient": name_gradient(seen[-1], truth.gradients["right"]) if seen else "no_step",
            "fits": fit_gradient(seen[-1], truth.gradients) if seen else [],
            "num_steps": len(seen),
            "loss": name_loss(loss, truth.losses),
            "loss_fits": fit_loss(loss, truth.losses),
            "exchanges": record.num_exchanges,
            "kept_samples": passes.most_samples,
            "largest": max(len(inputs) for inputs, _ in micro_batches),
            "forward_outside": passes.forward_outside,
        }


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]), StepRun)
