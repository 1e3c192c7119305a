"""Calls of a learner's function that must find its answer itself, not ask the package.

Enters: a learner's function, its arguments, and the modules that hold the answer. Leaves: an `Outcome`, with an error
where one of them was asked. Left out: what the function does in other threads.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from vlmcourse.grading.checks import ARITHMETIC, CALL_LIMIT_S, Outcome, call


def call_plainly(
    function: Any,
    *args: Any,
    module: str | tuple[str, ...],
    limit_s: float = CALL_LIMIT_S,
    advice: str = ARITHMETIC,
) -> Outcome:
    """Call a learner's function as `call` does; a call of the module's functions is an error.

    Args:
        function: the learner's.
        args: what it is called with.
        module: the full name of the module that answers the exercise, or of several.
        limit_s: as in `call`.
        advice: as in `call`.
    """
    modules = (module,) if isinstance(module, str) else module
    asked: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__") in modules:
            asked.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        outcome = call(function, *args, limit_s=limit_s, advice=advice)
    finally:
        sys.setprofile(before)
    if asked:
        return Outcome(error=f"{asked[0]} holds the answer and is not meant here: use plain arithmetic")
    return outcome
