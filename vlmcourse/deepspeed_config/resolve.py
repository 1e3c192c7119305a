"""Read a user's ds_config.json: what DeepSpeed is given for a run, or one error that lists everything wrong.

Enters: a path, and the run that it is for. Leaves: the tables of the file with every 'auto' filled in, ready for
`deepspeed.initialize`. A run brings its own optimizer and rates, so the sections of those are compared and left out.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmcourse.deepspeed_config.auto import AUTO, FILLED_IN, Run
from vlmcourse.deepspeed_config.names import as_count, read_keys, walk
from vlmcourse.deepspeed_config.offload import find_offload_problems
from vlmcourse.deepspeed_config.rules import ZERO, Values, find_contradictions, find_inconsistencies, find_unfilled
from vlmcourse.values import ConfigError, describe_missing

BROUGHT_BY_THE_RUN = ("optimizer", "scheduler")
"""Sections that DeepSpeed is not given."""


def load_deepspeed_json(path: str | Path) -> dict[str, Any]:
    """Read the tables of a JSON file, unchecked.

    Raises:
        FileNotFoundError: if there is no such file.
        ConfigError: if it is not one JSON object in UTF-8, or holds a key twice.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(describe_missing(path, "file", "DeepSpeed's JSON configuration"))
    twice: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(pairs)

    try:
        found = json.loads(path.read_bytes().decode("utf-8-sig"), object_pairs_hook=collect)
    except json.JSONDecodeError as error:
        problem = (
            f"line {error.lineno}, column {error.colno}: this is not valid JSON ({error.msg}); comments are not either"
        )
        raise ConfigError(str(path), [problem]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"byte {error.start} is not UTF-8: save it as UTF-8"]) from error
    except OSError as error:
        raise ConfigError(str(path), [f"it cannot be read ({error.strerror})"]) from error
    if not isinstance(found, dict):
        raise ConfigError(str(path), ["it must hold one table of keys, {...}"])
    if twice:
        raise ConfigError(str(path), [f"{name}: it is there twice in the same table; leave one out" for name in twice])
    return found


def find_deepspeed_problems(settings: Mapping[str, Any], run: Run | None = None) -> list[str]:
    """Return all that is wrong with a DeepSpeed configuration, one sentence each.

    Args:
        settings: nested tables, as `load_deepspeed_json` gives them.
        run: what it is for; without one, only what is wrong in any run is found.
    """
    reading = read_keys(settings)
    values = Values(reading, run)
    inconsistent = find_inconsistencies(values)
    found = reading.problems + inconsistent
    if run is None:
        return found
    found += find_contradictions(values, run)
    offload_is_named = any(problem.startswith(f"{ZERO}.offload_") for problem in inconsistent)
    return found if reading.problems or offload_is_named else found + find_offload_problems(settings, run)


def resolve_deepspeed(
    settings: Mapping[str, Any], run: Run, where: str = "The DeepSpeed configuration"
) -> dict[str, Any]:
    """Return what DeepSpeed is given for a run.

    Args:
        settings: nested tables, as `load_deepspeed_json` gives them; left as they are.
        run: what they are for, with its ranks and its hidden size.
        where: what the error message calls them.

    Raises:
        ConfigError: one error that lists every key that is unknown or in a wrong place, every value that does not go
            with another or with the run, and everything that no run here does.
    """
    found = find_deepspeed_problems(settings, run)
    found += find_unfilled(Values(read_keys(settings), run))
    if found:
        raise ConfigError(where, found)
    resolved = copy.deepcopy({name: value for name, value in settings.items() if name not in BROUGHT_BY_THE_RUN})
    for table, written, name in list(walk(resolved)):
        is_auto = table[written] == "auto" and name in AUTO
        table[written] = AUTO[name](run) if is_auto else as_count(name, table[written])
    for name in FILLED_IN:
        if resolved.get(name) is None:
            resolved[name] = AUTO[name](run)
    return resolved


def check_deepspeed_file(run: Run) -> None:
    """Refuse a run whose `parallel.deepspeed_config` cannot be used, before any rank starts.

    Raises:
        FileNotFoundError: if there is no such file.
        ConfigError: listing everything wrong with it, see `resolve_deepspeed`.
    """
    path = run.config.parallel.deepspeed_config
    if path and (found := find_deepspeed_problems(load_deepspeed_json(path), run)):
        raise ConfigError(path, found)
