"""DeepSpeed's JSON configuration: every key of it known, read from a user's file, compared with a run, and explained.

Enters: a `ds_config.json` and a `TrainConfig`. Leaves: what DeepSpeed is given, or one error that lists everything that
is unknown, misplaced or contradictory; and a table, key by key. Imports no torch and no DeepSpeed. Chapter 5.

The other way, from a run to DeepSpeed's settings, is `parallel.engines.build_deepspeed_settings`.
"""

from vlmcourse.deepspeed_config.auto import AUTO, Run
from vlmcourse.deepspeed_config.explain import Explained, explain_deepspeed, explanation_table
from vlmcourse.deepspeed_config.keys import KEYS, VERSION
from vlmcourse.deepspeed_config.offload import read_offload
from vlmcourse.deepspeed_config.resolve import (
    check_deepspeed_file,
    find_deepspeed_problems,
    load_deepspeed_json,
    resolve_deepspeed,
)

__all__ = [
    "AUTO",
    "KEYS",
    "VERSION",
    "Explained",
    "Run",
    "check_deepspeed_file",
    "explain_deepspeed",
    "explanation_table",
    "find_deepspeed_problems",
    "load_deepspeed_json",
    "read_offload",
    "resolve_deepspeed",
]
