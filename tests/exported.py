"""Is an exported folder the model that was trained?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import InternVLForConditionalGeneration

from vlmcourse.models.hf import load_hf_folder
from vlmcourse.train.export import export_hf_folder
from vlmcourse.train.trainer import Trainer

FP32_ATOL = 1e-5


def check_exported(run: Path, out: Path, trainer: Trainer) -> None:
    """Export a checkpoint and compare logits: the trainer's model, ours from the folder, transformers' from it."""
    exported = export_hf_folder(run, out)
    assert exported.num_params == sum(p.numel() for p in trainer.model.parameters())
    loaded: Any = InternVLForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    theirs, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    batch = trainer.load_step(0)[0]
    ids, pixels, mask = batch.input_ids_BS, batch.pixel_values_ICHW, batch.attention_mask_BS
    with torch.no_grad():
        expected: Tensor = trainer.model.eval()(ids, pixels, mask)[mask]
        ours: Tensor = load_hf_folder(out).eval()(ids, pixels, mask)[mask]
        others = theirs.eval()(input_ids=ids, pixel_values=pixels, attention_mask=mask.long()).logits[mask]
    assert torch.equal(ours, expected)
    torch.testing.assert_close(others, expected, rtol=0, atol=FP32_ATOL)
