"""Ranks that are forked from a server which has imported torch: as fast as said, and as if they were new processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from notebook_kernel import Kernel, is_server, loaded_kernel

from vlmcourse.grading import process
from vlmcourse.notebook import jobs, starting

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(280)]

FIND_SERVER = "import psutil; server = psutil.Process(__import__('os').getppid()).ppid()"
"""In a rank: the process that its guard was forked from."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with loaded_kernel(tmp_path_factory.mktemp("here")) as kernel:
        yield kernel


def servers(kernel: Kernel) -> list[psutil.Process]:
    kernel_pid = kernel.manager.provisioner.pid  # type: ignore[union-attr]
    return [process for process in kernel.processes(with_server=True) if is_server(process, kernel_pid)]


def test_every_rank_comes_from_the_one_server(kernel: Kernel) -> None:
    found = set()
    for _ in range(2):
        shown = kernel.run(f"%%torchrun -n 2\n{FIND_SERVER}\nprint(server)")
        assert shown.error == ""
        found |= {shown.lines(0)[0], shown.lines(1)[0]}
    (server,) = servers(kernel)
    assert found == {str(server.pid)}


def test_a_rank_starts_as_if_it_were_new(kernel: Kernel) -> None:
    draw = """%%torchrun -n 2 --out seen
        import os, random, sys, threading
        import numpy, torch
        from vlmcourse.labs.by_hand import from_every_rank
        assert "leftover" not in globals()
        leftover = 1
        sys.modules["json"].leftover = 1
        seen = from_every_rank([random.random(), float(numpy.random.rand()), torch.initial_seed(), os.getpid()])
        print(hasattr(sys.modules["re"], "leftover"), torch.get_num_threads(), sys.argv, __name__)
    """
    assert kernel.run(draw).error == ""
    assert kernel.run("first = seen").error == ""
    shown = kernel.run(draw)
    assert shown.lines(0) == shown.lines(1) == ["False 1 ['-c'] __main__"]
    compare = """
        drawn = [number for of_rank in (*first, *seen) for number in of_rank]
        assert len(set(drawn)) == 4 * 4, drawn
    """
    assert kernel.run(compare).error == ""


def test_ranks_see_the_notebooks_folder_path_and_environment_of_now(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "brought.py").write_text("value = 7\n", encoding="utf-8")
    before = servers(kernel)[0].pid
    there = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.path.append({str(tmp_path)!r})"
    assert kernel.run(f"{there}; os.environ['VLMCOURSE_TEST_WORD'] = 'ümlaut'").error == ""
    cell = "%%torchrun -n 1\nimport os, brought\nprint(brought.value, os.getcwd(), os.environ['VLMCOURSE_TEST_WORD'])"
    assert kernel.run(cell).lines(0) == [f"7 {tmp_path} ümlaut"]
    after = servers(kernel)
    # torch and other libraries read the environment once, when they are imported.
    assert len(after) == 1 and after[0].pid != before
    (tmp_path / "brought.py").write_text("value = 80\n", encoding="utf-8")
    assert kernel.run(cell).lines(0) == [f"80 {tmp_path} ümlaut"]


def test_what_a_cell_left_in_open_files_is_written(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "open.txt"
    shown = kernel.run(f"%%torchrun -n 1\nfile = open({str(path)!r}, 'w')\nfile.write('hello')\nNone")
    assert shown.error == ""
    assert path.read_text() == "hello"


def test_a_group_can_be_left_and_joined_again_although_a_model_still_holds_it(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 2
        import torch, torch.distributed as dist
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print(total.item())
    """)
    assert shown.error == ""
    assert shown.lines(0) == shown.lines(1) == ["2.0"]


def test_an_interrupt_while_the_server_is_busy_stops_every_rank(kernel: Kernel) -> None:
    (server,) = servers(kernel)
    server.suspend()
    kernel.start("%%torchrun -n 2\nimport time\ntime.sleep(60)")
    time.sleep(1.5)
    kernel.manager.interrupt_kernel()
    time.sleep(0.5)
    server.resume()
    kernel.wait_until_idle()
    assert kernel.processes() == []
    shown = kernel.run("%%torchrun -n 2\nprint(rank)")
    assert (shown.lines(0), shown.lines(1)) == (["0"], ["1"])


def test_an_interrupt_is_heard_while_the_server_imports_torch() -> None:
    kernel = Kernel()
    try:
        kernel.start("%load_ext vlmcourse\nget_ipython().run_cell_magic('torchrun', '-n 1', 'print(7)')")
        kernel.wait_for_text("starting 1 ranks")
        (server,) = servers(kernel)
        server.suspend()  # an import that takes for ever
        time.sleep(0.5)
        kernel.manager.interrupt_kernel()
        kernel.wait_until_idle()
        server.resume()
        assert kernel.processes() == []
    finally:
        kernel.close()


def test_a_killed_server_ends_its_ranks_and_the_next_cell_has_a_new_one(kernel: Kernel) -> None:
    (server,) = servers(kernel)
    kernel.start("%%torchrun -n 2\nimport time\nprint('up', rank)\ntime.sleep(100)")
    kernel.wait_for_text("[1] up 1")
    server.send_signal(signal.SIGKILL)
    kernel.wait_until_idle()
    assert kernel.processes() == []
    shown = kernel.run("%%torchrun -n 2\nprint('again')")
    assert shown.error == ""
    assert shown.lines(0) == shown.lines(1) == ["again"]
    assert [process.pid for process in servers(kernel)] != [server.pid]


def test_where_forking_is_not_possible_ranks_are_started_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        def is_current(self, env: object) -> bool:
            return True

        has_died_in_use = False

        def start_rank(self, private_dir: Path, env: object) -> None:
            return None

        def close(self) -> None:
            pass

    started = []
    monkeypatch.setattr(starting, "ForkServerClient", lambda env: Refusing())
    monkeypatch.setattr(starting, "DirectRank", lambda *arguments: started.append(arguments))
    ranks = starting.RankStarter()
    ranks.start(tmp_path, os.environ)
    assert len(started) == 1
    monkeypatch.setattr(starting.sys, "platform", "darwin")
    monkeypatch.setattr(starting, "ForkServerClient", None)
    starting.RankStarter().start(tmp_path, os.environ)
    assert len(started) == 2


def test_a_line_stands_in_the_cell_until_the_first_rank_prints() -> None:
    kernel = Kernel()
    try:
        shown = kernel.run("%load_ext vlmcourse\nget_ipython().run_cell_magic('torchrun', '-n 1', 'print(7)')")
        assert shown.error == ""
        texts = [data for kind, data in shown.outputs if kind == "text"]
        assert texts[0].startswith("starting 1 ranks: the first time")
        assert "clear" in [kind for kind, _ in shown.outputs][1]
        assert shown.lines(0) == ["7"]
        assert "starting" not in kernel.run("%%torchrun -n 1\nprint(8)").stdout
    finally:
        kernel.close()


def test_folders_of_killed_kernels_are_removed_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.tempfile, "tempdir", str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (tmp_path / f"vlmcourse-cell-{child.pid}-old").mkdir()
    with jobs.open_job_folder() as folder:
        jobs.remove_orphans()
        assert [path for path in tmp_path.iterdir()] == [folder.path]


def test_a_kernel_of_grading_starts_its_server_with_the_first_cell_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(starting, "ForkServerClient", lambda env: made.append(env))
    monkeypatch.setenv(starting.START_LATE, process._environment(tmp_path)[starting.START_LATE])
    ranks = starting.RankStarter()
    assert not made
    ranks.prepare()
    assert len(made) == 1


def test_a_change_of_the_package_between_two_ranks_of_a_cell_waits_for_the_next_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Server:
        has_died_in_use = True

        def __init__(self, env: object) -> None:
            made.append(self)

        def is_current(self, env: object) -> bool:
            return False

        def start_rank(self, private_dir: Path, env: object) -> str:
            return "forked"

        def close(self) -> None:
            pass

    monkeypatch.setattr(starting, "ForkServerClient", Server)
    ranks = starting.RankStarter()
    ranks.prepare()
    assert [ranks.start(tmp_path, os.environ) for _ in range(2)] == ["forked", "forked"]
    assert len(made) == 2
    ranks.prepare()
    assert len(made) == 3
