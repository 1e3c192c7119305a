"""What a person can do about an error that a rank has met because of how cells run: a failure in, a line for it out."""

from __future__ import annotations

import builtins
import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from vlmcourse.notebook.failure import RankFailure
from vlmcourse.notebook.worker import GROUP_TIMEOUT_FRACTION

START_EMPTY = "Ranks start empty but for rank, world_size and device"
IN_SESSION = "The ranks of the session keep what its cells have assigned"
SESSION_LOST = "The session has ended, and this cell ran on new, empty ranks"
USUAL_IMPORTS = {
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "nn": "from torch import nn",
    "F": "import torch.nn.functional as F",
    "np": "import numpy as np",
    "pd": "import pandas as pd",
    "plt": "import matplotlib.pyplot as plt",
    **{name: f"import {name}" for name in sys.stdlib_module_names},
}
"""What people mean by a name that nobody has assigned."""
NO_GROUP = "Default process group has not been initialized"
GAVE_UP = re.compile(r"(?:Timed out waiting|[Ww]ait timeout after) (\d+)\s?ms")


@contextlib.contextmanager
def add_hint(
    namespace: Mapping[str, Any], has: str, timeout_s: float, assigned_by: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Add to a failure what to do about it, where that is known.

    Args:
        namespace: the notebook's variables.
        has: which variables the ranks have.
        timeout_s: the cell's limit.
        assigned_by: names that only some ranks of a session have, each with the magic of the cell that assigned it.
    """
    try:
        yield
    except RankFailure as failure:
        hints = [
            explain_missing_name(failure.rank_traceback, namespace, has, assigned_by or {}),
            explain_missing_group(failure.rank_traceback) if has == IN_SESSION else "",
            explain_limit(f"{failure.rank_traceback}\n{failure}", timeout_s),
        ]
        failure.args = ("\n".join(filter(None, [str(failure), *hints])),)
        raise


def explain_missing_name(
    rank_traceback: str,
    namespace: Mapping[str, Any],
    has: str = START_EMPTY,
    assigned_by: Mapping[str, str] | None = None,
) -> str:
    """Say how a rank gets a name that it has not; empty where that was not the problem."""
    found = re.search(r"^NameError: name '(\w+)' is not defined", rank_traceback, re.MULTILINE)
    if found is None or hasattr(builtins, found[1]):
        return ""
    name = found[1]
    if name in (assigned_by or {}):
        return f"  Only {(assigned_by or {})[name]} has assigned {name}: run that cell with %%torchrun, on all ranks."
    if name not in namespace:
        usual = USUAL_IMPORTS.get(name)
        return f"  {has}: {f'`{usual}`' if usual else f'define {name}'} inside the cell."
    value = namespace[name]
    if isinstance(value, ModuleType):
        statement = f"import {name}" if value.__name__ == name else f"import {value.__name__} as {name}"
        return f"  {has}: `{statement}` inside the cell."
    return f"  {has}: send the notebook's {name} with --in {name}, or define it inside the cell."


def explain_missing_group(rank_traceback: str) -> str:
    """Say how the ranks of a session get a process group again; empty where that was not the problem."""
    if NO_GROUP not in rank_traceback:
        return ""
    return (
        "  A cell has destroyed the session's process group: leave destroy_process_group() out (the session does that "
        "at its end), and begin anew with %torchrun restart."
    )


def explain_limit(text: str, timeout_s: float) -> str:
    """Say that a collective gave up because of the cell's `--timeout`; empty where another limit or none struck."""
    limit_s = timeout_s * GROUP_TIMEOUT_FRACTION
    if all(int(found) != int(limit_s * 1000) for found in GAVE_UP.findall(text)):
        return ""
    return (
        f"  A collective waits for half of --timeout at most ({limit_s:g} s of {timeout_s:g} s); more time: "
        f"--timeout {2 * timeout_s:g}."
    )
