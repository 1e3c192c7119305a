"""Helpers of a learner's function that are still blank: what does not depend on them is graded all the same.

Enters: a learner's function that calls other functions of the notebook, and its argument. Leaves: an `Outcome`. In its
value a `Blank` stands where a blank helper's answer would; handing a `Blank` on is fine, looking into it ends the call.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from vlmcourse.grading.checks import Outcome
from vlmcourse.grading.plain import call_plainly

BINARY = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
LOOKS = (
    *("bool", "len", "iter", "next", "getitem", "setitem", "delitem", "contains", "call", "enter", "exit", "hash"),
    *("int", "float", "index", "str", "format", "eq", "ne", "lt", "le", "gt", "ge"),
    *("abs", "neg", "pos", "invert", "round", "trunc"),
    *(f"{side}{name}" for name in BINARY for side in ("", "r")),
)
"""Of Python's special methods, those that need a value."""


class BlankUsedError(AttributeError):
    """The function needs what a blank helper has not returned; an AttributeError, so that `hasattr` says no."""


class Blank:
    """What a blank helper has not returned."""

    def __init__(self, helper: str, used: list[str]) -> None:
        """Stand for the answer of `helper`, whose name is added to `used` when it is looked into."""
        self.helper, self._used = helper, used

    def __getattr__(self, name: str) -> Any:
        return self._look()

    def _look(self, *_: Any) -> Any:
        self._used.append(self.helper)
        raise BlankUsedError(describe_need(self.helper))


for _name in LOOKS:
    setattr(Blank, f"__{_name}__", Blank._look)


def describe_need(helper: str) -> str:
    """Say why a part has no answer."""
    return f"it needs {helper}, which is not solved yet"


def call_past_blanks(function: Any, argument: Any, *, module: str | tuple[str, ...]) -> Outcome:
    """Call a learner's function as `call_plainly` does, with a `Blank` for what its blank helpers return.

    Args:
        function: the learner's.
        argument: each call gets a copy.
        module: what holds the answer.

    Returns:
        `raised` is `BlankUsedError` and `blank` the helper's name where the function needs a helper that is blank;
        `unsolved` is left for a function that is blank itself.
    """
    space: Any = getattr(function, "__globals__", None)
    used: list[str] = []
    kept: dict[str, Any] = {}

    def ask() -> Outcome:
        return call_plainly(function, copy.deepcopy(argument), module=module)

    outcome = ask()
    try:
        while outcome.unsolved and _is_helper(outcome.blank, function, space, kept):
            kept[outcome.blank] = space[outcome.blank]
            space[outcome.blank] = _stand_in(outcome.blank, used)
            used.clear()
            outcome = ask()
    finally:
        if kept:
            space.update(kept)
    if outcome.raised is BlankUsedError:
        return dataclasses.replace(outcome, error=describe_need(used[-1]), blank=used[-1])
    return outcome


def _is_helper(name: str, function: Any, space: Any, kept: dict[str, Any]) -> bool:
    """Whether a name is another function of the learner's notebook, which is not replaced yet."""
    helper = space.get(name) if isinstance(space, dict) else None
    return callable(helper) and helper is not function and name not in kept


def _stand_in(helper: str, used: list[str]) -> Callable[..., Blank]:
    return lambda *_, **__: Blank(helper, used)
