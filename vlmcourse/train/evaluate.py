"""Exact match: the part of held-out questions whose generated answer is the right one, character for character.

Enters: a model under any strategy and held-out samples. Leaves: counts over all ranks. The distributed model itself
answers, so no rank ever holds more weights than in training; ranks that share matrices (tp) or layers (pp) answer the
same questions together, all others are dealt questions of their own. Under single and ddp these generate at their own
pace. Under fsdp every forward gathers weights from all ranks, so the ranks go in step: equally many batches and tokens,
and a vision tower that runs on every rank if it runs on one. A pipeline has no cache of keys while it generates, so
each token costs it a pass of whole sequences through all stages; the trainer lets it answer a micro-batch at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from vlmcourse.data.collate import Collator
from vlmcourse.data.samples import Message, Sample
from vlmcourse.data.tokenizer import IMAGE_MARKER, CourseTokenizer
from vlmcourse.layout import Layout
from vlmcourse.models.generate import generate
from vlmcourse.parallel.apply import as_vlm, plain_parts, unwrap
from vlmcourse.parallel.comm import max_over_ranks, sum_over_ranks
from vlmcourse.parallel.context import without_context
from vlmcourse.parallel.engines import splits_weights
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.pipelined_generation import generate_in_pipeline
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
    layout: Layout | None = None,
) -> ExactMatch:
    """Ask every question of `samples` and compare the greedy answers with the right ones.

    Args:
        model: under any strategy; its training mode is kept. It takes no memory for weights beyond that of training.
        samples: the same on every rank; each assistant's turn is one question, asked with the true turns before it.
        collator: turns samples into left-padded prompts.
        tokenizer: decodes answers.
        ranks: this process's place; all ranks must call this.
        batch_size: questions that one rank, or one tp x pp group, answers at a time. A pipeline runs the vision tower
            and whole sequences of all of them at once for each new token: give it a micro-batch.
        precision: one of `precision_rules.PRECISIONS`.
        layout: which ranks share a model; by default each has one of its own.
    Communicates: two numbers at the end; for each generated token, under fsdp an all-gather of all weights, under tp
        the exchanges of a forward pass, under pp what `generate_in_pipeline` says.
    """
    layout = layout or Layout(dp_replicate=ranks.world_size)
    num_together = layout.tp * layout.pp  # pp is the outermost axis and tp the innermost
    my_group = ranks.rank % (ranks.world_size // layout.pp) // layout.tp
    my_samples = (samples[i] for i in range(my_group, len(samples), ranks.world_size // num_together))
    mine = [question for sample in my_samples for question in questions_of(sample)]
    num_batches = math.ceil(len(mine) / batch_size)
    if _goes_in_step(model):
        num_batches = round(max_over_ranks([num_batches], ranks)[0])
    num_correct = 0
    with _for_generation(model):
        for i in range(num_batches):
            questions = mine[i * batch_size : (i + 1) * batch_size]
            answers = _answer(model, questions, collator, tokenizer, ranks, precision)
            right = (question.messages[-1].text for question in questions)
            num_correct += sum(a == r for a, r in zip(answers, right, strict=False))
    totals = sum_over_ranks([len(mine), num_correct], ranks)
    num_questions, num_correct = (round(total) // num_together for total in totals)
    return ExactMatch(num_questions, num_correct)


def questions_of(sample: Sample) -> list[Sample]:
    """Return one sample for each assistant's turn: the conversation up to it and the pictures seen so far."""
    questions = []
    for i, message in enumerate(sample.messages):
        if message.role == "assistant":
            turns = sample.messages[: i + 1]
            num_images = sum(turn.text.count(IMAGE_MARKER) for turn in turns if turn.role == "user")
            questions.append(Sample(sample.sample_id, sample.images[:num_images], turns))
    return questions


def _goes_in_step(model: nn.Module) -> bool:
    """Whether weights are shards, which all ranks must gather together."""
    return any(isinstance(part, FSDPModule) or splits_weights(part) for part in plain_parts(model))


@contextmanager
def _for_generation(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, on whole sequences; with shards of weights every rank calls the same modules."""
    was_training, parts = model.training, [as_vlm(part) for part in plain_parts(model)]
    model.eval()
    with ExitStack() as stack:
        for part in parts:
            part.vision_on_every_batch = isinstance(part, FSDPModule) or splits_weights(part)
            if part.language.take_part is not None:
                stack.enter_context(without_context(part))
        try:
            yield
        finally:
            model.train(was_training)
            for part in parts:
                part.vision_on_every_batch = False
                for module in part.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()  # the root, and under zero2 every block, has kept its gathered weights


def _answer(
    model: nn.Module,
    questions: list[Sample],
    collator: Collator,
    tokenizer: CourseTokenizer,
    ranks: Ranks,
    precision: str,
) -> list[str]:
    """Return the generated answer to each question; with shards, all ranks call this, also those without questions."""
    in_step = _goes_in_step(model)
    # The longest right answer and the end of its turn: an answer that goes on for longer is wrong already.
    num_new_tokens = max((len(tokenizer.encode(q.messages[-1].text)) + 1 for q in questions), default=1)
    if in_step:
        num_new_tokens = round(max_over_ranks([num_new_tokens], ranks)[0])
    batch = collator.prompts(questions or [FILLER]).to(ranks.device)
    limits: dict[str, Any] = {
        "max_new_tokens": num_new_tokens,
        "eos_token_id": tokenizer.eos_token_id,
        "stop_early": not in_step,
    }
    with autocast(precision, ranks.device):
        if isinstance(model, PipelinedModel):
            ids_BS = generate_in_pipeline(model, batch, **limits)
        else:
            ids_BS = generate(
                unwrap(model),
                batch.input_ids_BS,
                batch.pixel_values_ICHW,
                batch.attention_mask_BS,
                tiles_per_sample=batch.tiles_per_sample,
                **limits,
            )
    return [tokenizer.decode_answer(ids) for ids in ids_BS.tolist()[: len(questions)]]
