"""Mark the phases of a training step, so that a profiler's trace shows them.

Enters: a name of `spans.PHASES`. Leaves: a context that a recording profiler writes down as `phase forward` and so on.
Without one it costs a look at a flag. Chapter 6.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function

from vlmcourse.spans import PHASES

PHASE_PREFIX = "phase "
"""Before the phase's name in a trace, where names of others stand too."""
_NOTHING = nullcontext()


def phase(name: str) -> AbstractContextManager[object]:
    """Return a context for what belongs to one phase of a step.

    Args:
        name: one of `spans.PHASES`.

    Raises:
        ValueError: if there is no such phase.
    """
    if name not in PHASES:
        raise ValueError(f"phase {name!r}: must be one of {', '.join(PHASES)}")
    # PyTorch's own switch: whether a profiler is on in this process.
    return record_function(PHASE_PREFIX + name) if autograd_profiler._is_profiler_enabled else _NOTHING
