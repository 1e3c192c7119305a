"""Runs learners' answers to lab 1.1 on one rank; `pair_ranks` starts it on each.

Enters: a folder with `job.pickle`. Leaves: `rank<r>.jsonl`, one line a case with what this rank found, written at once,
so that it stays whatever happens next. Ranks tell each other through a file, not through their group, how a case ended:
a collective that one of them left out must not be met by one of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vlmcourse.grading.checks import quiet, time_limit
from vlmcourse.grading.pair_cases import PARTS, Truth, make_truth, name_part_grad, name_value
from vlmcourse.grading.pair_ranks import LOOP_FACTOR
from vlmcourse.grading.traces import Printed, places_of
from vlmcourse.notebook.failure import IN_VAIN, LOST_CONNECTION

MEETING_MARGIN_S = 30.0
"""Seconds for the slowest rank to load a function and to compute a case."""
NO_TRANSFER = ("wait_tensor", "_wrap_tensor_autograd", "barrier")


class RecordCollectives(TorchDispatchMode):
    """Writes down every collective: forward or backward, its name, and how many numbers it was handed."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.calls: list[tuple[str, str, int]] = []
        self.later: set[str] = set()
        """Directions in which a collective was begun that returns at once and has to be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a call before it is made, as it may never return."""
        name = func.__name__.split(".")[0].strip("_")
        if "c10d" in func.namespace and name not in {skipped.strip("_") for skipped in NO_TRANSFER}:
            self.note(name, args)
            if _is_async(func, args):
                self.later.add(self.phase)
        return func(*args, **(kwargs or {}))

    def note(self, name: str, args: Any) -> None:
        """Write one call down."""
        self.calls.append((self.phase, name, sum(tensor.numel() for tensor in handed_in(args))))


def handed_in(args: Any) -> list[Tensor]:
    """Return the tensors that a collective is given: its only ones, or those behind the ones for its results."""
    found = [tensors for tensors in map(_tensors_of, args) if sum(tensor.numel() for tensor in tensors)]
    return found[-1] if found else []


def _is_async(func: Any, args: Any) -> bool:
    """Tell whether a call returns before its collective has ended."""
    names = [argument.name for argument in func._schema.arguments]
    if "async_op" not in names:
        return False
    at = names.index("async_op")
    return bool(args[at]) if at < len(args) else True


def _tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors_of(item)] if isinstance(value, (list, tuple)) else []


def main(folder: Path, run_class: type[Run] | None = None) -> None:
    """Run every answer; another lab brings a class of its own."""
    run_class = run_class or Run
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job = pickle.loads((folder / "job.pickle").read_bytes())
    with (folder / f"rank{rank}.jsonl").open("w", encoding="utf-8") as reports:
        run = run_class(dist.FileStore(str(folder / "store"), world_size), rank, world_size, job["timeout_s"], reports)
        with RecordCollectives():  # what is imported and made ready at first takes seconds, which no case should count
            run_class.warm_up(job["cases"][0], rank)
        run.meet("started")  # one that is slow to start must not find that the others gave its group up
        for number, answer in enumerate(job["answers"]):
            run.run_cases(number, answer, job["cases"])
        run.meet("end")
        if dist.is_initialized():
            dist.destroy_process_group()


class Run:
    """What this rank needs to run answers together with the others."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float, reports: Any) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.timeout_s, self.reports = timeout_s, reports

    @staticmethod
    def warm_up(case: Any, rank: int) -> None:
        """Import and compute once what every case needs."""
        make_truth(case, rank)

    def run_cases(self, number: int, answer: bytes, cases: list[Any]) -> None:
        """Run cases up to the first that does not end on all ranks; the group is useless after that, and left."""
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"group{number}", self.store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=self.timeout_s),
            )
        function = load_function(answer)
        self.meet(f"{number}:loaded")  # what a function imports takes seconds, and others would wait in a collective
        for index, case in enumerate(cases):
            report = self.run_case(function, case)
            report |= {"answer": number, "case": index}
            self.reports.write(json.dumps(report) + "\n")
            self.reports.flush()
            if self.meet(f"{number}:{index}", report["status"]) != {"done"}:
                dist.destroy_process_group()
                return

    def meet(self, name: str, word: str = "here") -> set[str]:
        """Wait for the others, and return what all ranks say."""
        keys = [f"{name}:{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], word)
        self.store.wait(keys, timedelta(seconds=LOOP_FACTOR * self.timeout_s + MEETING_MARGIN_S))
        return {self.store.get(key).decode() for key in keys}

    def run_case(self, function: Any, case: Any) -> dict[str, Any]:
        """Run forward and backward of one case here; whatever the answer does becomes a report."""
        truth = make_truth(case, self.rank)
        record = RecordCollectives()
        report: dict[str, Any] = {"status": "done", "error": "", "values": {}}
        started_s, printed = time.monotonic(), Printed()
        try:
            with quiet(printed), warnings.catch_warnings(), time_limit(LOOP_FACTOR * self.timeout_s), record:
                warnings.simplefilter("ignore")
                self._run(function, truth, record, report)
        except NotImplementedError as error:
            report["status"] = "error" if str(error) else "unsolved"
            report |= {"error": f"NotImplementedError: {error}", "places": places_of(error)}
        except (Exception, SystemExit) as error:  # the boundary to code that is not ours: any error is a wrong answer
            report |= describe_error(error)
        report["seconds"], report["printed"] = round(time.monotonic() - started_s, 2), printed.getvalue()
        report["calls"], report["later"] = record.calls, sorted(record.later)
        return report

    def _run(self, function: Any, truth: Truth, record: RecordCollectives, report: dict[str, Any]) -> None:
        """Fill in what output and gradients equal."""
        x = truth.x.clone().requires_grad_()
        parts = {name: part.clone().requires_grad_() for name, part in truth.parts.items()}
        y = function(x, *(parts[name] for name in PARTS))
        values = report["values"]
        if isinstance(y, Tensor):
            y = y * 1  # waits for a collective that is still under way
        values["y"] = name_value(y, truth.outputs)
        given, before = {"x": x} | parts, {"x": truth.x} | truth.parts
        values["changed"] = [name for name in given if not torch.equal(given[name], before[name])]
        if not isinstance(y, Tensor) or y.shape != truth.grad_y.shape:
            return
        values["graph"] = y.requires_grad
        record.phase = "backward"
        if y.requires_grad:
            y.backward(truth.grad_y.clone())
        values["x.grad"] = name_value(x.grad, truth.input_grads)
        for name in PARTS:
            values[f"{name}.grad"] = name_part_grad(parts[name].grad, truth.part_grads[name], self.world_size)


def load_function(answer: bytes) -> Any:
    """Return a learner's function; one that cannot be read becomes one that says so."""
    try:
        return pickle.loads(answer)
    except Exception as error:  # whatever its parts do when they are read
        message = f"your function cannot be read on a rank: {type(error).__name__}: {error}"

    def fail(*_: object) -> None:
        raise RuntimeError(message)

    return fail


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return how a case ended that raised: the learner's own error with its places, or a wait that was in vain."""
    tensors = [arg for arg in error.args if isinstance(arg, torch.Tensor)]
    named = ", ".join(f"a {type(arg).__name__} of shape {list(arg.shape)}" for arg in tensors)
    text = named or " ".join(str(error).split())
    low = text.lower()
    if isinstance(error, TimeoutError):
        return {"status": "endless", "error": "", "places": places_of(error)}
    if any(words in low for words in IN_VAIN):
        return {"status": "hung", "error": ""}
    status = "lost" if any(words in low for words in LOST_CONNECTION) else "error"
    return {"status": status, "error": f"{type(error).__name__}: {text[:200]}", "places": places_of(error)}


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]))
