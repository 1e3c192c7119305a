import io
import time

import pytest

from vlmcourse.notebook.rank_names import rank_tag
from vlmcourse.notebook.streams import LineSplitter, TerminalPrinter


def split(*chunks: bytes) -> tuple[list[str], list[str]]:
    """Return the lines, and the states of overwritten lines, that a rank's output gives."""
    splitter = LineSplitter()
    lines, states = [], []
    for chunk in (*chunks, b""):
        new_lines, state = splitter.feed(chunk)
        lines += new_lines
        states += [state] if state is not None else []
    return lines, states


def test_a_line_cut_anywhere_arrives_whole() -> None:
    data = "first\nzweite Zeile ä\n\nlast".encode()
    for cut in range(len(data)):
        assert split(data[:cut], data[cut:])[0] == ["first", "zweite Zeile ä", "", "last"]
    assert split(*(bytes([byte]) for byte in data))[0] == ["first", "zweite Zeile ä", "", "last"]


def test_a_line_without_an_end_appears_at_the_end_of_the_output() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"no newline")[0] == []
    assert splitter.feed(b"")[0] == ["no newline"]
    assert splitter.feed(b"")[0] == []


def test_windows_line_ends_are_line_ends_and_not_progress() -> None:
    assert split(b"one\r", b"\ntwo\r\n") == (["one", "two"], [])


def test_a_progress_bar_becomes_one_line_with_its_last_state() -> None:
    lines, states = split(b"\r 10%", b"\r 50%", b"\r100%\n", b"next\n")
    assert lines == ["100%", "next"]
    assert states == [" 10%", " 50%"]


def test_a_shorter_text_leaves_the_end_of_the_longer_one_below_it_as_in_a_terminal() -> None:
    assert split(b"loading...\rdone\n")[0] == ["doneing..."]


def test_a_bar_that_wipes_itself_out_leaves_no_line() -> None:
    assert split(b"\r 10%", b"\r     \r", b"\n") == ([], [" 10%", "", ""])
    assert split(b"\r 10%", b"\r     \r") == ([], [" 10%", "", ""])
    assert split(b"\r 10%", b"\r     \rnext\n") == (["next"], [" 10%"])


def test_bytes_that_are_no_text_do_not_stop_the_output() -> None:
    assert split(b"\xff\xfe ok\n")[0] == ["\ufffd\ufffd ok"]


def test_cursor_moves_of_nested_bars_are_dropped_and_colours_kept() -> None:
    assert split(b"\x1b[A\nplain\n\x1b[31mred\x1b[0m\n")[0] == ["plain", "\x1b[31mred\x1b[0m"]


def test_a_long_line_in_many_pieces_takes_linear_time() -> None:
    lines, _ = split(*([b"x" * 1000] * 20_000))
    assert [len(line) for line in lines] == [20_000_000]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_sees_progress_in_place_and_a_file_now_and_then(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    stream = Stream()
    printer = TerminalPrinter(stream)
    printer.progress(0, "50%")
    printer.lines([((1,), "hello")])
    wipe = "[0] 50%\r\x1b[K" if is_terminal else ""
    assert stream.getvalue() == f"{wipe}[1] hello\n"
    later_s = time.monotonic() + 11
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    printer.progress(0, "75%")
    printer.progress(0, "76%")
    assert stream.getvalue() == f"{wipe}[1] hello\n[0] 75%" + ("" if is_terminal else "\n")


def test_plain_lines_and_overwritten_ones_in_one_chunk_keep_their_order() -> None:
    assert split(b"a\n\r 5%\rdone\nb\n\x1b[Ac\nd", b"e\nf\n") == (["a", "done", "b", "c", "de", "f"], [])
    splitter = LineSplitter()
    assert splitter.feed(b"a\r 5%") == ([], " 5%")
    assert splitter.feed(b"\rdone\nplain\n") == (["done", "plain"], None)


def test_a_tag_names_its_ranks_in_short() -> None:
    tags = {(2,): "[2]", (0, 1): "[0,1]", (0, 2): "[0,2]", (0, 1, 2, 3): "[0-3]", (0, 2, 3, 4, 7): "[0,2-4,7]"}
    assert {ranks: rank_tag(ranks) for ranks in tags} == tags
