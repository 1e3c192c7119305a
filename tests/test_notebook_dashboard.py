"""The notebook's dashboard: what it draws, when its thread ends, and how a real kernel updates it while a cell runs."""

from __future__ import annotations

import asyncio
import itertools
import threading
import xml.dom.minidom
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from jupyter_core.utils import ensure_async
from nbclient import NotebookClient
from nbformat import NotebookNode, v4
from notebook_kernel import wait_until
from run_folders import HandmadeRun, end_of

from vlmcourse.colours import PHASE_COLOURS
from vlmcourse.monitor.live_run import LiveRun
from vlmcourse.monitor.run_view import RUNNING, STOPPED, RankView, RunView
from vlmcourse.notebook.dashboard import Dashboard, watch_run
from vlmcourse.notebook.dashboard_drawing import MOST_RANKS, choose_ranks, draw_run, thin
from vlmcourse.notebook.options import CellOptionsError, parse_options


def read_bars(html: str, rank: int) -> dict[str, float]:
    """Return the widths of a rank's bar by colour, in pixels."""
    titled = [
        rect
        for rect in xml.dom.minidom.parseString(html).getElementsByTagName("rect")
        if any(title.toxml().startswith(f"<title>rank {rank}:") for title in rect.getElementsByTagName("title"))
    ]
    places = [(float(rect.getAttribute("x")), float(rect.getAttribute("width"))) for rect in titled]
    for (left, width), (following, _) in itertools.pairwise(places):
        assert following == pytest.approx(left + width, abs=0.15)
    return {rect.getAttribute("fill"): width for rect, (_, width) in zip(titled, places, strict=True)}


def test_bars_are_in_proportion_and_in_the_colours_of_the_course(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path / "a <b>", num_steps=9)
    for step in range(1, 6):
        run.write_step(step, {0: 0.4, 1: 0.2})
        run.write_row(step)
    html = draw_run(LiveRun(run.folder, lambda: end_of(5)).read())
    bars = [read_bars(html, rank) for rank in (0, 1)]
    whole = sum(bars[0].values())
    assert sum(bars[1].values()) == pytest.approx(whole, abs=0.3)
    for bar, own_s in zip(bars, (0.4, 0.2), strict=True):
        for name, share in (("data_wait", 0.25 * own_s), ("backward", 0.5 * own_s), ("communication", 0.5 - own_s)):
            assert bar[PHASE_COLOURS[name]] == pytest.approx(whole * share / 0.5, abs=0.3)
    assert "a &lt;b&gt;" in html and "<b>:" not in html
    for words in ("step 5 of 9 · 2 ranks · loss 0.2000 · 500 tokens/s · 2 s", "Slowest rank: 0", "0.20 GB"):
        assert words in html
    xml.dom.minidom.parseString(draw_run(RunView(folder="&", state=RUNNING)))


def test_of_many_ranks_those_that_matter_are_drawn() -> None:
    ranks = [
        RankView(rank=rank, step=1, since_step_s=0.0, step_s=1.0, phases_s={}, own_s=rank / 100) for rank in range(64)
    ]
    ranks[3] = RankView(rank=3, step=0, since_step_s=None, step_s=None, phases_s={}, own_s=None, problem="behind")
    assert [rank.rank for rank in choose_ranks(ranks)] == [3, *range(64 - MOST_RANKS + 1, 64)]
    html = draw_run(RunView(folder="many", state=RUNNING, step=1, world_size=64, ranks=ranks))
    assert "48 more ranks are not drawn" in html and "no step yet, behind<" in html
    points = [(step, float(step)) for step in range(1, 1001)]
    assert len(thin(points, 100)) == 100 and thin(points, 100)[0] == points[0] and thin(points, 100)[-1] == points[-1]


def test_memory_by_owner_is_drawn_where_the_log_has_it() -> None:
    html = draw_run(RunView(folder="f", state=RUNNING, owners_bytes={"weights": 3 * 10**9, "new": 10**9, "none": 0}))
    widths = [
        float(rect.getAttribute("width")) for rect in xml.dom.minidom.parseString(html).getElementsByTagName("rect")
    ]
    assert (
        widths[0] == pytest.approx(3 * widths[1])
        and "weights 3.0 GB" in html
        and "none" not in html.split("by owner")[-1]
    )
    setting = "logging.memory_owners = true"
    assert setting in draw_run(RunView(folder="f", state=RUNNING, losses=[(1, 2.0)])), "where it has not, what to set"
    assert setting not in draw_run(RunView(folder="f", state=RUNNING, losses=[(1, 2.0)], owners_bytes={"weights": 1}))


def ends_with(dashboard: Dashboard, words: str) -> bool:
    return wait_until(lambda: not dashboard.is_watching and words in dashboard.end_reason, within_s=20)


def test_a_dashboard_waits_for_a_run_follows_it_and_ends_with_it(tmp_path: Path) -> None:
    dashboard = watch_run(tmp_path / "tiny", every_s=0.02)
    assert "waiting for its first step" in dashboard.value
    run = HandmadeRun(tmp_path / "tiny")
    run.write_step(1)
    assert wait_until(lambda: "step 1 of 100" in dashboard.value, within_s=20) and dashboard.is_watching
    run.write_step(2)
    run.finish()
    assert ends_with(dashboard, "finished") and "step 2 of 100" in dashboard.value
    assert repr(dashboard).startswith(f"{tmp_path / 'tiny'}: finished, step 2")
    assert not any("dashboard" in thread.name for thread in threading.enumerate())


def test_an_earlier_run_is_shown_until_the_next_one_begins_and_ends_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    run = HandmadeRun(folder)
    run.write_step(7)
    run.finish()
    shown, of_cell = Dashboard(folder, every_s=0.02), Dashboard(folder, every_s=0.02, is_of_cell=True)
    for each in (shown, of_cell):
        each.start()
        for _ in range(3):
            each.refresh()
    assert shown.is_watching and "step 7" in shown.value
    assert "step 7" not in of_cell.value and "waiting for a run" in of_cell.value
    folder.rename(tmp_path / "tiny.1")
    run = HandmadeRun(folder)
    run.write_step(1)
    assert wait_until(lambda: "step 1 of" in shown.value and "step 1 of" in of_cell.value, within_s=20)
    run.finish()
    assert ends_with(shown, "finished") and of_cell.is_watching
    of_cell.end("its cell has ended")
    assert not of_cell.is_watching and "</b>: finished</div>" in of_cell.value


def test_a_folder_that_no_run_writes_to_is_named_and_which_one_to_give(tmp_path: Path) -> None:
    HandmadeRun(tmp_path / "tiny").write_step(1)
    missed = Dashboard(tmp_path / "tniy", is_of_cell=True)
    assert "waiting for its first step; there is no run yet in this folder" in missed.value
    assert "run.output_dir/run.name" in missed.value
    missed.end("its cell has ended")
    for said in (unescape(missed.value), repr(missed)):
        assert "its cell has ended; no run has written here: " in said
        assert "tniy' is not there: give the folder that a run writes to, run.output_dir/run.name; runs are in" in said
        assert str(tmp_path / "tiny") in said
    earlier = Dashboard(tmp_path / "tiny", is_of_cell=True)
    earlier.end("its cell has ended")
    for said in (unescape(earlier.value), repr(earlier)):
        assert "its cell has ended, and none of its runs has written here; an earlier one has: give the folder" in said


def test_a_dashboard_ends_when_the_run_stops_and_when_nothing_comes(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"every_s": 0.02, "restart_s": 0.2}
    run = HandmadeRun(tmp_path / "stops", host="another")
    run.write_step(1)
    dashboard = Dashboard(run.folder, **quick)
    dashboard.start()
    assert dashboard.view.state == RUNNING
    restarted = HandmadeRun(run.folder, pid=2**22 + 1)  # above every number of a process
    restarted.write_step(2)
    assert ends_with(dashboard, "stopped") and dashboard.view.state == STOPPED
    assert "has stopped after step 2 without a result" in dashboard.value
    waits = Dashboard(tmp_path / "never", every_s=0.02, give_up_s=0.1)
    waits.start()
    assert ends_with(waits, "nothing new for 0 s, so no longer watched: call watch_run again")
    with pytest.raises(ValueError, match="every_s = 0: must be above 0"):
        Dashboard(tmp_path, every_s=0)


def test_the_flag_takes_a_folder() -> None:
    assert parse_options("-n 2 --dashboard runs/tiny").dashboard == "runs/tiny"
    for line in ("--dashboard", "--dashboard ''", "--dashboard configs/tiny.toml"):
        with pytest.raises(CellOptionsError, match="expected one argument|must be the folder that the run writes to"):
            parse_options(line)


THREADS = "[thread.name for thread in threading.enumerate() if 'board' in thread.name]"
TESTS = str(Path(__file__).parent)
CELL = """%%torchrun -n 2 --dashboard runs/cell
import sys, time
from pathlib import Path
from IPython.display import clear_output
sys.path.append({tests!r})
from run_folders import HandmadeRun
if rank == 0:
    runs = [HandmadeRun(Path("runs") / name) for name in ("cell", "before")]
    for step in range(1, 5):
        for run in runs:
            run.write_step(step)
        time.sleep(0.5)
    clear_output()
    {end}
print("over")
"""


class WatchingClient(NotebookClient):
    """Runs a notebook and keeps what its widgets were sent, with what had been printed by then."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[tuple[int, str]] = []
        self.printed = ""
        self.on_update: Callable[[str], None] = lambda html: None

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        content = msg["content"]
        if msg["msg_type"] == "stream":
            self.printed += content["text"]
        if msg["msg_type"] == "comm_msg" and (html := content["data"].get("state", {}).get("value")):
            self.sent.append((cell_index, html))
            self.on_update(html)
        return super().process_message(msg, cell, cell_index)


@pytest.mark.notebook
@pytest.mark.slow
def test_a_real_kernel_updates_widgets_while_a_cell_runs_and_ends_with_it(tmp_path: Path) -> None:
    cells = [
        "%load_ext vlmcourse",
        "from vlmcourse.notebook.dashboard import watch_run\nbefore = watch_run('runs/before')\nbefore",
        CELL.format(tests=TESTS, end="[run.finish() for run in runs]"),
        f"import sys, threading\nbefore._thread.join(20)\nprint('torch' in sys.modules, {THREADS})",
        "again = watch_run('runs/before')\nagain",
        CELL.format(tests=TESTS, end="time.sleep(600)"),
        f"again._thread.join(20)\nprint(again.end_reason, {THREADS})",
    ]
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells])
    notebook.cells[5].metadata.tags = ["raises-exception"]
    client = WatchingClient(
        notebook, timeout=90, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    interrupts: list[asyncio.Future[Any]] = []

    def interrupt(html: str) -> None:
        if "step 4 of" in html and client.sent[-1][0] == 5 and not interrupts:
            assert client.km is not None
            interrupts.append(asyncio.ensure_future(ensure_async(client.km.interrupt_kernel())))

    client.on_update = interrupt
    client.execute()
    sent = [html for number, html in client.sent if number in (2, 3)]  # the last look may be just after the cell
    assert sum(number == 2 for number, _ in client.sent) >= len(sent) - 1
    for folder in ("runs/cell", "runs/before"):
        own = [html for html in sent if f"<b>{folder}</b>" in html]
        running = [html for html in own if "</b>: running" in html]
        assert len(running) >= 2 and "</b>: finished" in own[-1] and "step 4 of 100" in own[-1], own
    shown = notebook.cells[2].outputs
    assert "application/vnd.jupyter.widget-view+json" in shown[0].data  # after clear_output too
    assert notebook.cells[3].outputs[0].text == "False []\n"
    last = {name: [html for _, html in client.sent if f"<b>runs/{name}</b>" in html][-1] for name in ("cell", "before")}
    assert "stopped: its cell was interrupted or has failed" in last["cell"]
    assert "stopped: its cell has ended" in last["before"] and "stopped after step 4" in last["before"]
    assert notebook.cells[6].outputs[0].text == "its cell has ended []\n"
    assert notebook.cells[5].outputs[-1].ename == "RanksInterrupted"
