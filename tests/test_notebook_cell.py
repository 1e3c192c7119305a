"""Parts of `%%torchrun` that need no process: flags, the text of the cell, variables, the private folder."""

import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from IPython.core.inputtransformer2 import TransformerManager

from vlmcourse.notebook import jobs
from vlmcourse.notebook.cell import CellSyntaxError, prepare_cell
from vlmcourse.notebook.cell_run import select_variables
from vlmcourse.notebook.hints import explain_limit, explain_missing_group, explain_missing_name
from vlmcourse.notebook.jobs import Job, open_job_folder, write_private
from vlmcourse.notebook.options import CellOptions, CellOptionsError, parse_options
from vlmcourse.notebook.session_commands import START_FLAGS
from vlmcourse.notebook.variables import CannotTravelError, dump_variables, load_variables
from vlmcourse.notebook.worker import write_outputs

transform = TransformerManager().transform_cell


def test_flags_are_read_in_every_spelling() -> None:
    assert parse_options("") == CellOptions(nproc=2, timeout_s=300.0)
    expected = CellOptions(nproc=4, in_names=("a", "b"), out_names=("loss",), timeout_s=1.5)
    assert parse_options("-n 4 --in a,b --out loss --timeout 1.5") == expected
    assert parse_options("--nproc=4 --in a, b --out loss --timeout=1.5  # a comment") == expected
    assert parse_options("--in a --in b,a -n4 --timeout 1.5 --out loss") == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nprocs 2", "no flag '--nprocs': did you mean '--nproc'"),
        ("--timeot 2", "did you mean '--timeout'"),
        ("-n 2 two", "no argument 'two'"),
        ("-n two", "'two' cannot be used: must be a whole number"),
        ("-n 0", "argument -n/--nproc: '0' cannot be used: must be from 1 to 64 on one machine"),
        ("--n 2", "no flag '--n': write -n$"),
        ("-np 2", "no flag '-np': write -n$"),
        ("--nproc_per_node=2", "torchrun's --nproc-per-node is -n here"),
        ("--help", "type %%torchrun. for help"),
        ("-h", "type %%torchrun. for help"),
        ("--standalone", "no flag '--standalone': not needed here: leave it out"),
        ("train.py", "put the script's code into the cell, or run it there with %run"),
        ("1", "no argument '1': for 1 rank write -n 1"),
        ("--save my script.py", "'my' cannot be used: .*; quote a path with spaces"),
        ("--launcher elastc", "did you mean 'elastic'. choose one of fork, direct, elastic; type %%torchrun. for help"),
        ("-n 2 --ranks 0 1", "--ranks 0 1: '0 1' names no ranks: write numbers and ranges with commas between them"),
        ("-n 2.5", "must be a whole number"),
        ("--timeout soon", "'soon' cannot be used: must be a number of seconds"),
        ("--timeout 0", "above 0"),
        ("--timeout nan", "above 0"),
        ("--in", "--in: expected at least one argument"),
        ("--in a+b", "--in a.b: must be names of variables"),
        ("--out class", "--out class: must be names"),
        ("--in rank", "every rank has a 'rank' of its own"),
        ("--in 'a", "No closing quotation"),
    ],
)
def test_a_wrong_flag_says_what_to_change(line: str, message: str) -> None:
    with pytest.raises(CellOptionsError, match=message):
        parse_options(line)


def test_the_line_magics_name_themselves_and_their_own_flags() -> None:
    for line, message in (
        ("2", "%torchrun start has no argument '2': for 2 ranks write -n 2"),
        ("-m 2", "%torchrun start has no flag '-m': choose one of -n, --nproc, --timeout"),
        ("--in a", "%torchrun start has no flag '--in': choose one of -n, --nproc, --timeout"),
    ):
        with pytest.raises(CellOptionsError, match=f"^{re.escape(message)}"):
            parse_options(line, magic="%torchrun start", flags=START_FLAGS)
    assert parse_options("-n4 --timeout=2", magic="%torchrun start", flags=START_FLAGS).nproc == 4


def test_a_variable_that_the_notebook_lacks_is_named_with_the_nearest_one() -> None:
    assert select_variables(("a",), {"a": 1, "b": 2}) == {"a": 1}
    with pytest.raises(CellOptionsError, match="no variable 'lerning_rate': .*did you mean 'learning_rate'"):
        select_variables(("lerning_rate",), {"learning_rate": 1})


@pytest.mark.parametrize("num_empty", [0, 1, 3])
def test_line_numbers_are_those_of_the_notebook_cell(num_empty: int) -> None:
    body = "\n" * num_empty + "x = 1\n%time x\ny = = 2\n"
    with pytest.raises(CellSyntaxError) as caught:
        prepare_cell("%%torchrun -n 2", body, transform)
    assert f'File "cell", line {4 + num_empty}\n' in str(caught.value)
    assert str(caught.value).endswith("SyntaxError: invalid syntax")
    prepared = prepare_cell("%%torchrun -n 2", body.replace("= =", "="), transform)
    assert prepared.source.split("\n")[1 + num_empty] == "x = 1"
    assert prepared.shown_lines[3 + num_empty] == "y = 2"


def test_what_a_notebook_allows_in_a_cell_is_allowed() -> None:
    prepared = prepare_cell("%%torchrun", "await thing()\n!ls\nx = %who_ls\nx; # nothing is shown", transform)
    assert not prepared.shows_last_value
    assert prepare_cell("%%torchrun", "x  # a comment;", transform).shows_last_value
    assert prepare_cell("%%torchrun", "", transform).source.strip() == ""


def test_what_variables_share_stays_shared_and_results_arrive_detached() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2)).sum()
    there = load_variables(dump_variables("--in", {"model": model, "optimizer": optimizer, "loss": loss}))
    assert there["optimizer"].param_groups[0]["params"][0] is there["model"].weight
    assert there["model"].weight.requires_grad
    assert not there["loss"].requires_grad
    torch.testing.assert_close(there["loss"], loss.detach())


@pytest.mark.parametrize("value", [threading.Lock(), [{"deep": (i for i in ())}]])
def test_what_cannot_travel_is_named_with_its_type(value: object) -> None:
    with pytest.raises(CannotTravelError, match=f"--in guilty: a .*{type(value).__name__} cannot travel .*pickle"):
        dump_variables("--in", {"innocent": 1, "guilty": value})


def test_an_open_file_and_a_model_that_needs_ranks_are_refused_with_what_to_send_instead(tmp_path: Path) -> None:
    with open(tmp_path / "x", "w") as file, pytest.raises(CannotTravelError) as caught:
        dump_variables("--in", {"f": file})
    assert str(caught.value) == (
        "--in f: a _io.TextIOWrapper cannot travel between the notebook and the ranks: an open file stays where it was "
        "opened: send its path, or what is in it"
    )
    wrapped = object.__new__(torch.nn.parallel.DistributedDataParallel)
    with pytest.raises(CannotTravelError, match=r"--out model: .*DistributedDataParallel .*`model = model.module`"):
        dump_variables("--out", {"model": wrapped})
    assert load_variables(dump_variables("--in", {"print": lambda: sys.stdout}))["print"]() is not None


class Unbuildable:
    def __reduce__(self):
        return int, ("no number",)


def test_what_cannot_be_built_is_named_with_its_type() -> None:
    with pytest.raises(CannotTravelError, match=r"^x \(.*Unbuildable\) cannot be built on this side: ValueError"):
        load_variables(dump_variables("--out", {"x": Unbuildable()}))


def test_what_cannot_be_built_on_the_other_side_is_an_error_that_says_so() -> None:
    with pytest.raises(CannotTravelError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        load_variables(b"cno_such_module\nThing\n.")


def test_the_private_folder_is_the_users_alone_and_disappears() -> None:
    with open_job_folder() as folder:
        folder.write_inputs(b"secret")
        job = Job("x", ["x"], True, ["loss"], 1.0, [], "token")
        folder.write_job(job)
        assert folder.read_job() == job
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o600}
        (folder.path / "planted.partial").touch()
        with pytest.raises(FileExistsError):
            write_private(folder.path / "planted", b"mine")
    assert not folder.path.exists()


def test_a_folder_goes_with_its_object_and_with_its_process_but_not_with_a_fork(tmp_path: Path) -> None:
    program = """
import os
from vlmcourse.notebook.jobs import make_job_folder
kept, lost = make_job_folder(), make_job_folder()
path = lost.path
del lost
assert kept.path.exists() and not path.exists()
child = os.fork()
if child == 0:
    del kept
    os._exit(0)
os.waitpid(child, 0)
assert kept.path.exists()
"""
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=60, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_written_while_the_folder_is_removed_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real, late = shutil.rmtree, ["peak-1"]

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if late:  # what a guard writes at its end
            (path / late.pop()).touch()
            return
        real(path, ignore_errors)

    monkeypatch.setattr(jobs.shutil, "rmtree", rmtree)
    with open_job_folder() as folder:
        pass
    assert not folder.path.exists()


INTERRUPTED = """
import os, random, signal, threading, time
from vlmcourse.notebook.jobs import open_job_folder
is_armed, fires, draws, num_interrupts, num_used = False, True, random.Random(0), 0, 0
def on_interrupt(number, frame):
    global is_armed
    if is_armed:
        is_armed = False
        raise KeyboardInterrupt
def fire():
    while fires:
        time.sleep(draws.uniform(0, 0.002))
        os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, on_interrupt)
thread = threading.Thread(target=fire)
thread.start()
while num_interrupts < 100:
    try:
        while True:
            is_armed = True
            with open_job_folder():
                num_used += 1
    except KeyboardInterrupt:
        num_interrupts += 1
fires = False
thread.join()
assert num_used
left = os.listdir(os.environ["TMPDIR"])
os._exit(len(left))  # at once: the end of the process would remove them
"""


def test_interrupts_at_any_moment_leave_no_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", INTERRUPTED], env=environment, timeout=60).returncode == 0


def test_outputs_that_are_missing_or_cannot_travel_leave_a_reason(tmp_path: Path) -> None:
    job = Job("x", ["x"], True, ["loss"], 1.0, [], "token")
    with open_job_folder() as folder:
        write_outputs(folder, job, {"los": 1})
        assert "--out loss: the cell ended without a variable 'loss' on rank 0" in folder.output_problem.read_text()
    with open_job_folder() as folder:
        write_outputs(folder, job, {"loss": threading.Lock()})
        assert "--out loss: a _thread.lock cannot travel" in folder.output_problem.read_text()


def test_a_name_that_only_the_notebook_has_gets_a_hint() -> None:
    trace = "Traceback ...\nNameError: name 'steps' is not defined"
    assert "--in steps" in explain_missing_name(trace, {"steps": 3})
    assert "`import threading as steps` inside the cell" in explain_missing_name(trace, {"steps": threading})
    trace = trace.replace("steps", "threading")
    assert "`import threading` inside the cell" in explain_missing_name(trace, {"threading": threading})
    assert "`import threading` inside the cell" in explain_missing_name(trace, {})
    assert "`import torch.distributed as dist` inside" in explain_missing_name(trace.replace("threading", "dist"), {})
    trace = trace.replace("threading", "steps")
    assert "define steps inside the cell" in explain_missing_name(trace, {})
    only = explain_missing_name(trace, {}, assigned_by={"steps": "%%rank 0"})
    assert only == "  Only %%rank 0 has assigned steps: run that cell with %%torchrun, on all ranks."
    assert explain_missing_name("ValueError: name 'steps' is not defined", {"steps": 3}) == ""


def test_the_limit_that_struck_is_named_if_it_was_the_cells() -> None:
    text = "RuntimeError: [pair.cc:542] Timed out waiting 3000ms for recv operation to complete"
    assert explain_limit(text, 6) == (
        "  A collective waits for half of --timeout at most (3 s of 6 s); more time: --timeout 12."
    )
    assert explain_limit(text, 300) == explain_limit("ValueError: 3000ms", 6) == ""


def test_a_destroyed_group_is_explained() -> None:
    assert "%torchrun restart" in explain_missing_group("ValueError: Default process group has not been initialized, x")
    assert explain_missing_group("ValueError: something else") == ""
