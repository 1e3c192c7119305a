"""What a rank sees of itself: where its main thread is, and which collectives it has entered.

Reads Python's frames and the flight record of `torch.distributed`, which has to be switched on before
`init_process_group`. Torch is imported by the code that is observed, never here.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from vlmcourse.notebook.hang.handlers import may_catch
from vlmcourse.notebook.hang.places import (
    FrameLine,
    find_places,
    frames_of_thread,
    frames_of_traceback,
    is_shown,
    parse,
    read_line,
)
from vlmcourse.notebook.hang.rank_state import WORLD, Collective, Group, RankState, Wait

RECORD_VARIABLE = "TORCH_FR_BUFFER_SIZE"
RECORD_ENTRIES = 256
RECENT_ENTRIES = 24
"""How many collectives of each group a rank tells about."""
SAMPLE_S = 0.05
"""For how long a main thread is watched, to see whether it computes."""
BUSY_SHARE = 0.2
"""A main thread that computes for more than this part of the time that it is watched does not wait."""
C10D = "distributed_c10d.py"
POINT_TO_POINT = ("send", "recv")
UNRECORDED = ("monitored_barrier",)
"""What leaves no entry in the flight record."""
OWN_THREADS = ("hang doctor", "hang watch")
MAX_HANDLES = 1000
IDLE_THREADS = ("TMonitor",)
"""Classes of threads that only look on, such as that of tqdm."""
SETUP = frozenset({"init_process_group", "new_group", "split_group", "_store_based_barrier", "rendezvous"})
DTYPES: dict[str, str] = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}


def record_collectives() -> None:
    """Switch the flight record on; it must be before the process group is made."""
    os.environ.setdefault(RECORD_VARIABLE, str(RECORD_ENTRIES))


class Observer:
    """Looks at the main thread and the collectives of this process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._num_before: dict[str, int] = {}
        self._thread = threading.main_thread()

    def count_from_here(self) -> None:
        """Number the collectives of every group from now on: those so far were not the person's."""
        self._num_before = {}
        for entry in read_record()[0]:
            self._num_before[entry.group] = max(entry.number, self._num_before.get(entry.group, 0))

    def observe(self, sample_s: float = 0.0) -> RankState:
        """Describe what this rank is doing; its code goes on meanwhile.

        Args:
            sample_s: for how many seconds to watch whether the main thread computes; 0 does not watch.
        """
        uses_cpu = None
        if sample_s:
            cpu_s, progress, began_s = self._cpu_s(), self._progress(), time.monotonic()
            time.sleep(sample_s)
            if self._progress() != progress:
                uses_cpu = True
            elif cpu_s is not None:
                uses_cpu = (self._cpu_s() or 0.0) - cpu_s > BUSY_SHARE * (time.monotonic() - began_s)
        frames = self._frames()
        return self._describe(frames, "running", uses_cpu)

    def observe_end(self, error: BaseException | None = None, trace: TracebackType | None = None) -> RankState:
        """Describe how this rank ended: at its end, or by an exception."""
        if error is None:
            return self._describe([], "finished", None)
        return self._describe(frames_of_traceback(trace), "failed", None, name_error(error))

    def observe_abort(self) -> RankState:
        """Describe how compiled code ends this rank, while its main thread still waits."""
        return self._describe(self._frames(), "failed", None, "compiled code gave up")

    def _describe(self, frames: Sequence[FrameLine], status: str, uses_cpu: bool | None, error: str = "") -> RankState:
        recent, is_whole = read_record()
        last = recent[-1] if recent and recent[-1].number > self._num_before.get(recent[-1].group, 0) else None
        lines = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]
        wait = find_wait(frames, recent, last if "gloo" in error.lower() else None)
        return RankState(
            rank=self.rank,
            status=status,
            stack=find_places(lines),
            wait=wait,
            uses_cpu=uses_cpu,
            recent=tuple(recent),
            groups=tuple(read_groups(self._num_before)),
            position=f"{name_position(frames)} {[(each.group, each.number, each.is_done) for each in recent[-3:]]}",
            main_cpu_s=self._cpu_s() or 0.0,
            process_cpu_s=time.process_time(),
            error=error,
            has_whole_record=is_whole,
            has_threads=has_threads(),
            may_catch=status == "running" and wait is not None and may_catch(frames),
            has_pending=has_pending(frames, recent, wait),
        )

    def _frames(self) -> list[FrameLine]:
        return frames_of_thread(self._thread.ident or 0)

    def _progress(self) -> tuple[str, list[int | None]]:
        """Return what is different once the main thread has moved on, even to the same line of a loop."""
        return name_position(self._frames()), [group.num_begun for group in read_groups(self._num_before)]

    def _cpu_s(self) -> float | None:
        """Return the processor time of the main thread; None where the machine does not tell."""
        if not hasattr(time, "pthread_getcpuclockid") or self._thread.ident is None:
            return None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))


def name_error(error: BaseException) -> str:
    """Return type and message of an exception as Python prints them: its `__str__` may itself fail."""
    return "".join(traceback.format_exception_only(error)).strip().removeprefix(f"{type(error).__module__}.")


def has_threads() -> bool:
    """Whether threads of the person's run beside the main one: they may act on what the main thread waits for."""
    known = threading.enumerate()
    if any(
        thread is not threading.main_thread()
        and thread.name not in OWN_THREADS
        and type(thread).__name__ not in IDLE_THREADS
        for thread in known
    ):
        return True
    # Compiled code runs Python in threads of its own, such as the callback of a collective.
    return bool(sys._current_frames().keys() - {thread.ident for thread in known})


def has_pending(frames: Sequence[FrameLine], recent: Sequence[Collective], wait: Wait | None) -> bool:
    """Whether something has begun that has not ended, besides what the main thread waits for.

    Messages leave no entry in gloo's flight record: their handles are looked for in the variables of the person's code.
    """
    awaited = wait.collective if wait is not None else None
    if any(not entry.is_done and entry != awaited for entry in recent):
        return True
    for frame, _ in frames:
        if is_shown(frame.f_code.co_filename):
            for value in list(frame.f_locals.values()):
                handles = value if type(value) in (list, tuple) else [value]
                if any(is_handle(each) and not each.is_completed() for each in handles[:MAX_HANDLES]):
                    return True
    return False


def read_record() -> tuple[list[Collective], bool]:
    """Return the last collectives of each group, in the order in which they began, and whether the record is whole."""
    bindings: Any = sys.modules.get("torch._C._distributed_c10d")
    if not hasattr(bindings, "_dump_fr_trace_json"):  # not imported, or only half
        return [], True
    entries = json.loads(bindings._dump_fr_trace_json()).get("entries", [])
    kept: list[Collective] = []
    num_of: dict[str, int] = {}
    for entry in sorted(entries, key=lambda entry: entry["record_id"], reverse=True):
        group = entry["process_group"][0]
        num_of[group] = num_of.get(group, 0) + 1
        if not entry["is_p2p"] and num_of[group] <= RECENT_ENTRIES:
            kept.append(read_entry(entry))
    return kept[::-1], min((entry["record_id"] for entry in entries), default=0) == 0


def read_begun(since: int) -> tuple[dict[str, list[str]] | None, int]:
    """Return the names of the collectives of each group that began since an entry of the record, and the next entry.

    None if the record does not go back so far.
    """
    bindings: Any = sys.modules.get("torch._C._distributed_c10d")
    entries = json.loads(bindings._dump_fr_trace_json()).get("entries", [])
    entries = sorted((each for each in entries if each["record_id"] >= since), key=lambda each: each["record_id"])
    begun: dict[str, list[str]] = {}
    for entry in entries:
        if not entry["is_p2p"]:
            begun.setdefault(entry["process_group"][0], []).append(read_entry(entry).op)
    is_whole = not entries or entries[0]["record_id"] == since
    return begun if is_whole else None, entries[-1]["record_id"] + 1 if entries else since


def read_entry(entry: dict[str, Any]) -> Collective:
    """Read one entry of the flight record."""
    return Collective(
        group=entry["process_group"][0],
        number=entry["collective_seq_id"],
        op=entry["profiling_name"].rpartition(":")[2],
        sizes=tuple(map(tuple, entry["input_sizes"])),
        dtypes=tuple(DTYPES.get(str(name), str(name)) for name in entry["input_dtypes"]),
        is_done=entry["retired"],
    )


def read_groups(num_before: dict[str, int]) -> list[Group]:
    """Return the process groups that this rank belongs to."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if not hasattr(module, "_world"):  # not imported, or only half
        return []
    world, found = module._world, []
    for group, ranks in list(world.pg_group_ranks.items()):
        name, num_begun = world.pg_names.get(group), None
        if name is None:
            continue
        with contextlib.suppress(RuntimeError):  # backends need not count
            num_begun = group._get_sequence_number_for_group()
        label = WORLD if group is world.default_pg else group.group_desc
        found.append(Group(name, label, tuple(sorted(ranks)), num_before.get(name, 0), num_begun))
    return found


def name_position(frames: Sequence[FrameLine]) -> str:
    """Return a text that changes whenever a thread moves on."""
    return str([(frame.f_code.co_name, line, frame.f_lasti) for frame, line in frames])


def find_wait(
    frames: Sequence[FrameLine], recent: Sequence[Collective], failed: Collective | None = None
) -> Wait | None:
    """Return what PyTorch is waiting for, as a stack and the flight record tell; None if for nothing.

    Args:
        frames: of the main thread, innermost first.
        recent: its last collectives.
        failed: the collective that an exception ended, if so: it counts as done in the record.
    """
    inner: list[FrameLine] = []
    for frame, line in frames:
        if is_shown(frame.f_code.co_filename):
            break
        inner.append((frame, line))
    pending = next((each for each in recent if not each.is_done), failed)
    calls = [frame for frame, _ in inner if frame.f_code.co_filename.endswith(C10D)]
    names = [frame.f_code.co_name for frame in calls]
    call = names[-1] if names else ""
    if any("/torch/distributed/" in frame.f_code.co_filename for frame, _ in inner):
        if names and names[0] in POINT_TO_POINT:
            return Wait(names[0], call, peer=_find_rank(calls[0].f_locals, "src", "dst"))
        if pending is not None and call not in UNRECORDED:
            root = _find_rank(calls[0].f_locals, "src", "dst") if calls else None
            return Wait("collective", call, pending, root=root)
        is_setup = any(frame.f_code.co_name in SETUP for frame, _ in inner)
        return Wait("setup" if is_setup else "object", call)
    is_backward = bool(inner) and inner[0][0].f_code.co_name == "_engine_run_backward"
    if pending is not None and is_backward:
        return Wait("collective", "", pending)
    is_handle = None if inner or not frames else waits_for_handle(frames[0][0])
    if is_handle is False:
        return None
    if is_handle is None and (inner or not _names_wait(frames)):
        return None
    kind = "collective" if pending is not None else "object"
    return Wait(kind, "", pending, is_certain=is_handle is True)


def waits_for_handle(frame: FrameType) -> bool | None:
    """Whether a frame is at `handle.wait(...)` of a collective's handle; None if that cannot be told."""
    text = _read_text(frame)
    if text and ".wait" not in text:  # a main thread that does something else is not parsed beside
        return False
    call = _read_call(text)
    if call is None:
        return None
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "wait":
        return False
    if not isinstance(call.func.value, ast.Name):
        return None
    name = call.func.value.id
    return is_handle(frame.f_locals.get(name, frame.f_globals.get(name)), "Work", "Future")


def is_handle(value: object, *names: str) -> bool:
    """Whether a value is what PyTorch returns for a call that goes on by itself: of one of these classes, or `Work`."""
    return any(kind.__name__ in (names or ("Work",)) and "torch" in kind.__module__ for kind in type(value).__mro__)


def _read_text(frame: FrameType) -> str:
    """Return the expression that a frame is at, as it stands in the source; empty where that is not known."""
    positions = next(itertools.islice(frame.f_code.co_positions(), max(frame.f_lasti, 0) // 2, None), None)
    if positions is None or None in positions:
        return ""
    first, last, begin, end = positions
    lines = [read_line(frame.f_code.co_filename, number) for number in range(first or 0, (last or 0) + 1)]
    if not lines:
        return ""
    lines[-1] = lines[-1].encode()[:end].decode(errors="replace")
    lines[0] = lines[0].encode()[begin:].decode(errors="replace")
    return "".join(lines)


def _read_call(text: str) -> ast.Call | None:
    """Return the call that an expression is; None if it is something else."""
    tree = parse(f"({text})")
    node = tree.body[0] if tree is not None and len(tree.body) == 1 else None
    return node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None


def _names_wait(frames: Sequence[FrameLine]) -> bool:
    """Whether the person's own line contains a call of something named `wait`."""
    if not frames:
        return False
    (frame, line), *_ = frames
    places = find_places([(frame.f_code.co_filename, line, "")])
    return bool(places) and re.search(r"\.wait\(", places[0].text) is not None


def _find_rank(variables: dict[str, Any], *names: str) -> int | None:
    """Return the rank, in the group of all ranks, that a call names."""
    for name in names:
        if isinstance(variables.get(name), int):
            return variables[name]
        in_group = variables.get(f"group_{name}")
        if isinstance(in_group, int):
            module: Any = sys.modules["torch.distributed.distributed_c10d"]
            with contextlib.suppress(Exception):
                return module.get_global_rank(variables.get("group") or module.GroupMember.WORLD, in_group)
    return None
