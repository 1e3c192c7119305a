"""A cell leaves the notebook: `--save` and `--show`, and what the script then prints under the real torchrun."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from notebook_kernel import Kernel, loaded_kernel

from vlmcourse.notebook.cell import prepare_cell
from vlmcourse.notebook.options import CellOptions, parse_options
from vlmcourse.notebook.script import (
    MARKER,
    Script,
    ScriptError,
    build_script,
    describe_script,
    is_unchanged,
    save_script,
    write_literal,
)
from vlmcourse.notebook.torchrun_command import format_slurm

REPOSITORY = Path(__file__).parent.parent
RUN_S = 120


def script_of(body: str, line: str = "", **values: object) -> Script:
    prepared = prepare_cell(line, body, TransformerManager().transform_cell)
    return build_script(parse_options(line), prepared, values)


def run_script(command: list[str], folder: Path, **env: str) -> list[str]:
    """Run a command that starts ranks; return what they printed, sorted."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Iterator[Kernel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))  # the kernel runs in another folder
        with loaded_kernel(folder) as kernel:
            yield kernel


@pytest.mark.notebook
@pytest.mark.timeout(240)
def test_the_saved_script_prints_under_torchrun_what_the_cell_printed(kernel: Kernel, folder: Path) -> None:
    kernel.run("""
        import dataclasses, torch
        rates, nothing, name, weights = {"a": [0.1, -2]}, (None, True), "a 'quoted' ä\\n name", torch.tensor([1.5, 2])
        @dataclasses.dataclass
        class Point:
            x: int
        point = Point(3)
    """)
    shown = kernel.run("""%%torchrun -n 2 --in rates,nothing,name,weights,point --out total --save train.py

from __future__ import annotations
import torch, torch.distributed as dist
%matplotlib inline
def scale(values: NotDefined, factor):
    return values * factor
text = '''
    indented
'''
total = scale(weights, rank + 1.0).to(device)
dist.all_reduce(total)
print("rank", rank, local_rank, world_size, rates, nothing, repr(name), repr(text), point.x, total.tolist())
x = 1; rank, total.sum().item()
""")
    assert shown.error == shown.stderr == ""
    what_stays = [kind if kind == "clear" else text for kind, text in shown.outputs if kind in ("clear", "text")]
    last_clear = max((index for index, text in enumerate(what_stays) if text == "clear"), default=-1)
    saved, command, *_ = "".join(what_stays[last_clear + 1 :]).splitlines()
    assert saved == "saved the cell as train.py, and weights, point as train.variables.pickle; run it with"
    assert command.split() == ["torchrun", "--standalone", "--nproc-per-node", "2", "train.py"]
    total = kernel.run("print(total)").stdout.strip()
    assert total == "tensor([4.5000, 6.0000])" and len(shown.lines(0)) == 2
    torchrun = [sys.executable, "-m", "torch.distributed.run", *command.split()[1:-1], "--local-addr", "127.0.0.1"]
    run_script([*torchrun, "--log-dir", "logs", "--redirects", "1", "train.py"], folder)
    printed = {path.parent.name: path.read_text().splitlines() for path in folder.glob("logs/*/attempt_0/*/stdout.log")}
    assert printed == {"0": [*shown.lines(0), f"total = {total}"], "1": shown.lines(1)}


def test_names_that_only_earlier_cells_define_are_told() -> None:
    body = "import os as o\ndef f(a: int):\n    return a + y + later\nlater = [z for z in steps]\nprint(f(x), rank, o)"
    script = script_of(body, "--in steps", steps=[1])
    assert script.undefined == ("x", "y")
    assert "it uses x, y without defining it: add the lines" in describe_script(script, CellOptions())
    assert script_of("for i in (1,): pass\nclass A: b = i\nA, __name__, device").undefined == ()
    assert script_of("from math import *\nsqrt(2)").undefined == ()


@pytest.mark.notebook
@pytest.mark.timeout(240)
def test_show_prints_instead_of_running_and_the_slurm_script_runs(kernel: Kernel, folder: Path) -> None:
    kernel.run("factor = 3")
    cell = """%%torchrun -n 2 --in factor --show
        import pathlib, torch, torch.distributed as dist
        value = torch.tensor([factor + rank])
        dist.all_reduce(value)
        pathlib.Path("ran").touch()
        value.item()
    """
    shown = kernel.run(cell)
    assert shown.error == shown.stderr == ""
    assert not (folder / "ran").exists()
    assert kernel.run("%torchrun --show").stdout == shown.stdout
    kernel.run(cell.replace("--show", "--show --save again.py"))
    assert not (folder / "ran").exists()

    batch = shown.stdout[shown.stdout.index("#!/bin/bash") :].replace("train.py", "again.py")
    tools = folder / "tools"
    tools.mkdir()
    for name, text in {
        "scontrol": 'test "$*" = "show hostnames localhost,node2" && printf "localhost\\nnode2\\n"',
        "srun": 'exec "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run --local-addr 127.0.0.1 "$@"',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    cluster = {"SLURM_JOB_NODELIST": "localhost,node2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7"}
    path = f"{tools}:{os.environ['PATH']}"
    assert (
        "".join(run_script(["bash", "-ec", batch], folder, PATH=path, **cluster)) == "77"
    )  # both ranks write to one stream
    assert (folder / "ran").exists()


@pytest.mark.notebook
def test_what_cannot_leave_the_notebook_is_named_before_anything_is_written_or_run(
    kernel: Kernel, folder: Path
) -> None:
    shown = kernel.run("""%%torchrun --save no.py
        import torch.distributed as dist
        %time x = 1
        if x:
            !touch ran_too
        await nobody()
        y = [z async for z in later]
        dist.init_process_group("gloo")
        async def fine():
            await nobody()
    """)
    lines = shown.error.splitlines()
    assert lines[0] == "ScriptError: this cell cannot become a script yet:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["line 3", "line 5", "line 6", "line 7", "line 8"]
    assert lines[1] == "  line 3: %time x = 1: a magic works only in a notebook: write it as Python, or leave it out"
    assert not (folder / "no.py").exists() and not (folder / "ran_too").exists()


@pytest.mark.notebook
def test_the_line_magic_says_what_it_can_do() -> None:
    kernel = Kernel()
    try:
        kernel.run("%load_ext vlmcourse")
        assert "no %%torchrun cell has run yet" in kernel.run("%torchrun --show").error
        assert "has no flag '--shwo': did you mean '--show'?" in kernel.run("%torchrun --shwo").error
        assert "two percent signs" in kernel.run("%torchrun -n 2").error
        assert "%torchrun --show: print the last cell" in kernel.run("%torchrun").error
        assert kernel.run("%torchrun dance").traceback.partition(":")[0] == "CellOptionsError"
        assert "%%torchrun has no flag '--shwo': did you mean '--show'?" in kernel.run("%%torchrun --shwo\n1").error
    finally:
        kernel.close()


def test_a_file_that_save_did_not_write_or_that_was_changed_stays(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    options, values = CellOptions(save=str(path)), {"x": print}

    def save(body: str, line: str = "") -> str:
        return save_script(script_of(body, line, **({"x": object} if line else {})), options, values)

    save("a = 1", "--in x")
    assert (tmp_path / "train.variables.pickle").exists()
    assert path.read_text().startswith(MARKER) and is_unchanged(path.read_bytes())
    save("b = 2")
    assert "b = 2" in path.read_text() and "a = 1" not in path.read_text()
    assert not (tmp_path / "train.variables.pickle").exists()

    edited = path.read_text().replace("b = 2", "b = 3")
    path.write_text(edited)
    with pytest.raises(ScriptError, match="has been changed since: save under another name, or remove it first"):
        save("c = 4")
    assert path.read_text() == edited
    path.unlink()
    (tmp_path / "train.variables.pickle").write_text("mine")
    with pytest.raises(ScriptError, match=r"train\.variables\.pickle was not written by --save"):
        save("a = 1", "--in x")
    assert not path.exists()
    with pytest.raises(ScriptError, match="there is no folder"):
        save_script(script_of("a = 1"), CellOptions(save=str(tmp_path / "none" / "train.py")), {})


def test_values_become_literals_only_where_that_is_exact() -> None:
    shared: list[object] = [1]
    shared.append(shared)
    nested: list[object] = [[1, (2, {"a": [None]})], {1: 2.5}, {"z": 1, "a": 2}, ()]
    for value in [1, -0.5, True, None, "a\nb", b"\x00", "x" * 300, *nested]:
        text = write_literal(value)
        assert text is not None
        again = ast.literal_eval(text)
        assert again == value and type(again) is type(value)
        assert not isinstance(value, dict) or list(again) == list(value)
    own_list = type("Own", (list,), {})()
    for value in [float("nan"), [float("inf")], {1, 2}, shared, object(), "x" * 3000, print, own_list]:
        assert write_literal(value) is None


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("x", "print(x)"),
        ("x, 1", "print((x, 1))"),
        ("f(x)", "last_value = f(x)\nif last_value is not None:\n    print(last_value)"),
        ("(\n    f(x)\n    .g()\n)", "last_value = (\n    f(x)\n    .g()\n)\nif last_value"),
        ("y = 1; x  # ä", "y = 1; print(x)  # ä"),
        ("'ä'; x", "'ä'; print(x)"),
        ("x;", "# The cell.\nx;\n"),
        ("print(x)", "# The cell.\nprint(x)\n"),
        ("dist.barrier()", "# The cell.\ndist.barrier()\n"),
        ("display(x)", "from IPython.display import display\n"),
    ],
)
def test_the_value_of_the_last_expression_is_printed_as_a_notebook_shows_it(last: str, expected: str) -> None:
    text = script_of(last).text
    assert expected in text
    compile(text, "script", "exec")


def test_the_commands_say_what_the_flags_of_the_cell_say() -> None:
    options = parse_options(
        "-n 8 --launcher elastic --max-restarts 2 --nnodes 2:4 --rdzv-endpoint node1:1234 --timeout 90 --show"
    )
    text = describe_script(script_of("x = 1"), options)
    flags = "--nnodes 2:4 --nproc-per-node 8 --max-restarts 2 --rdzv-backend c10d"
    assert f"torchrun {flags} --rdzv-id vlmcourse --rdzv-endpoint node1:1234 train.py" in text
    for line in ("#SBATCH --nodes=4", "#SBATCH --gpus-per-node=8", "#SBATCH --time=2", "#SBATCH --job-name=train"):
        assert line in text.splitlines()
    assert "srun torchrun --nnodes 2:4 --nproc-per-node 8 --max-restarts 2 \\\n" in text
    odd = format_slurm(CellOptions(), "my runs/a b.py")
    if shutil.which("bash"):
        assert subprocess.run(["bash", "-n"], input=odd, text=True).returncode == 0
    assert "'my runs/a b.py'" in odd
