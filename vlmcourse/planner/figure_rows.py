"""Published figures, one CSV row each, read as runs that the planner can predict, or with the reason why it cannot.

Enters: a CSV file in one of three shapes, told apart by its columns: the Ultra-Scale Playbook's benchmark table,
llm-foundry's throughput tables, and a list of figures from many sources. Leaves: `FigureRow`s. A row that says too
little, or what is not modelled (LoRA, a vision part, fp8, unknown devices), is kept with its reason. Chapter 7.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vlmcourse.planner.decoder_run import DecoderRun
from vlmcourse.planner.figure_published import read_published
from vlmcourse.planner.figure_software import TORCHTITAN, NanotronConstants, nanotron
from vlmcourse.planner.figure_values import FigureRow, Skip, count_of, device_of, number_of
from vlmcourse.planner.recipes import PRECISIONS
from vlmcourse.presets import LanguageShape

PLAYBOOK_SHAPES = {
    # Layers, width, heads, MLP width, whether the embedding is tied; the counts of the table's own README.
    "1B": (16, 2048, 32, 8192, True),
    "3B": (28, 3072, 32, 8192, True),
    "8B": (32, 4096, 32, 14336, False),
}
PLAYBOOK_VOCAB, PLAYBOOK_SEQ_LEN = 131072, 4096
GIB = 2**30


def playbook_run(row: Mapping[str, str], constants: NanotronConstants | None = None) -> DecoderRun:
    """Return the run of a row of the playbook's table.

    Args:
        row: with the columns model, dp, pp, tp, micro_batch, grad_accum and zero_stage.
        constants: of nanotron's memory.

    Raises:
        Skip: if the model is not one whose shape is known, or a number is missing or impossible.
    """
    if row["model"] not in PLAYBOOK_SHAPES:
        raise Skip(f"model {row['model']!r}: its shape is not known; those of {', '.join(PLAYBOOK_SHAPES)} are")
    layers, width, heads, mlp, tied = PLAYBOOK_SHAPES[row["model"]]
    tp, pp, dp, accum = (count_of(row, name) for name in ("tp", "pp", "dp", "grad_accum"))
    return DecoderRun(
        shape=LanguageShape(
            vocab_size=PLAYBOOK_VOCAB,
            num_layers=layers,
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=heads,
            mlp_size=mlp,
            tied_embeddings=tied,
        ),
        precision=PRECISIONS["bf16_fp32_grads"],
        software=nanotron(constants or NanotronConstants(), pp=pp),
        seq_len=PLAYBOOK_SEQ_LEN,
        dp=dp,
        tp=tp,
        pp=pp,
        zero_stage=count_of(row, "zero_stage", least=0),
        micro_batch_size=count_of(row, "micro_batch"),
        grad_accum_steps=accum,
        sequence_parallel=tp > 1,
    )


def _read_playbook(row: Mapping[str, str]) -> FigureRow:
    if row.get("status", "ok") != "ok":
        raise Skip(f"status {row['status']!r}: only rows that ran have figures")
    run = playbook_run(row)
    gpus = count_of(row, "gpus")
    if run.num_ranks != gpus:
        raise Skip(f"dp x pp x tp = {run.num_ranks} is not gpus = {gpus}")
    memory_gib, tokens_per_s = number_of(row, "peak_gpu_mem_gb"), number_of(row, "tokens_s_gpu")
    return FigureRow(
        group=row["model"],
        choice=(row["model"], gpus),
        run=run,
        device=device_of("h100"),
        memory_bytes=memory_gib * GIB if memory_gib else None,  # the table's "GB" are GiB: nanotron divides by 1024^3
        stage=0,  # world rank 0 writes the table, and it stands on the first stage
        tokens_per_s=tokens_per_s,
    )


def _read_foundry(row: Mapping[str, str]) -> FigureRow:
    if "fp8" in row["precision"]:
        raise Skip(f"precision {row['precision']!r}: products in fp8 are not modelled")
    if row.get("act_offload", "False") == "True":
        raise Skip("act_offload: activations in main memory are not modelled")
    zero_stage = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}.get(row["sharding"])
    if zero_stage is None:
        raise Skip(f"sharding {row['sharding']!r}: FULL_SHARD and SHARD_GRAD_OP are modelled")
    width, gpus = count_of(row, "d_model"), count_of(row, "n_gpus")
    heads = count_of(row, "n_heads")
    return FigureRow(
        group=row["section"],
        choice=(row["section"], row["model"], row["seq_len"], gpus),
        run=DecoderRun(
            shape=LanguageShape(
                vocab_size=count_of(row, "vocab"),
                num_layers=count_of(row, "n_layers"),
                hidden_size=width,
                num_heads=heads,
                num_kv_heads=heads,
                mlp_size=count_of(row, "expansion") * width,
                tied_embeddings=True,
            ),
            precision=PRECISIONS["bf16_autocast"],
            software=TORCHTITAN,
            seq_len=count_of(row, "seq_len"),
            dp=gpus,
            zero_stage=zero_stage,
            micro_batch_size=count_of(row, "micro_batch"),
            grad_accum_steps=count_of(row, "grad_accum"),
            mlp="gelu",
            recompute="full" if row["act_ckpt"] == "True" else "none",
        ),
        device=device_of(row["gpu"]),
        tokens_per_s=number_of(row, "tokens_s_gpu"),
    )


@dataclass(frozen=True)
class _Shape:
    """A shape of CSV: the columns it must have, its reader, and which column names the group of a skipped row."""

    columns: frozenset[str]
    reader: Callable[[Mapping[str, str]], FigureRow]
    group_column: str


def _columns(names: str) -> frozenset[str]:
    return frozenset(names.split())


SHAPES = {
    "playbook": _Shape(
        _columns("model gpus micro_batch grad_accum dp pp tp zero_stage tokens_s_gpu peak_gpu_mem_gb"),
        _read_playbook,
        "model",
    ),
    "llm_foundry": _Shape(
        _columns(
            "section model seq_len n_gpus gpu micro_batch grad_accum tokens_s_gpu precision sharding "
            "act_ckpt n_layers d_model n_heads expansion vocab"
        ),
        _read_foundry,
        "section",
    ),
    "published": _Shape(
        _columns(
            "group model n_layers hidden heads kv_heads ffn vocab gated_mlp vision_part seq_len micro_batch "
            "grad_accum precision gpu n_gpus dp shard_mode tp pp cp act_ckpt peak_mem mem_unit tokens_s_gpu "
            "step_time_s mfu_pct"
        ),
        read_published,
        "group",
    ),
}
"""The shapes of CSV files that can be read, by name."""


def read_figures(path: str | Path) -> list[FigureRow]:
    """Read a CSV file of published figures.

    Args:
        path: of the file; its first line has the names of its columns.

    Returns:
        One `FigureRow` a line, in the file's order; where `reason` says something, nothing can be predicted.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no text, or its columns are those of none of `SHAPES`.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns, rows = set(reader.fieldnames or ()), list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read as CSV in UTF-8 ({error}); give a file with named columns") from error
    shape = next((shape for shape in SHAPES.values() if shape.columns <= columns), None)
    if shape is None:
        near = min(SHAPES, key=lambda name: len(SHAPES[name].columns - columns))
        missing = ", ".join(sorted(SHAPES[near].columns - columns))
        raise ValueError(f"{path}: its columns are those of no known table; of {near}'s it lacks {missing}")
    return [_read_row(row, shape, line) for line, row in enumerate(rows, start=2)]


def _read_row(row: Mapping[str, str | None], shape: _Shape, line: int) -> FigureRow:
    """Read one row; what is wrong with it becomes its reason."""
    group = row.get(shape.group_column) or "(no name)"
    if any(row.get(name) is None for name in shape.columns):
        return FigureRow(group=group, reason=f"line {line}: has fewer columns than the header")
    cells = {name: value.strip() for name, value in row.items() if isinstance(value, str)}
    try:
        found = shape.reader(cells)
    except ValueError as error:  # Skip, and what DecoderRun refuses
        return FigureRow(group=group, reason=f"line {line}: {error}")
    if found.run is not None and found.device is not None:
        dtype = found.run.precision.compute_dtype
        if not found.device.supports(dtype):
            return FigureRow(group=group, reason=f"line {line}: {found.device.name} has no hardware path for {dtype!r}")
    if found.memory_bytes is None and found.tokens_per_s is None:
        return FigureRow(group=group, reason=f"line {line}: no peak memory and no speed is stated")
    return found
