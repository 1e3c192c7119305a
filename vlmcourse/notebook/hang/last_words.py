"""Lets a process say something when compiled code gives up (`std::terminate`), just before it is aborted.

Gloo ends a rank so, from a thread of its own, when another rank sends it more than it expects. No Python exception
tells of it, but Python can still run: the main thread waits in the collective and leaves Python's lock free.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections.abc import Callable

TERMINATE_HANDLER = ctypes.CFUNCTYPE(None)
SET_TERMINATE = "_ZSt13set_terminatePFvvE"
"""`std::set_terminate(void (*)())`, as compilers name it."""

KEPT: list[object] = []
"""Handlers that compiled code may call, and that must therefore never be freed."""


def call_before_abort(function: Callable[[], object]) -> bool:
    """Call a function when compiled code gives up; then its own handler prints the reason and aborts, as always.

    Args:
        function: must be quick; what it raises is ignored.
    Returns:
        Whether that is possible here: on Linux, once torch has been imported and with it the C++ library.
    """
    if sys.platform != "linux":
        return False
    try:
        set_terminate = getattr(ctypes.CDLL("libstdc++.so.6"), SET_TERMINATE)
    except (OSError, AttributeError):
        return False
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def give_up() -> None:
        try:
            function()
        finally:
            if previous:
                TERMINATE_HANDLER(previous)()

    handler = TERMINATE_HANDLER(give_up)
    previous = set_terminate(ctypes.cast(handler, ctypes.c_void_p))
    KEPT.append(handler)
    atexit.register(set_terminate, previous)  # what gives up even later finds no Python any more
    return True
