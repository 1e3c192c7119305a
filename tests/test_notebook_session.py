"""Sessions: ranks that keep their variables from cell to cell, and never get stuck."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_kernel import Kernel, loaded_kernel, wait_until

from vlmcourse.notebook.fork_server import NUMBER
from vlmcourse.notebook.jobs import Job
from vlmcourse.notebook.rank_group import RankProcess
from vlmcourse.notebook.session import RankSession, SessionError
from vlmcourse.notebook.session_commands import SessionCommands
from vlmcourse.notebook.starting import ForkedRank, RankStarter

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with loaded_kernel() as kernel:
        yield kernel


@pytest.fixture
def session(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel with a fresh session of two ranks."""
    assert kernel.run("%torchrun start -n 2 --timeout 60").error == ""
    yield kernel
    kernel.run("%torchrun stop")
    assert kernel.processes() == []


def test_variables_and_the_group_live_from_cell_to_cell(session: Kernel) -> None:
    first = session.run("""%%torchrun
        import os, torch, torch.distributed as dist
        x = torch.full((2,), float(rank), device=device)
        process = os.getpid()
    """)
    assert first.error == first.stdout == ""
    second = session.run("""%%torchrun
        dist.all_reduce(x)
        assert process == os.getpid()
        print(x.tolist(), "on", world_size)
        rank * 10
    """)
    assert second.error == ""
    assert second.lines(0) == ["[1.0, 1.0] on 2", "0"]
    assert second.lines(1) == ["[1.0, 1.0] on 2", "10"]  # the last expression of every rank, with its tag


def test_a_warm_cell_is_quick(session: Kernel) -> None:
    session.run("%%torchrun\nimport torch")
    shown = session.run("""
import time
shell, took = get_ipython(), []
for _ in range(20):
    began = time.perf_counter()
    shell.run_cell_magic("torchrun", "", "x = rank")
    took.append(time.perf_counter() - began)
print(sorted(took)[10])
    """)
    assert float(shown.stdout) < 0.5  # 0.01 s where nothing else runs; see bench/notebook_launch.py


def test_rank_runs_a_cell_on_some_ranks(session: Kernel) -> None:
    session.run("%%torchrun\nname = f'rank {rank}'")
    shown = session.run("%%rank 1\nprint(name)\nname = 'changed'")
    assert (shown.lines(0), shown.lines(1)) == ([], ["rank 1"])
    shown = session.run("%%torchrun\nprint(name)")
    assert (shown.lines(0), shown.lines(1)) == (["rank 0"], ["changed"])
    assert session.run("%%rank 1 --out name\npass").error == ""
    assert session.run("name").outputs[-1][1]["text/plain"] == "'changed'"
    assert "the ranks are 0 to 1" in session.run("%%rank 0,2\npass").error
    assert "names no ranks" in session.run("%%rank one\npass").error
    assert session.run("%%rank 0, 1\npass").error == ""
    session.run("%%rank 0\nonly_there = 5")
    assert "Only %%rank 0 has assigned only_there" in session.run("%%torchrun\nonly_there").error
    assert "a script runs on all ranks" in session.run("%%rank 0 --save s.py\npass").error
    assert "%%rank has no flag '--tmeout'" in session.run("%%rank 0 --tmeout 3\npass").error
    assert "EOFError: a rank has no keyboard" in session.run("%%torchrun\ninput()").error
    assert session.run("%%torchrun\n%cd -q /\nimport os; print(os.getcwd())").lines(1) == ["/"]
    shown = session.run("%%rank 1\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
    assert shown.error == "" and len(shown.pictures()) == 1


def test_variables_travel_and_figures_show(session: Kernel) -> None:
    session.run("steps = 3")
    shown = session.run("""%%torchrun --in steps --out total
        import matplotlib.pyplot as plt
        plt.plot(range(steps))
        total = steps * world_size
    """)
    assert shown.error == "" and len(shown.pictures()) == 1
    assert session.run("total").outputs[-1][1]["text/plain"] == "6"
    assert "without a variable 'nothing' on rank 0" in session.run("%%torchrun --out nothing\npass").error


def test_magics_await_type_hints_main_guards_and_data_loader_workers_behave(session: Kernel) -> None:
    session.run("""
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int
        point = Point(3)
    """)
    shown = session.run("""%%torchrun --in point --out found
        import asyncio, torch
        from torch.utils.data import DataLoader, Dataset
        class Squares(Dataset):
            def __len__(self) -> int:
                return 4
            def __getitem__(self, index: int) -> int:
                return index**2 * point.x
        %time size: int = len(Squares())
        async def wait() -> int:
            await asyncio.sleep(0.01)
            return size
        found = [await wait()]
        if __name__ == "__main__":
            found += [int(value) for batch in DataLoader(Squares(), num_workers=2) for value in batch]
        point.x += rank
    """)
    assert shown.error == ""
    assert session.run("found").outputs[-1][1]["text/plain"] == "[4, 0, 3, 12, 27]"
    later = session.run("%%torchrun\nprint(point.x, [int(b) for b in DataLoader(Squares(), num_workers=1)][1])")
    assert (later.lines(0), later.lines(1)) == (["3 3"], ["4 4"])
    session.run("import threading; lock = threading.Lock()")
    assert "_thread.lock cannot travel" in session.run("%%torchrun --in lock\npass").error


def test_an_exception_on_every_rank_leaves_the_session_as_it_was(session: Kernel, tmp_path: Path) -> None:
    session.run("%%torchrun\nkept = rank + 1")
    failed = session.run("%%torchrun\nkept += 1\nraise ValueError('on purpose')")
    assert failed.error.startswith("RankFailure: rank ") and "cell, line 3: ValueError: on purpose" in failed.error
    assert "session has ended" not in failed.error
    assert session.run("%%torchrun\nprint(kept)").lines(1) == ["3"]
    mute = session.run("%%torchrun\nclass Mute(Exception):\n    def __str__(self): 1 / 0\nraise Mute")
    assert mute.error.startswith("RankFailure: rank ") and "Mute: <exception str() failed>" in mute.error
    (tmp_path / "bad.py").write_text("raise ValueError('in a file')")
    assert "ValueError: in a file" in session.run(f"%%torchrun\n%run {tmp_path / 'bad.py'}").error
    assert "ends here" in session.run("%%torchrun\nraise SystemExit('ends here')").error
    assert session.run("%%torchrun\nprint(kept)").lines(0) == ["2"]


def test_an_exception_while_another_rank_waits_ends_the_session_and_says_so(session: Kernel) -> None:
    failed = session.run("""%%torchrun
        import torch, torch.distributed as dist
        if rank == 0:
            1 / 0
        dist.all_reduce(torch.ones(1))
    """)
    assert failed.error.startswith("SessionEnded: rank 0 of 2 failed in cell, line 4: ZeroDivisionError")
    assert "rank 1 waits in all_reduce #1 (cell line 5" in failed.error
    assert "rank 0 never entered it: it failed with ZeroDivisionError" in failed.error
    assert "rank 1 did not stop within 1 s, so it had to be ended" in failed.error
    assert "begin another with %torchrun start" in failed.error
    assert session.processes() == []
    alone = session.run("%%torchrun\nprint('alone')")
    assert alone.lines(1) == ["alone"]  # without a session again
    assert "the session has ended: this cell runs on 2 ranks of its own, new and empty" in alone.stdout
    assert session.run("%torchrun restart").stdout.startswith("the session had ended: this is another\n2 ranks are")
    session.run("%%torchrun\nimport torch, torch.distributed as dist\ndist.destroy_process_group()")
    assert "begin anew with %torchrun restart" in session.run("%%torchrun\ndist.barrier()").error


def test_ranks_out_of_step_end_the_session(session: Kernel) -> None:
    failed = session.run("""%%torchrun
        import torch, torch.distributed as dist
        dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
        raise ValueError
    """)
    assert "SessionEnded" in failed.error and "out of step" in failed.error
    assert session.processes() == []


def test_a_cell_that_ends_well_out_of_step_ends_the_session_too(session: Kernel) -> None:
    """Else the first collective of the next cell would be taken for the missing one, and give a wrong number."""
    session.run("%%torchrun\nimport torch, torch.distributed as dist\nx = torch.ones(1)\ndist.barrier()")
    fine = "%%torchrun\nhandle = dist.all_reduce(x, async_op=True)\ndist.send(x, 1) if rank == 0 else dist.recv(x, 0)"
    assert session.run(fine).error == ""
    assert session.run("%%torchrun\nhandle.wait()\nif rank == 0: later = dist.isend(x, 1)").error == ""
    ended = session.run("%%torchrun\nif rank == 0: handle = dist.all_reduce(x, async_op=True)").error
    assert "SessionEnded: the ranks are out of step: rank 0 began a collective (all_reduce) that rank 1 did" in ended
    assert session.processes() == []


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            "%%torchrun\ndist.all_reduce(x, group=g, async_op=True) if rank == 0 else 1 / 0\n1 / 0", id="group"
        ),
        pytest.param("%%torchrun\ndist.broadcast(x, 1 - rank, async_op=True)\n1 / 0", id="each waits for the other"),
        pytest.param("%%torchrun\ndist.isend(x, 1) if rank == 0 else 1 / 0\n1 / 0", id="message"),
        pytest.param("%%rank 0\ndist.all_reduce(x, async_op=True)\n1 / 0", id="others not asked, failed"),
        pytest.param("%%rank 0\nhandle = dist.all_reduce(x, async_op=True)", id="others not asked"),
        pytest.param("%%rank 0 --timeout 4\ndist.barrier()", id="others not asked, waited in vain"),
    ],
)
def test_what_would_meet_the_wrong_partner_in_the_next_cell_ends_the_session(session: Kernel, cell: str) -> None:
    start = (
        "%%torchrun\nimport torch, torch.distributed as dist\nx, g = torch.ones(1), dist.new_group()\ndist.barrier(g)"
    )
    assert session.run(start).error == ""
    ended = session.run(cell).error
    assert "SessionEnded" in ended
    assert ("out of step" if cell.startswith("%%torchrun") else "which does not run this cell") in ended
    assert "of 1 " not in ended
    assert session.processes() == []


@pytest.mark.parametrize("waits", [False, True])
def test_an_interrupt_leaves_a_usable_or_an_ended_session(session: Kernel, waits: bool) -> None:
    session.run("%%torchrun\nimport time, torch, torch.distributed as dist\nkept = 5")
    what = "dist.barrier() if rank == 0 else time.sleep(50)" if waits else "time.sleep(50)"
    timer = threading.Timer(1.0, session.manager.interrupt_kernel)
    timer.start()
    shown = session.run(f"%%torchrun\n{what}")
    assert shown.error.startswith("RanksInterrupted")
    if waits:
        assert "begin another with %torchrun start" in shown.error
        assert session.processes() == []
    else:
        assert "the session goes on" in shown.error
        assert session.run("%%torchrun\ndist.barrier()\nprint(kept)").lines(1) == ["5"]


def test_a_hang_is_explained_before_the_session_ends(session: Kernel) -> None:
    session.run("%%torchrun\nimport torch, torch.distributed as dist\ndist.barrier()")
    shown = session.run("%%torchrun\nif rank == 1:\n    dist.all_reduce(torch.ones(1))")
    assert shown.error.startswith("SessionEnded: rank 1 waits in all_reduce #1 (cell line 3")
    assert "rank 0 never entered it: it had finished" in shown.error and "begin another with" in shown.error
    assert session.processes() == []


def test_an_interrupt_while_the_ranks_are_told_of_a_cell_reaches_all_of_them(session: Kernel) -> None:
    session.run("""
import os, signal, types
from vlmcourse.notebook import session as module
def write(file, data):
    module.os = os
    written = os.write(file, data)
    signal.raise_signal(signal.SIGINT)  # after the first rank, before the second
    return written
module.os = types.SimpleNamespace(**{**vars(os), "write": write})
    """)
    shown = session.run("%%torchrun\nprint('never mind', rank)")
    assert shown.error.startswith("RanksInterrupted: the cell was stopped; the session goes on with its variables")
    shown = session.run("%%torchrun\nprint('next', rank)")
    assert (shown.error, sorted(shown.stdout.splitlines())) == ("", ["[0] next 0", "[1] next 1"])


def test_a_rank_that_dies_while_a_session_starts_is_named_and_so_is_an_interrupt() -> None:
    kernel = Kernel()
    try:
        kernel.run("%load_ext vlmcourse")
        kernel.start("print('now')\n%torchrun start -n 2")
        kernel.wait_for_text("now")
        kernel.manager.interrupt_kernel()  # torch is still being imported
        reply = kernel.client.get_shell_msg(timeout=60)["content"]
        assert (reply["status"], reply["ename"]) == ("error", "RanksInterrupted")
        assert "%torchrun start -n 2 was stopped; there is no session" in reply["evalue"]
        kernel.wait_until_idle()
        kernel.run("%%torchrun\npass")  # from here on ranks are forked
        kernel.run("""
import os, signal
from vlmcourse.notebook.rank_group import RankGroup
def start(self, rank, *more, before=RankGroup.start):
    before(self, rank, *more)
    os.killpg(self.pids[rank], signal.SIGKILL)
RankGroup.start = start
        """)
        shown = kernel.run("%torchrun start -n 2")
        assert shown.error.startswith("RankFailure: rank 0 of 2 was killed by SIGKILL"), shown.error
        assert kernel.processes() == []
    finally:
        kernel.close()


def test_ranks_that_start_have_an_owner_whenever_an_interrupt_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prepare", "wait_until_ready"):
        monkeypatch.setattr(RankStarter, name, lambda self: None)
    commands = SessionCommands(RankStarter())

    def start(self: RankSession, starter: RankStarter, job: Job) -> None:
        assert commands.current is self
        raise KeyboardInterrupt

    monkeypatch.setattr(RankSession, "start", start)
    with pytest.raises(KeyboardInterrupt):
        commands.start("-n 2")
    assert commands.current is None
    commands.current = RankSession(2, 60)  # as an interrupt just before the start leaves it
    with pytest.raises(SessionError, match="there is no session: begin one"):
        commands.get("%torchrun status")
    assert commands.current is None


def test_a_cell_past_its_time_leaves_a_usable_session_where_nothing_waits(session: Kernel) -> None:
    shown = session.run("%%torchrun --timeout 1\nimport time\nkept = 7\nif rank == 1: time.sleep(50)")
    assert shown.error.startswith("RankTimeout: the cell was stopped after 1 s")
    assert "rank 0 had finished; rank 1 is in cell line 4" in shown.error
    assert session.run("%%torchrun\nprint(kept)").lines(0) == ["7"]


def test_a_killed_rank_ends_the_session_in_a_cell_and_between_cells(session: Kernel) -> None:
    shown = session.run("%%torchrun\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert "SessionEnded: rank 1 of 2 was killed by SIGKILL" in shown.error
    assert session.processes() == []
    session.run("%torchrun start -n 2")
    pids = session.run("%%torchrun\nimport os\nprint(os.getpid())")
    os.kill(int(pids.lines(0)[0]), signal.SIGKILL)
    assert wait_until(lambda: len(session.processes()) == 2, within_s=5)  # rank 1 and its guard
    time.sleep(0.5)  # until the kernel has been told
    shown = session.run("%%torchrun\nprint('never')")
    # Before the cell, or in it, if the news of its end had not come yet.
    assert re.match(r"SessionEnded: rank 0 (of 2 )?was killed by SIGKILL", shown.error)
    assert session.processes() == []
    assert session.run("%torchrun start -n 2").error == ""


def test_the_number_of_a_rank_that_ended_long_ago_may_belong_to_another_process(tmp_path: Path) -> None:
    innocent = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        status, told = os.pipe()
        os.write(told, NUMBER.pack(-9))  # what the fork server said at that time
        os.close(told)
        rank = RankProcess(0, ForkedRank(innocent.pid, output_fd=-1, lifeline_fd=-1, status_fd=status), tmp_path)
        rank.send(signal.SIGTERM)
        assert rank.end is not None and rank.end.exit_code == -9
        time.sleep(0.1)
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


def test_a_rank_that_leaves_ends_the_session(session: Kernel) -> None:
    shown = session.run("%%torchrun\nimport os\nif rank == 1: os._exit(0)")
    assert "SessionEnded: rank 1 of 2 left the session (exit code 0)" in shown.error
    assert session.processes() == []


def test_status_stop_and_restart(session: Kernel) -> None:
    session.run("%%torchrun\nx = 1")
    status = session.run("%torchrun status").stdout
    assert re.search(r"2 ranks since \d\d:\d\d:\d\d, 1 cells run, --timeout 60", status)
    assert re.search(r"rank 1: process \d+, [\d,]+ MiB in use", status)
    assert "is there already" in session.run("%torchrun start -n 3").error
    assert session.run("%torchrun start -n 2").stdout.startswith("2 ranks are there already, with their variables")
    assert "the session has 2 ranks" in session.run("%%torchrun -n 3\npass").error
    assert "3 ranks are ready" in session.run("%torchrun restart -n 3").stdout
    assert "NameError" in session.run("%%torchrun\nx").error
    assert session.run("%torchrun stop").stdout == "the session has ended\n"
    assert session.processes() == []
    for line in ("%torchrun stop", "%torchrun status"):
        assert session.run(line).stdout.startswith("There is no session")
    assert "there is no session" in session.run("%%rank 0\npass").error
    assert "did you mean 'status'" in session.run("%torchrun statsu").error


def test_a_killed_kernel_leaves_no_rank_of_a_session() -> None:
    kernel = Kernel()
    try:
        kernel.run("%load_ext vlmcourse\n%torchrun start -n 2")
        assert len(kernel.processes()) == 4  # a guard and its rank, twice
        os.kill(kernel.pid, signal.SIGKILL)
        assert wait_until(lambda: not kernel.processes(with_server=True), within_s=10)
    finally:
        kernel.close()
