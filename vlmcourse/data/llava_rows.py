"""Rows of a LLaVA conversation file: where each one is, what it says, and what is wrong with it.

Enters: the text of a JSON array or of JSON Lines. Leaves: `Row`s, or `BadRow`s that name the line. No image is opened
here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vlmcourse.data.kinds import find_kind_problem
from vlmcourse.data.samples import IMAGE_MARKER, Message

SPEAKERS = ("human", "gpt")
KIND_KEY = "data_source"
"""Of a row: where it comes from, the kind of its answers; may be missing. Source: lmms-lab/LLaVA-OneVision-Data."""


@dataclass(frozen=True)
class Place:
    """Where a row stands in its file; both numbers begin at 1."""

    line: int
    entry: int | None = None
    """Number of the entry in a JSON array; None in JSON Lines."""

    def __str__(self) -> str:
        return f"line {self.line}" if self.entry is None else f"entry {self.entry} (line {self.line})"


@dataclass(frozen=True)
class Row:
    """A well-formed row whose images have not been looked at."""

    place: Place
    sample_id: str
    images: tuple[str, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why."""

    place: Place
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class _BrokenJson:
    """Stands for a line that is not JSON."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def read_rows(path: Path) -> Iterator[tuple[Place, object]]:
    """Yield the place and the parsed JSON of every row; empty lines of JSON Lines are passed over.

    Raises:
        ValueError: if the file is not UTF-8, or is a JSON array that breaks off: what follows cannot be told apart.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if text.lstrip()[:1] == "[":
        yield from _read_array(path, text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield Place(number), json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                yield Place(number), _BrokenJson(f"not valid JSON: {error}")


def _read_array(path: Path, text: str) -> Iterator[tuple[Place, object]]:
    """Yield the entries of a JSON array, each with the line that it begins on."""
    decoder = json.JSONDecoder()
    line, counted, entry = 1, 0, 0
    position = _skip_spaces(text, text.index("[") + 1)
    while text[position : position + 1] != "]":
        line, counted, entry = line + text.count("\n", counted, position), position, entry + 1
        place = Place(line, entry)
        try:
            value, position = decoder.raw_decode(text, position)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}, {place}: the JSON array breaks off here: {error}") from error
        yield place, value
        position = _skip_spaces(text, position)
        if text[position : position + 1] == ",":
            position = _skip_spaces(text, position + 1)
        elif text[position : position + 1] != "]":
            line = 1 + text.count("\n", 0, position)
            raise ValueError(
                f"{path}, line {line}: the JSON array breaks off after entry {entry}: ',' or ']' must follow"
            )


def _skip_spaces(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\n", "\r", "\t"):
        position += 1
    return position


def parse_row(place: Place, value: object) -> Row | BadRow:
    """Return the row, or what is wrong with it (the first thing found)."""
    try:
        return _parse(place, value)
    except _RowProblem as problem:
        return BadRow(place, str(problem))


class _RowProblem(Exception):
    """What is wrong with a row."""


def _parse(place: Place, value: object) -> Row:
    if isinstance(value, _BrokenJson):
        raise _RowProblem(value.reason)
    if not isinstance(value, dict):
        raise _RowProblem(f"a row must be a JSON object with id and conversations, and this is {type(value).__name__}")
    missing = [key for key in ("id", "conversations") if key not in value]
    if missing:
        raise _RowProblem(f"the key {' and '.join(map(repr, missing))} is missing")
    images = _images(value.get("image"))
    messages = _messages(value["conversations"], _kind(value.get(KIND_KEY)))
    markers = sum(message.text.count(IMAGE_MARKER) for message in messages)
    if images and not markers:
        raise _RowProblem(f"no {IMAGE_MARKER} marker in the conversation, and {len(images)} image: write where it goes")
    if markers != len(images):
        raise _RowProblem(f"{markers} {IMAGE_MARKER} markers and {len(images)} images: the numbers must be equal")
    return Row(place, str(value["id"]), images, messages)


def _images(value: object) -> tuple[str, ...]:
    """Return the image names of a row; none where the key is missing or null."""
    names = [] if value is None else value if isinstance(value, list) else [value]
    good = tuple(name for name in names if isinstance(name, str) and name)
    if len(good) < len(names):
        raise _RowProblem(f"image = {value!r}: must be a file name or a list of file names")
    return good


def _kind(value: object) -> str:
    """Return the kind of a row's answers; empty where the key is missing or null."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _RowProblem(f"{KIND_KEY} = {value!r}: must be text, or be left out")
    if problem := find_kind_problem(value):
        raise _RowProblem(f"{KIND_KEY} = {value!r}: {problem}")
    return value


def _messages(turns: object, kind: str) -> tuple[Message, ...]:
    """Return the turns: human and gpt in alternation, human first and gpt last; answers are of the kind."""
    if not isinstance(turns, list) or not turns:
        raise _RowProblem("conversations must be a list of at least one question and one answer")
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise _RowProblem(f"turn {number} must be an object with the keys 'from' and 'value'")
        speaker, text = turn["from"], turn["value"]
        if speaker not in SPEAKERS:
            raise _RowProblem(f"turn {number} is from {speaker!r}: must be 'human' or 'gpt'")
        if speaker != SPEAKERS[(number - 1) % 2]:
            raise _RowProblem(f"turn {number} is from {speaker!r}: human and gpt must take turns, human first")
        if not isinstance(text, str) or not text.strip():
            raise _RowProblem(f"the value of turn {number} must be text, and is {text!r}")
        if speaker == "gpt" and IMAGE_MARKER in text:
            raise _RowProblem(f"turn {number} is from 'gpt' and has an {IMAGE_MARKER} marker: only human's turns may")
        messages.append(Message("user", text) if speaker == "human" else Message("assistant", text, kind))
    if len(messages) % 2:
        raise _RowProblem("the last turn is from 'human': an answer from 'gpt' must follow")
    return tuple(messages)
