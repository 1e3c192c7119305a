"""Answers to lab 1.1: right ones in other styles, and wrong ones with the points and the words they should get."""

# Each is run on ranks, to which functions travel by value: what they use stands inside them.
from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

# --- Parts ----------------------------------------------------------------------------------------------------------


def shard_by_slices(w_in, b_in, w_out, b_out, rank, world_size):
    size, rest = divmod(w_in.shape[0], world_size)
    if rest:
        raise ValueError(f"{world_size} ranks do not divide {w_in.shape[0]}")
    mine = slice(rank * size, (rank + 1) * size)
    return w_in[mine], b_in[mine], w_out[:, mine], b_out


def shard_by_chunks_into_a_dict(w_in, b_in, w_out, b_out, rank, world_size):
    class UnevenError(ValueError):
        pass

    if len(w_in) % world_size != 0:
        raise UnevenError
    parts = {"b_out": torch.nn.Parameter(b_out), "w_out": w_out.chunk(world_size, dim=1)[rank].contiguous()}
    return parts | {"w_in": w_in.view(world_size, -1, w_in.shape[1])[rank], "b_in": b_in.view(world_size, -1)[rank]}


RIGHT_SHARDS = (shard_by_slices, shard_by_chunks_into_a_dict)


def shard_unevenly(w_in, b_in, w_out, b_out, rank, world_size):
    def take(tensor, dim):
        return tensor.tensor_split(world_size, dim)[rank]

    return take(w_in, 0), take(b_in, 0), take(w_out, 1), b_out


def shard_with_assert(*args):
    assert args[0].shape[0] % args[-1] == 0
    return shard_unevenly(*args)


def shard_wrong_dim_of_w_in(w_in, b_in, w_out, b_out, rank, world_size):
    _, part_b_in, part_w_out, _ = shard_by_slices(w_in, b_in, w_out, b_out, rank, world_size)
    return w_in.tensor_split(world_size, 1)[rank], part_b_in, part_w_out, b_out


def shard_wrong_dim_of_w_out(w_in, b_in, w_out, b_out, rank, world_size):
    part_w_in, part_b_in, _, _ = shard_by_slices(w_in, b_in, w_out, b_out, rank, world_size)
    return part_w_in, part_b_in, w_out.tensor_split(world_size, 0)[rank], b_out


def shard_nothing(w_in, b_in, w_out, b_out, rank, world_size):
    if w_in.shape[0] % world_size:
        raise ValueError
    return w_in, b_in, w_out, b_out


def shard_every_nth(w_in, b_in, w_out, b_out, rank, world_size):
    if w_in.shape[0] % world_size:
        raise ValueError
    return w_in[rank::world_size], b_in[rank::world_size], w_out[:, rank::world_size], b_out


def shard_bias_too(*args):
    *parts, b_out = shard_by_slices(*args)
    return *parts, b_out.tensor_split(args[-1])[args[-2]]


def shard_bias_on_rank_0(*args):
    *parts, b_out = shard_by_slices(*args)
    return *parts, b_out if args[-2] == 0 else torch.zeros_like(b_out)


def shard_transposed(*args):
    part_w_in, part_b_in, part_w_out, b_out = shard_by_slices(*args)
    return part_w_in, part_b_in, part_w_out.T, b_out


def shard_transposed_in(*args):
    part_w_in, part_b_in, part_w_out, b_out = shard_by_slices(*args)
    return part_w_in.T, part_b_in, part_w_out, b_out


WRONG_SHARDS = [
    # one of six cases has a single rank, where nothing is cut
    (shard_unevenly, 2.0, "does not divide"),
    (shard_with_assert, 2.0, "AssertionError"),
    (shard_wrong_dim_of_w_in, 1.33, "w_in is cut along its inputs"),
    (shard_wrong_dim_of_w_out, 1.33, "w_out is cut along its outputs"),
    (shard_nothing, 1.33, "every rank keeps the whole weights"),
    (shard_every_nth, 1.33, "every N-th channel"),
    (shard_transposed, 0, "w_out is transposed"),
    (shard_transposed_in, 0, "w_in is transposed"),
    (shard_bias_too, 1.33, "b_out is cut"),
    (shard_bias_on_rank_0, 1.33, "b_out must stay whole"),
    (lambda *args: None, 0, "return four tensors"),
    (lambda weights, rank: None, 0, "your function must take"),
]

# --- The pair: right ------------------------------------------------------------------------------------------------


def two_functions(x, w_in, b_in, w_out, b_out):
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            y = y.clone()
            dist.all_reduce(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Sum.apply(F.gelu(Copy.apply(x) @ w_in.T + b_in) @ w_out.T) + b_out


def in_place_and_hook(x, w_in, b_in, w_out, b_out):
    x = x.clone()
    x.register_hook(lambda grad: sum_of(grad))

    def sum_of(tensor):
        total = tensor.clone()
        work: Any = dist.all_reduce(total, async_op=True)
        work.wait()
        return total

    y = F.linear(F.gelu(F.linear(x, w_in, b_in)), w_out)
    dist.all_reduce(y)
    return y.add(b_out)


def straight_through(x, w_in, b_in, w_out, b_out):
    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return funcol.all_reduce(grad, "sum", dist.group.WORLD)  # type: ignore[arg-type]

    hidden = torch.einsum("...d,fd->...f", Back.apply(x), w_in) + b_in
    mine = torch.einsum("...f,df->...d", F.gelu(hidden), w_out)
    whole = funcol.all_reduce(mine.detach(), "sum", dist.group.WORLD)  # type: ignore[arg-type]
    return mine + (whole - mine).detach() + b_out


def gather_outputs(x, w_in, b_in, w_out, b_out):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, y.contiguous())
            return sum(parts)

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Spread(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, grad.contiguous())
            return torch.stack(parts).sum(0)

    return Gather.apply(F.gelu(F.linear(Spread.apply(x), w_in, b_in)) @ w_out.t()) + b_out


def one_function_for_all(x, w_in, b_in, w_out, b_out):
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w_in, b_in, w_out, b_out):
            ctx.save_for_backward(x, w_in, b_in, w_out)
            y = F.gelu(F.linear(x, w_in, b_in)) @ w_out.T
            dist.all_reduce(y)
            return y + b_out

        @staticmethod
        def backward(ctx, grad):
            x, w_in, b_in, w_out = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
            with torch.enable_grad():
                y = F.gelu(F.linear(x, w_in, b_in)) @ w_out.T
            grads = list(torch.autograd.grad(y, [x, w_in, b_in, w_out], grad))
            dist.all_reduce(grads[0])
            return *grads, grad.flatten(0, -2).sum(0)

    return Pair.apply(x, w_in, b_in, w_out, b_out)


def sum_that_divides_its_gradient(x, w_in, b_in, w_out, b_out):
    """The library's all-reduce, whose backward sums again, with the factor taken out by hand."""
    import torch.distributed.nn.functional as nn_functional

    num_ranks = dist.get_world_size()

    class Divide(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad / num_ranks

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            dist.all_reduce(grad)
            return grad

    mine = F.gelu(F.linear(Copy.apply(x), w_in, b_in)) @ w_out.T
    return Divide.apply(nn_functional.all_reduce(mine)) + b_out


def scatter_and_gather(x, w_in, b_in, w_out, b_out):
    """The all-reduce as a reduce-scatter and an all-gather, padded to what the ranks can share."""

    def sum_over_ranks(tensor):
        size = -(-tensor.numel() // dist.get_world_size())
        padded = torch.zeros(size * dist.get_world_size())
        padded[: tensor.numel()] = tensor.flatten()
        mine = torch.empty(size)
        dist.reduce_scatter_tensor(mine, padded)
        dist.all_gather_into_tensor(padded, mine)
        return padded[: tensor.numel()].view(tensor.shape).clone()

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return sum_over_ranks(grad)

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return sum_over_ranks(y)

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Sum.apply(F.gelu(F.linear(Copy.apply(x), w_in, b_in)) @ w_out.T) + b_out


def scatter_rows_and_gather(x, w_in, b_in, w_out, b_out):
    """The same by lists of rows, of which a rank of many may get none but padding."""

    def sum_over_ranks(tensor):
        num_ranks = dist.get_world_size()
        rows = F.pad(tensor.flatten(1), (0, 0, 0, -len(tensor) % num_ranks))
        shares = [share.contiguous() for share in rows.chunk(num_ranks)]
        mine = torch.empty_like(shares[0])
        dist.reduce_scatter(mine, shares)
        dist.all_gather(shares, mine)
        return torch.cat(shares)[: len(tensor)].view(tensor.shape).clone()

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return sum_over_ranks(grad)

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return sum_over_ranks(y)

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Sum.apply(F.gelu(F.linear(Copy.apply(x), w_in, b_in)) @ w_out.T) + b_out


RIGHT_PAIRS = (
    two_functions,
    in_place_and_hook,
    straight_through,
    gather_outputs,
    one_function_for_all,
    sum_that_divides_its_gradient,
    scatter_and_gather,
    scatter_rows_and_gather,
)

# --- The pair: wrong ------------------------------------------------------------------------------------------------


def pair(forward="sum", backward="sum", bias="after", copy=True):
    """A pair with one or more faults."""

    def tp_mlp(x, w_in, b_in, w_out, b_out):
        num_ranks, rank = dist.get_world_size(), dist.get_rank()

        def send(tensor, how):
            tensor = tensor.clone()
            if how in ("sum", "sum twice", "mean"):
                dist.all_reduce(tensor)
            elif how == "rank 0":
                dist.reduce(tensor, dst=0)
            elif how == "skip on rank 1" and rank != 1:
                dist.all_reduce(tensor)
            return tensor / num_ranks if how == "mean" else tensor

        class Copy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return send(grad, backward)

        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                return send(y, forward)

            @staticmethod
            def backward(ctx, grad):
                return send(grad, "sum" if forward == "sum twice" else "")

        y = F.gelu(F.linear(Copy.apply(x), w_in, b_in)) @ w_out.T
        if bias == "every rank":
            y = y + b_out
        if bias == "share":
            y = y + b_out / num_ranks
        if bias == "rank 0" and rank == 0:
            y = y + b_out
        y = Sum.apply(y)
        return y + b_out if bias == "after" else y

    return tp_mlp


def variant(activation="gelu", use_b_in=True, use_b_out=True, after=False, in_front="", op="SUM"):
    """A pair with a fault in forward."""

    def tp_mlp(x, w_in, b_in, w_out, b_out):
        class Copy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                grad = grad.clone()
                dist.all_reduce(grad)
                return grad

        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                y = y.clone()
                dist.all_reduce(y, op=getattr(dist.ReduceOp, op))
                return y

            @staticmethod
            def backward(ctx, grad):
                return grad

        act = (lambda tensor: tensor) if activation == "none" else getattr(F, activation)
        if in_front:
            x = x.clone()
            dist.all_reduce(x)
            x = x / dist.get_world_size() if in_front == "mean" else x
        channels = F.linear(Copy.apply(x), w_in, b_in if use_b_in else None)
        y = Sum.apply((channels if after else act(channels)) @ w_out.T)
        y = act(y) if after else y
        return y + b_out if use_b_out else y

    return tp_mlp


def swapped(x, w_in, b_in, w_out, b_out):
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x = x.clone()
            dist.all_reduce(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad

    return Copy.apply(F.gelu(F.linear(Sum.apply(x), w_in, b_in)) @ w_out.T) + b_out


def not_waited_for(where):
    """A pair that begins an all-reduce and goes on with what stands in the tensor then: always this rank's own."""

    def tp_mlp(x, w_in, b_in, w_out, b_out):
        def start(tensor):
            total = tensor.clone()
            work: Any = dist.all_reduce(total, async_op=True)
            work.wait()  # so that the next case finds an idle group
            return tensor.clone()

        def finish(tensor):
            tensor = tensor.clone()
            dist.all_reduce(tensor)
            return tensor

        class Copy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return start(grad) if where == "backward" else finish(grad)

        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                return start(y) if where == "forward" else finish(y)

            @staticmethod
            def backward(ctx, grad):
                return grad

        return Sum.apply(F.gelu(F.linear(Copy.apply(x), w_in, b_in)) @ w_out.T) + b_out

    return tp_mlp


def result_thrown_away(x, w_in, b_in, w_out, b_out):
    y = F.gelu(F.linear(x, w_in, b_in)) @ w_out.T
    dist.all_reduce(y.detach().clone())
    return y + b_out


def library_all_reduce(x, w_in, b_in, w_out, b_out):
    import torch.distributed.nn.functional as nn_functional

    return nn_functional.all_reduce(F.gelu(F.linear(x, w_in, b_in)) @ w_out.T) + b_out


def gather_weights(x, w_in, b_in, w_out, b_out):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, part, dim):
            ctx.dim, part = dim, part.contiguous()
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, part)
            return torch.cat(parts, dim)

        @staticmethod
        def backward(ctx, grad):
            return grad.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()], None

    hidden = F.gelu(F.linear(x, Gather.apply(w_in, 0), Gather.apply(b_in, 0)))
    return F.linear(hidden, Gather.apply(w_out, 1), b_out)


def gather_channels(x, w_in, b_in, w_out, b_out):
    """Right, but what travels is wider than it need be."""

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            dist.all_reduce(grad)
            return grad

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            y = y.clone()
            dist.all_reduce(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad

    hidden = F.gelu(F.linear(Copy.apply(x), w_in, b_in))
    parts = [torch.empty_like(hidden) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, hidden.detach())
    mine = hidden + (parts[dist.get_rank()] - hidden).detach()
    return Sum.apply(mine @ w_out.T) + b_out


def no_gradient(x, w_in, b_in, w_out, b_out):
    with torch.no_grad():
        y = F.gelu(F.linear(x, w_in, b_in)) @ w_out.T
        dist.all_reduce(y)
    return (y + b_out).detach()


def fixed_to_two_ranks(x, w_in, b_in, w_out, b_out):
    mine = F.gelu(F.linear(x, w_in, b_in)) @ w_out.T
    theirs, other = torch.empty_like(mine), dist.get_rank() ^ 1
    for turn in (0, 1):
        if dist.get_rank() % 2 == turn:
            dist.send(mine.detach(), other)
        else:
            dist.recv(theirs, other)
    return mine + theirs + b_out


def leaves_out(x, w_in, b_in, w_out, b_out):
    y = F.gelu(F.linear(x, w_in, b_in)) @ w_out.T
    if dist.get_rank() == 0:
        dist.all_reduce(y)
    return y + b_out


def fails_on_rank_1(x, w_in, b_in, w_out, b_out):
    if dist.get_rank() == 1:
        raise KeyError("w_in_1")
    return two_functions(x, w_in, b_in, w_out, b_out)


def endless(x, w_in, b_in, w_out, b_out):
    while True:
        time.sleep(0.01)


def unsolved(x, w_in, b_in, w_out, b_out):
    if x is not None:  # not recognised by its code
        raise NotImplementedError


WRONG_PAIRS = {
    # points of 9 on cases of 2 and 4 ranks, and words of the feedback
    "bias on every rank": (pair(bias="every rank"), 5, "b_out is in the output 2 times"),
    "bias on rank 0": (pair(bias="rank 0"), 8.5, "a rank that does not add b_out never learns it"),
    "bias shared out": (pair(bias="share"), 8.5, "b_out.grad is 1 / 2 of the whole"),
    "no bias": (pair(bias="no"), 4.5, "b_out is missing"),
    "no all-reduce forward": (pair(forward=""), 0, "the all-reduce over the ranks is missing in forward"),
    "no all-reduce backward": (pair(backward=""), 6, "backward has to add its gradient up over the ranks"),
    "all-reduce in both directions of forward": (pair(forward="sum twice"), 4.5, "gradients are 2 times too large"),
    "the library's all-reduce": (library_all_reduce, 4.5, "gradients are 2 times too large"),
    "swapped": (swapped, 0, "the two places are swapped: x is added up over the ranks, and the outputs are not"),
    "sum of x in front": (variant(in_front="sum"), 0, "x is added up over the ranks in front"),
    "mean of x in front": (variant(in_front="mean"), 6, "x is averaged over the ranks in front"),
    "gelu after the sum": (variant(after=True), 0, "gelu stands after the sum"),
    "relu": (variant(activation="relu"), 0, "between the layers stands relu"),
    "no gelu": (variant(activation="none"), 0, "gelu is missing between the two layers"),
    "no b_in": (variant(use_b_in=False), 0, "b_in is missing: it is added before gelu"),
    "largest": (variant(op="MAX"), 0, "the largest is taken (ReduceOp.MAX)"),
    "relu without b_out": (
        variant(activation="relu", use_b_out=False),
        0,
        "has gelu; and b_out is missing in the output",
    ),
    "not waited for in forward": (
        not_waited_for("forward"),
        0,
        "the all-reduce in forward is begun with async_op=True",
    ),
    "not waited for in backward": (
        not_waited_for("backward"),
        6,
        "the all-reduce in backward is begun with async_op=True",
    ),
    "result thrown away": (result_thrown_away, 0, "an all-reduce is called in forward, and its result is not used"),
    "mean forward": (pair(forward="mean"), 5, "averaged"),
    "mean backward": (pair(backward="mean"), 6, "x.grad is 1 / 2 of what it must be"),
    "right on rank 0 only": (pair(forward="rank 0"), 0, "the output is right on rank 0 only"),
    "gradient right on rank 0 only": (pair(backward="rank 0"), 6, "x.grad is right on rank 0 only"),
    "gathers the weights": (gather_weights, 4.5, "you send weights around"),
    "gathers the channels": (gather_channels, 4.5, "not the F channels in between"),
    "no gradient": (no_gradient, 4, "cut off from autograd"),
    "fixed to two ranks": (fixed_to_two_ranks, 3, "the output is not that of one process"),
    "skips the collective": (
        pair(forward="skip on rank 1"),
        0,
        "is allreduce of 36 numbers in forward, and of rank 1 allreduce of 36 numbers in backward",
    ),
    "leaves the collective out": (
        leaves_out,
        0,
        "rank 0 waits in collective 1 (allreduce of 36 numbers in forward), and rank 1",
    ),
    "fails on one rank": (fails_on_rank_1, 0, "rank 1: KeyError: 'w_in_1'"),
    "returns None": (lambda x, w_in, b_in, w_out, b_out: None, 0, "return the output as a tensor"),
    "returns its channels": (lambda x, w_in, *_: x @ w_in.T, 0, "and must return one of shape"),
    "unsolved": (unsolved, 0, "tp_mlp is not solved yet"),
}
