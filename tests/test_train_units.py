"""What training does in one process: loss, schedule, groups, clipping, precision, seeds, checkpoints, files."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import AwkwardTrainer, awkward_samples, build_trainer, parity_config, small_shape
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlmcourse.config import OptimizerConfig, TrainConfig
from vlmcourse.data.samples import IGNORE_LABEL, Message, Sample
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.clipping import total_norm
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.train.accumulate import micro_batch_loss_sum
from vlmcourse.train.checkpoint import check_same_formats
from vlmcourse.train.evaluate import questions_of
from vlmcourse.train.folder import check_run_folder, find_checkpoint, read_meta
from vlmcourse.train.loss import token_loss_sum
from vlmcourse.train.nan_finder import find_in_step
from vlmcourse.train.optimizer import build_optimizer, clip_global_norm, freeze_towers, learning_rate_scale
from vlmcourse.train.precision import autocast
from vlmcourse.train.seed import derive_seed, seed_step

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="none")


def config_in(folder: Path, *, name: str = "run", **train: Any) -> TrainConfig:
    config = parity_config("single", 1, 1, "all towers")
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, output_dir=str(folder), name=name),
        train=dataclasses.replace(config.train, **({"num_steps": 4} | train)),
    )


def test_loss_is_the_sum_over_supervised_tokens_only() -> None:
    logits = torch.randn(2, 3, 7)
    labels = torch.tensor([[1, IGNORE_LABEL, 2], [IGNORE_LABEL, IGNORE_LABEL, 3]])
    expected = sum(F.cross_entropy(logits[b, s], labels[b, s]) for b, s in ((0, 0), (0, 2), (1, 2)))
    assert torch.allclose(token_loss_sum(logits, labels), torch.as_tensor(expected))


def test_loss_without_supervised_tokens_is_zero_with_zero_gradient() -> None:
    logits = torch.randn(1, 3, 7, requires_grad=True)
    loss = token_loss_sum(logits, torch.full((1, 3), IGNORE_LABEL))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None and not logits.grad.any()


def test_loss_of_bf16_logits_is_computed_in_fp32() -> None:
    logits = torch.randn(1, 5, 9).bfloat16()
    labels = torch.arange(5)[None]
    assert token_loss_sum(logits, labels).dtype == torch.float32
    assert torch.equal(token_loss_sum(logits, labels), token_loss_sum(logits.float(), labels))


def test_schedule_warms_up_linearly_then_follows_a_cosine_to_its_floor() -> None:
    scales = [learning_rate_scale(step, 110, 10, 0.1) for step in range(111)]
    assert scales[0] == pytest.approx(0.1)
    assert scales[4] == pytest.approx(0.5)
    assert scales[9] == scales[10] == 1
    assert scales[60] == pytest.approx(0.55)  # half way down from 1 to 0.1
    assert scales[110] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(scales[10:], scales[11:], strict=False))
    assert learning_rate_scale(0, 5, 0, 0.1) == 1


def test_each_tower_has_its_rate_and_only_matrices_decay() -> None:
    model = build_model(small_shape(), seed=0)
    config = OptimizerConfig(lr_vision=1e-4, lr_projector=2e-4, lr_language=3e-4, weight_decay=0.5)
    groups = build_optimizer(model, config).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    decay_of = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    rate_of = {names[id(p)]: group["lr"] for group in groups for p in group["params"]}
    assert decay_of.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        is_decayed = parameter.ndim >= 2 and name not in ("vision.class_token", "vision.position_embedding")
        assert decay_of[name] == (0.5 if is_decayed else 0.0), name
        assert rate_of[name] == {"vision": 1e-4, "projector": 2e-4, "language": 3e-4}[name.split(".")[0]]


def test_frozen_towers_are_in_no_optimizer_group() -> None:
    model = build_model(small_shape(), seed=0)
    freeze_towers(model, ["vision", "projector"])
    groups = build_optimizer(model, OptimizerConfig()).param_groups
    assert {group["tower"] for group in groups} == {"language"}
    freeze_towers(model, ["language"])
    with pytest.raises(ValueError, match="every tower is frozen"):
        build_optimizer(model, OptimizerConfig())


def test_clipping_scales_all_gradients_by_one_factor() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_global_norm([a, b], 1.0) == pytest.approx(5.0)
    assert torch.allclose(torch.cat([a.grad, b.grad]), torch.tensor([0.6, 0.0, 0.8]))
    assert clip_global_norm([a, b], 0.0) == pytest.approx(1.0)
    assert clip_global_norm([a, b], 10.0) == pytest.approx(1.0)  # short ones are not lengthened
    assert torch.allclose(b.grad, torch.tensor([0.8]))


def test_the_norm_of_16_bit_gradients_is_exact_and_makes_no_copies_of_them() -> None:
    gradients = [torch.randn(512, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(3)]
    with MadeSizes() as made:
        norm = total_norm(gradients)
    assert float(norm) == pytest.approx(float(torch.cat(gradients).double().norm()), rel=1e-6)
    assert max(made.sizes) <= len(gradients)


class MadeSizes(TorchDispatchMode):
    """Elements of the tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.sizes += [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result


def test_bf16_computes_in_bf16_and_keeps_weights_and_gradients_in_fp32() -> None:
    trainer = build_trainer(parity_config("single", 1, 1, "bf16"), ALONE, seed=0)
    (batch,) = trainer.load_step(0)
    with autocast("bf16", torch.device("cpu")):
        logits = trainer.model(batch.input_ids_BS, batch.pixel_values_ICHW, batch.attention_mask_BS)
    assert logits.dtype == torch.bfloat16
    loss = micro_batch_loss_sum(trainer.model, batch, "bf16")
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() != micro_batch_loss_sum(trainer.model, batch, "fp32").item()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in trainer.model.parameters() if p.grad is not None} == {torch.float32}


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of fp32, bf16, fp16"):
        autocast("fp99", torch.device("cpu"))


def test_seeds_differ_by_purpose_step_and_rank_and_repeat() -> None:
    seeds = {derive_seed(0, purpose, *at) for purpose in ("a", "b") for at in ((), (0,), (1,), (0, 1), (1, 0))}
    assert len(seeds) == 10
    draws = []
    for step, rank in ((3, 0), (3, 1), (4, 0), (3, 0)):
        seed_step(7, step, rank)
        draws.append(torch.rand(1).item())
    assert draws[0] == draws[3]
    assert len(set(draws)) == 3


def test_questions_of_a_conversation_keep_earlier_turns_and_their_pictures() -> None:
    trainer = build_trainer(parity_config("single", 1, 1, "all towers"), ALONE, seed=0)
    (picture,) = next(sample for sample in trainer.train_data if sample.images).images
    turns = (Message("user", "<image>\na?"), Message("assistant", "1"), Message("user", "<image>b?"))
    sample = Sample("two", (picture, picture), (*turns, Message("assistant", "2")))
    first, second = questions_of(sample)
    assert (len(first.images), first.messages[-1].text) == (1, "1")
    assert (len(second.images), second.messages[-1].text) == (2, "2")


def test_a_run_learns_and_reports(tmp_path: Path) -> None:
    seen: list[int] = []
    trainer = build_trainer(config_in(tmp_path, num_steps=8, log_every=3, eval_every=4), ALONE, seed=0)
    trainer.after_step.append(lambda trainer, report: seen.append(report.step))
    result = trainer.fit()
    assert sum(result.losses[4:]) < sum(result.losses[:4])  # two epochs: steps of one have other samples each
    assert result.losses[0] == result.loss_first and result.losses[-1] == result.loss_last
    assert seen == list(range(1, 9))
    assert [row["step"] for row in result.history] == [3, 4, 6, 8]
    assert [row["step"] for row in result.history if "eval/exact_match" in row] == [4, 8]
    assert (result.strategy, result.world_size, result.num_steps) == ("single", 1, 8)
    assert 0 < result.train_seconds < result.seconds
    assert result.tokens_per_s > 0 and result.peak_bytes > 0
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    assert saved["loss_last"] == result.loss_last and "losses" not in saved
    with pytest.raises(ValueError, match="nothing is left"):
        trainer.fit()


def test_progress_goes_to_stdout_and_nothing_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = config_in(tmp_path, num_steps=2)
    samples = build_trainer(config, ALONE, seed=0).train_data
    model = build_model(small_shape(), seed=0)
    AwkwardTrainer(config, ALONE, model=model, train_data=samples, eval_data=samples[:1]).fit()
    captured = capfd.readouterr()
    assert "2/2" in captured.out and "tokens/s" in captured.out
    assert captured.err == ""


def test_a_new_run_moves_an_earlier_one_of_its_name_aside(tmp_path: Path) -> None:
    for _ in range(3):
        build_trainer(config_in(tmp_path), ALONE, seed=0).fit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2"]
    assert all((path / "result.json").is_file() for path in tmp_path.iterdir())


def test_a_run_that_goes_on_from_another_one_leaves_what_was_in_its_folder_whole(tmp_path: Path) -> None:
    for name in ("first", "second"):
        build_trainer(config_in(tmp_path, name=name, checkpoint_every=2), ALONE, seed=0).fit()
    before = (tmp_path / "second" / "log.jsonl").read_text(encoding="utf-8")
    trainer = build_trainer(config_in(tmp_path, name="second"), ALONE, seed=0)
    step = trainer.resume(sorted((tmp_path / "first" / "checkpoints").glob("step_*"))[0])
    result = trainer.fit()
    assert (tmp_path / "second.1" / "log.jsonl").read_text(encoding="utf-8") == before
    assert min(row["step"] for row in result.history) > step > 0


def test_a_folder_that_cannot_be_written_to_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, empty = tmp_path / "file", tmp_path / "empty"
    file.touch()
    empty.mkdir()
    (tmp_path / "link").symlink_to("nothing")
    for folder, name, reason in (
        (file, "run", "Not a directory"),
        (file / "below", "run", f"'{file}': Not a directory"),
        (tmp_path, "file", f"'{file}': Not a directory"),
        (tmp_path / "link", "run", "No such file or directory"),
        (tmp_path / ("x" * 300), "run", f"'{tmp_path}/{'x' * 300}/run': File name too long"),
    ):
        with pytest.raises(ValueError) as caught:
            build_trainer(config_in(folder, name=name), ALONE, seed=0).fit()
        assert str(caught.value) == (
            f"run.output_dir = '{folder}' cannot be written to ({reason}): choose another folder with "
            "--set run.output_dir=..."
        )
    check_run_folder(config_in(empty / "a" / "b"), is_resumed=False)
    assert not any(empty.iterdir())

    def refuse(path: str, mode: int = 0o777) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(ValueError, match=r"empty' cannot be written to \(Permission denied\): choose another"):
        check_run_folder(config_in(empty), is_resumed=False)


def test_the_folder_checked_is_the_one_that_will_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Path] = []
    real = os.mkdir

    def note(path: str, mode: int = 0o777) -> None:
        checked.append(Path(path).parent)
        real(path, mode)

    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(os, "mkdir", note)
    check_run_folder(config_in(tmp_path), is_resumed=False)
    (run / "log.csv").touch()
    check_run_folder(config_in(tmp_path), is_resumed=True)
    check_run_folder(config_in(tmp_path), is_resumed=False)  # renames the earlier run
    assert checked == [run, run, tmp_path]


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    build_trainer(config_in(tmp_path, num_steps=5, checkpoint_every=1, keep_checkpoints=2), ALONE, seed=0).fit()
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step_000004", "step_000005"]


def test_an_evaluation_that_fails_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(config_in(tmp_path), ALONE, seed=0)

    def fail() -> None:
        raise MemoryError("no room for answers")

    monkeypatch.setattr(trainer, "evaluate", fail)
    with pytest.raises(MemoryError, match="no room for answers"):
        trainer.fit()
    assert build_trainer(config_in(tmp_path, num_steps=6), ALONE, seed=0).resume() == 4


def test_a_checkpoint_that_does_not_fit_says_which_tensor(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    build_trainer(config, ALONE, seed=0).fit()
    shape = small_shape()
    shape = dataclasses.replace(shape, language=dataclasses.replace(shape.language, mlp_size=47))
    samples = awkward_samples()
    other = AwkwardTrainer(config, ALONE, model=build_model(shape), train_data=samples, eval_data=samples[:1])
    expected = r"do not match, the first: model.language.*\[45, 32\] in it and \[47, 32\]"
    with pytest.raises(ValueError, match=expected) as caught:
        other.resume()
    assert "step_000004" in str(caught.value) and "Traceback" not in str(caught.value)


def test_resuming_another_model_is_refused_and_other_changes_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_trainer(config_in(tmp_path), ALONE, seed=0).fit()
    config = config_in(tmp_path, num_steps=9)
    frozen = dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=("vision",)))
    with pytest.raises(ValueError, match="same model and frozen towers"):
        build_trainer(frozen, ALONE, seed=0).resume()
    assert build_trainer(config, ALONE, seed=0).resume() == 4
    assert "train.num_steps from 4 to 9" in caplog.text
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        build_trainer(config, ALONE, seed=0).resume(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("before", "after"),
    [("fp32", "bf16_master"), ("bf16_master", "fp32"), ("bf16_master", "bf16_pure"), ("bf16_pure", "fp16")],
)
def test_a_checkpoint_of_other_formats_is_refused_by_name(before: str, after: str) -> None:
    words = rf"train.precision was '{before}'.*is '{after}'.*set it back to '{before}', or start a new run"
    with pytest.raises(ValueError, match=words):
        check_same_formats(Path("step_000004"), before, after)
    for precision in ("fp32", "bf16", "fp16", "fp8"):
        check_same_formats(Path("step_000004"), "fp32", precision)


def test_a_run_goes_on_only_in_a_precision_that_stores_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_trainer(config_in(tmp_path, precision="bf16_master"), ALONE, seed=0).save()
    with pytest.raises(ValueError, match=r"train.precision was 'bf16_master'.*and is 'fp32'"):
        build_trainer(config_in(tmp_path), ALONE, seed=0).resume()
    build_trainer(config_in(tmp_path), ALONE, seed=0).save()
    trainer = build_trainer(config_in(tmp_path, precision="fp16"), ALONE, seed=0)
    assert trainer.resume() == 0 and "train.precision from 'fp32' to 'fp16'" in caplog.text
    assert trainer.scaler.scale == 2.0**16


def test_a_half_written_checkpoint_is_never_used(tmp_path: Path) -> None:
    build_trainer(config_in(tmp_path), ALONE, seed=0).fit()
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(folder / "step_000004", folder / "step_000005.partial")
    shutil.copytree(folder / "step_000004", folder / "step_000006")  # renamed, but killed before the pointer moved
    assert find_checkpoint(tmp_path / "run").name == "step_000004"
    (folder / "step_000004").rename(folder / "step_000004.old")  # killed while saving the same step again
    assert find_checkpoint(tmp_path / "run").name == "step_000004.old"
    resumed = build_trainer(config_in(tmp_path, num_steps=6), ALONE, seed=0)
    resumed.resume()
    resumed.fit()
    assert find_checkpoint(tmp_path / "run").name == "step_000006"
    assert read_meta(folder / "step_000006")["step"] == 6


KILLED_SCRIPT = """
import sys, dataclasses
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_train_units import ALONE, build_trainer, config_in
trainer = build_trainer(config_in(Path(sys.argv[1])), ALONE, seed=0)
for _ in range(3):
    trainer.train_step()
trainer.save()
while True:
    trainer.step += 1
    trainer.save()
    print("saved", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_kill_in_the_middle_of_saves_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_SCRIPT, str(tmp_path), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "saved\n"
        time.sleep(0.013)  # somewhere inside the next save
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    trainer = build_trainer(config_in(tmp_path, num_steps=10**6), ALONE, seed=1)
    assert trainer.resume() >= 4
    assert trainer.train_step().loss < 7


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_way_to_its_cause(tmp_path: Path, precision: str) -> None:
    trainer = build_trainer(config_in(tmp_path, precision=precision), ALONE, seed=0)
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    with pytest.raises(RuntimeError, match="loss of this step is nan: it must be finite") as caught:
        trainer.train_step()
    assert "train.nan_finder.find_in_step(trainer)" in str(caught.value)
    assert ("choose bf16 or fp32 for train.precision" in str(caught.value)) == (precision == "fp16")
    assert find_in_step(trainer)[0].startswith("rank 0, step 0, micro-batch 0: weights in ")
