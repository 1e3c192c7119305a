"""Every figure of the course: result objects in, matplotlib figures out, one message each.

A quantity has one colour in the whole course (`COLOURS`). Figures are closed for pyplot, so a notebook shows them once.
By subject: `training` (losses), `accumulation` (batches cut in pieces), `precision` (number formats), `activations`
(what is alive in a step, what recomputation saves), `memory` (bytes of state), `fragmentation` (holes between blocks),
`communication` (what ranks send), `samples` (what the model sees), `holdings` (who holds what), `attention` (context
parallelism), `pipeline` (schedules, and layers that move), `links` (how fast ranks send), `strategies` (side by side),
`offload` (what has to leave the device), `pareto` (what memory buys), `timeline` (what every rank does when, measured
or predicted), `scaling` (speed-ups, and what becomes of the efficiency), `monitoring` (what a run logs about itself),
`steps` (step logs of bad runs, what fixes gain), `symptoms` (GPU use, memory and parts of every step).
`offload` (what has to leave the device), `timeline` (what every rank does when, measured or predicted), `scaling`
(speed-ups, and what becomes of the efficiency), `monitoring` (what a run logs about itself), `steps` (step logs of bad
runs, what fixes gain), `symptoms` (GPU use, memory and parts of every step), `control` (a run that is steered),
`tuning` (a run tuned a change at a time, and a packed weight).
"""

from vlmcourse.plots.accumulation import plot_cuts, plot_drift, plot_norm_errors, plot_sample_weights, plot_sync
from vlmcourse.plots.activations import (
    plot_chain_plans,
    plot_kept_tensors,
    plot_memory_and_time,
    plot_segment_lengths,
    plot_step_ledgers,
    plot_towers,
)
from vlmcourse.plots.attention import plot_causal_work, plot_context_traffic
from vlmcourse.plots.communication import plot_collectives, plot_gathered_weights
from vlmcourse.plots.control import plot_run
from vlmcourse.plots.fragmentation import plot_memory_map, plot_memory_over_time, plot_refusal, plot_remedies
from vlmcourse.plots.holdings import plot_holdings
from vlmcourse.plots.links import plot_links, plot_overlap
from vlmcourse.plots.memory import plot_ledgers, plot_memory_over_ranks, plot_state, plot_states
from vlmcourse.plots.monitoring import plot_phases, plot_token_rates, plot_training_by_tower
from vlmcourse.plots.offload import plot_offload
from vlmcourse.plots.pareto import plot_pareto
from vlmcourse.plots.pipeline import plot_adaptation, plot_schedules
from vlmcourse.plots.precision import (
    plot_exponents,
    plot_formats,
    plot_precision_losses,
    plot_roundings,
    plot_scale,
    plot_step_formats,
)
from vlmcourse.plots.samples import plot_conversations, plot_tokens
from vlmcourse.plots.scaling import plot_losses_of_efficiency, plot_speedups
from vlmcourse.plots.steps import plot_diagnoses, plot_gains, plot_rank_times, plot_steps
from vlmcourse.plots.strategies import plot_strategies
from vlmcourse.plots.style import COLOURS
from vlmcourse.plots.symptoms import plot_trace
from vlmcourse.plots.timeline import plot_timeline
from vlmcourse.plots.training import plot_losses, plot_training
from vlmcourse.plots.tuning import plot_packed_heads, plot_tuning

__all__ = [
    "COLOURS",
    "plot_adaptation",
    "plot_causal_work",
    "plot_chain_plans",
    "plot_collectives",
    "plot_context_traffic",
    "plot_exponents",
    "plot_formats",
    "plot_conversations",
    "plot_cuts",
    "plot_diagnoses",
    "plot_drift",
    "plot_gathered_weights",
    "plot_gains",
    "plot_holdings",
    "plot_kept_tensors",
    "plot_ledgers",
    "plot_links",
    "plot_losses",
    "plot_losses_of_efficiency",
    "plot_memory_and_time",
    "plot_memory_map",
    "plot_memory_over_ranks",
    "plot_memory_over_time",
    "plot_norm_errors",
    "plot_offload",
    "plot_overlap",
    "plot_pareto",
    "plot_packed_heads",
    "plot_phases",
    "plot_precision_losses",
    "plot_refusal",
    "plot_rank_times",
    "plot_remedies",
    "plot_roundings",
    "plot_run",
    "plot_sample_weights",
    "plot_scale",
    "plot_schedules",
    "plot_segment_lengths",
    "plot_speedups",
    "plot_state",
    "plot_states",
    "plot_step_formats",
    "plot_step_ledgers",
    "plot_steps",
    "plot_strategies",
    "plot_sync",
    "plot_timeline",
    "plot_token_rates",
    "plot_tokens",
    "plot_towers",
    "plot_trace",
    "plot_training",
    "plot_training_by_tower",
    "plot_tuning",
]
