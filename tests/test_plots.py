"""Figures say what their data say: bars as long as their bytes, axes with units, colours of the course."""

from __future__ import annotations

import itertools
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from vlmcourse import plots
from vlmcourse.data.collate import Collator
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import IGNORE_LABEL
from vlmcourse.data.tokenizer import load_tokenizer
from vlmcourse.monitor.ledger import Ledger, Sample
from vlmcourse.monitor.state_table import Peaks, StateRow, StateTable
from vlmcourse.monitor.step_cost import StepCost
from vlmcourse.parallel.holdings import LayerShare, RankHoldings
from vlmcourse.parallel.layer_times import LayerTimes
from vlmcourse.parallel.links import LinkSample, fit_link
from vlmcourse.parallel.overlap import Communication, StepTrace
from vlmcourse.parallel.timeline import Action
from vlmcourse.planner import StateBytes, estimate_state_bytes
from vlmcourse.planner.stages import StageSplit
from vlmcourse.plots.holdings import find_box
from vlmcourse.plots.pipeline import KINDS, STAGE_COLOURS
from vlmcourse.presets import get_model

MB, GB = 10**6, 10**9
SMALLEST_FONT_POINTS = 8


def state_figure() -> Figure:
    states = {"seven": estimate_state_bytes(7 * GB), "one": estimate_state_bytes(GB, optimizer="sgd_momentum")}
    return plots.plot_state(states, {"80 GB": 80 * GB}, "What fits")


def test_a_label_that_does_not_fit_its_part_of_a_bar_is_left_out_and_no_two_overlap() -> None:
    states = {f"ZeRO-{stage}": estimate_state_bytes(26 * GB, zero_stage=stage, shard_degree=8) for stage in range(4)}
    figure = plots.plot_state(states, {"40 GB": 40 * GB, "80 GB": 80 * GB}, "Stages")
    figure.draw_without_rendering()
    texts = [text for text in figure.axes[0].texts if not text.get_text().endswith("GB")]
    assert [text.get_text() for text in texts] == ["52", "52", "312", "52", "52", "39", "52", "39", "39"]
    boxes = [text.get_window_extent() for text in texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def ledger_figure() -> Figure:
    ledgers = {"ddp": [Ledger(4 * MB, 4 * MB, 8 * MB)] * 2, "fsdp": [Ledger(2 * MB, 2 * MB, 5 * MB)]}
    estimates = {
        "ddp": StateBytes(weights=4 * MB, gradients=4 * MB, optimizer=8 * MB),
        "fsdp": StateBytes(weights=2 * MB, gradients=2 * MB, optimizer=4 * MB),
    }
    return plots.plot_ledgers(ledgers, estimates)


def states_table() -> StateTable:
    formula = StateBytes(weights=4 * MB, gradients=4 * MB, optimizer=8 * MB)
    of: dict[str, Any] = {
        "formula": formula,
        "differences": (),
        "deepspeed_bytes": None,
        "peaks": Peaks(0, 0),
        "num_ranks": 2,
    }
    sizes = {("ddp", 0): (4, 4, 8), ("deepspeed-zero1", 0): (4, 2, 5), ("deepspeed-zero1", 1): (4, 3, 6)}
    rows = [
        StateRow(strategy=name, rank=rank, measured=Ledger(*(size * MB for size in found), buffers_bytes=GB), **of)
        for (name, rank), found in sizes.items()
    ]
    return StateTable(tuple(rows))


def states_figure() -> Figure:
    return plots.plot_states(states_table(), 2)


def ranks_figure() -> Figure:
    curves = {"7B": {"DDP": [112 * GB] * 3, "ZeRO-3": [112 * GB, 56 * GB, 28 * GB]}}
    return plots.plot_memory_over_ranks(curves, (1, 2, 4), {"40 GB": 40 * GB})


def collectives_figure() -> Figure:
    stages = {"start": [[1, 2], [10, 20]], "reduce-scatter": [[11, None], [None, 22]], "end": [[11, 22], [11, 22]]}
    return plots.plot_collectives(stages, complete=[11, 22])


def gathered_figure() -> Figure:
    events = [("forward blocks.0", 3 * MB), ("after forward blocks.0", MB), ("backward blocks.0", 3 * MB)]
    return plots.plot_gathered_weights(events, 8 * MB, 4 * MB, {"forward": 0, "backward": 2})


def losses_figure() -> Figure:
    return plots.plot_losses({"1 rank": [3.0, 2.0, 1.0], "2 ranks": [3.0, 2.001, 1.0]})


def samples_figure() -> Figure:
    return plots.plot_conversations(DigitsDataset(2, seed=0, split="train")[:])


def tokens_figure() -> Figure:
    shape = get_model("tiny")
    collate = Collator(load_tokenizer("builtin"), shape, 256)
    return plots.plot_tokens(collate(DigitsDataset(3, seed=0, split="train")[:]), shape.image_token_id)


def held(
    rank: int, coordinates: dict[str, int], share: LayerShare, positions: tuple[tuple[int, int], ...]
) -> RankHoldings:
    at = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 0) | coordinates
    inputs = {"language 0": (1, sum(end - start for start, end in positions))}
    layers = {"language 0": share, "output": share}
    return RankHoldings(rank, at, (f"sample {at['dp_shard']}",), 8, positions, layers, inputs, 100, 50)


def fsdp_holdings() -> list[RankHoldings]:
    half = LayerShare(tensor=1.0, weights=0.5, gradients=0.5, optimizer=0.5)
    return [held(rank, {"dp_shard": rank}, half, ((0, 8),)) for rank in range(2)]


def holdings_figure() -> Figure:
    half = LayerShare(tensor=0.5, weights=0.5, gradients=0.5, optimizer=0.5)
    tensor = [held(rank, {"tp": rank}, half, ((0, 8),)) for rank in range(2)]
    return plots.plot_holdings({"FSDP": fsdp_holdings(), "tensor": tensor})


def timeline() -> list[list[Action]]:
    first = [Action(0, "F", 0, 0, 0.0, 0.1), Action(0, "B", 0, 0, 0.3, 0.4)]
    return [first, [Action(1, "F", 0, 1, 0.1, 0.2), Action(1, "B", 0, 1, 0.2, 0.3)]]


def schedules_figure() -> Figure:
    return plots.plot_schedules({"1f1b": timeline()})


def causal_figure() -> Figure:
    return plots.plot_causal_work(16, 2, ("contiguous", "zigzag"))


def traffic_figure() -> Figure:
    return plots.plot_context_traffic({"ring": [2 * MB, 4 * MB], "ulysses": [3 * MB, None]}, (2, 4), "One layer")


def strategies_figure() -> Figure:
    whole, half = Ledger(4 * MB, 4 * MB, 8 * MB), Ledger(2 * MB, 2 * MB, 4 * MB)
    costs = {
        "DDP": [StepCost(whole, 8 * MB, 4 * MB, 0.1)] * 2,
        "FSDP": [StepCost(half, 8 * MB, 6 * MB, 0.2)] * 2,
        "DDP on 4": [StepCost(whole, 4 * MB, 6 * MB, 0.4)] * 4,
        "FSDP on 4": [StepCost(half, 4 * MB, 6 * MB, 0.6)] * 4,
    }
    return plots.plot_strategies(costs, references=("DDP", "DDP on 4"))


def adaptation_figure() -> Figure:
    start, chosen = (
        StageSplit(num_vision_layers=1, num_language_layers=1, layers_per_stage=layers) for layers in ((1, 4), (3, 2))
    )
    times = LayerTimes((0.1,) * 5, (0.2,) * 5, 4)
    step_s = {(1, 4): 2.4, (2, 3): 1.9, (3, 2): 1.8, (4, 1): 2.5}
    return plots.plot_adaptation(times, {"start": start, "chosen": chosen}, step_s, num_microbatches=2)


def links_figure() -> Figure:
    samples = tuple(LinkSample(payload_bytes=size, seconds=1e-4 + size / 1e9) for size in (2**12, 2**16, 2**20))
    return plots.plot_links({"all-reduce": fit_link("all-reduce", 2, samples)})


def overlap_figure() -> Figure:
    sent = (Communication(name="gloo:all_reduce", start_s=0.1, end_s=0.3),)
    return plots.plot_overlap({"DDP": StepTrace(seconds=0.3, compute=((0.0, 0.2),), communication=sent)})


def sample_of(time_s: float, phase: str, **sizes: int) -> Sample:
    return Sample(time_s, phase, {(owner, ""): size * MB for owner, size in sizes.items()})


def step_ledgers_figure() -> Figure:
    plain = [
        sample_of(0.0, "forward", weights=4, optimizer=8),
        sample_of(0.1, "forward", weights=4, optimizer=8, activations=9),
        sample_of(0.2, "backward", weights=4, optimizer=8, activations=4, recomputed=1, gradients=2),
        sample_of(0.3, "update", weights=4, optimizer=8, gradients=4),
    ]
    return plots.plot_step_ledgers({"none": plain, "full": plain[:1] + plain[2:]}, "One step")


def kept_figure() -> Figure:
    terms = {
        "vision": {"input": 900, "queries, keys, values": 52_000},
        "decoder": {"a name that is as long as those of norms, in fp32": 52_000, "gate": 82_000, "value": 82_000},
    }
    return plots.plot_kept_tensors(terms, {name: sum(sizes.values()) for name, sizes in terms.items()})


def segments_figure() -> Figure:
    theory = {1: 5.0, 2: 4.0, 4: 5.0}
    times = ((1.3, 1.5), (1.35, 1.4), (1.3, 1.8))
    return plots.plot_segment_lengths(
        (1, 2, 4), (5, 4, 5), theory, times, plain_peak=4, forward_share=0.41, best_length=2
    )


def policies_figure() -> Figure:
    cases = {"none": (9 * MB, 1.0, 1.1), "full": (2 * MB, 1.3, 1.6)}
    return plots.plot_memory_and_time(cases, "Policies", forward_share=0.41)


def towers_figure() -> Figure:
    return plots.plot_towers({"1 tile": {"vision": GB, "language": 3 * GB}}, "Towers")


def plans_figure() -> Figure:
    return plots.plot_chain_plans([2, 2], [6, 3], {"some": ([(0, 1)], [(1, 7), (0, 8)])}, 9)


FIGURES = {
    "step ledgers": step_ledgers_figure,
    "kept": kept_figure,
    "segments": segments_figure,
    "policies": policies_figure,
    "towers": towers_figure,
    "plans": plans_figure,
    "adaptation": adaptation_figure,
    "links": links_figure,
    "overlap": overlap_figure,
    "state": state_figure,
    "ledgers": ledger_figure,
    "states": states_figure,
    "ranks": ranks_figure,
    "collectives": collectives_figure,
    "gathered": gathered_figure,
    "losses": losses_figure,
    "samples": samples_figure,
    "tokens": tokens_figure,
    "holdings": holdings_figure,
    "schedules": schedules_figure,
    "causal": causal_figure,
    "context traffic": traffic_figure,
    "strategies": strategies_figure,
}


def bars(axes: Any) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def heights_of(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata(), dtype=float).tolist()


def texts_of(figure: Figure) -> list[Any]:
    figure.draw_without_rendering()
    return [text for text in figure.findobj(plt.Text) if text.get_text().strip() and text.get_visible()]


def test_states_show_the_fullest_rank_of_each_strategy_without_buffers() -> None:
    axes = states_figure().axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["ddp", "deepspeed\nzero1"]
    assert [text.get_text() for text in axes.texts] == ["16.00", "16.00", "16.00", "13.00"]
    assert axes.get_ylabel() == "state of the fullest of 2 ranks (MB)"
    with pytest.raises(ValueError, match="num_ranks = 4: the table has runs on \\[2\\] ranks"):
        plots.plot_states(states_table(), 4)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_a_title_named_axes_and_legible_text_and_is_shown_once(name: str) -> None:
    figure = FIGURES[name]()
    assert figure.get_suptitle() or any(axes.get_title() for axes in figure.axes)
    for axes in figure.axes:
        named_ticks = [[tick.get_text() for tick in ticks()] for ticks in (axes.get_xticklabels, axes.get_yticklabels)]
        shares_x = len(axes.get_shared_x_axes().get_siblings(axes)) > 1
        assert axes.get_xlabel() or shares_x or any("rank" in name for name in named_ticks[0])
        shares_y = len(axes.get_shared_y_axes().get_siblings(axes)) > 1
        assert axes.get_ylabel() or shares_y or any(named_ticks[1])
    assert min(text.get_fontsize() for text in texts_of(figure)) >= SMALLEST_FONT_POINTS
    assert not plt.get_fignums(), "a figure left open is shown twice in a notebook"


@pytest.mark.parametrize(
    "name",
    ["state", "ledgers", "ranks", "gathered", "context traffic", "strategies", "step ledgers", "policies", "towers"],
)
def test_axes_of_bytes_name_their_unit(name: str) -> None:
    figure = FIGURES[name]()
    labels = [label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel())]
    assert any("(GB)" in label or "(MB)" in label for label in labels)


def test_colours_can_be_told_apart_in_grey() -> None:
    owners = [np.dot(to_rgb(plots.COLOURS[name]), (0.2126, 0.7152, 0.0722)) for name in ("weights", "gradients")]
    owners.append(np.dot(to_rgb(plots.COLOURS["optimizer"]), (0.2126, 0.7152, 0.0722)))
    assert min(abs(a - b) for a, b in itertools.combinations(owners, 2)) > 0.05
    assert len(set(plots.COLOURS.values())) == len(plots.COLOURS)


def test_state_bars_are_as_long_as_their_gigabytes_and_coloured_by_owner() -> None:
    axes = state_figure().axes[0]
    widths = [(round(bar.get_x(), 6), round(bar.get_width(), 6), to_hex(bar.get_facecolor())) for bar in bars(axes)]
    weights, gradients, optimizer = (plots.COLOURS[owner].lower() for owner in ("weights", "gradients", "optimizer"))
    assert widths == [
        (0, 14, weights),
        (14, 14, gradients),
        (28, 84, optimizer),
        (0, 2, weights),
        (2, 2, gradients),
        (4, 8, optimizer),
    ]
    assert [np.asarray(line.get_xdata())[0] for line in axes.lines] == [80]
    assert {"112 GB", "12 GB"} <= {text.get_text().strip() for text in axes.texts}


def test_ledger_bars_come_in_pairs_of_estimate_and_measurement() -> None:
    axes = ledger_figure().axes[0]
    heights = [bar.get_height() for bar in bars(axes)]
    assert heights == [4, 4, 8, 4, 4, 8] * 2 + [2, 2, 4, 2, 2, 5]
    hatched = ["///" in (bar.get_hatch() or "") for bar in bars(axes)]
    assert hatched == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3
    assert [label.get_text() for label in axes.get_xticklabels()] == ["ddp\nrank 0", "ddp\nrank 1", "fsdp\nrank 0"]


def test_memory_over_ranks_draws_every_strategy_in_gigabytes() -> None:
    axes = ranks_figure().axes[0]
    lines = {line.get_label(): heights_of(line) for line in axes.lines}
    assert lines["DDP"] == [112, 112, 112]
    assert lines["ZeRO-3"] == [112, 56, 28]
    assert [40, 40] in [heights_of(line) for line in axes.lines]


def test_collectives_show_own_numbers_sums_and_gaps_in_different_colours() -> None:
    start, middle, end = collectives_figure().axes
    assert [to_hex(bar.get_facecolor()) for bar in bars(start)] == [plots.COLOURS["gradients"].lower()] * 4
    summed, gap = plots.COLOURS["communication"].lower(), plots.COLOURS["idle"].lower()
    assert [to_hex(bar.get_facecolor()) for bar in bars(middle)] == [summed, gap, gap, summed]
    assert [text.get_text() for text in end.texts] == ["11", "22", "11", "22"]


def test_gathered_weights_stand_on_top_of_the_shard() -> None:
    lines = {line.get_label(): heights_of(line) for line in gathered_figure().axes[0].lines}
    assert lines["FSDP: shard and gathered weights"] == [7, 5, 7, 7]  # the last moment is drawn as long as the others
    assert lines["FSDP: shard"] == [4, 4]
    assert lines["DDP: all weights"] == [8, 8]


def test_losses_show_the_difference_of_every_step_that_has_one() -> None:
    above, below = losses_figure().axes
    assert [heights_of(line) for line in above.lines] == [[3, 2, 1], [3, 2.001, 1]]
    drawn = np.asarray(heights_of(below.lines[0]))
    assert np.isnan(drawn[[0, 2]]).all() and drawn[1] == pytest.approx(1e-3)
    low, high = below.get_ylim()
    assert low < 1e-3 < high


def test_equal_losses_can_be_drawn() -> None:
    assert plots.plot_losses({"1 rank": [2.0, 1.0], "2 ranks": [2.0, 1.0]}).axes


@pytest.mark.parametrize("curves", [{}, {"a": [1.0]}, {"a": [1.0], "b": [1.0, 2.0]}, {"a": [], "b": []}])
def test_losses_that_cannot_be_compared_are_refused(curves: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="same length"):
        plots.plot_losses(curves)


def test_conversations_show_every_question_and_answer_without_the_marker() -> None:
    sample = DigitsDataset(2, seed=0, split="train")[0]
    shown = samples_figure().axes[0].texts[0].get_text()
    assert shown.count("Q: ") == shown.count("A: ") == len(sample.messages) // 2
    assert "<image>" not in shown


def test_tokens_are_coloured_by_kind_and_counted() -> None:
    shape = get_model("tiny")
    collate = Collator(load_tokenizer("builtin"), shape, 256)
    batch = collate(DigitsDataset(3, seed=0, split="train")[:])
    axes = plots.plot_tokens(batch, shape.image_token_id).axes[0]
    kinds = np.asarray(axes.collections[0].get_array()).reshape(batch.input_ids_BS.shape)
    assert (kinds == 1).sum() == batch.num_visual_tokens
    assert (kinds == 3).sum() == batch.num_supervised_tokens
    assert (kinds == 0).sum() == (~batch.attention_mask_BS).sum()
    counts = [(row != IGNORE_LABEL).sum().item() for row in batch.labels_BS]
    assert [text.get_text() for text in axes.texts if text.get_text().isdigit()] == [str(count) for count in counts]


def test_shards_are_drawn_as_upper_and_lower_parts_and_matrices_as_left_and_right_ones() -> None:
    whole, upper, lower = fsdp_holdings(), (0, 0, 1, 0.5), (0, 0.5, 1, 0.5)
    assert [find_box(whole, holder, "weights", "output") for holder in whole] == [upper, lower]
    assert [find_box(whole, holder, "activations", "language 0") for holder in whole] == [upper, lower]
    half = LayerShare(tensor=0.5, weights=0.5, gradients=0.5, optimizer=0.5)
    split = [held(rank, {"tp": rank}, half, ((0, 4),)) for rank in range(2)]
    assert [find_box(split, holder, "weights", "output") for holder in split] == [(0, 0, 0.5, 1), (0.5, 0, 0.5, 1)]
    assert [find_box(split, holder, "activations", "language 0") for holder in split] == [
        (0, 0, 0.5, 1),
        (0.5, 0, 0.5, 1),
    ]


def test_copies_and_quarters_are_drawn_where_they_are() -> None:
    copy = LayerShare(tensor=1.0, weights=1.0, gradients=1.0, optimizer=0.25)
    ranks = [held(rank, {"dp_replicate": rank}, copy, ((0, 8),)) for rank in range(2)]
    assert [find_box(ranks, holder, "weights", "output") for holder in ranks] == [(0, 0, 1, 1)] * 2
    quarter = LayerShare(tensor=0.5, weights=0.25, gradients=0.25, optimizer=0.25)
    grid = [held(2 * d + t, {"dp_shard": d, "tp": t}, quarter, ((0, 8),)) for d in range(2) for t in range(2)]
    corners = [find_box(grid, holder, "weights", "output")[:2] for holder in grid]
    assert corners == [(0, 0), (0.5, 0), (0, 0.5), (0.5, 0.5)]
    elsewhere = held(0, {}, LayerShare(), ((0, 8),))
    assert find_box([elsewhere], elsewhere, "weights", "output")[2:] == (0, 0)


def test_a_schedule_shows_each_action_when_it_ran_and_how_long_ranks_wait() -> None:
    axes = schedules_figure().axes[0]
    waiting, actions = bars(axes)[:2], bars(axes)[2:]
    assert [bar.get_width() for bar in waiting] == pytest.approx([400, 400])
    assert [(bar.get_x(), bar.get_width()) for bar in actions] == [
        pytest.approx(p) for p in ((0, 100), (300, 100), (100, 100), (200, 100))
    ]
    assert "wait 50 %" in axes.get_title(loc="left")


def test_actions_have_colours_of_their_own_that_differ_in_grey() -> None:
    shown = {kind: (style.colour, style.hatch) for kind, (_, style) in KINDS.items()}
    assert not {colour.lower() for colour, _ in shown.values()} & {colour.lower() for colour in plots.COLOURS.values()}
    plain = [kind for kind in shown if not shown[kind][1]]
    assert len({hatch for _, hatch in shown.values()}) == len(shown) - len(plain) + 1, "hatched ones differ by hatch"
    greys = [np.dot(to_rgb(shown[kind][0]), (0.2126, 0.7152, 0.0722)) for kind in shown]
    assert min(abs(a - b) for a, b in itertools.combinations(greys, 2)) > 0.1


def test_a_white_edge_does_not_hide_a_narrow_action() -> None:
    first, second = timeline()
    short = first[0]._replace(end_s=0.001)
    axes = plots.plot_schedules({"1f1b": [[short, *first[1:]], second]}).axes[0]
    assert [bar.get_linewidth() > 0 for bar in bars(axes)[2:]] == [False, True, True, True]


def test_marked_microbatches_have_a_triangle_under_each_of_their_actions() -> None:
    ranks = [[*actions, actions[-1]._replace(microbatch=1)] for actions in timeline()]
    plain, with_marks = plots.plot_schedules({"1f1b": ranks}), plots.plot_schedules({"1f1b": ranks}, {"1f1b": {1}})
    marks = [[line for line in figure.axes[0].lines if line.get_marker() == "^"] for figure in (plain, with_marks)]
    assert [len(lines) for lines in marks] == [0, 2]
    assert [float(np.asarray(line.get_xdata())[0]) for line in marks[1]] == pytest.approx([350, 250])
    assert "text only" in {text.get_text() for text in with_marks.legends[0].get_texts()}
    assert "text only" not in {text.get_text() for text in plain.legends[0].get_texts()}


@pytest.mark.parametrize("figure", [holdings_figure, lambda: plots.plot_holdings({"FSDP": fsdp_holdings()})])
def test_cards_end_past_the_frame_of_their_data_and_name_the_share_of_the_weights(figure: Any) -> None:
    for axes in figure().axes:
        assert max(bar.get_x() + bar.get_width() for bar in bars(axes)) < axes.get_xlim()[1]
        assert axes.get_title(loc="left").endswith(": 50.0 % of the weights")


def test_causal_work_names_the_share_of_every_rank() -> None:
    contiguous, zigzag = ([text.get_text() for text in axes.texts] for axes in causal_figure().axes)
    assert contiguous == ["rank 0: 26.5 %", "rank 1: 73.5 %"]
    assert zigzag == ["rank 0: 50.0 %", "rank 1: 50.0 %"]


def test_strategies_are_compared_with_the_reference_on_as_many_ranks() -> None:
    memory, sent, time = strategies_figure().axes
    assert [text.get_text().strip() for text in memory.texts] == ["24.0", "16.0", "20.0", "12.0"]
    assert [text.get_text().strip() for text in sent.texts] == ["4.00", "6.00", "6.00", "6.00"]
    assert [text.get_text().strip() for text in time.texts] == ["1.0", "2.0", "1.0", "1.5"]


def test_layers_are_as_wide_as_their_time_and_every_split_stands_over_its_layers() -> None:
    layers, steps = adaptation_figure().axes
    assert [round(bar.get_width()) for bar in bars(layers)] == [300] * 10
    first, second = (colour.lower() for colour in STAGE_COLOURS[:2])
    colours = [to_hex(bar.get_facecolor()) for bar in bars(layers)]
    assert colours == [first, *[second] * 4, *[first] * 3, *[second] * 2]
    assert {"slowest stage: 1200.0 ms", "slowest stage: 900.0 ms"} <= {text.get_text() for text in layers.texts}
    measured, computed = steps.lines[:2]
    assert np.asarray(measured.get_xdata()).tolist() == [1, 2, 3, 4]
    assert heights_of(measured) == pytest.approx([2400, 1900, 1800, 2500])
    assert heights_of(computed) == pytest.approx([2700, 2400, 2400, 2700])  # two micro-batches x slowest + the other
    assert steps.get_ylim()[1] > 2700, "both curves lie inside, whichever is higher"
    named = {text.get_text(): (text.xy[0], text.xy[1]) for text in steps.texts if isinstance(text, plt.Annotation)}
    assert named == {"start": (1, pytest.approx(2400)), "chosen": (3, pytest.approx(1800))}


def test_a_fitted_line_runs_through_points_that_lie_on_one() -> None:
    points, line = links_figure().axes[0].lines
    assert heights_of(line) == pytest.approx(heights_of(points), rel=1e-6)


def test_overlap_names_the_part_of_communication_that_is_hidden() -> None:
    (axes,) = overlap_figure().axes
    assert axes.get_title(loc="left") == "DDP: 200.0 ms of communication, 50 % of it behind computation"


def test_step_ledgers_share_an_axis_and_name_the_highest_moment() -> None:
    left, right = step_ledgers_figure().axes
    assert left.get_title() == "none: at most 21.0 MB" and right.get_title() == "full: at most 19.0 MB"
    assert left.get_ylim() == right.get_ylim() and left.get_ylim()[1] > 21
    with pytest.raises(ValueError, match="no sample"):
        plots.plot_step_ledgers({"none": []}, "nothing")


def test_segment_lengths_draw_measured_points_on_the_theory() -> None:
    memory, time = segments_figure().axes
    assert heights_of(memory.lines[0]) == [5, 4, 5] == heights_of(memory.lines[1])
    assert heights_of(time.lines[0]) == [1.3, 1.35, 1.3]


def test_one_more_forward_is_drawn_by_products_and_as_measured_and_repeats_with_their_spread() -> None:
    panels: tuple[Any, Any] = segments_figure().axes[1], policies_figure().axes[0]
    spreads = [(1.3, 1.5), (1.35, 1.4), (1.3, 1.8)], [(1, 1.1), (1.3, 1.6)]
    for axes, along, expected in zip(panels, "yx", spreads, strict=True):
        ends = {"x": 0, "y": 1}[along]
        marks = [np.asarray(line.get_data(), dtype=float)[ends][0] for line in axes.lines]
        assert {4 / 3, 1.41} <= set(marks)
        assert [tuple(part[:, ends]) for of in axes.collections for part in of.get_segments()] == expected
        legend: Any = axes.get_legend() or axes.figure.legends[-1]
        assert {"1.41", "4/3"} <= {text.get_text().split(": ")[-1] for text in legend.get_texts()}


def test_kept_tensors_of_all_layers_are_drawn_to_one_scale_and_no_text_lies_in_another_panel() -> None:
    figure = kept_figure()
    vision, decoder = figure.axes
    assert vision.get_xlim() == decoder.get_xlim() and vision.get_xlim()[1] > 82
    texts = texts_of(figure)
    lengths = [bar.get_window_extent().width for axes in figure.axes for bar in bars(axes) if bar.get_width() == 52]
    assert lengths[0] == pytest.approx(lengths[1]) and len(lengths) == 2
    for axes, other in ((vision, decoder), (decoder, vision)):
        frame = other.get_window_extent()
        own = [text for text in texts if text in axes.findobj(plt.Text)]
        assert own and not any(text.get_window_extent().overlaps(frame) for text in own)
