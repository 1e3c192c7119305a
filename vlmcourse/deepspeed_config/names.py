"""Which keys of a file does DeepSpeed know, and what was meant by the others?

Enters: the tables that a JSON file holds. Leaves: its values by dotted name, and a sentence for each key that is
unknown, in a wrong place, of an old version, of a wrong kind, or 'auto' where nothing fills it in. DeepSpeed itself
stops at the first in a section, and passes over unknown keys outside of its sections without a word.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmcourse.deepspeed_config.auto import AUTO
from vlmcourse.deepspeed_config.key import Key
from vlmcourse.deepspeed_config.keys import KEYS, OLD_NAMES, OPEN, OTHER_PROJECTS, REMOVED, SHORT_NAMES, VERSION

MAX_PLACES = 4
"""A key of a name that is in more sections than this is said to be unknown, and not to be misplaced."""
RANGES: dict[str, tuple[float, float, str]] = {
    "zero_optimization.reduce_bucket_size": (1, float("inf"), "must be 1 or greater"),
    "zero_optimization.offload_optimizer.ratio": (0, 1, "must be from 0 to 1"),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": (0, 1, "must be from 0 to 1"),
    "train_batch_size": (1, float("inf"), "must be 1 or greater"),
    "train_micro_batch_size_per_gpu": (1, float("inf"), "must be 1 or greater"),
    "gradient_accumulation_steps": (1, float("inf"), "must be 1 or greater"),
    "gradient_clipping": (0, float("inf"), "must be 0 or greater"),
}
"""Numbers that may not be just any of their kind: least, most, and the rule."""
KINDS = {
    "bool": "true or false",
    "count": "a whole number, 0 or greater",
    "number": "a number",
    "text": "a text",
    "list": "a list",
    "section": "a table of keys, {...}",
}


@dataclass
class Reading:
    """What a file says."""

    values: dict[str, Any] = field(default_factory=dict)
    """Dotted name, as in `KEYS` -> value as written, counts as whole numbers; sections left out."""
    refused: set[str] = field(default_factory=set)
    """Keys that are there with a value they cannot have: they are in neither of the others."""
    sections: set[str] = field(default_factory=set)
    """Sections with something in them."""
    problems: list[str] = field(default_factory=list)


def read_keys(settings: Mapping[str, Any]) -> Reading:
    """Sort what a file holds into values and problems; nothing is looked at twice.

    Args:
        settings: nested tables, as `json.load` gives them.
    """
    reading = Reading()
    _read_table(settings, "", reading)
    return reading


def _read_table(table: Mapping[str, Any], prefix: str, reading: Reading) -> None:
    for written, value in table.items():
        name = f"{prefix}{written}"
        real = SHORT_NAMES.get(name, name)
        key = KEYS.get(real)
        if key is None:
            reading.problems.append(_explain_unknown(name, value))
        elif real != name and real.rpartition(".")[2] in table:
            other = real.rpartition(".")[2]
            reading.problems.append(f"{name}: it is another name of {other!r}, which is there too; leave one out")
        elif problem := _find_wrong_kind(real, key, value):
            reading.problems.append(f"{name} = {_show(value)}: {problem}")
            reading.refused.add(real)
        elif key.kind != "section":
            reading.values[real] = as_count(real, value)
        elif value:
            reading.sections.add(real)
            if real not in OPEN:
                _read_table(value, f"{real}.", reading)
            else:
                _read_switch(real, value, reading)


def _read_switch(real: str, table: Mapping[str, Any], reading: Reading) -> None:
    """Read whether a section is on inside which anything may stand."""
    name = f"{real}.enabled"
    if name in KEYS and "enabled" in table:
        reading.values[name] = table["enabled"]


# --- Kinds ----------------------------------------------------------------------------------------------------------


def _find_wrong_kind(name: str, key: Key, value: object) -> str:
    """Return why a key cannot have a value, or nothing."""
    if value == "auto":
        is_filled = name in AUTO or key.default == "auto" or "auto" in key.kind.split("|") or key.kind == "any"
        default = "" if key.default is None else f" (DeepSpeed's own value is {_show(key.default)})"
        return "" if is_filled else f"nothing fills it in, see the keys that may be 'auto'; write a value{default}"
    if value is None:
        is_right = key.default is None or key.kind == "any"
        return "" if is_right else f"must be {_name_kind(name, key)}; write one, or leave it out"
    if key.kind == "any":
        return ""
    if name == "zero_optimization" and isinstance(value, bool):
        return 'true and false are an old form; write {"stage": 1}, or another stage'
    if not _is_kind(key.kind, value):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        has_right_type = is_number and key.kind in ("count", "number")
        is_choice = key.kind not in KINDS
        return f"must be {_name_kind(name, key)}{'' if has_right_type or is_choice else f', not {_name_type(value)}'}"
    least, most, rule = RANGES.get(name, (float("-inf"), float("inf"), ""))
    return "" if not isinstance(value, (int, float)) or least <= value <= most else rule


def as_count(name: str, value: Any) -> Any:
    """Return a count as a whole number, where JSON had it as 8.0 or 1e9; anything else as it is."""
    kind = KEYS[name].kind
    return int(value) if isinstance(value, float) and (kind == "count" or kind[0].isdigit()) else value


def _is_kind(kind: str, value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    match kind:
        case "bool":
            return isinstance(value, bool)
        case "count":
            return is_number and float(value).is_integer() and value >= 0  # type: ignore[arg-type, operator]
        case "number":
            return is_number
        case "text":
            return isinstance(value, str)
        case "list":
            return isinstance(value, list)
        case "section":
            return isinstance(value, dict)
    choices = kind.lower().split("|")
    if kind[0].isdigit():
        return is_number and any(value == int(choice) for choice in choices)
    return isinstance(value, str) and value.lower() in choices


def _name_kind(name: str, key: Key) -> str:
    """Return what a key may be, in words."""
    if name in RANGES:
        number = "a whole number" if key.kind == "count" else "a number"
        return f"{number}, {RANGES[name][2].removeprefix('must be ')}"
    return KINDS.get(key.kind, f"one of {', '.join(key.kind.split('|'))}")


def _name_type(value: object) -> str:
    """Return what a value is in JSON's words."""
    names = {bool: "true or false", str: "a text", list: "a list", dict: "a table"}
    return names.get(type(value), "a number")


def _show(value: object) -> str:
    """Return a value as its file would hold it, if that is short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- Names ----------------------------------------------------------------------------------------------------------


def _explain_unknown(name: str, value: object) -> str:
    """Return a sentence about a key that is not where DeepSpeed looks for one."""
    parent, _, last = name.rpartition(".")
    for table, of in ((REMOVED, f"DeepSpeed {VERSION} refuses it"), (OLD_NAMES, "this is an old name")):
        if name in table:
            return f"{name}: {of}: {table[name]}"
    places = [known for known in KEYS if known.rpartition(".")[2] == last]
    places += [SHORT_NAMES[known] for known in SHORT_NAMES if known.rpartition(".")[2] == last]
    if places and len(places) <= MAX_PLACES:
        homes = list(dict.fromkeys(_name_home(place) for place in places))
        example = f": write {_nest(places[0], value)}" if len(homes) == 1 else ""
        return f"{name}: it is in a wrong place and would not be read there; it belongs {' or '.join(homes)}{example}"
    if old := next((known for known in (*OLD_NAMES, *REMOVED) if known.rpartition(".")[2] == last), ""):
        return f"{name}: it is in a wrong place, and of an old version: {({**OLD_NAMES, **REMOVED})[old]}"
    if not parent and (theirs := OTHER_PROJECTS.get(name)):
        return f"{name}: DeepSpeed calls it {theirs!r}: write {_nest(theirs, value)}"
    hint = _suggest(parent, last)
    return f"{name}: DeepSpeed {VERSION} has no such key{f' in {parent!r}' if parent else ''}; {hint}"


def _suggest(parent: str, last: str) -> str:
    """Return which key was meant: one beside it that is spelled alike, else one elsewhere."""
    if last.startswith("_") or "comment" in last:
        return "leave it out, JSON has no comments"
    siblings = [known.rpartition(".")[2] for known in KEYS if known.rpartition(".")[0] == parent]
    if near := difflib.get_close_matches(last, siblings, n=1):
        return f"did you mean {near[0]!r}?"
    homes = [known.rpartition(".")[0] for known in KEYS if known.rpartition(".")[2] == last]
    if homes:
        return f"it belongs into one of its sections, such as {', '.join(map(repr, homes[:MAX_PLACES]))}"
    elsewhere = {known.rpartition(".")[2]: known for known in reversed(KEYS)}
    if near := difflib.get_close_matches(last, elsewhere, n=1, cutoff=0.75):
        return f"did you mean {near[0]!r}, which belongs {_name_home(elsewhere[near[0]])}?"
    few = f"choose one of {', '.join(siblings)}, or " if 0 < len(siblings) <= 12 else ""
    return f"{few}leave it out"


def _name_home(name: str) -> str:
    parent = name.rpartition(".")[0]
    return f"into {parent!r}" if parent else "to the top of the file"


def _nest(name: str, value: object) -> str:
    """Return a key with its sections, as JSON."""
    nested: Any = value if not isinstance(value, dict) or len(json.dumps(value, default=str)) <= 60 else ...
    for part in reversed(name.split(".")):
        nested = {part: nested}
    return json.dumps(nested, default=lambda _: "...")


def walk(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield each key that is no section: the table that holds it, its name there, and its dotted name in `KEYS`."""
    for written, value in settings.items():
        real = SHORT_NAMES.get(f"{prefix}{written}", f"{prefix}{written}")
        if isinstance(value, dict) and real not in OPEN:
            yield from walk(value, f"{real}.")
        else:
            yield settings, written, real  # type: ignore[misc]
