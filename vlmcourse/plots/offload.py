"""The decision tree of offloading as a drawing: every question with its numbers, and the path that was taken.

Enters: a `Decision` of `planner.offload`. Leaves: a figure. Chapter 5.
"""

from __future__ import annotations

import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from vlmcourse.planner.offload import DOES_NOT_FIT, QUESTIONS, STAGES_OF, Decision, Level
from vlmcourse.planner.offload_cost import show_bytes
from vlmcourse.plots.style import COLOURS, RANK_OWNERS, new_figure

TAKEN, LEFT, PALE = "black", "#9A9A9A", "#F4F4F4"
"""Colours of what is on the path, of what is not, and of its boxes."""
YES, NO = "#DDF1EA", "#FBE3D6"
HOST = "#56B4E9"
"""Bytes off the device."""
BOX_WIDTH, BOX_HEIGHT, ROW = 7.3, 1.3, 1.85
"""Of a question, and the distance from one to the next, in units of the drawing, whose width is 10."""
ANSWER_LEFT = 8.25
BAR_LEFT, LIMIT, BAR_END = 1.15, 1.9, 3.6
"""Where bars begin in a box; how far from there the limit is drawn, and the longest bar."""


def plot_offload(decision: Decision, title: str = "What has to leave the device?") -> Figure:
    """Draw the tree, least offloading first, with the path to the answer in black and everything else in grey.

    Args:
        decision: of `decide_offload`.
        title: the message.

    Returns:
        A figure. In every question the upper bar is what the fullest rank needs on its device, by owner, the lower one
        what a node needs in main memory for what left; a line marks the limit, and a bar that is cut off goes on.
    """
    num_rows = len(decision.levels)
    figure, axes = new_figure(6.6)
    asked = len(decision.path)
    for row, level in enumerate(decision.levels):
        is_asked, is_answer = row < asked, level.name == decision.answer
        _draw_question(axes, level, -ROW * row, is_asked=is_asked)
        _draw_answer(axes, level.name, -ROW * row, is_taken=is_answer)
        _draw_yes(axes, -ROW * row, is_taken=is_answer)
        _draw_no(axes, -ROW * row, is_taken=is_asked and not is_answer)
    end = -ROW * num_rows + 0.32
    _draw_box(axes, 0, end, BOX_WIDTH, 0.62, NO if not decision.fits else PALE, is_taken=not decision.fits)
    ink = TAKEN if not decision.fits else LEFT
    axes.text(BOX_WIDTH / 2, end, DOES_NOT_FIT, ha="center", va="center", color=ink, weight="bold", fontsize=11)
    said = decision.reason
    if decision.cost.update_bytes:
        said += f"\nEach step of a rank: {decision.cost}."
    wrapped = "\n".join(textwrap.fill(line, 118) for line in said.splitlines())
    axes.text(0, end - 0.55, wrapped, va="top", fontsize=8.5, linespacing=1.35, in_layout=False)
    axes.set(xlim=(-0.1, 10.1), ylim=(end - 1.75, BOX_HEIGHT / 2 + 0.12), title=title)
    axes.set_axis_off()
    held = {
        owner for level in decision.levels if level.memory for owner, size in level.memory.by_owner().items() if size
    }
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=owner)
        for owner, (colour, hatch) in RANK_OWNERS.items()
        if owner in held
    ]
    handles.append(Patch(facecolor=HOST, label="off the device"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        columnspacing=1,
        handlelength=1.4,
    )
    return figure


def _draw_box(
    axes: Axes, left: float, middle: float, width: float, height: float, colour: str, *, is_taken: bool
) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (left, middle - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=colour,
            edgecolor=TAKEN if is_taken else LEFT,
            linewidth=2 if is_taken else 0.8,
        )
    )


def _draw_question(axes: Axes, level: Level, middle: float, *, is_asked: bool) -> None:
    """Draw one question: its text and, as far as there are numbers, the bars of device and node."""
    ink = TAKEN if is_asked else LEFT
    _draw_box(axes, 0, middle, BOX_WIDTH, BOX_HEIGHT, "white" if is_asked else PALE, is_taken=is_asked)
    question = QUESTIONS[level.name].capitalize()
    axes.text(0.18, middle + 0.38, question, va="center", color=ink, weight="bold", fontsize=10.5)
    if level.memory is None:
        stages = f"only with zero_stage={STAGES_OF[level.name]}"
        axes.text(0.18, middle - 0.12, stages, va="center", color=ink, fontsize=9)
        return
    alpha = 1.0 if is_asked else 0.35
    parts = [(size, *RANK_OWNERS[owner]) for owner, size in level.memory.by_owner().items() if size]
    if level.name == "none":
        _draw_bar(axes, "a device", parts, level.device_limit_bytes, middle - 0.22, ink, alpha)
        axes.text(BAR_LEFT + LIMIT, middle + 0.12, "limit", ha="center", va="center", color=ink, fontsize=8.5)
        return
    _draw_bar(axes, "a device", parts, level.device_limit_bytes, middle - 0.02, ink, alpha)
    if not level.nvme_bytes:
        _draw_bar(axes, "a node", [(level.node_bytes, HOST, "")], level.node_limit_bytes, middle - 0.42, ink, alpha)
        return
    text = f"a node: {show_bytes(level.nvme_bytes)} in files, {show_bytes(level.node_bytes)} in main memory"
    axes.text(0.18, middle - 0.42, text, va="center", color=ink, fontsize=8.5)


def _draw_bar(
    axes: Axes, name: str, parts: list[tuple[int, str, str]], limit_bytes: int, middle: float, ink: str, alpha: float
) -> None:
    """Draw parts one after the other on a scale on which every limit is at the same place."""
    axes.text(0.18, middle, name, va="center", color=ink, fontsize=8.5)
    end, total = 0.0, sum(size for size, *_ in parts)
    for size, colour, hatch in parts:
        width = min(LIMIT * size / limit_bytes if limit_bytes else BAR_END, BAR_END - end)
        axes.add_patch(
            Rectangle(
                (BAR_LEFT + end, middle - 0.13),
                width,
                0.26,
                facecolor=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.4,
                alpha=alpha,
            )
        )
        end += width
    limit = BAR_LEFT + LIMIT
    axes.plot([limit, limit], [middle - 0.19, middle + 0.19], color=ink, lw=1.6)
    if end >= BAR_END - 1e-9:
        axes.text(BAR_LEFT + 0.05 + BAR_END, middle - 0.01, "»", va="center", color=ink, fontsize=10, weight="bold")
    fits = total <= limit_bytes
    text = f"{show_bytes(total)} {'≤' if fits else '>'} {show_bytes(limit_bytes)}"
    colour = ink if fits or ink == LEFT else COLOURS["communication"]
    axes.text(BOX_WIDTH - 0.15, middle, text, ha="right", va="center", color=colour, fontsize=9)


def _draw_answer(axes: Axes, name: str, middle: float, *, is_taken: bool) -> None:
    _draw_box(axes, ANSWER_LEFT, middle, 1.8, 0.8, YES if is_taken else PALE, is_taken=is_taken)
    ink, weight = (TAKEN, "bold") if is_taken else (LEFT, "normal")
    text = name.replace("+", "\n+ ")
    axes.text(ANSWER_LEFT + 0.9, middle, text, ha="center", va="center", color=ink, fontsize=10, weight=weight)


def _draw_yes(axes: Axes, middle: float, *, is_taken: bool) -> None:
    _draw_arrow(axes, (BOX_WIDTH, middle), (ANSWER_LEFT, middle), is_taken)
    axes.text(
        (BOX_WIDTH + ANSWER_LEFT) / 2, middle + 0.13, "yes", ha="center", color=TAKEN if is_taken else LEFT, fontsize=9
    )


def _draw_no(axes: Axes, middle: float, *, is_taken: bool) -> None:
    x, top = 1.1, middle - BOX_HEIGHT / 2
    _draw_arrow(axes, (x, top), (x, middle - ROW + BOX_HEIGHT / 2), is_taken)
    axes.text(x + 0.12, top - 0.28, "no", va="center", color=TAKEN if is_taken else LEFT, fontsize=9)


def _draw_arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], is_taken: bool) -> None:
    style = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 14}
    style |= {"color": TAKEN, "lw": 2.2} if is_taken else {"color": LEFT, "lw": 0.9}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)
