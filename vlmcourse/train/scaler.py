"""A loss scaler: fp16 gradients made large enough not to vanish, small enough not to overflow.

Enters: gradients of a loss that was multiplied by `scale`. Leaves: the gradients divided by it, and whether this step
may be made. After an overflow the step is skipped and the scale halved; after `growth_interval` good steps in a row it
is doubled. All ranks decide alike, whatever part of the gradient each holds. Chapter 3.

Source: Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740), section 3.2; torch.amp.GradScaler,
which has no minimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vlmcourse.parallel.comm import local_part, max_over_ranks
from vlmcourse.parallel.ranks import Ranks
from vlmcourse.planner.formats import FORMATS
from vlmcourse.values import check_counts


class LossScaler:
    """One number, `scale`, and the rule by which it changes; use `scale`, `unscale` and `update` in this order."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        num_averaged: int = 1,
        enabled: bool = True,
    ) -> None:
        """Set the rule.

        Args:
            ranks: this process's place; all ranks have a scaler.
            initial_scale: what the first loss is multiplied by.
            growth_factor: applied after `growth_interval` steps without overflow; above 1.
            backoff_factor: applied after an overflow; between 0 and 1.
            growth_interval: steps in a row; an overflow begins the count anew.
            min_scale: backing off ends here; 0 is no limit, as in torch.amp.GradScaler.
            num_averaged: ranks over which gradients are averaged after backward, where the loss was multiplied by
                their number to make up for it: backward itself then works with the same numbers on any number of ranks.
            enabled: False keeps a scale of 1 and looks at nothing: formats with the exponents of fp32 need no scaler.

        Raises:
            ValueError: if a factor is on the wrong side of 1, a count below 1, or a scale not one to multiply by.
        """
        check_counts(1, growth_interval=growth_interval, num_averaged=num_averaged)
        if not 0 <= min_scale <= initial_scale < math.inf or initial_scale == 0:
            raise ValueError(
                f"initial_scale = {initial_scale}, min_scale = {min_scale}: the first scale must be finite, above 0 "
                "and no less than the smallest, which is 0 or more; change one"
            )
        if not 1 < growth_factor < math.inf or not 0 < backoff_factor < 1:
            raise ValueError(
                f"growth_factor = {growth_factor}, backoff_factor = {backoff_factor}: the scale must grow by a factor "
                "above 1 and back off by one between 0 and 1"
            )
        self.enabled, self._ranks = enabled, ranks
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.min_scale = growth_interval, min_scale
        self._num_averaged = num_averaged
        self.scale = initial_scale if enabled else 1.0
        """What the loss of the next step is multiplied by."""
        self.good_steps = 0
        """Steps without overflow since the scale last changed."""
        self.num_skipped = 0
        """Steps that were not made."""
        self.overflowed = False
        """Whether the gradients of the present step were not finite on some rank."""

    @property
    def grad_scale(self) -> float:
        """What exchanged gradients are larger by: the scale, shared by the ranks that are averaged over."""
        return self.scale / self._num_averaged if self.enabled else 1.0

    @torch.no_grad()
    def unscale(self, gradients: nn.Module | Iterable[Tensor]) -> bool:
        """Divide this rank's gradients by `grad_scale`, in place, and find out whether they can be used.

        Call it once a step, after the exchange of gradients and before clipping, which needs their true norm.

        Args:
            gradients: tensors of any placement, or a module whose parameters' `.grad` are meant.

        Returns:
            True if every gradient on every rank is finite: only then make the step. The same on all ranks.
        Communicates: an all-reduce of 8 bytes over all ranks; nothing where the scaler is not enabled.
        """
        if not self.enabled:
            return True
        if isinstance(gradients, nn.Module):
            gradients = [p.grad for p in gradients.parameters() if p.grad is not None]
        parts = [local_part(gradient) for gradient in gradients]
        # Before the division: a gradient that overflowed stays infinite, whatever it is divided by.
        found = sum(float(not torch.isfinite(part).all()) for part in parts)
        if parts:
            torch._foreach_mul_(parts, 1.0 / self.grad_scale)
        # A rank whose own shards are fine must skip too: it would go on with other weights.
        self.overflowed = max_over_ranks([found], self._ranks)[0] > 0
        return not self.overflowed

    def update(self) -> None:
        """Change the scale by what `unscale` found; call it at the end of every step, made or skipped."""
        if not self.enabled:
            return
        if self.overflowed:
            self.scale = max(self.min_scale, self.scale * self.backoff_factor)
            self.good_steps, self.num_skipped = 0, self.num_skipped + 1
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            if self.scale * self.growth_factor <= FORMATS["fp32"].max:
                self.scale *= self.growth_factor
            self.good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on exactly, as plain numbers for JSON; empty if not enabled."""
        if not self.enabled:
            return {}
        return {"scale": self.scale, "good_steps": self.good_steps, "num_skipped": self.num_skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; nothing happens for an empty one, or if not enabled."""
        if self.enabled and state:
            self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
            self.num_skipped = int(state["num_skipped"])
