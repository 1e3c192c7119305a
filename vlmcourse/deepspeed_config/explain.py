"""DeepSpeed's configuration key by key: what each does, its value, where that comes from, and DeepSpeed's default.

Enters: the tables of a file and, for what 'auto' becomes, a run. Leaves: rows, and a table of them as text. Chapter 5.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vlmcourse.deepspeed_config.auto import AUTO, FILLED_IN, Run
from vlmcourse.deepspeed_config.keys import KEYS
from vlmcourse.deepspeed_config.names import read_keys
from vlmcourse.layout import align


@dataclass(frozen=True)
class Explained:
    """One key."""

    name: str
    """Dotted."""
    value: object
    """What DeepSpeed takes; 'auto' where that is not known without a run, rates by tower where a run has several."""
    source: str
    """file, auto (filled in from the run), run (left out, and the run's), default."""
    default: object
    """What DeepSpeed takes where the key is left out."""
    does: str
    """One sentence, without a full stop."""


def explain_deepspeed(
    settings: Mapping[str, Any], run: Run | None = None, names: Iterable[str] | None = None
) -> list[Explained]:
    """Explain a DeepSpeed configuration key by key; what is wrong with it, `find_deepspeed_problems` says.

    Args:
        settings: nested tables, as `load_deepspeed_json` gives them.
        run: what they are for.
        names: dotted names of keys or sections to explain, whether they are written or not; by default what is written.

    Raises:
        KeyError: if DeepSpeed has no key of such a name.
    """
    written = read_keys(settings).values
    run = run and run.for_file(written)
    chosen: list[str] = list(written)
    if names is not None:
        chosen = [known for name in names for known in _expand(name)]
    return [_explain(name, written, run) for name in dict.fromkeys(chosen)]


def _expand(name: str) -> list[str]:
    """Return a key, or those below a section."""
    if name not in KEYS:
        raise KeyError(f"{name}: DeepSpeed has no such key; write dotted names, such as 'zero_optimization.stage'")
    below = [known for known, key in KEYS.items() if known.startswith(f"{name}.") and key.kind != "section"]
    return below or [name]


def _explain(name: str, written: Mapping[str, Any], run: Run | None) -> Explained:
    key = KEYS[name]
    value, source = written.get(name), "file"
    if value == "auto" and name in AUTO:
        source = "auto"
        filled = AUTO[name](run) if run is not None else None
        value = "auto" if filled is None else filled
    elif name not in written:
        is_filled = name in FILLED_IN and run is not None
        value, source = (AUTO[name](run), "run") if is_filled and run is not None else (key.default, "default")
    return Explained(name, value, source, key.default, key.does)


def explanation_table(rows: Iterable[Explained]) -> str:
    """Return rows as text, columns under each other."""
    cells = [["key", "value", "from", "default", "what it does"]]
    cells += [[row.name, _show(row.value), row.source, _show(row.default), row.does] for row in rows]
    return align(cells)


def _show(value: object) -> str:
    """Return a value as JSON, thousands apart."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_show(each)}" for name, each in value.items())
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
