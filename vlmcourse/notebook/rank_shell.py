"""The IPython shell inside a rank: magics, `display`, and the value of a cell's last expression.

Rank 0 hands rich output (pictures, tables) to the notebook through the private folder of the cell; the other ranks
print it as text.
"""

from __future__ import annotations

import atexit
import base64
import tempfile
import types
from functools import cache
from typing import Any

from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Any as AnyTrait
from traitlets import Type
from traitlets.config import Config

from vlmcourse.notebook.jobs import MARK, JobFolder


class RankDisplayPublisher(DisplayPublisher):
    """Sends displays to the notebook (rank 0) or prints them as text."""

    folder = AnyTrait(default_value=None, allow_none=True)
    """The `JobFolder` of the cell on rank 0; None on the others."""
    token = ""
    num_sent = 0

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: object = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: object,
    ) -> None:
        """Show a bundle of representations of one object, by MIME type."""
        if self.folder is None:
            if "text/plain" in data:  # on a line of its own, whatever is open
                print(MARK.format(token=self.token, number="") + data["text/plain"])
            return
        bundle = {
            mime: base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
            for mime, value in data.items()
        }
        self._send({"data": bundle, "metadata": metadata or {}, "transient": transient or {}, "update": update})

    def clear_output(self, wait: bool = False) -> None:
        """Clear the output of the notebook's cell (rank 0 only)."""
        if self.folder is not None:
            self._send({"clear": True, "wait": wait})

    def _send(self, message: dict[str, object]) -> None:
        folder: JobFolder = self.folder
        folder.write_display(self.num_sent, message)
        print(MARK.format(token=self.token, number=self.num_sent))
        self.num_sent += 1


class RankShell(InteractiveShell):
    """A shell without a person: no history, no profile and no prompt."""

    display_pub_class = Type(RankDisplayPublisher)

    def init_profile_dir(self, profile_dir: object) -> None:
        """Make no folder: nothing of a rank is kept."""

    def showtraceback(self, exc_tuple: Any = None, *_: object, **__: object) -> None:
        """Let an exception fail the cell that IPython would only print, such as one in a file that `%run` runs."""
        error = self._get_exc_info(exc_tuple)[1]
        assert error is not None
        raise error

    def enable_matplotlib(self, gui: str | None = None) -> tuple[str, str]:
        """Ignore `%matplotlib inline` and its like: figures go to the notebook anyway."""
        return "inline", "inline"


@cache
def get_shell() -> RankShell:
    """Return this process's shell, whose variables are those of a new, empty `__main__`; made at the first call."""
    module = types.ModuleType("__main__")
    config = Config()
    config.HistoryManager.enabled, config.HistoryManager.hist_file = False, ":memory:"
    config.InteractiveShell.colors = "nocolor"
    existing = tempfile.gettempdir()  # IPython insists on a folder, and writes nothing into this one
    shell = RankShell.instance(config=config, ipython_dir=existing, user_module=module, user_ns=module.__dict__)
    shell.db = {}  # where `%cd` keeps the folders that it has been in
    atexit.unregister(shell.atexit_operations)
    for name in ("exit", "quit", "open"):  # IPython's versions talk to a person; those of Python stay
        module.__dict__.pop(name, None)
    formatter: Any = shell.display_formatter
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", _draw)
    return shell


def connect_shell(shell: RankShell, folder: JobFolder | None, token: str) -> None:
    """Send what the shell displays to the notebook.

    Args:
        shell: this rank's.
        folder: where displays go; None prints them as text.
        token: the secret word of this cell, see `Job.token`.
    """
    publisher = shell.display_pub
    assert isinstance(publisher, RankDisplayPublisher)
    publisher.folder, publisher.token = folder, token


def show_value(shell: InteractiveShell, value: object, *, text_only: bool) -> None:
    """Show the value of a cell's last expression as a notebook does; with `text_only` no pictures and tables."""
    if value is None:
        return
    formatter: Any = shell.display_formatter
    data, metadata = formatter.format(value)
    if data and not (text_only and set(data) != {"text/plain"}):
        shell.display_pub.publish(data, metadata)


def _draw(figure: Any) -> str | bytes | None:
    from IPython.core.pylabtools import print_figure

    from vlmcourse.notebook.figures import SEEN

    SEEN.add(figure)
    return print_figure(figure, fmt="png", bbox_inches="tight", base64=True)
