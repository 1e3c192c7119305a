"""Chapter 7's second half: made-up checkpoints and conversations, formats of inference, and the way to a tuned run."""

from __future__ import annotations

import dataclasses
import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from parity import load
from ranks import run_worker
from transformers import InternVLForConditionalGeneration

from vlmcourse import plots
from vlmcourse.labs import ch07b, tuning
from vlmcourse.labs.tuning import GLOBAL_BATCH, Tuned, Variant, memory_trades, tuning_steps
from vlmcourse.models.hf import LAYOUTS, load_hf_folder
from vlmcourse.models.weight_files import read_weights
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.hf_folder import find_hf_layout, read_hf_config
from vlmcourse.train.export import export_hf_folder

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")
# float32 sums in another order: a sharded forward, and one of a whole model.
FP32_ATOL = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set and a checkpoint in each layout."""
    place = tmp_path_factory.mktemp("ch07b")
    ch07b.make_checkpoints(place)
    ch07b.write_conversations(place / "set", num_rows=40)
    return place


@pytest.fixture(scope="module")
def pair(folder: Path) -> list[dict[str, Any]]:
    """What two ranks found."""
    run_worker("ch07b_worker.py", str(folder))
    return [load(folder / f"rank{rank}.pt") for rank in range(2)]


def first_config(folder: Path, layout: str = "internvl_chat") -> Any:
    return ch07b.finetune_config(folder / layout, folder / "set" / "chats.json", "test")


def test_both_checkpoints_are_the_same_model_in_shards_and_in_the_layout_of_their_name(folder: Path) -> None:
    models = {}
    for layout in LAYOUTS:
        config = read_hf_config(folder / layout)
        assert config is not None and find_hf_layout(config, layout) == layout
        assert len(list((folder / layout).glob("model-*.safetensors"))) > 1
        models[layout] = load_hf_folder(folder / layout).state_dict()
    first, second = models.values()
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_made_up_checkpoints_replace_those_of_an_earlier_call(tmp_path: Path) -> None:
    before = ch07b.make_checkpoints(tmp_path)["transformers"]
    (before / "model-00009-of-00009.safetensors").write_bytes(b"left over")
    assert ch07b.make_checkpoints(tmp_path)["transformers"] == before
    assert not (before / "model-00009-of-00009.safetensors").exists()


def test_the_set_is_in_llavas_format_with_an_image_marker_in_the_first_question_alone(folder: Path) -> None:
    rows = json.loads((folder / "set" / "chats.json").read_text(encoding="utf-8"))
    assert len(rows) == 40
    for row in rows:
        turns = row["conversations"]
        assert [turn["from"] for turn in turns] == ["human", "gpt"] * 2
        assert [turn["value"].count("<image>") for turn in turns] == [1, 0, 0, 0]
        assert (folder / "set" / row["image"]).is_file()


def test_a_folder_without_a_config_is_refused_and_a_setting_is_taken(folder: Path, tmp_path: Path) -> None:
    chats = folder / "set" / "chats.json"
    with pytest.raises(FileNotFoundError, match=r"config.json: give a folder with config.json"):
        ch07b.finetune_config(tmp_path, chats, "test")
    more = ch07b.finetune_config(folder / "transformers", chats, "test", data__max_tiles_per_image=6)
    tile = first_config(folder).data.max_seq_len - ch07b.ROOM_FOR_TEXT
    assert more.data.max_tiles_per_image == 6 and more.data.max_seq_len == 7 * tile + ch07b.ROOM_FOR_TEXT


def test_two_ranks_train_the_same_from_both_layouts_and_export_gives_their_logits(
    folder: Path, pair: list[dict[str, Any]], tmp_path: Path
) -> None:
    losses, logits = zip(*(pair[0]["fine-tuned"][layout] for layout in LAYOUTS), strict=True)
    assert losses[0] == losses[1] and losses[0][0] != losses[0][-1]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], pair[1]["fine-tuned"][LAYOUTS[0]][1])
    batch = ch07b.load_batch(first_config(folder))
    for layout in LAYOUTS:
        out = tmp_path / layout
        export_hf_folder(folder / "runs" / "transformers", out, layout=layout)
        assert [file.name for file in out.glob("*.safetensors")] == ["model.safetensors"]
        found = ch07b.compute_logits(load_hf_folder(out), batch)
        torch.testing.assert_close(found, logits[0], rtol=0, atol=FP32_ATOL)
    theirs: Any = InternVLForConditionalGeneration.from_pretrained(tmp_path / "transformers").eval()
    with torch.no_grad():
        answer = theirs(
            input_ids=batch.input_ids_BS,
            pixel_values=batch.pixel_values_ICHW,
            attention_mask=batch.attention_mask_BS.long(),
        ).logits
    torch.testing.assert_close(answer[batch.labels_BS >= 0].double(), logits[0], rtol=0, atol=FP32_ATOL)


def test_stretched_mlps_are_the_same_function_for_bf16_and_overflow_in_fp16(folder: Path) -> None:
    batch = ch07b.load_batch(first_config(folder))
    model = load_hf_folder(folder / "internvl_chat")
    plain = ch07b.compute_logits(model, batch)
    rows = {row.dtype: row for row in ch07b.compare_formats(model, batch)}
    assert rows["float32"].relative_error == 0 and rows["float32"].weight_bytes == 2 * rows["bfloat16"].weight_bytes
    # bf16 keeps 8 significant bits, fp16 11.
    assert 1e-3 < rows["bfloat16"].relative_error < 5e-2
    assert 2 < rows["bfloat16"].relative_error / rows["float16"].relative_error < 32
    assert rows["float16"].num_not_finite == 0
    ch07b.stretch_mlps(model, 20)
    stretched = {row.dtype: row for row in ch07b.compare_formats(model, batch)}
    assert torch.equal(ch07b.compute_logits(model, batch), plain)
    assert stretched["bfloat16"].relative_error == rows["bfloat16"].relative_error
    assert stretched["float16"].num_not_finite > 0 and math.isnan(stretched["float16"].relative_error)


def test_a_packed_weight_cut_as_if_stacked_loads_and_is_another_model(folder: Path) -> None:
    wrong, right = ch07b.split_as_if_stacked(folder / "internvl_chat"), load_hf_folder(folder / "internvl_chat")
    differ = {name for name, weight in right.state_dict().items() if not torch.equal(weight, wrong.state_dict()[name])}
    assert differ and all(name.startswith("language.blocks.") and "attention" in name for name in differ)
    name = "language_model.model.layers.1.attention.wqkv.weight"
    packed = read_weights(folder / "internvl_chat", "cpu", torch.float32, lambda key: key)[name]
    attention: Any = wrong.language.blocks[1].attention
    assert torch.equal(packed, torch.cat([getattr(attention, f"{part}_proj").weight for part in "qkv"]))


def test_the_heavy_vision_tower_has_most_of_the_work() -> None:
    trained, frozen = (ch07b.vision_share(ch07b.heavy_vision(), 1, 24, frozen=how) for how in (False, True))
    assert trained > frozen > 0.5
    # A frozen tower needs its forward alone, a third; the other towers change nothing.
    odds, frozen_odds = trained / (1 - trained), frozen / (1 - frozen)
    assert frozen_odds == pytest.approx(odds / 3, rel=0.05)


def test_every_variant_makes_steps_of_the_same_samples_with_the_settings_that_it_names() -> None:
    steps, trades = tuning_steps(), memory_trades()
    for variant in (*steps, *trades):
        train = tuning.configure(variant).train
        assert train.micro_batch_size * train.accumulation_steps * variant.num_ranks == GLOBAL_BATCH
    runs = [tuning.configure(variant) for variant in steps]
    assert [run.train.precision for run in runs] == ["fp32"] * 3 + ["bf16"] * 2
    assert [run.parallel.strategy for run in runs] == ["single"] * 4 + ["ddp"]
    assert [variant.pads_to_longest_allowed for variant in steps] == [True, True] + [False] * 3
    zero2, pieces, recomputed = [tuning.configure(variant) for variant in trades]
    assert zero2.parallel.strategy == "zero2" and pieces.train.accumulation_steps == 2
    assert recomputed.activations.vision == recomputed.activations.language == "full"
    assert all(run.train.precision == "bf16" for run in (zero2, pieces, recomputed))


def test_the_rows_of_two_ranks_are_one_training_that_needs_less_and_less(pair: list[dict[str, Any]]) -> None:
    rows: list[Tuned] = pair[0]["rows"]
    assert rows == pair[1]["rows"]
    naive, fused, short, bf16, ddp, zero2, *_ = rows
    assert naive.loss == pytest.approx(fused.loss, abs=1e-4) and fused.loss == pytest.approx(short.loss, abs=1e-4)
    assert bf16.loss != short.loss and all(row.loss == pytest.approx(naive.loss, abs=0.05) for row in rows)
    kept = [row.owners.get("activations", 0) for row in rows]  # at the fullest moment
    assert kept[0] > kept[1] > 2 * kept[2] > 2 * kept[3] > 3 * kept[4] > 4.5 * max(kept[6], kept[7])
    peaks = [row.peak_bytes for row in rows]
    assert peaks == sorted(peaks[:5], reverse=True) + peaks[5:] and max(peaks[5:]) < peaks[4]
    # The moments are there, 8 B a parameter: the first step's forward has none. ZeRO-2 deals them out.
    assert ddp.owners["optimizer"] == pytest.approx(2 * ddp.owners["weights"], rel=0.01)
    assert zero2.owners["optimizer"] == pytest.approx(ddp.owners["optimizer"] / 2, rel=0.1)
    assert all(row.tokens_per_s > 0 and row.tokens_per_cpu_s > 0 for row in rows)
    assert [row.num_ranks for row in rows] == [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("variants", "words"),
    [
        ([Variant(change="a", num_ranks=2, settings={"train.micro_batch_size": 4})], "'a' needs 2 ranks, and 1 were"),
        ([Variant(change="a"), Variant(change="a")], "two variants are called 'a'"),
        ([Variant(change="a", settings={"train.micro_batch_size": 4})], "4 x 1 x 1 = 4 samples, and 8 in every"),
    ],
)
def test_variants_that_cannot_be_compared_are_refused(variants: list[Variant], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tuning.measure_tuning(variants, ranks=ALONE)
    with pytest.raises(ValueError, match="num_turns = 0"):
        tuning.measure_tuning(num_turns=0, ranks=ALONE)


def made_up_rows() -> list[Tuned]:
    owners = {"weights": 60_000_000, "optimizer": 120_000_000, "activations": 900_000_000}
    row = Tuned(change="naive", num_ranks=1, tokens_per_s=100, tokens_per_cpu_s=100, owners=owners, loss=4.8)
    less = owners | {"activations": 90_000_000}
    changes = {"tokens_per_s": 520, "tokens_per_cpu_s": 300, "owners": less, "num_ranks": 2}
    return [row, dataclasses.replace(row, change="tuned", **changes), dataclasses.replace(row, change="+ other")]


def texts_of(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_the_way_is_drawn_with_its_shares_and_factors() -> None:
    figure = plots.plot_tuning(made_up_rows(), 2, "way")
    assert texts_of(figure)[:2] == [" 1080 (100%)", " 270 (25%)"]
    assert texts_of(figure)[3:5] == [" 100 (1.0 x)", " 520 (5.2 x)"]
    assert figure.axes[0].get_xlabel().endswith("(MB)") and figure.axes[1].get_xlabel() == "tokens/s, all ranks"
    with pytest.raises(ValueError, match="num_taken = 4 of 3 rows"):
        plots.plot_tuning(made_up_rows(), 4, "way")


def test_heads_are_drawn_by_group_and_stacked() -> None:
    figure = plots.plot_packed_heads(4, 2, 24, "rows")
    assert " ".join(texts_of(figure)) == "q0 q1 k0 v0 q2 q3 k1 v1 q0 q1 q2 q3 k0 k1 v0 v1"
    with pytest.raises(ValueError, match="num_kv_heads = 3 must divide num_heads = 4"):
        plots.plot_packed_heads(4, 3, 24, "rows")


def test_the_benchs_table_holds_each_row_against_the_first() -> None:
    bench = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "naive_to_tuned.py"))
    lines = bench["table"](made_up_rows())
    assert lines[2] == "| naive | 1 | 100 | 1.00 | 100 | 1.00 | 1080 | 1.00 | 4.8000 |"
    assert lines[3] == "| tuned | 2 | 520 | 5.20 | 300 | 3.00 | 270 | 0.25 | 4.8000 |"
