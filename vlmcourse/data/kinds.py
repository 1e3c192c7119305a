"""Kinds of answers: what they may be called, and which labels of a row belong to which.

Enters: conversations whose assistant's messages may say of what kind they are, and their labels. Leaves: `KindSpan`s,
which go with a `Batch` on the host and cost the model nothing; `train/kind_losses.py` turns them into `loss/<kind>`. A
row may hold answers of several kinds, as the conversations of `digits.py` do. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vlmcourse.data.samples import Message

TAKEN = ("total", "vision", "language")
"""What rows of a run call other losses: `loss/total`, `loss/vision`, `loss/language`."""
MAX_KINDS = 64
"""Kinds that a file may have: each becomes a column of the run's log."""


class KindSpan(NamedTuple):
    """Labels of one answer."""

    row: int
    """Of the batch."""
    start: int
    end: int
    """Columns of `labels_BS` from `start` to `end` - 1, without a gap."""
    kind: str


def find_kind_problem(kind: str) -> str:
    """Return what is wrong with the name of a kind, or nothing; an empty name is that of no kind."""
    if kind in TAKEN:
        return f"must be none of {', '.join(TAKEN)}, which are other losses of a run: choose another name"
    if kind != kind.strip() or not kind.isprintable():
        return "must be printable text without spaces around it: it names the value loss/<kind> of a run's rows"
    return ""


def find_kind_spans(
    row: int, messages: Sequence[Message], labels: Sequence[int], ignore_label: int
) -> tuple[KindSpan, ...]:
    """Return the labels of each answer that is of a kind.

    Args:
        row: of the batch.
        messages: the conversation.
        labels: of it, shifted, as `CourseTokenizer.encode_conversation` returns them: one unbroken run of learned
            labels for each of the assistant's messages, with at least one that is ignored between two of them.
        ignore_label: marks what is not learned.

    Raises:
        ValueError: if the labels do not have one run for each answer.
    """
    answers = [message for message in messages if message.role == "assistant"]
    if not any(message.kind for message in answers):
        return ()
    is_learned = [False, *(label != ignore_label for label in labels), False]
    edges = [i for i in range(len(labels) + 1) if is_learned[i] != is_learned[i + 1]]
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    if len(runs) != len(answers):
        raise ValueError(
            f"{len(runs)} runs of learned labels for {len(answers)} answers: loss by kind needs one run for each; "
            "a tokenizer must learn every answer and nothing else, or leave Message.kind empty"
        )
    return tuple(
        KindSpan(row, start, end, message.kind)
        for (start, end), message in zip(runs, answers, strict=True)
        if message.kind
    )
