"""What a diagnosis advises, done to a faulty run: the same run with one fix applied, so that its gain can be measured.

Enters: the name of a fault of `catalog.py` or `lookalikes.py`, and the fixes that `monitor.diagnosis` names for it.
Leaves: a `Fault` that is the faulty run with that fix. Where a fix is a setting (`train.checkpoint_every = 40`), the
setting is read out of the fix's own sentence, so that what is measured is what was advised. Chapter 6.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from vlmcourse.faults.catalog import FAULTS, Fault, plant_large_images, plant_samples
from vlmcourse.faults.lookalikes import LOOKALIKES
from vlmcourse.faults.slow_callbacks import slow_callback
from vlmcourse.faults.slow_links import slow_links
from vlmcourse.faults.slow_samples import decode_for
from vlmcourse.monitor.diagnosis import Finding, Fix
from vlmcourse.train.trainer import Trainer
from vlmcourse.values import suggest_choice

SETTING = re.compile(r"\b([a-z]+\.[a-z_]+) = (\d+)\b")
"""A setting with a whole number, as a fix names it."""


@dataclass(frozen=True)
class Cure:
    """How one of a fault's fixes is applied."""

    fix: str
    """A pattern that the fix's sentence holds; of those that do, the first."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the sentence asks for without naming a number."""
    plant: Callable[[Trainer], AbstractContextManager[Any]] = lambda _: nullcontext()
    """What is left of the fault."""


CURES: Mapping[str, tuple[Cure, ...]] = MappingProxyType(
    {
        "slow decoder": (
            Cure("decode once"),
            Cure("halve what a sample costs", plant=plant_samples(lambda: decode_for(0.003))),
        ),
        "slow storage": (Cure("keep the data on a local disk"),),
        "queue that runs empty": (Cure("more workers"),),
        "sleeping rank": (Cure("take the machine of rank 1 out"),),
        "large images": (Cure("deal samples out by tiles", plant=plant_large_images({0: 6, 1: 7})),),
        "slow links": (
            Cure("a faster link", plant=lambda trainer: slow_links(trainer.model, 0.03)),
            Cure("as many exchanges for twice the samples", plant=lambda trainer: slow_links(trainer.model, 0.06)),
        ),
        "logging every step": (Cure("train.log_every", plant=FAULTS["logging every step"].plant),),
        "slow callback": (
            Cure("call it every tenth step", plant=lambda trainer: slow_callback(trainer, 0.18, every=10)),
        ),
        "frequent saves": (Cure("train.checkpoint_every"),),
        "frequent evaluation": (
            Cure("train.eval_every"),
            Cure("halve data.num_eval_samples", {"data.num_eval_samples": 96}),
        ),
        "tiny micro-batches": (Cure("train.micro_batch_size = 16"), Cure("train.accumulation_steps = 2")),
        "few micro-batches": (
            Cure(r"as many samples a step\)$"),
            Cure(
                "parallel.pp = 1 with these ranks data-parallel",
                {"parallel.strategy": "ddp", "parallel.pp_schedule": "1f1b"},
            ),
        ),
        "needless recomputation": (
            Cure("= 'none'", {"activations.vision": "none", "activations.language": "none"}),
            Cure("'every:2'", {"activations.vision": "every:2", "activations.language": "every:2"}),
        ),
    }
)
"""Name of a fault of the catalogue -> fixes of its diagnosis that can be applied to a short run on CPU ranks."""
LOOKALIKE_CURES: Mapping[str, tuple[Cure, ...]] = MappingProxyType(
    {
        "slow messages": (Cure("fewer messages", plant=LOOKALIKES["slow messages"].plant),),
        "slow links under tp": (
            Cure("as many exchanges in the layers", plant=LOOKALIKES["slow links under tp"].plant),
        ),
    }
)
"""The same for faults of `lookalikes.py`: what links need where not gradients travel but activations."""
ALL_CURES = MappingProxyType({**CURES, **LOOKALIKE_CURES})


def find_fix(cure: Cure, findings: Iterable[Finding], cause: str) -> Fix:
    """Return the fix that a cure applies.

    Args:
        cure: of `CURES`.
        findings: of a diagnosis, those below their thresholds too.
        cause: the fault's.

    Raises:
        ValueError: if no finding of that cause names such a fix.
    """
    fixes = [fix for finding in findings if finding.cause == cause for fix in finding.fixes]
    for fix in fixes:
        if re.search(cure.fix, fix.what):
            return fix
    raise ValueError(
        f"no fix of {cause!r} says {cure.fix!r}, but {[fix.what for fix in fixes]}: the diagnosis found something "
        "else in this run, or words its fixes in another way than CURES"
    )


def apply_cure(name: str, cure: Cure, fix: Fix) -> Fault:
    """Return a faulty run with a fix applied.

    Args:
        name: of the fault.
        cure: one of its cures.
        fix: what `find_fix` returned; the settings in its sentence are set.

    Raises:
        ValueError: if no fault of that name has cures.
    """
    if name not in ALL_CURES:
        raise ValueError(f"fault {name!r}: {suggest_choice(name, tuple(ALL_CURES))}")
    fault = FAULTS.get(name) or LOOKALIKES[name]
    settings = {key: int(number) for key, number in SETTING.findall(fix.what)}
    what = f"{fault.what}; applied: {fix.what}"
    return replace(fault, what=what, overrides={**fault.overrides, **settings, **cure.overrides}, plant=cure.plant)
