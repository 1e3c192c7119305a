"""AdamW for weights that are stored in bf16: with an fp32 master copy of them, or without one and rounding at random.

Enters: bf16 parameters, plain or sharded, with bf16 gradients. Leaves: updated ones. All arithmetic is in fp32; what
differs is what is kept. `bf16_master` keeps fp32 weights and moments: 2 + 2 + 12 = 16 bytes a parameter with weight and
gradient. `bf16_pure` keeps bf16 alone: 2 + 2 + 4 = 8 bytes.

With both, micro-batches are added up in bf16, in `.grad`: a sum of 64 was 0.8 % off where chapter 3 measures it,
against 0.2 % for one rounding at the end.

Source: Loshchilov and Hutter 2019 (AdamW), algorithm 2; Micikevicius et al. 2018, section 3.1 (master weights);
Zamirai et al. 2020, "Revisiting BFloat16 Training" (arXiv:2010.06192), section 4 (stochastic rounding of updates).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from vlmcourse.parallel.comm import local_part
from vlmcourse.train.rounding import global_index, rounding_key, stochastic_round

ROUNDED = ("exp_avg", "exp_avg_sq")


class LowPrecisionAdamW(Optimizer):
    """AdamW over bf16 weights; its state has the layout of torch.optim.AdamW's, and `master` where it keeps one."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        keeps_master: bool,
        seed: int = 0,
        name_parameters: Callable[[], Mapping[Tensor, str]] | None = None,
    ) -> None:
        """Set rates and what is kept.

        Args:
            params: parameters or groups.
            lr: learning rate, of groups that have none.
            betas: decay of the two moments.
            eps: added to the root of the second moment.
            weight_decay: per unit of learning rate, of groups that have none.
            keeps_master: keep fp32 weights and moments; else round weights and moments at random to bf16.
            seed: of the roundings.
            name_parameters: gives each parameter's name in the plain model, on which its roundings depend: they are
                then the same on all copies. By default parameters are numbered, which is right in one process only.

        Raises:
            ValueError: if a parameter is not bf16.
        """
        self.keeps_master, self.seed = keeps_master, seed
        self._name_parameters = name_parameters or self._number
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                if p.dtype != torch.bfloat16:
                    raise ValueError(
                        f"a parameter is {p.dtype}: this optimizer is for bfloat16 weights; cast them first"
                    )

    def _number(self) -> dict[Tensor, str]:
        every = [p for group in self.param_groups for p in group["params"]]
        return {p: str(number) for number, p in enumerate(every)}

    def init_state(self, parameter: Tensor) -> None:
        """Make the state of a parameter that has none, as before its first step."""
        state, dtype = self.state[parameter], torch.float32 if self.keeps_master else torch.bfloat16
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for key in ROUNDED:
            state[key] = torch.zeros_like(parameter, dtype=dtype).detach()
        if self.keeps_master:
            state["master"] = parameter.detach().to(torch.float32)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        names = self._name_parameters()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state[p]:
                        self.init_state(p)
                    self._update(p, group, names[p])
        return loss

    def _update(self, p: Tensor, group: dict[str, Any], name: str) -> None:
        """Make one parameter's step, on the part of it that this rank stores."""
        state, (beta1, beta2) = self.state[p], group["betas"]
        state["step"] += 1
        step = 1 if isinstance(state["step"], FakeTensor) else int(state["step"])  # a dry run has no values
        gradient, weight = local_part(p.grad).float(), local_part(p).float()  # type: ignore[arg-type]
        mean, square = (local_part(state[key]).float() for key in ROUNDED)
        if self.keeps_master:
            weight = local_part(state["master"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        weight.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step))
        if self.keeps_master:  # the fp32 tensors were changed in place
            local_part(p).copy_(weight)
            return
        index = global_index(p)
        for what, tensor, target in (
            ("", weight, p),
            *zip(ROUNDED, (mean, square), map(state.get, ROUNDED), strict=True),
        ):
            key = rounding_key(self.seed, step, f"{what} of {name}")
            local_part(target).copy_(stochastic_round(tensor, key, index))  # type: ignore[arg-type]
