"""A run at one moment as HTML: two curves, a bar of phases and of memory for every rank, and sentences.

Enters: a `RunView`. Leaves: text that a widget replaces twice a second: SVG, drawn in far less time than a figure of
matplotlib takes. Colours are those of all figures. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from vlmcourse.colours import COLOURS, PHASE_COLOURS
from vlmcourse.monitor.run_view import RankView, RunView, list_facts, list_remarks
from vlmcourse.planner.offload_cost import show_bytes
from vlmcourse.spans import PHASE_LABELS

WIDTH, CHART_HEIGHT, ROW, TOP = 760, 132, 22, 26
"""Of the drawings, in pixels of a notebook at its usual width; a rank has one row."""
STEP_LEFT, STEP_WIDTH, MEMORY_LEFT, MEMORY_WIDTH = 58, 380, 560, 110
GB = 10**9
MOST_POINTS, MOST_RANKS = 240, 16
"""Longer curves are thinned; of more ranks, those with the longest work of their own and those with a problem."""
PAPER = "background:#fff;color:#000;font:13px sans-serif;padding:6px;max-width:780px"
HATCH = (
    '<defs><pattern id="hatch-run-optimizer" width="8" height="8" patternUnits="userSpaceOnUse">'
    '<circle cx="4" cy="4" r="1.4" fill="#fff"/></pattern></defs>'
)
"""Over the optimizer's colour, as in all figures: in grey it is nearly that of other phases."""
NO_OWNERS = "memory by owner: not in this run's log; logging.memory_owners = true writes it"


def draw_run(view: RunView, heading: str = "") -> str:
    """Draw everything that is known.

    Args:
        view: the run.
        heading: how it stands; by default its state.

    Returns:
        HTML.
    """
    parts = [f"<div><b>{escape(view.folder)}</b>: {escape(heading or view.state)}</div>", f"<div>{_facts(view)}</div>"]
    if view.losses or view.tokens_per_s:
        parts.append(
            f'<svg viewBox="0 0 {WIDTH} {CHART_HEIGHT}" width="100%" role="img" font-size="12" '
            f'aria-label="loss and tokens per second by step">'
            + _draw_curve(view.losses, 0, "loss (nats)", COLOURS["loss"], from_zero=False)
            + _draw_curve(view.tokens_per_s, WIDTH // 2, "tokens/s", COLOURS["weights"], from_zero=True)
            + "</svg>"
        )
    if any(rank.step for rank in view.ranks):
        parts.append(_draw_ranks(view))
    if any(view.owners_bytes.values()):
        parts.append(_draw_owners(view.owners_bytes))
    elif view.losses and not view.owners_bytes:
        parts.append(f"<div>{NO_OWNERS}</div>")
    parts += [f"<div>{escape(remark[:1].upper() + remark[1:])}.</div>" for remark in list_remarks(view)]
    return f'<div style="{PAPER}">{"".join(parts)}</div>'


def _facts(view: RunView) -> str:
    facts = list_facts(view)
    if view.world_size:
        facts.insert(1, f"{view.world_size} rank{'s' if view.world_size != 1 else ''}")
    return " · ".join(map(escape, facts))


def thin(points: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """Return at most `most` points, evenly spaced, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    last = len(points) - 1
    return [points[round(index * last / (most - 1))] for index in range(most)]


def _draw_curve(points: list[tuple[int, float]], left: int, label: str, colour: str, *, from_zero: bool) -> str:
    """Draw one curve in half of the width: the largest and the smallest value are written at the axis."""
    if len(points) < 2:
        return f'<text x="{left + 4}" y="14">{label}: a curve from the second row of the log on</text>'
    shown = thin(points)
    high = max(value for _, value in shown)
    low = 0.0 if from_zero else min(value for _, value in shown)
    first, last = shown[0][0], shown[-1][0]
    right, bottom, top, begin = left + WIDTH // 2 - 14, CHART_HEIGHT - 18, TOP, left + 58
    scale_x, scale_y = (right - begin) / max(1, last - first), (bottom - top) / ((high - low) or 1.0)
    line = " ".join(f"{begin + scale_x * (s - first):.1f},{bottom - scale_y * (v - low):.1f}" for s, v in shown)
    end_x, end_y = line.rsplit(" ", 1)[-1].split(",")
    return (
        f'<text x="{left + 4}" y="14">{label}</text>'
        f'<path d="M{begin} {top}V{bottom}H{right}" fill="none" stroke="#888"/>'
        f'<text x="{begin - 4}" y="{top + 8}" text-anchor="end">{_short(high)}</text>'
        f'<text x="{begin - 4}" y="{bottom}" text-anchor="end">{_short(low)}</text>'
        f'<text x="{begin}" y="{bottom + 14}">step {first}</text>'
        f'<text x="{right}" y="{bottom + 14}" text-anchor="end">{last}</text>'
        f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        f'<circle cx="{end_x}" cy="{end_y}" r="2.6" fill="{colour}"/>'
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _draw_ranks(view: RunView) -> str:
    """Draw a row a rank: its step by phase, and its memory."""
    shown = choose_ranks(view.ranks)
    left_out = len(view.ranks) - len(shown)
    longest_s = max((_drawn_s(rank) for rank in shown), default=0.0) or 1.0
    largest = max((_memory(rank)[1] for rank in shown), default=0) or 1
    over_s = f", mean of {view.window_steps} steps" if view.window_steps > 1 else ""
    kind = "memory of the GPU: allocated of reserved" if any(rank.reserved_bytes for rank in shown) else "resident set"
    height = TOP + ROW * len(shown) + 4
    rows = "".join(
        _draw_rank(rank, TOP + ROW * index, STEP_WIDTH / longest_s, MEMORY_WIDTH / largest)
        for index, rank in enumerate(shown)
    )
    label = escape("; ".join(f"rank {r.rank}: {_step_text(r)}" for r in shown), quote=True)
    more = f"<div>{left_out} more ranks are not drawn.</div>" if left_out else ""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" font-size="12" aria-label="{label}">'
        f'<text x="{STEP_LEFT}" y="14">a step by phase{over_s}</text>'
        f'<text x="{MEMORY_LEFT}" y="14">{kind}</text>{HATCH}{rows}</svg><div>{_legend(shown)}</div>{more}'
    )


def choose_ranks(ranks: Sequence[RankView], most: int = MOST_RANKS) -> list[RankView]:
    """Return the ranks to draw, in their order: all, or those with a problem, then the longest work of their own."""
    if len(ranks) <= most:
        return list(ranks)

    def need(rank: RankView) -> tuple[bool, float]:
        work_s = rank.own_s if rank.own_s is not None else rank.step_s
        return not rank.problem, -(work_s or 0.0)

    by_need = sorted(ranks, key=need)
    return sorted(by_need[:most], key=lambda rank: rank.rank)


def _drawn_s(rank: RankView) -> float:
    return max(sum(rank.phases_s.values()), rank.step_s or 0.0)


def _memory(rank: RankView) -> tuple[int, int]:
    """Return what is in use and what is taken; on a CPU both are the resident set."""
    if rank.reserved_bytes is not None:
        return rank.allocated_bytes or 0, rank.reserved_bytes
    return rank.rss_bytes or 0, rank.rss_bytes or 0


def _step_text(rank: RankView) -> str:
    if rank.step_s is None:
        return "no step yet"
    phases = ", ".join(f"{PHASE_LABELS[name]} {1e3 * seconds:.0f} ms" for name, seconds in rank.phases_s.items())
    return f"{1e3 * rank.step_s:.0f} ms ({phases})"


def _draw_rank(rank: RankView, top: int, per_second: float, per_byte: float) -> str:
    middle, parts, left = top + ROW * 0.68, [], float(STEP_LEFT)
    ink = COLOURS["communication"] if rank.problem else "#000"
    phases = rank.phases_s or {"other": rank.step_s or 0.0}
    for name, seconds in phases.items():
        width = per_second * seconds
        parts.append(
            f'<rect x="{left:.1f}" y="{top + 2}" width="{width:.1f}" height="{ROW - 5}" fill="{PHASE_COLOURS[name]}">'
            f"<title>rank {rank.rank}: {PHASE_LABELS[name]} {1e3 * seconds:.1f} ms</title></rect>"
        )
        if name == "optimizer":
            box = f'x="{left:.1f}" y="{top + 2}" width="{width:.1f}" height="{ROW - 5}"'
            parts.append(f'<rect {box} fill="url(#hatch-run-optimizer)" pointer-events="none"/>')
        left += width
    used, taken = _memory(rank)
    for size, colour in ((taken, COLOURS["idle"]), (used, COLOURS["activations"])):
        parts.append(
            f'<rect x="{MEMORY_LEFT}" y="{top + 2}" width="{per_byte * size:.1f}" height="{ROW - 5}" fill="{colour}"/>'
        )
    length = "no step yet" if rank.step_s is None else f"{1e3 * rank.step_s:,.0f} ms"
    since = "" if rank.since_step_s is None else f" {rank.since_step_s:.0f} s"
    state = f", {rank.problem}{since}" if rank.problem else ""
    return (
        f'<text x="0" y="{middle:.0f}" fill="{ink}">rank {rank.rank}</text>{"".join(parts)}'
        f'<text x="{left + 5:.1f}" y="{middle:.0f}" fill="{ink}">{length}{state}</text>'
        f'<text x="{MEMORY_LEFT + MEMORY_WIDTH + 5}" y="{middle:.0f}">{f"{used / GB:.2f} GB" if used else ""}</text>'
    )


def _legend(ranks: Sequence[RankView]) -> str:
    known = [name for name in PHASE_COLOURS if any(name in rank.phases_s for rank in ranks)]
    return "".join(_swatch(PHASE_COLOURS[name], PHASE_LABELS[name]) for name in known)


def _swatch(colour: str, text: str) -> str:
    box = f'<svg width="14" height="11"><rect width="14" height="11" fill="{colour}"/></svg>'
    return f'<span style="white-space:nowrap;margin-right:14px">{box} {escape(text)}</span>'


def _draw_owners(owners: dict[str, int]) -> str:
    """Draw one bar of all owners, one after the other."""
    owners = {owner: size for owner, size in owners.items() if size}
    total = sum(owners.values())
    parts, left = [], 0.0
    for owner, size in owners.items():
        width = WIDTH * size / total
        colour = COLOURS.get(owner, COLOURS["idle"])
        parts.append(f'<rect x="{left:.1f}" y="0" width="{width:.1f}" height="18" fill="{colour}" stroke="#fff"/>')
        left += width
    names = "".join(
        _swatch(COLOURS.get(owner, COLOURS["idle"]), f"{owner} {show_bytes(size)}") for owner, size in owners.items()
    )
    svg = f'<svg viewBox="0 0 {WIDTH} 18" width="100%" role="img" aria-label="memory by owner">{"".join(parts)}</svg>'
    return f"<div>memory by owner, the most that any rank holds of each</div>{svg}<div>{names}</div>"
