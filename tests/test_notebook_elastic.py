"""`--launcher elastic` and `--launcher direct` in a real kernel: restarts, failures, several machines, nothing left."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_kernel import Kernel, loaded_kernel, wait_until

from vlmcourse.notebook.options import CellOptionsError, parse_options

pytestmark = pytest.mark.timeout(280)
REPOSITORY = Path(__file__).parent.parent
TORCHRUN_FOLDERS = "torchelastic_*"
STUBBORN_FAMILY = """
        import os, signal, subprocess, time, torch, torch.distributed as dist
        from torch.utils.data import DataLoader, TensorDataset
        loader = iter(DataLoader(TensorDataset(torch.ones(8)), num_workers=1, persistent_workers=True))
        next(loader)
        subprocess.Popen(["sleep", "100"], start_new_session=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.barrier()
        print("up", rank)
        time.sleep(100)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Iterator[Kernel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setattr(tempfile, "tempdir", None)
        with loaded_kernel(folder) as kernel:
            yield kernel


def leftovers(folder: Path) -> list[Path]:
    return [*folder.glob("vlmcourse-cell-*"), *folder.glob(TORCHRUN_FOLDERS)]


@pytest.mark.notebook
def test_a_cell_succeeds_after_a_restart_with_everything_that_a_cell_has(kernel: Kernel, folder: Path) -> None:
    kernel.run("step = 5")
    shown = kernel.run("""%%torchrun -n 2 --launcher elastic --max-restarts 3 --in step --out total
        import os, sys, torch, torch.distributed as dist
        from IPython.display import HTML, display
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        display(HTML(f"<b>attempt {attempt}</b>"))
        print("start", attempt)
        print("on stderr", file=sys.stderr)
        total = torch.tensor([step + rank])
        dist.all_reduce(total)
        os.system("echo native; echo native >&2")
        print("half a line", end="")
        sys.stdout.flush()
        if attempt == 0 and rank == 1:
            raise ValueError("lost")
        dist.barrier()
        print(", the rest")
        total.item()
    """)
    assert shown.error == shown.stderr == ""
    lines = shown.stdout.splitlines()
    note = "torchrun starts all ranks again (restart 1 of at most 3): "
    assert f"{note}rank 1 of 2 failed in cell, line 14: ValueError: lost" in lines
    assert lines[-1] == "every rank ended well, after 1 restart"
    as_text = "<IPython.core.display.HTML object>"
    once = ["native", "native", "half a line"]
    assert shown.lines(1) == [
        *(as_text, "start 0", "on stderr", *once),
        *(as_text, "start 1", "on stderr", *once[:2], "half a line, the rest", "11"),
    ]
    assert shown.lines(0)[-1] == "11"
    html = [value["text/html"] for kind, value in shown.outputs if kind == "display" and "text/html" in value]
    assert html == ["<b>attempt 0</b>", "<b>attempt 1</b>"]
    assert all(
        line.startswith(("[0] ", "[1] ", "[0,1] ", "torchrun starts", "every rank", "starting 2")) for line in lines
    )
    assert kernel.run("print(total)").stdout == "tensor([11])\n"
    assert kernel.processes() == [] and leftovers(folder) == []


@pytest.mark.notebook
def test_a_failure_reads_as_with_the_other_launchers(kernel: Kernel) -> None:
    cell = """%%torchrun -n 2 --launcher {}
        import torch.distributed as dist
        def fail():
            raise ValueError("boom on rank " + str(rank))
        if rank == 1:
            fail()
        dist.barrier()
    """
    fork, direct, elastic = (kernel.run(cell.format(how)) for how in ("fork", "direct", "elastic"))
    first = "RankFailure: rank 1 of 2 failed in cell, line 4: ValueError: boom on rank 1"
    assert [shown.error.splitlines()[0] for shown in (fork, direct, elastic)] == [first] * 3
    assert "rank 0: " in elastic.error
    for shown in (fork, direct, elastic):
        assert '[1]   File "cell", line 6, in <module>\n[1]     fail()' in shown.traceback
        assert shown.stderr == "" and "torch/distributed/run" not in shown.stdout


@pytest.mark.notebook
def test_every_attempt_is_told_from_the_others_and_a_killed_rank_is_named(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 2 --launcher elastic --max-restarts 2
        import os, signal, time
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt == 1 and rank == 0:
            raise ValueError("in the middle")
        if attempt != 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)
    """)
    killed = "rank 1 of 2 was killed by SIGKILL (the machine probably ran out of memory, or someone killed it)"
    assert [line for line in shown.stdout.splitlines() if line.startswith("torchrun")] == [
        f"torchrun starts all ranks again (restart 1 of at most 2): {killed}",
        "torchrun starts all ranks again (restart 2 of at most 2): rank 0 of 2 failed in cell, line 5: "
        "ValueError: in the middle",
    ]
    assert shown.error == f"RankFailure: {killed}\n  rank 0: stopped\n  this was after 2 restarts by torchrun"
    assert kernel.processes() == []


@pytest.mark.notebook
def test_an_interrupt_and_a_timeout_leave_nothing(kernel: Kernel, folder: Path) -> None:
    kernel.start(f"%%torchrun -n 2 --launcher elastic{STUBBORN_FAMILY}")
    kernel.wait_for_text("up 1")
    assert len(kernel.processes()) >= 2 + 2 * 3  # guard, torchrun, and twice rank, loader worker, sleep
    kernel.manager.interrupt_kernel()
    reply = kernel.client.get_shell_msg(timeout=60)["content"]
    assert (reply["status"], reply["ename"]) == ("error", "RanksInterrupted")
    assert "ranks 0, 1 are in cell line 11, `time.sleep(100)`" in reply["evalue"]
    assert kernel.processes() == [] and leftovers(folder) == []
    kernel.wait_until_idle()

    shown = kernel.run(f"%%torchrun -n 2 --launcher elastic --timeout 12{STUBBORN_FAMILY}")
    assert "stopped after 12 s: torchrun and its rank" in shown.error and "`time.sleep(100)`" in shown.error
    assert kernel.processes() == [] and leftovers(folder) == []
    assert kernel.run("print('still here')").stdout == "still here\n"


@pytest.mark.notebook
def test_two_machines_run_the_cell_and_its_script_together(kernel: Kernel, folder: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"-n 1 --launcher elastic --nnodes 2 --rdzv-endpoint localhost:{port} --save both.py --out world"
    others: list[subprocess.Popen[str]] = []

    def join(text: str) -> None:
        """Do on the other machine, which is this one, what the notebook says."""
        command = next((line for line in text.splitlines() if line.startswith("  torchrun --nnodes 2")), "")
        if "waiting for 1 other machine: copy both.py there" in text and command.endswith("both.py") and not others:
            words = [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]]
            # A torchrun that is started by hand never removes its torchelastic_* folder.
            env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
            others.append(subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True))

    cell = f"""%%torchrun {flags}
        import torch, torch.distributed as dist
        world = torch.ones(1)
        dist.all_reduce(world)
        print("I am", rank, "of", world_size, "with", world.item())
    """
    try:
        shown = kernel.run(cell, on_text=join)
        assert shown.error == shown.stderr == ""
        output = others[0].communicate(timeout=60)[0]
    finally:
        for other in others:
            other.kill()
    told = [line.partition("] ")[2] for line in shown.stdout.splitlines() if line.startswith("[")]
    told += [line for line in output.splitlines() if line.startswith("I am")]
    assert sorted(told) == ["I am 0 of 2 with 2.0", "I am 1 of 2 with 2.0"]
    assert kernel.run("print(world)").stdout == "tensor([2.])\n"

    shown = kernel.run(cell.replace("--save", "--timeout 6 --save"))
    assert "no rank had started after 6 s: the other machines did not come" in shown.error
    assert kernel.processes() == []


@pytest.mark.notebook
def test_a_killed_kernel_leaves_nothing(kernel: Kernel, folder: Path) -> None:
    """The last test of its kernel."""
    kernel_pid = kernel.pid
    kernel.start(f"%%torchrun -n 2 --launcher elastic{STUBBORN_FAMILY}")
    kernel.wait_for_text("up 1")
    os.kill(kernel_pid, signal.SIGKILL)
    assert wait_until(lambda: not kernel.processes(with_server=True), within_s=30)
    assert wait_until(lambda: not leftovers(folder), within_s=30)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--max-restarts 3",
            "--max-restarts: only torchrun itself knows it, and cells do without unless you add --launcher elastic",
        ),
        ("--nnodes 2 --launcher direct", "--nnodes: only torchrun itself .* --launcher direct does without"),
        ("--rdzv-endpoint a:1", "--rdzv-endpoint: only torchrun itself knows it"),
        ("--launcher elastic --rdzv-endpoint a:1", "one machine needs no meeting point"),
        ("--launcher elastic --nnodes 2", "run this cell as a script: add --save train.py"),
        ("--launcher elastc", "'elastc' cannot be used: did you mean 'elastic'"),
        ("--launcher elastic --nnodes 2:1", "'2:1' cannot be used: must be a number of machines"),
        ("--launcher elastic --nnodes 0", "'0' cannot be used"),
        ("--launcher elastic --max-restarts -1", "'-1' cannot be used: must be a whole number, 0 or more"),
        ("--launcher elastic --max-restarts x", "'x' cannot be used: must be a whole number"),
        ("--launcher elastic --nnodes 2 --show --rdzv-endpoint node1", "'node1' cannot be used"),
        ("--save train", "'train' cannot be used: must be the name of a script"),
    ],
)
def test_flags_that_make_no_sense_are_refused(line: str, message: str) -> None:
    with pytest.raises(CellOptionsError, match=message):
        parse_options(line)


def test_the_flags_of_torchrun_are_read() -> None:
    options = parse_options("--launcher elastic --nnodes 1:2 --max-restarts 2 --rdzv-endpoint [::1]:29400 --save a.py")
    assert (options.nnodes, options.max_restarts, options.rdzv_endpoint) == ((1, 2), 2, "[::1]:29400")
    assert (options.launcher, options.save, options.show) == ("elastic", "a.py", False)
    assert parse_options("").launcher == "fork"
