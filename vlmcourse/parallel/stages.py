"""The part of a model that stands on one stage of a pipeline.

Enters: a plain model and a `StageSplit`. Leaves: a `VLMStage`, a `VLM` whose towers lack what stands elsewhere. What is
there keeps its name: language block 3 is `language.blocks.3` on whichever stage, so checkpoints and optimizer groups
go by name as ever. Only activations travel between stages, `[tiles, 1 + patches, width]` before the fusion and
`[batch, seq, width]` behind it. Ids, labels and masks are on every stage already. Chapter 1.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vlmcourse.models.decoder import LanguageTower, plan_attention
from vlmcourse.models.projector import Projector
from vlmcourse.models.vit import VisionTower
from vlmcourse.models.vlm import VLM
from vlmcourse.planner.stages import StageSplit

LossSum = Callable[[Tensor, Tensor], Tensor]
"""Logits [batch, seq, vocab] and labels [batch, seq] to the sum of token losses, a scalar."""
EMBEDDING = "language.embedding.weight"


class StageBlocks(nn.ModuleList):
    """Some of a tower's blocks, named by their numbers in the whole tower; iterates and counts as a list of them."""

    def __init__(self, blocks: nn.ModuleList, numbers: Iterable[int]) -> None:
        super().__init__()
        for number in numbers:
            self.add_module(str(number), blocks[number])

    def __getitem__(self, index: int) -> nn.Module:  # type: ignore[override]
        """Return the block at a place in this list."""
        return list(self)[index]


class VLMStage(VLM):
    """The layers of one stage; its forward continues what the stage before has begun."""

    def __init__(self, model: VLM, split: StageSplit, stage: int, loss_sum: LossSum) -> None:
        """Take the layers of a stage out of a plain model: the very same modules, so drop the model afterwards.

        The last stage gets a copy of a tied embedding where the fusion is on another one.

        Args:
            model: a plain model with weights or on "meta", towers already frozen where wanted.
            split: which layers stand where.
            stage: which of the stages this is.
            loss_sum: what the last stage makes of its logits.

        Raises:
            ValueError: if the split is of a model with other numbers of layers.
        """
        nn.Module.__init__(self)
        found = len(model.vision.blocks), len(model.language.blocks)
        if found != (split.num_vision_layers, split.num_language_layers):
            raise ValueError(
                f"the model has {found[0]} vision and {found[1]} language blocks, the split {split.num_vision_layers} "
                f"and {split.num_language_layers}: make it from this model's shape"
            )
        self.shape, self.split, self.stage = model.shape, split, stage
        self.vision_on_every_batch = False
        self.loss_sum = loss_sum
        self.precision: Callable[[], AbstractContextManager[object]] = nullcontext
        """Makes the context of a forward pass, such as one of autocast."""
        self.dtype = model.projector.down_proj.weight.dtype
        """Of what travels between stages."""
        self.sequence_parts = 1
        """Ranks that hold parts of the sequence between language blocks (sequence parallelism), and pass those on."""
        self.is_first, self.is_last = stage == 0, stage == split.num_stages - 1
        self.has_fusion = stage == split.fusion_stage
        self.vision = self._cut_vision(model.vision)
        self.projector = self._cut_projector(model)
        self.language = self._cut_language(model.language)

    def _cut_vision(self, tower: VisionTower) -> VisionTower:
        with torch.device("meta"):
            cut = VisionTower(dataclasses.replace(tower.shape, num_layers=0))
        cut.shape = tower.shape
        for name in ("patch_embedding", "class_token", "position_embedding"):
            setattr(cut, name, getattr(tower, name) if self.is_first else None)
        cut.blocks = StageBlocks(tower.blocks, self.split.vision_blocks(self.stage))
        return cut

    def _cut_projector(self, model: VLM) -> Projector:
        if self.has_fusion:
            return model.projector
        with torch.device("meta"):
            cut = Projector(model.shape)
        for name, _ in list(cut.named_children()):
            setattr(cut, name, None)
        return cut

    def _cut_language(self, tower: LanguageTower) -> LanguageTower:
        with torch.device("meta"):
            cut = LanguageTower(dataclasses.replace(tower.shape, num_layers=0))
        cut.shape = tower.shape
        for name, belongs in (("embedding", self.has_fusion), ("norm", self.is_last), ("lm_head", self.is_last)):
            setattr(cut, name, getattr(tower, name) if belongs else None)
        if self.holds_tied_copy:
            cut.embedding = copy.deepcopy(tower.embedding)
        cut.blocks = StageBlocks(tower.blocks, self.split.language_blocks(self.stage))
        return cut

    @property
    def is_tied(self) -> bool:
        """Whether this stage has one of two copies of a tied embedding."""
        two = self.shape.language.tied_embeddings and self.split.fusion_stage != self.split.num_stages - 1
        return two and (self.has_fusion or self.is_last)

    @property
    def holds_tied_copy(self) -> bool:
        """Whether this stage's embedding is the second copy: it predicts, and embeds nothing."""
        return self.is_tied and self.is_last

    def forward(
        self,
        x: Tensor,
        *,
        input_ids_BS: Tensor,
        attention_mask_BS: Tensor,
        labels_BS: Tensor,
        num_tiles: Tensor,
        rows: int,
        columns: int,
        is_feature_BS: Tensor | None = None,
        position_B: Tensor | None = None,
    ) -> Tensor:
        """Run this stage's layers on one micro-batch.

        Args:
            x: on the first stage tiles [tiles, 3, height, width], blank ones at the end allowed; on others what the
                stage before returned.
            input_ids_BS: int64 [batch, seq].
            attention_mask_BS: bool [batch, seq], True for a real token.
            labels_BS: int64 [batch, seq].
            num_tiles: int64 [1] on CPU: tiles whose features have a place in the text; the first of those in `x`.
            rows: patches of a tile from top to bottom.
            columns: patches of a tile from left to right.
            is_feature_BS: bool [batch, seq], True where a feature goes; by default wherever the image token stands. A
                generation gives that of its prompts: an image token in an answer has no feature.
            position_B: int64 [batch], the one position of each row whose logits are wanted; for a generation.

        Returns:
            [tiles, 1 + patches, vision width] before the fusion, [batch, seq, language width] from there on (of its own
            positions only, under context parallelism), and on the last stage the sum of token losses, a scalar, or with
            `position_B` whole logits [batch, 1, vocab].
        """
        with self.precision():
            x = self._see(x, rows, columns)
            if self.has_fusion:
                is_feature_BS = input_ids_BS == self.shape.image_token_id if is_feature_BS is None else is_feature_BS
                x = self._fuse(x, input_ids_BS, is_feature_BS, int(num_tiles), rows, columns)
            if self.stage >= self.split.fusion_stage and len(self.language.blocks):
                x = self._read(x, input_ids_BS, attention_mask_BS)
            logits_BSV = self.language.predict(x, position_B) if self.is_last else None
        if logits_BSV is not None:
            return self.loss_sum(logits_BSV, labels_BS) if position_B is None else logits_BSV
        x = x.to(self.dtype)
        # The pipeline detaches outputs in place, which a view does not allow.
        return x.clone() if x._is_view() else x

    def _see(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Run the vision layers; where all of them are here with the projector, the model's own hook does."""
        if self.is_first and self.has_fusion:
            return self.encode_tiles(x, rows, columns)
        x = self.vision.embed(x) if self.is_first else x
        for block in self.vision.blocks:
            x = block(x)
        return x

    def _fuse(
        self, x: Tensor, input_ids_BS: Tensor, is_feature_BS: Tensor, num_tiles: int, rows: int, columns: int
    ) -> Tensor:
        """Place image features among the embeddings of tokens [batch, seq, width]."""
        features_IND = x if self.is_first else self.projector(x[:, 1:], rows, columns)
        size = num_tiles * self.projector.tokens_per_tile(rows, columns)
        index_N1 = torch.nonzero_static(is_feature_BS.flatten(), size=size)
        x_BSD = self.language.embed(input_ids_BS, features_IND.flatten(0, 1), index_N1[:, 0])
        return x_BSD if self.language.take_part is None else self.language.take_part(x_BSD, 1)

    def _read(self, x_BSD: Tensor, input_ids_BS: Tensor, attention_mask_BS: Tensor) -> Tensor:
        positions, mask = plan_attention(attention_mask_BS, input_ids_BS.shape[1], 0, input_ids_BS.device)
        if self.language.take_part is not None:
            positions = self.language.take_part(positions, 1)
        cos, signed_sin = self.language.rope_tables(positions)
        for block in self.language.blocks:
            x_BSD = block(x_BSD, cos, signed_sin, mask)
        return x_BSD

    def boundary_shape(
        self, stage: int, batch_size: int, seq_len: int, num_tiles: int, num_patches: int
    ) -> tuple[int, ...]:
        """Return the shape of what any stage passes on; the last one passes on a scalar.

        Args:
            stage: the stage that passes on, which may stand on another rank.
            batch_size: samples of the micro-batch.
            seq_len: positions of the whole sequence.
            num_tiles: tiles of the micro-batch, blank ones included.
            num_patches: patches of a tile.
        """
        if stage == self.split.num_stages - 1:
            return ()
        if stage < self.split.fusion_stage:
            return num_tiles, 1 + num_patches, self.shape.vision.hidden_size
        if self.language.take_part is not None:
            seq_len = self.language.take_part(torch.empty(1, seq_len, device="meta"), 1).shape[1]
        if any(self.split.language_blocks(earlier) for earlier in range(stage + 1)):
            seq_len //= self.sequence_parts
        return batch_size, seq_len, self.shape.language.hidden_size


def plain_stage(module: nn.Module) -> VLMStage:
    """Return the stage inside whatever it was wrapped in."""
    plain = module.module if isinstance(module, DistributedDataParallel) else module
    if not isinstance(plain, VLMStage):
        raise ValueError(f"a {type(plain).__name__} is no pipeline stage: a wrapper must keep it or be a DDP around it")
    return plain


def layer_parameters(model: VLM) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each layer of a plain model, in the order of `StageSplit`'s layers."""
    vision, language = model.vision, model.language
    yield [*vision.patch_embedding.parameters(), vision.class_token, vision.position_embedding]
    for block in vision.blocks:
        yield list(block.parameters())
    yield [*model.projector.parameters(), *language.embedding.parameters()]
    for block in language.blocks:
        yield list(block.parameters())
    yield [*language.norm.parameters(), *(language.lm_head or language.embedding).parameters()]
