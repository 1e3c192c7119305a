"""Answers to lab 5.1: right ones in other styles, and wrong ones with their points and the words they should get."""

# They run on ranks, to which classes travel by value, with what they use from this module.
from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

# --- Right ----------------------------------------------------------------------------------------------------------


class Owners:
    """Whole parameters, each dealt to the rank that has least so far; PyTorch's AdamW on a rank's own."""

    inner_class: Any = torch.optim.AdamW

    def __init__(self, params, lr, betas, eps, weight_decay):
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.params = [p for p in params if p.requires_grad]
        self.owners = self.deal()
        self.inner = self.inner_class(self.mine(), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def deal(self):
        loads, owners = [(0, rank) for rank in range(self.n)], [0] * len(self.params)
        for index in sorted(range(len(self.params)), key=lambda i: -self.params[i].numel()):
            load, owners[index] = heapq.heappop(loads)
            heapq.heappush(loads, (load + self.params[index].numel(), owners[index]))
        return owners

    def mine(self):
        return [p for p, owner in zip(self.params, self.owners, strict=True) if owner == self.rank]

    def average(self):
        for p in self.params:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= self.n

    def update(self):
        self.inner.step()

    def share(self):
        for p, owner in zip(self.params, self.owners, strict=True):
            dist.broadcast(p.data, src=owner)

    def step(self):
        self.average()
        self.update()
        self.share()

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class RoundRobin:
    """Owners by index; each gradient is reduced to its owner, and all broadcasts are under way at once."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        self.params, self.settings = list(params), (lr, betas, eps, weight_decay)
        self.moments: dict[int, list] = {}

    @torch.no_grad()
    def step(self):
        lr, (b1, b2), eps, decay = self.settings
        rank, n = dist.get_rank(), dist.get_world_size()
        works: list[Any] = []
        for index, p in enumerate(self.params):
            if p.grad is None:
                continue
            dist.reduce(p.grad, dst=index % n)
            if index % n == rank:
                grad = p.grad / n
                m, v, t = self.moments.get(index, (torch.zeros_like(p), torch.zeros_like(p), 0))
                m, v, t = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad * grad, t + 1
                self.moments[index] = [m, v, t]
                p -= lr * (decay * p + (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps))
            works.append(dist.broadcast(p.detach(), src=index % n, async_op=True))
        for work in works:
            work.wait()

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class Flat:
    """All numbers in one row, padded and cut in N; a count of steps for each number."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        self.params = [p for p in params if p.requires_grad]
        self.lr, (self.b1, self.b2), self.eps, self.decay = lr, betas, eps, weight_decay
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.size = self.share_size(sum(p.numel() for p in self.params))
        self.first, self.second = torch.zeros(self.size), torch.zeros(self.size)
        self.counts = [0] * len(self.params)

    def share_size(self, total):
        return -(-total // self.n)

    def row(self, parts):
        flat = torch.cat([part.flatten() for part in parts])
        return torch.nn.functional.pad(flat, (0, self.size * self.n - len(flat)))

    def reduce(self, gradient):
        dist.all_reduce(gradient)
        return self.own(gradient) / self.n

    def own(self, row):
        return row[self.rank * self.size : (self.rank + 1) * self.size]

    def count(self):
        for index, p in enumerate(self.params):
            self.counts[index] += p.grad is not None
        return self.row([torch.full_like(p, t) for p, t in zip(self.params, self.counts, strict=True)])

    @torch.no_grad()
    def step(self):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        gradient = self.reduce(self.row(grads))
        steps = self.own(self.count()).clamp(min=1)
        there = self.own(self.row([torch.full_like(p, float(p.grad is not None)) for p in self.params])) > 0
        weights = self.own(self.row([p.data for p in self.params]))
        first = self.b1 * self.first + (1 - self.b1) * gradient
        second = self.b2 * self.second + (1 - self.b2) * gradient.square()
        change = first / (1 - self.b1**steps) / ((second / (1 - self.b2**steps)).sqrt() + self.eps)
        new = weights * (1 - self.lr * self.decay) - self.lr * change
        self.first, self.second = torch.where(there, first, self.first), torch.where(there, second, self.second)
        self.put_back(torch.where(there, new, weights))

    def put_back(self, mine):
        whole = torch.empty(self.size * self.n)
        dist.all_gather_into_tensor(whole, mine.contiguous())
        start = 0
        for p in self.params:
            p.copy_(whole[start : start + p.numel()].view_as(p))
            start += p.numel()

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class FlatScattered(Flat):
    """The gradient is reduced and scattered in one call."""

    def reduce(self, gradient):
        mine = torch.empty(self.size)
        dist.reduce_scatter_tensor(mine, gradient)
        return mine.div_(self.n)


class Slices:
    """A slice of every parameter on each rank, and PyTorch's AdamW on the slices."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        self.params = [p for p in params if p.requires_grad]
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.slices = [torch.nn.Parameter(self.cut(p.detach())[self.rank].clone()) for p in self.params]
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.adam = torch.optim.AdamW(self.slices, **options)

    def cut(self, tensor: Tensor):
        flat = tensor.flatten()
        size = -(-len(flat) // self.n)
        return torch.cat([flat, flat.new_zeros(size * self.n - len(flat))]).view(self.n, size)

    def step(self):
        for p, part in zip(self.params, self.slices, strict=True):
            part.grad = None
            if p.grad is not None:
                mean = p.grad.div(self.n)
                dist.all_reduce(mean, op=dist.ReduceOp.SUM)
                part.grad = self.cut(mean)[self.rank].clone()
        self.adam.step()
        for p, part in zip(self.params, self.slices, strict=True):
            part.grad = None
            rows = [torch.empty_like(part.data) for _ in range(self.n)]
            dist.all_gather(rows, part.data)
            p.data.copy_(torch.cat(rows)[: p.numel()].view_as(p))

    def zero_grad(self):
        for p, part in zip(self.params, self.slices, strict=True):
            p.grad = part.grad = None


class OwnersPadded(Owners):
    """Owners' weights in a row of the longest share's size, all gathered at once."""

    def share(self):
        pairs = list(zip(self.params, self.owners, strict=True))
        sizes = [sum(p.numel() for p, owner in pairs if owner == rank) for rank in range(self.n)]
        mine = torch.cat([*(p.data.flatten() for p in self.mine()), torch.zeros(max(sizes) - sizes[self.rank])])
        rows = [torch.empty(max(sizes)) for _ in range(self.n)]
        dist.all_gather(rows, mine)
        for rank, row in enumerate(rows):
            parts = row[: sizes[rank]].split([p.numel() for p, owner in pairs if owner == rank])
            for p, part in zip((p for p, owner in pairs if owner == rank), parts, strict=True):
                p.data.copy_(part.view_as(p))


class InNumpy(Owners):
    """Adam by hand on arrays; what is kept is written as `keep` says."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, lr, betas, eps, weight_decay)
        del self.inner
        self.settings, self.state = (lr, *betas, eps, weight_decay), self.make_state()

    def make_state(self):
        return {}

    def keep(self, moment):
        return moment

    @torch.no_grad()
    def update(self):
        lr, b1, b2, eps, decay = self.settings
        for index, p in enumerate(self.params):
            if p.grad is None or all(p is not each for each in self.mine()):
                continue
            grad, (m, v, t) = p.grad.numpy(), self.state.get(index, (0.0, 0.0, 0))
            m, v = (np.asarray(moment, dtype=np.float32) for moment in (m, v))
            m, v, t = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2, t + 1
            self.state[index] = (self.keep(m), self.keep(v), t)
            change = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
            p.copy_(torch.from_numpy((1 - lr * decay) * p.numpy() - lr * change))


class InLists(InNumpy):
    def keep(self, moment):
        return moment.tolist()


RIGHT = (Owners, RoundRobin, Flat, FlatScattered, Slices, OwnersPadded, InNumpy, InLists)

# --- Wrong ----------------------------------------------------------------------------------------------------------


class HoldsAll(Owners):
    def mine(self):
        return self.params


class HoldsAllAndSharesNothing(HoldsAll):
    def share(self):
        pass


class AllInNumpy(InNumpy):
    def mine(self):
        return self.params

    def share(self):
        pass


class AllInLists(AllInNumpy):
    def keep(self, moment):
        return moment.tolist()


class AllInItsClass(AllInNumpy):
    """Whole moments in a dictionary of the class, which is older than the optimizer."""

    of_class: Any = {"": []}  # holds a container, so that `gc` lists it from the beginning

    def make_state(self):
        self.of_class.clear()
        return self.of_class


class CopiesAllWeights(Owners):
    """The moments of its share, and a whole fp32 copy of the weights."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, lr, betas, eps, weight_decay)
        self.copies = [p.detach().clone() for p in self.params]


class NeverShares(Owners):
    def share(self):
        pass


class Summed(Owners):
    def average(self):
        for p in self.params:
            if p.grad is not None:
                dist.all_reduce(p.grad)


class DividedTwice(Owners):
    def average(self):
        super().average()
        for p in self.params:
            if p.grad is not None:
                p.grad /= self.n


class OwnGradient(Owners):
    def average(self):
        pass


class OwnGradientAndNoSharing(HoldsAllAndSharesNothing):
    def average(self):
        pass


class StepsFirst(Owners):
    def step(self):
        self.update()
        self.average()
        self.share()


class MeanNotUsed(Owners):
    def average(self):
        for p in self.params:
            if p.grad is not None:
                mean = p.grad.clone()
                dist.all_reduce(mean)
                mean /= self.n


class DividesOnly(Owners):
    def average(self):
        for p in self.params:
            if p.grad is not None:
                p.grad /= self.n


class WrongOwner(Owners):
    def share(self):
        for p, owner in zip(self.params, self.owners, strict=True):
            dist.broadcast(p.data, src=(owner + 1) % self.n)


class AllFromRankZero(Owners):
    def share(self):
        for p in self.params:
            dist.broadcast(p.data, src=0)


class OnlyRankZeroUpdates(Owners):
    def update(self):
        if self.rank == 0:
            self.inner.step()


class AllOnRankZero(Owners):
    def deal(self):
        return [0] * len(self.params)

    def mine(self):
        return self.params if self.rank == 0 else [torch.nn.Parameter(torch.zeros(1))]


class WeightsAveraged(Owners):
    def share(self):
        for p in self.params:
            dist.all_reduce(p.data)
            p.data /= self.n


class SharesBeforeTheStep(Owners):
    def step(self):
        self.average()
        self.share()
        self.update()


class WithPenalty(Owners):
    inner_class = torch.optim.Adam


class Decays(Owners):
    times = 1

    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, lr, betas, eps, weight_decay)
        self.factor = 1 - lr * weight_decay

    def update(self):
        for p in self.mine():
            if p.grad is not None:
                p.data *= self.factor
        super().update()


class DecayForgotten(Owners):
    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, lr, betas, eps, 0.0)


class BetasSwapped(Owners):
    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, lr, betas[::-1], eps, weight_decay)


class NeverFalls(Owners):
    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, lr, betas, eps, weight_decay)
        self.inner.param_groups[0]["amsgrad"] = True


class DecaysMatricesOnly(Owners):
    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, lr, betas, eps, weight_decay)
        groups = [
            {"params": [p for p in self.mine() if (p.dim() > 1) == is_matrix], "weight_decay": weight_decay * is_matrix}
            for is_matrix in (True, False)
        ]
        self.inner = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps)


class ClipsFirst(Owners):
    def average(self):
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        super().average()


class ShortGradients(Owners):
    def average(self):
        for p in self.params:
            if p.grad is not None:
                short = p.grad.bfloat16()
                dist.all_reduce(short)
                p.grad = short.float() / self.n


class ShortMoments(Owners):
    def update(self):
        super().update()
        for state in self.inner.state.values():
            state |= {name: state[name].bfloat16().float() for name in ("exp_avg", "exp_avg_sq")}


class HalfTheRate(Owners):
    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, lr / 2, betas, eps, weight_decay)


class CountsCalls(Flat):
    def count(self):
        self.counts = [t + 1 for t in self.counts]
        return self.row([torch.full_like(p, t) for p, t in zip(self.params, self.counts, strict=True)])


class NoCorrection(Flat):
    def count(self):
        return super().count() + 10_000


class MomentsForgotten(Owners):
    def update(self):
        super().update()
        self.inner.state.clear()


class KeepsGradients(Owners):
    def zero_grad(self):
        pass


class ZeroesGradients(Owners):
    def zero_grad(self):
        for p in self.params:
            p.grad = torch.zeros_like(p)


class ZeroesInPlace(Owners):
    def zero_grad(self):
        for p in self.params:
            if p.grad is not None:
                p.grad.zero_()


class TrainsFrozen(Owners):
    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__([p.requires_grad_() for p in params], lr, betas, eps, weight_decay)

    def average(self):
        for p in self.params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        super().average()


class DropsTheRemainder(Flat):
    def share_size(self, total):
        return total // self.n

    def row(self, parts):
        return torch.cat([part.flatten() for part in parts])[: self.size * self.n]

    def put_back(self, mine):
        whole = torch.empty(self.size * self.n)
        dist.all_gather_into_tensor(whole, mine.contiguous())
        start = 0
        for p in self.params:
            part = whole[start : start + p.numel()]
            p.view(-1)[: len(part)] = part
            start += p.numel()


class PaddingLeftIn(Flat):
    """Pads in front and forgets it when the row is put back."""

    def row(self, parts):
        flat = torch.cat([part.flatten() for part in parts])
        return torch.nn.functional.pad(flat, (self.size * self.n - len(flat), 0))


class SharesOverlap(Flat):
    """Shares are rounded up, and cut at the places of shares that are rounded down."""

    def own(self, row):
        start = self.rank * (self.size - 1)
        return row[start : start + self.size]


class KeepsTheRow(Flat):
    def put_back(self, mine):
        super().put_back(mine)
        self.kept = self.row([p.data for p in self.params])


class SendsMoments(Owners):
    def share(self):
        super().share()
        for p, owner in zip(self.params, self.owners, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                state = self.inner.state.get(p, {})
                dist.broadcast(state.get(name, torch.empty_like(p)), src=owner)


class SumsTheWeights(Owners):
    def share(self):
        for p, owner in zip(self.params, self.owners, strict=True):
            if owner != self.rank:
                p.data.zero_()
            dist.all_reduce(p.data)


class NotQuiteEqual(Owners):
    def share(self):
        super().share()
        for p in self.params:
            p.data += 6e-8 * self.rank


class Nothing(Owners):
    def step(self):
        pass


class OwnOrder(Owners):
    """Sends its own parameters first, then gets the others'."""

    def share(self):
        pairs = zip(self.params, self.owners, strict=True)
        for p, owner in sorted(pairs, key=lambda pair: pair[1] != self.rank):
            dist.broadcast(p.data, src=owner)


class OwnersReduceOnly(Owners):
    def average(self):
        for p in self.mine():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= self.n


class LeavesThemFlat(Owners):
    def share(self):
        super().share()
        for p in self.params:
            p.data = p.data.flatten()


class Fails(Owners):
    def share(self):
        raise KeyError("weights")


class NeverEnds(Owners):
    def update(self):
        while True:
            pass


class Library:
    def __init__(self, params, lr, betas, eps, weight_decay):
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.params = [p for p in params if p.requires_grad]
        self.inner = ZeroRedundancyOptimizer(self.params, torch.optim.AdamW, **options)

    def step(self):
        for p in self.params:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


WRONG: dict[type, tuple[float, str]] = {
    HoldsAll: (4, "Keep the moments of this rank's share alone"),
    HoldsAllAndSharesNothing: (4, "Keep the moments of this rank's share alone"),
    AllInNumpy: (4, "and that is DDP"),
    AllInLists: (4, "and that is DDP"),
    AllInItsClass: (4, "and that is DDP"),
    CopiesAllWeights: (4, "Buffers of all numbers must not outlive step()"),
    NeverShares: (0, "each rank moves its own share of the weights and never gets the others'"),
    Summed: (0, "gradients are added up over the ranks and not averaged"),
    DividedTwice: (0, "divided by the number of ranks once too often"),
    OwnGradient: (0, "gradients are never averaged over the ranks"),
    OwnGradientAndNoSharing: (0, "gradients are never averaged over the ranks"),
    StepsFirst: (0, "the step is made before gradients are averaged"),
    MeanNotUsed: (0, "use what the collective returns"),
    DividesOnly: (0, "not added up over them"),
    WrongOwner: (0, "no number moves on any rank"),
    AllFromRankZero: (0, "Weights must be sent from the rank that updated them"),
    OnlyRankZeroUpdates: (0, "every rank has a share of the parameters to update"),
    AllOnRankZero: (4, "rank 0 keeps"),
    WeightsAveraged: (0, "weights are averaged over the ranks"),
    SharesBeforeTheStep: (0, "share them after the update"),
    WithPenalty: (0, "Adam with an L2 penalty"),
    Decays: (0, "weight decay is applied twice"),
    DecayForgotten: (0, "weight decay is missing"),
    BetasSwapped: (0, "the betas are swapped"),
    NeverFalls: (0, "which is AMSGrad"),
    DecaysMatricesOnly: (0, "weights of one dimension are not decayed"),
    ClipsFirst: (0, "clips its own gradient to norm 1 before the mean"),
    ShortGradients: (0, "rounded to 16 bits"),
    ShortMoments: (0, "rounded to 16 bits"),
    HalfTheRate: (0, "weights are not those of torch.optim.AdamW"),
    CountsCalls: (6.67, "by the number of calls of step()"),
    NoCorrection: (0, "the bias of the moments is not corrected"),
    MomentsForgotten: (0, "moments begin anew in every step"),
    KeepsGradients: (0, "zero_grad() must drop them"),
    ZeroesGradients: (6.67, "moved on by its momentum"),
    ZeroesInPlace: (6.67, "zero_grad() must set grad to None: it fills grad with zeros"),
    TrainsFrozen: (3.33, "the parameter with requires_grad=False was changed"),
    DropsTheRemainder: (0, "what is left over when N does not divide is dropped"),
    PaddingLeftIn: (0, "drop the padding"),
    SharesOverlap: (0, "place(s) too"),
    KeepsTheRow: (4, "Buffers of all numbers must not outlive step()"),
    SendsMoments: (9, "and no moments"),
    SumsTheWeights: (9, "are enough: average each gradient once"),
    NotQuiteEqual: (9, "differ between ranks in their last bits"),
    Nothing: (0, "no number moves on any rank"),
    LeavesThemFlat: (0, "update parameters in place"),
    Fails: (0, "KeyError: 'weights'"),
    NeverEnds: (0, "computed without end"),
    Library: (0, "ZeroRedundancyOptimizer is what you are to write"),
}
"""By class: points of 10, and words that are said."""

ALSO_ON_THREE = (
    HoldsAll,
    CopiesAllWeights,
    NeverShares,
    ShortGradients,
    HalfTheRate,
    Decays,
    WrongOwner,
    DropsTheRemainder,
    SharesOverlap,
    SendsMoments,
)
"""Wrong answers that look another way, or could, where ranks are neither two nor a divisor of anything."""

OUT_OF_ORDER = (OwnOrder, OwnersReduceOnly)
"""Collectives that do not belong together meet; gloo may abort a rank for it, also later, so they have a start of their
own."""
