"""What two ranks do for `test_parallel_apply.py`: models that are not what is asked, and ranks that do not agree.

Usage: strategy_worker.py FOLDER. Each rank writes what was said to FOLDER/found<rank>.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from combinations import divisible_shape
from torch import nn

from vlmcourse.config import ParallelConfig
from vlmcourse.models.vlm import VLM, build_model
from vlmcourse.notebook.process_group import limit_collectives
from vlmcourse.parallel.apply import apply_strategy, check_strategy, unwrap
from vlmcourse.parallel.fsdp import apply_fsdp
from vlmcourse.parallel.mesh import find_place
from vlmcourse.parallel.ranks import Ranks, group_timeout_s, init_ranks, shutdown_ranks
from vlmcourse.state_offload import OffloadConfig
from vlmcourse.train.loss import token_loss_sum

CP = {"strategy": "ddp", "cp": 2}
CHECKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no cp, ddp": ({"strategy": "ddp"}, CP),
    "no cp, fsdp": ({"strategy": "fsdp"}, {"strategy": "fsdp", "cp": 2}),
    "cp": (CP, {"strategy": "ddp"}),
    "cp method": (CP, CP | {"cp_method": "ulysses"}),
    "cp order": (CP, CP | {"cp_order": "contiguous"}),
    "no compression": ({"strategy": "ddp"}, {"strategy": "ddp", "compression": "fp16"}),
    "compression": ({"strategy": "ddp", "compression": "fp16"}, {"strategy": "ddp"}),
    "kind of compression": (
        {"strategy": "ddp", "compression": "bf16"},
        {"strategy": "ddp", "compression": "powersgd"},
    ),
    "schedule": ({"pp": 2}, {"pp": 2, "pp_schedule": "gpipe"}),
    "sequence_parallel": ({"tp": 2}, {"tp": 2, "sequence_parallel": False}),
    "no sequence_parallel": ({"tp": 2, "sequence_parallel": False}, {"tp": 2}),
}
"""Name -> how a model is distributed, and how it is asked whether it is."""


def build(num_blocks: int = 0) -> VLM:
    """Return the small model, with some blocks more."""
    shape = divisible_shape()
    language = dataclasses.replace(shape.language, num_layers=shape.language.num_layers + num_blocks)
    return build_model(dataclasses.replace(shape, language=language), seed=1)


def say(action: Callable[[], object]) -> str:
    """Return with what an action is refused."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def check_models(ranks: Ranks) -> dict[str, list[str]]:
    """Ask of each model whether it is what it is, and whether it is something else."""
    found = {}
    for name, (applied, asked) in CHECKED.items():
        model = apply_strategy(build(), ParallelConfig(**applied), ranks, None, token_loss_sum)
        found[name] = [
            say(lambda model=model, how=how: check_strategy(model, ParallelConfig(**how), ranks))
            for how in (applied, asked)
        ]
    return found


def apply_twice(ranks: Ranks) -> dict[str, str]:
    """Distribute models that are distributed already."""
    found = {}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("ddp", {"strategy": "ddp"}, {"strategy": "ddp"}),
        ("fsdp", {"strategy": "fsdp"}, {"strategy": "fsdp"}),
        ("fsdp, then ddp", {"strategy": "fsdp"}, {"strategy": "ddp"}),
        ("tp", {"tp": 2}, {"tp": 2}),
        ("pp", {"pp": 2}, {"pp": 2}),
    ]
    for name, first, second in cases:
        model = apply_strategy(build(), ParallelConfig(**first), ranks, None, token_loss_sum)
        found[name] = say(lambda model=model, how=second: apply_strategy(model, ParallelConfig(**how), ranks))
    inside: Any = unwrap(apply_strategy(build(), ParallelConfig(**CP), ranks))
    found["cp"] = say(lambda: apply_strategy(inside, ParallelConfig(**CP), ranks))
    return found


def disagree(ranks: Ranks) -> dict[str, str]:
    """Let the ranks ask for different things; each must be told at once."""
    ddp, fsdp = ParallelConfig(strategy="ddp"), ParallelConfig(strategy="fsdp")
    frozen = build()
    frozen.vision.requires_grad_(ranks.rank == 0)
    mine, cpu = find_place(ParallelConfig(tp=2), ranks), OffloadConfig(optimizer="cpu", parameters="cpu")
    other = dataclasses.replace(mine, rank=1 - ranks.rank)
    return {
        "strategy": say(lambda: apply_strategy(build(), (ddp, fsdp)[ranks.rank], ranks)),
        "strategies of places": say(lambda: find_place((ddp, fsdp)[ranks.rank], ranks)),
        "one wrong": say(lambda: apply_strategy(build(), (ddp, ParallelConfig(tp=3))[ranks.rank], ranks)),
        "blocks": say(lambda: apply_strategy(build(ranks.rank), fsdp, ranks)),
        "frozen": say(lambda: apply_strategy(frozen, ddp, ranks)),
        "class": say(lambda: apply_strategy((build(), nn.Linear(2, 2))[ranks.rank], ddp, ranks)),
        "place of one": say(lambda: apply_strategy(build(), ParallelConfig(tp=2), ranks, (mine, other)[ranks.rank])),
        "offload of one": say(lambda: apply_strategy(build(), fsdp, ranks, offload=(None, cpu)[ranks.rank])),
        "shapes of places": say(lambda: find_place(fsdp, ranks, build(ranks.rank).shape)),
        "place": say(lambda: apply_strategy(build(), ParallelConfig(tp=2), ranks, other)),
    }


def count_groups(ranks: Ranks) -> list[int]:
    """Return how many process groups there are after each of some models with the layouts of those before."""
    found = []
    for _ in range(3):
        for how in (ParallelConfig(tp=2), ParallelConfig(strategy="fsdp", cp=2)):
            apply_strategy(build(), how, ranks)
        apply_fsdp(build(), ranks)
        found.append(len(dist.distributed_c10d._world.pg_map))
    return found


def limits_of_groups() -> list[list[float]]:
    """Return the limits of all groups, those of axes and of axes in one among them, as made and as changed later."""
    own: Any = dist.new_group(timeout=timedelta(seconds=5))
    found = [[group_timeout_s(own), group_timeout_s()]]
    dist.destroy_process_group(own)
    for limit_s in (0, 7, 20):
        if limit_s:
            limit_collectives(limit_s)
        found.append([group_timeout_s(group) for group in dist.distributed_c10d._world.pg_map])
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main(folder: Path) -> None:
    ranks = init_ranks(timeout_s=20)
    found: dict[str, Any] = {
        "checked": check_models(ranks),
        "twice": apply_twice(ranks),
        "disagree": disagree(ranks),
        "groups": count_groups(ranks),
        "limits": limits_of_groups(),
    }
    port: list[Any] = [free_port()]
    dist.broadcast_object_list(port)
    shutdown_ranks()
    os.environ["MASTER_PORT"] = str(port[0])
    init_ranks(timeout_s=20)  # meshes of groups that are gone must not be found again
    found["again"] = say(lambda: apply_strategy(build(), ParallelConfig(tp=2), ranks))
    (folder / f"found{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    shutdown_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
