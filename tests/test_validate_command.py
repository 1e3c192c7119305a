"""`vlmcourse validate`: three shapes of tables, bad rows with reasons, errors and correlations by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from vlmcourse import cli
from vlmcourse.planner.figure_check import (
    KEYS,
    count_within,
    memory_interval,
    predict_memory_bytes,
    predict_tokens_per_s,
)
from vlmcourse.planner.figure_rows import read_figures
from vlmcourse.planner.figure_scores import error_summary, mean_regret_pct, mean_spearman, percentile, spearman

PLAYBOOK = "model,nodes,gpus,micro_batch,grad_accum,global_batch_seqs,dp,pp,tp,zero_stage,mfu_pct,tokens_s_gpu,\
peak_gpu_mem_gb,status"
FOUNDRY = "section,model,seq_len,n_gpus,gpu,mfu,micro_batch,grad_accum,global_batch,tokens_s_gpu,precision,mp_mode,\
sharding,act_ckpt,act_offload,num_params,n_layers,d_model,n_heads,expansion,vocab"
PUBLISHED = "id,group,source,model,params_b,n_layers,hidden,heads,kv_heads,ffn,vocab,gated_mlp,vision_part,seq_len,\
micro_batch,grad_accum,global_batch_seqs,precision,gpu,n_gpus,dp,shard_mode,tp,pp,vpp,cp,act_ckpt,peak_mem,mem_unit,\
tokens_s_gpu,step_time_s,tflops_gpu,mfu_pct,notes"
LLAMA = {
    "id": "1",
    "group": "fsdp",
    "model": "Llama-8B",
    "params_b": "8.03",
    "n_layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "gated_mlp": "swiglu",
    "seq_len": "8192",
    "micro_batch": "2",
    "grad_accum": "1",
    "precision": "bf16",
    "gpu": "H100 SXM",
    "n_gpus": "8",
    "dp": "8",
    "shard_mode": "FSDP2 (ZeRO-3)",
    "tp": "1",
    "pp": "1",
    "act_ckpt": "selective (per-op)",
    "peak_mem": "80",
    "mem_unit": "GiB",
    "tokens_s_gpu": "6000",
}


def write(path: Path, header: str, *rows: str) -> Path:
    """Write a table and return its path."""
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def published(**changes: str) -> str:
    """Return a row of the list of published figures."""
    cells = LLAMA | changes
    return ",".join(cells.get(name, "") for name in PUBLISHED.split(","))


def test_playbook_rows_are_read_as_the_first_stage_in_gib(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", PLAYBOOK, "8B,2,16,2,16,128,4,2,2,1,30,9000,50.0,ok")
    (row,) = read_figures(path)
    assert (row.reason, row.stage, row.memory_bytes, row.tokens_per_s) == ("", 0, 50 * 2**30, 9000)
    assert row.run is not None
    assert (row.run.dp, row.run.pp, row.run.tp, row.run.zero_stage, row.run.grad_accum_steps) == (4, 2, 2, 1, 16)
    assert row.run.num_params == pytest.approx(8.858e9, rel=1e-3)


def test_bad_rows_are_skipped_with_their_reasons(tmp_path: Path) -> None:
    bad = {
        "9B,1,8,1,32,256,8,1,1,0,38,39273,36.7,ok": "'9B': its shape is not known",
        "1B,1,8,1,32,256,8,1,1,0,38,39273,,OOM": "status 'OOM'",
        "1B,1,9,1,32,256,8,1,1,0,38,39273,36.7,ok": "dp x pp x tp = 8 is not gpus = 9",
        "1B,1,8,x,32,256,8,1,1,0,38,39273,36.7,ok": "micro_batch = 'x'",
        "1B,1,8,1,32,256,8,1,1,0,38,nan,36.7,ok": "tokens_s_gpu = 'nan'",
        "1B,1,8,1,32,256,8,1,1,7,38,39273,36.7,ok": "zero_stage = 7: choose one of",
        "1B,1,8,1,32,256,8,1,1,0,38,,,ok": "no peak memory and no speed",
        "1B,1,8": "fewer columns",
    }
    rows = read_figures(write(tmp_path / "a.csv", PLAYBOOK, *bad))
    for line, (row, reason) in enumerate(zip(rows, bad.values(), strict=True), start=2):
        assert row.run is None
        assert f"line {line}: " in row.reason
        assert reason in row.reason


def test_foundry_rows_are_fsdp_runs_and_fp8_is_refused(tmp_path: Path) -> None:
    good = "S,7b,2048,8,a100_80gb,60,6,2,96,4641,{},DEFAULT,SHARD_GRAD_OP,{},False,6658859008,32,4096,32,4,50368"
    path = write(tmp_path / "a.csv", FOUNDRY, good.format("amp_bf16", "True"), good.format("amp_fp8", "False"))
    row, refused = read_figures(path)
    assert row.run is not None
    assert row.memory_bytes is None
    assert (row.run.zero_stage, row.run.recompute, row.run.mlp, row.run.dp) == (2, "full", "gelu", 8)
    assert row.run.num_params == pytest.approx(6658859008, rel=5e-3)
    assert "fp8" in refused.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vision_part": "SigLIP"}, "vision part"),
        ({"model": "Qwen-7B LoRA"}, "LoRA"),
        ({"precision": "float8 linears"}, "fp8"),
        ({"shard_mode": "FSDP + CPU offload"}, "offloading"),
        ({"gpu": "RTX 4090"}, "no datasheet"),
        ({"gpu": "V100 32GB"}, "v100-32 has no hardware path for 'bf16'"),
        ({"act_ckpt": "on"}, "does not say what is kept"),
        ({"n_gpus": "16"}, "is not n_gpus = 16"),
        ({"vpp": "3"}, "interleaved"),
        ({"group": "DeepSpeed estimator"}, "another estimator"),
        ({"heads": "", "hidden": "61", "tp": "2", "n_gpus": "16"}, "heads is not stated"),
        ({"pp": "2", "n_gpus": "16", "grad_accum": ""}, "micro-batches are not known"),
    ],
)
def test_published_rows_that_cannot_be_described_say_why(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    (row,) = read_figures(write(tmp_path / "a.csv", PUBLISHED, published(**changes)))
    assert row.run is None
    assert reason in row.reason


def test_published_speeds_come_from_tokens_or_steps_or_mfu(tmp_path: Path) -> None:
    rows = [
        published(),
        published(tokens_s_gpu="", step_time_s="4"),
        published(tokens_s_gpu="", mfu_pct="40"),
        published(tokens_s_gpu="", peak_mem="2*72"),
    ]
    stated, stepped, from_mfu, silent = read_figures(write(tmp_path / "a.csv", PUBLISHED, *rows))
    assert stated.tokens_per_s == 6000
    assert stepped.tokens_per_s == 2 * 8192 / 4
    # 6 x 7.5e9 (without the embedding) + 12 x 32 x 4096 x 8192 FLOPs a token, at 0.4 x 989.5e12.
    assert from_mfu.tokens_per_s == pytest.approx(0.4 * 989.5e12 / (6 * 7.505e9 + 12.885e9), rel=1e-3)
    assert "no peak memory" in silent.reason


def test_predictions_grow_with_what_they_should(tmp_path: Path) -> None:
    small, large, full = read_figures(
        write(
            tmp_path / "a.csv",
            PUBLISHED,
            published(),
            published(micro_batch="4"),
            published(act_ckpt="full"),
        )
    )
    memory = [predict_memory_bytes(row) or 0 for row in (full, small, large)]
    assert memory == sorted(memory)
    assert (predict_tokens_per_s(full) or 0) < (predict_tokens_per_s(small) or 0)


def test_a_table_of_another_shape_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", PLAYBOOK.replace(",tp,", ",tensor,"), "")
    with pytest.raises(ValueError, match="of playbook's it lacks tp"):
        read_figures(path)


def test_errors_and_percentiles_by_hand() -> None:
    assert percentile([1, 2, 3, 4, 5], 90) == pytest.approx(4.6)
    assert error_summary([(11, 10), (8, 10), (10, 10)]) == (pytest.approx(10), pytest.approx(18))
    assert error_summary([]) == (None, None)
    with pytest.raises(ValueError, match="percent = 101"):
        percentile([1.0], 101)


def test_rank_correlation_with_ties_and_regret_by_hand() -> None:
    assert spearman([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    # Ranks 0.5, 0.5, 2, 3 and 0, 1, 2, 3: 4.5 / sqrt(4.5 x 5).
    assert spearman([(1, 1), (1, 2), (2, 3), (3, 4)]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([(1, 1), (1, 2)]) is None
    triples = [("a", 1.0, 5.0), ("a", 2.0, 4.0), ("a", 3.0, 1.0), ("b", 1.0, 1.0), ("b", 2.0, 2.0)]
    assert mean_spearman(triples) == pytest.approx(-1)  # two plans of b are too few
    assert mean_regret_pct(triples) == pytest.approx((80 + 0) / 2)
    assert mean_regret_pct([("a", 1.0, 1.0), ("a", 1.0, 2.0)]) == pytest.approx(50)  # equal: the worst of them
    assert mean_regret_pct([("a", 1.0, 1.0)]) is None


def test_the_interval_holds_what_either_kind_of_run_keeps(tmp_path: Path) -> None:
    lines = (
        "8B,1,8,2,64,128,1,1,8,0,30,9000,50.0,ok",  # keeps gathered inputs: no pipeline
        "8B,2,16,2,64,128,1,2,8,0,30,9000,50.0,ok",  # does not
        "8B,1,8,2,64,128,8,1,1,0,30,9000,{},ok",  # nothing is gathered
    )
    kept, dropped, alone = read_figures(write(tmp_path / "a.csv", PLAYBOOK, *(line.format(50) for line in lines)))
    (kept_least, kept_most), (least, most) = memory_interval(kept) or (0, 0), memory_interval(dropped) or (0, 0)
    assert kept_least < kept_most == predict_memory_bytes(kept)
    assert predict_memory_bytes(dropped) == least < most
    # Two products of each of 32 layers keep 7/8 of 2 x 4096 tokens of 4096 two-byte elements more.
    assert kept_most - kept_least == 32 * 2 * 2 * 4096 * 4096 * 2 * 7 / 8
    point = memory_interval(alone) or (0, 0)
    assert point[0] == point[1]
    measured = [f"{point[0] / 2**30 * factor:.3f}" for factor in (0.94, 0.96, 1.04, 1.06)]
    rows = read_figures(write(tmp_path / "b.csv", PLAYBOOK, *(lines[2].format(gib) for gib in measured)))
    assert count_within(rows) == (2, 4, 0)
    assert count_within([kept, dropped])[1:] == (2, 2)


def test_the_command_prints_the_keys_and_null_where_there_is_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        f"1B,1,8,{mb},{256 // 8 // mb},256,8,1,1,0,38,{tokens},36.7,ok"
        for mb, tokens in ((1, 39000), (2, 41000), (4, 43000))
    ]
    path = write(tmp_path / "a.csv", PLAYBOOK, *rows, "9B,1,8,1,32,256,8,1,1,0,38,39273,36.7,ok")
    assert cli.main(["validate", str(path), "--json"]) == 0
    known, unknown = json.loads(capsys.readouterr().out)["groups"]
    assert tuple(known) == tuple(unknown) == KEYS
    assert (known["name"], known["rows"], known["used"]) == ("1B", 3, 3)
    assert all(isinstance(known[name], float) for name in KEYS[3:])
    assert (unknown["rows"], unknown["used"]) == (1, 0)
    assert all(unknown[name] is None for name in KEYS[3:])
    assert cli.main(["validate", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "1B: 3 of 3 rows used" in shown
    assert "1 not used: model '9B': its shape is not known" in shown


def test_the_command_refuses_a_table_without_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", str(write(tmp_path / "a.csv", PLAYBOOK))]) == 2
    assert "has no rows" in capsys.readouterr().err
    assert cli.main(["validate", str(tmp_path / "none.csv")]) == 2
