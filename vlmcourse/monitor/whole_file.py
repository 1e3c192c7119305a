"""A file of a run that is written anew while others may read it: they see the old content or the new one, never half.

Enters: a path and its new content. Leaves: the file, and nothing else beside it, on a full disk too. Power failures are
left out: what must outlive one, such as a checkpoint's pointer, is also flushed to the disk by its writer.
"""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes | str) -> None:
    """Give a file new content at once; text is written as UTF-8.

    Raises:
        OSError: if it cannot be written; the old content is then still there.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
