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
from vlmcourse.grading.pair_worker import RecordCollectives, Run, describe_error, main
from vlmcourse.grading.step_cases import LEARNING_RATE, StepCase, flat_gradient, make_micro_batches, make_model
from vlmcourse.grading.step_passes import RecordPasses
from vlmcourse.grading.step_truths import fit_gradient, fit_loss, make_truths, name_gradient, name_loss


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
        max_norm, truths = make_truths(case)
        model = DistributedDataParallel(make_model(case))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for step in range(case.num_steps):
                    found = self._run_step(function, case, model, step, max_norm, truths[step][self.rank])
                    report["values"]["steps"].append(found)
        except NotImplementedError as error:
            report["status"] = "error" if str(error) else "unsolved"
            report["error"] = f"NotImplementedError: {error}"
        except (Exception, SystemExit) as error:  # the boundary to code that is not ours: any error is a wrong answer
            report |= describe_error(error)
        report["seconds"] = round(time.monotonic() - started_s, 2)
        return report

    def _run_step(
        self,
        function: Any,
        case: StepCase,
        model: DistributedDataParallel,
        step: int,
        max_norm: float,
        truth: Any,
    ) -> dict[str, Any]:
        """Return the words for what one step found, how often it stepped and exchanged, and what it kept at once."""
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        seen: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(flat_gradient(model.module)))
        micro_batches = make_micro_batches(case, step, self.rank)
        record, passes = RecordCollectives(), RecordPasses(model)
        with quiet(), time_limit(2 * self.timeout_s), record, passes:
            loss = function(model, optimizer, [tuple(t.clone() for t in batch) for batch in micro_batches], max_norm)
        num_parameters = sum(p.numel() for p in model.parameters())
        sent = sum(count for _, name, count in record.calls if name.startswith(("allreduce", "all_reduce")))
        return {
            "gradient": name_gradient(seen[-1], truth.gradients["right"]) if seen else "no_step",
            "fits": fit_gradient(seen[-1], truth.gradients) if seen else [],
            "num_steps": len(seen),
            "loss": name_loss(loss, truth.losses),
            "loss_fits": fit_loss(loss, truth.losses),
            "exchanges": sent / num_parameters,
            "kept_samples": passes.most_samples,
            "largest": max(len(inputs) for inputs, _ in micro_batches),
            "forward_outside": passes.forward_outside,
        }


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]), StepRun)
