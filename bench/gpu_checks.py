"""Everything that only a GPU can show, run on the GPUs at hand, as one table: check, outcome, what was seen.

    python bench/gpu_checks.py            # needs 1 GPU for some checks, 2 for the rest
    python bench/gpu_checks.py --out results.md

A check that needs more GPUs than there are is skipped and says so; one that fails, in whatever way, is a row of the
table and makes the exit code 1. The table names the card, the driver and torch, so that it can be committed as a
record. Times are not asserted.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.cuda import nccl

from vlmcourse.config import load_config
from vlmcourse.data.questions import KINDS
from vlmcourse.grading.process import QUIET_KERNEL
from vlmcourse.monitor.alloc_conf import NAMES as ALLOC_CONF_NAMES
from vlmcourse.monitor.diagnosis import diagnose, read_run
from vlmcourse.monitor.loop_log import log_loop
from vlmcourse.monitor.op_dtypes import measure_autocast_policy
from vlmcourse.monitor.peak import find_peak
from vlmcourse.monitor.step_clock import PHASES, tells_communication
from vlmcourse.monitor.step_log import read_step_log
from vlmcourse.planner.auto import settle_run
from vlmcourse.planner.this_cluster import find_cluster
from vlmcourse.presets import get_model
from vlmcourse.strategies import DEEPSPEED, ENGINES
from vlmcourse.train.fp8 import Fp8Linear, convert_to_fp8, has_real_fp8

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS = 20
TIMEOUT_S = 300
MAX_SHOWN = 500
"""Characters of an error that go into the table."""
FORKED_CELL = """%%torchrun -n 2
import json, os, psutil, torch, torch.distributed as dist
numbers = torch.full((4,), rank + 1.0, device=device)
dist.all_reduce(numbers)
server = psutil.Process(psutil.Process(os.getppid()).ppid())  # the rank's parent is its guard
is_forked = "fork_server" in " ".join(server.cmdline())
print(json.dumps({"rank": rank, "device": str(device), "sum": numbers.tolist(), "is_forked": is_forked}))
"""


class NotHereError(Exception):
    """The check asks for something that this machine does not have; the message says what."""


@dataclass(frozen=True)
class Check:
    """One claim about GPUs."""

    name: str
    gpus: int
    run: Callable[[], str]
    """Returns what was seen; raises `NotHereError`, or any other exception where the claim is false."""


def train(strategy: str, nproc: int, precision: str = "fp32", **overrides: Any) -> dict:
    """Train the tiny model for a few steps in processes of their own and return the result with all losses.

    Args:
        strategy: single, ddp or fsdp.
        nproc: ranks; one GPU each.
        precision: one of `precision_rules.PRECISIONS`.
        overrides: further values, by name with `__` for the dot.
    """
    with tempfile.TemporaryDirectory() as folder:
        values = {
            "run.output_dir": folder,
            "parallel.strategy": strategy,
            "train.precision": precision,
            "train.num_steps": NUM_STEPS,
            "train.micro_batch_size": 64 // nproc,
            "train.log_every": 1,
            "data.num_train_samples": 2048,
            "data.num_eval_samples": 64,
        } | {key.replace("__", "."): value for key, value in overrides.items()}
        command = [sys.executable, "-m", "vlmcourse.cli", "train", "configs/tiny.toml", "--json"]
        command += ["--nproc", str(nproc)] if nproc > 1 else []
        for key, value in values.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        result = json.loads(done.stdout.splitlines()[-1])
        log = next(Path(values["run.output_dir"]).rglob("log.jsonl"))
        result["rows"] = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        result["losses"] = [row["loss/total"] for row in result["rows"]]
        logs = read_step_log(log.parent)
        result["steps"] = {rank: of_rank.steps for rank, of_rank in logs.items()}
        result["events"] = {rank: of_rank.events for rank, of_rank in logs.items()}
    return result


def largest_gap(first: dict, second: dict) -> float:
    """Return the largest difference of two runs' losses at the same step."""
    assert len(first["losses"]) == len(second["losses"]) == NUM_STEPS
    return max(abs(a - b) for a, b in zip(first["losses"], second["losses"], strict=True))


def check_single() -> str:
    """The tiny model learns on one GPU and its peak memory is read from the CUDA allocator."""
    result = train("single", 1)
    assert result["loss_last"] < result["loss_first"], result
    assert "cuda" in result["peak_is"].lower(), f"peak memory is {result['peak_is']!r}, not the CUDA allocator's"
    return f"loss {result['loss_first']:.3f} -> {result['loss_last']:.3f}, {result['peak_bytes'] / 2**20:.0f} MiB peak"


def check_step_clock(strategy: str, nproc: int) -> str:
    """Events time every step; its parts add up; waiting, in events too, is told where it can be and absent else."""
    result = train(strategy, nproc)
    tells = tells_communication(strategy, torch.device("cuda"))
    for rank, steps in result["steps"].items():
        assert [record.step for record in steps] == list(range(1, NUM_STEPS + 1)), f"rank {rank}: {len(steps)} steps"
        for record in steps:
            parts = [getattr(record, f"{phase}_s") for phase in PHASES]
            assert (parts[PHASES.index("communication")] is not None) == tells, record
            assert abs(sum(part or 0.0 for part in parts) - record.step_s) < 0.01 * record.step_s, record
            assert record.forward_s and record.backward_s and record.allocated_bytes, record
            assert (record.waits_s is not None) == tells, record
            assert abs(sum(record.waits_s or ()) - (record.communication_s or 0.0)) < 1e-3, record
    for event in (event for events in result["events"].values() for event in events):
        assert (event.communication_s is not None) == tells, event
        assert (event.communication_s or 0.0) <= 1.01 * event.seconds + 1e-3, event
    row = result["rows"][-1]
    peak = find_peak(torch.device("cuda", 0), "fp32")
    assert ("performance/mfu" in row) == (peak is not None) and row["memory/peak_reserved_gib"] > 0, row
    kinds = [row[f"loss/{kind.name}"] for kind in KINDS]  # every answer of the digits has a kind
    assert min(kinds) <= row["loss/total"] <= max(kinds), row
    # The clock's events and the log's wall clock must tell of the same steps.
    warm = result["steps"][0][5:]
    event_ms = 1e3 * fmean(record.step_s for record in warm)
    wall_ms = 1e3 * fmean(later.start_s - earlier.start_s for earlier, later in pairwise(warm))
    mfu = f"mfu {row['performance/mfu']:.4f}" if peak else "the peak of this card is not known"
    return f"steps {event_ms:.1f} ms by events, {wall_ms:.1f} ms from start to start; {mfu}"


def check_diagnosis() -> str:
    """A diagnosis of a run on a GPU knows the device, counts the allocator's retries, and blames it for none."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"run__output_dir": folder, "train__log_every": 5, "logging__hardware_every_s": 0.2}
        result = train("single", 1, **settings)
        found = diagnose(Path(folder) / "tiny")
    steps = result["steps"][0]
    assert all(record.alloc_retries is not None for record in steps), steps[0]
    shown = [finding.cause for finding in (*found.findings, *found.below)]
    assert steps[-1].alloc_retries or "memory_thrash" not in shown, found
    return str(found).partition(": ")[2]


def check_loop_log() -> str:
    """A loop of one's own on a GPU: every step is written, its phases are there and add up."""
    model = torch.nn.Linear(2048, 2048, device="cuda")
    adamw = torch.optim.AdamW(model.parameters())
    batches = [torch.randn(512, 2048, device="cuda") for _ in range(12)]
    with tempfile.TemporaryDirectory() as folder:
        for x in log_loop(batches, folder, model):
            model(x).square().mean().backward()
            adamw.step()
            adamw.zero_grad()
        steps, device = read_step_log(folder)[0].steps, read_run(folder).device
    assert len(steps) == 12 and device == "cuda", (len(steps), device)
    for record in steps:
        parts = [getattr(record, f"{phase}_s") for phase in PHASES]
        assert abs(sum(parts) - record.step_s) < 1e-3 * record.step_s + 1e-6, record
        assert record.forward_s and record.backward_s and record.optimizer_s and record.allocated_bytes, record
    return f"12 steps; backward {1e3 * (steps[-1].backward_s or 0):.2f} ms of {1e3 * steps[-1].step_s:.2f} in the last"


def check_bf16() -> str:
    """Autocast to bf16 stays near fp32."""
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise NotHereError(f"{torch.cuda.get_device_name(0)} computes no bf16")
    gap = largest_gap(train("single", 1), train("single", 1, "bf16"))
    assert gap < 0.1, f"losses of bf16 and fp32 differ by {gap:.4f}"
    return f"largest difference of losses to fp32 {gap:.4f}"


def check_precision(precision: str, strategy: str = "single", nproc: int = 1) -> str:
    """A precision of chapter 3 stays near fp32: fp16 with its scaler, bf16 weights, fp8."""
    if precision != "fp16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise NotHereError(f"{torch.cuda.get_device_name(0)} computes no bf16")
    gap = largest_gap(train("single", 1), train(strategy, nproc, precision))
    assert gap < 0.3, f"losses of {precision} and fp32 differ by {gap:.4f}"
    return f"largest difference of losses to fp32 {gap:.4f}"


def check_real_fp8() -> str:
    """Torchao's fp8 layers take the place of plain ones, also for token counts that 16 does not divide, and train."""
    device = torch.device("cuda", 0)
    if not has_real_fp8(device):
        raise NotHereError("needs a GPU of compute capability 8.9 or newer, and torchao")
    plain = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 24)).to(device)
    converted = copy.deepcopy(plain)
    convert_to_fp8(converted, device)
    kinds = [type(layer) for layer in converted]
    # 24 is no multiple of 16.
    assert not issubclass(kinds[0], Fp8Linear) and kinds[0] is not kinds[1] is torch.nn.Linear, kinds
    x, given = torch.randn(37, 64, device=device), torch.randn(37, 24, device=device)
    gradients = []
    for model in (plain, converted):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = model(x)
        gradients += torch.autograd.grad(y, [model.get_parameter("0.weight")], given.to(y.dtype))
    off = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    assert 1e-3 < off < 0.2, (
        f"the gradient of a weight is {off:.4f} off that of bf16: fp8's roundings give a few percent"
    )
    return f"{check_precision('fp8')}; a weight's gradient {100 * off:.1f} % off that of bf16"


def check_autocast_policy() -> str:
    """Autocast on a GPU raises softmax and the loss to fp32, and lowers matrix products."""
    policy = {row.op: row.policy for row in measure_autocast_policy(torch.float16, "cuda")}
    assert policy["linear"] == "lowers" and policy["softmax"] == policy["cross_entropy"] == "raises", policy
    return ", ".join(f"{op} {what}" for op, what in policy.items())


def check_parity(strategy: str, *, tolerance: float = 1e-3, **overrides: Any) -> str:
    """Two ranks over NCCL give the losses of one GPU."""
    gap = largest_gap(train("single", 1), train(strategy, 2, **overrides))
    assert gap < tolerance, f"losses of {strategy} on 2 ranks and of one rank differ by {gap:.2e}"
    return f"largest difference of losses to one GPU {gap:.1e}"


def check_shared_samples(**overrides: Any) -> str:
    """Two ranks that share their samples (tensor, context or pipeline parallelism) give the losses of one GPU."""
    strategy = "fsdp" if "parallel__cp" in overrides else "single"
    split = {"train__micro_batch_size": 16, "train__accumulation_steps": 4}
    return check_parity(strategy, **split, **overrides)


def check_auto() -> str:
    """`strategy = "auto"` on GPUs chooses what the search finds for this card, and trains with it.

    On a card that planner/hardware.py does not know it trains by the rule, and the row says so.
    """
    here = find_cluster(2, os.environ)
    result = train("auto", 2)
    assert result["loss_last"] < result["loss_first"], result
    config = load_config(ROOT / "configs/tiny.toml", {"parallel.strategy": "auto", "train.micro_batch_size": 32})
    chosen, reason = settle_run(config, 2, get_model("tiny"))
    assert result["strategy"] == chosen.strategy, f"ranks trained with {result['strategy']}, the search says {chosen}"
    assert isinstance(here, str) == ("without a search" in reason), f"{here}: {reason}"
    return " ".join(f"{chosen.strategy}: {reason}".split())[:MAX_SHOWN]


def check_links() -> str:
    """The links between GPUs are measured with CUDA events, and a straight line fits."""
    done = subprocess.run(
        [sys.executable, "bench/comm.py"], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    over_nccl = re.search(r"^Machine: 2 ranks, nccl, ", done.stdout, re.MULTILINE)
    assert over_nccl, f"not measured over NCCL, and so not with CUDA events: {done.stdout}"
    poor = [line.split(" | ")[0].strip("| ") for line in done.stdout.splitlines() if "poor fit" in line]
    assert not poor, f"no straight line fits {', '.join(poor)}: {done.stdout}"
    return " ".join(done.stdout.split())


def check_activations() -> str:
    """Recompute and offload on a GPU: equal gradients, counted bytes, and a ledger that agrees with the allocator."""
    from vlmcourse.labs import ch04
    from vlmcourse.models.decoder import rope_tables
    from vlmcourse.monitor.activations import ActivationMeter
    from vlmcourse.monitor.ledger import StepLedger
    from vlmcourse.planner.layer_activations import count_language_layer_bytes, count_vision_layer_bytes
    from vlmcourse.train.offload import Offloading

    model, batch = ch04.load_deep()
    model, batch = model.cuda(), batch.to(torch.device("cuda"))
    expected = None
    for policy in ("none", "full", "selective", "offload"):
        ch04.set_policies(model, *[policy if policy != "offload" else "none"] * 2)
        model.zero_grad()
        with Offloading().hooks() if policy == "offload" else torch.enable_grad():
            ch04.forward_backward(model, batch)
        gradient = ch04.flat_gradient(model)
        expected = gradient if expected is None else expected
        assert ch04.relative_error(gradient, expected) < 1e-4, f"{policy}: other gradients"
    shape = model.shape
    x_vision = torch.randn(4, 17, shape.vision.hidden_size, device="cuda", requires_grad=True) * 1
    x_text = torch.randn(2, 40, shape.language.hidden_size, device="cuda", requires_grad=True) * 1
    tables = rope_tables(torch.arange(40, device="cuda")[None], 24, 1e4)
    counted = (
        sum(count_vision_layer_bytes(shape.vision, 4, 17, 4, fused_norms=True).values()),
        sum(count_language_layer_bytes(shape.language, 2, 40, 4, fused_norms=True).values()),
    )
    measured = []
    for block, arguments in ((model.vision.blocks[0], (x_vision,)), (model.language.blocks[0], (x_text, *tables))):
        with ActivationMeter() as meter:
            block(*arguments).sum()
        measured.append(meter.live_bytes - sum(table.nbytes for table in arguments[1:]))
    ch04.set_policies(model, "none", "none")
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with StepLedger(model) as ledger:
        ch04.forward_backward(model, batch)
    seen = ledger.peak().total_bytes - ledger.samples[0].total_bytes
    allocated = torch.cuda.max_memory_allocated() - before
    assert 0.8 * allocated <= seen <= 1.05 * allocated, f"the ledger saw {seen:,} of {allocated:,} bytes"
    return (
        f"equal gradients; a vision and a decoder block keep {measured[0]:,} and {measured[1]:,} bytes, by the formula "
        f"{counted[0]:,} and {counted[1]:,}; the ledger saw {seen:,} of {allocated:,} bytes"
    )


ALLOCATOR_PROGRAM = """
import json, sys, torch
from vlmcourse.labs.fragmentation import batches_as_they_come, fragmentation_shape, mixed_resolutions
from vlmcourse.models.vlm import build_model
from vlmcourse.monitor.alloc_conf import check_alloc_conf
from vlmcourse.monitor.allocator_check import compare_with_simulator
from vlmcourse.monitor.cuda_snapshot import read_map, record_history, take_snapshot
from vlmcourse.train.accumulate import micro_batch_loss_sum
verdict = check_alloc_conf()
record_history()
model = build_model(fragmentation_shape(), seed=0).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for batch in batches_as_they_come(mixed_resolutions(24), 4):
    batch = batch.to("cuda")
    loss = micro_batch_loss_sum(model, batch, "fp32") / batch.num_supervised_tokens
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    large = torch.empty(sum(batch.tiles_per_sample) * 2**20, device="cuda")  # 12 MiB and more: a segment of its own
    del batch, loss
snapshot = take_snapshot()
found, seen = compare_with_simulator(snapshot), read_map(snapshot)
same = (seen.reserved_bytes, seen.allocated_bytes) == (torch.cuda.memory_reserved(), torch.cuda.memory_allocated())
print(json.dumps({"equal": found.is_equal, "same": same, "said": found.describe(), "setting": verdict.state}))
"""


def check_planned_memory() -> str:
    """The planner's bytes beside a ledger's of real steps on a GPU, whose norms keep less than a CPU's."""
    from vlmcourse.labs.memory_check import CHECKED, TOLERANCE, compare, comparison_table
    from vlmcourse.parallel.ranks import init_ranks

    names = ("one rank", "accumulation", "recomputed", "vision frozen", "language frozen")
    rows = [compare(name, CHECKED[1][name], init_ranks()) for name in names]
    assert all(row.worst <= TOLERANCE for row in rows), comparison_table(rows)
    return "; ".join(f"{row.strategy}: {row.worst:.1%} by owner, peak {row.peak_error:+.1%}" for row in rows)


def check_allocator(settings: str = "") -> str:
    """The simulated allocator reserves what the real one does, after every allocation and free of training steps."""
    environment = {name: value for name, value in os.environ.items() if name not in ALLOC_CONF_NAMES}
    environment |= {"PYTORCH_ALLOC_CONF": settings} if settings else {}
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATOR_PROGRAM],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["setting"] == ("in effect" if settings else "unset"), f"{settings!r} is {found['setting']}"
    assert found["same"], "the map of the snapshot has other bytes than memory_reserved() and memory_allocated()"
    assert found["equal"], found["said"]
    return found["said"]


def check_nccl() -> str:
    """Ranks choose NCCL and a GPU each, and an all-reduce is right."""
    code = (
        "import torch, torch.distributed as dist\n"
        "from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks\n"
        "r = init_ranks(); x = torch.full((4,), r.rank + 1.0, device=r.device); dist.all_reduce(x)\n"
        "assert r.backend == 'nccl' and r.device.type == 'cuda' and x.tolist() == [3.0] * 4, (r, x)\n"
        "print(r); shutdown_ranks()\n"
    )
    from vlmcourse.notebook.launcher import run_ranks

    lines: list[str] = []
    run_ranks([sys.executable, "-c", code], 2, timeout_s=120, on_line=lambda rank, line: lines.append(line))
    assert sum("nccl" in line for line in lines) == 2, lines
    return "; ".join(sorted(line for line in lines if "nccl" in line))


def run_forked_cell() -> list[dict]:
    """Run a cell on two ranks in a real kernel and return what each rank said."""
    import nbclient
    import nbformat

    cells = [nbformat.v4.new_code_cell(source) for source in ("%load_ext vlmcourse", FORKED_CELL)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook, timeout=TIMEOUT_S, extra_arguments=list(QUIET_KERNEL), resources={"metadata": {"path": folder}}
        )
        client.execute()
    printed = "".join(output.get("text", "") for output in cells[-1].outputs)
    said = dict(re.findall(r"^\[(\d)\] (\{.*\})$", printed, re.MULTILINE))
    assert sorted(said) == ["0", "1"], f"not both ranks said something: {printed!r}"
    return [json.loads(said[rank]) for rank in "01"]


def check_forked() -> str:
    """Ranks that the notebook's server splits off use a GPU each."""
    if sys.platform != "linux" or not torch.distributed.is_nccl_available():
        raise NotHereError("needs Linux, where ranks are forked, and a torch with NCCL")
    ranks = run_forked_cell()
    for rank, seen in enumerate(ranks):
        assert seen == {"device": f"cuda:{rank}", "sum": [3.0] * 4, "is_forked": True}, f"rank {rank}: {seen}"
    return "; ".join(f"rank {rank} on {seen['device']}" for rank, seen in enumerate(ranks))


def check_accumulated(strategy: str, **overrides: Any) -> str:
    """Two GPUs that add up four micro-batches give the losses of one GPU with as many samples at once."""
    shared: dict[str, Any] = {key: value for key, value in overrides.items() if key.startswith("train__")}
    sizes: dict[str, Any] = {"train__micro_batch_size": 8, "train__accumulation_steps": 4}
    gap = largest_gap(train("single", 1, **shared), train(strategy, 2, **overrides, **sizes))
    assert gap < 1e-3, f"losses differ by {gap}"
    return f"largest difference of {NUM_STEPS} losses {gap:.1e}"


def check_engine(strategy: str) -> str:
    """Two GPUs under an engine of DeepSpeed or accelerate give the losses of one GPU; the engine checks what it is."""
    packages = ["deepspeed"] * (strategy in DEEPSPEED) + ["accelerate"] * strategy.startswith("accelerate")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise NotHereError(f"needs {' and '.join(missing)}")
    return check_parity(strategy)


def run_on_two(code: str, num_ranks: int = 2) -> Any:
    """Run a script on two GPUs, or on one rank, and return what it printed last, read as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(code, encoding="utf-8")
        ranks = f"--nproc-per-node={num_ranks}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, str(script)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_pair(imports: str, result: str, num_ranks: int = 2) -> Any:
    """Run an expression of `ranks` on two GPUs or one, after some imports; return what rank 0 has, by way of JSON."""
    code = (
        f"import json\n{imports}\n"
        "from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks\n"
        f"ranks = init_ranks()\nfound = {result}\n"
        "print(json.dumps(found)) if ranks.is_main else None\nshutdown_ranks()\n"
    )
    return run_on_two(code, num_ranks)


def check_batch_norm() -> str:
    """Gradients of the BatchNorm lab on two GPUs: what is right there on CPU ranks is right here, and only that."""
    errors = run_pair("from vlmcourse.labs.batch_norm import compare_norms", "compare_norms(ranks)")
    right = {norm: sum(error < 1e-4 for error in of_norm.values()) for norm, of_norm in errors.items()}
    assert right == {"BatchNorm": 0, "SyncBatchNorm": 1, "frozen BatchNorm": 3, "GroupNorm": 3}, errors
    return f"cuts of 3 that are right: {right}"


def check_zero_tables(function: str, num_ranks: int = 2) -> str:
    """State or traffic of every stage of ZeRO on two GPUs, or one, is what the formula and its differences say."""
    if importlib.util.find_spec("deepspeed") is None:
        raise NotHereError("needs deepspeed")
    imports = f"from vlmcourse.labs.zero_stages import {function} as measure"
    found = run_pair(imports, "measure(ranks=ranks).problems()", num_ranks)
    assert not found, found
    return "nothing unexplained"


def check_engine_table() -> str:
    """DeepSpeed's ZeRO-3 and FSDP2 in turns on two GPUs train the same model; shows the table's words on speed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise NotHereError("needs deepspeed")
    imports = "from vlmcourse.labs.engine_table import compare_engines"
    gap, lines = run_pair(imports, "[(t := compare_engines(ranks=ranks)).loss_gap, str(t).splitlines()[:3]]")
    assert gap < 1e-3, gap
    return "; ".join(lines)


def check_scaling() -> str:
    """Scaling over 1 and 2 GPUs: NCCL's group is left and joined again for each run, and the losses add up."""
    imports = "from vlmcourse.labs.scaling import measure_scaling"
    asked = "[str(r), r.num_cores, [sum(o.shares.values()) - o.lost for o in r.losses]]"
    found = run_pair(imports, f"[{asked} for r in measure_scaling(ranks=ranks).values()]")
    assert all(cores is None and max(map(abs, gaps)) < 1e-9 for _, cores, gaps in found), found
    return "; ".join(" ".join(text.split()) for text, *_ in found)


def check_tuning() -> str:
    """From naive to tuned on two GPUs: one training, and less memory after each change; shows what the speeds are."""
    imports = "from vlmcourse.labs.tuning import measure_tuning"
    asked = "[[row.change, row.tokens_per_s, row.peak_bytes, row.loss] for row in measure_tuning(ranks=ranks)]"
    rows = run_pair(imports, asked)
    names, speeds, peaks, losses = zip(*rows, strict=True)
    assert max(losses) - min(losses) < 0.05, losses
    way = [peak for name, peak in zip(names, peaks, strict=True) if not name.startswith("+")]
    assert way == sorted(way, reverse=True), peaks
    return "; ".join(f"{name} {speed / speeds[0]:.1f} x" for name, speed in zip(names, speeds, strict=True))


def check_fsdp_memory() -> str:
    """FSDP's peak on two GPUs is below one GPU's, for a model whose state dominates."""
    small = {"model__preset": "small", "train__micro_batch_size": 2}
    one, two = train("single", 1, **small), train("fsdp", 2, **small)
    ratio = two["peak_bytes"] / one["peak_bytes"]
    assert ratio < 1, f"fsdp took {ratio:.2f} of one GPU's peak"
    return f"peak of fsdp on 2 GPUs is {ratio:.2f} of one GPU's"


IN_MAIN_MEMORY = {"offload__optimizer": "cpu", "offload__parameters": "cpu"}


def check_offload_memory() -> str:
    """FSDP's peak on two GPUs is lower where the shards lie in main memory, for a model whose state dominates."""
    small = {"model__preset": "small", "train__micro_batch_size": 2}
    here, away = train("fsdp", 2, **small), train("fsdp", 2, **small, **IN_MAIN_MEMORY)
    ratio = away["peak_bytes"] / here["peak_bytes"]
    assert ratio < 1, f"with offloading fsdp took {ratio:.2f} of its peak without"
    return f"peak of fsdp with its shards in main memory is {ratio:.2f} of that without"


def check_budget() -> str:
    """Lab 5 on two GPUs: with weights and optimizer in main memory a step holds less there, and keeps its budget."""
    code = (
        "import json\nfrom vlmcourse.labs.ch05 import HEADROOM_FRACTION, needed_bytes, run_within_budget\n"
        "from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks\n"
        "ranks = init_ranks()\nhere = run_within_budget(10**9, ranks)\n"
        "need = needed_bytes(here.decision)['optimizer+parameters']\n"
        "away = run_within_budget(int(need / (1 - HEADROOM_FRACTION)) + 1, ranks)\n"
        "found = [here.held_bytes, away.held_bytes, away.kept_within, str(away)]\n"
        "print(json.dumps(found)) if ranks.is_main else None\n"
        "shutdown_ranks()\n"
    )
    here_bytes, away_bytes, is_kept, text = run_on_two(code)
    assert away_bytes < here_bytes and is_kept, text
    return f"{text}; {here_bytes / 1e6:.3f} MB with everything there"


STEERED = """
import json
from vlmcourse.config import parse_config
from vlmcourse.parallel.ranks import init_ranks, shutdown_ranks
from vlmcourse.train.controlled import ControlledRun
from vlmcourse.train.trainer import Trainer
SCRIPT = {
    2: [{"action": "balance", "by": "tokens", "shares": [0.6, 0.4]}],
    3: [{"action": "recompute", "tower": "vision", "policy": "full"}],
    4: [{"action": "micro_batch", "micro_batch_size": 2, "accumulation_steps": 4}, {"action": "compress", "on": True}],
}
ranks = init_ranks()
table = {"train": {"num_steps": 8, "micro_batch_size": 4, "accumulation_steps": 2}, "parallel": {"strategy": "ddp"}}
losses, seen, steered = [], [], None
for is_steered in (False, True):
    trainer = Trainer(parse_config(table, {}), ranks, show_progress=False)
    if is_steered:
        steered = ControlledRun(trainer, lambda metrics: seen.append(metrics) or SCRIPT.get(len(seen)))
        trainer.after_step.append(steered)
    losses.append([trainer.train_step().loss for _ in range(8)])
peaks = [max(metrics["peak_bytes"]) for metrics in seen]
found = [losses, [done for _, done in steered.done], steered.refused, peaks, seen[0]["device_bytes"] if seen else 0]
print(json.dumps(found)) if ranks.is_main else None
shutdown_ranks()
"""


def check_steered() -> str:
    """A controller steers a run of two GPUs: what it asks for is done, and losses are those of the run left alone."""
    (alone, steered), done, refused, peaks, device_bytes = run_on_two(STEERED)
    gap = max(abs(one - other) for one, other in zip(alone, steered, strict=True))
    assert gap < 1e-3 and len(refused) == 1, (gap, refused)
    assert len(done) >= 2 and 0 < max(peaks) < device_bytes, (done, peaks, device_bytes)
    return f"{'; '.join(done)}; losses within {gap:.1e}; peak {max(peaks) / 1e6:.1f} MB of {device_bytes / 1e9:.0f} GB"


def check_layered() -> str:
    """FSDP on two GPUs needs less on them with one layer at a time than with one fetched ahead; losses are equal."""
    full = {"model__preset": "small", "activations__vision": "full", "activations__language": "full"}
    ahead = train("fsdp", 2, **full, **IN_MAIN_MEMORY)
    layered = train("fsdp", 2, **full, **IN_MAIN_MEMORY, offload__layered=True)
    gap, ratio = largest_gap(ahead, layered), layered["peak_bytes"] / ahead["peak_bytes"]
    assert ratio < 1 and gap < 1e-4, f"layered took {ratio:.2f} of the peak, losses differ by {gap:.1e}"
    return f"peak with one layer at a time is {ratio:.2f} of that with one ahead; losses differ by {gap:.1e}"


def check_levels() -> str:
    """Every level of offload on two GPUs holds less there than the one before, under FSDP2 and under DeepSpeed."""
    gap, rows = run_pair(
        "from vlmcourse.labs.offload_levels import compare_offload_levels",
        "[(t := compare_offload_levels(ranks=ranks)).loss_gap, "
        "[(row.strategy, row.level, row.account.held_bytes) for row in t.rows if row.account]]",
    )
    for strategy in ("fsdp", "deepspeed-zero3"):
        held = [size for name, _, size in rows if name == strategy]
        assert held == sorted(set(held), reverse=True), rows
    assert gap < 1e-3, f"losses differ by {gap:.1e}"
    return "; ".join(f"{strategy} {level} {size / 1e6:.3f} MB" for strategy, level, size in rows)


def check_nvme() -> str:
    """DeepSpeed's ZeRO-3 with its state in files gives the losses of one GPU; the run refuses itself without files."""
    with tempfile.TemporaryDirectory() as folder:
        in_files = {"offload__optimizer": "nvme", "offload__parameters": "nvme", "offload__nvme_path": folder}
        model: dict[str, Any] = {"model__preset": "small"}
        one = train("single", 1, **model, train__micro_batch_size=4)
        try:
            gap = largest_gap(one, train("deepspeed-zero3", 2, **model, **in_files, train__micro_batch_size=2))
        except RuntimeError as error:
            if "libaio" in str(error) or "direct I/O" in str(error):
                raise NotHereError(str(error).splitlines()[-1]) from error
            raise
    assert gap < 1e-3, f"losses with state in files and of one GPU differ by {gap:.2e}"
    return f"largest difference of losses to one GPU {gap:.1e}"


GPU_PROBE = """
import json, sys, time, torch
from vlmcourse.monitor.gpu import HardwareSampler
from vlmcourse.monitor.nvml import GpuProbe
device = torch.device("cuda", 0)
probe = GpuProbe(device)
sampler = HardwareSampler(probe, period_s=0.1)
x = torch.randn(4096, 4096, device=device)
until_s = time.monotonic() + 3
while time.monotonic() < until_s:
    for _ in range(20):
        y = x @ x
    torch.cuda.synchronize()
row = sampler.take_row()
nvml, handle = probe._nvml, probe._handle
row["limit_watts"] = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
row["uuids"] = [str(torch.cuda.get_device_properties(device).uuid), nvml.nvmlDeviceGetUUID(handle)]
sampler.close()
print(json.dumps(row))
"""


def watch_busy_gpu(index: int) -> dict[str, Any]:
    """Return the row of a GPU that multiplies matrices for 3 s, in a process that sees this one alone."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": str(index), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", GPU_PROBE]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def check_gpu_watch(index: int) -> str:
    """NVML sees a busy GPU: the one that torch uses, whatever its index, with use, memory, power and energy."""
    if importlib.util.find_spec("pynvml") is None:
        raise NotHereError("needs nvidia-ml-py")
    row = watch_busy_gpu(index)
    ours, nvmls = row["uuids"]
    assert nvmls.endswith(ours.removeprefix("GPU-")), f"torch uses {ours}, NVML was asked about {nvmls}"
    assert row["performance/gpu_util"] > 50 and row["performance/memory_used_gb"] > 0.1, row
    assert 0 < row["hardware/gpu_watts"] < 1.2 * row["limit_watts"] and row["energy/joules_high"] > 0, row
    missing = [key for key in ("hardware/pcie_rx_bytes_per_s", "hardware/nvlink_rx_bytes_per_s") if key not in row]
    told = f"; this card does not tell {', '.join(missing)}" if missing else ""
    return f"{row['performance/gpu_util']:.0f} % used, {row['hardware/gpu_watts']:.0f} W{told}"


def check_profile(strategy: str, nproc: int) -> str:
    """A profiled run records kernels on their streams, finds the passes they belong to, and merges its ranks."""
    from vlmcourse.monitor.trace_activity import read_activities
    from vlmcourse.monitor.trace_files import find_format_problems
    from vlmcourse.monitor.trace_merge import ABOUT, MERGED_NAME, read_merged
    from vlmcourse.monitor.trace_summary import summarise

    with tempfile.TemporaryDirectory() as folder:
        train(strategy, nproc, run__output_dir=folder, profile__active=2)
        trace = read_merged(next(Path(folder).rglob(MERGED_NAME)))
    assert not (problems := find_format_problems(trace)), problems
    gpu_rows = [row["rank"] for row in trace[ABOUT]["rows"] if row["is_gpu"]]
    assert gpu_rows == list(range(nproc)), f"rows of GPUs of ranks {gpu_rows}"
    for activity in read_activities(trace):
        assert all(span["cat"] != "cpu_op" for span in activity.operators), "operators of the CPU count as computing"
        empty = [name for name in ("forward", "backward", "optimizer") if not activity.phases[name]]
        assert not empty, f"no kernel was launched in {empty}"
        sent = [span["name"] for span in activity.sent if span["name"].startswith("nccl")]
        assert bool(sent) == (nproc > 1), f"{len(sent)} kernels of NCCL on {nproc} rank(s)"
    summary = summarise(trace)
    assert all(0 <= of.exposed_s <= of.communication_s for of in summary.ranks), summary
    assert summary.on_gpu and all(of.num_operators > of.num_short >= 0 for of in summary.ranks), (
        "kernels are not counted"
    )
    for of in summary.ranks:  # each step's samples go to the GPU, which is what a diagnosis reads of copies
        up = [copy for copy in of.copies if copy.direction == "HtoD"]
        assert up and up[0].num_bytes > 0 and 0 <= up[0].exposed_s <= up[0].seconds, of.copies
    return str(summary)


CHECKS = (
    Check("NVML watches the GPU that torch uses", 1, partial(check_gpu_watch, 0)),
    Check("NVML watches the GPU that torch uses where CUDA_VISIBLE_DEVICES renumbers", 2, partial(check_gpu_watch, 1)),
    Check("one GPU trains; peak memory from the allocator", 1, check_single),
    Check("a step's phases are timed by events", 1, partial(check_step_clock, "single", 1)),
    Check("a run on a GPU is diagnosed", 1, check_diagnosis),
    Check("a loop of one's own is logged by events", 1, check_loop_log),
    Check("bf16 autocast stays near fp32", 1, check_bf16),
    Check("fp16 autocast with a loss scaler stays near fp32", 1, lambda: check_precision("fp16")),
    Check("bf16 weights with fp32 master copies stay near fp32", 1, lambda: check_precision("bf16_master")),
    Check("bf16 weights rounded at random stay near fp32", 1, lambda: check_precision("bf16_pure")),
    Check("fp8 products by torchao stay near fp32", 1, check_real_fp8),
    Check("the policy of autocast on a GPU", 1, check_autocast_policy),
    Check("fp16 on 2 GPUs under fsdp stays near fp32", 2, lambda: check_precision("fp16", "fsdp", 2)),
    Check("activations are recomputed, offloaded and counted", 1, check_activations),
    Check("the planner's bytes by owner are a step's", 1, check_planned_memory),
    Check("the simulated allocator does what the real one does", 1, check_allocator),
    Check(
        "the simulated allocator does so with expandable segments",
        1,
        lambda: check_allocator("expandable_segments:True"),
    ),
    Check("the simulated allocator does so with a limit to splits", 1, lambda: check_allocator("max_split_size_mb:32")),
    Check(
        "the simulated allocator does so with rounded sizes", 1, lambda: check_allocator("roundup_power2_divisions:8")
    ),
    Check("ranks choose NCCL and a GPU each", 2, check_nccl),
    Check("ranks forked by the fork server use CUDA", 2, check_forked),
    Check("auto searches for the plan of these GPUs", 2, check_auto),
    Check("ddp on 2 GPUs equals one GPU", 2, lambda: check_parity("ddp")),
    Check("fsdp on 2 GPUs equals one GPU", 2, lambda: check_parity("fsdp")),
    Check("phases of a step on 2 GPUs under ddp, waiting told", 2, partial(check_step_clock, "ddp", 2)),
    Check("phases of a step on 2 GPUs under fsdp, waiting absent", 2, partial(check_step_clock, "fsdp", 2)),
    Check("zero1 on 2 GPUs equals one GPU", 2, lambda: check_parity("zero1")),
    Check("zero2 on 2 GPUs equals one GPU", 2, lambda: check_parity("zero2")),
    *(Check(f"{strategy} on 2 GPUs equals one GPU", 2, partial(check_engine, strategy)) for strategy in ENGINES),
    Check(
        "ddp with gradients in bf16 stays near one GPU", 2, lambda: check_parity("ddp", parallel__compression="bf16")
    ),
    Check("tp on 2 GPUs equals one GPU", 2, lambda: check_shared_samples(parallel__tp=2)),
    Check("cp by ring on 2 GPUs equals one GPU", 2, lambda: check_shared_samples(parallel__cp=2)),
    Check(
        "cp by ulysses on 2 GPUs equals one GPU",
        2,
        lambda: check_shared_samples(parallel__cp=2, parallel__cp_method="ulysses"),
    ),
    Check("pp on 2 GPUs equals one GPU", 2, lambda: check_shared_samples(parallel__pp=2)),
    Check(
        "pp with a zero-bubble schedule on 2 GPUs equals one GPU",
        2,
        lambda: check_shared_samples(parallel__pp=2, parallel__pp_schedule="zbv"),
    ),
    Check(
        "fsdp with an exchange every micro-batch on 2 GPUs equals one GPU",
        2,
        lambda: check_accumulated("fsdp", parallel__gradient_sync="every"),
    ),
    Check(
        "accumulation with square-root weights on 2 GPUs equals one GPU",
        2,
        lambda: check_accumulated("ddp", train__loss_weighting="sqrt"),
    ),
    Check("PyTorch's SyncBatchNorm spans 2 GPUs and no micro-batches", 2, check_batch_norm),
    Check("links between GPUs are measured", 2, check_links),
    Check("state of engines on one GPU is explained", 1, partial(check_zero_tables, "measure_states", 1)),
    Check("a profiled step on one GPU shows kernels by phase", 1, lambda: check_profile("single", 1)),
    Check("profiled steps of 2 GPUs are merged, NCCL's kernels exposed or hidden", 2, lambda: check_profile("ddp", 2)),
    Check("profiled steps under fsdp on 2 GPUs are merged", 2, lambda: check_profile("fsdp", 2)),
    Check("state of every stage of ZeRO is explained", 2, partial(check_zero_tables, "measure_states")),
    Check("traffic of every stage of ZeRO is explained", 2, partial(check_zero_tables, "measure_traffic")),
    Check("DeepSpeed's ZeRO-3 and FSDP2 side by side", 2, check_engine_table),
    Check("scaling is measured on 1 and 2 GPUs, over NCCL", 2, check_scaling),
    Check("chapter 7: from naive to tuned on 2 GPUs, one training with less and less memory", 2, check_tuning),
    Check("fsdp on 2 GPUs needs less memory", 2, check_fsdp_memory),
    *(
        Check(f"{strategy} on 2 GPUs equals one GPU", 2, partial(check_parity, strategy))
        for strategy in ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")
    ),
    *(
        Check(
            f"{strategy} with its optimizer in main memory, updated by {adam}, on 2 GPUs equals one GPU",
            2,
            partial(check_parity, strategy, offload__optimizer="cpu", offload__adam=adam),
        )
        for strategy in ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")
        for adam in ("torch", "deepspeed")
    ),
    *(
        Check(
            f"{strategy} with shards and optimizer in main memory on 2 GPUs equals one GPU",
            2,
            partial(check_parity, strategy, **IN_MAIN_MEMORY),
        )
        for strategy in ("deepspeed-zero3", "fsdp")
    ),
    Check("fsdp on 2 GPUs with its shards in main memory needs less on the GPUs", 2, check_offload_memory),
    Check("a step with its state in main memory keeps the budget of lab 5 on 2 GPUs", 2, check_budget),
    Check("a controller steers a run of 2 GPUs", 2, check_steered),
    Check("fsdp on 2 GPUs with one layer at a time needs less than with one ahead", 2, check_layered),
    Check("every level of offload on 2 GPUs holds less there than the one before", 2, check_levels),
    Check("deepspeed-zero3 on 2 GPUs with its state in files equals one GPU", 2, check_nvme),
)


def find_driver() -> str:
    """Return the version of the NVIDIA driver, as `nvidia-smi` tells it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown (no nvidia-smi)"
    try:
        command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown (nvidia-smi fails)"
    return ", ".join(sorted({line.strip() for line in done.stdout.splitlines() if line.strip()})) or "unknown"


def describe_machine(num_gpus: int) -> str:
    """Name the cards and the versions that a table was made with."""
    versions = f"driver {find_driver()}, torch {torch.__version__}, CUDA {torch.version.cuda or 'not in this build'}"
    if not num_gpus:
        return f"no GPU, {versions}"
    names = sorted({torch.cuda.get_device_name(i) for i in range(num_gpus)})
    version = ".".join(map(str, nccl.version())) if torch.distributed.is_nccl_available() else "not in this build"
    return f"{num_gpus} x {', '.join(names)}, {versions}, NCCL {version}"


def run_check(check: Check, num_gpus: int) -> tuple[str, str]:
    """Return the outcome of one check, and what was seen or why not."""
    if check.gpus > num_gpus:
        return "skipped", f"needs {check.gpus} GPU(s), this machine has {num_gpus}"
    try:
        return "passed", check.run()
    except NotHereError as error:
        return "skipped", str(error)
    except Exception as error:  # a check that breaks is a row like one whose claim is false; the others still run
        return "FAILED", f"{type(error).__name__}: {plain(str(error))[-MAX_SHOWN:]}"  # a cause stands at the end


def plain(text: str) -> str:
    """Return text as it can stand in a row of the table: one line, no colours, no bar."""
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", text).split()).replace("|", "/")


def build_table(num_gpus: int) -> tuple[str, bool]:
    """Run every check that the machine allows; return the table, and whether nothing failed."""
    lines = [f"Machine: {describe_machine(num_gpus)}", "", "| check | outcome | seen |", "|---|---|---|"]
    all_well = True
    for check in CHECKS:
        outcome, seen = run_check(check, num_gpus)
        all_well = all_well and outcome != "FAILED"
        lines.append(f"| {check.name} | {outcome} | {plain(seen)} |")
    return "\n".join(lines) + "\n", all_well


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    args = parser.parse_args(argv)
    text, all_well = build_table(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    sys.stdout.write(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
