"""Arithmetic before anything runs: how many bytes a plan needs on each rank, and what is wrong with it.

Enters: shapes of a model and of a cluster (`presets.py`), a `Plan` or a configuration. Leaves: counts of parameters,
bytes by owner and moment, traffic, a verdict, how much of the state has to leave the device, and what a step takes.
Imports no torch, so it answers in a blink on any machine. Chapters 1, 5 and 7.
"""

from vlmcourse.planner.hardware import DEVICES, DeviceSpec, get_device
from vlmcourse.planner.job import Job, describe_config
from vlmcourse.planner.memory import ALLOWANCE_BYTES, RankMemory, estimate_rank_memory
from vlmcourse.planner.network import Link, Traffic, estimate_step_traffic
from vlmcourse.planner.offload import Decision, decide_offload
from vlmcourse.planner.offload_cost import Machine, machine_of
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.rank_peak import Peak, list_moments
from vlmcourse.planner.recipes import (
    OPTIMIZERS,
    PRECISIONS,
    TRAINED,
    Precision,
    choose_precision,
    precision_problem,
)
from vlmcourse.planner.run_peak import build_run_load, estimate_run_peak
from vlmcourse.planner.shapes import TowerParams, count_params
from vlmcourse.planner.state_bytes import StateBytes, estimate_state_bytes
from vlmcourse.planner.step_result import StepTime
from vlmcourse.planner.step_settings import StepSettings
from vlmcourse.planner.step_time import estimate_step_time
from vlmcourse.planner.validate import Problem, Verdict, check_plan
from vlmcourse.planner.workload import Workload

__all__ = [
    "ALLOWANCE_BYTES",
    "DEVICES",
    "Decision",
    "OPTIMIZERS",
    "PRECISIONS",
    "TRAINED",
    "DeviceSpec",
    "Job",
    "Link",
    "Machine",
    "Peak",
    "Plan",
    "Precision",
    "Problem",
    "RankMemory",
    "StateBytes",
    "StepSettings",
    "StepTime",
    "TowerParams",
    "Traffic",
    "Verdict",
    "Workload",
    "build_run_load",
    "check_plan",
    "count_params",
    "decide_offload",
    "describe_config",
    "estimate_rank_memory",
    "estimate_run_peak",
    "estimate_state_bytes",
    "estimate_step_time",
    "estimate_step_traffic",
    "choose_precision",
    "get_device",
    "list_moments",
    "machine_of",
    "precision_problem",
]
