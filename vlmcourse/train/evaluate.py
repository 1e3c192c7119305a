"""Exact match: the part of held-out questions whose generated answer is the right one, character for character.

Enters: a model under any strategy and held-out samples. Leaves: counts over all ranks. Questions are dealt out to the
ranks. Under single and ddp each rank generates at its own pace. Under fsdp every forward gathers weights from all
ranks, so the ranks go in step: equally many batches and tokens, and a vision tower that runs on every rank if it runs
on one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule

from vlmcourse.data.collate import Collator
from vlmcourse.data.samples import Message, Sample
from vlmcourse.data.tokenizer import IMAGE_MARKER, CourseTokenizer
from vlmcourse.models.generate import generate
from vlmcourse.models.vlm import VLM
from vlmcourse.parallel.apply import unwrap
from vlmcourse.parallel.comm import max_over_ranks, sum_over_ranks
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.train.precision import autocast

FILLER = Sample("filler", (), (Message("user", "?"),))
"""A question whose answer nobody reads, for a rank that must take part without one of its own."""


@dataclass(frozen=True)
class ExactMatch:
    """The outcome of an evaluation, over all ranks."""

    num_questions: int
    num_correct: int

    @property
    def fraction(self) -> float:
        """Correct answers over questions, 0 to 1."""
        return self.num_correct / self.num_questions if self.num_questions else 0.0


def evaluate_exact_match(
    model: nn.Module,
    samples: Sequence[Sample],
    collator: Collator,
    tokenizer: CourseTokenizer,
    ranks: Ranks,
    *,
    batch_size: int,
    precision: str = "fp32",
) -> ExactMatch:
    """Ask every question of `samples` and compare the greedy answers with the right ones.

    Args:
        model: under any strategy; its training mode is kept.
        samples: the same on every rank; each assistant's turn is one question, asked with the true turns before it.
        collator: turns samples into left-padded prompts.
        tokenizer: decodes answers.
        ranks: this process's place; all ranks must call this.
        batch_size: questions that one rank answers at a time.
        precision: fp32 or bf16.
    Communicates: two numbers at the end; under fsdp also an all-gather of all weights for each generated token.
    """
    my_samples = (samples[i] for i in range(ranks.rank, len(samples), ranks.world_size))
    mine = [question for sample in my_samples for question in questions_of(sample)]
    plain = unwrap(model)
    assert isinstance(plain, VLM)
    in_step = isinstance(plain, FSDPModule)
    num_batches = math.ceil(len(mine) / batch_size)
    if in_step:
        num_batches = round(max_over_ranks([num_batches], ranks)[0])
    num_correct = 0
    with _for_generation(plain):
        for i in range(num_batches):
            questions = mine[i * batch_size : (i + 1) * batch_size]
            answers = _answer(plain, questions, collator, tokenizer, ranks, precision)
            right = (question.messages[-1].text for question in questions)
            num_correct += sum(a == r for a, r in zip(answers, right, strict=False))
    num_questions, num_correct = sum_over_ranks([len(mine), num_correct], ranks)
    return ExactMatch(round(num_questions), round(num_correct))


def questions_of(sample: Sample) -> list[Sample]:
    """Return one sample for each assistant's turn: the conversation up to it and the pictures seen so far."""
    questions = []
    for i, message in enumerate(sample.messages):
        if message.role == "assistant":
            turns = sample.messages[: i + 1]
            num_images = sum(turn.text.count(IMAGE_MARKER) for turn in turns if turn.role == "user")
            questions.append(Sample(sample.sample_id, sample.images[:num_images], turns))
    return questions


@contextmanager
def _for_generation(plain: VLM) -> Iterator[None]:
    """Put a model in evaluation mode and, if its weights are shards, make every rank call the same modules."""
    was_training = plain.training
    plain.eval()
    plain.vision_on_every_batch = isinstance(plain, FSDPModule)
    try:
        yield
    finally:
        plain.train(was_training)
        plain.vision_on_every_batch = False
        for module in plain.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the root, and under zero2 every block, has kept its gathered weights


def _answer(
    plain: VLM,
    questions: list[Sample],
    collator: Collator,
    tokenizer: CourseTokenizer,
    ranks: Ranks,
    precision: str,
) -> list[str]:
    """Return the generated answer to each question; with shards, all ranks call this, also those without questions."""
    in_step = isinstance(plain, FSDPModule)
    # The longest right answer and the end of its turn: an answer that goes on for longer is wrong already.
    num_new_tokens = max((len(tokenizer.encode(q.messages[-1].text)) + 1 for q in questions), default=1)
    if in_step:
        num_new_tokens = round(max_over_ranks([num_new_tokens], ranks)[0])
    batch = collator.prompts(questions or [FILLER]).to(ranks.device)
    with autocast(precision, ranks.device):
        ids_BS = generate(
            plain,
            batch.input_ids_BS,
            batch.pixel_values_ICHW,
            batch.attention_mask_BS,
            max_new_tokens=num_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            tiles_per_sample=batch.tiles_per_sample,
            stop_early=not in_step,
        )
    return [tokenizer.decode_answer(ids) for ids in ids_BS.tolist()[: len(questions)]]
