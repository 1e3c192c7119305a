"""The whole vision-language model: tiles become visual tokens, which take the places of image tokens in the text.

Enters: token ids, tiles and a padding mask. Leaves: logits. A batch may mix text-only samples with samples of any
number of tiles. Losses, freezing and everything that spans devices live elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from vlmcourse.models.cache import KVCache
from vlmcourse.models.decoder import LanguageTower
from vlmcourse.models.init import init_weights
from vlmcourse.models.projector import Projector
from vlmcourse.models.vit import VisionTower
from vlmcourse.presets import VLMShape


class VLM(nn.Module):
    """A vision tower, a projector and a language tower, as children of those names."""

    def __init__(self, shape: VLMShape) -> None:
        """Build the modules; their weights are undefined until `init_weights` or a checkpoint fills them.

        Raises:
            ValueError: if the numbers of `shape` do not fit together; the message lists every problem.
        """
        super().__init__()
        check_shape(shape)
        self.shape = shape
        self.vision = VisionTower(shape.vision)
        self.projector = Projector(shape)
        self.language = LanguageTower(shape.language)
        self.vision_on_every_batch = False
        """Run the vision tower on a blank tile for batches without images outside training too."""

    def forward(
        self,
        input_ids_BS: Tensor,
        pixel_values_ICHW: Tensor | None = None,
        attention_mask_BS: Tensor | None = None,
        *,
        tiles_per_sample: Sequence[int] | None = None,
        sample_ids: Sequence[str] | None = None,
        kv_cache: KVCache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Predict the next token at every position.

        In training, a batch without images runs one blank tile whose features go nowhere: vision tower and projector
        then get gradients of zero rather than none.

        Args:
            input_ids_BS: int64 [batch, seq]; `shape.image_token_id` marks the places of image features.
            pixel_values_ICHW: tiles of all samples, in order [tiles, 3, height, width]; None or zero tiles for text.
            attention_mask_BS: bool [batch, seq], True for a real token; with a cache [batch, cached + seq]. None if
                there is no padding. Training pads on the right, generation on the left.
            tiles_per_sample: tiles of each sample; the image tokens are then checked sample by sample.
            sample_ids: names of the samples, for error messages.
            kv_cache: keys and values of earlier tokens; images belong to the first call with a cache.
            last_only: compute the logits of the last position alone.

        Returns:
            Logits [batch, seq, vocab], or [batch, 1, vocab] with `last_only`, on the device of the ids.

        Raises:
            ValueError: if image tokens and image features differ in number, naming both counts and the sample; if the
                tiles or the mask have the wrong shape; if the sequence is longer than `max_seq_len`.
        """
        num_past = 0 if kv_cache is None else kv_cache.num_tokens
        _check_mask(input_ids_BS, attention_mask_BS, num_past)
        features_ND, feature_index_N = None, None
        if num_past == 0:
            features_ND, feature_index_N = self._image_features(
                input_ids_BS, pixel_values_ICHW, tiles_per_sample, sample_ids
            )
        return self.language(
            input_ids_BS, features_ND, feature_index_N, attention_mask_BS, kv_cache=kv_cache, last_only=last_only
        )

    def _image_features(
        self,
        input_ids_BS: Tensor,
        pixel_values_ICHW: Tensor | None,
        tiles_per_sample: Sequence[int] | None,
        sample_ids: Sequence[str] | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Encode the tiles, and find where in the flattened batch each feature goes."""
        num_tiles = 0 if pixel_values_ICHW is None else pixel_values_ICHW.shape[0]
        is_image_BS = input_ids_BS == self.shape.image_token_id
        rows, columns, per_tile = 0, 0, self.shape.num_visual_tokens_per_tile
        if pixel_values_ICHW is not None and num_tiles:
            rows, columns = self.vision.patch_grid(pixel_values_ICHW)
            per_tile = self.projector.tokens_per_tile(rows, columns)
        check_image_tokens(is_image_BS, num_tiles, per_tile, tiles_per_sample, sample_ids)
        if pixel_values_ICHW is None or not num_tiles:
            in_training = self.training and torch.is_grad_enabled()
            if not (in_training or self.vision_on_every_batch):
                return None, None
            side_px = self.shape.vision.image_size_px
            pixel_values_ICHW = torch.zeros(1, 3, side_px, side_px, device=input_ids_BS.device)
            rows, columns = self.vision.patch_grid(pixel_values_ICHW)
        features_IND = self.encode_tiles(pixel_values_ICHW, rows, columns)
        index_N1 = torch.nonzero_static(is_image_BS.flatten(), size=num_tiles * per_tile)
        return features_IND.flatten(0, 1), index_N1[:, 0]

    def encode_tiles(self, pixel_values_ICHW: Tensor, rows: int, columns: int) -> Tensor:
        """Turn tiles of `rows` x `columns` patches into features [tiles, tokens a tile, language width].

        Context parallelism puts its own in this place, which shares the tiles out between devices.
        """
        return self.projector(self.vision(pixel_values_ICHW), rows, columns)


def build_model(
    shape: VLMShape,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> VLM:
    """Build a model with fresh weights.

    Args:
        shape: what to build; `presets.get_model` has some.
        device: where the weights live; "meta" builds the modules without any, in no memory.
        dtype: of every weight.
        seed: the same seed gives the same weights and leaves torch's global generator alone; None draws from that.

    Returns:
        The model, in training mode.

    Raises:
        ValueError: if the numbers of `shape` do not fit together.
    """
    with torch.device("meta"):
        model = VLM(shape).to(dtype)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    init_weights(model, seed)
    return model


def check_shape(shape: VLMShape) -> None:
    """Check that the numbers of a shape fit together.

    Raises:
        ValueError: naming every pair of numbers that do not.
    """
    vision, language = shape.vision, shape.language
    found = []
    for tower, width, num_heads in (
        ("vision", vision.hidden_size, vision.num_heads),
        ("language", language.hidden_size, language.num_heads),
    ):
        if width % num_heads:
            found.append(f"{tower}.num_heads = {num_heads} must divide {tower}.hidden_size = {width}")
    if language.num_heads % language.num_kv_heads:
        found.append(
            f"language.num_kv_heads = {language.num_kv_heads} must divide language.num_heads = {language.num_heads}"
        )
    if (language.hidden_size // language.num_heads) % 2:
        found.append(f"language heads of {language.hidden_size // language.num_heads} channels: RoPE pairs need even")
    if vision.image_size_px % vision.patch_size_px:
        found.append(
            f"vision.patch_size_px = {vision.patch_size_px} must divide vision.image_size_px = {vision.image_size_px}"
        )
    block_side = round(1 / shape.pixel_shuffle_fraction)
    side = vision.image_size_px // vision.patch_size_px
    if block_side < 1 or abs(block_side * shape.pixel_shuffle_fraction - 1) > 1e-9:
        found.append(f"pixel_shuffle_fraction = {shape.pixel_shuffle_fraction} must be 1, 1/2, 1/3, ...")
    elif side % block_side:
        found.append(f"{side} patches a side do not fold by {block_side}: change vision.image_size_px")
    if shape.pixel_shuffle_version not in ("v1", "v2"):
        found.append(f"pixel_shuffle_version = {shape.pixel_shuffle_version!r} must be 'v1' or 'v2'")
    if not 0 <= shape.image_token_id < language.vocab_size:
        found.append(f"image_token_id = {shape.image_token_id} must be in the vocabulary of {language.vocab_size}")
    if found:
        raise ValueError(f"The shape {shape.name!r} cannot be built: " + "; ".join(found))


def check_image_tokens(
    is_image_BS: Tensor,
    num_tiles: int,
    tokens_per_tile: int,
    tiles_per_sample: Sequence[int] | None = None,
    sample_ids: Sequence[str] | None = None,
) -> None:
    """Check that the text has exactly one image token for each image feature.

    Values that are not there (meta, fake tensors) are not checked.

    Args:
        is_image_BS: bool [batch, seq], True at image tokens.
        num_tiles: tiles in the batch.
        tokens_per_tile: image features of one tile.
        tiles_per_sample: tiles of each sample; None checks the total of the batch.
        sample_ids: names for the message.

    Raises:
        ValueError: naming both counts and the sample.
    """
    batch_size = is_image_BS.shape[0]
    names = [f"sample {i}" if sample_ids is None else f"sample {sample_ids[i]!r}" for i in range(batch_size)]
    if tiles_per_sample is not None and (len(tiles_per_sample) != batch_size or sum(tiles_per_sample) != num_tiles):
        raise ValueError(
            f"tiles_per_sample lists {sum(tiles_per_sample)} tiles of {len(tiles_per_sample)} samples, but the batch "
            f"has {num_tiles} tiles and {batch_size} samples"
        )
    if is_image_BS.is_meta or isinstance(is_image_BS, FakeTensor):
        return
    counts = is_image_BS.sum(dim=1).tolist()
    if tiles_per_sample is not None:
        for name, count, tiles in zip(names, counts, tiles_per_sample, strict=True):
            if count != tiles * tokens_per_tile:
                raise ValueError(
                    f"{name} has {count} image tokens but {tiles * tokens_per_tile} image features "
                    f"({tiles} tiles x {tokens_per_tile}): write {tokens_per_tile} image tokens for each tile, and do "
                    "not cut a sample inside an image"
                )
    elif sum(counts) != num_tiles * tokens_per_tile:
        listed = ", ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=True))
        raise ValueError(
            f"The batch has {sum(counts)} image tokens ({listed}) but {num_tiles * tokens_per_tile} image features "
            f"({num_tiles} tiles x {tokens_per_tile}): write {tokens_per_tile} image tokens for each tile, or give "
            "tiles_per_sample to see which sample is wrong"
        )


def _check_mask(input_ids_BS: Tensor, attention_mask_BS: Tensor | None, num_past: int) -> None:
    """Raise ValueError unless ids are [batch, seq] and the mask is a bool of [batch, cached + seq]."""
    if input_ids_BS.dim() != 2:
        raise ValueError(f"input_ids has shape {list(input_ids_BS.shape)}: it must be [batch, seq]")
    if attention_mask_BS is None:
        return
    want = [input_ids_BS.shape[0], num_past + input_ids_BS.shape[1]]
    if attention_mask_BS.dtype != torch.bool or list(attention_mask_BS.shape) != want:
        raise ValueError(
            f"attention_mask is {attention_mask_BS.dtype} of shape {list(attention_mask_BS.shape)}: it must be "
            f"torch.bool of shape {want}, True for a real token"
        )
