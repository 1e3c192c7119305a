"""Chapter 3's sentences on what stays fp32 under autocast: the residual stream, and what backward keeps of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.module_tracker import ModuleTracker

from vlmcourse.labs import ch03
from vlmcourse.monitor.op_dtypes import OpRecorder
from vlmcourse.train.accumulate import micro_batch_loss_sum


def saved_for_backward(precision: str) -> list[tuple[str, Tensor]]:
    """Return the tensors that the forward pass of the lab's model saves, each storage once, by module."""
    trainer = ch03.lab_trainer(ch03.lab_config(precision))
    found: dict[int, tuple[str, Tensor]] = {}
    modules = ModuleTracker()

    def pack(tensor: Tensor) -> Tensor:
        names = modules.parents - {"Global"}
        found.setdefault(tensor.untyped_storage().data_ptr(), (max(names, key=len, default=""), tensor))
        return tensor

    with modules, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        micro_batch_loss_sum(trainer.model, trainer.load_step(0)[0], precision)
    weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    return [(name.partition(".")[2], tensor) for place, (name, tensor) in found.items() if place not in weights]


def test_under_autocast_the_residual_stream_and_the_outputs_of_norms_are_fp32() -> None:
    trainer = ch03.lab_trainer(ch03.lab_config("bf16"))
    with OpRecorder() as recorder:
        trainer.train_step()
    forward = [call for call in recorder.calls if call.phase == "forward"]
    for block in (0, 1):
        added = [call for call in forward if (call.module, call.op) == (f"language.blocks.{block}", "add")]
        assert [(call.inputs, call.output) for call in added] == [(("fp32", "bf16"), "fp32")] * 2
        for norm in ("norm1", "norm2"):
            last = [call for call in forward if call.module == f"language.blocks.{block}.{norm}"][-1]
            assert (last.output, last.num_elements) == ("fp32", added[0].num_elements)
    assert {call.output for call in forward if call.module == "language.embedding"} == {"fp32"}


@pytest.mark.parametrize(("precision", "num_copies"), [("bf16", 3), ("bf16_pure", 1)])
def test_norms_save_fp32_in_full_and_autocast_a_copy_for_each_linear_layer(precision: str, num_copies: int) -> None:
    saved = saved_for_backward(precision)
    block = "language.blocks.0"
    stream = max((t for name, t in saved if name.endswith(f"{block}.norm1")), key=Tensor.numel)
    whole = [t.dtype for name, t in saved if name.endswith(f"{block}.norm1") and t.numel() == stream.numel()]
    assert whole == [torch.float32] * 2
    of_linear = [
        t.dtype
        for name, t in saved
        if name.endswith(tuple(f"{block}.attention.{x}_proj" for x in "qkv")) and t.numel() == stream.numel()
    ]
    assert of_linear == [torch.bfloat16] * num_copies
