"""Whether a setting of PyTorch's allocator is in effect, or came too late, or is none (F15).

Enters: the environment of this process and what torch has read of it. Leaves: a verdict with what to do. The variable
is read once, when torch's allocator is configured for the first time; what a script sets after that is never read, and
nothing says so.

Measured on torch 2.13.0: `PYTORCH_CUDA_ALLOC_CONF` wins where `PYTORCH_ALLOC_CONF` is set as well, against what a
comment in c10/core/AllocatorConfig.h says; the order of c10/cuda/CUDAAllocatorConfig.h is the same. Chapter 5.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

from vlmcourse.planner.allocator_settings import AllocatorSettingsError, parse_allocator_settings

NEW_NAME = "PYTORCH_ALLOC_CONF"
OLD_NAME = "PYTORCH_CUDA_ALLOC_CONF"
NAMES = (OLD_NAME, NEW_NAME)
"""In the order in which torch takes the first that is set."""


@dataclass(frozen=True)
class AllocConfVerdict:
    """What is the matter with the setting."""

    state: str
    """unset, in effect, too late, wrong (torch will refuse it), or no gpu (right, and without effect here)."""
    value: str
    """The text in the environment, with its variable, or ""."""
    fix: str
    """What to do; "" where nothing is wrong."""


def check_alloc_conf() -> AllocConfVerdict:
    """Compare the environment with what torch's allocator really uses.

    Asking torch makes it read the variable if it has not yet. So nothing is asked while none is set: a program may
    still set one.
    """
    name = next((name for name in NAMES if os.environ.get(name)), None)
    if name is None:
        return AllocConfVerdict("unset", "", "")
    text = os.environ[name]
    value = f"{name}={text}"
    if problem := find_problem(text):
        return AllocConfVerdict("wrong", value, problem)
    used = _used_settings()
    if used is None:
        return AllocConfVerdict(
            "wrong", value, "torch refuses it; see the documentation of the settings of your version"
        )
    if used != text:
        return AllocConfVerdict("too late", value, _advice(name, text, used))
    note = ""
    if os.environ.get(NEW_NAME, text) != text:
        note = f"{value} is the one that counts, {NEW_NAME}={os.environ[NEW_NAME]} is not read: set one of them only"
    if not torch.cuda.is_available():
        reason = "torch sees no GPU here: the setting is read, and changes nothing"
        return AllocConfVerdict("no gpu", value, "; ".join(filter(None, (reason, note))))
    return AllocConfVerdict("in effect", value, note)


def find_problem(text: str) -> str:
    """Return what is wrong with a text of settings, "" if nothing is.

    A threshold of garbage collection counts as right: whether a memory fraction is set, without which it does nothing,
    is for the program to know.
    """
    try:
        settings = parse_allocator_settings(text, memory_fraction=1.0)
    except AllocatorSettingsError as error:
        return str(error)
    if settings.expandable_segments and not sys.platform.startswith("linux"):
        return f"expandable_segments:True does nothing on {sys.platform}: PyTorch maps pages on Linux only"
    return ""


def _used_settings() -> str | None:
    """Return the text that torch goes by, or None if it will not read the one that is set."""
    try:
        return torch._C._accelerator_getAllocatorSettings()
    except (ValueError, RuntimeError):
        return None


def _advice(name: str, text: str, used: str) -> str:
    goes_by = f"{used!r}" if used else "the defaults"
    return (
        f"torch had configured its allocator before {name} was set, and goes by {goes_by}: set it where the process "
        f"starts ({NEW_NAME}={text} python train.py), or in the first lines of the script, above `import torch`"
    )
