"""The house rules that a tool can check: style, types, import order, Dockerfiles, file length, clean notebooks."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
MODULES = sorted((ROOT / "vlmcourse").rglob("*.py"))
NOTEBOOKS = sorted([*ROOT.glob("solutions/*/*.ipynb"), *ROOT.glob("chapters/*/*.ipynb")])
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS = {"run_elastic", "torchrun", "parse_options"}
"""Of the notebook's magic, from before the rule; no new ones."""


def run_tool(*command: str, timeout_s: float = 600) -> None:
    """Run one of the installed tools in the repository and fail with what it printed."""
    program = shutil.which(command[0], path=str(BIN)) or shutil.which(command[0])
    assert program, f"{command[0]} is not installed: it is in the dev extra of pyproject.toml"
    result = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_finds_nothing():
    run_tool("ruff", "check", ".")


def test_ruff_format_changes_nothing():
    run_tool("ruff", "format", "--check", ".")


def test_imports_go_one_way():
    run_tool("lint-imports")


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_pyright_finds_nothing():
    run_tool("pyright")


def test_hadolint_finds_nothing_in_the_dockerfiles():
    files = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docker/*.Dockerfile"))]
    assert len(files) == 2
    run_tool("hadolint", *files)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_short_and_says_what_it_is(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_MODULE_LINES, f"over {MAX_MODULE_LINES} lines is two ideas: split it"
    tree = ast.parse(source)
    assert ast.get_docstring(tree), "a module says in its docstring what enters and what leaves"
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    long = {node.name for node in functions if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES}
    assert long <= LONG_FUNCTIONS, (
        f"a function has at most {MAX_FUNCTION_LINES} lines, its docstring included: split it"
    )


def test_every_layer_of_the_package_stands_in_the_import_contract():
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    parts = {
        path.stem for path in (ROOT / "vlmcourse").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    for part in parts - {"__init__"}:
        assert f'"vlmcourse.{part}"' in contract, f"vlmcourse.{part} has no place in the layers of pyproject.toml"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_notebook_carries_no_outputs_and_the_standard_kernel(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if "solutions" in path.parts], ids=lambda path: path.stem)
def test_a_cell_for_ones_own_model_needs_the_first_cell_alone(path, tmp_path):
    """It is what a reader comes back to, in a kernel that has run nothing else."""
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    first, *own = [cell["source"] for cell in cells if cell is cells[0] or cell["id"].startswith("own_")]
    for number, source in enumerate(own):
        lines = [line for line in "".join([*first, "\n", *source]).splitlines() if not line.startswith("%")]
        (tmp_path / f"{number}.py").write_text("\n".join(lines), encoding="utf-8")
    given = 'builtins=["rank", "world_size", "device"]'  # by %%torchrun, on each rank
    run_tool("ruff", "check", "--isolated", "--select", "F821", "--config", given, str(tmp_path))


def test_planner_and_config_work_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import vlmcourse.planner.memory, vlmcourse.planner.plan, vlmcourse.config\n"
        "vlmcourse.config.load_config('configs/tiny.toml')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
