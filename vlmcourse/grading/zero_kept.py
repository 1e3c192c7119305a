"""What an optimizer of lab 5.1 keeps between steps, measured and not asked: in tensors, arrays, or numbers of Python.

Enters: the learner's class, and what is not the optimizer's. Leaves: bytes of what has come alive since `gc.freeze()`,
or has since been put into a container of the class or of its module, and how often that holds all parameters' numbers.
Left out: what C++ alone keeps and Python never saw.
"""

from __future__ import annotations

import array
import collections
import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vlmcourse.grading.zero_cases import ZeroCase

IN_FLIGHT_LIMIT_S = 3.0
"""Seconds that gloo's threads may take, on a busy machine, to let go of the tensors of a collective that has ended."""
NUMBER_BYTES = 4
"""What a float of Python counts: as much as the fp32 number that it stands for."""
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
BUFFERS = (bytes, bytearray, memoryview, array.array)
DATA = (Tensor, np.ndarray, np.generic, float, *BUFFERS)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What one rank keeps besides weights and gradients."""

    num_bytes: int
    """Each storage counts once."""
    copies: int
    """How many times a number for every number of every trained parameter is there."""
    in_flight: bool
    """No object of Python holds some of it: gloo may be about to let go of it."""


def find_held(answer: Any) -> list[Any]:
    """Return the data that a class and the modules of its methods hold, through containers."""
    members = [member for each in getattr(answer, "__mro__", ()) for member in vars(each).values()]
    spaces = [vars_of for member in members if (vars_of := getattr(member, "__globals__", None)) is not None]
    return _find_data([*members, *spaces], through_all=True)


def measure_kept(case: ZeroCase, answer: Any, before: Sequence[Any], not_counted: Iterable[Tensor]) -> Kept:
    """Measure what is kept; where that is too much, wait for gloo's threads to let go of what they still hold.

    Args:
        case: whose parameters were trained.
        answer: the learner's class.
        before: what `find_held` gave for it before the optimizer was built; it does not count.
        not_counted: tensors that are not the optimizer's.
    """
    not_counted, give_up_s = list(not_counted), time.monotonic() + IN_FLIGHT_LIMIT_S
    while True:
        kept = _measure_once(case, answer, [*before, *not_counted])
        if kept.num_bytes <= case.most_state_bytes or not kept.in_flight or time.monotonic() > give_up_s:
            return kept
        time.sleep(0.01)


def _measure_once(case: ZeroCase, answer: Any, not_counted: Sequence[Any]) -> Kept:
    gc.collect()
    alive = gc.get_objects()
    found = _find_data([*alive, *gc.get_referents(*alive)], through_all=False) + find_held(answer)
    seen = {_memory_of(item)[0] for item in not_counted}
    num_bytes, loose, sizes, in_flight = 0, 0, collections.Counter[int](), False
    for item in found:
        key, item_bytes, numbers = _memory_of(item)
        if key in seen:
            continue
        seen.add(key)
        num_bytes += item_bytes
        loose += isinstance(item, float)
        sizes[numbers] += 1
        in_flight |= issubclass(type(item), Tensor) and not _has_holder(item, (alive, found))
    sizes[loose] += 1
    trained = collections.Counter(case.trained_sizes)
    copies = min(sizes[size] // count for size, count in trained.items())
    copies += sum(size // sum(case.trained_sizes) * count for size, count in sizes.items())
    return Kept(num_bytes=num_bytes, copies=copies, in_flight=in_flight)


def _find_data(roots: Iterable[Any], *, through_all: bool) -> list[Any]:
    """Return data among some objects and in their containers, each once.

    Args:
        roots: where to begin.
        through_all: go into every container, and not only into those that `gc` does not list.
    """
    found, seen, waiting = list[Any](), set[int](), list(roots)
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        kind = type(item)  # what only claims to be something may fail to be asked
        if issubclass(kind, DATA):
            found.append(item)
        elif issubclass(kind, CONTAINERS) and (through_all or not gc.is_tracked(item)):
            waiting += gc.get_referents(item)
    return found


def _memory_of(item: Any) -> tuple[Any, int, int]:
    """Return what tells an item's memory from others', its bytes, and the numbers in it."""
    while isinstance(item, np.ndarray) and isinstance(item.base, (np.ndarray, Tensor)):
        item = item.base
    if isinstance(item, Tensor):
        storage = item.untyped_storage()
        return storage.data_ptr(), storage.nbytes(), storage.nbytes() // item.element_size()
    if isinstance(item, np.ndarray):
        return item.__array_interface__["data"][0], item.nbytes, item.size
    if isinstance(item, float):
        return ("number", id(item)), NUMBER_BYTES, 1
    num_bytes = item.nbytes if isinstance(item, (np.generic, memoryview)) else len(item) * getattr(item, "itemsize", 1)
    return ("object", id(item)), num_bytes, num_bytes // NUMBER_BYTES


def _has_holder(item: Any, own: Sequence[Any]) -> bool:
    """Tell whether an object of Python other than these lists of our own refers to an item."""
    return any(all(holder is not each for each in own) for holder in gc.get_referrers(item))
