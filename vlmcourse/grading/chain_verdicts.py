"""What is wrong with a run of a chain, part by part, in words: lab 4.1 b.

Enters: what `record_run` measured of an answer, or the error that it raised. Leaves: problems by part of the grade.
Masks drawn anew are seen by the masks themselves and cost their own part only, not that of the gradients too.
"""

from __future__ import annotations

from torch import Tensor

from vlmcourse.grading.chain_runs import RunCase, RunRecord, record_run, run_reference
from vlmcourse.grading.checks import Outcome

SHARES = {"output": 0, "gradients": 2, "calls": 1, "bytes": 1, "masks": 1, "generator": 1}
"""Of six points; they count only where the output is right and covered layers really ran again in backward."""
TOLERANCE = 1e-5
"""Relative length of a gradient's difference: fp32 sums in another order."""
STATE_BYTES = 5056
"""The state of a CPU's generator, as `torch.get_rng_state` returns it."""
SPARE_BYTES = 2 * STATE_BYTES
"""For each segment: a copy of the state before it and of the one after it. Two segments' are less than one input."""
PEAK_SLACK = 1.2
"""Bytes alive at most in backward, as a multiple of the library's: what is let go of when differs from way to way."""

NOT_AGAIN = "did not run again in backward"
LIBRARY = "torch.utils.checkpoint did the work"
NOT_RECORDED = (
    "autograd records your function only if one of its tensors needs a gradient, and here the weights do, not the input"
)


def judge_run(outcome: Outcome, case: RunCase) -> dict[str, str]:
    """Return what is wrong with one run, by part; "" for a part that could not be judged."""
    if outcome.error:
        return dict.fromkeys(SHARES, "") | {"output": f"{outcome.error}"}
    got: RunRecord = outcome.value
    expected = record_run(run_reference, case, allow_library=True)
    found: dict[str, str] = {}
    if not isinstance(got.output, Tensor):
        shown = "None" if got.output is None else type(got.output).__name__
        return dict.fromkeys(SHARES, "") | {"output": f"return the output of the last layer, a tensor, not {shown}"}
    if got.output.shape != expected.output.shape:
        shapes = f"returned shape {list(got.output.shape)}, the chain gives {list(expected.output.shape)}"
        return dict.fromkeys(SHARES, "") | {"output": f"return the output of the last layer: {shapes}"}
    if not _is_near(got.output, expected.output):
        found["output"] = "the output is not that of the chain" + (
            "; with dropout, masks are drawn in the order of the layers, once" if case.dropout else ""
        )
    if got.used_library:
        others = {part: "" for part in SHARES if part != "output"}
        return others | found | {"calls": f"{LIBRARY}: here you write it yourself"}
    found |= _judge_gradients(got, expected, case)
    found |= _judge_randomness(got, expected, case)
    found |= _judge_calls(got, expected, case)
    return found | _judge_bytes(got, expected, case)


def _judge_bytes(got: RunRecord, expected: RunRecord, case: RunCase) -> dict[str, str]:
    """Compare what is alive when forward has ended, and at most in backward."""
    spare = SPARE_BYTES * len(case.segments)
    if case.segments and got.kept > expected.kept + spare:
        plain, alone = (
            _record_library(case, segments) for segments in ([], [(i, i + 1) for i in sorted(case.covered)])
        )
        what = f"{got.kept:,} bytes are alive when forward has ended, where {expected.kept:,} are needed"
        if got.kept <= alone.kept + SPARE_BYTES * len(case.covered):
            return {
                "bytes": f"{what}: inputs of layers inside a segment are kept too, as if each layer were a segment of "
                "its own; a segment (start, end) keeps the input of layer `start` alone"
            }
        return {
            "bytes": f"{what} (nothing recomputed: {plain.kept:,}): run segments without recording, and keep only "
            "their inputs"
        }
    if case.segments and got.peak > PEAK_SLACK * expected.peak + spare:
        return {
            "bytes": f"{got.peak:,} bytes are alive at most in backward, where {expected.peak:,} are needed: make one "
            "segment again at a time, and let go of it"
        }
    return {}


def _record_library(case: RunCase, segments: list[tuple[int, int]]) -> RunRecord:
    """Measure the library on the chain of a case, with other segments."""
    return record_run(lambda layers, x, _: run_reference(layers, x, segments), case, allow_library=True)


def _judge_gradients(got: RunRecord, expected: RunRecord, case: RunCase) -> dict[str, str]:
    """Compare gradients."""
    if got.backward_error:
        hint = "" if case.needs_input_gradient else f": {NOT_RECORDED}"
        return {"gradients": got.backward_error + hint}
    found: dict[str, str] = {}
    for name, want in expected.gradients.items():
        gradient = got.gradients[name]
        if gradient is None:
            covered = name != "the input" and int(name.split(":")[0].split()[1]) in case.covered
            where = (
                "a recomputed layer: backward must go through what was made again" if covered else "the chain is cut"
            )
            if covered and not case.needs_input_gradient:
                where = f"a recomputed layer: {NOT_RECORDED}"
            found["gradients"] = f"{name} got no gradient ({where})"
            break
        # Where masks differ so must gradients: the chains without dropout tell whether they are right.
        if want is not None and not got.other_masks and not _is_near(gradient, want):
            found["gradients"] = f"the gradient of {name} is wrong"
            if name in got.earlier and _is_near(gradient, want - got.earlier[name]):
                found["gradients"] = (
                    f"the gradient that {name} had before is lost: backward must add to .grad, as with accumulation"
                )
            break
    return found


def _judge_randomness(got: RunRecord, expected: RunRecord, case: RunCase) -> dict[str, str]:
    """Compare masks of the two runs of a layer, and where the generator is afterwards."""
    found: dict[str, str] = {}
    if got.other_masks:
        found["masks"] = (
            f"layers {got.other_masks} ran again with other dropout masks, so their gradients are of another function: "
            "recomputation must draw the same dropout masks again"
        )
    if case.dropout and case.segments and got.draw != expected.draw:
        found["generator"] = (
            "after the step the generator is not where it would be without recomputation: put its state back once the "
            "masks have been drawn again"
        )
    return found


def _judge_calls(got: RunRecord, expected: RunRecord, case: RunCase) -> dict[str, str]:
    """Compare how often each layer ran."""
    if got.calls == expected.calls and got.calls_forward == expected.calls_forward:
        return {}
    if any(calls != 1 for calls in got.calls_forward):
        return {"calls": f"in forward the layers ran {got.calls_forward} times: each must run once"}
    again = [calls - 1 for calls in got.calls]
    missing = [i for i in sorted(case.covered) if again[i] < 1]
    needless = [i for i, times in enumerate(again) if times and i not in case.covered]
    if missing:
        return {"calls": f"layers {missing} are in segments and {NOT_AGAIN}"}
    if needless:
        return {"calls": f"layers {needless} are in no segment and ran again in backward"}
    return {"calls": f"in backward the layers ran {again} times: once is enough for those in segments"}


def _is_near(got: Tensor, want: Tensor) -> bool:
    return bool((got.detach() - want).norm() <= TOLERANCE * want.norm() + 1e-12)
