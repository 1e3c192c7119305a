"""Where the time of an optimizer step goes on this rank: data wait, forward, backward, communication, optimizer, other.

Enters: marks, one wherever a phase of the step begins or ends. Leaves: `StepTimes`, whose parts add up to the step by
construction, since every moment lies between two marks and belongs to the innermost phase that is open there.

On a CPU a mark is a reading of `perf_counter`. On a GPU it is an event in the stream that computes, so that a phase
lasts as long as that stream was busy with it or waited in it; events are read when a later step has made them complete
anyway, and no synchronisation is added. A phase then tells what the GPU did, not when the host asked for it.

What communication holds: the time in which this rank could do nothing but wait, for data on their way and for ranks
that are late. Communication that hides behind computing is in none of the phases. By strategy:

- any: the sums over all ranks that a step makes (token counts, loss), and what clipping adds up.
- ddp, zero1, accelerate-ddp: DDP's tail, from the last gradient computed to the last all-reduce done, with the decoding
  of compressed gradients; under zero1 the broadcasts of new weights too.
- zero2, fsdp, hsdp on gloo: all-gathers and reduce-scatters that a block has to wait for. With gloo that is nearly all.
- tp, cp: the collectives inside the layers, forward and backward. pp: waits for messages of other stages.
- DeepSpeed's engines on gloo: what they wait for in backward and in their step.

It cannot be told, and is absent, where the wait is one stream's for another inside the library: zero2, fsdp, hsdp and
DeepSpeed on a GPU. What they wait is then in forward, backward and optimizer; a profiler's trace shows it. Chapter 6.

Source: torch.cuda.Event's documentation; DistributedDataParallel's design notes for the callback at backward's end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from vlmcourse import spans
from vlmcourse.parallel.phases import phase
from vlmcourse.strategies import DEEPSPEED, SHARDED

PHASES: tuple[str, ...] = (*spans.PHASES, "other")
MAX_WAITS = 16
"""Numbers of a step that tell its waits one by one; where there are more waits, neighbours are added up."""
_NOTHING = nullcontext()
Mark = Any
"""Seconds of `perf_counter`, or a CUDA event."""


@dataclass(frozen=True)
class StepTimes:
    """One optimizer step on one rank; the parts add up to `step_s`."""

    step_s: float
    data_wait_s: float
    """Samples to tensors, and their way to the device."""
    forward_s: float
    backward_s: float
    communication_s: float | None
    """In which this rank only waited; None where that cannot be told, and the waits are in the other parts."""
    optimizer_s: float
    """Zeroing, unscaling and clipping gradients, and the update."""
    other_s: float
    """Hooks, and what a pipeline does between its actions."""

    waits_s: list[float] | None = None
    """The waits in `communication_s` in their order, `MAX_WAITS` numbers at most; ranks that make the same exchanges
    have as many, so that they can be compared exchange by exchange."""

    @property
    def own_s(self) -> float | None:
        """Time of this rank's own work: what a step would take if it never waited for another rank."""
        return None if self.communication_s is None else self.step_s - self.communication_s


def tells_communication(strategy: str, device: torch.device) -> bool:
    """Whether the time that a rank waits for others can be told from its other work; see above."""
    return device.type != "cuda" or not (strategy in SHARDED or strategy in DEEPSPEED)


class StepClock:
    """Times the steps of one rank; outside of a step all its methods do nothing."""

    def __init__(self, device: torch.device | None = None, *, tells_communication: bool = True) -> None:
        """Make a clock.

        Args:
            device: of this rank; CPU by default.
            tells_communication: whether waits for other ranks are marked; see the function of this name.
        """
        self.device = device or torch.device("cpu")
        self.tells_communication = tells_communication
        self._on_gpu = self.device.type == "cuda"
        self._stack: list[str] = []
        self._marks: list[tuple[str, Mark]] = []
        self._pending: deque[list[tuple[str, Mark]]] = deque()
        self._spare: list[Any] = []
        self._owner, self._stream = 0, None

    @property
    def is_running(self) -> bool:
        """Whether a step is being timed."""
        return bool(self._stack)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one optimizer step; one that raises is forgotten."""
        self._owner = threading.get_ident()
        self._stream = torch.cuda.current_stream(self.device) if self._on_gpu else None
        self._marks = []
        self._open("other")
        try:
            yield
        except BaseException:
            self._stack, self._marks = [], []
            raise
        self._stack = []
        self._mark("")
        self._pending.append(self._marks)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count what runs inside to a phase, except for phases that open inside; a profiler's trace shows it too.

        The trace has collectives of its own, so waits inside other phases are not marked there.
        """
        return _OpenPhase(self, name) if self._stack else _NOTHING

    def turn(self, name: str) -> None:
        """Count what follows to another phase, up to the end of the one that is open."""
        if self._stack:
            self._open(name)

    def sees_this_thread(self) -> bool:
        """Whether what the calling thread waits for holds up the step.

        On a GPU backward runs in a thread of autograd, while the one that began it waits; there, the stream decides.
        """
        if not self._stack:
            return False
        if self._on_gpu:
            return torch.cuda.current_stream(self.device) == self._stream
        return threading.get_ident() == self._owner

    def take(self, *, wait: bool = False) -> list[StepTimes]:
        """Return the times of all steps that are known by now and were not returned yet, oldest first.

        Args:
            wait: for the GPU, where the last step's are not known yet; use it at the end of a run.
        """
        found = []
        while self._pending and (wait or not self._on_gpu or self._pending[0][-1][1].query()):
            marks = self._pending.popleft()
            if self._on_gpu:
                marks[-1][1].synchronize()
            found.append(self._sum(marks))
            self._spare += [mark for _, mark in marks] if self._on_gpu else []
        return found

    def _open(self, name: str) -> None:
        self._stack.append(name)
        self._mark(name)

    def _mark(self, name: str) -> None:
        """Note that phase `name` goes on from here."""
        if not self._on_gpu:
            self._marks.append((name, time.perf_counter()))
            return
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._marks.append((name, event))

    def _sum(self, marks: list[tuple[str, Mark]]) -> StepTimes:
        seconds, waits_s, before = dict.fromkeys(PHASES, 0.0), list[float](), ""
        for (name, start), (_, end) in zip(marks, marks[1:], strict=False):
            passed_s = start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
            seconds[name] += passed_s
            if name == spans.COMMUNICATION:  # a wait that opens inside of another is a part of it
                waits_s[-1:] = [waits_s[-1] + passed_s] if before == name else [*waits_s[-1:], passed_s]
            before = name
        return StepTimes(
            step_s=sum(seconds.values()),
            data_wait_s=seconds["data_wait"],
            forward_s=seconds["forward"],
            backward_s=seconds["backward"],
            communication_s=seconds["communication"] if self.tells_communication else None,
            optimizer_s=seconds["optimizer"],
            other_s=seconds["other"],
            waits_s=shorten_waits(waits_s) if self.tells_communication else None,
        )


def shorten_waits(waits_s: list[float]) -> list[float]:
    """Add up neighbours until `MAX_WAITS` numbers are left, in whole microseconds; the same way for as many waits."""
    per_number = -(-len(waits_s) // MAX_WAITS) or 1
    return [round(sum(waits_s[i : i + per_number]), 6) for i in range(0, len(waits_s), per_number)]


class _OpenPhase(AbstractContextManager[None]):
    """A phase while it is open; a class, since a generator costs several times as much for each of a step's marks."""

    __slots__ = ("_clock", "_depth", "_in_trace", "_name")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock, self._name = clock, name
        self._in_trace = _NOTHING if name == spans.COMMUNICATION else phase(name)

    def __enter__(self) -> None:
        self._depth = len(self._clock._stack)
        self._clock._open(self._name)
        self._in_trace.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._in_trace.__exit__(*error)
        clock = self._clock
        if clock._stack:
            del clock._stack[self._depth :]
            clock._mark(clock._stack[-1])


def mark_tail(clock: StepClock, model: nn.Module, loss: Tensor) -> None:
    """Let the wait at the end of DDP's backward count as communication; call it just before `loss.backward()`.

    DDP waits for its all-reduces in a callback that runs when the last gradient is computed. Callbacks run in the order
    in which they were asked for, and one asked for at backward's very beginning comes before DDP's.

    Args:
        clock: inside of phase "backward".
        model: under any strategy; only DDP has such a tail.
        loss: what backward starts from.
    """
    if not (clock.is_running and clock.tells_communication and isinstance(model, DistributedDataParallel)):
        return
    if loss.requires_grad:
        engine: Any = Variable._execution_engine
        loss.register_hook(lambda _: engine.queue_callback(lambda: clock.turn("communication")))
