"""From what every rank was doing to who waits for whom: without processes, so that every case can be had."""

import _thread
import ast
import dataclasses
import gc
import linecache
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from notebook_kernel import wait_until

from vlmcourse.notebook.hang.diagnosis import ADVICE, Diagnosis, describe_slow, diagnose
from vlmcourse.notebook.hang.handlers import may_catch
from vlmcourse.notebook.hang.observer import Observer, has_threads
from vlmcourse.notebook.hang.places import (
    add_conditions,
    find_conditions,
    frames_of_thread,
    is_shown,
    parse,
    parse_source,
    read_line,
)
from vlmcourse.notebook.hang.rank_state import (
    WORLD,
    Collective,
    Condition,
    Group,
    Place,
    RankState,
    Wait,
    from_json,
    to_json,
)
from vlmcourse.notebook.hang.situation import Situation, is_deadlock
from vlmcourse.notebook.rank_names import name_ranks

BEFORE = 1
"""Collectives of the group of all ranks before the cell: joining makes one."""


def cell(line: int, text: str = "", *conditions: Condition) -> tuple[Place, ...]:
    return (Place("cell", line, "<module>", text, conditions),)


def call(number: int, op: str = "all_reduce", shape: tuple[int, ...] = (4,), dtype="float32", group="0") -> Collective:
    before = BEFORE if group == "0" else 0
    return Collective(group, number + before, op, (shape,), (dtype,), is_done=False)


def groups_of(world_size: int, *others: Group) -> tuple[Group, ...]:
    return (Group("0", WORLD, tuple(range(world_size)), BEFORE), *others)


def waiting(rank: int, entry: Collective, stack: tuple[Place, ...], groups: tuple[Group, ...], **wait) -> RankState:
    past = tuple(
        dataclasses.replace(entry, number=n, is_done=True) for n in range(max(1, entry.number - 2), entry.number)
    )
    found = Wait("collective", wait.pop("call", entry.op), entry, **wait)
    return RankState(rank, stack=stack, wait=found, recent=(*past, entry), groups=groups)


def at_work(rank: int, last: int, stack: tuple[Place, ...], groups: tuple[Group, ...], **changes) -> RankState:
    recent = tuple(dataclasses.replace(call(n), is_done=True) for n in range(max(1, last - 2), last + 1))
    return RankState(rank, stack=stack, recent=recent, groups=groups, **changes)


def by_rank(*states: RankState) -> dict[int, RankState]:
    return {state.rank: state for state in states}


def found_in(*states: RankState, **kwargs) -> Diagnosis:
    found = diagnose(by_rank(*states), **kwargs)
    assert found is not None
    return found


WORLD_4 = groups_of(4)
TRAINER = (Place("/x/trainer.py", 118, "step", "dist.all_reduce(grad)"), *cell(9, "trainer.step()"))


def test_ranks_that_wait_and_the_one_that_did_not_come_are_named_with_their_lines() -> None:
    elsewhere = at_work(2, 40, cell(7, "if rank == 2: continue"), WORLD_4)
    found = found_in(*(waiting(rank, call(41), TRAINER, WORLD_4) for rank in (0, 1, 3)), elsewhere)
    assert found.finding == (
        "ranks 0, 1, 3 wait in all_reduce #41 (trainer.py:118, `dist.all_reduce(grad)`, called from cell line 9); "
        "rank 2 never entered it: it is in cell line 7, `if rank == 2: continue`"
    )
    assert found.kind == "slow"
    assert found.text == f"{found.finding}\n  {ADVICE['slow']}"


def test_eight_ranks_fold_into_one_phrase() -> None:
    world = groups_of(8)
    late = at_work(7, 2, cell(5, "time.sleep(9)"), world, uses_cpu=False)
    found = found_in(*(waiting(rank, call(3), cell(6, "dist.barrier()"), world) for rank in range(7)), late)
    assert found.finding == (
        "ranks 0-6 wait in all_reduce #3 (cell line 6, `dist.barrier()`); "
        "rank 7 never entered it: it is in cell line 5, `time.sleep(9)`"
    )
    assert name_ranks([0, 1, 2, 4, 5, 6, 7, 9]) == "ranks 0, 1, 2, 4-7, 9"


def test_a_rank_that_skipped_a_collective_waits_in_a_later_one() -> None:
    reduces = [waiting(rank, call(3), cell(5, "dist.all_reduce(x)"), WORLD_4) for rank in (0, 1, 3)]
    found = found_in(*reduces, waiting(2, call(3, "barrier", ()), cell(6, "dist.barrier()"), WORLD_4))
    assert found.kind == "skipped"
    assert found.finding == (
        "ranks 0, 1, 3 wait in all_reduce #3 (cell line 5, `dist.all_reduce(x)`); "
        "rank 2 never entered it: it waits in barrier (cell line 6, `dist.barrier()`)"
    )


def test_a_call_that_only_one_rank_makes_is_what_the_others_skipped() -> None:
    only = Condition(4, "rank == 2", True)
    rest = [waiting(rank, call(3), cell(6, "dist.all_reduce(x)"), WORLD_4) for rank in (0, 1, 3)]
    found = found_in(*rest, waiting(2, call(3, "barrier", ()), cell(5, "dist.barrier()", only), WORLD_4))
    assert found.kind == "skipped"
    assert found.finding.startswith(
        "rank 2 waits in barrier #3 (cell line 5, `dist.barrier()`, under `if rank == 2`); "
        "ranks 0, 1, 3 never entered it: they wait in all_reduce (cell line 6"
    )


def test_the_two_branches_of_an_if_are_another_order() -> None:
    yes, no = Condition(3, "rank == 0", True), Condition(3, "rank == 0", False)
    world = groups_of(2)
    found = found_in(
        waiting(0, call(1), cell(4, "dist.all_reduce(x)", yes), world),
        waiting(1, call(1, "broadcast"), cell(7, "dist.broadcast(y, 0)", no), world),
    )
    assert found.kind == "different_order"
    assert "rank 0 waits in all_reduce #1 (cell line 4" in found.finding
    assert "rank 1 waits in broadcast #1 (cell line 7" in found.finding
    assert "under the `else` of `if rank == 0`" in found.finding


def test_a_root_that_ran_ahead_is_compared_by_its_record() -> None:
    """A small broadcast ends on its root before anybody else has come."""
    world = groups_of(2)
    ahead = waiting(0, call(3), cell(6, "dist.all_reduce(x)"), world)
    ahead = dataclasses.replace(ahead, recent=(call(2, "broadcast"), call(3)))
    found = found_in(ahead, waiting(1, call(2), cell(5, "dist.all_reduce(x)"), world))
    assert found.kind == "skipped"
    assert "rank 1 waits in all_reduce #2 (cell line 5" in found.finding


@pytest.mark.parametrize(
    ("kind", "other", "shown"),
    [
        (
            "different_shape",
            call(2, shape=(3, 8)),
            "different shapes (cell line 5): ranks 0, 1, 3 with float32 [4], rank 2 with float32 [3, 8]",
        ),
        (
            "different_dtype",
            call(2, dtype="float64"),
            "(cell line 5): ranks 0, 1, 3 with float32 [4], rank 2 with float64 [4]",
        ),
    ],
)
def test_a_different_shape_or_dtype_is_named(kind: str, other: Collective, shown: str) -> None:
    states = [waiting(rank, call(2), cell(5), WORLD_4) for rank in (0, 1, 3)]
    found = found_in(*states, waiting(2, other, cell(5), WORLD_4))
    assert found.kind == kind
    assert shown in found.finding
    assert "all_reduce #2" in found.finding


def test_shapes_with_as_many_elements_and_collectives_with_sizes_of_their_own_are_no_difference() -> None:
    world = groups_of(2)
    for ours, theirs in (
        (call(2, shape=(2, 3)), call(2, shape=(6,))),
        (call(2, "alltoall_base", (2,)), call(2, "alltoall_base", (3,))),
        (call(2, "scatter", (2,)), call(2, "scatter", ())),
    ):
        found = found_in(waiting(0, ours, cell(5), world), waiting(1, theirs, cell(5), world))
        assert found.kind == "in_progress"


def test_a_different_root_is_named() -> None:
    world = groups_of(3)
    states = [waiting(rank, call(1, "broadcast"), cell(5), world, root=min(rank, 1)) for rank in range(3)]
    found = found_in(*states)
    assert found.kind == "different_root"
    assert found.finding == (
        "ranks call broadcast #1 with different roots (cell line 5): rank 0 with root 0, ranks 1, 2 with root 1"
    )
    found = found_in(*states[:2], dataclasses.replace(states[2], stack=cell(7)))
    assert found.finding.endswith("rank 1 with root 1 (cell line 5), rank 2 with root 1 (cell line 7)")


def test_a_rank_that_finished_early_and_one_that_died_are_named() -> None:
    world = groups_of(3)
    states = [waiting(rank, call(2), cell(5), world) for rank in (0, 1)]
    finished = RankState(2, "finished", recent=(call(1),), groups=world)
    assert found_in(*states, finished).kind == "finished_early"
    assert found_in(*states, finished).finding.endswith("rank 2 never entered it: it had finished")
    dead = found_in(*states, died={2: "was killed by SIGKILL"})
    assert (dead.kind, dead.finding.partition("; ")[2]) == ("died", "rank 2 never entered it: it was killed by SIGKILL")
    assert found_in(*states).finding.endswith("; rank 2 left no answer")
    silent = found_in(*states, silent={2: "its watcher failed"}).finding
    assert silent.endswith("; rank 2 left no answer: its watcher failed") and "never" not in silent


def test_saving_on_rank_0_only_is_recognised_by_what_it_calls() -> None:
    world = groups_of(2)
    only = Condition(3, "rank == 0", True)
    saving = (Place("/x/store.py", 8, "full_state_dict", "return gather(model)"), *cell(4, "save(model)", only))
    saves = waiting(0, call(2, "all_gather"), saving, world)
    next_step = waiting(1, call(2), cell(6, "loss.backward()"), world)
    found = found_in(saves, next_step)
    assert found.kind == "save_on_one_rank"
    assert "called from cell line 4, under `if rank == 0`" in found.finding
    assert found_in(saves, at_work(1, 1, cell(6), world, uses_cpu=True)).kind == "save_on_one_rank"
    both = found_in(saves, dataclasses.replace(saves, rank=1))
    assert both.kind == "in_progress"


def test_a_slow_rank_is_not_accused_of_a_hang() -> None:
    world = groups_of(2)
    waits = waiting(0, call(3), cell(8), world)
    computes = at_work(1, 2, cell(7, "x = x @ x"), world, uses_cpu=True)
    found = found_in(waits, computes)
    assert (found.kind, found.finding.partition("; ")[2]) == (
        "slow",
        "rank 1 has not entered it: it is still computing in cell line 7, `x = x @ x`",
    )
    line = describe_slow(by_rank(waits, computes))
    assert line.endswith("rank 1 has not entered it so far: it is still computing in cell line 7, `x = x @ x`")
    assert describe_slow(by_rank(computes, dataclasses.replace(computes, rank=0))) == ""
    silent = RankState(1, "silent", stack=cell(7, "np.sort(x)"))
    assert "it is in compiled code, called from cell line 7" in found_in(waits, silent).finding


def test_a_rank_that_is_a_collective_behind_is_slow_and_not_accused() -> None:
    """On a loaded machine: both were in #198, rank 1 has left it and waits in #199, rank 0 was not woken yet."""
    world = groups_of(2)
    ahead = waiting(1, call(199, "all_gather_single"), cell(8, "x()"), world)
    behind = waiting(0, call(198, "all_gather_single"), cell(5, "y()"), world)
    found = found_in(ahead, behind)
    assert (found.kind, found.finding) == (
        "slow",
        "rank 1 waits in all_gather_single #199 (cell line 8, `x()`); rank 0 never entered it: it waits in "
        "all_gather_single #198 (cell line 5, `y()`), which nobody is missing in",
    )
    line = describe_slow(by_rank(ahead, behind))
    assert "never" not in line and "rank 0 has not entered it so far: it waits in all_gather_single #198" in line
    assert not is_deadlock(by_rank(ahead, behind), by_rank(ahead, behind), 2)


def test_ranks_of_which_one_may_yet_come_are_named_without_never() -> None:
    waits = [waiting(rank, call(3), cell(5, "x()"), WORLD_4) for rank in (0, 1)]
    others = [at_work(rank, 2, cell(4, "z()"), WORLD_4) for rank in (2, 3)]
    assert "ranks 2, 3 have not entered it so far: they are in cell line 4" in describe_slow(by_rank(*waits, *others))
    assert "ranks 2, 3 never entered it: they are in cell line 4" in found_in(*waits, *others).finding


def test_a_rank_that_computes_inside_torch_distributed_does_not_wait() -> None:
    world = groups_of(2)
    busy = dataclasses.replace(waiting(0, call(3), cell(8), world), uses_cpu=True)
    assert found_in(busy, dataclasses.replace(busy, rank=1)).kind == "computing"


def test_messages_in_a_circle_and_groups_that_are_not_made_by_all_have_their_own_sentences() -> None:
    receives = [RankState(rank, stack=cell(5), wait=Wait("recv", "recv", peer=1 - rank)) for rank in (0, 1)]
    found = found_in(*receives)
    assert found.kind == "point_to_point"
    assert found.finding == (
        "rank 0 waits to receive from rank 1 (cell line 5); rank 1 waits to receive from rank 0 (cell line 5)"
    )
    setup = RankState(0, stack=cell(4, "dist.new_group([0])"), wait=Wait("setup", "new_group"), groups=groups_of(2))
    assert found_in(setup, at_work(1, 0, cell(6), groups_of(2))).kind == "setup"
    mixed = found_in(waiting(0, call(1), cell(6), groups_of(2)), dataclasses.replace(receives[1], groups=groups_of(2)))
    assert mixed.kind == "point_to_point"


ROWS = (Group("1", "mesh_tp", (0, 1)), Group("2", "mesh_tp", (2, 3)))
COLUMNS = (Group("3", "mesh_dp", (0, 2)), Group("4", "mesh_dp", (1, 3)))


def mesh(rank: int) -> tuple[Group, ...]:
    return groups_of(4, ROWS[rank // 2], COLUMNS[rank % 2])


def test_in_a_device_mesh_the_chain_is_followed_to_its_end() -> None:
    """Rank 0 waits for 1 in its row, 1 for 3 in its column, and 3 computes; 2 waits for 3 in its row."""
    found = found_in(
        waiting(0, call(1, group="1"), cell(4), mesh(0)),
        waiting(1, call(2, group="4"), cell(6, "dist.all_reduce(g, group=dp)"), mesh(1)),
        waiting(2, call(7, group="2"), cell(4), mesh(2)),
        RankState(3, stack=cell(9, "slow()"), recent=(call(6, group="2"), call(1, group="4")), groups=mesh(3)),
    )
    assert found.kind == "slow"
    assert "; rank 3 never entered it: it is in cell line 9, `slow()`" in found.finding
    assert "of group mesh_dp (ranks 1, 3)" in found.finding


def test_groups_taken_in_another_order_are_a_circle() -> None:
    both = (Group("1", "undefined", (0, 1)), Group("2", "undefined", (0, 1)))
    now = by_rank(
        waiting(0, call(1, group="1"), cell(4), both),
        waiting(1, call(1, group="2"), cell(7), both),
    )
    found = diagnose(now)
    assert found is not None and found.kind == "different_order"
    assert "rank 0 waits in all_reduce #1 of the group of ranks 0, 1 (cell line 4)" in found.finding
    assert is_deadlock(now, now, 2)


def test_a_deadlock_is_certain_only_if_nobody_can_move() -> None:
    world = groups_of(2)
    reduce, barrier = waiting(0, call(2), cell(4), world), waiting(1, call(2, "barrier", ()), cell(6), world)
    stuck = by_rank(reduce, barrier)
    assert is_deadlock(stuck, stuck, 2)
    assert not is_deadlock({}, stuck, 2)
    assert not is_deadlock(stuck, {0: reduce}, 2), "a rank that does not answer may be at work"
    moved = by_rank(reduce, dataclasses.replace(barrier, position="elsewhere"))
    assert not is_deadlock(stuck, moved, 2)
    transferring = by_rank(reduce, dataclasses.replace(barrier, process_cpu_s=1.0))
    assert not is_deadlock(stuck, transferring, 2)
    together = by_rank(reduce, waiting(1, call(2), cell(4), world))
    assert not is_deadlock(together, together, 2), "a large transfer over a slow network"
    for other in (at_work(1, 1, cell(6), world), RankState(1, wait=Wait("object", ""), groups=world)):
        slow = by_rank(reduce, other)
        assert not is_deadlock(slow, slow, 2)
    for shape, is_certain in (((4,), False), ((5,), True)):
        pair = by_rank(reduce, waiting(1, call(2, shape=shape), cell(4), world))
        assert is_deadlock(pair, pair, 2) is is_certain
    finished = by_rank(reduce, RankState(1, "finished", recent=(call(1),), groups=world))
    assert is_deadlock(finished, finished, 2)
    took_part = by_rank(reduce, RankState(1, "finished", recent=(call(2),), groups=world))
    assert not is_deadlock(took_part, took_part, 2)


def test_a_transfer_in_one_group_keeps_those_that_wait_for_its_members_alive() -> None:
    transfer = [waiting(rank, call(1, group="1"), cell(4), mesh(rank)) for rank in (0, 1)]
    others = [waiting(rank, call(2), cell(6), mesh(rank)) for rank in (2, 3)]
    now = by_rank(*transfer, *others)
    assert not is_deadlock(now, now, 4)


def test_a_collective_that_may_have_left_the_record_is_not_called_missing() -> None:
    state = at_work(0, 600, cell(4), groups_of(2), has_whole_record=False)
    assert state.may_have_entered("3", 1)
    assert not state.may_have_entered("0", 900)
    assert not at_work(0, 600, cell(4), groups_of(2)).may_have_entered("3", 1)
    counted = dataclasses.replace(state, groups=(Group("3", "", (0, 1), num_begun=4),))
    assert [counted.may_have_entered("3", number) for number in (4, 5)] == [True, False]


def test_a_message_is_waited_for_in_vain_if_its_sender_waits_for_something_else() -> None:
    world = groups_of(2)
    reduce = waiting(0, call(1), cell(4), world)
    for peer, is_certain in ((0, True), (None, False)):
        receives = RankState(1, stack=cell(5), wait=Wait("recv", "recv", peer=peer), groups=world)
        now = by_rank(reduce, receives)
        assert is_deadlock(now, now, 2) is is_certain


def messages(*waits: Wait | None) -> dict[int, RankState]:
    """Ranks in sends and receives; None for one that has not come so far."""
    world = groups_of(len(waits))
    return by_rank(*(RankState(rank, stack=cell(5), wait=wait, groups=world) for rank, wait in enumerate(waits)))


def receive(peer: int | None) -> Wait:
    return Wait("recv", "recv", peer=peer)


def send(peer: int) -> Wait:
    return Wait("send", "send", peer=peer)


@pytest.mark.parametrize(
    ("waits", "is_certain"),
    [
        pytest.param((receive(1), receive(0)), True, id="both receive"),
        pytest.param((send(1), send(0)), True, id="both send"),
        pytest.param((receive(1), receive(2), receive(0)), True, id="a circle"),
        pytest.param((receive(1), send(0)), False, id="they meet, if their tags do"),
        pytest.param((receive(None), receive(0)), False, id="one receives from any rank"),
        pytest.param((receive(1), receive(0), None), False, id="a third rank is at work"),
        pytest.param((receive(1), None), False, id="the partner has not come so far"),
        pytest.param((receive(2), receive(2), send(0)), False, id="one waits for its turn"),
    ],
)
def test_messages_alone_are_a_deadlock_only_if_none_can_meet_its_partners(waits, is_certain: bool) -> None:
    now = messages(*waits)
    assert is_deadlock(now, now, len(waits)) is is_certain


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"has_pending": True}, id="a message is under way"),
        pytest.param({"has_threads": True}, id="a thread may send"),
        pytest.param({"may_catch": True}, id="it may be caught"),
        pytest.param({"process_cpu_s": 1.0}, id="something is transferred"),
        pytest.param({"position": "elsewhere"}, id="it moved"),
        pytest.param({"status": "finished", "wait": None}, id="one has finished, and may have sent something"),
        pytest.param({"wait": dataclasses.replace(receive(0), is_certain=False)}, id="only the line's text says so"),
    ],
)
def test_messages_of_which_one_may_yet_come_are_no_deadlock(change: dict[str, object]) -> None:
    before = messages(receive(1), receive(0))
    assert is_deadlock(before, before, 2)
    now = {**before, 1: dataclasses.replace(before[1], **change)}  # type: ignore[arg-type]
    assert not is_deadlock(before, now, 2)


CONTEXTS = """
import contextlib
class no_grad:
    def __enter__(self): pass
    def __exit__(self, *error): return False
@contextlib.contextmanager
def tolerate():
    try: yield
    except RuntimeError: pass
def steps():
    yield probe()
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("probe()", False),
        ("with no_grad(): probe()", False),
        ("with no_grad() as a, no_grad():\n  for _ in range(1):\n    probe()", False),
        ("[next(steps()) for _ in (1,)]", False),
        ("try: pass\nexcept ValueError: pass\nprobe()", False),
        ("try: 1 / 0\nexcept ZeroDivisionError as error: probe()", False),
        ("try: probe()\nexcept ValueError: pass", True),
        ("try: probe()\nfinally: x = 1", True),
        ("with contextlib.suppress(RuntimeError): probe()", True),
        ("with tolerate(): probe()", True),
        ("with no_grad():\n  with tolerate():\n    probe()", True),
        ("exec('try: probe()\\nexcept ValueError: pass')", True),
        ("exec('with no_grad(): probe()')", True),  # its source is not known
        ("def f():\n  try: g()\n  except ValueError: pass\ndef g(n=20): g(n - 1) if n else probe()\nf()", True),
    ],
)
def test_an_error_may_be_caught_unless_everything_around_is_known_to_let_it_pass(
    code: str, expected: bool, tmp_path: Path
) -> None:
    found: list[bool] = []

    def probe() -> None:
        frames, here = frames_of_thread(threading.get_ident()), sys._getframe()
        outer = next(index for index, (frame, _) in enumerate(frames) if frame is test)
        inner = next(index for index, (frame, _) in enumerate(frames) if frame is here)
        found.append(may_catch(frames[inner + 1 : outer]))

    test, source = sys._getframe(), tmp_path / "source.py"
    source.write_text(CONTEXTS + code)
    exec(compile(source.read_text(), str(source), "exec"), {"probe": probe})
    assert found == [expected]


def test_a_thread_that_only_the_interpreter_knows_may_act() -> None:
    before, lock = has_threads(), threading.Lock()
    with lock:
        _thread.start_new_thread(lambda: lock.acquire(), ())
        time.sleep(0.05)
        assert has_threads()
    assert wait_until(lambda: has_threads() is before, within_s=5)


def test_a_person_is_told_of_messages_that_wait_but_not_of_ranks_that_are_starting() -> None:
    line = describe_slow(messages(receive(1), receive(0)))
    assert line.startswith("rank 0 waits to receive from rank 1 (cell line 5); rank 1 waits to receive from rank 0")
    starting = RankState(0, wait=Wait("setup", "init_process_group"), groups=groups_of(2))
    assert describe_slow(by_rank(starting)) == ""
    assert describe_slow(by_rank(waiting(0, call(1), cell(4), groups_of(2)))) == ""  # rank 1 does not listen yet


def test_a_collective_that_backward_began_gets_advice_about_batches() -> None:
    world = groups_of(2)
    backward = waiting(1, call(8), cell(7, "loss.backward()"), world, call="")
    finished = RankState(0, "finished", recent=(call(7),), groups=world)
    assert found_in(finished, backward).text.endswith("give every rank as many batches.")
    assert "DDP averages" in found_in(waiting(0, call(8, "barrier", ()), cell(9), world), backward).text
    assert "DDP" not in found_in(finished, waiting(1, call(8), cell(7, "dist.all_reduce(x)"), world)).text


def test_half_imported_torch_has_no_groups_and_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    state = Observer(0).observe()
    assert (state.status, state.groups, state.recent) == ("running", (), ())


def test_a_look_from_a_thread_disturbs_no_parsing_of_the_main_thread() -> None:
    """CPython 3.11.7 counts the depth of all trees together: parsed at one time, either thread's could fail."""
    states: list[RankState] = []

    def look(phase: str, _: object) -> None:
        if phase == "start" and not states:
            thread = threading.Thread(target=lambda: states.append(Observer(0).observe()))
            thread.start()
            thread.join()

    text, threshold = "\n".join(f"x = [{n}, f(a, b=[c])]" for n in range(2000)), gc.get_threshold()
    parse_source.cache_clear()
    gc.callbacks.append(look)
    gc.set_threshold(1000, 1000, 1000)  # so that garbage is collected in the middle of the call
    try:
        ast.parse(text)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(look)
    assert [place.function for place in states[0].stack].count(
        "test_a_look_from_a_thread_disturbs_no_parsing_of_the_main_thread"
    ) == 1
    assert parse_source.cache_info().misses == 0


def test_a_source_is_read_although_another_thread_throws_it_out_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    class Vanishing(dict):
        def __getitem__(self, key: object) -> object:
            return self.pop(key)

    monkeypatch.setattr(linecache, "cache", Vanishing(cell=(0, None, ["first\n", "second\n"], "cell")))
    assert (read_line("cell", 2), read_line("cell", 3)) == ("second\n", "")
    assert read_line(__file__, 1).startswith('"""From what') and __file__ not in linecache.cache
    assert read_line("no such file", 1) == read_line("<string>", 1) == ""


def test_what_parses_at_the_same_time_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([SystemError("AST constructor recursion depth mismatch"), ast.parse("x")])

    def parse_once(_: str) -> ast.Module:
        answer = next(answers)
        if isinstance(answer, SystemError):
            raise answer
        return answer

    monkeypatch.setattr(ast, "parse", parse_once)
    assert isinstance(parse("x"), ast.Module)


def test_the_reader_adds_the_ifs_around_a_place(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text("if rank == 0:\n    f()\n")
    state = RankState(0, stack=(Place(str(source), 2, "<module>", "f()"), Place("cell", 3, "<module>", "run()")))
    found = add_conditions(state, ["%%torchrun -n 2", "if rank > 0:", "    run()"])
    assert [place.conditions[0].test for place in found.stack] == ["rank == 0", "rank > 0"]


def test_a_state_survives_its_file() -> None:
    state = waiting(0, call(41), TRAINER, mesh(0), root=1)
    assert from_json(to_json(state)) == state
    other = RankState(1, "failed", stack=cell(3, "x", Condition(2, "rank", False)), error="ValueError: no")
    assert from_json(to_json(other)) == other


def test_a_situation_without_waiting_ranks_has_nothing_to_say_but_what_they_do() -> None:
    assert diagnose({}) is None
    assert Situation({}).operations == []
    found = found_in(*(at_work(rank, 1, cell(3, "x @ x"), WORLD_4, uses_cpu=True) for rank in range(4)))
    assert (found.kind, found.text) == ("computing", "ranks 0-3 are still computing in cell line 3, `x @ x`")


def test_the_ifs_around_a_line_are_those_of_its_function(tmp_path) -> None:
    source = tmp_path / "x.py"
    source.write_text("if a:\n def f():\n  if b:\n   one()\n  elif c:\n   two()\n  if d: three()\n")

    def at(line: int) -> list[tuple[str, bool]]:
        return [(each.test, each.is_true) for each in find_conditions(str(source), line)]

    assert at(4) == [("b", True)]
    assert at(6) == [("b", False), ("c", True)]
    assert at(7) == [("d", True)]
    assert at(2) == []
    assert find_conditions("no such file", 1) == ()
    assert is_shown(str(source)) and not is_shown(dataclasses.__file__)
