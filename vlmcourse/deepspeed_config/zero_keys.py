"""The keys of `zero_optimization`: what ranks split, in pieces of which size, and where it waits.

Enters: nothing. Leaves: a table, dotted name -> `Key`. Sizes are in elements, not in bytes. Chapter 5 goes through it
key by key.

Source: DeepSpeed 0.19.8, `runtime/zero/config.py`, `runtime/zero/offload_config.py`, `runtime/zenflow/`.
"""

from __future__ import annotations

import sys

from vlmcourse.deepspeed_config.key import DETAIL, ENGINE, OFF, RUN, Key, section

STAGE_3_PREFIX = "zero_optimization.stage3_"
"""What the names of those keys begin with that stage 3 alone reads."""

_ZERO = {
    "stage": Key("0|1|2|3", 0, RUN, "what ranks split: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too"),
    "contiguous_gradients": Key("bool", True, ENGINE, "copy gradients into one buffer as they come, against fragments"),
    "reduce_scatter": Key(
        "bool", True, ENGINE, "give each rank its part of the summed gradients only, not all of them"
    ),
    "reduce_bucket_size": Key(
        "count", 500_000_000, ENGINE, "gradients reduced at a time, in elements; less needs less memory and more calls"
    ),
    "use_multi_rank_bucket_allreduce": Key(
        "bool", True, ENGINE, "all-reduce the buckets of several ranks together instead of a reduce for each"
    ),
    "allgather_partitions": Key(
        "bool", True, ENGINE, "collect updated weights by all-gather at the end of a step, not by broadcasts"
    ),
    "allgather_bucket_size": Key(
        "count", 500_000_000, ENGINE, "updated weights gathered at a time, in elements; less needs less memory"
    ),
    "overlap_comm": Key(
        "bool", None, ENGINE, "reduce gradients while backward goes on; null is true for stage 3 and false below it"
    ),
    "compute_grad_norm": Key("bool", True, OFF, "know the norm of the gradient after each step, which a run logs"),
    "load_from_fp32_weights": Key("bool", True, ENGINE, "start from a checkpoint's fp32 master weights at a resume"),
    "elastic_checkpoint": Key("bool", False, OFF, "an old format of checkpoints for another number of ranks"),
    "offload_param": section("where weights wait between uses, stage 3 only"),
    "offload_optimizer": section("where the optimizer's state waits, and with it the update; stages 1 to 3"),
    "zenflow": section("update the most important gradients on the GPU and the others later on the CPU", OFF),
    "sub_group_size": Key(
        "count", 1_000_000_000, ENGINE, "weights updated at a time in stage 3, in elements; less needs less memory"
    ),
    "stage3_prefetch_bucket_size": Key(
        "count", 50_000_000, ENGINE, "weights gathered ahead of the layer that computes, in elements; 0 gathers none"
    ),
    "stage3_param_persistence_threshold": Key(
        "count", 100_000, ENGINE, "parameters up to this many elements stay whole on every rank: not worth a gather"
    ),
    "stage3_model_persistence_threshold": Key(
        "count", sys.maxsize, ENGINE, "elements that may stay whole in all by the threshold for one parameter"
    ),
    "stage3_max_live_parameters": Key(
        "count", 1_000_000_000, ENGINE, "gathered weights that a rank may hold at once, in elements"
    ),
    "stage3_max_reuse_distance": Key(
        "count", 1_000_000_000, ENGINE, "keep gathered weights that are used again within this many elements"
    ),
    "stage3_gather_16bit_weights_on_model_save": Key(
        "bool", False, ENGINE, "let save_16bit_model() gather whole weights; a run here saves by other means"
    ),
    "stage3_module_granularity_threshold": Key(
        "count", 0, ENGINE, "gather modules with fewer weights for each submodule than this as one"
    ),
    "stage3_use_all_reduce_for_fetch_params": Key(
        "bool", False, ENGINE, "gather weights by all-reduce, which saves copies on the host"
    ),
    "stage3_allgather_sequential": Key(
        "bool", False, ENGINE, "gather parameters one by one, without a bucket to copy them into"
    ),
    "ignore_unused_parameters": Key("bool", True, ENGINE, "go on where a parameter took no part in the loss, stage 2"),
    "legacy_stage1": Key("bool", False, OFF, "an old stage 1 that DeepSpeed has taken out"),
    "round_robin_gradients": Key("bool", False, OFF, "spread the copying of gradients to the CPU between the ranks"),
    "parameter_alignment": Key(
        "bool", False, ENGINE, "let each parameter begin at a multiple of 16 bytes, stages 1, 2"
    ),
    "zero_hpz_partition_size": Key("count", 1, OFF, "ranks that hold a second set of shards among themselves (hpZ)"),
    "zero_quantized_weights": Key("bool", False, OFF, "gather weights as 8-bit integers (qwZ)"),
    "zero_quantized_nontrainable_weights": Key("bool", False, OFF, "store frozen weights as 8-bit integers"),
    "zero_quantized_gradients": Key("bool", False, OFF, "reduce gradients as 4-bit integers (qgZ)"),
    "memory_efficient_linear": Key(
        "bool", True, ENGINE, "replace torch's linear layer by one that saves memory, stage 3"
    ),
    "pipeline_loading_checkpoint": Key(
        "bool", False, ENGINE, "read a checkpoint of stage 3 in pieces, one after another"
    ),
    "override_module_apply": Key("bool", True, ENGINE, "gather weights inside nn.Module.apply, stage 3"),
    "log_trace_cache_warnings": Key(
        "bool", False, ENGINE, "say when layers come in another order than before, stage 3"
    ),
    "enable_sanity_checks": Key("bool", False, ENGINE, "check DeepSpeed's own bookkeeping while training"),
    "save_muon_momentum_buffer_in_memory": Key(
        "bool", False, OFF, "keep Muon's momentum off the disk; a run uses AdamW"
    ),
    "leaf_module": section("modules of which stage 3 gathers all weights at once"),
}

_OFFLOAD_PARAM = {
    "device": Key("none|cpu|nvme", "none", RUN, "where weights wait: none (with the GPU), cpu, nvme"),
    "nvme_path": Key("text", None, ENGINE, "folder on a fast disk for device = nvme"),
    "buffer_count": Key("count", 5, ENGINE, "buffers in the host's memory between disk and GPU, for nvme"),
    "buffer_size": Key(
        "count", 100_000_000, ENGINE, "size of one such buffer, in elements; the largest parameter fits"
    ),
    "max_in_cpu": Key("count", 1_000_000_000, ENGINE, "weights kept in the host's memory before the disk, in elements"),
    "pin_memory": Key(
        "bool", True, ENGINE, "page-lock the host's memory: faster copies beside computing, and never paged out"
    ),
}

_OFFLOAD_OPTIMIZER = {
    "device": Key("none|cpu|nvme", "none", RUN, "where the optimizer's state waits: none, cpu, nvme (stage 3)"),
    "nvme_path": Key("text", None, ENGINE, "folder on a fast disk for device = nvme"),
    "buffer_count": Key("count", 4, ENGINE, "buffers for nvme: at least the states of a parameter, 4 of Adam's"),
    "pin_memory": Key(
        "bool", True, ENGINE, "page-lock the host's memory: faster copies beside computing, and never paged out"
    ),
    "pipeline_read": Key("bool", False, ENGINE, "read the next piece from the disk while this one is updated"),
    "pipeline_write": Key("bool", False, ENGINE, "write the last piece to the disk while this one is updated"),
    "fast_init": Key("bool", False, ENGINE, "set up the state on the disk faster"),
    "ratio": Key("number", 1.0, ENGINE, "part of the parameters whose state is offloaded, 0 to 1, stage 3"),
    "super_offload": Key("bool", False, OFF, "a faster offload for chips with CPU and GPU in one (Grace Hopper)"),
    "cpuadam_cores_perc": Key("number", 0.8, DETAIL, "part of the CPU's cores for the update under super_offload"),
}

_ZENFLOW = {
    "topk_ratio": Key("number", 0.1, DETAIL, "part of the gradient's columns that count as important"),
    "select_strategy": Key("auto|step|epoch", "auto", DETAIL, "when the important columns are chosen anew"),
    "select_interval": Key("any", "auto", DETAIL, "how often they are chosen anew"),
    "update_interval": Key("any", "auto", DETAIL, "steps between updates of the others"),
    "overlap_step": Key("bool", False, DETAIL, "update on the CPU while the GPU computes"),
    "offload": Key("bool", False, DETAIL, "keep the state of the important columns on the CPU"),
    "auto_ratio": Key("number", 0.99, DETAIL, "threshold by which update_interval = auto decides"),
    "full_warm_up_rounds": Key("count", 0, DETAIL, "first rounds that update everything"),
    "pt_reserved_cores_perc": Key("number", 0.5, DETAIL, "part of the CPU's cores that is left to PyTorch"),
    "steps_per_epoch": Key("count", None, DETAIL, "set by DeepSpeed itself"),
}

_LEAF_MODULE = {
    "classes": Key("list", None, ENGINE, "classes of such modules; by default the expert layers of three MoE models"),
    "names": Key("list", [], ENGINE, "names of such modules in the model"),
    "name_suffixes": Key("list", [], ENGINE, "ends of names of such modules"),
}

ZERO_KEYS = {
    "zero_optimization": section("ZeRO: what the ranks split between them"),
    **{f"zero_optimization.{name}": key for name, key in _ZERO.items()},
    **{f"zero_optimization.offload_param.{name}": key for name, key in _OFFLOAD_PARAM.items()},
    **{f"zero_optimization.offload_optimizer.{name}": key for name, key in _OFFLOAD_OPTIMIZER.items()},
    **{f"zero_optimization.zenflow.{name}": key for name, key in _ZENFLOW.items()},
    **{f"zero_optimization.leaf_module.{name}": key for name, key in _LEAF_MODULE.items()},
}
"""Dotted name -> what is known of it."""

ZERO_SHORT_NAMES = {
    f"zero_optimization.{name.removeprefix('stage3_')}": f"zero_optimization.{name}"
    for name in _ZERO
    if name.startswith("stage3_")
}
"""Names that DeepSpeed takes for others without a word: those of stage 3 without its prefix."""

ZERO_OLD_NAMES = {
    "zero_optimization.cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'write "offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": 'write "pin_memory" in offload_optimizer or offload_param',
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "its name is stage3_gather_16bit_weights_on_model_save now"
    ),
}
"""Names of before that DeepSpeed still reads -> what to write instead."""

ZERO_REMOVED = {
    "zero_optimization.mics_shard_size": "MiCS is gone",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS is gone",
    "zero_optimization.zeropp_loco_param": "LoCo is gone",
}
"""Names of before that DeepSpeed refuses -> why."""
