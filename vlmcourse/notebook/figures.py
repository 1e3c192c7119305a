"""A matplotlib backend for ranks: `plt.show()` hands every open figure to the notebook, once, and closes it.

Chosen through the environment variable MPLBACKEND, so that matplotlib is imported only by cells that draw. All ranks
but one draw nothing and only close.
"""

from __future__ import annotations

import weakref

from IPython.display import display
from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vlmcourse.notebook.rank_shell import RankDisplayPublisher, get_shell

SEEN: weakref.WeakSet[Figure] = weakref.WeakSet()
"""Figures that have been displayed in this cell."""


def show(*_: object, **__: object) -> None:
    """Show and close all open figures."""
    for manager in Gcf.get_all_fig_managers():
        if is_shown():
            display(manager.canvas.figure)
    Gcf.destroy_all()


def is_shown() -> bool:
    """Whether this is the rank whose pictures go to the notebook."""
    publisher = get_shell().display_pub
    return isinstance(publisher, RankDisplayPublisher) and publisher.folder is not None


def show_unseen() -> None:
    """Show what the cell has left open, except figures that it has displayed by itself; close all."""
    for manager in Gcf.get_all_fig_managers():
        if manager.canvas.figure in SEEN:
            Gcf.destroy(manager)
    show()


class FigureManager(FigureManagerBase):
    """A figure without a window."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        """Show and close all open figures."""
        show()


class FigureCanvas(FigureCanvasAgg):
    """A canvas that draws into memory."""

    manager_class = FigureManager  # type: ignore[assignment]
