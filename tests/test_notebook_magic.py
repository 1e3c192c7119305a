"""`%%torchrun` in a real kernel: what a person sees, and what comes back."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from notebook_kernel import Kernel, loaded_kernel

from vlmcourse.notebook.options import CellOptionsError, parse_options

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with loaded_kernel() as kernel:
        yield kernel


def test_both_ranks_print_live_and_tagged_from_inside_a_process_group(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 2 --timeout 100
        import os, time, torch, torch.distributed as dist
        total = torch.tensor([rank + 1.0], device=device)
        dist.all_reduce(total)
        timeout_s = dist.group.WORLD._get_backend(device).options._timeout.total_seconds()
        print("rank", rank, local_rank, "of", world_size, dist.get_world_size(), device, total.item(), timeout_s)
        time.sleep(1.5)
        os.system("echo native >&2")
        print("open", end="")
        [rank, __name__]
    """)
    assert shown.error == ""
    for rank in (0, 1):
        expected = [f"rank {rank} {rank} of 2 2 cpu 3.0 50.0", "native", "open"]
        assert shown.lines(rank) == expected + [f"[{rank}, '__main__']"]
    assert shown.seconds_from_first_text > 1
    assert shown.stderr == ""
    assert kernel.run("import sys; print('torch' in sys.modules)").stdout == "False\n"


def test_rank_0_shows_figures_once_and_rich_output_in_its_place(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 2
        import matplotlib.pyplot as plt
        from IPython.display import HTML, display
        %matplotlib inline
        plt.figure()
        plt.show()
        plt.plot([1, 2])
        plt.show()
        print("between")
        display(HTML("<b>bold</b>"))
        left_open, axes = plt.subplots()
        axes.plot([3, 1, 2])
        last, axes = plt.subplots()
        axes.plot([2, 1])
        last
    """)
    assert shown.error == shown.stderr == ""
    of_rank_0 = [
        "picture" if "image/png" in value else "html" if "text/html" in value else "text"
        for kind, value in shown.outputs
        if kind == "display" or (kind == "text" and re.search(r"^\[0(,1)?\] between", value, re.MULTILINE))
    ]
    assert of_rank_0 == ["picture", "text", "html", "picture", "picture"]
    assert len(set(shown.pictures())) == 3
    assert "[1] <IPython.core.display.HTML object>" in shown.stdout.splitlines()


def test_progress_bars_update_in_place_and_leave_the_lines_of_others_whole(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 2
        import time
        from tqdm import tqdm
        if rank == 0:
            for step in tqdm(range(20)):
                time.sleep(0.05)
        else:
            for step in range(20):
                print("line", step)
                time.sleep(0.05)
    """)
    assert shown.error == shown.stderr == ""
    assert shown.lines(1) == [f"line {step}" for step in range(20)]
    assert shown.lines(0) == []
    bars = [data["text/plain"] for kind, data in shown.outputs if kind in ("display", "update")]
    assert len(bars) >= 3
    assert all(bar.startswith("[0] ") and "\r" not in bar for bar in bars)
    assert "20/20" in bars[-1]
    assert sum(kind == "display" for kind, _ in shown.outputs) == 1


def test_equal_lines_of_all_ranks_are_one_line_and_appear_live(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 2
        import time, torch.distributed as dist
        dist.barrier()
        print("same")
        dist.barrier()
        print("of", rank)
        print("same again")
        dist.barrier()
        if rank == 1:
            print("alone")
        for step in range(30):
            dist.barrier()
            print("step", step)
        time.sleep(1.5)
        print("late")
    """)
    assert shown.error == shown.stderr == ""
    texts = [text for kind, text in shown.outputs if kind == "text"]
    assert not any("alone" in text and "late" in text for text in texts)  # 1.5 s apart
    assert sum(line.startswith("[0,1] step") for line in shown.stdout.splitlines()) > 10
    for rank in (0, 1):
        alone = ["alone"] if rank == 1 else []
        steps = [f"step {step}" for step in range(30)]
        assert shown.lines(rank) == ["same", f"of {rank}", "same again", *alone, *steps, "late"]
    assert "[1] alone" in shown.stdout.splitlines()


def test_a_rank_that_leaves_half_way_fails_the_cell(kernel: Kernel) -> None:
    left = kernel.run("%%torchrun -n 2\nimport os\nif rank == 1: os._exit(0)").error
    assert left.startswith("RankFailure: rank 1 of 2 ended the process (exit code 0) before the cell's last line")
    waited = kernel.run("%%torchrun -n 2\nimport os, torch.distributed as d\nif rank: os._exit(0)\nd.barrier()").error
    assert "rank 1: had ended its process (exit code 0)" in waited


def test_only_the_ranks_asked_for_are_shown_but_an_error_of_any(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 3 --ranks 0,2
        from IPython.display import HTML, display
        import torch.distributed as dist
        print("rank", rank)
        display(HTML("<b>here</b>"))
        dist.barrier()
        if rank == 1:
            raise ValueError("not shown, but told")
        dist.barrier()
    """)
    assert "rank 1 of 3 failed in cell, line 8: ValueError: not shown, but told" in shown.error
    assert [shown.lines(rank)[:1] for rank in (0, 1, 2)] == [["rank 0"], [], ["rank 2"]]
    assert sum(kind == "display" for kind, _ in shown.outputs) == 1

    shown = kernel.run("""%%torchrun -n 2 --ranks 1
        from IPython.display import HTML, display
        print("rank", rank)
        display(HTML("<b>here</b>"))
        rank
    """)
    assert shown.error == ""
    assert shown.stdout.splitlines() == ["[1] rank 1", "[1] 1"]
    assert [kind for kind, _ in shown.outputs if kind == "display"] == ["display"]  # of the first rank that is shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ranks 2", "--ranks 2: there is no rank 2: with -n 2 the ranks are 0 to 1"),
        ("-n 1 --ranks 0-3", "--ranks 0-3: there is no rank 3: with -n 1 the only rank is 0"),
        ("--ranks all", "--ranks all: 'all' names no ranks: write numbers and ranges with commas between them"),
        ("-n 4 --ranks 3-1", "--ranks 3-1: '3-1' names no ranks"),
        ("--ranks ''", "--ranks : '' names no ranks"),
        ("--ranks 0,", "--ranks 0,: '' names no ranks"),
    ],
)
def test_ranks_that_do_not_exist_are_refused(line: str, message: str) -> None:
    with pytest.raises(CellOptionsError, match=f"^{re.escape(message)}"):
        parse_options(line)


def test_ranks_are_read_as_numbers_and_ranges() -> None:
    assert parse_options("-n 8 --ranks 6-7,0,2-3,3").shown_ranks == (0, 2, 3, 6, 7)
    assert parse_options("-n 4 --ranks 0, 2 --timeout 3").shown_ranks == (0, 2)
    assert parse_options("-n 3").shown_ranks == ()


def test_a_hundred_thousand_lines_a_rank_are_shown_by_their_ends_and_kept_in_a_file(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 2
        for number in range(100_000):
            print("line", number, "of", rank)
    """)
    assert shown.error == shown.stderr == ""
    lines = [line for line in shown.stdout.splitlines() if not line.startswith("starting")]
    (at,) = (index for index, line in enumerate(lines) if line.startswith("... "))
    assert 1000 <= at < 1200 and len(lines) == at + 201
    found = re.fullmatch(
        r"\.\.\. ([\d,]+) lines not shown \(of a flood .*\); all of them, until the kernel ends: (/.*)", lines[at]
    )
    assert found is not None
    assert int(found[1].replace(",", "")) + at + 200 == 200_000
    path = Path(found[2])
    kept = path.read_text().splitlines()
    assert kept[:at] == lines[:at] and kept[-200:] == lines[-200:]
    for rank in (0, 1):
        of_rank = [line for line in kept if line.startswith(f"[{rank}]")]
        assert of_rank == [f"[{rank}] line {number} of {rank}" for number in range(100_000)]
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    pid = int(kernel.run("import os; print(os.getpid())").stdout)
    assert path.parent.name.startswith(f"vlmcourse-cell-{pid}-")
    assert len("".join(text for kind, text in shown.outputs if kind == "text")) < 50_000


def test_displays_and_bars_keep_their_place_between_floods(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 2
        import time
        from IPython.display import HTML, display
        from tqdm import tqdm
        for number in range(50):
            for line in range(400):
                print(number, line)
            if rank == 0:
                display(HTML(f"<b>{number}</b>"))
        if rank == 0:
            for step in tqdm(range(3)):
                time.sleep(0.3)
        print("x" * 1_000_000)
    """)
    assert shown.error == shown.stderr == ""
    displays = [index for index, (kind, _) in enumerate(shown.outputs) if kind == "display"]
    assert [shown.outputs[index][1].get("text/html") for index in displays] == [
        *(f"<b>{number}</b>" for number in range(50)),
        None,
    ]
    for number, index in enumerate(displays[:50]):
        before, after = (
            "".join(value for kind, value in part if kind == "text")
            for part in (shown.outputs[:index], shown.outputs[index:])
        )
        assert all(int(of) <= number for of in re.findall(r"^\[0[,1]*\] (\d+) \d+$", before, re.MULTILINE))
        assert all(int(of) > number for of in re.findall(r"^\[0[,1]*\] (\d+) \d+$", after, re.MULTILINE))
    assert len(shown.stdout.splitlines()) < 3000
    bars = [data["text/plain"] for kind, data in shown.outputs if kind == "update"]
    assert "3/3" in bars[-1]
    assert re.search(
        r"^\[[\d,]+\] x{10000} \.\.\. \(1,000,000 characters; all of them, until the kernel ends: /",
        shown.stdout,
        re.MULTILINE,
    )


def test_mixed_failures_are_listed_with_the_killed_rank_first(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 4
        import os, signal, torch.distributed as dist
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        much = bytearray(b"x") * (1 << 30 if rank == 1 else 1)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            raise ValueError("boom")
        if rank == 3:
            dist.barrier()
    """)
    first, *others = shown.error.splitlines()
    assert first.startswith("RankFailure: rank 1 of 4 was killed by SIGKILL (the machine probably ran out of memory")
    assert re.search(r"; it had used 1\.\d GiB at most$", first)
    assert sorted(others) == [
        "  rank 0: had finished",
        "  rank 2: then failed in cell, line 9: ValueError: boom",
        "  rank 3: then failed in cell, line 11: lost its connection",
    ]


def test_variables_travel_to_the_ranks_and_back(kernel: Kernel) -> None:
    kernel.run("""
        import dataclasses, torch
        factor = 3
        @dataclasses.dataclass
        class Point:
            x: int
        def scale(point):
            return Point(factor * point.x)
        point, weights = Point(2), torch.ones(2)
    """)
    shown = kernel.run("""%%torchrun -n 2 --in point,scale,weights --out scaled,total
        import torch.distributed as dist
        dist.all_reduce(weights)
        scaled, total = scale(point), {"sum": weights, "rank": rank}
    """)
    assert shown.error == shown.stderr == ""
    seen = kernel.run(
        "print(scaled, isinstance(scaled, Point), total['sum'].tolist(), total['rank'], weights.tolist())"
    )
    assert seen.stdout == "Point(x=6) True [2.0, 2.0] 0 [1.0, 1.0]\n"


def test_a_result_that_cannot_travel_is_named(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 1 --out fine,group
        import torch.distributed as dist
        fine, group = 1, dist.group.WORLD
    """)
    assert shown.error.startswith("CannotTravelError: --out group: a torch.distributed.")
    assert "ProcessGroup" in shown.error


def test_a_failing_rank_raises_with_its_own_lines_although_the_other_waits_for_it(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 2
import torch.distributed as dist

def fail():
    raise ValueError("boom on rank " + str(rank))

print("here")
if rank == 1:
    fail()
dist.barrier()
""")
    assert shown.error.startswith(
        "RankFailure: rank 1 of 2 failed in cell, line 5: ValueError: boom on rank 1\n  rank 0: "
    )
    assert '[1]   File "cell", line 9, in <module>\n[1]     fail()' in shown.traceback
    assert (
        '[1]   File "cell", line 5, in fail\n[1]     raise ValueError("boom on rank " + str(rank))' in shown.traceback
    )
    assert "vlmcourse" not in shown.traceback
    assert shown.seconds_from_first_text < 25
    assert shown.stderr == ""


def test_a_mistake_in_the_cell_shows_before_any_process_starts(kernel: Kernel) -> None:
    shown = kernel.run("%%torchrun\n\nif rank:\nprint(1)", timeout_s=20)
    assert shown.error.startswith('CellSyntaxError:   File "cell", line 4\n')
    assert "IndentationError" in shown.traceback
    assert shown.stderr == ""
    wrong_flag = kernel.run("%%torchrun --nprocs 2\npass", timeout_s=20)
    assert wrong_flag.traceback == "CellOptionsError: %%torchrun has no flag '--nprocs': did you mean '--nproc'?"
    kernel.run("import threading; lock = threading.Lock()")
    assert "--in lock: a _thread.lock cannot travel" in kernel.run("%%torchrun --in lock\npass", timeout_s=20).error


def test_a_script_that_initialises_the_group_itself_runs_unchanged(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 2
        import torch, torch.distributed as dist
        from torch.distributed import init_process_group
        init_process_group("nccl")
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 0:
            dist.init_process_group("gloo", world_size=4, rank=0)
    """)
    assert shown.lines(0) == [
        "note: %%torchrun has already initialised the process group (gloo, 2 ranks): "
        "init_process_group changes nothing here"
    ]
    assert shown.lines(1) == []
    assert "rank 0 of 2 failed in cell, line 10: ValueError: rank 0: init_process_group was asked for" in shown.error


def test_magics_await_exit_and_data_loader_workers_behave(kernel: Kernel) -> None:
    shown = kernel.run("""%%torchrun -n 1 --out batches
        import asyncio, sys, torch
        from torch.utils.data import DataLoader, Dataset
        class Numbers(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return torch.tensor(index)
        %time x = 2
        await asyncio.sleep(0.01)
        !echo from the shell
        batches = []
        for how in ("fork", "spawn"):
            loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=how)
            batches.append([batch.tolist() for batch in loader])
        sys.exit()
    """)
    assert shown.error == shown.stderr == ""
    assert "from the shell" in shown.lines(0)
    assert any(line.startswith("Wall time") for line in shown.lines(0))
    assert kernel.run("print(batches)").stdout == "[[[0, 1], [2, 3]], [[0, 1], [2, 3]]]\n"


def test_help_is_complete(kernel: Kernel) -> None:
    help_text = kernel.run("print(get_ipython().find_magic('torchrun', 'cell').__doc__)").stdout
    for word in (
        "-n, --nproc",
        "--in a,b",
        "--out loss",
        "--ranks 0,2-3",
        "--timeout SECONDS",
        "init_ranks()",
        "For example:",
        "A rank is one of the processes",
        "start and restart take -n",
    ):
        assert word in help_text


def test_nbclient_stops_at_a_failing_rank() -> None:
    cells = ["%load_ext vlmcourse", "%%torchrun -n 1\n1 / 0", "print('never')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with pytest.raises(CellExecutionError, match=r"rank 0 of 1 failed in cell, line 2: ZeroDivisionError"):
        NotebookClient(notebook, timeout=180).execute()
    assert notebook.cells[2].outputs == []
