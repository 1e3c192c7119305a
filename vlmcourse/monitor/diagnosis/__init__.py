"""Say why a run is slow: causes with evidence, the part of the time that each explains, and fixes with their gain.

Enters: the folder of a finished or live run: `steps/` (by `step_log.py`), `config.json`, `run.json`, `log.jsonl`.
Leaves: a `Diagnosis`. See `order.py` for the order of reasoning, `thresholds.py` for every number that it decides by.
It reads files only and touches no rank. Chapter 6.
"""

from __future__ import annotations

from vlmcourse.monitor.diagnosis.facts import RunFacts, read_run
from vlmcourse.monitor.diagnosis.findings import CAUSES, HEALTHY, Diagnosis, Finding, Fix
from vlmcourse.monitor.diagnosis.order import diagnose, diagnose_facts

__all__ = ["CAUSES", "HEALTHY", "Diagnosis", "Finding", "Fix", "RunFacts", "diagnose", "diagnose_facts", "read_run"]
