"""Rows of the list of figures from many sources: FSDP of torchtitan, BigScience's and Megatron's 3D runs, FSDP blogs.

Enters: cells of a row. Leaves: a `FigureRow`, or a `Skip` that says what the row does not state or what is not
modelled: a vision part, LoRA, fp8, offloading, figures that are other estimators' answers. Assumed where the row is
silent: one gradient-accumulation step, and heads about 128 wide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from vlmcourse.planner.decoder_run import DecoderRun, Software
from vlmcourse.planner.figure_software import MEGATRON_DEEPSPEED, TORCHTITAN
from vlmcourse.planner.figure_values import FigureRow, Skip, count_of, device_of, number_of
from vlmcourse.planner.hardware import DeviceSpec
from vlmcourse.planner.recipes import PRECISIONS, Precision
from vlmcourse.planner.roofline import model_flops_per_token
from vlmcourse.presets import LanguageShape

HEAD_WIDTH = 128
"""Assumed where a source does not say how many heads there are."""
UNITS = {"gib": 2**30, "gb": 10**9, "mb": 10**6, "mib": 2**20}


def read_published(row: Mapping[str, str]) -> FigureRow:
    """Read one row.

    Raises:
        Skip: with the reason why it cannot be described.
    """
    _refuse(row)
    run = _describe_run(row)
    device = device_of(row["gpu"])
    gpus = count_of(row, "n_gpus", default=run.num_ranks)
    if run.num_ranks != gpus:
        raise Skip(f"dp x cp x tp x pp = {run.num_ranks} is not n_gpus = {gpus}")
    return FigureRow(
        group=row["group"],
        choice=(row["model"], gpus),
        run=run,
        device=device,
        memory_bytes=_memory_bytes(row),
        tokens_per_s=_tokens_per_s(row, run, device),
    )


def _refuse(row: Mapping[str, str]) -> None:
    """Raise a Skip for what is not modelled."""
    if row["vision_part"]:
        raise Skip("a vision part: towers of other projects are not modelled here")
    if "lora" in row["model"].lower():
        raise Skip("LoRA: adapters are not modelled here")
    if "fp8" in row["precision"].lower() or "float8" in row["precision"].lower():
        raise Skip(f"precision {row['precision']!r}: products in fp8 are not modelled")
    if "offload" in row["shard_mode"].lower():
        raise Skip(f"shard_mode {row['shard_mode']!r}: offloading is not modelled here")
    if re.search(r"analytic|estimator|paper|formulas", row["group"].lower()):
        raise Skip("another estimator's answer, not a measurement")
    if row["group"] == "torchtune":
        raise Skip("torchtune's rows change what the table has no column for: chunked loss, 8-bit or fused optimizers")
    if re.search(r"every 2nd", row["act_ckpt"]):
        raise Skip(f"act_ckpt {row['act_ckpt']!r}: every second layer is not modelled here")


def _describe_run(row: Mapping[str, str]) -> DecoderRun:
    """Return the row's run."""
    tp, pp, cp = (count_of(row, name, default=1) for name in ("tp", "pp", "cp"))
    if row.get("vpp", "") not in ("", "1"):
        raise Skip(f"vpp = {row['vpp']!r}: interleaved pipelines are not modelled here")
    zero_stage, precision, software = _sharding(row)
    gpus = count_of(row, "n_gpus", default=0, least=0)
    dp = count_of(row, "dp", default=gpus // (tp * pp * cp) or 1)
    seq_len = count_of({"seq_len": row["seq_len"].removesuffix(" packed")}, "seq_len")
    if not row["micro_batch"] and not row["grad_accum"]:
        raise Skip("micro_batch is not stated")
    accum = row["grad_accum"]
    if not accum and pp > 1:
        raise Skip("grad_accum is not stated, so a pipeline's micro-batches are not known")
    return DecoderRun(
        shape=_shape(row, tp),
        precision=precision,
        software=software,
        seq_len=seq_len,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        zero_stage=zero_stage,
        micro_batch_size=count_of(row, "micro_batch"),
        grad_accum_steps=count_of(row, "grad_accum", default=1),
        sequence_parallel=tp > 1 and software is TORCHTITAN,
        mlp="swiglu" if row["gated_mlp"] == "swiglu" else "gelu",
        recompute=_recompute(row["act_ckpt"]),
    )


def _shape(row: Mapping[str, str], tp: int) -> LanguageShape:
    """Return the decoder's shape; untied where it is a SwiGLU model of 2 B or more, as Llama's are, tied otherwise."""
    width = count_of(row, "hidden")
    vocab = re.fullmatch(r"~?(\d+)(k?)( \(padded\))?", row["vocab"])
    if vocab is None:
        raise Skip(f"vocab = {row['vocab']!r}: is not one number")
    fitting = [n for n in range(tp, width // 32 + 1, tp) if width % n == 0]
    if not row["heads"] and not fitting:
        raise Skip(f"heads is not stated, and no number of them divides hidden = {width} and is a multiple of tp")
    heads = count_of(row, "heads", default=min(fitting, key=lambda n: abs(width / n - HEAD_WIDTH), default=1))
    return LanguageShape(
        vocab_size=int(vocab[1]) * (1000 if vocab[2] else 1),
        num_layers=count_of(row, "n_layers"),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=count_of(row, "kv_heads", default=heads),
        mlp_size=count_of(row, "ffn"),
        tied_embeddings=row["gated_mlp"] != "swiglu" or (number_of(row, "params_b") or 0) < 2,
    )


def _sharding(row: Mapping[str, str]) -> tuple[int, Precision, Software]:
    """Return the ZeRO stage, the recipe and the framework behind a row's shard_mode.

    FSDP keeps fp32 weights, gradients and moments and computes in 16 bits. DeepSpeed's ZeRO-1 keeps weights and
    gradients in 16 bits; Megatron's distributed optimizer has fp32 gradients.
    """
    mode = row["shard_mode"].lower()
    if "fsdp" in mode:
        return (2 if "grad_op" in mode else 3), PRECISIONS["bf16_autocast"], TORCHTITAN
    if "zero-1" in mode:
        return 1, PRECISIONS["bf16_mixed"], MEGATRON_DEEPSPEED
    if "distributed optimizer" in mode:
        return 1, PRECISIONS["bf16_fp32_grads"], MEGATRON_DEEPSPEED
    if "zero-3" in mode:
        return 3, PRECISIONS["fp16_mixed"], MEGATRON_DEEPSPEED
    if mode == "none":
        return 0, PRECISIONS["fp16_mixed"], MEGATRON_DEEPSPEED
    raise Skip(f"shard_mode = {row['shard_mode']!r}: is not one that is modelled")


def _recompute(text: str) -> str:
    """Return the policy that a cell names.

    Raises:
        Skip: if it does not say which activations are kept.
    """
    written = text.lower()
    for word in ("full", "selective", "none"):
        if written.startswith(word) and "/" not in written and "sp" not in written.split():
            return word
    raise Skip(f"act_ckpt = {text!r}: does not say what is kept")


def _memory_bytes(row: Mapping[str, str]) -> float | None:
    """Return the peak in bytes; None where there is none, or where it says more than one number."""
    match = re.fullmatch(r"\d+(\.\d+)?", row["peak_mem"])
    unit = UNITS.get(row["mem_unit"].lower().split(" ")[0]) if row["mem_unit"] else None
    return float(match[0]) * unit if match and unit else None


def _tokens_per_s(row: Mapping[str, str], run: DecoderRun, device: DeviceSpec) -> float | None:
    """Return tokens a second of one GPU: as stated, or from the seconds of a step, or from an MFU."""
    stated, step_s, mfu_pct = (number_of(row, name) for name in ("tokens_s_gpu", "step_time_s", "mfu_pct"))
    if stated:
        return stated
    if step_s:
        return run.step_tokens / run.num_ranks / step_s
    if mfu_pct:
        peak = device.peak_flop_per_s(run.precision.compute_dtype)
        return mfu_pct / 100 * peak / model_flops_per_token(run)
    return None
