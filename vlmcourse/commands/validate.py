"""`vlmcourse validate FILE.csv`: the planner's predictions beside published figures, with the errors that it made.

The file has the columns of one of the tables that `planner/figure_rows.py` reads. What cannot be described is skipped,
and said.
"""

from __future__ import annotations

import argparse
import json

from vlmcourse.planner.figure_check import KEYS, count_within, group_rows, summarise_group
from vlmcourse.planner.figure_rows import read_figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("file", help="figures as CSV: the playbook's table, llm-foundry's, or a list of published ones")
    parser.add_argument("--json", action="store_true", help='print one JSON object: {"groups": [...]}')


def run(args: argparse.Namespace) -> int:
    """Compare and print; return the exit code, 0 also where errors are large.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if its columns are those of no known table, or it has no rows.
    """
    groups = group_rows(read_figures(args.file))
    if not groups:
        raise ValueError(f"{args.file}: has no rows under its columns; give a table with figures")
    summaries = [summarise_group(group) for group in groups]
    if args.json:
        print(json.dumps({"groups": summaries}))
        return 0
    print(INTRODUCTION)
    for group, summary in zip(groups, summaries, strict=True):
        print(f"{group.name}: {summary['used']} of {summary['rows']} rows used")
        for label, names in LABELS.items():
            print(f"  {label:<34}" + ", ".join(_show(summary[name], name) for name in names))
        inside, measured, wide = count_within(group.rows)
        if wide:
            print(f"  {'peaks inside the interval':<34}{inside} of {measured}")
        for reason, count in group.reasons().items():
            print(f"  {count} not used: {reason}")
    return 0


INTRODUCTION = """\
Errors are |predicted / measured - 1|; n/a: no such figures. Tokens/s is a roofline's (planner/roofline.py).
Some constants were fitted to the playbook's and llm-foundry's tables, so errors on those flatter the planner;
bench/validate_planner.md has the errors on rows that were held back. The interval goes from a peak in which no gathered
input of a tensor-parallel product is kept, less 5 %, to one in which all are, plus 5 %: tables mix such runs.
"""
LABELS = {
    "peak memory, median and p90": ("memory_median_pct", "memory_p90_pct"),
    "tokens/s, median and p90": ("tokens_median_pct", "tokens_p90_pct"),
    "rank correlation of plans": ("spearman",),
    "regret of the plan predicted best": ("regret_pct",),
}
"""What is printed of a group, by its label; all of `KEYS` but the name and the counts."""
assert {name for names in LABELS.values() for name in names} == set(KEYS) - {"name", "rows", "used"}


def _show(value: object, name: str) -> str:
    """Return a number with its unit, or n/a."""
    if not isinstance(value, float):
        return "n/a"
    return f"{value:.1f} %" if name.endswith("_pct") else f"{value:.2f}"
