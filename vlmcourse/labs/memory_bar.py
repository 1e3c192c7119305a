"""A stacked bar of what a rank holds, as text: SVG, which a notebook shows and a widget replaces in a blink.

Enters: bytes by owner and a device's memory. Leaves: HTML. A figure of matplotlib takes longer than a slider moves.
Colours are those of all figures (`plots.style`). Chapter 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from vlmcourse.planner.offload_cost import show_bytes
from vlmcourse.plots.style import COLOURS, RANK_OWNERS

WIDTH, HEIGHT, TOP, BAR = 760, 92, 30, 44
"""Of the drawing, and where the bar is in it, in pixels of a notebook at its usual width."""
PIXELS_A_LETTER = 7.5
HATCHES = {
    "..": '<circle cx="4" cy="4" r="1.4" fill="#fff"/>',
    "xx": '<path d="M0 0L8 8M8 0L0 8" stroke="#fff" stroke-width="1.2"/>',
}
"""What is drawn over a colour, for what cannot be told apart in grey."""
PAPER = "background:#fff;color:#000;font:13px sans-serif;padding:6px;max-width:780px"


def draw_bar(
    owners: Mapping[str, int], device: str, limit_bytes: int, note: str = "", *, fits_node: bool = True
) -> str:
    """Draw owners one after the other, and the device's memory as a line across.

    Args:
        owners: bytes by owner, keys of `RANK_OWNERS`; those that hold nothing are left out.
        device: its name, for the line.
        limit_bytes: its memory, above 0.
        note: a line below, as plain text.
        fits_node: whether what is not in the bar has room elsewhere.

    Returns:
        HTML with one SVG and a table of the same numbers.
    """
    held = {owner: size for owner, size in owners.items() if size}
    total = sum(held.values())
    scale = (WIDTH - 20) / (1.06 * max(total, limit_bytes))
    line = 1 + scale * limit_bytes
    parts, left = [], 0.0
    for owner, size in held.items():
        parts.append(_draw_part(owner, size, 1 + left, scale * size, line))
        left += scale * size
    side = "end" if line > WIDTH / 2 else "start"
    verdict = ("fits" if fits_node else "fits, but main memory does not") if total <= limit_bytes else "does not fit"
    head = f"{show_bytes(total)} of {show_bytes(limit_bytes)}: {verdict}"
    ink = "#000" if total <= limit_bytes and fits_node else COLOURS["communication"]
    patterns = "".join(
        f'<pattern id="hatch-{owner}" width="8" height="8" patternUnits="userSpaceOnUse">{HATCHES[hatch]}</pattern>'
        for owner, (_, hatch) in RANK_OWNERS.items()
        if hatch
    )
    label = escape(f"{head}. " + ", ".join(f"{owner} {show_bytes(size)}" for owner, size in held.items()), quote=True)
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" aria-label="{label}" font-size="13">'
        f"<defs>{patterns}</defs>{''.join(parts)}"
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="{TOP - 8}" y2="{TOP + BAR + 8}" stroke="#000" stroke-width="2.5"/>'
        f'<text x="{line:.1f}" y="{TOP - 13}" text-anchor="{side}">{escape(device)}: {show_bytes(limit_bytes)}</text>'
        "</svg>"
    )
    rows = "".join(
        f'<span style="white-space:nowrap;margin-right:14px">{_swatch(owner)} {owner} {show_bytes(size)}</span>'
        for owner, size in held.items()
    )
    below = f"<div>{escape(note)}</div>" if note else ""
    return f'<div style="{PAPER}"><b style="color:{ink}">{head}</b>{svg}<div>{rows}</div>{below}</div>'


def draw_problems(problems: tuple[str, ...]) -> str:
    """Return the sentences that stand in place of a bar, as HTML."""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return f'<div style="{PAPER}"><b>This cannot be run:</b><ul style="margin:4px 0">{items}</ul></div>'


def _draw_part(owner: str, size: int, left: float, width: float, line: float) -> str:
    """Draw one owner, with its name where that fits and the device's line does not go through it."""
    colour, hatch = RANK_OWNERS[owner]
    box = f'x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{BAR}"'
    drawn = f'<rect {box} fill="{colour}" stroke="#fff"><title>{owner} {show_bytes(size)}</title></rect>'
    if hatch:
        return drawn + f'<rect {box} fill="url(#hatch-{owner})" pointer-events="none"/>'  # letters would not be legible
    letters = PIXELS_A_LETTER * len(owner)
    if width < letters or abs(left + width / 2 - line) < letters / 2:
        return drawn
    ink = "#fff" if owner == "weights" else "#000"
    middle = f'x="{left + width / 2:.1f}" y="{TOP + BAR / 2 + 4}"'
    return drawn + f'<text {middle} text-anchor="middle" fill="{ink}" pointer-events="none">{owner}</text>'


def _swatch(owner: str) -> str:
    colour, hatch = RANK_OWNERS[owner]
    over = f'<rect width="14" height="11" fill="url(#hatch-{owner})"/>' if hatch else ""
    return f'<svg width="14" height="11"><rect width="14" height="11" fill="{colour}"/>{over}</svg>'
