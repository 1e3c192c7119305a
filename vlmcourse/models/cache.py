"""Keys and values of the tokens a decoder has already seen, so that each new token costs one position."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """One buffer of keys and one of values per layer, allocated at the first token.

    Bytes: 2 (keys and values) x layers x batch x key/value heads x max_tokens x head width x bytes an element.
    """

    def __init__(self, max_tokens: int) -> None:
        """Make an empty cache.

        Args:
            max_tokens: positions it must hold, prompt and answer together.
        """
        self.max_tokens = max_tokens
        self.num_tokens = 0
        """Positions filled so far; the decoder moves it on after its last block."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [batch, kv heads, new, head width] and return all of them.

        Raises:
            ValueError: if the new tokens do not fit.
        """
        end = self.num_tokens + k_BKSE.shape[2]
        if end > self.max_tokens:
            raise ValueError(f"A cache of {self.max_tokens} tokens cannot hold {end}: make it with max_tokens={end}")
        if layer not in self._layers:
            size = (*k_BKSE.shape[:2], self.max_tokens, k_BKSE.shape[3])
            self._layers[layer] = (torch.empty_like(k_BKSE[:, :, :1]).new_empty(size), v_BKSE.new_empty(size))
        keys, values = self._layers[layer]
        keys[:, :, self.num_tokens : end] = k_BKSE
        values[:, :, self.num_tokens : end] = v_BKSE
        return keys[:, :, :end], values[:, :, :end]
