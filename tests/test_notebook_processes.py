"""`%%torchrun` in a real kernel when things go wrong: nothing hangs, and nothing is left running."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from notebook_kernel import Kernel, loaded_kernel, wait_until

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(280)]

STUBBORN_FAMILY = """
        import os, signal, subprocess, sys, time, torch, torch.distributed as dist
        from torch.utils.data import DataLoader, TensorDataset
        loader = iter(DataLoader(TensorDataset(torch.ones(8)), num_workers=1, persistent_workers=True))
        next(loader)
        subprocess.Popen(["sleep", "100"], start_new_session=True)
        dist.barrier()
        print("up", rank)
"""


@pytest.fixture
def private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def kernel(private_folders: Path) -> Iterator[Kernel]:
    with loaded_kernel() as kernel:
        yield kernel


def folders_in(path: Path) -> list[Path]:
    return list(path.glob("vlmcourse-cell-*"))


def test_the_kernel_goes_on_after_a_killed_rank_a_timeout_and_an_interrupted_hang(
    kernel: Kernel, private_folders: Path
) -> None:
    shown = kernel.run(f"""%%torchrun -n 2{STUBBORN_FAMILY}
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    """)
    assert "RankFailure: rank 1 of 2 was killed by SIGKILL (the machine probably ran out of memory" in shown.error
    assert "rank 0: then failed in cell, line 12: lost its connection" in shown.error
    assert shown.seconds_from_first_text < 25
    assert shown.stderr == ""
    assert kernel.processes() == []

    shown = kernel.run("%%torchrun -n 1 --timeout 2\nimport time; time.sleep(100)", timeout_s=60)
    assert shown.error.startswith("RankTimeout: stopped after 2 s: its rank was still running")
    assert "More time: --timeout 4" in shown.error
    assert kernel.processes() == []

    kernel.start(f"""%%torchrun -n 2{STUBBORN_FAMILY}
        if rank == 0:
            dist.barrier()  # nobody else comes
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)
    """)
    kernel.wait_for_text("up 1")
    assert len(kernel.processes()) >= 2 * 4  # guard, rank, loader worker, sleep
    sent_s = time.monotonic()
    kernel.manager.interrupt_kernel()
    reply = kernel.client.get_shell_msg(timeout=60)["content"]
    assert (reply["status"], reply["ename"]) == ("error", "RanksInterrupted")
    assert reply["evalue"].startswith("all 2 ranks were stopped; nothing is left running\nrank 0 waits in barrier #2")
    assert time.monotonic() - sent_s < 25
    assert kernel.processes() == []
    assert kernel.run("print('still here')").stdout == "still here\n"
    assert folders_in(private_folders) == []


def test_a_killed_kernel_leaves_no_process_and_no_file(kernel: Kernel, private_folders: Path) -> None:
    kernel_pid = kernel.pid
    kernel.start(f"""%%torchrun -n 2{STUBBORN_FAMILY}
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)
    """)
    kernel.wait_for_text("up 1")
    assert len(kernel.processes()) >= 2 * 4
    assert len(folders_in(private_folders)) == 1
    os.kill(kernel_pid, signal.SIGKILL)
    assert wait_until(lambda: not kernel.processes(with_server=True), within_s=30)
    assert wait_until(lambda: not folders_in(private_folders), within_s=30)


@pytest.mark.parametrize("victim", ["guard", "server"])
def test_a_killed_guard_or_fork_server_leaves_nothing_of_its_ranks(kernel: Kernel, victim: str) -> None:
    kernel.run("%%torchrun\npass")  # from here on ranks are forked
    kernel.start(f"%%torchrun -n 2{STUBBORN_FAMILY}\n        time.sleep(100)")
    kernel.wait_for_text("up 1")
    server = psutil.Process(kernel.pid).children()[0]
    (server.children()[0] if victim == "guard" else server).kill()
    kernel.wait_until_idle()
    assert kernel.processes() == []


def test_a_rank_that_waits_for_one_that_has_finished_is_told_so(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 2
        import torch.distributed as dist
        if rank == 1:
            dist.barrier()
    """)
    assert shown.error.startswith(
        "RankFailure: rank 1 waits in barrier #1 (cell line 4, `dist.barrier()`, under `if rank == 1`); "
        "rank 0 never entered it: it had finished\n"
    )
    assert "rank 1 of 2 failed in cell, line 4: lost its connection\n  rank 0: had finished" in shown.error
    assert shown.stderr == ""
