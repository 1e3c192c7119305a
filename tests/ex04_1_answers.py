"""Answers to exercise 4.1: right ones in other styles, and wrong ones with the points they should lose."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

A, B, C = "ex04_1_a", "ex04_1_b", "ex04_1_c"

REFERENCE_CELLS = {
    A: """
    def adam_bytes_per_param(precision):
        return (4, 4, 8) if precision == "fp32" else (2, 2, 12)
    """,
    B: """
    def state_bytes_per_rank(num_params, num_ranks, zero_stage):
        if zero_stage not in range(4):
            raise ValueError("no such stage")
        split = [1, 1, 1]
        for owner in range(zero_stage):
            split[owner] = num_ranks
        return num_params * (12 / split[0] + 2 / split[1] + 2 / split[2])
    """,
    C: """
    def choose_strategy(model, cluster):
        n = cluster.num_devices
        precision = "bf16_mixed" if get_device(cluster.device).supports("bf16") else "fp16_mixed"
        full = dict(dp_shard=n, zero_stage=3) if n > 1 else {}
        for choice in (
            dict(dp_replicate=n),
            full,
            full | dict(optimizer="adamw_8bit"),
            full | dict(offload_optimizer=True),
            full | dict(optimizer="adamw_8bit", offload_optimizer=True),
        ):
            plan = Plan(precision=precision, **choice)
            if check_plan(plan, model, cluster).ok:
                return plan
    """,
}
"""What stands in the cells that an answer below does not fill in."""

RIGHT_ANSWERS: dict[str, dict[str, str]] = {
    "search by price": {
        C: """
        import itertools

        def price(plan):
            dear = plan.offload_optimizer + (plan.optimizer == "adamw_8bit")
            return (dear > 0, dear, plan.zero_stage == 3 or plan.tp * plan.pp > 1, plan.zero_stage)

        def choose_strategy(model, cluster):
            n = cluster.num_devices
            sizes = [d for d in range(1, n + 1) if n % d == 0]
            plans = []
            for shard, tp in itertools.product(sizes, [t for t in sizes if cluster.devices_per_node % t == 0]):
                if n % (shard * tp):
                    continue
                for stage in ([1, 2, 3] if shard > 1 else [0]):
                    for optimizer, offload in itertools.product(["adamw", "adamw_8bit"], [False, True]):
                        for precision in ("bf16_mixed", "fp16_mixed"):
                            plans.append(Plan(dp_replicate=n // (shard * tp), dp_shard=shard, tp=tp, zero_stage=stage,
                                              optimizer=optimizer, offload_optimizer=offload, precision=precision))
            possible = [plan for plan in plans if check_plan(plan, model, cluster).ok]
            return min(possible, key=price, default=None)
        """,
    },
    "arithmetic by hand, offloading first, ZeRO-1 for small models": {
        A: """
        import numpy as np

        class Table(dict):
            def __call__(self, key):
                return self[key]

        adam_bytes_per_param = Table(fp32=np.array([4, 4, 8]), bf16_mixed=[2.0, 2.0, 12.0])
        """,
        B: """
        from fractions import Fraction

        def state_bytes_per_rank(num_params, num_ranks, zero_stage):
            whole, each = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}.get(zero_stage) or stop()
            return Fraction(whole * num_params * num_ranks + each * num_params, num_ranks)

        class StageError(ValueError):
            pass

        def stop():
            raise StageError
        """,
        C: """
        def choose_strategy(model, cluster):
            device = get_device(cluster.device)
            n, P = cluster.num_devices, count_params(model).total
            half = "bf16_mixed" if "bf16" in device.dense_flop_per_s else "fp16_mixed"
            sharded = Plan(dp_shard=n, zero_stage=3, precision=half) if n > 1 else Plan(precision=half)
            memory = estimate_rank_memory(sharded, model)
            extra = memory.activations + memory.allowance
            room = device.memory_bytes - extra
            if 16 * P <= room:
                return Plan(dp_shard=n, zero_stage=1, precision=half) if n > 1 else Plan(precision=half)
            room -= memory.gathered
            if 16 * P / n <= room:
                return sharded
            host = 12 * P / cluster.num_nodes <= cluster.host_memory_bytes
            small_host = 6 * P / cluster.num_nodes <= cluster.host_memory_bytes
            kind = dict(dp_shard=n, zero_stage=3, precision=half)
            if 4 * P / n <= room and host:
                return Plan(**kind, offload_optimizer=True)
            if 10 * P / n <= room:
                return Plan(**kind, optimizer="adamw_8bit")
            if 4 * P / n <= room and small_host:
                return Plan(**kind, offload_optimizer=True, optimizer="adamw_8bit")
            return None
        """,
    },
    "groups of replicas where a node is enough, fp32 on old devices": {
        B: """
        def state_bytes_per_rank(num_params, num_ranks, zero_stage):
            assert num_ranks >= 1
            match zero_stage:
                case 0: return 16 * num_params
                case 1: return 4 * num_params + -(-12 * num_params // num_ranks)
                case 2: return 2 * num_params + -(-14 * num_params // num_ranks)
                case 3: return -(-16 * num_params // num_ranks)
            raise ValueError(f"stage {zero_stage}")
        """,
        C: """
        from dataclasses import replace

        def choose_strategy(model, cluster):
            nodes, local = cluster.num_nodes, cluster.devices_per_node
            native = get_device(cluster.device).supports("bf16")
            base = Plan(dp_replicate=nodes * local, precision="bf16_autocast" if native else "fp32")
            mixed = "bf16_mixed" if native else "fp16_mixed"
            candidates = [base, replace(base, precision=mixed)]
            if nodes * local > 1:
                if local > 1:
                    candidates.append(Plan(dp_replicate=nodes, dp_shard=local, zero_stage=3, precision=mixed))
                candidates.append(Plan(dp_shard=nodes * local, zero_stage=3, precision=mixed))
            last = candidates[-1]
            candidates += [
                replace(last, offload_optimizer=True),
                replace(last, optimizer="adamw_8bit"),
                replace(last, offload_optimizer=True, optimizer="adamw_8bit"),
            ]
            return next((plan for plan in candidates if check_plan(plan, model, cluster).ok), None)
        """,
    },
    "a class, recursion, output on stderr and a warning": {
        A: """
        adam_bytes_per_param = lambda precision: {"fp32": [4, 4, 8], "bf16_mixed": [2, 2, 12]}[precision]
        """,
        C: """
        import logging, sys, warnings

        class Chooser:
            steps = [{}, {"zero_stage": 3}, {"zero_stage": 3, "optimizer": "adamw_8bit"},
                     {"zero_stage": 3, "offload_optimizer": True},
                     {"zero_stage": 3, "offload_optimizer": True, "optimizer": "adamw_8bit"}]

            def __call__(self, model, cluster, step=0):
                print("trying", step, file=sys.stderr)
                warnings.warn("deprecated")
                logging.warning("hm")
                if step == len(self.steps):
                    return None
                fields = dict(self.steps[step])
                num = cluster.num_nodes * cluster.devices_per_node
                if num == 1:
                    fields.pop("zero_stage", None)
                fields["dp_shard" if "zero_stage" in fields else "dp_replicate"] = num
                for precision in ("bf16_mixed", "fp16_mixed", "fp32"):
                    plan = Plan(**fields, precision=precision)
                    if not check_plan(plan, model, cluster).problems:
                        return plan
                return self(model, cluster, step + 1)

        choose_strategy = Chooser()
        """,
    },
    "tensor parallelism inside the node where it divides": {
        C: """
        def choose_strategy(model, cluster):
            num, language = cluster.num_devices, model.language
            precision = "bf16_mixed" if get_device(cluster.device).supports("bf16") else "fp16_mixed"
            ddp = Plan(dp_replicate=num, precision=precision)
            if check_plan(ddp, model, cluster).ok:
                return ddp
            for extra in ({}, dict(optimizer="adamw_8bit"), dict(offload_optimizer=True),
                          dict(optimizer="adamw_8bit", offload_optimizer=True)):
                for tp in (2, 1):
                    shard = num // tp
                    if num % tp or shard == 1:
                        continue
                    plan = Plan(dp_shard=shard, tp=tp, zero_stage=3, precision=precision, **extra)
                    if check_plan(plan, model, cluster).ok:
                        return plan
            return None
        """,
    },
}


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A wrong answer: the cells it fills in, and by short name which tests it must lose."""

    answers: dict[str, str]
    less: tuple[str, ...] = ()
    """Tests that must give less than full points."""
    none: tuple[str, ...] = ()
    """Tests that must give no points."""
    named: dict[str, str] = field(default_factory=dict)
    """What the feedback of a test must say."""
    alone: bool = False
    """Whether no group of part c may name another misconception than these."""


ALL_C = ("c_plain", "c_sharded", "c_remedy", "c_ranks", "c_precision", "c_limits")


def ladder(needed: str) -> str:
    """An answer that goes from cheap to dear by its own estimate, a formula in memory `m`, plan `p` and `params`."""
    return f"""
    def needed(p, m, params):
        moments = 8 if p.optimizer == "adamw" else 2
        one_moment = m.optimizer * (moments / 2) / (4 + moments)
        return {needed}

    def choose_strategy(model, cluster):
        n, device = cluster.num_devices, get_device(cluster.device)
        precision = "bf16_mixed" if device.supports("bf16") else "fp16_mixed"
        full = dict(dp_shard=n, zero_stage=3) if n > 1 else {{}}
        for choice in (
            dict(dp_replicate=n),
            full,
            full | dict(optimizer="adamw_8bit"),
            full | dict(offload_optimizer=True),
            full | dict(optimizer="adamw_8bit", offload_optimizer=True),
        ):
            plan = Plan(precision=precision, **choice)
            if needed(plan, estimate_rank_memory(plan, model), count_params(model)) <= device.memory_bytes:
                return plan
        return None
    """


def plan_always(fields: str) -> str:
    return f"def choose_strategy(model, cluster):\n    n = cluster.num_devices\n    return {fields}\n"


def changed(name: str, *changes: tuple[str, str]) -> dict[str, str]:
    """The reference's cell with some text replaced."""
    source = textwrap.dedent(REFERENCE_CELLS[name])
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return {name: source}


FULL = "full = dict(dp_shard=n, zero_stage=3) if n > 1 else {}"
IN_NODE = (
    FULL,
    "local = cluster.devices_per_node\n"
    "    full = dict(dp_replicate=n // local) | (dict(dp_shard=local, zero_stage=3) if local > 1 else {})",
)
TP_IN_NODE = (FULL, "full = dict(tp=cluster.devices_per_node, dp_replicate=cluster.num_nodes)")
BY_MEMORY = (
    "check_plan(plan, model, cluster).ok",
    "estimate_rank_memory(plan, model).device_total <= get_device(cluster.device).memory_bytes",
)
UP_TO_ZERO_2 = ("zero_stage=3", "zero_stage=2")
ZERO_2_AS_3 = ("check_plan(plan, model", "check_plan(replace(plan, zero_stage=3 * (plan.zero_stage > 0)), model")
IMPORT_REPLACE = ("def choose", "from dataclasses import replace\n\ndef choose")
NEVER_NONE = ("            return plan\n", "            return plan\n    return plan\n")
"""Changes of the reference's cell c."""

LANGUAGE_ONLY = "you counted the language tower only: the vision tower trains too"
ZERO_2_IS_NOT_3 = "you split the weights in ZeRO-2; they are split from stage 3 on"

LOOKS = "It looks as if "


def state_list(stages: str) -> str:
    """An answer to part b, from the bytes of stages 0 to 3 in P and N."""
    return f"""
    def state_bytes_per_rank(P, N, stage):
        if stage > 3:
            raise ValueError
        return [{stages}][stage]
    """


WRONG_ANSWERS: dict[str, Wrong] = {
    # --- a
    "fp32 Adam with one moment": Wrong(
        answers={A: "def adam_bytes_per_param(p):\n    return (4, 4, 4) if p == 'fp32' else (2, 2, 12)"},
        less=("a_test",),
        named={"a_test": "84 GB"},
    ),
    "mixed precision without master weights": Wrong(
        answers={A: "def adam_bytes_per_param(p):\n    return (4, 4, 8) if p == 'fp32' else (2, 2, 8)"},
        less=("a_test",),
        named={"a_test": "left out the fp32 copy of the weight"},
    ),
    "everything in one number": Wrong(
        answers={A: "def adam_bytes_per_param(p):\n    return 16"},
        none=("a_test",),
        named={"a_test": "return three numbers"},
    ),
    "the right sum, shared out wrongly": Wrong(
        answers={A: "def adam_bytes_per_param(p):\n    return (4, 4, 8)"},
        less=("a_test",),
        named={"a_test": "the sum 16 is right"},
    ),
    # --- b
    "ZeRO-1 shards the gradients too": Wrong(
        answers=changed(B, ("range(zero_stage)", "range(2 if zero_stage == 1 else zero_stage)")),
        less=("b_cases",),
        none=("b_test",),
        named={
            "b_cases": f"{LOOKS}you split the gradients in ZeRO-1; they are split from stage 2 on.",
            "b_test": "64, 1) is not right",
        },
    ),
    "ZeRO-2 leaves the gradients whole": Wrong(
        answers=changed(B, ("range(zero_stage)", "range(1 if zero_stage == 2 else zero_stage)")),
        less=("b_cases",),
        none=("b_test",),
        named={"b_cases": f"{LOOKS}you left the gradients whole in ZeRO-2; they are split from stage 2 on."},
    ),
    "4P + 16P/N and 4P + 12P/N": Wrong(
        answers={
            B: """
            def state_bytes_per_rank(P, N, stage):
                if stage > 3:
                    raise ValueError
                return [16 * P, 4 * P + 16 * P / N, 4 * P + 12 * P / N, 16 * P / N][stage]
            """
        },
        less=("b_cases",),
        none=("b_test",),
        named={"b_cases": f"not 4P + 16P/N.\n{LOOKS}you left the gradients whole in ZeRO-2; they"},
    ),
    "the master weights stay whole": Wrong(
        answers={
            B: """
            def state_bytes_per_rank(P, N, stage):
                if stage > 3:
                    raise ValueError
                return [16 * P, (8 + 8 / N) * P, (6 + 10 / N) * P, 16 * P / N][stage]
            """
        },
        less=("b_cases",),
        none=("b_test",),
        named={"b_cases": f"{LOOKS}you split the two moments and left the fp32 master weights whole"},
        alone=True,
    ),
    "divided with //": Wrong(
        answers={
            B: """
            def state_bytes_per_rank(P, N, stage):
                if stage > 3:
                    raise ValueError
                return [16, 4 + 12 // N, 2 + 14 // N, 16 // N][stage] * P
            """
        },
        less=("b_cases",),
        none=("b_test",),
        named={"b_cases": f"{LOOKS}you divided with //"},
        alone=True,
    ),
    "a triple for a rank": Wrong(
        answers={B: "def state_bytes_per_rank(P, N, stage):\n    return (2 * P, 2 * P, 12 * P)"},
        none=("b_test", "b_cases"),
        named={"b_cases": "return one number, not ("},
    ),
    "one Adam moment on a rank": Wrong(
        answers=changed(B, ("12 / split", "8 / split")),
        none=("b_test", "b_cases"),
        named={"b_cases": "you counted one Adam moment"},
    ),
    "weights and gradients in fp32": Wrong(
        answers=changed(B, ("12 / split", "8 / split"), ("2 / split", "4 / split")),
        less=("b_cases",),
        none=("b_test",),
        named={"b_cases": "you counted weights and gradients in fp32"},
    ),
    "gigabytes in place of bytes": Wrong(
        answers=changed(B, ("return num_params", "return num_params / 1e9")),
        none=("b_test", "b_cases"),
        named={"b_cases": "right in another unit"},
    ),
    "any stage above 3 counts as 3": Wrong(
        answers=changed(B, ("if zero_stage not in range(4):", "zero_stage = min(zero_stage, 3)\n    if False:")),
        less=("b_cases",),
        named={"b_cases": "raise a ValueError"},
    ),
    "not a number": Wrong(
        answers={B: "def state_bytes_per_rank(*_):\n    return float('nan')"}, none=("b_test", "b_cases")
    ),
    "fp32 and mixed precision with one moment": Wrong(
        answers={A: "def adam_bytes_per_param(p):\n    return (4, 4, 4) if p == 'fp32' else (2, 2, 8)"},
        none=("a_test",),
        named={"a_test": "112 GB\nbf16_mixed: 12 bytes a parameter again"},
    ),
    "mixed precision with the bytes of fp32": Wrong(
        answers={A: "def adam_bytes_per_param(p):\n    return (4, 4, 12)"},
        none=("a_test",),
        named={"a_test": "adds up to 20 bytes a parameter, too many: look at weights, gradients"},
    ),
    "state with weights and gradients in fp32": Wrong(
        answers={B: state_list("20 * P, 8 * P + 12 * P / N, 4 * P + 16 * P / N, 20 * P / N")},
        none=("b_test", "b_cases"),
        named={"b_cases": "you counted weights and gradients in fp32"},
    ),
    "state with gradients in fp32": Wrong(
        answers={B: state_list("18 * P, 6 * P + 12 * P / N, 2 * P + 16 * P / N, 18 * P / N")},
        none=("b_test", "b_cases"),
        named={"b_cases": "you counted the gradients in fp32"},
    ),
    "adam_bytes_per_param without an argument": Wrong(
        answers={A: "def adam_bytes_per_param():\n    return (2, 2, 12)"},
        none=("a_test",),
        named={"a_test": "your function must take (precision), and takes ()"},
    ),
    "state_bytes_per_rank without the stage": Wrong(
        answers={B: "state_bytes_per_rank = lambda P, N: 16 * P / N"},
        none=("b_test", "b_cases"),
        named={"b_cases": "your function must take (num_params, num_ranks, zero_stage), and takes (P, N)"},
    ),
    "stages shifted by one": Wrong(
        answers={B: state_list("16 * P, 16 * P, 4 * P + 12 * P / N, 2 * P + 14 * P / N")},
        less=("b_cases",),
        none=("b_test",),
        named={"b_cases": f"{LOOKS}your stages are shifted by one: stage 0 splits nothing, stage 1 the optimizer"},
    ),
    "ZeRO-3 leaves the weights whole": Wrong(
        answers={B: state_list("16 * P, 4 * P + 12 * P / N, 2 * P + 14 * P / N, 2 * P + 14 * P / N")},
        less=("b_cases",),
        none=("b_test",),
        named={"b_cases": f"{LOOKS}you left the weights whole in ZeRO-3; they are split from stage 3 on."},
    ),
    "ZeRO-1 splits nothing": Wrong(
        answers={B: state_list("16 * P, 16 * P, 2 * P + 14 * P / N, 16 * P / N")},
        less=("b_cases",),
        none=("b_test",),
        named={"b_cases": f"{LOOKS}you left the optimizer state whole in ZeRO-1; it is split from stage 1 on."},
    ),
    "ZeRO-1 splits everything": Wrong(
        answers={B: state_list("16 * P, 16 * P / N, 2 * P + 14 * P / N, 16 * P / N")},
        less=("b_cases",),
        none=("b_test",),
        named={
            "b_cases": f"{LOOKS}you split the gradients and the weights in ZeRO-1; the gradients are split from stage "
            "2 on, the weights from stage 3 on."
        },
    ),
    "everything split in every stage": Wrong(
        answers={B: state_list("16 * P / N, 16 * P / N, 16 * P / N, 16 * P / N")},
        less=("b_cases",),
        none=("b_test",),
        named={"b_cases": f"{LOOKS}you divided everything by the number of ranks in every stage; stage 0 splits"},
    ),
    "the optimizer split under DDP": Wrong(
        answers={B: state_list("4 * P + 12 * P / N, 4 * P + 12 * P / N, 2 * P + 14 * P / N, 16 * P / N")},
        less=("b_cases",),
        none=("b_test",),
        named={"b_cases": f"{LOOKS}you split the optimizer state in stage 0; that is plain DDP, where every rank"},
    ),
    # --- c: formulas
    "counts one Adam moment": Wrong(
        answers={C: ladder("m.device_total - one_moment")},
        less=("c_sharded", "c_remedy", "c_ranks"),
        named={"c_remedy": "you counted one Adam moment", "c_sharded": "you counted one Adam moment"},
        alone=True,
    ),
    "counts one Adam moment and no activations": Wrong(
        answers={C: ladder("m.state - one_moment")},
        less=("c_sharded", "c_remedy", "c_ranks", "c_precision", "c_limits"),
        named={"c_remedy": "you counted one Adam moment"},
        alone=True,
    ),
    "counts the state only": Wrong(
        answers={C: ladder("m.state")},
        less=("c_sharded", "c_remedy", "c_ranks", "c_limits"),
        named={"c_remedy": "you counted the training state only"},
        alone=True,
    ),
    "leaves out the gradients": Wrong(
        answers={C: ladder("m.device_total - m.gradients")},
        less=("c_sharded", "c_remedy", "c_ranks", "c_limits"),
        named={"c_limits": "you left out the gradients"},
        alone=True,
    ),
    "plans for inference": Wrong(
        answers={C: ladder("m.device_total - m.optimizer")},
        less=("c_sharded", "c_remedy", "c_ranks", "c_precision", "c_limits"),
        named={"c_sharded": "this is the memory of inference", "c_remedy": "this is the memory of inference"},
        alone=True,
    ),
    "divides by the world size under DDP": Wrong(
        answers={C: ladder("m.device_total - m.state + m.state / p.dp_replicate")},
        less=("c_sharded", "c_ranks", "c_precision"),
        named={"c_sharded": "you divided the state by the world size where it is replicated"},
        alone=True,
    ),
    "compares the whole state with one device": Wrong(
        answers={C: ladder("m.device_total - m.state + m.state * p.dp_shard")},
        less=("c_sharded", "c_remedy", "c_ranks", "c_precision", "c_limits"),
        named={"c_sharded": "you compared the whole training state with one device"},
    ),
    "counts 20 bytes a parameter": Wrong(
        answers={C: ladder("m.device_total + m.optimizer / 3")},
        less=("c_plain", "c_sharded", "c_remedy", "c_ranks", "c_precision"),
        named={"c_sharded": "you counted more than 16 bytes a parameter"},
    ),
    "counts the language tower only": Wrong(
        answers={C: ladder("m.device_total - m.state * (1 - params.language / params.total)")},
        less=("c_sharded", "c_remedy"),
        named={"c_sharded": LANGUAGE_ONLY, "c_remedy": LANGUAGE_ONLY},
        alone=True,
    ),
    "counts the language tower's state only": Wrong(
        answers={C: ladder("m.state * params.language / params.total")},
        less=("c_sharded", "c_remedy", "c_ranks", "c_precision", "c_limits"),
        named={short: LANGUAGE_ONLY for short in ("c_sharded", "c_remedy", "c_ranks", "c_precision", "c_limits")},
        alone=True,
    ),
    "counts no fp32 master weights": Wrong(
        answers={C: ladder("m.device_total - m.optimizer * 4 / (4 + moments)")},
        less=("c_sharded", "c_remedy", "c_ranks", "c_precision", "c_limits"),
        named={"c_remedy": "left out the fp32 master weights", "c_limits": "left out the fp32 master weights"},
        alone=True,
    ),
    "compares a need in GB with a device in GiB": Wrong(
        answers={C: ladder("m.device_total / 10**9 * 2**30")},
        less=("c_limits",),
        named={"c_limits": "a GiB is 1.074 GB"},
        alone=True,
    ),
    # --- c: fixed plans
    "always DDP": Wrong(
        answers={C: plan_always("Plan(dp_replicate=n)")},
        less=("c_ranks",),
        none=("c_sharded", "c_remedy", "c_precision", "c_limits"),
        named={"c_sharded": "the same kind of plan in every case"},
    ),
    "always FSDP": Wrong(
        answers={C: plan_always("Plan(dp_shard=n, zero_stage=3) if n > 1 else Plan()")},
        less=("c_plain", "c_ranks"),
        none=("c_remedy", "c_precision", "c_limits"),
        named={"c_plain": "DDP fits here", "c_remedy": "the same kind of plan in every case"},
    ),
    "always offloads": Wrong(
        answers={C: plan_always("Plan(dp_shard=n, zero_stage=3, offload_optimizer=True) if n > 1 else Plan()")},
        less=("c_plain", "c_remedy", "c_ranks"),
        none=("c_sharded", "c_precision", "c_limits"),
        named={"c_sharded": "splitting the state over the ranks is enough", "c_remedy": "in the node's main memory"},
    ),
    "always gives up": Wrong(
        answers={C: plan_always("None")},
        none=ALL_C,
        named={"c_limits": "but there is a plan"},
    ),
    "freezes the vision tower": Wrong(
        answers={C: plan_always("Plan(dp_shard=n, zero_stage=3, frozen=('vision',)) if n > 1 else Plan()")},
        less=("c_plain",),
        none=("c_sharded", "c_remedy", "c_ranks", "c_precision", "c_limits"),
        named={"c_remedy": "training less than was asked"},
        alone=True,
    ),
    "trains with SGD where Adam does not fit": Wrong(
        answers={C: plan_always("Plan(dp_shard=n, zero_stage=3, optimizer='sgd_momentum') if n > 1 else Plan()")},
        less=("c_plain",),
        none=("c_sharded", "c_remedy", "c_ranks", "c_precision", "c_limits"),
        named={"c_remedy": "the task is to train with AdamW"},
    ),
    "never answers None": Wrong(
        answers=changed(C, NEVER_NONE),
        none=("c_limits",),
        named={"c_limits": "you never answer None"},
        alone=True,
    ),
    # --- c: ranks, heads, devices
    "forgets the other nodes": Wrong(
        answers=changed(C, ("cluster.num_devices", "cluster.devices_per_node")),
        less=("c_ranks",),
        none=("c_limits",),
        named={"c_ranks": "you did not count the ranks of all nodes"},
        alone=True,
    ),
    "bf16 everywhere": Wrong(
        answers=changed(
            C,
            ('"fp16_mixed"', '"bf16_mixed"'),
            ("check_plan(plan, model, cluster).ok", "set(check_plan(plan, model, cluster).codes) <= {'precision'}"),
        ),
        none=("c_precision",),
        named={"c_precision": "you computed in bf16 on a device that has none"},
        alone=True,
    ),
    "bf16 everywhere, and None where that is refused": Wrong(
        answers=changed(C, ('"fp16_mixed"', '"bf16_mixed"')),
        none=("c_precision",),
        named={"c_precision": "you computed in bf16 on a device that has none"},
        alone=True,
    ),
    "splits the state inside each node only": Wrong(
        answers=changed(C, IN_NODE),
        less=("c_ranks",),
        none=("c_limits",),
        named={"c_ranks": "you split the state inside each node only", "c_limits": "you split the state inside each"},
        alone=True,
    ),
    "splits the state inside each node only, and never answers None": Wrong(
        answers=changed(C, IN_NODE, NEVER_NONE),
        less=("c_ranks",),
        none=("c_limits",),
        named={"c_ranks": "you split the state inside each node only", "c_limits": "you split the state inside each"},
        alone=True,
    ),
    "tensor parallelism over the node, whatever divides": Wrong(
        answers=changed(C, TP_IN_NODE, BY_MEMORY),
        less=("c_sharded", "c_remedy", "c_ranks", "c_precision"),
        none=("c_limits",),
        named={
            "c_sharded": "a tp that does not divide the heads",
            "c_precision": "a tp that does not divide the heads",
        },
    ),
    "shards without saying what": Wrong(
        answers={C: plan_always("Plan(dp_shard=n)")},
        less=("c_plain",),
        none=("c_sharded", "c_remedy", "c_ranks", "c_precision", "c_limits"),
        named={"c_sharded": "a zero_stage without dp_shard"},
        alone=True,
    ),
    "splits both towers over the node": Wrong(
        answers={
            C: """
            def choose_strategy(model, cluster):
                ways = cluster.devices_per_node
                return Plan(tp=ways, vision_tp=ways, dp_replicate=cluster.num_nodes)
            """
        },
        less=("c_plain", "c_sharded", "c_ranks", "c_remedy"),
        none=("c_precision", "c_limits"),
        named={"c_remedy": "25 heads divide by neither 2 nor 4"},
    ),
    "a rule by world size": Wrong(
        answers={
            C: """
            def choose_strategy(model, cluster):
                n = cluster.num_devices
                if n <= 4:
                    return Plan(dp_replicate=n)
                if n <= 16:
                    return Plan(dp_shard=n // 2, tp=2, zero_stage=3)
                return Plan(pp=4, tp=4, dp_replicate=n // 16)
            """
        },
        less=("c_plain", "c_sharded", "c_ranks"),
        none=("c_remedy", "c_precision", "c_limits"),
    ),
    "stops at ZeRO-2": Wrong(
        answers=changed(C, ("zero_stage=3", "zero_stage=2"), (".ok:", ".ok or choice.get('zero_stage'):")),
        less=("c_sharded", "c_ranks", "c_remedy", "c_precision", "c_limits"),
        named={"c_sharded": ZERO_2_IS_NOT_3},
    ),
    "thinks that ZeRO-2 splits the weights": Wrong(
        answers=changed(C, UP_TO_ZERO_2, ZERO_2_AS_3, IMPORT_REPLACE),
        less=("c_sharded", "c_remedy", "c_ranks", "c_precision"),
        none=("c_limits",),
        named={"c_sharded": ZERO_2_IS_NOT_3, "c_remedy": ZERO_2_IS_NOT_3, "c_ranks": ZERO_2_IS_NOT_3},
        alone=True,
    ),
    "knows no ZeRO-3": Wrong(
        answers=changed(C, UP_TO_ZERO_2),
        less=("c_sharded", "c_remedy", "c_ranks", "c_precision"),
        none=("c_limits",),
        named={"c_sharded": "you never split the weights", "c_limits": "you never split the weights"},
        alone=True,
    ),
    "stops at ZeRO-1": Wrong(
        answers=changed(C, ("zero_stage=3", "zero_stage=1"), (".ok:", ".ok or choice.get('zero_stage'):")),
        less=("c_sharded", "c_ranks", "c_remedy", "c_precision", "c_limits"),
    ),
    "takes the dearest plan first": Wrong(
        answers=changed(C, ("for choice in (", "for choice in reversed(("), ("    ):\n", "    )):\n")),
        less=("c_ranks", "c_precision"),
        none=("c_plain", "c_sharded"),
    ),
    # --- c: no plan at all
    "returns words": Wrong(
        answers={C: plan_always("'FSDP'")}, none=ALL_C, named={"c_plain": "return a Plan or None, not str"}
    ),
    "divides with a slash": Wrong(
        answers={C: plan_always("Plan(dp_shard=n / 1, zero_stage=3)")},
        none=ALL_C,
        named={"c_plain": "must be a whole number (use //"},
    ),
    "fails": Wrong(answers={C: plan_always("1 / 0")}, none=ALL_C, named={"c_plain": "ZeroDivisionError"}),
    "has another name": Wrong(
        answers={C: "choose_strategy = None\ndef choose(model, cluster):\n    return None"},
        none=ALL_C,
        named={"c_plain": "not a function but NoneType"},
    ),
}
