import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from notebook_kernel import wait_until

from vlmcourse.notebook import launcher
from vlmcourse.notebook.failure import (
    RankEnd,
    RankFailure,
    RankReport,
    RankTimeout,
    build_failure,
    describe_exit,
    find_root,
)
from vlmcourse.notebook.interrupts import ignore_interrupts
from vlmcourse.notebook.launcher import RanksResult, build_environment, reserve_port, run_ranks
from vlmcourse.notebook.starting import DirectRank

pytestmark = pytest.mark.timeout(120)
LIMIT_S = 60


def run(script: str, nproc: int = 2, timeout_s: float = LIMIT_S, **kwargs) -> tuple[RanksResult, list[tuple[int, str]]]:
    lines: list[tuple[int, str]] = []
    command = [sys.executable, "-S", "-c", textwrap.dedent(script)]
    kwargs.setdefault("on_line", lambda *line: lines.append(line))
    result = run_ranks(command, nproc, timeout_s=timeout_s, **kwargs)
    return result, lines


@pytest.fixture(scope="module")
def start_s() -> float:
    """How long it takes to start and end two ranks here and now: limits follow it, so that a busy machine is no bug."""
    return run("pass")[0].seconds


def marked_processes(name: str, value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_every_rank_gets_the_environment_that_torch_distributed_reads() -> None:
    script = """
        import json, os
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT EXTRA".split()
        print(json.dumps({name: os.environ[name] for name in names}))
    """
    result, lines = run(script, nproc=3, env={"EXTRA": "ä"})
    assert [end.exit_code for end in result.ends] == [0, 0, 0]
    seen = {rank: json.loads(text) for rank, text in lines}
    assert sorted(seen) == [0, 1, 2]
    port = seen[0]["MASTER_PORT"]
    for rank, variables in seen.items():
        assert variables == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "EXTRA": "ä",
        }


def test_the_cores_are_shared_fairly_and_a_rank_never_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launcher, "num_usable_cores", lambda: 8)
    threads = {n: build_environment(0, n, 1, {})["OMP_NUM_THREADS"] for n in (1, 2, 3, 16)}
    assert threads == {1: "8", 2: "4", 3: "2", 16: "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert [build_environment(0, n, 1, {})["OMP_NUM_THREADS"] for n in (2, 8)] == ["2", "1"]


def test_a_reserved_port_is_given_to_nobody_else_but_rank_0_can_listen_on_it() -> None:
    import socket

    with reserve_port() as port:
        with socket.socket() as stranger, pytest.raises(OSError):
            stranger.bind(("127.0.0.1", port))
        with socket.socket() as rank_0:
            rank_0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            rank_0.bind(("127.0.0.1", port))
            rank_0.listen()


def test_output_and_errors_of_a_rank_arrive_live_in_order_and_tagged() -> None:
    arrived: list[tuple[float, int, str]] = []
    script = (
        "import sys, time; print('out'); print('err', file=sys.stderr); time.sleep(1); print('late'); "
        "print('part', end='')"
    )
    run_ranks(
        [sys.executable, "-S", "-c", script],
        2,
        timeout_s=LIMIT_S,
        on_line=lambda rank, text: arrived.append((time.monotonic(), rank, text)),
    )
    for rank in (0, 1):
        mine = [(at, text) for at, of, text in arrived if of == rank]
        assert [text for _, text in mine] == ["out", "err", "late", "part"]
        assert mine[2][0] - mine[0][0] > 0.5


def test_a_failing_rank_is_named_and_stops_the_others_quickly(start_s: float) -> None:
    script = """
        import os, time
        if os.environ["RANK"] == "1":
            raise SystemExit(3)
        time.sleep(100)
    """
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"^rank 1 of 3 exited with code 3\n  ranks 0, 2: stopped$") as caught:
        run(script, nproc=3)
    assert time.monotonic() - started < 5 + 10 * start_s
    assert caught.value.rank == 1
    assert [end.was_stopped for end in caught.value.ends] == [True, False, True]


def test_a_killed_rank_is_named_with_its_signal() -> None:
    script = """
        import os, time
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), 9)
        time.sleep(100)
    """
    with pytest.raises(RankFailure, match="rank 0 of 2 was killed by SIGKILL .*out of memory") as caught:
        run(script)
    assert caught.value.ends[0].exit_code == -9


@pytest.mark.parametrize("is_folder_given", [True, False])
def test_a_killed_rank_is_named_with_the_most_memory_it_had(is_folder_given: bool, tmp_path: Path) -> None:
    script = """
        import os, time
        if os.environ["RANK"] == "1":
            much = bytearray(b"x") * (300 << 20)
            del much
            os.kill(os.getpid(), 9)
        time.sleep(100)
    """
    ballast = bytearray(b"x") * (700 << 20)  # of this process, which must not be taken for the rank's
    with pytest.raises(RankFailure, match=r"rank 1 of 2 .* killed it\); it had used 3\d\d MiB at most\n") as caught:
        run(script, private_dir=tmp_path if is_folder_given else None)
    assert len(ballast) == 700 << 20
    stopped, killed = caught.value.ends
    assert stopped.peak_bytes and killed.peak_bytes
    assert stopped.peak_bytes < 100 << 20 < 300 << 20 < killed.peak_bytes < 400 << 20


def test_ranks_that_ignore_polite_requests_are_killed_when_time_runs_out(start_s: float) -> None:
    script = """
        import os, signal, time
        if os.environ["RANK"] == "0":
            raise SystemExit(0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready")
        time.sleep(100)
    """
    started = time.monotonic()
    limit_s = round(1 + 8 * start_s, 2)
    with pytest.raises(RankTimeout, match=f"after {limit_s:g} s.*rank 1 was still running, rank 0 had fin") as caught:
        run(script, timeout_s=limit_s)
    assert [end.exit_code for end in caught.value.ends] == [0, -signal.SIGKILL]
    assert time.monotonic() - started < 5 + 20 * start_s


def test_stopped_ranks_get_the_chance_to_clean_up(start_s: float, tmp_path: Path) -> None:
    script = f"""
        import time
        try:
            time.sleep(100)
        finally:
            open({str(tmp_path / "cleaned")!r}, "w").close()
    """
    with pytest.raises(RankTimeout):
        run(script, nproc=1, timeout_s=1 + 8 * start_s)
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize("ending", ["raise SystemExit(0)", "os.kill(os.getpid(), 9)", "time.sleep(100)"])
def test_nothing_that_a_rank_started_outlives_it(ending: str, start_s: float) -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    script = f"""
        import os, subprocess, sys, time
        ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
        subprocess.Popen([sys.executable, "-S", "-c", ignore])
        subprocess.Popen([sys.executable, "-S", "-c", ignore], start_new_session=True)
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                time.sleep(100)
            os._exit(0)
        print("started")
        {ending}
    """
    started = time.monotonic()
    try:
        run(script, nproc=1, timeout_s=1 + 16 * start_s, env={"LAUNCHER_TEST": mark})
    except RankFailure:
        assert "SystemExit" not in ending
    assert time.monotonic() - started < 8 + 40 * start_s
    assert marked_processes("LAUNCHER_TEST", mark) == []


def test_an_interrupt_at_any_moment_of_a_guards_start_reaches_its_rank_without_a_word(tmp_path: Path) -> None:
    for index in range(12):
        rank = DirectRank(["sleep", "30"], os.environ, tmp_path)
        time.sleep(0.005 * index)
        os.killpg(rank.pid, signal.SIGINT)
        started_s = time.monotonic()
        assert rank.wait() == -signal.SIGINT and time.monotonic() - started_s < 20
        assert os.read(rank.output_fd, 4096) == b"", f"after {5 * index} ms"
        rank.close_lifeline()
        rank.close_output()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killing_the_launcher_leaves_no_process_and_no_private_folder(number: int, tmp_path: Path) -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    folder = tmp_path / "private"
    folder.mkdir()
    rank = (
        "import os, subprocess, time; subprocess.Popen(['sleep', '100'], start_new_session=True); "
        "print('up', flush=True); time.sleep(100)"
    )
    program = f"""
import sys
from pathlib import Path
from vlmcourse.notebook.launcher import run_ranks
run_ranks([sys.executable, "-S", "-c", {rank!r}], 2, timeout_s=100, private_dir=Path({str(folder)!r}),
          on_line=lambda rank, text: print(text, flush=True))
"""
    environment = {**os.environ, "LAUNCHER_TEST": mark}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        assert [parent.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        assert len(marked_processes("LAUNCHER_TEST", mark)) == 7  # the parent, and 2 x (guard, rank, sleep)
        os.kill(parent.pid, number)
        parent.wait(10)
        assert wait_until(lambda: not marked_processes("LAUNCHER_TEST", mark), within_s=30)
        assert not folder.exists()
    finally:
        for process in marked_processes("LAUNCHER_TEST", mark):
            process.kill()
        parent.stdout.close()  # type: ignore[union-attr]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_rank_dies_with_its_guard_even_if_the_launcher_can_do_nothing() -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    rank = "import os, time; print(os.getppid(), flush=True); time.sleep(100)"
    program = f"""
import sys
from vlmcourse.notebook.launcher import run_ranks
run_ranks([sys.executable, "-S", "-c", {rank!r}], 1, timeout_s=100, on_line=lambda rank, text: print(text, flush=True))
"""
    environment = {**os.environ, "LAUNCHER_TEST": mark}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        guard_pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGSTOP)
        os.kill(guard_pid, signal.SIGKILL)
        left = [parent.pid]
        assert wait_until(lambda: [p.pid for p in marked_processes("LAUNCHER_TEST", mark)] == left, within_s=30)
    finally:
        parent.kill()
        parent.communicate()


def test_a_killed_guard_takes_its_rank_along_and_counts_as_a_failure() -> None:
    script = """
        import os, time
        if os.environ["RANK"] == "1":
            os.kill(os.getppid(), 9)
        print(os.getpid())
        time.sleep(100)
    """
    lines: list[str] = []
    with pytest.raises(RankFailure, match="rank 1 of 2 was killed by SIGKILL"):
        run(script, on_line=lambda rank, text: lines.append(text))
    pids = [int(text) for text in lines if text.isdigit()]
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), within_s=30)


@pytest.mark.parametrize(("num_interrupts", "within_s"), [(1, 5.0), (2, 1.3)])
def test_an_interrupt_stops_ranks_that_ignore_it_and_a_second_one_does_so_at_once(
    num_interrupts: int, within_s: float, start_s: float
) -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    script = """
        import signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up")
        time.sleep(100)
    """

    def interrupt() -> None:
        for _ in range(num_interrupts):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    timer = threading.Timer(0, interrupt)
    up_at_s: list[float] = []

    def on_line(rank: int, text: str) -> None:
        up_at_s.append(time.monotonic())
        if len(up_at_s) == 2:
            timer.start()

    with pytest.raises(KeyboardInterrupt):
        run(script, env={"LAUNCHER_TEST": mark}, on_line=on_line)
    assert time.monotonic() - up_at_s[-1] < within_s + (0 if start_s < 0.3 else 20 * start_s)
    assert marked_processes("LAUNCHER_TEST", mark) == []
    timer.join()


def test_the_last_step_of_stopping_is_not_cut_short_by_an_interrupt() -> None:
    with ignore_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)


def test_an_error_in_the_callback_stops_the_ranks() -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"

    def on_line(rank: int, text: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_ranks(
            [sys.executable, "-S", "-c", "import time; print(1, flush=True); time.sleep(100)"],
            2,
            timeout_s=LIMIT_S,
            env={"LAUNCHER_TEST": mark},
            on_line=on_line,
        )
    assert marked_processes("LAUNCHER_TEST", mark) == []


def test_a_hundred_thousand_lines_a_rank_all_arrive_in_order() -> None:
    idle: list[int] = []
    _, lines = run("for i in range(100_000): print(i)", on_idle=lambda: idle.append(1))
    for rank in (0, 1):
        assert [int(text) for of, text in lines if of == rank] == list(range(100_000))
    assert len(idle) > 1


def test_the_state_of_a_progress_bar_goes_to_its_own_callback() -> None:
    states: list[tuple[int, str]] = []
    script = r"""
        import time
        for i in range(3):
            print(f"\r{i}", end="", flush=True)
            time.sleep(0.2)
        print()
    """
    _, lines = run(script, nproc=1, on_progress=lambda *state: states.append(state))
    assert lines == [(0, "2")]
    assert states == [(0, "0"), (0, "1"), (0, "2")]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"nproc": 0}, "0 ranks: must be from 1 to 64"),
        ({"nproc": 65}, "65 ranks"),
        ({"timeout_s": 0}, "timeout_s = 0: must be more than 0"),
        ({"argv": ["no-such-program"]}, "no-such-program.*must begin with a program that exists"),
        ({"argv": []}, "must begin with a program"),
    ],
)
def test_values_that_cannot_be_used_are_refused_before_anything_starts(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(**{"argv": [sys.executable, "-c", ""], "nproc": 1, "timeout_s": 1.0, **kwargs})


def end(rank: int, code: int, at_s: float = 1.0, stopped: bool = False) -> RankEnd:
    return RankEnd(rank, code, at_s, stopped)


def report(rank: int, message: str, at_s: float, kind: str = "RuntimeError") -> RankReport:
    return RankReport(rank, at_s, kind, message, "Traceback", f"cell, line {rank + 2}")


LOST = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:49066."


def test_the_root_failure_wins_over_ranks_that_lost_their_connection_to_it() -> None:
    ends = [end(0, 1, 1.0), end(1, 1, 1.1)]
    reports = {0: report(0, LOST, 0.9), 1: report(1, "boom", 0.95, "ValueError")}
    assert find_root(ends, reports).rank == 1
    failure = build_failure(ends, reports)
    assert str(failure) == (
        "rank 1 of 2 failed in cell, line 3: ValueError: boom\n"
        "  rank 0: then failed in cell, line 2: lost its connection"
    )


def test_of_two_independent_failures_the_earlier_one_is_the_root() -> None:
    ends = [end(0, 1, 1.0), end(1, 1, 1.1)]
    reports = {0: report(0, "second", 0.95), 1: report(1, "first", 0.9)}
    assert find_root(ends, reports).rank == 1


def test_a_signal_wins_over_exceptions_but_an_abort_does_not() -> None:
    reports = {0: report(0, "some wording that nobody knows", 0.9)}
    assert find_root([end(0, 1), end(1, -9, 1.5)], reports).rank == 1
    assert find_root([end(0, 1), end(1, -6, 0.8)], reports).rank == 0
    assert find_root([end(0, 1), end(1, -6, 1.5)], {0: report(0, LOST, 0.9)}).rank == 1


def test_ranks_that_the_launcher_stopped_are_never_the_root() -> None:
    ends = [end(0, -2, 0.5, stopped=True), end(1, 1, 0.6, stopped=True), end(2, 3, 1.0)]
    assert find_root(ends, {1: report(1, "", 0.4, "KeyboardInterrupt")}).rank == 2
    with pytest.raises(ValueError, match="none of 1 ranks failed"):
        find_root(ends[:1], {})


def test_mixed_failures_are_listed_root_first_and_each_other_one_in_a_line() -> None:
    ends = [end(0, 1), end(1, 1), RankEnd(2, -9, 1.5, False, peak_bytes=2040109466), end(3, 0), end(4, 1), end(5, 0)]
    ends += [end(6, -2, stopped=True), end(7, -9, 1.6)]
    reports = {0: report(0, "boom", 1.6, "ValueError"), 1: report(1, LOST, 0.8)}
    reports[4] = RankReport(4, 0.9, "RuntimeError", LOST, "", "cell, line 3")
    failure = build_failure(ends, reports)
    assert str(failure).splitlines() == [
        "rank 2 of 8 was killed by SIGKILL (the machine probably ran out of memory, or someone killed it); "
        "it had used 1.9 GiB at most",
        "  rank 0: then failed in cell, line 2: ValueError: boom",
        "  ranks 1, 4: then failed in cell, line 3: lost its connection",
        "  ranks 3, 5: had finished",
        "  rank 6: stopped",
        "  rank 7: was killed by SIGKILL (the machine probably ran out of memory, or someone killed it)",
    ]
    assert failure.rank == 2 and failure.rank_traceback == ""


def test_waiting_for_a_rank_that_had_finished_is_explained() -> None:
    ends = [end(0, -2, stopped=True), end(1, 1)]
    message = str(build_failure(ends, {1: report(1, LOST, 0.9)}, finished={0}))
    assert message.startswith("rank 1 of 2 failed in cell, line 3: it waited for rank 0, which had finished")


def test_exits_are_described_in_words() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-11).startswith("was killed by SIGSEGV (")
    assert describe_exit(-63) == "was killed by signal 63"
