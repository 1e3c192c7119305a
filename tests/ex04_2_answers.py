"""Answers to exercise 4.2: right ones in other styles, and wrong ones with the points and the words they should get."""

# Steps are run on ranks, to which functions travel by value: what they use stands inside them or in this module.
from __future__ import annotations

import contextlib
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from vlmcourse.batch import effective_batch_size, nearest_accumulation

# --- a. Samples of a step -------------------------------------------------------------------------------------------


def batch_by_division(micro_batch, accumulation, num_gpus, tp, pp, cp):
    dp, rest = divmod(num_gpus, tp * pp * cp)
    if rest:
        raise ValueError(f"{tp} x {pp} x {cp} does not divide {num_gpus}")
    return micro_batch * accumulation * dp


class DegreesError(ValueError):
    pass


def batch_by_fraction(micro_batch, accumulation, num_gpus, tp, pp, cp):
    dp = Fraction(num_gpus, tp * pp * cp)
    if dp.denominator != 1:
        raise DegreesError
    return float(micro_batch * accumulation * dp)


def batch_by_loop(micro_batch, accumulation, num_gpus, tp=1, pp=1, cp=1):
    for degree in (tp, pp, cp):
        if num_gpus % degree:
            raise ValueError("does not divide")
        num_gpus //= degree
    return sum(micro_batch for _ in range(accumulation) for _ in range(num_gpus))


def batch_by_decimals(micro_batch, accumulation, num_gpus, tp, pp, cp):
    samples = Decimal(micro_batch) * accumulation * num_gpus / (tp * pp * cp)
    if num_gpus % (tp * pp * cp):
        raise ValueError("degrees")
    return samples


def batch_by_tensor(*args):
    micro_batch, accumulation, num_gpus, *degrees = args
    share = math.prod(degrees)
    if num_gpus % share != 0:
        raise ValueError("degrees")
    return torch.tensor([micro_batch, accumulation, num_gpus // share]).prod()


RIGHT_BATCHES = (batch_by_division, batch_by_fraction, batch_by_loop, batch_by_decimals, batch_by_tensor)


def _checked(formula):
    def function(micro_batch, accumulation, num_gpus, tp, pp, cp):
        if num_gpus % (tp * pp * cp):
            raise ValueError("does not divide")
        return formula(micro_batch, accumulation, num_gpus, tp, pp, cp)

    return function


def _refused_by(is_wrong):
    def function(micro_batch, accumulation, num_gpus, tp, pp, cp):
        if is_wrong(num_gpus, tp, pp, cp):
            raise ValueError("does not divide")
        return micro_batch * accumulation * (num_gpus // (tp * pp * cp))

    return function


WRONG_BATCHES = {
    "world size": (_checked(lambda m, a, n, t, p, c: m * a * n), "multiplied by all GPUs"),
    "no accumulation": (_checked(lambda m, a, n, t, p, c: m * n // (t * p * c)), "left out the accumulation"),
    "no micro-batch": (_checked(lambda m, a, n, t, p, c: a * n // (t * p * c)), "left out the micro-batch"),
    "one rank": (_checked(lambda m, a, n, t, p, c: m * a), "you counted one rank"),
    "tp only": (_checked(lambda m, a, n, t, p, c: m * a * n // t), "divided by tp only"),
    "pp only": (_checked(lambda m, a, n, t, p, c: m * a * n // p), "divided by pp only"),
    "cp only": (_checked(lambda m, a, n, t, p, c: m * a * n // c), "divided by cp only"),
    "no cp": (_checked(lambda m, a, n, t, p, c: m * a * n // (t * p)), "counted context-parallel ranks"),
    "no pp": (_checked(lambda m, a, n, t, p, c: m * a * n // (t * c)), "counted the stages of a pipeline"),
    "no tp": (_checked(lambda m, a, n, t, p, c: m * a * n // (p * c)), "counted tensor-parallel ranks"),
    "largest degree": (_checked(lambda m, a, n, t, p, c: m * a * n // max(t, p, c)), "the largest degree only"),
    "the package's": (
        _checked(lambda m, a, n, t, p, c: effective_batch_size(m, a, n // (t * p * c))),
        "use plain arithmetic",
    ),
    "sum of degrees": (_checked(lambda m, a, n, t, p, c: m * a * n // (t + p + c)), "the sum of the degrees"),
    "sum of factors": (_checked(lambda m, a, n, t, p, c: m + a + n // (t * p * c)), "added the three factors"),
    "over accumulation": (_checked(lambda m, a, n, t, p, c: m * n // (t * p * c) / a), "divided by the accumulation"),
    "model ranks": (_checked(lambda m, a, n, t, p, c: m * a * t * p * c), "ranks that share samples"),
    "text": (_checked(lambda m, a, n, t, p, c: f"{m * a * n // (t * p * c)} samples"), "return a number"),
    "no refusal": (lambda m, a, n, t, p, c: m * a * n // (t * p * c), "raise a ValueError"),
    "refused without tp": (_refused_by(lambda n, t, p, c: n % (p * c)), "tp=3 on 8 GPUs: raise a ValueError"),
    "refused without pp": (_refused_by(lambda n, t, p, c: n % (t * c)), "tp=2 and pp=4 on 12 GPUs: raise"),
    "refused without cp": (_refused_by(lambda n, t, p, c: n % (t * p)), "tp=2 and cp=4 on 12 GPUs: raise"),
    "refused one by one": (_refused_by(lambda n, t, p, c: n % t or n % p or n % c), "on 12 GPUs: raise a ValueError"),
}

# --- b. How to reach a target ---------------------------------------------------------------------------------------


def reach_by_divmod(target, micro_batch, num_gpus, tp, pp, cp):
    samples = micro_batch * num_gpus // (tp * pp * cp)
    below, rest = divmod(target, samples)
    if not rest:
        return [(below, 0)]
    return [(s, s * samples - target) for s in (below, below + 1) if s > 0]


def reach_by_search(target, micro_batch, num_gpus, tp, pp, cp):
    samples = micro_batch * num_gpus / (tp * pp * cp)
    errors = {s: s * samples - target for s in range(1, target + 2)}
    if 0 in errors.values():
        return [[s, e] for s, e in errors.items() if e == 0]
    above = min((e, s) for s, e in errors.items() if e > 0)
    below = [max((e, s) for s, e in errors.items() if e < 0)] if min(errors.values()) < 0 else []
    return [[s, e] for e, s in [above, *below]]


def reach_into_a_dict(target, micro_batch, num_gpus, tp, pp, cp):
    samples = micro_batch * (num_gpus // tp // pp // cp)
    steps = {target // samples, -(-target // samples)} - {0}
    return {s: s * samples - target for s in steps}


def reach_with_numpy(target, micro_batch, num_gpus, tp, pp, cp):
    import numpy as np

    samples = micro_batch * num_gpus // (tp * pp * cp)
    steps = np.unique([np.floor(target / samples), np.ceil(target / samples)])
    steps = steps[steps > 0]
    return np.stack([steps, steps * samples - target], axis=1)


RIGHT_CHOICES = (reach_by_divmod, reach_by_search, reach_into_a_dict, reach_with_numpy)


def _mapped(change):
    return lambda *case: [change(case, s, e) for s, e in reach_by_divmod(*case)]


def _with_samples(samples_of):
    def function(*case):
        samples = samples_of(*case[1:])
        below, rest = divmod(case[0], samples)
        return [(s, s * samples - case[0]) for s in ((below, below + 1) if rest else (below,)) if s]

    return function


def _both_everywhere(*case):
    samples = case[1] * case[2] // math.prod(case[3:])
    return [(s, s * samples - case[0]) for s in (case[0] // samples, case[0] // samples + 1)]


def _round(target, micro_batch, num_gpus, tp, pp, cp):
    return micro_batch * num_gpus // (tp * pp * cp)


def _three(*case, always=True):
    samples = _round(*case)
    below, rest = divmod(case[0], samples)
    if rest and not always:
        return reach_by_divmod(*case)
    return [(s, s * samples - case[0]) for s in (below - 1, below, below + 1) if s > 0]


def _nearest_two(*case):
    samples = _round(*case)
    choices = sorted(((s, s * samples - case[0]) for s in range(1, case[0] + 3)), key=lambda pair: abs(pair[1]))
    return choices[: 2 if case[0] % samples else 1]


def _with_zero(*case):
    samples = case[1] * case[2] // math.prod(case[3:])
    return [(s, s * samples - case[0]) for s in {case[0] // samples, -(-case[0] // samples)}]


def _floor_and_ceil(*case, least):
    samples = _round(*case)
    return [(s, s * samples - case[0]) for s in (max(least, case[0] // samples), -(-case[0] // samples))]


WRONG_CHOICES = {
    "world size": (_with_samples(lambda m, n, t, p, c: m * n), "multiplied by all GPUs"),
    "one rank": (_with_samples(lambda m, n, t, p, c: m), "you counted one rank"),
    "no micro-batch": (_with_samples(lambda m, n, t, p, c: n // (t * p * c)), "left out the micro-batch"),
    "smaller only": (lambda *case: reach_by_divmod(*case)[:1], "always gave the smaller batch"),
    "larger only": (lambda *case: reach_by_divmod(*case)[-1:], "always gave the larger batch"),
    "nearer only": (
        lambda *case: [min(reach_by_divmod(*case), key=lambda pair: abs(pair[1]))],
        "you gave the nearer one",
    ),
    "turned sign": (_mapped(lambda case, s, e: (s, -e)), "the sign of your error is turned"),
    "no sign": (_mapped(lambda case, s, e: (s, abs(e))), "your error has no sign"),
    "share": (_mapped(lambda case, s, e: (s, e / case[0])), "a share of the target"),
    "percent": (_mapped(lambda case, s, e: (s, 100 * e / case[0])), "in percent of the target"),
    "batch": (_mapped(lambda case, s, e: (s, e + case[0])), "you state the batch itself"),
    "two everywhere": (_both_everywhere, "you gave two choices everywhere"),
    "zero micro-batches": (_with_zero, "an accumulation of 0"),
    "nothing": (
        lambda *case: (
            reach_by_divmod(*case) if len(reach_by_divmod(*case)) == 1 and not reach_by_divmod(*case)[0][1] else []
        ),
        "you gave nothing where the target does not divide",
    ),
    "no cp": (_with_samples(lambda m, n, t, p, c: m * n // (t * p)), "counted context-parallel ranks"),
    "tp only": (_with_samples(lambda m, n, t, p, c: m * n // t), "divided by tp only"),
    "largest degree": (_with_samples(lambda m, n, t, p, c: m * n // max(t, p, c)), "the largest degree only"),
    "sum of degrees": (_with_samples(lambda m, n, t, p, c: m * n // (t + p + c)), "the sum of the degrees"),
    "turned round": (_mapped(lambda case, s, e: (e, s)), "your pairs are turned round"),
    "in micro-batches": (_mapped(lambda case, s, e: (s, e // case[1])), "your error is not in samples"),
    "in rounds": (
        _mapped(lambda case, s, e: (s, e * math.prod(case[3:]) / case[1] / case[2])),
        "your error is not in samples",
    ),
    "neighbors besides": (lambda *case: _three(*case, always=False), "you gave more than the nearest choices"),
    "three everywhere": (_three, "you gave more than the nearest choices"),
    "nearest two": (_nearest_two, "nothing lies below"),
    "twice where exact": (
        lambda *case: [pair for pair in _floor_and_ceil(*case, least=0) if pair[0]],
        "where the target is met exactly, give it once",
    ),
    "twice or zero": (
        lambda *case: _floor_and_ceil(*case, least=0),
        "give it once; and below one round of micro-batches there is one choice, accumulation 1: 0",
    ),
    "twice everywhere": (lambda *case: _floor_and_ceil(*case, least=1), "accumulation 1: it stands there twice"),
    "twice below": (
        lambda *case: _floor_and_ceil(*case, least=1) if case[0] % _round(*case) else reach_by_divmod(*case),
        "you gave the same pair twice: below one round of micro-batches there is one choice, accumulation 1",
    ),
    "nothing below": (
        lambda *case: reach_by_divmod(*case) if case[0] >= _round(*case) else [],
        "you gave nothing there: below one round of micro-batches there is one choice",
    ),
    "two above": (
        lambda *case: [(s, s * _round(*case) - case[0]) for s in (-(-case[0] // _round(*case)) + k for k in (0, 1))],
        "both reach the target",
    ),
    "rounded": (
        lambda *case: [(round(case[0] / _round(*case)), round(case[0] / _round(*case)) * _round(*case) - case[0])],
        "you gave the nearer one",
    ),
    "the package's": (
        lambda *case: [
            (choice.accumulation_steps, choice.error)
            for choice in nearest_accumulation(case[0], case[1], case[2] // math.prod(case[3:]))
        ],
        "use plain arithmetic",
    ),
    "a number": (lambda *case: reach_by_divmod(*case)[0][0], "return a list of pairs"),
}

# --- c. The step ----------------------------------------------------------------------------------------------------


def _sum_of(model, inputs, labels, shift=0):
    logits, labels = model(inputs)[:, : labels.shape[1] - shift], labels[:, shift:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def _make_step(
    divide="all",
    factor: Any = True,
    silence="but last",
    zero="once",
    clip="once",
    reduction="sum",
    returns="all",
    over_steps=False,
    step="once",
    skip=False,
    shift=0,
    norm=1.0,
):
    """Return a step that is right, but for what the arguments change."""

    def accumulation_step(model, optimizer, micro_batches, max_norm):
        num_ranks, steps = dist.get_world_size(), len(micro_batches)
        own = sum(int((labels != -100).sum()) for _, labels in micro_batches)
        counts = [
            (labels.numel(), len(labels), (labels > 0).sum(), (labels != -100).sum() * (i == steps - 1))
            for i, (_, labels) in enumerate(micro_batches)
        ]
        everything = torch.tensor([float(own), *map(sum, zip(*counts, strict=True))])
        dist.all_reduce(everything)
        tokens, positions, samples, positive, of_last = everything
        divisor = {
            "all": tokens,
            "own": max(1, own),
            "positions": positions,
            "samples": samples,
            "nothing": 1.0,
            "positive": positive,
            "last": of_last,
        }[divide]
        if zero == "once":
            optimizer.zero_grad()
        total, last_part = torch.zeros(()), torch.zeros(())
        for i, (inputs, labels) in enumerate(micro_batches):
            if zero == "in loop":
                optimizer.zero_grad()
            if skip and not (labels != -100).any():
                continue
            is_last = i == steps - 1
            quiet = {"but last": not is_last, "never": False, "always": True, "but first": i > 0}[silence]
            with model.no_sync() if quiet else contextlib.nullcontext():
                if reduction == "mean":
                    loss = _sum_of(model, inputs, labels) / (labels != -100).sum().clamp(min=1) / steps
                elif reduction == "plain mean":
                    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()) / steps
                else:
                    loss = _sum_of(model, inputs, labels, shift) / divisor
                    loss = loss / steps if over_steps else loss
                (loss * num_ranks if factor is True or (factor == "last" and is_last) else loss).backward()
            total, last_part = total + loss.detach(), loss.detach()
            if clip == "each time":
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if step == "each time":
                optimizer.step()
        if clip == "once":
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm * max_norm)
        elif clip == "largest":
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=math.inf)
        elif clip == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), max_norm)
        elif clip == "always":
            length = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
            for parameter in model.parameters():
                parameter.grad.mul_(max_norm / length)
        elif clip == "apart":
            for parameter in model.parameters():
                torch.nn.utils.clip_grad_norm_(parameter, max_norm)
        if step == "once" or (step == "rank 0" and dist.get_rank() == 0):
            optimizer.step()
        if zero == "at the end":
            optimizer.zero_grad()
        part = last_part if returns == "last" else total
        if returns in ("all", "last") and reduction == "sum":
            dist.all_reduce(part)
        elif returns == "rank 0":
            dist.reduce(part, dst=0)
        elif returns == "all":
            dist.all_reduce(part, op=dist.ReduceOp.SUM)
            part = part / num_ranks
        return part.item() * (num_ranks if returns == "times ranks" else 1)

    return accumulation_step


def step_by_scaling_at_the_end(model, optimizer, micro_batches, max_norm):
    """Sums first; gradients are divided after the exchange."""
    for parameter in model.parameters():
        parameter.grad = None
    loss_sum, tokens = torch.zeros(()), torch.zeros(())
    *quiet, last = micro_batches
    with model.no_sync():
        for inputs, labels in quiet:
            loss = F.cross_entropy(model(inputs).transpose(1, 2), labels, reduction="sum")
            loss.backward()
            loss_sum, tokens = loss_sum + loss.detach(), tokens + (labels >= 0).sum()
    loss = F.cross_entropy(model(last[0]).transpose(1, 2), last[1], reduction="sum")
    loss.backward()
    both = torch.stack([loss_sum + loss.detach(), tokens + (last[1] >= 0).sum()])
    dist.all_reduce(both)
    for parameter in model.parameters():
        parameter.grad.mul_(dist.get_world_size() / both[1])
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    optimizer.step()
    return float(both[0] / both[1])


def step_by_hand_without_ddp(model, optimizer, micro_batches, max_norm):
    """Uses the model inside DDP and exchanges gradients itself."""
    plain = model.module
    optimizer.zero_grad(set_to_none=False)
    counts = torch.tensor([0.0, 0.0])
    for inputs, labels in micro_batches:
        log_probs = plain(inputs).log_softmax(-1)
        is_supervised = labels != -100
        picked = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        loss = -(picked * is_supervised).sum()
        loss.backward()
        counts += torch.tensor([loss.item(), float(is_supervised.sum())])
    flat = torch.cat([counts, *(p.grad.flatten() for p in plain.parameters())])
    dist.all_reduce(flat)
    start = 2
    for parameter in plain.parameters():
        parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter) / flat[1])
        start += parameter.numel()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    optimizer.step()
    return flat[0] / flat[1]


def step_with_an_exit_stack(model, optimizer, micro_batches, max_norm):
    num_ranks = dist.get_world_size()
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, sum((labels != -100).sum().item() for _, labels in micro_batches))
    share = num_ranks / sum(everyone)
    model.zero_grad()
    losses: list[Any] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(model.no_sync())
        for index, (inputs, labels) in enumerate(micro_batches):
            if index == len(micro_batches) - 1:
                stack.close()
            each = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="none")
            (each.sum() * share).backward()
            losses.append(each.sum() * share)  # still with its graph, whose activations backward has freed
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    dist.all_gather_object(everyone, float(sum(losses)))
    return sum(everyone) / num_ranks


def step_with_weights(model, optimizer, micro_batches, max_norm):
    """Multiplies each micro-batch's mean by its share of all tokens."""
    tokens = torch.tensor([float((labels != -100).sum()) for _, labels in micro_batches])
    total = tokens.sum()
    dist.all_reduce(total)
    optimizer.zero_grad()
    returned = torch.zeros(())
    for i, (inputs, labels) in enumerate(micro_batches):
        model.require_backward_grad_sync = i == len(micro_batches) - 1
        sum_of_losses = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
        mean = sum_of_losses / tokens[i].clamp(min=1)
        weighted = mean * tokens[i] / total
        (weighted * dist.get_world_size()).backward()
        returned += weighted.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    dist.all_reduce(returned)
    return returned


def _exchange(way, gradient):
    """Return the sum of a vector over the ranks."""
    if way == "all_gather":
        found = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(found, gradient)
        return sum(found)
    if way == "objects":
        objects: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, gradient.tolist())
        return sum(torch.tensor(item) for item in objects)
    dist.reduce(gradient, dst=0)
    dist.broadcast(gradient, src=0)
    return gradient


def _by_hand(way, each_time=False):
    """Return a step that exchanges by other collectives than an all-reduce, once or after every micro-batch."""

    def accumulation_step(model, optimizer, micro_batches, max_norm):
        parameters = list(model.module.parameters())
        tokens, total = _count_all(micro_batches), torch.zeros(())
        summed: Any = torch.zeros(sum(p.numel() for p in parameters))
        optimizer.zero_grad()
        for i, batch in enumerate(micro_batches):
            loss = _sum_of(model.module, *batch) / tokens
            loss.backward()
            total += loss.detach()
            if each_time or i == len(micro_batches) - 1:
                summed = summed + _exchange(way, torch.cat([p.grad.flatten() for p in parameters]))
                optimizer.zero_grad(set_to_none=False)
        for parameter, part in zip(parameters, summed.split([p.numel() for p in parameters]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        return _finish(model, optimizer, total, max_norm)

    return accumulation_step


RIGHT_STEPS = (
    step_by_scaling_at_the_end,
    step_by_hand_without_ddp,
    step_with_an_exit_stack,
    step_with_weights,
)


def returns_nothing(model, optimizer, micro_batches, max_norm):
    _make_step()(model, optimizer, micro_batches, max_norm)


def _count_all(batches):
    tokens = torch.tensor(float(sum((labels != -100).sum() for _, labels in batches)))
    dist.all_reduce(tokens)
    return tokens


def _finish(model, optimizer, loss, max_norm):
    """Clip, step, and return the loss of all ranks."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item()


def one_large_forward(model, optimizer, micro_batches, max_norm):
    """Accumulates nothing: all micro-batches become one."""
    optimizer.zero_grad()
    inputs, labels = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    loss = _sum_of(model, inputs, labels) / _count_all(micro_batches)
    (loss * dist.get_world_size()).backward()
    return _finish(model, optimizer, loss, max_norm)


def losses_are_added_up(model, optimizer, micro_batches, max_norm):
    """One backward for all micro-batches, whose activations wait for it."""
    optimizer.zero_grad()
    *others, last = micro_batches
    loss = sum(_sum_of(model.module, *batch) for batch in others) + _sum_of(model, *last)
    loss = loss / _count_all(micro_batches)
    (loss * dist.get_world_size()).backward()
    return _finish(model, optimizer, loss, max_norm)


def forward_stands_outside(model, optimizer, micro_batches, max_norm):
    optimizer.zero_grad()
    tokens, total = _count_all(micro_batches), torch.zeros(())
    for i, batch in enumerate(micro_batches):
        loss = _sum_of(model, *batch) / tokens
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            (loss * dist.get_world_size()).backward()
        total += loss.detach()
    return _finish(model, optimizer, total, max_norm)


def each_micro_batch_by_its_own_count(model, optimizer, micro_batches, max_norm):
    optimizer.zero_grad()
    total = torch.zeros(())
    for i, batch in enumerate(micro_batches):
        tokens = _count_all([batch]).clamp(min=1) * len(micro_batches)
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            loss = _sum_of(model, *batch) / tokens
            (loss * dist.get_world_size()).backward()
        total += loss.detach()
    return _finish(model, optimizer, total, max_norm)


def clipped_before_the_exchange(model, optimizer, micro_batches, max_norm):
    optimizer.zero_grad()
    tokens, total = _count_all(micro_batches), torch.zeros(())
    with model.no_sync():
        for batch in micro_batches:
            loss = _sum_of(model, *batch) / tokens
            loss.backward()
            total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return _finish(model, optimizer, total, 1e9)


WRONG_STEPS = {
    "one large forward": (one_large_forward, "is the memory of a larger batch, not accumulation"),
    "losses added up": (losses_are_added_up, "is the memory of a larger batch, not accumulation"),
    "forward outside": (forward_stands_outside, "Forward *and* backward of all micro-batches but the last"),
    "labels shifted": (_make_step(shift=1), "logits and labels are shifted against each other"),
    "micro-batches by their own counts": (each_micro_batch_by_its_own_count, "its own supervised tokens, of all ranks"),
    "clipped before the exchange": (clipped_before_the_exchange, "each rank clips its own gradient"),
    "clipped to twice the norm": (_make_step(norm=2.0), "look at what you divide by, multiply with and clip to"),
    "mean of means": (_make_step(reduction="mean", factor=False), "a mean of means"),
    "plain mean": (_make_step(reduction="plain mean", factor=False), "a mean of means"),
    "DDP's average left in": (_make_step(factor=False), "DDP averages gradients over the ranks"),
    "own tokens, times ranks": (_make_step(divide="own"), "each rank divides by its own supervised tokens"),
    "labels above 0": (_make_step(divide="positive"), "you count the labels above 0"),
    "last count": (_make_step(divide="last"), "by the supervised tokens of the last micro-batch"),
    "factor on the last": (_make_step(factor="last"), "only the last micro-batch's loss is multiplied"),
    "each parameter clipped": (_make_step(clip="apart"), "each parameter is clipped by itself"),
    "values clipped": (_make_step(clip="value"), "each number of the gradient is limited to max_norm"),
    "largest clipped": (_make_step(clip="largest"), "the gradient is clipped by its largest number"),
    "always scaled": (_make_step(clip="always"), "the gradient is always scaled to max_norm"),
    "zeroed at the end": (_make_step(zero="at the end"), "gradients were left before your first step"),
    "steps on one rank": (_make_step(step="rank 0"), "the optimizer stepped on rank 0 and not on rank 1"),
    "loss on one rank": (_make_step(returns="rank 0"), "it is right on rank 0 and not on rank 1"),
    "objects each time": (
        _by_hand("objects", each_time=True),
        "forward *and* backward of the others must stand inside",
    ),
    "own tokens": (_make_step(divide="own", factor=False), "each rank divides by its own supervised tokens"),
    "all positions": (_make_step(divide="positions"), "you divide by all positions"),
    "all positions, average left in": (_make_step(divide="positions", factor=False), "you divide by all positions"),
    "samples": (_make_step(divide="samples"), "you divide by the number of samples"),
    "not divided": (_make_step(divide="nothing"), "not divided at all"),
    "over steps too": (_make_step(over_steps=True), "divided by the number of micro-batches too"),
    "never silent": (_make_step(silence="never"), "forward *and* backward of the others must stand inside"),
    "always silent": (_make_step(silence="always"), "nothing was exchanged"),
    "silent but first": (_make_step(silence="but first"), "no_sync is the wrong way round"),
    "not zeroed": (_make_step(zero="never"), "gradients of the step before are still there"),
    "zeroed in the loop": (_make_step(zero="in loop"), "only the last micro-batch is in the gradient"),
    "not clipped": (_make_step(clip="never"), "but not clipped"),
    "clipped each time": (_make_step(clip="each time"), "clipped after every micro-batch"),
    "steps each time": (_make_step(step="each time"), "the optimizer stepped"),
    "does not step": (_make_step(step="never"), "the optimizer did not step"),
    "own loss returned": (_make_step(returns="own"), "the returned loss is this rank's part"),
    "last loss returned": (_make_step(returns="last"), "the returned loss holds the last micro-batches only"),
    "returns nothing": (returns_nothing, "return the step's loss as a number"),
    # Last: the collectives of its ranks do not match, on which gloo ends a process, at times before the other reports.
    "skips mute micro-batches": (_make_step(skip=True), "call every collective"),
}
