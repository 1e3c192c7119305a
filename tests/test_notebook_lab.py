"""`%%torchrun` in JupyterLab itself, in a browser: what a person sees, and what is left when JupyterLab closes."""

import uuid
from pathlib import Path

import pytest
from lab_browser import BROWSERS, find_browser, open_notebook
from notebook_kernel import MARK, marked_processes, wait_until

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.skipif(find_browser() is None, reason=f"no browser is installed: one of {', '.join(BROWSERS)}"),
]

FIGURE = """%%torchrun -n 2
import matplotlib.pyplot as plt, torch, torch.distributed as dist
total = torch.tensor(rank + 1)
dist.all_reduce(total)
print("the sum on rank", rank, "is", total.item())
plt.plot([1, 2, 3])"""
HANG = """%%torchrun -n 2
import time, torch, torch.distributed as dist
print("up", rank)
if rank == 0:
    dist.all_reduce(torch.ones(1))
time.sleep(600)  # rank 1 skips the all_reduce"""
DIAGNOSIS = [
    "RanksInterrupted",
    "rank 0 waits in all_reduce #1 (cell line 5",
    "rank 1 never entered it: it is in cell line 6",
]
"""What the person reads who interrupts the hanging cell."""


def test_output_a_figure_an_interrupted_hang_and_nothing_left(tmp_path: Path) -> None:
    cells = ["%load_ext vlmcourse", FIGURE, HANG, "%torchrun start -n 2"]
    mark = uuid.uuid4().hex
    with open_notebook(tmp_path, "ranks", cells, env={MARK: mark}) as notebook:
        for number in (0, 1):
            notebook.run(number)
            notebook.wait_for_end(number)
        assert sorted(notebook.output(1).split("\n")[:2]) == [
            "[0] the sum on rank 0 is 3",
            "[1] the sum on rank 1 is 3",
        ]
        assert notebook.pictures(1) == 1

        notebook.run(2)
        for rank in (0, 1):
            notebook.wait_for_text(2, f"up {rank}")
        notebook.interrupt()
        notebook.wait_for_end(2)
        assert all(words in notebook.output(2) for words in DIAGNOSIS), notebook.output(2)

        notebook.run(3)  # ranks that live on when the page and the server close
        notebook.wait_for_end(3)
        assert "2 ranks are ready" in notebook.output(3)
        assert len(marked_processes(mark)) >= 1 + 1 + 1 + 2 * 2  # server, kernel, fork server, guards and ranks
    assert wait_until(lambda: not marked_processes(mark), within_s=30), marked_processes(mark)
