"""Arithmetic before anything runs: how many bytes a plan needs on each rank, and what is wrong with it.

Enters: shapes of a model and of a cluster (`presets.py`) and a `Plan`. Leaves: counts of parameters, bytes by owner,
traffic, a verdict, how much of the state has to leave the device, and what a step takes. Imports no torch, so it
answers in a blink on any machine. Chapters 1, 5 and 7.
"""

from vlmcourse.planner.activations import Workload
from vlmcourse.planner.hardware import DEVICES, DeviceSpec, get_device
from vlmcourse.planner.memory import (
    ALLOWANCE_BYTES,
    RankMemory,
    StateBytes,
    estimate_rank_memory,
    estimate_state_bytes,
)
from vlmcourse.planner.network import Link, Traffic, estimate_step_traffic
from vlmcourse.planner.offload import Decision, decide_offload
from vlmcourse.planner.offload_cost import Machine, machine_of
from vlmcourse.planner.plan import Plan
from vlmcourse.planner.recipes import (
    OPTIMIZERS,
    PRECISIONS,
    TRAINED,
    Precision,
    choose_precision,
    precision_problem,
)
from vlmcourse.planner.shapes import TowerParams, count_params
from vlmcourse.planner.step_result import StepTime
from vlmcourse.planner.step_settings import StepSettings
from vlmcourse.planner.step_time import estimate_step_time
from vlmcourse.planner.validate import Problem, Verdict, check_plan

__all__ = [
    "ALLOWANCE_BYTES",
    "DEVICES",
    "Decision",
    "OPTIMIZERS",
    "PRECISIONS",
    "TRAINED",
    "DeviceSpec",
    "Link",
    "Machine",
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
    "check_plan",
    "count_params",
    "decide_offload",
    "estimate_rank_memory",
    "estimate_state_bytes",
    "estimate_step_time",
    "estimate_step_traffic",
    "choose_precision",
    "get_device",
    "machine_of",
    "precision_problem",
]
