"""What one rank was doing at one moment: written down by the rank, read by whoever explains a hang.

Plain data and JSON, without torch: the notebook's kernel reads it too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcourse.notebook.jobs import FILE_NAME

MAX_CODE_CHARS = 70
WORLD = "default_pg"
"""What PyTorch calls the group of all ranks."""


@dataclass(frozen=True)
class Condition:
    """An `if` around a line of code."""

    line: int
    test: str
    """Such as `rank == 0`."""
    is_true: bool
    """Whether the line is in the part that runs when the test holds; else it is in the `else` part."""


@dataclass(frozen=True)
class Place:
    """A line of the person's code, or of a library, that a rank was at."""

    file: str
    """`cell`, or the path of a source file."""
    line: int
    function: str
    text: str
    """The line itself, stripped; empty where the source is not known."""
    conditions: tuple[Condition, ...] = ()
    """The `if`s around it within its function, outermost first."""

    @property
    def is_cell(self) -> bool:
        """Whether it is in the notebook's cell."""
        return self.file == FILE_NAME

    @property
    def name(self) -> str:
        """Where it is: `cell line 7`, or `trainer.py:118`."""
        return f"cell line {self.line}" if self.is_cell else f"{Path(self.file).name}:{self.line}"

    @property
    def code(self) -> str:
        """The line in quotes, shortened; empty where the source is not known."""
        text = self.text if len(self.text) <= MAX_CODE_CHARS else self.text[: MAX_CODE_CHARS - 3] + "..."
        return f"`{text}`" if text else ""


@dataclass(frozen=True)
class Group:
    """A process group that a rank belongs to."""

    name: str
    """PyTorch's name for it, the same on all of its ranks."""
    label: str
    """What the person called it; `default_pg` for the group of all ranks."""
    ranks: tuple[int, ...]
    num_before: int = 0
    """How many collectives it had run when the cell began: those are not the person's."""
    num_begun: int | None = None
    """How many collectives and messages this rank has begun in it; None if that is not known."""

    @property
    def is_world(self) -> bool:
        """Whether this is the group of all ranks."""
        return self.label == WORLD


@dataclass(frozen=True)
class Collective:
    """One entry of the flight record."""

    group: str
    """Name of the process group."""
    number: int
    """Which collective of its group it is; the first is 1. The numbers of all ranks match."""
    op: str
    """Such as `all_reduce`."""
    sizes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that go in."""
    dtypes: tuple[str, ...]
    is_done: bool


@dataclass(frozen=True)
class Wait:
    """What PyTorch is waiting for on behalf of a rank."""

    kind: str
    """`collective`; `send` or `recv`; `setup` (joining, making or leaving a group); `object` (a handle, the store)."""
    call: str
    """The function of `torch.distributed` that the code called, such as `all_gather_object`; may be empty."""
    collective: Collective | None = None
    is_certain: bool = True
    """False if only the text of the person's line speaks for it."""
    peer: int | None = None
    """The rank at the other end of a send or a receive."""
    root: int | None = None
    """The rank that a broadcast, reduce, gather or scatter starts from or ends at."""


@dataclass(frozen=True)
class RankState:
    """What one rank was doing at one moment."""

    rank: int
    status: str = "running"
    """`running`, `finished` or `failed`; `silent` where the rank could not answer and only its stack is known; `unseen`
    where looking failed, with the reason as the error."""
    stack: tuple[Place, ...] = ()
    """Where its main thread was, innermost first, without what is inside PyTorch."""
    wait: Wait | None = None
    uses_cpu: bool | None = None
    """Whether the main thread computed while it was watched; None where it was not watched, or that is not known."""
    recent: tuple[Collective, ...] = ()
    """The last collectives of each group, in the order in which they began."""
    groups: tuple[Group, ...] = ()
    position: str = ""
    """Changes whenever the main thread has moved on."""
    main_cpu_s: float = 0.0
    """Processor time that the main thread has used so far; 0 where the machine does not tell."""
    process_cpu_s: float = 0.0
    """Processor time that the process has used so far, all threads together."""
    error: str = ""
    """The exception that ended it, in one line."""
    has_whole_record: bool = True
    """Whether the flight record goes back to the first collective; else those of rarely used groups may be lost."""
    has_threads: bool = False
    """Whether threads of the person's run beside the main one."""
    may_catch: bool = False
    """Whether an error may be caught where its main thread is: a collective that gives up there is not the end."""
    has_pending: bool = False
    """Whether it has begun a collective or a message that has not ended, besides the one that it waits in."""

    @property
    def place(self) -> Place | None:
        """Where it was: the innermost line outside of PyTorch."""
        return self.stack[0] if self.stack else None

    def may_have_entered(self, group: str, number: int) -> bool:
        """Whether this rank has entered a collective of a group, as far as its record goes back."""
        numbers = [entry.number for entry in self.recent if entry.group == group]
        if numbers or self.has_whole_record:
            return max(numbers, default=0) >= number
        begun = next((each.num_begun for each in self.groups if each.name == group), None)
        return begun is None or begun >= number


def to_json(state: RankState) -> bytes:
    """Write a state as JSON."""
    return json.dumps(dataclasses.asdict(state)).encode()


def from_json(data: bytes) -> RankState:
    """Read what `to_json` wrote."""
    known: dict[str, Any] = json.loads(data)
    known["stack"] = tuple(
        Place(**{**place, "conditions": tuple(Condition(**each) for each in place["conditions"])})
        for place in known["stack"]
    )
    known["recent"] = tuple(_read_collective(entry) for entry in known["recent"])
    known["groups"] = tuple(Group(**{**group, "ranks": tuple(group["ranks"])}) for group in known["groups"])
    wait = known["wait"]
    if wait is not None:
        collective = wait["collective"]
        known["wait"] = Wait(**{**wait, "collective": collective and _read_collective(collective)})
    return RankState(**known)


def read_states(paths: Mapping[int, Path]) -> dict[int, RankState]:
    """Return the states in those files that exist, by rank."""
    found = {}
    for rank, path in paths.items():
        with contextlib.suppress(OSError):
            found[rank] = from_json(path.read_bytes())
    return found


def _read_collective(entry: Mapping[str, Any]) -> Collective:
    return Collective(**{**entry, "sizes": tuple(map(tuple, entry["sizes"])), "dtypes": tuple(entry["dtypes"])})
