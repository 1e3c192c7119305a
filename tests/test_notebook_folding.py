"""What becomes of the lines of all ranks on their way to a person: folded, and cut where they are too many."""

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from vlmcourse.notebook import kept_output
from vlmcourse.notebook.flood import LIMITS, FloodLimit
from vlmcourse.notebook.folding import HOLD_S, FoldingPrinter, LineFolder
from vlmcourse.notebook.jobs import remove_orphans
from vlmcourse.notebook.kept_output import KeptOutput
from vlmcourse.notebook.rank_names import RankNumbers
from vlmcourse.notebook.streams import TaggedLine

ALL = (0, 1, 2, 3)


class Screen:
    """A printer that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[RankNumbers, str]] = []

    def lines(self, lines: Sequence[TaggedLine]) -> None:
        self.seen += lines

    def progress(self, rank: int, text: str) -> None:
        self.seen.append(((rank,), f"<{text}>"))

    def idle(self) -> None:
        """Nothing is held back."""

    def make_room(self) -> None:
        self.seen.append(((), "room"))

    def finish(self) -> None:
        self.seen.append(((), "end"))


def test_a_line_of_all_ranks_is_shown_once_and_at_once() -> None:
    folder = LineFolder(ALL)
    for rank in (2, 0, 3):
        folder.feed(rank, "loss 1.5", 0.0)
        assert folder.release(0.0) == []
    folder.feed(1, "loss 1.5", 0.01)
    assert folder.release(0.01) == [(ALL, "loss 1.5")]


def test_a_line_of_some_ranks_waits_for_the_others_and_no_longer() -> None:
    folder = LineFolder(ALL)
    folder.feed(2, "saved", 0.0)
    folder.feed(0, "saved", 0.05)
    assert folder.release(HOLD_S - 0.001) == []
    assert folder.release(HOLD_S) == [((0, 2), "saved")]
    folder.feed(3, "saved", HOLD_S)
    assert folder.release(2 * HOLD_S) == [((3,), "saved")]


def test_a_line_that_no_rank_can_join_any_more_does_not_wait() -> None:
    folder = LineFolder([0, 1])
    folder.feed(0, "rank 0", 0.0)
    assert folder.release(0.0) == []
    folder.feed(1, "rank 1", 0.0)
    assert folder.release(0.0) == [((0,), "rank 0")]  # whatever rank 1 prints next comes after its "rank 1"
    assert folder.release(HOLD_S) == [((1,), "rank 1")]
    only = LineFolder([3])
    only.feed(3, "alone", 0.0)
    assert only.release(0.0) == [((3,), "alone")]


def test_an_equal_line_further_up_is_not_joined_where_that_would_change_a_ranks_order() -> None:
    folder = LineFolder([0, 1])
    for rank, text in ((0, "a"), (0, "b"), (1, "b"), (1, "a"), (0, "a")):
        folder.feed(rank, text, 0.0)
    assert folder.flush() == [((0,), "a"), ((0, 1), "b"), ((0, 1), "a")]
    assert folder.flush() == []


def test_a_display_leaves_the_later_lines_of_others_to_wait_for_their_twins() -> None:
    folder = LineFolder([0, 1])
    for rank, text in ((1, "a"), (0, "a"), (1, "b")):
        folder.feed(rank, text, 0.0)
    assert folder.flush(0) == [((0, 1), "a")]
    folder.feed(0, "b", 0.0)
    assert folder.release(0.0) == [((0, 1), "b")]


def test_equal_lines_of_one_rank_stay_as_many_as_they_were() -> None:
    folder = LineFolder([0, 1])
    for rank in (0, 0, 0, 1, 1):
        folder.feed(rank, "", 0.0)
    assert folder.release(HOLD_S) == [((0, 1), ""), ((0, 1), ""), ((0,), "")]


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_reads_its_own_lines_in_its_own_order(seed: int) -> None:
    draw = random.Random(seed)
    folder, printed, shown, now_s = LineFolder(ALL), {rank: [] for rank in ALL}, [], 0.0
    for _ in range(2000):
        rank, text = draw.choice(ALL), draw.choice("abc")
        printed[rank].append(text)
        folder.feed(rank, text, now_s)
        now_s += draw.choice((0.0, 0.001, 0.05))
        if draw.random() < 0.3:
            shown += folder.release(now_s)
    shown += folder.flush()
    for rank in ALL:
        assert [text for ranks, text in shown if rank in ranks] == printed[rank]
    assert len(shown) < 1900
    assert all(list(ranks) == sorted(set(ranks)) for ranks, _ in shown)


def test_many_equal_lines_take_linear_time() -> None:
    folder = LineFolder(ALL)
    for rank in ALL:
        for _ in range(50_000):
            folder.feed(rank, "x", 0.0)
    assert folder.release(0.0) == [(ALL, "x")] * 50_000


def test_a_progress_bar_keeps_its_place_and_is_not_folded() -> None:
    now_s = [0.0]
    screen = Screen()
    with FoldingPrinter(screen, [0, 1], clock=lambda: now_s[0]) as printer:
        printer.line(0, "before")
        printer.progress(0, "50%")
        printer.progress(0, "99%")
        printer.line(1, "between")
        printer.line(0, "100%")
        printer.line(1, "100%")
        printer.idle()
        assert screen.seen == [
            ((0,), "before"),
            ((), "room"),
            ((0,), "<50%>"),
            ((0,), "<99%>"),
            ((0,), "100%"),
        ]
        now_s[0] = HOLD_S
        printer.idle()
        assert screen.seen[-2:] == [((1,), "between"), ((1,), "100%")]
        printer.progress(1, "5%")
        printer.progress(1, "")
        printer.line(1, "same")
        printer.line(0, "same")
    assert screen.seen[-2:] == [((0, 1), "same"), ((), "end")]


def limited(kept: KeptOutput | None = None) -> FloodLimit:
    return FloodLimit(kept or KeptOutput(), 0.0)


def numbered(first: int, last: int) -> list[tuple[str, str]]:
    return [("[0]", str(number)) for number in range(first, last)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_output, "private_folder", lambda: tmp_path)
    return tmp_path


def test_slow_output_is_shown_as_it_comes_however_long_it_goes_on(folder: Path) -> None:
    kept = KeptOutput()
    limit = limited(kept)
    for step in range(100_000):
        assert limit.feed(numbered(step, step + 1), step / 45) == [f"[0] {step}"]
    assert limit.finish() == []
    kept.close()
    assert list(folder.iterdir()) == []


def test_a_flood_shows_its_beginning_and_end_and_a_file_has_all(folder: Path) -> None:
    kept = KeptOutput()
    limit = limited(kept)
    shown = []
    for first in range(0, 100_000, 5000):
        shown += limit.feed(numbered(first, first + 5000), 0.0)
    assert shown == [f"[0] {number}" for number in range(1000)]
    gap, *last = limit.finish()
    kept.close()
    (path,) = folder.iterdir()
    assert gap == f"... 98,800 lines not shown {LIMITS}; all of them, until the kernel ends: {path}"
    assert last == [f"[0] {number}" for number in range(99_800, 100_000)]
    assert path.read_text().splitlines() == [f"[0] {number}" for number in range(100_000)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_flood_ends_with_a_pause_and_says_where_it_is_if_none_comes() -> None:
    limit = limited()
    assert len(limit.feed(numbered(0, 3000), 0.0)) == 1000
    assert limit.idle(0.9) == []
    gap, *last = limit.idle(1.1)
    assert gap.startswith("... 1,800 lines not shown") and len(last) == 200 and last[-1] == "[0] 2999"
    assert limit.feed(numbered(0, 1), 1.2) == ["[0] 0"]

    shown, now_s = [], 2.0
    for number in range(2500):  # 100 lines a second
        now_s = 2.0 + number / 100
        shown += limit.feed(numbered(number, number + 1), now_s)
    news = [index for index, line in enumerate(shown) if line.startswith("... ")]
    assert len(news) == 2
    assert shown[news[0] - 1] == f"[0] {news[0] - 1}" and news[0] < 300
    assert news[1] - news[0] == 11 and len(shown) == news[1] + 11


def test_a_flood_of_few_hidden_lines_leaves_no_gap() -> None:
    limit = limited()
    shown = limit.feed(numbered(0, 1100), 0.0)
    assert shown + limit.finish() == [f"[0] {number}" for number in range(1100)]


def test_a_display_in_a_flood_comes_after_the_latest_lines() -> None:
    limit = limited()
    limit.feed(numbered(0, 2000), 0.0)
    gap, *latest = limit.latest()
    assert gap.startswith("... 990 lines not shown") and latest == [f"[0] {number}" for number in range(1990, 2000)]
    assert limit.latest() == []
    assert limit.feed(numbered(0, 5), 0.0) == []
    assert limit.finish() == [f"[0] {number}" for number in range(5)]


def test_a_very_long_line_is_cut_with_its_length_and_many_count_as_more(folder: Path) -> None:
    kept = KeptOutput()
    limit = limited(kept)
    (line,) = limit.feed([("[0,1]", "x" * 1_000_000)], 0.0)
    (path,) = folder.iterdir()
    assert line == f"[0,1] {'x' * 10_000} ... (1,000,000 characters; all of them, until the kernel ends: {path})"
    assert path.read_text() == f"[0,1] {'x' * 1_000_000}\n"
    shown = limit.feed([("[0]", "y" * 5_000)] * 1000, 0.0)
    assert 80 < len(shown) < 100


def test_a_file_that_cannot_be_written_costs_no_more_than_itself(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(kept_output, "private_folder", lambda: folder / "gone")
    limit = limited()
    assert len(limit.feed(numbered(0, 3000), 0.0)) == 1000
    assert (
        limit.finish()[0] == f"... 1,800 lines not shown {LIMITS}; they could not be kept (No such file or directory)"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is always full")
def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    kept = KeptOutput()
    limit = limited(kept)
    limit.feed(numbered(0, 200_000), 0.0)
    assert kept._file is not None
    kept._file = open("/dev/full", "w")  # noqa: SIM115
    limit.feed(numbered(0, 200_000), 0.0)
    assert "; only the first lines, because of No space left on device, until the kernel ends: " in limit.finish()[0]
    kept.close()


def test_a_file_has_an_end(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(kept_output, "MAX_FILE_CHARS", 50_000)
    kept = KeptOutput()
    limit = limited(kept)
    for first in range(0, 20_000, 1000):
        limit.feed(numbered(first, first + 1000), 0.0)
    assert "only the first 50,000 characters, until the kernel ends: " in limit.finish()[0]
    kept.close()
    (path,) = folder.iterdir()
    assert 0 < path.stat().st_size <= 50_000


@pytest.mark.parametrize("ending", ["", "import os; os._exit(1)"])
def test_the_files_go_with_the_process_or_with_the_next_kernel(
    ending: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "from vlmcourse.notebook import kept_output; kept_output.private_folder(); "
    subprocess.run([sys.executable, "-c", program + ending], env={**os.environ, "TMPDIR": str(folder)}, timeout=60)
    assert len(list(folder.iterdir())) == bool(ending)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    remove_orphans()
    assert list(folder.iterdir()) == []
