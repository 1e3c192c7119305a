"""Exercise 4.4's misconceptions about activations, and those that show in the report of a whole model.

Enters: numbers that a learner's functions gave. Leaves: sentences to stand behind "It looks as if". Those about the
training state are in `memory_mistakes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vlmcourse.grading.assumptions import Aspects, Choice, find_assumptions
from vlmcourse.grading.memory_cases import (
    GIB,
    PATCHES_PER_TILE,
    TOKENS_PER_TILE,
    ActivationCase,
    ReportCase,
    Strategy,
)
from vlmcourse.grading.memory_mistakes import GIB_UNITS, UNITS, owned_bytes, state_aspects
from vlmcourse.planner.recipes import PRECISIONS, Precision

# --- One tower ------------------------------------------------------------------------------------------------------

PerPosition = Callable[[ActivationCase, bool], float]
"""Bytes a layer keeps for each position and unit of width in 16 bits, from a case and whether attention is flash."""


def _scores(case: ActivationCase) -> float:
    return 5 * case.tower.num_heads * case.seq_len / case.tower.hidden


COEFFICIENTS: list[Choice] = [
    ("", lambda c, flash: 34 + (0 if flash else _scores(c))),
    (
        "you left out the scores of attention: without flash attention a layer keeps 5 a s / h more",
        lambda c, flash: 34,
    ),
    (
        "you counted the scores of attention with flash attention too: its kernel keeps none, so 34 alone is left",
        lambda c, flash: 34 + _scores(c),
    ),
    (
        "you turned flash round: it is flash attention that keeps no scores",
        lambda c, flash: 34 + (_scores(c) if flash else 0),
    ),
    (
        "you counted one number for each position, unit of width and layer: a layer keeps many, 34 bytes of them in 16 "
        "bits",
        lambda c, flash: 2,
    ),
    ("you forgot the heads: each has scores of its own, 5 a s / h", lambda c, f: 34 + (0 if f else _per_head(c))),
    (
        "you did not divide the scores by h: they do not grow with the width (5 a s / h times h is 5 a s)",
        lambda c, flash: 34 + (0 if flash else _scores(c) * c.tower.hidden),
    ),
    (
        "you counted the scores of attention in one layer only: every layer keeps its own",
        lambda c, flash: 34 + (0 if flash else _scores(c) / c.tower.num_layers),
    ),
    *(
        (
            "you counted the scores of attention once: for each of them a layer keeps 5 bytes, softmax's output (2), "
            "dropout's mask (1) and its output (2)",
            lambda c, flash, num_bytes=num_bytes: 34 + (0 if flash else _scores(c) * num_bytes / 5),
        )
        for num_bytes in (2, 1)
    ),
    (
        "you counted the scores alone without flash attention: the other 34 bytes are there too",
        lambda c, flash: 34 if flash else _scores(c),
    ),
    ("you counted 24: that is the part which tensor parallelism divides", lambda c, f: 24 + (0 if f else _scores(c))),
    (
        "in fp32 you kept dropout's masks at one byte. That is closer to the truth, but the rule here is simpler: "
        "fp32 doubles all of the formula",
        lambda c, flash: _by_masks(c, flash),
    ),
    (
        "in fp32 you doubled the 34 bytes and not the scores of attention: fp32 doubles all of the formula",
        lambda c, flash: 34 + (0 if flash else _scores(c) / _fp32_factor(c)),
    ),
    (
        "in fp32 you doubled the scores of attention and not the 34 bytes: fp32 doubles all of the formula",
        lambda c, flash: 34 / _fp32_factor(c) + (0 if flash else _scores(c)),
    ),
]


def _per_head(case: ActivationCase) -> float:
    return _scores(case) / case.tower.num_heads


def _fp32_factor(case: ActivationCase) -> float:
    return PRECISIONS[case.precision].compute_bytes / 2


def _by_masks(case: ActivationCase, flash: bool) -> float:
    """Of 34 bytes 2 are masks, of 5 one is."""
    if PRECISIONS[case.precision].compute_bytes == 2:
        return 34 + (0 if flash else _scores(case))
    return 33 + (0 if flash else _scores(case) * 9 / 10)


SCALES: list[Choice] = [
    ("", lambda recipe: recipe.compute_bytes / 2),
    ("you did not double it in fp32: the formula counts 16-bit elements", lambda recipe: 1),
    (
        "you doubled it in bf16_fp32_grads too: there gradients are fp32, and activations have 16 bits",
        lambda recipe: 2 if recipe.gradient_bytes == 4 else recipe.compute_bytes / 2,
    ),
    ("you doubled it in 16 bits too: the formula counts 16-bit elements already", lambda recipe: 2),
    (
        "you multiplied the formula by the bytes of an element: it counts bytes already, of 16-bit elements",
        lambda recipe: recipe.compute_bytes,
    ),
    ("you halved it in 16 bits: the formula counts 16-bit elements already", lambda recipe: recipe.compute_bytes / 4),
]
LAYERS: list[Choice] = [
    ("", lambda tower: tower.num_layers),
    ("you counted one layer: each keeps as much", lambda tower: 1),
    (
        "you counted the square root of the layers: nothing is recomputed here, and every layer keeps its own",
        lambda tower: tower.num_layers**0.5,
    ),
]
POSITIONS: list[Choice] = [
    ("", lambda c: c.micro_batch * c.seq_len),
    ("you left out the micro-batch: every sample in it keeps as much", lambda c: c.seq_len),
    ("you left out the sequence", lambda c: c.micro_batch),
]


def _activation_formula(
    case: tuple[ActivationCase, bool],
    *,
    coefficient: PerPosition,
    scale: Callable[[Precision], float],
    layers: Callable[[Any], float],
    positions: Callable[[ActivationCase], float],
    unit: float,
) -> float:
    """Return the number that these assumptions give to a tower with or without flash attention."""
    shape, flash = case
    per_layer = positions(shape) * shape.tower.hidden * coefficient(shape, flash)
    return layers(shape.tower) * per_layer * scale(PRECISIONS[shape.precision]) * unit


def explain_activations(answers: Sequence[tuple[Any, float]]) -> list[str]:
    """Name the wrong assumptions that give all of a learner's bytes of activations.

    Args:
        answers: pairs of (an `ActivationCase`, whether attention is flash) and the number.
    """
    aspects: Aspects = {
        "coefficient": COEFFICIENTS,
        "scale": SCALES,
        "layers": LAYERS,
        "positions": POSITIONS,
        "unit": UNITS,
    }
    return find_assumptions(answers, _activation_formula, aspects)


# --- The report -----------------------------------------------------------------------------------------------------

PARAMS: list[Choice] = [
    ("", lambda c: c.vision.num_params + c.language.num_params),
    ("you left the vision tower's parameters out", lambda c: c.language.num_params),
    ("you left the language model's parameters out", lambda c: c.vision.num_params),
]
MICRO_BATCH: list[Choice] = [
    ("", lambda c, stage: c.batch / c.num_ranks),
    (
        "you took the global batch for a rank's: each of the N data-parallel ranks has batch / N of the samples",
        lambda c, stage: c.batch,
    ),
    (
        "you divided the activations by the number of ranks once more. ZeRO splits weights, gradients and optimizer "
        "state; of activations a rank keeps all that its own samples make",
        lambda c, stage: c.batch / c.num_ranks**2,
    ),
    (
        "you divided the activations by the number of ranks once more in ZeRO-3: it splits weights, not activations",
        lambda c, stage: c.batch / c.num_ranks ** (2 if stage == 3 else 1),
    ),
    (
        "you divided the activations by the number of ranks once more in every ZeRO stage: ZeRO splits weights, "
        "gradients and optimizer state, not activations",
        lambda c, stage: c.batch / c.num_ranks ** (2 if stage else 1),
    ),
    (
        "you divided the batch by the ranks only where ZeRO splits: DDP's ranks share the batch as well",
        lambda c, stage: c.batch / (c.num_ranks if stage else 1),
    ),
    ("you counted one sample on a rank: it has batch / N", lambda c, stage: 1),
]
LANGUAGE_POSITIONS: list[Choice] = [
    ("", lambda c: c.seq_len),
    (
        "you counted the image tokens twice in the language model: the sequence holds them already",
        lambda c: c.seq_len + c.image_tokens,
    ),
    (
        "you gave the language model the text tokens alone: image tokens pass through all of its layers",
        lambda c: c.seq_len - c.image_tokens,
    ),
    (
        "you counted each tile's 1024 patches in the language model: the pixel shuffle makes 256 tokens of them, and "
        "the sequence holds these already",
        lambda c: c.seq_len + (PATCHES_PER_TILE / TOKENS_PER_TILE - 1) * c.image_tokens,
    ),
    ("you left the language model's activations out", lambda c: 0),
]
VISION_POSITIONS: list[Choice] = [
    ("", lambda c: c.image_tokens / TOKENS_PER_TILE * PATCHES_PER_TILE),
    (
        "you gave the vision tower one position for each image token: it works on patches, four for each token "
        "(1024 for the 256 tokens of a tile)",
        lambda c: c.image_tokens,
    ),
    ("you left the vision tower's activations out", lambda c: 0),
    ("you gave the vision tower the whole sequence: text does not pass through it", lambda c: c.seq_len),
    ("you counted one tile: a sample has image_tokens / 256 of them", lambda c: PATCHES_PER_TILE),
    *(
        (
            "you counted a tile for each 1024 image tokens: a tile has 1024 patches, which become 256 image tokens",
            lambda c, fewest=fewest: max(fewest, c.image_tokens // PATCHES_PER_TILE) * PATCHES_PER_TILE,
        )
        for fewest in (1, 0)
    ),
    (
        "you gave the vision tower the 256 tokens of each tile again: image_tokens has them all",
        lambda c: c.image_tokens / TOKENS_PER_TILE * c.image_tokens,
    ),
]
KEPT_SCORES: list[Choice] = [
    ("", False),
    ("you counted the scores of attention: the report is of flash attention, which keeps none", True),
]
_ReportKey = tuple[ReportCase, Strategy]


def _report_state_formula(case: _ReportKey, *, params: Callable[[ReportCase], float], **assumed: Any) -> float:
    model, strategy = case
    return owned_bytes(params(model), model.num_ranks, strategy, **assumed)


def _report_activation_formula(
    case: _ReportKey,
    *,
    micro_batch: Callable[[ReportCase, int], float],
    language: Callable[[ReportCase], float],
    vision: Callable[[ReportCase], float],
    scale: Callable[[Precision], float],
    scores: bool,
    unit: float,
) -> float:
    """Return the GiB that these assumptions give to the activations of both towers."""
    model, (stage, precision) = case
    towers = ((model.language, language(model), model.seq_len), (model.vision, vision(model), PATCHES_PER_TILE))
    kept = sum(
        (34 * tower.hidden + scores * 5 * tower.num_heads * seq_len) * positions * tower.num_layers
        for tower, positions, seq_len in towers
    )
    return kept * micro_batch(model, stage) * scale(PRECISIONS[precision]) * unit


def explain_report(owner: str, answers: Sequence[tuple[Any, float]]) -> list[str]:
    """Name the wrong assumptions that give all of a learner's GiB of one owner.

    Args:
        owner: weights, gradients, optimizer, activations or total.
        answers: pairs of (a `ReportCase`, a `Strategy`) and the number; for the total, of the sum of the learner's own
            four numbers and the total.
    """
    if owner == "activations":
        aspects: Aspects = {
            "unit": GIB_UNITS,
            "micro_batch": MICRO_BATCH,
            "language": LANGUAGE_POSITIONS,
            "vision": VISION_POSITIONS,
            "scale": SCALES,
            "scores": KEPT_SCORES,
        }
        return find_assumptions(answers, _report_activation_formula, aspects)
    if owner == "total":
        return find_assumptions(answers, lambda own_sum, unit: own_sum * GIB * unit, {"unit": GIB_UNITS})
    aspects = {**state_aspects(owner, GIB_UNITS), "params": PARAMS}
    return find_assumptions(answers, _report_state_formula, aspects)
