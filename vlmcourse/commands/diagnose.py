"""`vlmcourse diagnose RUN`: what a finished or live run spends its time on, why it is slow, and what to change."""

from __future__ import annotations

import argparse
import json
import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vlmcourse.monitor.diagnosis import CAUSES, Diagnosis, Fix, diagnose
from vlmcourse.spans import PHASE_LABELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("run_folder", metavar="RUN", help="the run's folder, output_dir/name, such as runs/tiny")
    parser.add_argument("--last", type=int, metavar="N", help="look at the last N steps only, 5 or more")
    parser.add_argument("--json", action="store_true", help="print one JSON object: cause, findings, shares, notes")


def run(args: argparse.Namespace) -> int:
    """Diagnose a run; return the exit code: 0 whatever was found.

    Raises:
        FileNotFoundError: if it is no run's folder.
        ValueError: if there or in --last are too few steps, or a file holds something else than it should.
    """
    found = diagnose(args.run_folder, last_steps=args.last)
    if args.json:
        print(json.dumps(found.as_json()))
    else:
        print_diagnosis(found, Console(soft_wrap=False))
    return 0


def print_diagnosis(found: Diagnosis, console: Console) -> None:
    """Print the verdict, where the time went, and a table of findings with evidence and fixes."""
    head = (
        f"{found.run}: steps {found.first_step} to {found.last_step} on {found.world_size} rank(s), "
        f"{1e3 * found.step_s:.1f} ms from step to step, {found.tokens_per_s:,.0f} tokens/s"
    )
    console.print(Text(head))
    shares = [f"{PHASE_LABELS.get(name, name)} {share:.0%}" for name, share in found.shares.items() if share >= 0.005]
    console.print(Text(f"Time: {', '.join(shares)}"))
    for line in found.profile:
        console.print(Text(line))
    if found.is_healthy:
        console.print(Text("Healthy: nothing found explains more than its threshold."))
    else:
        console.print(build_table(found))
    if found.below:
        seen = ", ".join(f"{finding.cause} {finding.share:.0%}" for finding in found.below)
        console.print(Text(f"Below the threshold: {seen}"))
    for note in found.notes:
        console.print(Text(f"Note: {note}"))


def build_table(found: Diagnosis) -> Table:
    """Return a table with a row a finding, the one that explains most first."""
    table = Table(show_lines=True)
    table.add_column("cause")
    table.add_column("of the time", justify="right")
    table.add_column("evidence", ratio=3)
    table.add_column("fix: expected tokens/s (an estimate)", ratio=2)
    for finding in found.findings:
        detail = f"\n{finding.detail}" if finding.detail else ""
        fixes = [f"{fix.what}: {fix.tokens_per_s:,.0f} ({describe_gain(fix)})" for fix in finding.fixes]
        table.add_row(
            Text(f"{finding.cause}{detail}"),
            f"{finding.share:.0%}",
            Text("\n".join([f"{CAUSES[finding.cause].capitalize()}.", *finding.evidence])),
            Text("\n".join(f"{place}. {fix}" for place, fix in enumerate(fixes, start=1))),
        )
    return table


def describe_gain(fix: Fix) -> str:
    """Return what a fix gains, with the range that its uncertainty leaves; without an upper end that says nothing."""
    low, high = fix.gain_range
    between = f"{low:+.0%} to {high:+.0%}" if math.isfinite(high) else f"at least {low:+.0%}"
    return f"{fix.gain_fraction:+.0%}, {between}"
