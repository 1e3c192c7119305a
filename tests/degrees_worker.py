"""What four ranks do for `test_train_degrees.py`: whole runs under several degrees. Usage: degrees_worker.py FOLDER."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from combinations import Combination, config_of, divisible_shape
from parity import AwkwardTrainer, awkward_samples

from vlmcourse.config import TrainConfig
from vlmcourse.data.collate import Collator
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import Sample
from vlmcourse.data.tokenizer import load_tokenizer
from vlmcourse.layout import ParallelConfig
from vlmcourse.models.generate import generate
from vlmcourse.models.vlm import build_model
from vlmcourse.parallel.apply import apply_strategy, as_vlm, check_strategy, plain_parts
from vlmcourse.parallel.comm import wait_for_all
from vlmcourse.parallel.mesh import find_place
from vlmcourse.parallel.pipelined import PipelinedModel
from vlmcourse.parallel.pipelined_generation import generate_in_pipeline
from vlmcourse.parallel.ranks import Ranks, init_ranks, shutdown_ranks
from vlmcourse.train import evaluate
from vlmcourse.train.loss import token_loss_sum

NUM_STEPS = 6
SAVED_STEP = 3
RUNS = {
    "zero1": Combination(4, {"strategy": "zero1"}),
    "fsdp-tp": Combination(4, {"strategy": "fsdp", "tp": 2}, 2),
    "ddp-cp": Combination(4, {"strategy": "ddp", "cp": 2}),
    "pp-fsdp": Combination(4, {"strategy": "fsdp", "pp": 2}, 2),
    "pp-tp-dualpipev-tied": Combination(4, {"pp": 2, "tp": 2, "pp_schedule": "dualpipev"}, 4, tied=True),
    "fsdp-tp-padded": Combination(
        4, {"strategy": "fsdp", "tp": 2, "vision_heads": "pad_heads"}, 2, heads=3, vocab_size=257
    ),
}
"""Each goes on from one process's checkpoint, and one process goes on from its own."""
CROSSED = {
    "fsdp-tp": RUNS["pp-fsdp"],
    "fsdp-tp-padded": Combination(4, {"pp": 2, "tp": 2, "vision_heads": "pad_heads"}, 2, heads=3, vocab_size=257),
}
"""A run -> what goes on from its last checkpoint."""
ANSWERING = {
    "zero2-cp answers": Combination(4, {"strategy": "zero2", "cp": 2, "cp_method": "ulysses"}),
    "pp-fsdp-cp answers": Combination(4, {"strategy": "fsdp", "pp": 2, "cp": 2}, 2),
}
"""What only answers, from one process's last checkpoint."""
BENT = {
    "pp-fsdp": Combination(4, {"strategy": "fsdp", "pp": 2}, 2),
    "pp-tp-padded": Combination(4, {"pp": 2, "tp": 2, "vision_heads": "pad_heads"}, 2, heads=3, vocab_size=257),
}
"""What answers with a model whose first answer begins with the image token."""


def model_of(combination: Combination) -> str:
    """Name the model of a run: plain, tied or padded."""
    return "tied" if combination.tied else "padded" if combination.heads == 3 else "plain"


def build(combination: Combination, ranks: Ranks, folder: Path, name: str, seed: int) -> AwkwardTrainer:
    """Return a trainer that writes to `folder/name`; `seed` is of weights that a resumed run replaces."""
    config: TrainConfig = config_of(combination, alone=ranks.world_size == 1)
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, output_dir=str(folder), name=name),
        train=dataclasses.replace(config.train, num_steps=NUM_STEPS, checkpoint_every=SAVED_STEP, keep_checkpoints=3),
    )
    shape = divisible_shape(combination.heads, combination.tied, combination.vocab_size)
    model = build_model(shape, seed=seed)
    questions = DigitsDataset(5, 0, "heldout")[:5]
    return AwkwardTrainer(
        config, ranks, model=model, train_data=awkward_samples(), eval_data=questions, show_progress=False
    )


@contextlib.contextmanager
def recorded_answers() -> Iterator[dict[str, str]]:
    """Note what the model generates: sample and turn -> answer."""
    answers: dict[str, str] = {}
    real = evaluate._answer

    def answer(model: Any, questions: list[Sample], *others: Any) -> list[str]:
        given = real(model, questions, *others)
        answers.update({f"{q.sample_id}/{len(q.messages)}": text for q, text in zip(questions, given, strict=True)})
        return given

    with mock.patch.object(evaluate, "_answer", answer):
        yield answers


def collect_refusals(ranks: Ranks) -> dict[str, str]:
    """Ask for what cannot be; every rank must be told at once, none may wait."""
    found = {}
    shape = divisible_shape()
    for name, combination in {
        "schedule over fsdp": Combination(4, {"strategy": "fsdp", "pp": 2, "pp_schedule": "zbv"}, 4),
        "too few micro-batches": Combination(4, {"strategy": "fsdp", "pp": 2, "pp_schedule": "dualpipev"}, 2),
        "odd heads": Combination(4, {"strategy": "fsdp", "tp": 2}, heads=3),
        "too many stages": Combination(4, {"pp": 4, "pp_schedule": "interleaved"}, 8),
    }.items():
        try:
            build(combination, ranks, Path("unused"), "unused", seed=0)
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)
    config = config_of(Combination(4, {"strategy": "fsdp", "tp": 2})).parallel
    try:
        apply_strategy(torch.nn.Linear(4, 4), config, ranks, find_place(config, ranks, shape))
    except ValueError as error:
        found["another model"] = str(error)
    auto, fsdp = ParallelConfig(strategy="auto"), ParallelConfig(strategy="fsdp")
    place = find_place(ParallelConfig(strategy="ddp"), ranks)
    for name, attempt in {
        "unresolved": lambda: apply_strategy(build_model(shape, seed=0), auto, ranks),
        "unresolved, in a place": lambda: apply_strategy(build_model(shape, seed=0), auto, ranks, place),
        "unresolved, checked": lambda: check_strategy(build_model(shape, seed=0), auto, ranks, place),
        "unresolved place": lambda: find_place(auto, ranks),
        "another place": lambda: apply_strategy(build_model(shape, seed=0), fsdp, ranks, place),
        "another place, checked": lambda: check_strategy(build_model(shape, seed=0), fsdp, ranks, place),
        "another model in a pipeline": lambda: apply_strategy(torch.nn.Linear(4, 4), ParallelConfig(pp=4), ranks),
    }.items():
        try:
            attempt()
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)
    pipeline = config_of(Combination(4, {"pp": 4}, 4)).parallel
    try:
        apply_strategy(build_model(shape, seed=0), pipeline, ranks)
    except ValueError as error:
        found["no loss"] = str(error)
    return found


def refuse_checkpoints(ranks: Ranks, folder: Path) -> dict[str, str]:
    """Go on from a checkpoint of another model, and from one that has lost a file."""
    found, step = {}, folder / "fsdp-tp-padded" / "checkpoints" / f"step_{NUM_STEPS:06d}"
    other = build(RUNS["fsdp-tp"], ranks, folder, "other", seed=0)
    try:
        other.resume(step)
    except ValueError as error:
        found["checkpoint of another shape"] = str(error)
    copy = folder / "lost" / step.name
    if ranks.is_main:
        shutil.copytree(step, copy, ignore=shutil.ignore_patterns("__3_*"))
    wait_for_all(ranks)
    same = build(RUNS["fsdp-tp-padded"], ranks, folder, "same", seed=0)
    try:
        same.resume(copy)
    except RuntimeError as error:
        found["file lost"] = str(error)
    return found


def answer_with_image_token(combination: Combination, ranks: Ranks) -> dict[str, Any]:
    """Let a model whose first answer begins with the image token answer, plain and in a pipeline."""
    shape = divisible_shape(combination.heads, vocab_size=combination.vocab_size)
    model = build_model(shape, seed=11).eval()
    tokenizer = load_tokenizer("builtin")
    asked = [q for sample in DigitsDataset(8, 0, "heldout")[:8] for q in evaluate.questions_of(sample)]
    batch = Collator(tokenizer, shape, 256).prompts(asked)
    inputs = batch.input_ids_BS, batch.pixel_values_ICHW, batch.attention_mask_BS
    last: list[torch.Tensor] = []
    hook = model.language.norm.register_forward_hook(lambda _, __, x_BSD: last.append(x_BSD[:, -1]))
    with torch.no_grad():
        model.projector.down_proj.weight.mul_(20)  # so that every answer depends on its picture
        model(*inputs, last_only=True)
        hook.remove()
        wanted_B = torch.full((len(batch.sample_ids),), -300.0)
        wanted_B[0] = 300.0
        assert model.language.lm_head is not None
        model.language.lm_head.weight[shape.image_token_id] = torch.linalg.pinv(last[0]) @ wanted_B
    limits: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": tokenizer.eos_token_id, "stop_early": False}
    expected_BS = generate(model, *inputs, **limits)
    config = config_of(combination).parallel
    pipelined = apply_strategy(model, config, ranks, find_place(config, ranks, shape), token_loss_sum).eval()
    shapes = []
    for part in plain_parts(pipelined):
        if as_vlm(part).language.lm_head is not None:
            head = cast(torch.nn.Module, as_vlm(part).language.lm_head)
            head.register_forward_hook(lambda _, __, logits_BSV: shapes.append(list(logits_BSV.shape[:2])))
    given_BS = generate_in_pipeline(cast(PipelinedModel, pipelined), batch, **limits)
    begins = expected_BS[:, 0] == shape.image_token_id
    return {
        "expected": expected_BS.tolist(),
        "given": given_BS.tolist(),
        "begin with the image token": begins.tolist(),
        "predicted": shapes,
    }


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=60)
    found: dict[str, Any] = {"refusals": collect_refusals(ranks)}
    for name, combination in RUNS.items():
        trainer = build(combination, ranks, folder, name, seed=50 + ranks.rank)
        trainer.resume(folder / model_of(combination) / "checkpoints" / f"step_{SAVED_STEP:06d}")
        spy = mock.patch.object(evaluate, "generate_in_pipeline", wraps=generate_in_pipeline)
        with recorded_answers() as answers, spy as generations:
            result = trainer.fit()
        found[name] = {"losses": result.losses, "exact": [result.exact_match, result.num_questions], "answers": answers}
        found[name]["at a time"] = [len(call.args[1].input_ids_BS) for call in generations.call_args_list]
    for name, combination in ANSWERING.items():
        trainer = build(combination, ranks, folder, "answering", seed=0)
        trainer.resume(folder / "plain" / "checkpoints" / f"step_{NUM_STEPS:06d}")
        with recorded_answers() as answers:
            exact = trainer.evaluate()
        trained_on = trainer.train_step().loss > 0
        found[name] = {"exact": [exact.fraction, exact.num_questions], "answers": answers, "trains on": trained_on}
    for name, combination in CROSSED.items():
        trainer = build(combination, ranks, folder, "crossed", seed=0)
        trainer.resume(folder / name / "checkpoints" / f"step_{NUM_STEPS:06d}")
        found[f"crossed {name}"] = trainer.train_step().loss
    for name, combination in BENT.items():
        found[f"bent {name}"] = answer_with_image_token(combination, ranks)
    found["refusals"] |= refuse_checkpoints(ranks, folder)
    (folder / f"found{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    del trainer
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
