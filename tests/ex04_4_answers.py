"""Whole answers to exercise 4.4: right ones in five styles, and wrong ones with the words that they should be told."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from vlmcourse.planner.memory import estimate_state_bytes

Answer = dict[str, Callable[..., Any]]
"""The five functions, by the name of their part."""
PARTS = ("weights", "gradients", "optimizer", "activations", "report")
GIB = 2**30

# --- Right ----------------------------------------------------------------------------------------------------------


def _check(stage):
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage {stage}")


def _shape(tower: Any) -> tuple[int, int, int]:
    _, layers, hidden, heads = tower
    return layers, hidden, heads


def plain() -> Answer:
    def weight_bytes(num_params, num_ranks, stage, precision):
        _check(stage)
        size = 4 if precision == "fp32" else 2
        return size * num_params / (num_ranks if stage == 3 else 1)

    def gradient_bytes(num_params, num_ranks, stage, precision):
        _check(stage)
        size = 4 if precision in ("fp32", "bf16_fp32_grads") else 2
        return size * num_params / (num_ranks if stage >= 2 else 1)

    def optimizer_bytes(num_params, num_ranks, stage, precision):
        _check(stage)
        size = 8 if precision == "fp32" else 12
        return size * num_params / (num_ranks if stage >= 1 else 1)

    def activation_bytes(num_layers, hidden, num_heads, seq_len, micro_batch, precision, flash):
        layer = 34 + (0 if flash else 5 * num_heads * seq_len / hidden)
        return num_layers * seq_len * micro_batch * hidden * layer * (2 if precision == "fp32" else 1)

    def memory_report(vision, language, batch, seq_len, image_tokens, num_ranks, stage, precision):
        if batch % num_ranks:
            raise ValueError("uneven")
        num_params, micro = vision.num_params + language.num_params, batch // num_ranks
        kept = activation_bytes(*_shape(language), seq_len, micro, precision, True)
        kept += activation_bytes(*_shape(vision), 1024, micro * image_tokens // 256, precision, True)
        state = [f(num_params, num_ranks, stage, precision) for f in (weight_bytes, gradient_bytes, optimizer_bytes)]
        report = dict(
            zip(("weights", "gradients", "optimizer", "activations"), (x / GIB for x in (*state, kept)), strict=True)
        )
        return {**report, "total": sum(report.values())}

    return dict(
        zip(PARTS, (weight_bytes, gradient_bytes, optimizer_bytes, activation_bytes, memory_report), strict=True)
    )


class StageError(ValueError):
    pass


TABLE = {"fp32": (4, 4, 8), "fp16_mixed": (2, 2, 12), "bf16_mixed": (2, 2, 12), "bf16_fp32_grads": (2, 4, 12)}


def _of_table(column, first):
    def function(num_params, num_ranks, stage, precision):
        if not 0 <= stage <= 3:
            raise StageError
        share = Fraction(1, num_ranks) if stage >= first else Fraction(1)
        return TABLE[precision][column] * num_params * share

    return function


def by_table_and_fractions() -> Answer:
    def kept(num_layers, hidden, num_heads, seq_len, micro_batch, precision, flash):
        tokens = Fraction(seq_len * micro_batch)
        scores = Fraction(5 * num_heads * seq_len, hidden) * (not flash)
        return tokens * hidden * num_layers * (34 + scores) * Fraction(TABLE[precision][0], 2)

    return plain() | {
        "weights": _of_table(0, 3),
        "gradients": _of_table(1, 2),
        "optimizer": _of_table(2, 1),
        "activations": kept,
    }


def in_numpy() -> Answer:
    rows = {name: np.array(sizes, dtype=np.float64) for name, sizes in TABLE.items()}

    def state(num_params, num_ranks, stage, precision):
        if stage not in range(4):
            raise ValueError("no such stage")
        return rows[precision] * num_params / np.where(np.arange(3, 0, -1) <= stage, num_ranks, 1)

    def kept(num_layers, hidden, num_heads, seq_len, micro_batch, precision, flash):
        of_layer = np.float64(34) * seq_len * hidden + (not flash) * 5.0 * num_heads * seq_len**2
        return np.full(num_layers, of_layer * micro_batch * rows[precision][0] / 2).sum()

    def report(vision, language, batch, seq_len, image_tokens, num_ranks, stage, precision):
        micro, rest = divmod(batch, num_ranks)
        if rest:
            raise ValueError
        found = state(np.add(vision[0], language[0], dtype=np.float64), num_ranks, stage, precision)
        towers = ((language, seq_len), (vision, 4 * image_tokens))
        activations = sum(kept(*_shape(tower), positions, micro, precision, True) for tower, positions in towers)
        gib = np.append(found, activations) / 1024**3
        return dict(zip((*PARTS[:4], "total"), np.append(gib, gib.sum()), strict=True))

    columns = {part: (lambda *a, i=i: state(*a)[i]) for i, part in enumerate(PARTS[:3])}
    return {**columns, "activations": kept, "report": report}


def by_recursion() -> Answer:
    """Each stage takes the one before and divides one owner more."""

    @functools.cache
    def state(num_params, num_ranks, stage, precision):
        if stage == 0:
            moments = 8
            return (4, 4, moments) if precision == "fp32" else (2, 2 + 2 * ("grads" in precision), moments + 4)
        if stage not in (1, 2, 3):
            raise ValueError
        before = list(state(num_params, num_ranks, stage - 1, precision))
        before[3 - stage] /= num_ranks
        return tuple(before)

    def layers(num_layers, hidden, num_heads, seq_len, micro_batch, precision, flash):
        if num_layers == 0:
            return 0
        one = micro_batch * seq_len * (34 * hidden + (0 if flash else 5 * num_heads * seq_len))
        rest = layers(num_layers - 1, hidden, num_heads, seq_len, micro_batch, precision, flash)
        return rest + one * (1 + (precision == "fp32"))

    columns = {part: (lambda p, n, s, x, i=i: p * state(p, n, s, x)[i]) for i, part in enumerate(PARTS[:3])}
    return plain() | columns | {"activations": layers}


def in_torch() -> Answer:
    def split(size_of, first):
        def function(num_params, num_ranks, stage, precision):
            if stage > 3:
                raise ValueError("at most 3")
            whole = torch.tensor(float(num_params), dtype=torch.float64) * size_of(precision)
            return whole / num_ranks if stage >= first else whole

        return function

    def report(*args):
        found = plain()["report"](*args)
        return {key: torch.tensor(value) for key, value in reversed(found.items())}

    return plain() | {
        "weights": split(lambda p: {"fp32": 4}.get(p, 2), 3),
        "gradients": split(lambda p: 2 if p.endswith("mixed") else 4, 2),
        "optimizer": split(lambda p: 4 * (3 - (p == "fp32")), 1),
        "report": report,
    }


RIGHT = (plain, by_table_and_fractions, in_numpy, by_recursion, in_torch)

# --- Wrong ----------------------------------------------------------------------------------------------------------


def _build(
    table: Any = None,
    first: Any = (3, 2, 1),
    unit: float = 1.0,
    gib: float = GIB,
    kept: Any = None,
    positions: Any = lambda seq_len, image_tokens: (seq_len, 4 * image_tokens),
    batch_of: Any = lambda batch, num_ranks, stage: batch / num_ranks,
    params: Any = lambda vision, language: vision[0] + language[0],
    divide: Any = lambda size, num_ranks: size / num_ranks,
) -> Answer:
    """Build a whole answer with some of it wrong."""
    table = TABLE | (table or {})
    kept = kept or (lambda L, h, a, s, b, p, flash: L * s * b * (34 * h + (not flash) * 5 * a * s) * table[p][0] / 2)

    def state(num_params, num_ranks, stage, precision):
        _check(stage)
        sizes = table[precision]
        stages = [stage in f if isinstance(f, tuple) else stage >= f for f in first]
        return [num_params * (divide(x, num_ranks) if s else x) for x, s in zip(sizes, stages, strict=True)]

    def report(vision, language, batch, seq_len, image_tokens, num_ranks, stage, precision):
        if batch % num_ranks:
            raise ValueError
        micro = batch_of(batch, num_ranks, stage)
        found = state(params(vision, language), num_ranks, stage, precision)
        both = zip((language, vision), positions(seq_len, image_tokens), strict=True)
        found.append(sum(kept(*_shape(tower), length, micro, precision, True) for tower, length in both))
        of_owner = [size / gib for size in found]
        return dict(zip((*PARTS[:4], "total"), (*of_owner, sum(of_owner)), strict=True))

    columns = {part: (lambda *a, i=i: state(*a)[i] * unit) for i, part in enumerate(PARTS[:3])}

    def activations(*args):
        return kept(*args) * unit

    return {**columns, "activations": activations, "report": report}


def _sizes(**owners: Any) -> dict[str, tuple[float, ...]]:
    """Change a column of the table for all precisions."""
    order = ("weights", "gradients", "optimizer")
    return {
        name: tuple(owners[o](name, size) if o in owners else size for o, size in zip(order, sizes, strict=True))
        for name, sizes in TABLE.items()
    }


def _kept(of_layer: Any) -> Any:
    """An activation formula from bytes a position and unit of width in 16 bits, doubled in fp32."""
    return lambda L, h, a, s, b, p, flash: L * s * b * h * of_layer(h, a, s, flash) * TABLE[p][0] / 2


def _report_with_scores(vision, language, batch, seq_len, image_tokens, num_ranks, stage, precision):
    """The report as it is without flash attention."""
    found = plain()["report"](vision, language, batch, seq_len, image_tokens, num_ranks, stage, precision)
    micro, kept = batch // num_ranks, plain()["activations"]
    size = kept(*_shape(language), seq_len, micro, precision, False)
    size += kept(*_shape(vision), 1024, micro * image_tokens // 256, precision, False)
    return found | {"activations": size / GIB, "total": found["total"] - found["activations"] + size / GIB}


WRONG: dict[str, tuple[Answer, dict[str, str]]] = {
    "one Adam moment": (
        _build(_sizes(optimizer=lambda _, size: size - 4)),
        {"optimizer": "you counted one Adam moment", "report": "optimizer: it looks as if you counted one Adam moment"},
    ),
    "three copies in fp32": (
        _build({"fp32": (4, 4, 4)}),
        {"optimizer": "in fp32 you counted one Adam moment, three copies", "report": "three copies of 4 bytes"},
    ),
    "no master weights": (
        _build(_sizes(optimizer=lambda *_: 8)),
        {"optimizer": "you forgot the fp32 master weights", "report": "you forgot the fp32 master weights"},
    ),
    "master weights in fp32 too": (_build({"fp32": (4, 4, 12)}), {"optimizer": "you counted master weights in fp32"}),
    "all sixteen are the optimizer's": (
        _build(_sizes(optimizer=lambda name, _: 16 if name != "fp32" else 8)),
        {"optimizer": "not 4P + 16P/N", "report": "not 4P + 16P/N"},
    ),
    "ZeRO-1 for ZeRO-2": (
        _build(first=(3, 3, 1)),
        {"gradients": "you took ZeRO-1 for ZeRO-2", "report": "gradients: it looks as if you took ZeRO-1 for ZeRO-2"},
    ),
    "gradients split in stage 1": (
        _build(first=(3, 1, 1)),
        {"gradients": "you took ZeRO-2 for ZeRO-1", "report": "you took ZeRO-2 for ZeRO-1"},
    ),
    "one stage too late": (
        _build(first=(4, 3, 2)),
        {
            "weights": "you never divide the weights by the number of ranks",
            "gradients": "left the gradients whole in ZeRO-2",
            "optimizer": "you are off by one stage: you left the optimizer state whole in ZeRO-1",
        },
    ),
    "one stage too early": (
        _build(first=(2, 1, 0)),
        {
            "weights": "you are off by one stage: you split the weights in ZeRO-2",
            "gradients": "split the gradients in ZeRO-1",
            "optimizer": "you split the optimizer state in stage 0 (DDP)",
        },
    ),
    "never split": (
        _build(first=(9, 9, 9)),
        {part: "you never divide the" for part in PARTS if part != "activations"},
    ),
    "always split": (
        _build(first=(0, 0, 0)),
        {"weights": "split the weights in stage 0 (DDP), ZeRO-1 and ZeRO-2", "gradients": "split the gradients in"},
    ),
    "each stage splits one owner": (
        _build(first=((3,), (2,), (1,))),
        {"optimizer": "left the optimizer state whole in ZeRO-2 and ZeRO-3", "gradients": "whole in ZeRO-3"},
    ),
    "weights of 4 bytes": (
        _build(_sizes(weights=lambda *_: 4), kept=_kept(lambda h, a, s, flash: 34 + 5 * a * s / h * (not flash))),
        {"weights": "you kept the weights at 4 bytes", "report": "weights: it looks as if you kept the weights at 4"},
    ),
    "master weights among the weights": (
        _build(
            _sizes(weights=lambda n, x: x if n == "fp32" else 6, optimizer=lambda *_: 8),
            kept=_kept(lambda h, a, s, flash: 34 + 5 * a * s / h * (not flash)),
        ),
        {"weights": "master weights among the weights", "optimizer": "you forgot the fp32 master weights"},
    ),
    "gradients of 4 bytes": (_build(_sizes(gradients=lambda *_: 4)), {"gradients": "gradients at 4 bytes"}),
    "fp32 gradients overlooked": (
        _build({"bf16_fp32_grads": (2, 2, 12)}),
        {"gradients": "18 bytes a parameter in all"},
    ),
    "fp32 gradients twice": (_build({"bf16_fp32_grads": (2, 6, 12)}), {"gradients": "they are kept once"}),
    "gradients twice": (
        _build(_sizes(gradients=lambda _, size: 2 * size)),
        {part: "as if DDP's buckets were a second copy" for part in ("gradients", "report")},
    ),
    "gradients twice in DDP": (
        plain() | {"gradients": lambda p, n, s, x: plain()["gradients"](p, n, s, x) * (1 if s else 2)},
        {"gradients": "in DDP alone you counted gradients twice"},
    ),
    "fp32 gradients are the optimizer's": (
        _build({"bf16_fp32_grads": (2, 2, 16)}),
        {
            "gradients": "18 bytes a parameter in all",
            "optimizer": "you counted the fp32 gradients of bf16_fp32_grads among",
        },
    ),
    "total in GB": (
        plain() | {"report": lambda *a: (r := plain()["report"](*a)) | {"total": r["total"] * GIB / 1e9}},
        {"report": "total: it looks as if you divided by 10^9, which gives GB"},
    ),
    "no pixel shuffle": (
        _build(positions=lambda s, i: (s + 3 * i, 4 * i)),
        {"report": "you counted each tile's 1024 patches in the language model"},
    ),
    "tiles of 1024 tokens": (
        _build(positions=lambda s, i: (s, 1024 * max(1, i // 1024))),
        {"report": "you counted a tile for each 1024 image tokens"},
    ),
    "tiles of 1024 tokens, or none": (
        _build(positions=lambda s, i: (s, 1024 * (i // 1024))),
        {"report": "you counted a tile for each 1024 image tokens"},
    ),
    "report without flash": (
        plain() | {"report": _report_with_scores},
        {"report": "the report is of flash attention"},
    ),
    "scores counted once": (
        _build(kept=_kept(lambda h, a, s, flash: 34 + 2 * a * s / h * (not flash))),
        {"activations": "you counted the scores of attention once"},
    ),
    "a byte a score": (
        _build(kept=_kept(lambda h, a, s, flash: 34 + a * s / h * (not flash))),
        {"activations": "you counted the scores of attention once"},
    ),
    "GB for GiB": (
        _build(gib=1e9),
        {"report": "it looks as if you divided by 10^9, which gives GB"},
    ),
    "bytes in the report": (_build(gib=1), {"report": "you returned bytes: the report is in GiB"}),
    "GiB for bytes": (_build(unit=1 / GIB), {part: "you returned GiB: return bytes" for part in PARTS[:4]}),
    "bits for bytes": (_build(unit=8), {part: "you returned bits" for part in PARTS[:4]}),
    "image tokens twice": (
        _build(positions=lambda s, i: (s + i, 4 * i)),
        {"report": "activations: it looks as if you counted the image tokens twice"},
    ),
    "text only": (_build(positions=lambda s, i: (s - i, 4 * i)), {"report": "the text tokens alone"}),
    "image tokens for patches": (
        _build(positions=lambda s, i: (s, i)),
        {"report": "one position for each image token"},
    ),
    "no vision activations": (
        _build(positions=lambda s, i: (s, 0)),
        {"report": "you left the vision tower's activations out"},
    ),
    "image tokens twice, and the global batch": (
        _build(positions=lambda s, i: (s + i, 4 * i), batch_of=lambda b, n, stage: b),
        {"report": "you took the global batch for a rank's"},
    ),
    "global batch": (_build(batch_of=lambda b, n, stage: b), {"report": "you took the global batch for a rank's"}),
    "activations split by ZeRO": (
        _build(batch_of=lambda b, n, stage: b / n / n),
        {"report": "you divided the activations by the number of ranks once more. ZeRO"},
    ),
    "activations split by ZeRO-3": (
        _build(batch_of=lambda b, n, stage: b / n / (n if stage == 3 else 1)),
        {"report": "by the number of ranks once more in ZeRO-3"},
    ),
    "language parameters only": (
        _build(params=lambda vision, language: language[0]),
        {"report": "you left the vision tower's parameters out"},
    ),
    "multiplied by the ranks": (
        _build(divide=lambda x, n: x * n),
        {part: "you multiplied by the number of ranks" for part in PARTS[:3]},
    ),
    "floor division": (_build(divide=lambda x, n: x // n), {"optimizer": "you divided with //"}),
    "scores left out": (_build(kept=_kept(lambda *_: 34)), {"activations": "you left out the scores"}),
    "scores with flash too": (
        _build(kept=_kept(lambda h, a, s, flash: 34 + 5 * a * s / h)),
        {"activations": "with flash attention too"},
    ),
    "flash turned round": (
        _build(kept=_kept(lambda h, a, s, flash: 34 + 5 * a * s / h * flash)),
        {"activations": "you turned flash round"},
    ),
    "one number a position": (
        _build(kept=lambda L, h, a, s, b, p, flash: L * s * b * h * 4),
        {"activations": "you counted one number for each position", "report": "activations"},
    ),
    "heads forgotten": (
        _build(kept=_kept(lambda h, a, s, flash: 34 + 5 * s / h * (not flash))),
        {"activations": "you forgot the heads"},
    ),
    "scores not divided by the width": (
        _build(kept=_kept(lambda h, a, s, flash: 34 + 5 * a * s * (not flash))),
        {"activations": "you did not divide the scores by h"},
    ),
    "no layers": (
        _build(kept=lambda L, h, a, s, b, p, f: s * b * (34 * h + (not f) * 5 * a * s) * TABLE[p][0] / 2),
        {"activations": "you counted one layer"},
    ),
    "not doubled in fp32": (
        _build(kept=lambda L, h, a, s, b, p, f: L * s * b * (34 * h + (not f) * 5 * a * s)),
        {"activations": "you did not double it in fp32", "report": "you did not double it in fp32"},
    ),
    "34 alone doubled in fp32": (
        _build(kept=lambda L, h, a, s, b, p, f: L * s * b * (34 * h * TABLE[p][0] / 2 + (not f) * 5 * a * s)),
        {"activations": "It looks as if in fp32 you doubled the 34 bytes and not the scores"},
    ),
    "scores alone doubled in fp32": (
        _build(kept=lambda L, h, a, s, b, p, f: L * s * b * (34 * h + (not f) * 5 * a * s * TABLE[p][0] / 2)),
        {"activations": "It looks as if in fp32 you doubled the scores of attention and not"},
    ),
    "doubled with fp32 gradients": (
        _build(kept=lambda L, h, a, s, b, p, f: L * s * b * (34 * h + (not f) * 5 * a * s) * TABLE[p][1] / 2),
        {"activations": "It looks as if you doubled it in bf16_fp32_grads too"},
    ),
    "masks of one byte": (
        _build(
            kept=lambda L, h, a, s, b, p, f: (
                L * s * b * ((34, 66)[p == "fp32"] * h + (not f) * (5, 9)[p == "fp32"] * a * s)
            )
        ),
        {"activations": "masks at one byte"},
    ),
    "the planner's": (
        plain() | {"weights": lambda p, n, s, x: estimate_state_bytes(p, precision=x, zero_stage=s).weights},
        {"weights": "vlmcourse.planner.state_bytes.estimate_state_bytes holds the answer"},
    ),
    "no refusals": (
        plain() | {"weights": lambda p, n, s, x: TABLE[x][0] * p / (n if s == 3 else 1)},
        {"weights": "stage 4: ZeRO has the stages 0 (DDP) to 3: raise a ValueError"},
    ),
    "texts": (
        plain() | {"weights": lambda *_: "2 GB", "report": lambda *_: (1, 2, 3)},
        {"weights": "return one number of bytes", "report": "return a dict with the keys"},
    ),
    "no total": (
        plain() | {"report": lambda *a: {k: v for k, v in plain()["report"](*a).items() if k != "total"}},
        {"report": ": the report has no total\n"},
    ),
    "total without activations": (
        plain() | {"report": lambda *a: (r := plain()["report"](*a)) | {"total": r["total"] - r["activations"]}},
        {"report": "is not the sum of your four owners"},
    ),
    "errors": (
        plain() | {"optimizer": lambda p, n, s, x: {"fp32": 8}[x] * p},
        {"optimizer": "KeyError: 'fp16_mixed'"},
    ),
}
"""By name: the five functions, and for each part that must lose points some of the words that are said."""
