"""Loss by kind of answer: which labels are whose, the means, and ranks that do not know each other's kinds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import awkward_samples
from step_clock_worker import build, config_of

from vlmcourse.data.collate import Collator
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.kinds import MAX_KINDS, TAKEN, find_kind_spans
from vlmcourse.data.llava import BadRowsError, LlavaDataset
from vlmcourse.data.questions import KINDS
from vlmcourse.data.samples import IGNORE_LABEL, Batch, Message, Sample
from vlmcourse.data.tokenizer import load_tokenizer
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.presets import get_model
from vlmcourse.train import kind_losses
from vlmcourse.train.kind_losses import KindLosses, sum_by_kind
from vlmcourse.train.loss import LossRows, TokenLoss, token_losses, token_weights
from vlmcourse.train.rows import COLUMNS
from vlmcourse.train.trainer import Trainer

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")


def collate(samples: list[Sample]) -> Batch:
    return Collator(load_tokenizer("builtin"), get_model("tiny"), 256)(samples)


def talk(*answers: tuple[str, str]) -> Sample:
    turns = [turn for text, kind in answers for turn in (Message("user", "so?"), Message("assistant", text, kind))]
    return Sample("talk", (), tuple(turns))


def test_the_labels_of_a_span_are_its_answer_and_the_end_of_its_turn() -> None:
    tokenizer = load_tokenizer("builtin")
    digits = [DigitsDataset(8, 0, "train")[i] for i in range(4)]
    samples = [*digits, talk(("left", "where"), ("7", ""), ("right", "where")), talk(("no", ""))]
    batch = collate(samples)
    expected = [
        (row, message.kind, message.text)
        for row, sample in enumerate(samples)
        for message in sample.messages
        if message.kind
    ]
    assert len({kind for _, kind, _ in expected}) == len(KINDS) + 1
    found = []
    for span in batch.kind_spans:
        labels = batch.labels_BS[span.row, span.start : span.end].tolist()
        assert labels[-1] == tokenizer.eos_token_id and IGNORE_LABEL not in labels
        found.append((span.row, span.kind, tokenizer.decode_answer(labels)))
    assert found == expected
    assert Collator(tokenizer, get_model("tiny"), 256).prompts(digits).kind_spans == ()
    with pytest.raises(ValueError, match="1 runs of learned labels for 2 answers"):
        find_kind_spans(0, samples[4].messages[:4], [IGNORE_LABEL, 5, 6, IGNORE_LABEL], IGNORE_LABEL)


@pytest.mark.parametrize("weighting", ["tokens", "sqrt"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_sum_is_that_of_the_labels_of_one_kind_alone(weighting: str, cut: bool) -> None:
    samples = [
        *(DigitsDataset(8, 1, "train")[i] for i in range(3)),
        talk(("left", "where"), ("7", ""), ("up", "where")),
    ]
    batch = collate(samples)
    vocabulary = int(batch.labels_BS.max()) + 1
    logits_BSV = torch.randn(*batch.labels_BS.shape, vocabulary, generator=torch.Generator().manual_seed(0))
    weights_BS = token_weights(batch.labels_BS, weighting)
    expected: dict[str, list[float]] = {}
    for span in batch.kind_spans:
        cells = span.row, slice(span.start, span.end)
        pair = expected.setdefault(span.kind, [0.0, 0.0])
        pair[0] += float(token_losses(logits_BSV, batch.labels_BS, weights_BS)[cells].sum())
        pair[1] += float(weights_BS[cells].sum())
    length = batch.labels_BS.shape[1]
    found: dict[str, list[float]] = {}
    parts = [torch.arange(length)[i::2] for i in (0, 1)] if cut else [torch.arange(length)]
    for part in parts:  # under context parallelism a rank has some of the positions, in an order of their own
        part = part.flip(0) if cut else part
        rows = LossRows(is_open=True)
        take_part = (lambda value_BS, part=part: value_BS[:, part]) if cut else None
        TokenLoss(weighting, rows)(logits_BSV[:, part], batch.labels_BS, take_part)
        for kind, pair in sum_by_kind([batch], rows).items():
            sums = found.setdefault(kind, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + pair[0], sums[1] + pair[1]
    assert found.keys() == expected.keys() and len(found) == len(KINDS) + 1
    for kind, pair in expected.items():
        assert found[kind] == pytest.approx(pair, rel=1e-5), kind


def test_a_micro_batch_that_a_pipeline_padded_further_has_the_same_sums() -> None:
    batch = collate([DigitsDataset(8, 1, "train")[0]])
    longer = torch.nn.functional.pad(batch.labels_BS, (0, 16), value=IGNORE_LABEL)
    logits_BSV = torch.randn(*longer.shape, 512, generator=torch.Generator().manual_seed(0))
    both = []
    for labels_BS in (batch.labels_BS, longer):
        rows = LossRows(is_open=True)
        TokenLoss(rows=rows)(logits_BSV[:, : labels_BS.shape[1]], labels_BS)
        both.append(sum_by_kind([batch], rows))
    assert both[0] == both[1] and both[0]


def test_ranks_learn_each_others_kinds_with_the_first_row_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    two = dataclasses.replace(ALONE, world_size=2)
    both = [KindLosses(), KindLosses()]
    exchanges: list[str] = []

    def row(*sums: dict[str, tuple[float, float]]) -> dict[str, float | None]:
        for losses, mine in zip(both, sums, strict=True):
            losses._mine = mine
        named = [[*losses._known, *losses._mine] for losses in both]

        def gather_numbers(values: list[float], ranks: Ranks) -> list[list[float]]:
            assert ranks is two
            exchanges.append("numbers")
            for losses in both:
                losses._known = tuple(sorted({name for names in named for name in names}))
            return [list(losses.numbers().values()) for losses in both]

        def gather_texts(texts: list[str], ranks: Ranks) -> list[list[str]]:
            exchanges.append("names")
            return named

        monkeypatch.setattr(kind_losses, "gather_numbers", gather_numbers)
        monkeypatch.setattr(kind_losses, "gather_texts", gather_texts)
        return both[0].means([losses.numbers() for losses in both], two)

    assert row({}, {}) == {} and exchanges == []
    assert row({"b": (4.0, 2.0)}, {"a": (9.0, 3.0), "b": (2.0, 4.0)}) == {"loss/a": 3.0, "loss/b": 1.0}
    assert exchanges == ["names", "numbers"]
    assert row({}, {"a": (8.0, 2.0)}) == {"loss/a": 4.0} and len(exchanges) == 2
    assert row({"c": (1.0, 1.0)}, {}) == {"loss/c": 1.0} and len(exchanges) == 4


def test_the_rows_of_a_run_hold_the_mean_of_each_kind_and_none_where_there_are_no_kinds(tmp_path: Path) -> None:
    expected: list[dict[str, float]] = []

    def note(trainer: Trainer) -> None:
        sums: dict[str, list[float]] = {}
        for batch in trainer.load_step(trainer.step):
            with torch.no_grad():
                logits_BSV = trainer.model(
                    batch.input_ids_BS,
                    batch.pixel_values_ICHW,
                    batch.attention_mask_BS,
                    tiles_per_sample=batch.tiles_per_sample,
                    sample_ids=batch.sample_ids,
                )
            losses_BS = token_losses(logits_BSV, batch.labels_BS)
            for span in batch.kind_spans:
                pair = sums.setdefault(f"loss/{span.kind}", [0.0, 0.0])
                pair[0] += float(losses_BS[span.row, span.start : span.end].sum())
                pair[1] += span.end - span.start
        expected.append({name: loss / count for name, (loss, count) in sums.items()})

    trainer = build(config_of(tmp_path, "kinds", log_every=1), ALONE)
    trainer.before_update.append(note)
    rows = trainer.fit().history
    own = [{key: row[key] for key in row if key.startswith("loss/") and key not in COLUMNS} for row in rows]
    assert len(own) == 3 and {f"loss/{kind.name}" for kind in KINDS} == {key for row in own for key in row}
    for found, wanted in zip(own, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
        assert list(found) == sorted(found)
    assert [json.loads(line)["loss/read"] for line in _lines(tmp_path / "kinds")] == [row["loss/read"] for row in own]

    plain = [dataclasses.replace(sample, messages=tuple(_plain(sample))) for sample in awkward_samples()]
    trainer = build(config_of(tmp_path, "plain", num_steps=1), ALONE)
    trainer.train_data = plain
    assert all(key in COLUMNS for key in trainer.fit().history[0])


def _plain(sample: Sample) -> list[Message]:
    return [Message(message.role, message.text) for message in sample.messages]


def _lines(folder: Path) -> list[str]:
    return (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()


def test_a_name_of_a_kind_is_one_that_a_row_can_have() -> None:
    assert {f"loss/{name}" for name in TAKEN} == {name for name in COLUMNS if name.startswith("loss/")}
    with pytest.raises(ValueError, match="kind = 'total': must be none of total, vision, language"):
        Message("assistant", "7", "total")
    with pytest.raises(ValueError, match="printable text"):
        Message("assistant", "7", " count\n")
    with pytest.raises(ValueError, match="kind = 'count' on a message of the user"):
        Message("user", "7?", "count")


def test_a_row_of_a_llava_file_may_say_where_it_comes_from(tmp_path: Path) -> None:
    def write(*sources: Any) -> Path:
        turns = [{"from": "human", "value": "so?"}, {"from": "gpt", "value": "yes"}]
        rows = [{"id": i, "conversations": turns} | source for i, source in enumerate(sources)]
        (tmp_path / "talk.json").write_text(json.dumps(rows))
        return tmp_path / "talk.json"

    def kinds(path: Path) -> list[list[str]]:
        return [[message.kind for message in sample.messages] for sample in LlavaDataset(path, tmp_path)]

    path = write({"data_source": "chartqa(cauldron)"}, {}, {"data_source": None})
    assert kinds(path) == [["", "chartqa(cauldron)"], ["", ""], ["", ""]]
    for source, words in (("vision", "must be none of"), (3, "must be text"), (" x", "printable")):
        with pytest.raises(BadRowsError, match=words):
            LlavaDataset(write({"data_source": source}), tmp_path)
    with pytest.raises(ValueError, match=f"has {MAX_KINDS + 1} values of data_source: at most {MAX_KINDS}"):
        LlavaDataset(write(*({"data_source": str(i)} for i in range(MAX_KINDS + 1))), tmp_path)
