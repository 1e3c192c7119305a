"""The hang doctor with real ranks: who waits where for whom, before anything is stopped."""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from notebook_kernel import Kernel, Shown, loaded_kernel, wait_until

from vlmcourse.notebook.hang import doctor as doctor_module
from vlmcourse.notebook.hang import listener as listener_module
from vlmcourse.notebook.hang.doctor import HangDoctor, watch_ranks
from vlmcourse.notebook.hang.listener import Listener
from vlmcourse.notebook.hang.observer import RECORD_VARIABLE, Observer
from vlmcourse.notebook.hang.rank_state import RankState, read_states
from vlmcourse.notebook.hang.watch import Watcher
from vlmcourse.notebook.jobs import JobFolder
from vlmcourse.notebook.rank_group import RankGroup
from vlmcourse.notebook.starting import DirectRank

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(280)]
START = """import torch, torch.distributed as dist, time
x = torch.ones(3)
dist.all_reduce(x)"""
"""Three lines: what a test adds begins in cell line 5."""
LONG_S = 200
"""A limit that a hang would reach only if it were not noticed."""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with loaded_kernel() as kernel:
        # The waits of this suite are for seconds, not the doctor's for a person.
        assert kernel.run("from vlmcourse.notebook.hang import doctor\ndoctor.QUIET_S = 1").error == ""
        yield kernel


def run(kernel: Kernel, code: str, nproc: int = 2, timeout_s: float = LONG_S) -> Shown:
    shown = kernel.run(f"%%torchrun -n {nproc} --timeout {timeout_s}\n{START}\n{textwrap.dedent(code).strip()}")
    assert shown.stderr == ""
    assert kernel.processes() == []
    return shown


def interrupt(kernel: Kernel, code: str, nproc: int = 2, after_s: float = 0.5) -> tuple[str, float]:
    """Interrupt a cell once it has printed "up"; return the message, and how many seconds it took to stop."""
    kernel.start(f"%%torchrun -n {nproc}\n{START}\n{textwrap.dedent(code).strip()}")
    kernel.wait_for_text("up")
    time.sleep(after_s)
    sent_s = time.monotonic()
    kernel.manager.interrupt_kernel()
    reply = kernel.client.get_shell_msg(timeout=60)["content"]
    took_s = time.monotonic() - sent_s
    kernel.wait_until_idle()
    assert reply["ename"] == "RanksInterrupted"
    assert reply["evalue"].startswith(f"all {nproc} ranks were stopped; nothing is left running\n")
    assert kernel.processes() == []
    return reply["evalue"].partition("\n")[2], took_s


def test_a_skipped_collective_ends_the_cell_long_before_its_time(kernel: Kernel) -> None:
    shown = run(
        kernel,
        """
        for step in range(4):
            if rank == 2 and step == 2: continue
            dist.all_reduce(x)
        dist.barrier()
        """,
        nproc=4,
    )
    assert shown.error.splitlines()[0] == (
        "RankHang: ranks 0, 1, 3 wait in all_reduce #5 (cell line 7, `dist.all_reduce(x)`); "
        "rank 2 never entered it: it waits in barrier (cell line 8, `dist.barrier()`)"
    )
    assert "Every rank must call every collective" in shown.error
    assert "All 4 ranks were stopped: none could ever have gone on." in shown.error
    assert shown.traceback == shown.error


def test_another_order_on_one_rank(kernel: Kernel) -> None:
    shown = run(
        kernel,
        """
        if rank == 0:
            dist.all_reduce(x)
            dist.barrier()
        else:
            dist.barrier()
            dist.all_reduce(x)
        """,
    )
    assert shown.error.splitlines()[0] == (
        "RankHang: ranks call different collectives: rank 0 waits in all_reduce #2 (cell line 6, `dist.all_reduce(x)`, "
        "under `if rank == 0`); rank 1 waits in barrier #2 (cell line 9, `dist.barrier()`, "
        "under the `else` of `if rank == 0`)"
    )
    assert "in the same order" in shown.error


def test_another_shape_or_dtype_or_call_is_named_although_gloo_aborts_a_rank(kernel: Kernel) -> None:
    """Gloo aborts the rank that receives more than it expects, and leaves the one that receives less waiting."""
    for other, difference, seen in (
        ("torch.ones(4 + rank)", "shape", ("float32 [4]", "float32 [5]")),
        ("torch.ones(4000 - 1000 * rank)", "shape", ("float32 [4000]", "float32 [3000]")),
        ("torch.ones(2, dtype=torch.float64 if rank else None)", "dtype", ("float32 [2]", "float64 [2]")),
    ):
        shown = run(kernel, f"x = {other}\ndist.all_reduce(x)")
        assert shown.error.splitlines()[0] == (
            f"RankFailure: ranks call all_reduce #2 with different {difference}s (cell line 6, `dist.all_reduce(x)`): "
            f"rank 0 with {seen[0]}, rank 1 with {seen[1]}"
        )
        assert f"A collective needs the same {difference} on every rank" in shown.error


def test_a_rank_that_finished_early(kernel: Kernel) -> None:
    shown = run(kernel, "if rank == 1:\n    dist.barrier()")
    assert shown.error.startswith(
        "RankFailure: rank 1 waits in barrier #2 (cell line 6, `dist.barrier()`, under `if rank == 1`); "
        "rank 0 never entered it: it had finished\n"
    )
    assert "rank 1 of 2 failed in cell, line 6" in shown.error


def test_saving_a_sharded_model_on_rank_0_only(kernel: Kernel) -> None:
    shown = run(
        kernel,
        """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        model = fully_shard(torch.nn.Linear(4, 4))
        if rank == 0:
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        dist.barrier()
        """,
    )
    assert "RankHang: rank 0 waits in " in shown.error
    assert re.search(r"cell line 9, `get_model_state_dict\(.*, under `if rank == 0`\); rank 1 never", shown.error)
    assert "call state_dict() and save on every rank" in shown.error


def test_a_cell_that_passes_its_time_says_which_rank_the_others_wait_for(kernel: Kernel) -> None:
    shown = run(kernel, "if rank == 1:\n    time.sleep(100)\ndist.barrier()", timeout_s=4)
    if shown.error.startswith("RankTimeout"):
        assert shown.error.startswith(
            "RankTimeout: stopped after 4 s: all 2 ranks were still running. More time: --timeout 8"
        )
        assert "--timeout 8\nrank 0 waits in barrier #2 (cell line 7, `dist.barrier()`)" in shown.error
    else:  # the collective's own time, half of the cell's, was over
        assert shown.error.startswith("RankFailure: rank 0 waits in barrier #2 (cell line 7, `dist.barrier()`)")
        assert "rank 0 of 2 failed in cell, line 7: RuntimeError: Timed out" in shown.error
        assert "A collective waits for half of --timeout at most (2 s of 4 s); more time: --timeout 8." in shown.error
    assert "rank 1 never entered it: it is in cell line 6, `time.sleep(100)`, under `if rank == 1`" in shown.error
    assert "It may still come" in shown.error


def test_an_interrupted_hang_is_explained(kernel: Kernel) -> None:
    text, _ = interrupt(kernel, 'print("up")\nif rank == 0:\n    dist.barrier()\nelse:\n    time.sleep(100)')
    assert text.startswith(
        "rank 0 waits in barrier #2 (cell line 7, `dist.barrier()`, under `if rank == 0`); rank 1 never entered it: "
        "it is in cell line 9, `time.sleep(100)`, under the `else` of `if rank == 0`"
    )


def test_a_rank_that_holds_pythons_lock_is_seen_by_its_stack(kernel: Kernel) -> None:
    """A long regular expression: compiled code that lets no other thread of its process run."""
    text, took_s = interrupt(
        kernel,
        """
        import re
        print("up")
        if rank == 1:
            re.match("(a*)*b", "a" * 60)
        dist.barrier()
        """,
    )
    assert "rank 0 waits in barrier #2 (cell line 9" in text
    assert "rank 1 has not entered it: it is in compiled code, called from cell line 8, `re.match(" in text
    assert took_s < 10


def test_an_interrupted_computation_is_not_called_a_hang_and_stops_soon(kernel: Kernel) -> None:
    text, took_s = interrupt(kernel, 'print("up")\nwhile True:\n    rank + 1')
    assert re.fullmatch(r"ranks 0, 1 are still computing in cell line \d, `.*`", text.replace("; rank", "; rank"))
    assert took_s < 5


def test_an_interrupted_loop_of_collectives_that_goes_well_is_not_called_a_hang(kernel: Kernel) -> None:
    """At any moment a rank waits in one of them, and the other one seems to be missing."""
    text, _ = interrupt(kernel, 'print("up")\nx = torch.ones(100_000)\nwhile True:\n    dist.all_reduce(x)')
    assert "still computing in cell line" in text
    assert "entered it" not in text


def test_messages_that_nobody_sends_are_named(kernel: Kernel) -> None:
    text, _ = interrupt(kernel, 'print("up")\ndist.recv(x, src=1 - rank)')
    assert text.startswith(
        "rank 0 waits to receive from rank 1 (cell line 6, `dist.recv(x, src=1 - rank)`); "
        "rank 1 waits to receive from rank 0"
    )


def test_ranks_that_all_receive_end_the_cell_although_handles_of_before_are_still_in_variables(kernel: Kernel) -> None:
    shown = run(
        kernel,
        """
        handle = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
        handle.wait()
        dist.recv(x, src=1 - rank)
        """,
    )
    assert shown.error.startswith("RankHang: rank 0 waits to receive from rank 1 (cell line 7, `dist.recv(")
    assert "Every send needs a receive of its partner" in shown.error


def test_groups_of_a_device_mesh_are_named(kernel: Kernel) -> None:
    shown = run(
        kernel,
        """
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        if rank != 3:
            dist.all_reduce(x, group=mesh["tp"].get_group())
        dist.barrier()
        """,
        nproc=4,
    )
    assert shown.error.splitlines()[0] == (
        "RankHang: rank 2 waits in all_reduce #1 of group mesh_tp (ranks 2, 3) (cell line 8, `dist.all_reduce(x, "
        'group=mesh["tp"].get_group())`, under `if rank != 3`); '
        "rank 3 never entered it: it waits in barrier #2 (cell line 9, `dist.barrier()`)"
    )


def test_ranks_that_wait_for_a_slow_one_are_left_alone_and_the_person_is_told_once(kernel: Kernel) -> None:
    kernel.run("doctor.SLOW_S, slow_s = 3, doctor.SLOW_S")
    shown = run(
        kernel,
        """
        if rank == 1:
            end_s = time.monotonic() + 8
            while time.monotonic() < end_s:
                sum(range(1000))
        dist.all_reduce(x)
        print("done")
        """,
    )
    kernel.run("doctor.SLOW_S = slow_s")
    assert shown.error == ""
    assert shown.lines(0) == shown.lines(1) == ["done"]
    told = [line for line in shown.stdout.splitlines() if "has not entered it" in line]
    assert len(told) == 1
    assert re.search(r"^the ranks went on after \d+ s$", shown.stdout, re.MULTILINE)
    assert re.match(
        r"no output for \d+ s; the ranks may only be slow. If this goes on: "
        r"rank 0 waits in all_reduce #2 \(cell line 9, .*\); rank 1 has not entered it so far: it is in cell line [78]",
        told[0],
    )


def test_one_transfer_that_takes_long_is_not_called_a_hang(kernel: Kernel) -> None:
    """Both ranks stand in the same collective; the doctor looks often enough to be wrong if it could be."""
    shown = run(kernel, 'big = torch.ones(100_000_000)\ndist.all_reduce(big)\nprint("done", big[-1].item())')
    assert shown.error == ""
    assert shown.lines(0) == ["done 2.0"]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            """
            import contextlib
            from datetime import timedelta
            @contextlib.contextmanager
            def tolerate():
                try:
                    yield
                except RuntimeError:
                    print("gave up")
            short = dist.new_group(timeout=timedelta(seconds=7))
            with tolerate():
                if rank == 0:
                    dist.barrier(group=short)
            dist.barrier()
            """,
            id="a collective whose failure is caught",
        ),
        pytest.param(
            """
            import threading
            beside = dist.new_group()
            def feed():
                time.sleep(7)
                dist.broadcast(x, 0, group=beside)
            if rank == 0:
                threading.Thread(target=feed).start()
            else:
                dist.broadcast(x, 0, group=beside)
            dist.barrier()
            """,
            id="a thread acts",
        ),
        pytest.param(
            """
            handle = dist.all_reduce(x, async_op=True) if rank == 0 else None
            if rank == 0:
                time.sleep(7); dist.send(torch.ones(1), 1); handle.wait()
            else:
                dist.recv(torch.ones(1), 0); dist.all_reduce(x)
            """,
            id="a line that sleeps before it waits",
        ),
        pytest.param(
            """
            import threading
            def send():
                time.sleep(5)
                dist.send(x, 1 - rank)
            sender = threading.Thread(target=send)
            sender.start()
            dist.recv(torch.ones(3), 1 - rank)
            sender.join(); dist.barrier()
            """,
            id="a thread sends",
        ),
    ],
)
def test_ranks_that_can_still_go_on_are_left_alone(kernel: Kernel, body: str) -> None:
    shown = run(kernel, f"{textwrap.dedent(body)}\nprint('done')")
    assert shown.error == ""
    assert all("done" in shown.lines(rank) for rank in (0, 1))


def test_a_handle_that_is_waited_for_in_vain_ends_the_cell(kernel: Kernel) -> None:
    shown = run(
        kernel,
        """
        if rank == 0:
            handle = dist.all_reduce(x, async_op=True)
            handle.wait()
        else:
            dist.recv(x, 0)
        """,
    )
    assert shown.error.startswith("RankHang: rank 0 waits in all_reduce #2 (cell line 7, `handle.wait()`")


def test_a_scatter_with_a_late_rank_accuses_nobody_of_another_dtype(kernel: Kernel) -> None:
    shown = run(
        kernel,
        """
        if rank == 2:
            time.sleep(60)
        dist.scatter(torch.zeros(1), [torch.ones(1)] * 3 if rank == 0 else None, src=0)
        """,
        nproc=3,
        timeout_s=14,
    )
    assert "different" not in shown.error
    assert "rank 2" in shown.error.splitlines()[0]


def test_a_second_interrupt_does_not_wait_for_answers(kernel: Kernel) -> None:
    kernel.run("doctor.HURRIED_ANSWER_S, hurried_s = 60, doctor.HURRIED_ANSWER_S")
    kernel.start(f'%%torchrun -n 2\n{START}\nimport re\nprint("up")\nre.match("(a*)*b", "a" * 60)')
    kernel.wait_for_text("up")
    time.sleep(0.3)
    kernel.manager.interrupt_kernel()
    time.sleep(1)
    sent_s = time.monotonic()
    kernel.manager.interrupt_kernel()
    reply = kernel.client.get_shell_msg(timeout=90)["content"]
    kernel.wait_until_idle()
    assert reply["ename"] == "RanksInterrupted"
    assert time.monotonic() - sent_s < 20
    assert kernel.processes() == []
    kernel.run("doctor.HURRIED_ANSWER_S = hurried_s")


def test_ranks_are_not_even_asked_to_end_after_a_second_interrupt(tmp_path: Path) -> None:
    class InterruptedTwice(HangDoctor):
        def look(self, group: RankGroup) -> bool:
            if (tmp_path / "up").exists():
                raise KeyboardInterrupt
            return False

        def examine(self, group: RankGroup, is_hurried: bool = False) -> None:
            raise KeyboardInterrupt

    script = f"""
import pathlib, signal, time
signal.signal(signal.SIGINT, lambda *_: pathlib.Path({str(tmp_path / "asked")!r}).touch())
pathlib.Path({str(tmp_path / "up")!r}).touch()
while True:
    time.sleep(1)
"""
    group = RankGroup(tmp_path, None, None, None)
    group.start(0, lambda env: DirectRank([sys.executable, "-S", "-c", script], env, tmp_path), dict(os.environ))
    with pytest.raises(KeyboardInterrupt):
        watch_ranks(group, time.monotonic() + 60, InterruptedTwice(JobFolder(tmp_path), print))
    group.drain()
    assert [end.exit_code for end in group.ends] == [-signal.SIGKILL]
    assert not (tmp_path / "asked").exists()


def test_a_rank_listens_in_one_folder_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORD_VARIABLE, "16")
    folders = [tmp_path / "first", tmp_path / "second"]
    listener = Listener(0)
    for folder in folders:
        folder.mkdir()
        listener.open(folder)
        with open(folder / "ask-0", "w") as fifo:
            fifo.write("1 0.0\n")
        assert wait_until((folder / "state-0-1.json").exists, within_s=20)
    state = read_states({0: folders[1] / "state-0-1.json"})[0]
    assert (state.rank, state.status, state.wait) == (0, "running", None)
    assert [threads.name for threads in threading.enumerate()].count("hang doctor") == 1
    listener.close()
    assert wait_until(lambda: "hang doctor" not in [each.name for each in threading.enumerate()], within_s=20)


def test_a_look_that_fails_is_answered_with_its_reason_and_the_next_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fickle(Observer):
        def observe(self, sample_s: float = 0.0) -> RankState:
            if sample_s:
                raise KeyError("gone")
            return super().observe(sample_s)

    monkeypatch.setenv(RECORD_VARIABLE, "16")
    monkeypatch.setattr(listener_module, "Observer", Fickle)
    monkeypatch.setattr(doctor_module, "ANSWER_S", 30.0)
    ranks: Any = types.SimpleNamespace(unfinished=(0,), ends=(), size=1)
    listener, doctor = Listener(0), HangDoctor(JobFolder(tmp_path), print)
    listener.open(tmp_path)
    doctor.examine(ranks)
    assert doctor.diagnosis is None
    assert doctor._unseen == {0: "it could not look at itself: KeyError: 'gone'"}
    assert list(tmp_path.glob("state-0-*.json")) and not (tmp_path / "stack-0.txt").read_text()
    monkeypatch.setattr(doctor_module, "SAMPLE_S", 0.0)
    doctor.examine(ranks)
    assert doctor.diagnosis is not None and doctor.diagnosis.finding.startswith("rank 0 is in ")
    listener.close()
    assert wait_until(lambda: "hang doctor" not in [each.name for each in threading.enumerate()], within_s=20)


SCRIPT = """
import os, sys, time
from vlmcourse.notebook import hang
hang.watch(sys.argv[1], stall_s=2)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.ones(3)
dist.all_reduce(x)
if rank == 1:
    while not os.path.exists(sys.argv[1] + "/told"):
        time.sleep(0.1)
dist.all_reduce(x)
print("went on", x[0].item(), flush=True)
dist.destroy_process_group()
"""


def test_a_script_under_torchrun_prints_its_own_diagnosis_once_and_goes_on(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "logs"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [*command, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        lines = []
        while "hang.watch" not in "".join(lines):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        time.sleep(3)  # it would be told again now
        (folder / "told").touch()
        out, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    errors = "".join(lines) + errors
    assert process.returncode == 0, errors
    assert out.count("went on") == out.count("4.0") == 2  # both ranks write to one stream
    assert errors.count("hang.watch: no progress for") == 1
    assert "rank 0 waits in all_reduce #2 (train.py:12, `dist.all_reduce(x)`); " in errors
    assert "rank 1 never entered it: it is in train.py:11, `time.sleep(0.1)`, under `if rank == 1`" in errors


def test_a_watcher_says_why_a_rank_has_not_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(atexit, "register", lambda function: None)
    watchers = [Watcher(tmp_path, 1.0, rank, 4) for rank in range(3)]
    assert watchers[0]._explain_silence(3) == "it does not watch itself (hang.watch has not been called there)"
    assert watchers[0]._explain_silence(1) == "its watcher did not answer within 3 s"
    monkeypatch.setattr(watchers[1]._observer, "observe", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        watchers[1].run()
    assert watchers[0]._explain_silence(1) == "its watcher failed with ZeroDivisionError: division by zero"
    child = subprocess.Popen(["true"])
    child.wait()
    watchers[2]._about.write_text(json.dumps({**watchers[2]._about_process, "pid": child.pid}))
    assert watchers[0]._explain_silence(2).startswith("had ended its process without a word")


def test_watching_needs_a_launcher_and_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vlmcourse.notebook import hang

    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="start the script with torchrun"):
        hang.watch(tmp_path)
    with pytest.raises(ValueError, match="stall_s = 0: must be more than 0"):
        hang.watch(tmp_path, stall_s=0)
