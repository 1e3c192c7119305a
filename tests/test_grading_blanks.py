"""A blank helper is named, whatever the function that calls it does with its answer."""

from __future__ import annotations

from typing import Any

import pytest

from vlmcourse.grading.blanks import BlankUsedError, call_past_blanks

USES = (
    *(f"x {sign} 2" for sign in ("+", "-", "*", "/", "//", "%", "**", "@", "&", "|", "^", "<<", ">>", "<", "==")),
    *(f"2 {sign} x" for sign in ("+", "-", "*", "/", "//", "%", "**", "@", "&", "|", "^", "<<", ">>", "<", "in")),
    *("-x", "+x", "~x", "not x", "x[0]", "x()", "x.real", "x.update(a=1)", "f'{x:.2f}'", "'%d' % x", "{x: 1}", "[*x]"),
    *(f"{name}(x)" for name in ("abs", "round", "int", "float", "complex", "len", "next", "sum", "range", "sorted")),
    *("divmod(x, 2)", "divmod(2, x)", "pow(x, 2)", "max(1, x)", "reversed(x)", "math.sqrt(x)", "math.trunc(x)"),
)
STATEMENTS = ("x += 1", "x **= 2", "x[0] = 1", "del x[0]", "a, b = x", "with x: pass", "for _ in x: pass", "if x: pass")


@pytest.mark.parametrize("line", [*USES, *STATEMENTS])
def test_whatever_looks_into_a_blank_helpers_answer_names_the_helper(line: str) -> None:
    space: dict[str, Any] = {}
    body = f"    x = helper(given)\n    {line}\n    return 1"
    exec(f"import math\ndef helper(_):\n    raise NotImplementedError\ndef mine(given):\n{body}", space)
    outcome = call_past_blanks(space["mine"], 3, module="nowhere")
    assert (outcome.raised, outcome.blank) == (BlankUsedError, "helper"), outcome
    assert outcome.error == "it needs helper, which is not solved yet"


def test_an_answer_that_is_only_handed_on_costs_nothing() -> None:
    space: dict[str, Any] = {}
    exec(
        "def helper(_):\n    raise NotImplementedError\ndef mine(n):\n    return {'one': n, 'two': (helper(n),)}", space
    )
    outcome = call_past_blanks(space["mine"], 3, module="nowhere")
    assert not outcome.error and outcome.value["one"] == 3
