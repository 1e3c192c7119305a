"""What is known of one key of DeepSpeed's JSON configuration.

Enters: nothing. Leaves: the type `Key`, of which `keys.py` and `zero_keys.py` are tables.
"""

from __future__ import annotations

from dataclasses import dataclass

RUN, ENGINE, DETAIL, OFF = "run", "engine", "detail", "off"
"""What becomes of a key.

RUN says what the run's own configuration says too, and both must agree; ENGINE is handed to DeepSpeed, which does it;
DETAIL is read only if the section around it is switched on; OFF must stay at its default, as no run here does it.
"""


@dataclass(frozen=True)
class Key:
    """One key."""

    kind: str
    """bool, count (a whole number, 0 or greater), number, text, list, section, any, or what it may be: 'a|b'."""
    default: object
    """What DeepSpeed takes where the key is left out; None may be written as null."""
    role: str
    """One of the four above."""
    does: str
    """One sentence, without a full stop."""


def section(does: str, role: str = ENGINE) -> Key:
    """Return the key of a table of further keys."""
    return Key("section", None, role, does)
