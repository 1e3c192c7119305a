"""A cell as a script that runs under plain `torchrun`: the cell and its variables in, Python text out.

The script joins the process group with the package's `init_ranks()`, gives the cell's code the names that it has in the
notebook, and leaves the group. What works only in a notebook (magics, `await` outside a function) is named with its
line instead.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import math
import os
import pprint
import symtable
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcourse.notebook.cell import PreparedCell
from vlmcourse.notebook.options import PREDEFINED, CellOptions
from vlmcourse.notebook.torchrun_command import format_command, format_slurm
from vlmcourse.notebook.variables import dump_variables
from vlmcourse.notebook.worker import GROUP_TIMEOUT_FRACTION

DEFAULT_NAME = "train.py"
"""What `--show` calls a script that has not been saved."""
MAX_LITERAL_CHARS = 2000
"""Longer values are saved beside the script: nobody reads them in it."""
LINE_CHARS = 100
MARKER = "# Written by %%torchrun --save "
WITHOUT_VALUE = ("print", "display", "barrier", "all_reduce", "broadcast", "backward", "destroy_process_group", "show")
"""Functions whose value nobody wants to see; a notebook shows that of others at the end of a cell."""
WHAT_TO_DO = {
    "run_line_magic": "a magic works only in a notebook: write it as Python, or leave it out",
    "run_cell_magic": "a magic works only in a notebook: write it as Python, or leave it out",
    "system": "a shell line works only in a notebook: use subprocess.run(), or leave it out",
    "getoutput": "a shell line works only in a notebook: use subprocess.run(), or leave it out",
}

AWAIT_IN_FUNCTIONS = "a script awaits only inside functions: put it into one, and call asyncio.run()"


class ScriptError(ValueError):
    """A cell cannot become a script, or the script cannot be written."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Script:
    """A cell's script, and the variables that travel in a file beside it."""

    text: str
    packed_names: tuple[str, ...]
    """Variables of `--in` that cannot be written as literals."""
    undefined: tuple[str, ...] = ()
    """Names that the script uses and does not define: those of earlier cells of a session."""


def build_script(options: CellOptions, prepared: PreparedCell, values: Mapping[str, Any]) -> Script:
    """Write a cell as a script.

    Args:
        options: of the cell.
        prepared: the cell.
        values: the variables of `--in`.
    Raises:
        ScriptError: naming every line that works only in a notebook.
    """
    tree = ast.parse(prepared.source)
    hidden_magics = [node for node in tree.body if _is_matplotlib_magic(node)]
    problems = find_problems(ast.Module([node for node in tree.body if node not in hidden_magics], []), prepared)
    if problems:
        raise ScriptError("this cell cannot become a script yet:\n" + "\n".join(f"  {text}" for text in problems))
    literals = {name: text for name, value in values.items() if (text := write_literal(value)) is not None}
    packed = tuple(name for name in values if name not in literals)
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    edits = [(node, "") for node in (*hidden_magics, *futures)]
    edits += _show_last_value(tree, prepared)
    body = replace_statements(prepared.source, edits).strip("\n")
    name = options.save or DEFAULT_NAME
    head = [*(ast.unparse(node) for node in futures), *_import_lines(tree, bool(packed))]
    joined = f"ranks = init_ranks(timeout_s={options.timeout_s * GROUP_TIMEOUT_FRACTION:g})"
    parts = [
        f'"""A cell of a notebook, for {options.nproc} ranks:\n\n    {format_command(options, Path(name).name)}\n"""',
        "\n".join(head),
        f"{joined}\nrank, local_rank, world_size, device = "
        "ranks.rank, ranks.local_rank, ranks.world_size, ranks.device",
        "\n".join(_input_lines(literals, packed, Path(name))),
        f"# The cell.\n{body}",
        "\n".join(_output_lines(options)),
        "shutdown_ranks()",
    ]
    undefined = find_undefined(prepared.source, {*values, *PREDEFINED, "display", "get_ipython"})
    return Script("\n\n".join(part for part in parts if part) + "\n", packed, undefined)


def find_undefined(source: str, known: Collection[str]) -> tuple[str, ...]:
    """Return the names that Python text uses and nothing in it defines; () where `import *` may bring them.

    Args:
        source: without a mistake, and without `await` outside of functions.
        known: names that are there before it runs.
    """
    try:
        module = symtable.symtable(source, "cell", "exec")
    except SyntaxError:  # a name that is global after it was used, for example
        return ()
    defined, used = {"__name__", "__file__", "__doc__", *known, *dir(builtins)}, set()
    tables = [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_global = table is module or symbol.is_global()
            if is_global and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
                defined.add(symbol.get_name())
            elif is_global and symbol.is_referenced():
                used.add(symbol.get_name())
    has_star = any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(ast.parse(source)))
    return () if has_star else tuple(sorted(used - defined))


def find_problems(tree: ast.Module, prepared: PreparedCell) -> list[str]:
    """Return what in a cell works only in a notebook: `line 3: %time f(): what to do`, in order."""
    found: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _last_name(node.func)
            if name == "init_process_group":
                found[node.lineno] = "init_ranks() at the top of the script has done this already: remove the line"
            elif name in WHAT_TO_DO and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
                if _last_name(node.func.value.func) == "get_ipython":
                    found[node.lineno] = WHAT_TO_DO[name]
            elif name == "get_ipython":
                found.setdefault(node.lineno, "there is no IPython in a script: leave it out")
    for node in _walk_top_level(tree):
        if isinstance(node, ast.comprehension) and node.is_async:
            found[node.target.lineno] = AWAIT_IN_FUNCTIONS
        elif isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
            found[node.lineno] = AWAIT_IN_FUNCTIONS
    shown = prepared.shown_lines
    return [
        f"line {line}: {shown[line - 1].strip() if line <= len(shown) else ''}: {reason}"
        for line, reason in sorted(found.items())
    ]


def write_literal(value: object) -> str | None:
    """Return Python text that makes this value again; None where there is none, or it is too long to read."""
    if not _is_plain(value, set()):
        return None
    text = pprint.pformat(value, width=LINE_CHARS, sort_dicts=False)
    return text if len(text) <= MAX_LITERAL_CHARS else None


def replace_statements(source: str, edits: list[tuple[ast.stmt, str]]) -> str:
    """Return Python text with some statements replaced by others."""
    lines = source.encode().split(b"\n")
    for node, text in sorted(edits, key=lambda edit: edit[0].lineno, reverse=True):
        assert node.end_lineno is not None and node.end_col_offset is not None
        first, last = node.lineno - 1, node.end_lineno - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        # On a line with others (`x = 1; x`) a compound statement needs a line of its own.
        if before.strip() and "\n" in text:
            before = before.rstrip(b"; ") + b"\n"
        lines[first : last + 1] = [before + text.encode() + after]
    return b"\n".join(lines).decode()


def save_script(script: Script, options: CellOptions, values: Mapping[str, Any]) -> str:
    """Write a script, and the variables that have no literal, into files.

    Args:
        script: from `build_script` with the same options.
        options: of the cell; `save` is the name of the file.
        values: the variables of `--in`.
    Returns:
        What to tell the person.
    Raises:
        ScriptError: if a file of this name was written by somebody else, or it cannot be written.
        CannotTravelError: if a variable can neither be written as a literal nor saved.
    """
    path = Path(options.save).expanduser()
    if not path.parent.is_dir():
        raise ScriptError(f"--save {options.save}: there is no folder {path.parent}: make it first")
    packed_path = name_packed(path)
    is_own = path.exists() and is_unchanged(path.read_bytes())
    for existing in (path, packed_path) if script.packed_names else (path,):
        if existing.exists() and not is_own:
            raise ScriptError(
                f"--save {options.save}: {existing} was not written by --save, or has been changed since: save under "
                "another name, or remove it first"
            )
    packed = dump_variables("--in", {name: values[name] for name in script.packed_names})
    text = script.text.encode()
    try:
        if script.packed_names:
            _replace_file(packed_path, packed)
        elif is_own:
            packed_path.unlink(missing_ok=True)
        _replace_file(path, f"{MARKER}({_checksum(text)}).\n".encode() + text)
    except OSError as error:
        raise ScriptError(f"--save {options.save}: cannot be written ({error}): save it somewhere else") from error
    beside = f", and {', '.join(script.packed_names)} as {packed_path}" if script.packed_names else ""
    told = f"saved the cell as {path}{beside}; run it with\n  {format_command(options, str(path))}"
    no_torchrun = f"  (where the shell does not find torchrun: {sys.executable} -m torch.distributed.run in its place)"
    return "\n".join(filter(None, [told, no_torchrun, describe_undefined(script)]))


def describe_undefined(script: Script) -> str:
    """Say which lines a script lacks; empty if none."""
    names = ", ".join(script.undefined)
    return f"  it uses {names} without defining it: add the lines of earlier cells that do" if names else ""


def is_unchanged(content: bytes) -> bool:
    """Whether a file was written by `save_script` and nobody has changed it."""
    first, _, rest = content.partition(b"\n")
    return first == f"{MARKER}({_checksum(rest)}).".encode()


def describe_script(script: Script, options: CellOptions) -> str:
    """Return what `--show` prints: the script, the command for it, and a Slurm batch script."""
    name = options.save or DEFAULT_NAME
    title = f"# The cell as a script{'' if options.save else f'; --save {name} writes it'}:"
    return "\n".join(
        (
            title,
            *([f"#{describe_undefined(script)}"] if script.undefined else []),
            "",
            script.text,
            "# Its command:",
            "",
            format_command(options, name),
            "",
            f"# On a cluster with Slurm: save this as {Path(name).stem}.sbatch, and submit it with sbatch:",
            "",
            format_slurm(options, name),
        )
    )


def name_packed(script: Path) -> Path:
    """Return where the variables that have no literal are saved: beside the script."""
    return script.with_name(f"{script.stem}.variables.pickle")


def _replace_file(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _import_lines(tree: ast.Module, has_packed: bool) -> Iterator[str]:
    names = {node.id: isinstance(node.ctx, ast.Store) for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    if has_packed:
        yield "from pathlib import Path\n"
    if "display" in names and "display" not in imported:
        yield "from IPython.display import display\n"
    if has_packed:
        yield "from vlmcourse.notebook.variables import load_variables"
    yield "from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks"


def _input_lines(literals: Mapping[str, str], packed: tuple[str, ...], script: Path) -> Iterator[str]:
    if literals or packed:
        yield "# Variables of the notebook (--in)."
    for name, text in literals.items():
        yield f"{name} = {text}"
    if packed:
        yield f"# No literal can be written for {', '.join(packed)}: --save leaves their values beside this script."
        yield f'packed = load_variables(Path(__file__).with_name("{name_packed(script).name}").read_bytes())'
        yield from (f'{name} = packed["{name}"]' for name in packed)


def _output_lines(options: CellOptions) -> Iterator[str]:
    if options.out_names:
        yield "# What the notebook receives of rank 0 (--out)."
        yield "if rank == 0:"
        yield from (f'    print("{name} =", {name})' for name in options.out_names)


def _show_last_value(tree: ast.Module, prepared: PreparedCell) -> list[tuple[ast.stmt, str]]:
    """Return the edit that prints the value of a last expression, which a notebook shows."""
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or not prepared.shows_last_value or _is_matplotlib_magic(last):
        return []
    text = ast.get_source_segment(prepared.source, last) or ""
    if isinstance(last.value, ast.Tuple):
        text = f"({text})"
    if not isinstance(last.value, ast.Call):
        return [] if isinstance(last.value, ast.Constant) else [(last, f"print({text})")]
    if _last_name(last.value.func) in WITHOUT_VALUE:
        return []
    return [(last, f"last_value = {text}\nif last_value is not None:\n    print(last_value)")]


def _is_matplotlib_magic(node: ast.stmt) -> bool:
    """Whether this is `%matplotlib inline` or its like, which a script can do without."""
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and _last_name(call.func) == "run_line_magic"
        and isinstance(call.args[0], ast.Constant)
        and call.args[0].value == "matplotlib"
    )


def _walk_top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through a tree, but not into functions: they may await."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.AsyncFunctionDef | ast.FunctionDef | ast.Lambda):
            yield child
            yield from _walk_top_level(child)


def _last_name(node: ast.expr) -> str:
    """Return `c` of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_plain(value: object, above: set[int]) -> bool:
    """Whether `repr` makes a literal of this value that is equal to it and of the same type."""
    if type(value) is float:
        return math.isfinite(value)
    if type(value) in (int, bool, str, bytes, type(None)):
        return True
    if type(value) not in (list, tuple, dict) or id(value) in above:
        return False
    above = above | {id(value)}
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)  # type: ignore[call-overload]
    return all(_is_plain(part, above) for part in parts)
