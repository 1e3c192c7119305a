"""The guide to engines: every need has an answer with a reason, and what it promises a configuration accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vlmcourse.config import parse_config
from vlmcourse.planner import engine_choice
from vlmcourse.planner.engine_choice import CANDIDATES, Needs, choose_engine

ANSWERS: list[tuple[dict[str, Any], str]] = [
    ({}, "fsdp"),
    ({"nvme": True}, "deepspeed-zero3"),
    ({"cpu_offload": "optimizer"}, "deepspeed-zero3"),
    ({"cpu_offload": "all"}, "fsdp"),
    ({"hf_trainer": True}, "accelerate-deepspeed-zero3"),
    ({"hf_trainer": True, "tp": 2}, "fsdp"),
    ({"tp": 2}, "fsdp"),
    ({"pp": 2, "cp": 2}, "fsdp"),
    ({"frozen_vision": True}, "fsdp"),
    ({"torch_compile": True}, "fsdp"),
    ({"precision": "bf16"}, "fsdp"),
    ({"recomputation": True}, "fsdp"),
    ({"nvme": True, "tp": 2}, ""),
    ({"hf_trainer": True, "recomputation": True}, "fsdp"),
    ({"nvme": True, "cpu_offload": "all"}, "deepspeed-zero3"),
]


@pytest.mark.parametrize(("asked", "strategy"), ANSWERS, ids=str)
def test_a_need_has_an_answer_and_reasons(asked: dict[str, Any], strategy: str) -> None:
    choice = choose_engine(Needs(**asked))
    assert choice.strategy == strategy
    assert len(choice.reasons) == (max(1, len(asked)) if strategy else 0)
    assert strategy not in choice.left_out
    assert all(why for why in choice.left_out.values())
    if not strategy:
        assert set(choice.left_out) == set(CANDIDATES)
        assert str(choice).startswith("no single engine here")


def test_what_is_left_out_is_left_out_by_the_words_of_the_configuration() -> None:
    choice = choose_engine(Needs(tp=2))
    with pytest.raises(ValueError, match="knows of no other axis") as error:
        parse_config({"parallel": {"strategy": "deepspeed-zero3", "tp": 2}})
    [why] = choice.left_out["deepspeed-zero3"]
    assert why in str(error.value) and why in str(choice)


def test_needs_that_nothing_restricts_leave_every_engine_possible() -> None:
    assert choose_engine(Needs()).left_out == choose_engine(Needs(frozen_vision=True)).left_out == {}


def test_every_need_of_the_package_is_asked_of_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(engine_choice, "parse_config", asked.append)
    choose_engine(Needs(nvme=True, cpu_offload="all", frozen_vision=True, precision="bf16"))
    for table in asked:
        assert table["offload"] == {"optimizer": "nvme", "nvme_path": "swap", "parameters": "cpu"}
        assert (table["model"], table["train"]) == ({"freeze": ["vision"]}, {"precision": "bf16"})


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(ValueError, match="cpu_offload = 'disk': choose none, optimizer or all"):
        choose_engine(replace(Needs(), cpu_offload="disk"))
