"""Conversations in LLaVA's JSON or JSON Lines format with a folder of images.

Enters: the file and the folder. Leaves: a sequence of `Sample`s and a list of the rows that are broken, each with its
line. Everything is checked when the dataset is made, the images by decoding them once, so that a bad row stops a run in
its first minute and not in its third hour; pictures are opened again when a sample is asked for, never kept.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, overload

from PIL import Image

from vlmcourse.data.kinds import MAX_KINDS
from vlmcourse.data.llava_rows import KIND_KEY, BadRow, Row, parse_row, read_rows
from vlmcourse.data.samples import Sample

log = logging.getLogger(__name__)
BadRowPolicy = Literal["refuse", "skip"]
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    TypeError,
    struct.error,
    Image.DecompressionBombError,
)
"""What Pillow raises on files that are broken in different ways."""
UNSUPPORTED_MODES = ("I", "I;16", "I;16B", "I;16L", "F")
"""Pixels of more than 8 bits a channel: turning them to RGB would clip them to white."""


class BadRowsError(ValueError):
    """A conversation file with broken rows; the message lists all of them."""

    def __init__(self, path: Path, bad_rows: Sequence[BadRow]) -> None:
        self.bad_rows = tuple(bad_rows)
        noun = "row" if len(self.bad_rows) == 1 else "rows"
        lines = "\n".join(f"  - {row}" for row in self.bad_rows)
        super().__init__(
            f"{path} has {len(self.bad_rows)} bad {noun}; correct them, or leave them out with "
            f"data.on_bad_row = 'skip':\n{lines}"
        )


class LlavaDataset(Sequence[Sample]):
    """The good rows of a conversation file, in the file's order."""

    bad_rows: tuple[BadRow, ...]
    """The rows that were left out, in the file's order."""

    def __init__(self, path: str | Path, image_dir: str | Path, on_bad_row: BadRowPolicy = "refuse") -> None:
        """Read and check the file and every image in it.

        Args:
            path: a JSON array, or JSON Lines, of `{"id", "image", "conversations": [{"from", "value"}]}`; a row may
                have a "data_source" as well, the kind of its answers.
            image_dir: the folder that image names are relative to.
            on_bad_row: `refuse` raises one error with all bad rows, `skip` logs them and goes on with the others.

        Raises:
            FileNotFoundError: if the file or the folder is missing.
            BadRowsError: with `refuse` and a bad row, or where no good row is left.
            ValueError: if the file is not JSON at all, has more than `MAX_KINDS` kinds, or `on_bad_row` is neither of
                the two.
        """
        if on_bad_row not in ("refuse", "skip"):
            raise ValueError(f"on_bad_row = {on_bad_row!r}: must be 'refuse' or 'skip'")
        self.path, self.image_dir = Path(path), Path(image_dir)
        if not self.path.is_file():
            raise FileNotFoundError(f"There is no conversation file {str(path)!r}: set data.path")
        if not self.image_dir.is_dir():
            raise FileNotFoundError(f"There is no image folder {str(image_dir)!r}: set data.image_dir")
        good, bad = self._check()
        self.bad_rows = tuple(bad)
        if bad and (on_bad_row == "refuse" or not good):
            raise BadRowsError(self.path, bad)
        if not good:
            raise ValueError(f"{self.path} has no rows: set data.path to a file with at least one conversation")
        kinds = {message.kind for row in good for message in row.messages if message.kind}
        if len(kinds) > MAX_KINDS:
            raise ValueError(
                f"{self.path} has {len(kinds)} values of {KIND_KEY}: at most {MAX_KINDS} are allowed, since each is a "
                "column loss/<kind> of the run's log; name the source of a row in it, not the row, or leave it out"
            )
        for row in bad:
            log.warning("%s: left out %s", self.path, row)
        self._rows = good

    def _check(self) -> tuple[list[Row], list[BadRow]]:
        """Return the good rows and the bad ones."""
        rows: list[Row] = []
        bad: list[BadRow] = []
        for place, value in read_rows(self.path):
            parsed = parse_row(place, value)
            rows += [parsed] if isinstance(parsed, Row) else []
            bad += [parsed] if isinstance(parsed, BadRow) else []
        names = list(dict.fromkeys(name for row in rows for name in row.images))
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            problems = dict(zip(names, pool.map(self._image_problem, names), strict=True))
        good = []
        for row in rows:
            found = [problem for name in row.images if (problem := problems[name])]
            if found:
                bad.append(BadRow(row.place, "; ".join(found)))
            else:
                good.append(row)
        return good, sorted(bad, key=lambda row: (row.place.line, row.place.entry or 0))

    def _image_problem(self, name: str) -> str | None:
        """Return what is wrong with an image file, or None; decodes all of it and keeps nothing."""
        relative = os.path.normpath(name)
        if os.path.isabs(name) or relative == ".." or relative.startswith(".." + os.sep):
            return f"image {name!r} lies outside the image folder: write a path relative to data.image_dir"
        path = self.image_dir / relative
        if "\0" in name or not path.is_file():
            return f"image {name!r} is missing: there is no file {str(path)!r}"
        try:
            with Image.open(path) as image:
                if image.mode in UNSUPPORTED_MODES:
                    return f"image {name!r} has more than 8 bits a channel (mode {image.mode}): save it as 8-bit"
                image.draft("RGB", (max(1, image.width // 8), max(1, image.height // 8)))  # JPEG: faster, reads it all
                image.load()
        except UNREADABLE as error:
            return f"image {name!r} cannot be read: {error}"
        return None

    def __len__(self) -> int:
        return len(self._rows)

    def image_names(self, index: int) -> tuple[str, ...]:
        """Return the image files of a row, without opening them."""
        return tuple(os.path.normpath(name) for name in self._rows[index].images)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._rows[index]
        return Sample(row.sample_id, tuple(self._open(row, name) for name in row.images), row.messages)

    def _open(self, row: Row, name: str) -> Image.Image:
        try:
            with Image.open(self.image_dir / os.path.normpath(name)) as image:
                return image.convert("RGB")
        except UNREADABLE as error:
            raise RuntimeError(
                f"{self.path}, {row.place}: image {name!r} could be read at the start and cannot be now: {error}"
            ) from error
