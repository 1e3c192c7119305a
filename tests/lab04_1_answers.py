"""Answers to lab 4.1: right ones in other styles, and wrong ones with the words that their feedback must hold."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

# --- a. Right -------------------------------------------------------------------------------------------------------


def fronts_in_dictionaries(inputs, inside, costs, limit):
    """For each number of layers done: bytes kept -> (cost, segments)."""
    n = len(costs)
    whole = [a + b for a, b in zip(inputs, inside, strict=True)]
    best = [{} for _ in range(n + 1)]
    best[0][0] = (0, [])

    def offer(end, kept, spent, plan):
        if kept not in best[end] or spent < best[end][kept][0]:
            best[end][kept] = (spent, plan)

    for start in range(n):
        for kept, (spent, plan) in best[start].items():
            if kept + whole[start] <= limit:
                offer(start + 1, kept + whole[start], spent, plan)
            for end in range(start + 1, n + 1):
                if kept + sum(whole[start:end]) > limit:
                    break
                offer(end, kept + inputs[start], spent + sum(costs[start:end]), [*plan, (start, end)])
    if not best[n]:
        raise ValueError("no plan fits")
    return min(best[n].values())[1]


def recursion_with_memory(inputs, inside, costs, limit):
    n = len(costs)

    @functools.cache
    def best(start, room):
        """Cost and segments of the layers from `start` on with `room` bytes left."""
        if start == n:
            return 0, ()
        size = inputs[start] + inside[start]
        found: list[Any] = [(math.inf, ())]
        if size <= room:
            found.append(best(start + 1, room - size))
        total, spent = 0, 0
        for end in range(start + 1, n + 1):
            total += inputs[end - 1] + inside[end - 1]
            spent += costs[end - 1]
            if total > room:
                break
            rest, plan = best(end, room - inputs[start])
            found.append((rest + spent, ((start, end), *plan)))
        return min(found)

    spent, plan = best(0, limit)
    if spent == math.inf:
        raise ValueError(f"no plan keeps {limit} bytes")
    return [range(*pair) for pair in plan]


class LimitError(ValueError):
    pass


def cheapest_path(inputs, inside, costs, limit):
    """Dijkstra over (layer, bytes kept); the first plan that reaches the end is the cheapest."""
    n = len(costs)
    number, done = itertools.count(1), set()
    heap: list[Any] = [(0, 0, 0, 0, ())]
    while heap:
        spent, _, layer, kept, plan = heapq.heappop(heap)
        if layer == n:
            return tuple(plan)
        if (layer, kept) in done:
            continue
        done.add((layer, kept))
        size = inputs[layer] + inside[layer]
        if kept + size <= limit:
            heapq.heappush(heap, (spent, next(number), layer + 1, kept + size, plan))
        for end in range(layer + 1, n + 1):
            if kept + sum(inputs[layer:end]) + sum(inside[layer:end]) > limit:
                break
            extra = sum(costs[layer:end])
            heapq.heappush(heap, (spent + extra, next(number), end, kept + inputs[layer], (*plan, (layer, end))))
    raise LimitError("impossible")


def from_the_end_with_tensors(inputs, inside, costs, limit):
    """The same recursion as a table over the room that is left, filled from the last layer on, numbers as tensors."""
    n = len(costs)
    table = [[(math.inf, None)] * (limit + 1) for _ in range(n)] + [[(0, None)] * (limit + 1)]
    for start in reversed(range(n)):
        for room in range(limit + 1):
            size = inputs[start] + inside[start]
            found = (table[start + 1][room - size][0], start) if size <= room else (math.inf, None)
            total = spent = 0
            for end in range(start + 1, n + 1):
                total += inputs[end - 1] + inside[end - 1]
                spent += costs[end - 1]
                if total > room:
                    break
                value = table[end][room - inputs[start]][0] + spent
                found = min(found, (value, end), key=lambda pair: pair[0])
            table[start][room] = found
    if table[0][limit][0] == math.inf:
        raise ValueError("no plan")
    layer, room, plan = 0, limit, []
    while layer < n:
        end = table[layer][room][1]
        if end == layer:
            room -= inputs[layer] + inside[layer]
            layer += 1
        else:
            plan.append(torch.tensor([layer, end]))
            room -= inputs[layer]
            layer = end
    return plan


RIGHT_PLANS = (fronts_in_dictionaries, recursion_with_memory, cheapest_path, from_the_end_with_tensors)

# --- a. Wrong -------------------------------------------------------------------------------------------------------


def units(inputs, inside, segments):
    ends, layer = dict(segments), 0
    while layer < len(inputs):
        end = ends.get(layer, layer + 1)
        whole = sum(inputs[layer:end]) + sum(inside[layer:end])
        yield whole, inputs[layer] if layer in ends else whole
        layer = end


def peak(inputs, inside, segments):
    kept = highest = 0
    for whole, keeps in units(inputs, inside, segments):
        highest = max(highest, kept + whole)
        kept += keeps
    return highest


def check_possible(inputs, inside, costs, limit):
    fronts_in_dictionaries(inputs, inside, costs, limit)


def every_layer(inputs, inside, costs, limit):
    check_possible(inputs, inside, costs, limit)
    return [(i, i + 1) for i in range(len(costs))]


def square_root(inputs, inside, costs, limit):
    check_possible(inputs, inside, costs, limit)
    n = len(costs)
    step = max(1, round(math.sqrt(n)))
    return [(i, min(i + step, n)) for i in range(0, n, step)]


def nothing(inputs, inside, costs, limit):
    check_possible(inputs, inside, costs, limit)
    return []


def one_segment(inputs, inside, costs, limit):
    check_possible(inputs, inside, costs, limit)
    return [(0, len(costs))]


def last_one_too(inputs, inside, costs, limit):
    plan = fronts_in_dictionaries(inputs, inside, costs, limit)
    end = plan[-1][1] if plan else 0
    return [*plan, *([(end, len(costs))] if end < len(costs) else [])]


def without_live_segment(inputs, inside, costs, limit):
    """Least cost such that what is kept at the end of forward fits."""
    check_possible(inputs, inside, costs, limit)
    best = {0: (0, [])}
    for i, (a, b, c) in enumerate(zip(inputs, inside, costs, strict=True)):
        after = {}
        for kept, (spent, plan) in best.items():
            joined = [*plan[:-1], (plan[-1][0], i + 1)] if plan and plan[-1][1] == i else None
            options = [(kept + a + b, spent, plan), (kept + a, spent + c, [*plan, (i, i + 1)])]
            options += [(kept, spent + c, joined)] if joined else []
            for size, value, new in options:
                if size not in after or value < after[size][0]:
                    after[size] = (value, new)
        best = after
    fitting = [value for kept, value in best.items() if kept <= limit]
    return min(fitting)[1]


def without_inside(inputs, inside, costs, limit):
    check_possible(inputs, inside, costs, limit)
    small = [min(b, 1) for b in inside]
    return fronts_in_dictionaries(inputs, small, costs, limit)


def without_inputs(inputs, inside, costs, limit):
    check_possible(inputs, inside, costs, limit)
    return fronts_in_dictionaries([0] * len(inputs), inside, costs, limit)


def lowest_peak(inputs, inside, costs, limit):
    check_possible(inputs, inside, costs, limit)
    for lower in itertools.count(1):
        try:
            return fronts_in_dictionaries(inputs, inside, costs, lower)
        except ValueError:
            continue


def fewest_layers(inputs, inside, costs, limit):
    return fronts_in_dictionaries(inputs, inside, [1] * len(costs), limit)


def one_by_one(order):
    def plan(inputs, inside, costs, limit):
        check_possible(inputs, inside, costs, limit)
        segments = []
        for i in sorted(range(len(costs)), key=lambda i: order(inside, costs, i)):
            if peak(inputs, inside, segments) <= limit:
                break
            segments = sorted([*segments, (i, i + 1)])
        return segments

    return plan


largest_first = one_by_one(lambda inside, costs, i: -inside[i])
cheapest_first = one_by_one(lambda inside, costs, i: costs[i])
best_ratio_first = one_by_one(lambda inside, costs, i: -inside[i] / costs[i])
first_ones = one_by_one(lambda inside, costs, i: i)


def single_layers_only(inputs, inside, costs, limit):
    check_possible(inputs, inside, costs, limit)
    best = {0: (0, [])}
    for i, (a, b, c) in enumerate(zip(inputs, inside, costs, strict=True)):
        after = {}
        for kept, (spent, plan) in best.items():
            if kept + a + b > limit:
                continue
            for size, value, new in ((kept + a + b, spent, plan), (kept + a, spent + c, [*plan, (i, i + 1)])):
                if size not in after or value < after[size][0]:
                    after[size] = (value, new)
        best = after
    return min(best.values())[1] if best else []


def single_layers_without_live(inputs, inside, costs, limit):
    """Single layers of the least cost such that what is kept at the end of forward fits."""
    check_possible(inputs, inside, costs, limit)
    best = {0: (0, [])}
    for i, (a, b, c) in enumerate(zip(inputs, inside, costs, strict=True)):
        after = {}
        for kept, (spent, plan) in best.items():
            for size, value, new in ((kept + a + b, spent, plan), (kept + a, spent + c, [*plan, (i, i + 1)])):
                if size <= limit and (size not in after or value < after[size][0]):
                    after[size] = (value, new)
        best = after
    return min(best.values())[1] if best else []


def least_by(alive, price=sum, spare=0):
    """The least cost, where `alive` counts what is there of a segment that runs backward and `price` what it costs."""

    def plan(inputs, inside, costs, limit):
        check_possible(inputs, inside, costs, limit)
        n = len(costs)
        best = [{} for _ in range(n + 1)]
        best[0][0] = (0, [])
        for start, end in sorted(itertools.combinations(range(n + 1), 2)):
            a, b = inputs[start:end], inside[start:end]
            ways = [(a[0], price(costs[start:end]), [(start, end)])]
            ways += [(a[0] + b[0], 0, [])] if end == start + 1 else []
            room = limit - alive(a, b) - spare
            for kept, (spent, segments) in best[start].items():
                for keeps, more, segment in ways if kept <= room else []:
                    if spent + more < best[end].get(kept + keeps, (math.inf,))[0]:
                        best[end][kept + keeps] = (spent + more, [*segments, *segment])
        if not best[n]:
            raise ValueError("nothing fits")
        return min(best[n].values())[1]

    return plan


all_of_it = least_by(lambda a, b: sum(a) + sum(b))
largest_alone = least_by(lambda a, b: a[0] + max(b))
largest_and_its_input = least_by(lambda a, b: max(map(sum, zip(a, b, strict=True))))
largest_and_first_input = least_by(lambda a, b: a[0] + max(map(sum, zip(a, b, strict=True))))
without_inner_inputs = least_by(lambda a, b: a[0] + sum(b))
less_than_the_limit = least_by(lambda a, b: sum(a) + sum(b), spare=1)
dearest_layer = least_by(lambda a, b: sum(a) + sum(b), price=max)


def never_refuses(inputs, inside, costs, limit):
    try:
        return fronts_in_dictionaries(inputs, inside, costs, limit)
    except ValueError:
        return [(0, len(costs))]


def ends_included(inputs, inside, costs, limit):
    return [(start, end - 1) for start, end in fronts_in_dictionaries(inputs, inside, costs, limit)]


def only_starts(inputs, inside, costs, limit):
    return [start for start, _ in fronts_in_dictionaries(inputs, inside, costs, limit)]


def tries_all(inputs, inside, costs, limit):
    n, found = len(costs), []

    def extend(layer, plan):
        if layer == n:
            if peak(inputs, inside, plan) <= limit:
                found.append((sum(sum(costs[a:b]) for a, b in plan), plan))
            return
        extend(layer + 1, plan)
        for end in range(layer + 1, n + 1):
            extend(end, [*plan, (layer, end)])

    extend(0, [])
    if not found:
        raise ValueError("no plan")
    return min(found)[1]


WRONG_PLANS = {
    "every layer": (every_layer, "every layer by itself", (0, 3.5)),
    "square root": (square_root, "about sqrt(L) equal segments", (0, 3.5)),
    "nothing": (nothing, "you recompute nothing", (0, 2.5)),
    "one segment": (one_segment, "you recompute all layers, in segments", (0, 2.5)),
    "last one too": (last_one_too, "you recompute the last segment", (0.5, 5)),
    "without the live segment": (without_live_segment, "leave out the segment that backward makes again", (0, 4)),
    "without what is inside": (without_inside, "count all that a layer keeps", (0, 3)),
    "without inputs": (without_inputs, "leave out the inputs", (0, 4.5)),
    "lowest peak": (lowest_peak, "as low as it can be", (0, 4.5)),
    "fewest layers": (fewest_layers, "the number of recomputed layers small", (1, 5.5)),
    "largest first": (largest_first, "the largest layers first", (0, 5)),
    "cheapest first": (cheapest_first, "the cheapest layers first", (0, 5)),
    "best ratio first": (best_ratio_first, "the most bytes for their cost first", (0, 5)),
    "first ones": (first_ones, "from the first one on", (0, 4)),
    "single layers": (single_layers_only, "your segments have one layer each", (1, 5.5)),
    "single layers, no live unit": (single_layers_without_live, "leave out the segment that backward makes", (0, 4)),
    "largest alone": (largest_alone, "only the largest layer of a segment", (0, 3)),
    "largest and its input": (largest_and_its_input, "only the largest layer of a segment", (0, 3)),
    "largest and first input": (largest_and_first_input, "only the largest layer of a segment", (0, 3)),
    "without inner inputs": (without_inner_inputs, "leave out the inputs of a segment's inner layers", (0, 4)),
    "less than the limit": (less_than_the_limit, "you allow less than `limit`", (1, 5)),
    "dearest layer": (dearest_layer, "the dearest layer of a segment for its cost", (1, 5)),
    "never refuses": (never_refuses, "no plan fits; raise a ValueError", (4, 5.9)),
    "ends included": (ends_included, "is no segment of", (0, 4)),
    "only starts": (only_starts, "return a list of pairs", (0, 3)),
    "tries all": (tries_all, "To try all plans is no way", (2, 5)),
}

# --- b. Right -------------------------------------------------------------------------------------------------------


def walk(layers, segments):
    ends, position = dict(segments), 0
    while position < len(layers):
        end = ends.get(position, position + 1)
        yield position in ends, layers[position:end]
        position = end


def by_function_with_parameters(layers, x, segments):
    """A Function whose inputs are the segment's weights too, and whose backward uses torch.autograd.grad."""

    class Segment(torch.autograd.Function):
        @staticmethod
        def forward(ctx, run, x, *weights):
            ctx.run, ctx.state = run, torch.get_rng_state()
            ctx.save_for_backward(x, *weights)
            with torch.no_grad():
                return run(x)

        @staticmethod
        def backward(ctx, grad):
            x, *weights = ctx.saved_tensors
            needs, now = ctx.needs_input_grad[1], torch.get_rng_state()
            torch.set_rng_state(ctx.state)
            with torch.enable_grad():
                x = x.detach().requires_grad_(needs)
                y = ctx.run(x)
            torch.set_rng_state(now)
            grads = torch.autograd.grad(y, [x, *weights] if needs else weights, grad)
            return (None, *(grads if needs else (None, *grads)))

    for again, part in walk(layers, segments):
        if again:
            run = nn.Sequential(*part)
            x = Segment.apply(run, x, *run.parameters())
        else:
            x = part[0](x)
    return x


def by_function_with_a_dummy(layers, x, segments):
    """A Function that is recorded for the sake of a dummy, and whose backward lets weights add up by themselves."""

    class Segment(torch.autograd.Function):
        @staticmethod
        def forward(ctx, dummy, part, x):
            ctx.part, ctx.state, ctx.needs = part, torch.get_rng_state(), x.requires_grad
            ctx.save_for_backward(x)
            for layer in part:
                x = layer(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.set_rng_state(ctx.state)
                x = y = saved.detach().requires_grad_(ctx.needs)
                for layer in ctx.part:
                    y = layer(y)
                y.backward(grad)
            return None, None, x.grad

    dummy = torch.zeros((), requires_grad=True)
    for again, part in walk(layers, segments):
        x = Segment.apply(dummy, part, x) if again else part[0](x)
    return x


def by_hooks(layers, x, segments):
    """Saved tensors are replaced by their number; the first that is asked for makes all of them again."""

    def run_again(part, x):
        state, remembered, count = torch.get_rng_state(), {}, itertools.count()

        def pack(_):
            return next(count)

        def unpack(number):
            if not remembered:
                numbers = itertools.count()

                def keep(tensor):
                    remembered[next(numbers)] = tensor.detach()
                    return tensor.detach()

                with torch.random.fork_rng(devices=[]), torch.enable_grad():
                    torch.set_rng_state(state)
                    with saved_tensors_hooks(keep, lambda tensor: tensor):
                        y = x.detach().requires_grad_(x.requires_grad)
                        for layer in part:
                            y = layer(y)
            return remembered.pop(number)

        with saved_tensors_hooks(pack, unpack):
            y = x
            for layer in part:
                y = layer(y)
        return y

    for again, part in walk(layers, segments):
        x = run_again(part, x) if again else part[0](x)
    return x


def by_hook_on_the_result(layers, x, segments):
    """A leaf stands for the segment's result; its gradient's hook runs the segment again."""

    def run_again(part, x):
        state = torch.get_rng_state().clone()  # a copy by an operation, which counts as bytes
        with torch.no_grad():
            y = x
            for layer in part:
                y = layer(y)

        class Bridge(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, anchor, y):
                ctx.save_for_backward(x)
                ctx.needs = x.requires_grad
                return y.view_as(y)

            @staticmethod
            def backward(ctx, grad):
                before = torch.get_rng_state()
                torch.set_rng_state(state)
                with torch.enable_grad():
                    inner = out = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs)
                    for layer in part:
                        out = layer(out)
                torch.set_rng_state(before)
                torch.autograd.backward([out], [grad])
                return inner.grad, None, None

        return Bridge.apply(x, next(part[0].parameters()).new_zeros((), requires_grad=True), y)

    for again, part in walk(layers, segments):
        x = run_again(part, x) if again else part[0](x)
    return x


RIGHT_RUNS = (by_function_with_parameters, by_function_with_a_dummy, by_hooks, by_hook_on_the_result)

# --- b. Wrong -------------------------------------------------------------------------------------------------------


def variant(
    *,
    dummy=True,
    state=True,
    put_back=True,
    detach=True,
    scale=1.0,
    forwards=1,
    backwards=1,
    record=False,
    hoard=False,
    overwrite=False,
):
    """An answer with one thing wrong."""
    made_again = []

    class Segment(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, part, x):
            ctx.part, ctx.state, ctx.needs = part, torch.get_rng_state(), x.requires_grad
            ctx.save_for_backward(x)
            for _ in range(forwards):
                y = x
                with torch.enable_grad() if record else torch.no_grad():
                    for layer in part:
                        y = layer(y)
            if record:
                ctx.hoard = y
                return y.detach()
            return y

        @staticmethod
        def backward(ctx, grad):
            now = torch.get_rng_state()
            for _ in range(backwards):
                if state:
                    torch.set_rng_state(ctx.state)
                with torch.enable_grad():
                    x = y = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs and detach)
                    for layer in ctx.part:
                        y = layer(y)
            if put_back:
                torch.set_rng_state(now)
            if overwrite:
                for layer in ctx.part:
                    layer.zero_grad()
            y.backward(grad * scale, retain_graph=hoard)
            if hoard:
                made_again.append(y)
            return None, None, x.grad

    def run_chain(layers, x, segments):
        for again, part in walk(layers, segments):
            if again:
                anchor = torch.zeros((), requires_grad=True) if dummy else None
                x = Segment.apply(anchor, part, x)
            else:
                x = part[0](x)
        return x

    return run_chain


def plain(layers, x, segments):
    for layer in layers:
        x = layer(x)
    return x


def by_library(layers, x, segments):
    for again, part in walk(layers, segments):
        x = checkpoint(nn.Sequential(*part), x, use_reentrant=False) if again else part[0](x)
    return x


def without_graph(layers, x, segments):
    for again, part in walk(layers, segments):
        if again:
            with torch.no_grad():
                x = nn.Sequential(*part)(x)
        else:
            x = part[0](x)
    return x


def everything_again(layers, x, segments):
    return by_function_with_a_dummy(layers, x, [(i, i + 1) for i in range(len(layers))])


def each_layer_alone(layers, x, segments):
    """Each layer of a segment run again by itself: no segment is built, and every layer's input is kept."""
    covered = sorted({i for start, end in segments for i in range(start, end)})
    return by_function_with_parameters(layers, x, [(i, i + 1) for i in covered])


def halves(layers, x, segments):
    """Segments of three or more layers cut in two: one input too many each."""
    cut = []
    for start, end in segments:
        middle = (start + end) // 2 if end - start > 2 else end
        cut += [(start, middle), (middle, end)] if middle < end else [(start, end)]
    return by_function_with_parameters(layers, x, cut)


def segments_only(layers, x, segments):
    for start, end in segments:
        x = nn.Sequential(*layers[start:end])(x)
    return x


def no_result(layers, x, segments):
    by_function_with_a_dummy(layers, x, segments)


WRONG_RUNS = {
    "plain": (plain, "did not run again in backward", (0, 0)),
    "library": (by_library, "torch.utils.checkpoint did the work", (0, 0)),
    "reentrant without a dummy": (variant(dummy=False), "the weights do, not the input", (3, 3)),
    "masks not drawn again": (variant(state=False), "draw the same dropout masks again", (5, 5)),
    "generator not put back": (variant(put_back=False), "put its state back", (4, 5)),
    "input cut off": (variant(detach=False), "got no gradient", (1, 5)),
    "masks not drawn again, generator moved on": (
        variant(state=False, put_back=False),
        "draw the same dropout masks again",
        (4, 4),
    ),
    "gradients overwritten": (variant(overwrite=True), "had before is lost", (4, 4)),
    "wrong scale": (variant(scale=2.0), "is wrong", (4, 4)),
    "forward twice": (variant(forwards=2), "each must run once", (0, 5)),
    "backward twice": (variant(backwards=2), "once is enough", (1, 5)),
    "keeps what it recorded": (variant(record=True), "keep only their inputs", (3, 5)),
    "keeps what it made again": (variant(hoard=True), "let go of it", (5, 5)),
    "each layer alone": (each_layer_alone, "as if each layer were a segment of its own", (5, 5)),
    "segments cut in two": (halves, "keeps the input of layer `start` alone", (5, 5)),
    "without a graph": (without_graph, "did not run again in backward", (0, 0)),
    "everything again": (everything_again, "are in no segment and ran again", (3, 5)),
    "segments only": (segments_only, "the output is not that of the chain", (0, 0)),
    "no result": (no_result, "return the output of the last layer", (0, 0)),
}
