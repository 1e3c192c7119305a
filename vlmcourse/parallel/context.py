"""Context parallelism: each rank of a group works on its own positions of the same sequences, image tokens included.

Enters: a plain (or tensor-parallel) model and a process group. Leaves: the same model, which embeds the whole sequence
but runs blocks, logits and loss on this rank's positions only; attention fetches what it needs of the others by one of
three methods. Tiles are shared out too: each rank encodes some, and all get the features.

Every rank ends with a part of each gradient; the sum over the group is the gradient. All ranks of the group must be
given the same batch. Padding on the right needs no mask. There is no cache: `without_context` lets a model generate.
Chapter 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmcourse.models.decoder import LanguageAttention, attend, is_right_padded
from vlmcourse.models.vlm import VLM
from vlmcourse.parallel.chunks import check_seq_len, chunks_of_rank, sort_parts, take_part
from vlmcourse.parallel.comm import local_part
from vlmcourse.parallel.differentiable import gather_from_ranks
from vlmcourse.parallel.gather_attention import gather_attention
from vlmcourse.parallel.ring import ring_attention
from vlmcourse.parallel.ulysses import check_heads, ulysses_attention

METHODS: dict[str, Callable[[Tensor, Tensor, Tensor, dist.ProcessGroup, str], Tensor]] = {
    "ring": ring_attention,
    "allgather": gather_attention,
    "ulysses": ulysses_attention,
}


@dataclass(frozen=True)
class ContextAttention:
    """What takes the place of `LanguageAttention.attend`: causal attention over positions that several ranks hold."""

    group: dist.ProcessGroup
    method: str
    order: str

    def __call__(self, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Attend with this rank's queries [batch, heads, seq / cp, head width] to the whole sequence.

        Raises:
            ValueError: for a mask, for attention that is not causal, and for keys of a cache.
        """
        if mask is not None or (not is_causal and q_BHSE.shape[2] > 1) or q_BHSE.shape[2] != k_BKSE.shape[2]:
            raise ValueError(
                f"Context-parallel attention of {q_BHSE.shape[2]} queries to {k_BKSE.shape[2]} keys, is_causal="
                f"{is_causal}, {'no' if mask is None else 'with a'} mask: only causal attention without a mask or a "
                "cache is supported; pad on the right, and generate inside `without_context(model)`"
            )
        if isinstance(q_BHSE, DTensor):
            raise ValueError(
                "Context-parallel attention was given a DTensor: projections split by tensor parallelism must return "
                "this rank's heads as plain tensors (use_local_output=True)"
            )
        return METHODS[self.method](q_BHSE, k_BKSE, v_BKSE, self.group, self.order)


def apply_context(model: VLM, group: dist.ProcessGroup, method: str = "ring", order: str = "zigzag") -> VLM:
    """Make a model work on this rank's positions of each sequence, and on its share of the tiles.

    Args:
        model: a plain model, or one whose heads tensor parallelism has split; a pipeline stage with some of its parts.
        group: the cp ranks that share each sequence.
        method: "ring", "allgather" or "ulysses".
        order: "zigzag" or "contiguous"; see `chunks`.

    Returns:
        `model`, changed in place. Its logits are [batch, seq / cp, vocab]; `take_part_of_labels` cuts labels alike.

    Raises:
        ValueError: for an unknown method or order, a group of one rank, a model that has it already, or heads that
            Ulysses cannot share out. Later, from the model's forward, before anything is sent: for a sequence that does
            not fall into equal chunks, a mask that is more than padding on the right, a cache, or `last_only`.
    Communicates: nothing now; in each layer what the method says, and an all-gather of the image features in forward,
        with a reduce-scatter of their gradients in backward.
    """
    _check_arguments(model, group, method, order)
    for attention in _find_attentions(model):
        attention.attend = ContextAttention(group, method, order)
    model.language.take_part = partial(_take_part_in_group, group=group, order=order)
    model.encode_tiles = partial(share_tiles, model.encode_tiles, group=group)  # type: ignore[method-assign]
    model.register_forward_pre_hook(partial(_check_batch, group=group, order=order), with_kwargs=True)
    check_context(model, group.size(), method, order)
    return model


def check_context(model: VLM, cp: int, method: str, order: str) -> None:
    """Refuse a model that does not share its sequences over `cp` ranks in this way, wherever it should.

    Args:
        model: from `apply_context`, or with cp=1 one that shares no sequence.
        cp: ranks that should share each sequence.
        method: that of `apply_context`.
        order: that of `apply_context`.

    Raises:
        RuntimeError: naming the part that works otherwise.
    """
    wanted = (cp, method, order) if cp > 1 else None
    of_attentions = [_find_sharing(part.attend) for part in _find_attentions(model)]
    others = [found for found in of_attentions if found != wanted]
    if others:
        raise RuntimeError(
            f"rank {dist.get_rank()}: {len(others)} of {len(of_attentions)} attentions are {_say_sharing(others[0])} "
            f"instead of {_say_sharing(wanted)}: call apply_context once, on the whole model"
        )
    for name, hook in (("language.take_part", model.language.take_part), ("encode_tiles", model.encode_tiles)):
        size = hook.keywords["group"].size() if isinstance(hook, partial) else 1
        if size != cp:
            raise RuntimeError(
                f"rank {dist.get_rank()}: {name} is shared by {size} rank(s) instead of {cp}: call apply_context, and "
                "let nothing after it replace this hook"
            )


def _find_sharing(attend_as: object) -> tuple[int, str, str] | None:
    """Return over how many ranks attention works, by which method and order; None if over none."""
    if not isinstance(attend_as, ContextAttention):
        return None
    return attend_as.group.size(), attend_as.method, attend_as.order


def _say_sharing(sharing: tuple[int, str, str] | None) -> str:
    return "context-parallel over {} ranks ({}, {})".format(*sharing) if sharing else "not context-parallel"


@contextmanager
def without_context(model: VLM) -> Iterator[None]:
    """Let each rank work on whole sequences by itself for a while, as generation and evaluation need.

    Inside, the model takes what a plain one takes, caches and left padding too, and this module sends nothing. Where
    weights are sharded over the group (FSDP), its ranks must still make the same number of forward passes.
    """
    attentions = _find_attentions(model)
    shared = [part.attend for part in attentions], model.language.take_part, model.encode_tiles
    model.language.take_part = None
    if isinstance(model.encode_tiles, partial):
        model.encode_tiles = model.encode_tiles.args[0]  # type: ignore[method-assign]
    for part in attentions:
        part.attend = attend
    try:
        yield
    finally:
        for part, attend_together in zip(attentions, shared[0], strict=True):
            part.attend = attend_together
        model.language.take_part = shared[1]
        model.encode_tiles = shared[2]  # type: ignore[method-assign]


def take_part_of_labels(labels_BS: Tensor, group: dist.ProcessGroup, order: str = "zigzag") -> Tensor:
    """Return the labels [batch, seq / cp] of this rank's positions: those that its logits predict.

    Args:
        labels_BS: int64 [batch, seq], shifted before they are cut: the label of a chunk's last position is the first
            token of the next chunk, which another rank may hold.
        group: the cp ranks.
        order: that of `apply_context`.

    Raises:
        ValueError: if the sequence does not fall into equal chunks.
    """
    return _take_part_in_group(labels_BS, 1, group, order)


def gather_sequence(part: Tensor, dim: int, group: dist.ProcessGroup, order: str = "zigzag") -> Tensor:
    """Put the parts of all ranks together again, such as logits [batch, seq / cp, vocab] into [batch, seq, vocab].

    Communicates: an all-gather over `group`, (cp - 1) x the bytes of `part`; a reduce-scatter in backward.
    """
    parts = gather_from_ranks(part, group)
    return sort_parts(torch.cat(parts.unbind(0), dim), dim, group.size(), order)


def share_tiles(
    encode: Callable[[Tensor, int, int], Tensor],
    pixel_values_ICHW: Tensor,
    rows: int,
    columns: int,
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """Encode this rank's share of the tiles, and return the features of all.

    Every rank encodes the same number of tiles, at least one: where they do not divide, the last ranks fill up with
    blank tiles, whose features are dropped. So all ranks always take part in all collectives.

    Args:
        encode: turns tiles into features [tiles, tokens a tile, width]; `VLM.encode_tiles` of one process.
        pixel_values_ICHW: all tiles of the batch, the same on every rank.
        rows: patches of a tile from top to bottom.
        columns: patches of a tile from left to right.
        group: the ranks that share the tiles.

    Returns:
        Features of all tiles, equal on all ranks.
    Communicates: an all-gather of features over `group`; in backward a reduce-scatter, which brings each feature's
        gradient, summed over all ranks, to the rank that encoded it.
    """
    num_tiles = pixel_values_ICHW.shape[0]
    share = max(1, -(-num_tiles // group.size()))
    mine = pixel_values_ICHW[group.rank() * share : (group.rank() + 1) * share]
    blank = pixel_values_ICHW.new_zeros(share - mine.shape[0], *pixel_values_ICHW.shape[1:])
    features_IND = encode(torch.cat((mine, blank)), rows, columns)
    return gather_from_ranks(features_IND, group).flatten(0, 1)[:num_tiles]


def _take_part_in_group(tensor: Tensor, dim: int, group: dist.ProcessGroup, order: str) -> Tensor:
    return take_part(tensor, dim, group.rank(), group.size(), order)


def _find_attentions(model: nn.Module) -> list[LanguageAttention]:
    return [module for module in model.modules() if isinstance(module, LanguageAttention)]


def _check_arguments(model: VLM, group: dist.ProcessGroup, method: str, order: str) -> None:
    cp = group.size()
    if method not in METHODS:
        raise ValueError(f"context-parallel method {method!r}: choose one of {', '.join(METHODS)}")
    chunks_of_rank(0, cp, order)  # refuses an unknown order
    if cp == 1:
        raise ValueError("Context parallelism over 1 rank splits nothing: set cp to 2 or more, or do not apply it")
    if model.language.take_part is not None:
        raise ValueError("This model already takes a part of each sequence: apply context parallelism once")
    if method == "ulysses":
        for attention in _find_attentions(model):
            check_heads(local_part(attention.q_proj.weight).shape[0] // attention.head_width, cp)


def _check_batch(model: VLM, args: tuple[Any, ...], kwargs: dict[str, Any], group: Any, order: str) -> None:
    """Refuse what the model could only do wrongly; all ranks of the group see the same batch, so all refuse."""
    if model.language.take_part is None:
        return  # inside `without_context`
    # By name: a pipeline stage's forward takes the same things, and others, in another order.
    given = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
    check_seq_len(given["input_ids_BS"].shape[1], group.size(), order)
    mask_BS = given.get("attention_mask_BS")
    if mask_BS is not None and not is_right_padded(mask_BS):
        raise ValueError(
            "A context-parallel model was given a mask with real tokens after padding: it attends without a mask, and "
            "only padding on the right needs none; pad on the right, or use cp=1"
        )
    if given.get("kv_cache") is not None or given.get("last_only"):
        raise ValueError(
            "A context-parallel model was asked to generate (kv_cache or last_only): no rank holds all keys, nor the "
            "last position's logits; generate inside `with without_context(model):`"
        )
