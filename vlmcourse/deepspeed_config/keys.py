"""All keys that DeepSpeed's JSON configuration may have, what each does, and what becomes of it in a run here.

Enters: nothing. Leaves: `KEYS`, dotted name -> `Key`, and names of before. A test takes the names and defaults from
DeepSpeed's own classes and compares. Inside the sections of `OPEN` anything may stand: a run has them switched off.

Source: DeepSpeed 0.19.8, `runtime/config.py`, `runtime/constants.py` and the classes that these call.
"""

from __future__ import annotations

from vlmcourse.deepspeed_config.key import DETAIL, ENGINE, OFF, RUN, Key, section
from vlmcourse.deepspeed_config.zero_keys import ZERO_KEYS, ZERO_OLD_NAMES, ZERO_REMOVED, ZERO_SHORT_NAMES

VERSION = "0.19.8"
"""Of DeepSpeed, whose keys these are."""

_TOP = {
    "train_batch_size": Key("count", None, RUN, "samples of one optimizer step, of all ranks together"),
    "train_micro_batch_size_per_gpu": Key("count", None, RUN, "samples in one forward pass of one rank"),
    "gradient_accumulation_steps": Key("count", None, RUN, "micro-batches that a rank adds up before one update"),
    "gradient_clipping": Key("number", 1.0, RUN, "the gradient is scaled down to this global norm; 0 turns it off"),
    "optimizer": section("the optimizer that DeepSpeed would make; a run brings its own", RUN),
    "scheduler": section("how DeepSpeed would change the learning rate; a run does that itself", OFF),
    "fp16": section("train in 16-bit floating point with a loss scale"),
    "bf16": section("train in bfloat16 with fp32 master weights"),
    "torch_autocast": section("let PyTorch choose a format for each operation"),
    "data_types": section("formats of gradients and weights apart from fp16 and bf16"),
    "communication_data_type": Key("fp16|bf16|fp32", None, OFF, "format in which gradients travel; null is their own"),
    "seq_parallel_communication_data_type": Key(
        "fp16|bf16|fp32", "fp32", OFF, "format in which gradients travel between ranks that share a sequence"
    ),
    "managed_gradient_accumulation": Key("bool", True, OFF, "let the engine count micro-batches"),
    "prescale_gradients": Key("bool", False, ENGINE, "divide gradients before they are summed, against overflow"),
    "gradient_predivide_factor": Key("number", 1.0, ENGINE, "by how much of it they are divided before the sum"),
    "gradient_allreduce_op": Key("mean|sum", "mean", OFF, "whether gradients of ranks are averaged or added up"),
    "disable_allgather": Key("bool", False, OFF, "an old switch for the all-gather of ZeRO-1"),
    "zero_allow_untested_optimizer": Key(
        "bool", False, ENGINE, "let ZeRO take an optimizer that it was not tested with"
    ),
    "zero_force_ds_cpu_optimizer": Key("bool", True, ENGINE, "take only DeepSpeed's own optimizer under CPU offload"),
    "steps_per_print": Key("count", None, ENGINE, "steps between lines of progress; null prints none"),
    "wall_clock_breakdown": Key("bool", False, ENGINE, "print how long forward, backward and step took"),
    "memory_breakdown": Key("bool", False, ENGINE, "print memory at several places"),
    "dump_state": Key("bool", False, ENGINE, "print the engine's settings at the start"),
    "log_level": Key("any", None, ENGINE, "how much DeepSpeed says"),
    "disable_python_gc": Key("bool", False, OFF, "stop Python's collection of cycles"),
    "vocabulary_size": Key("count", None, ENGINE, "warns where it is no multiple of 8"),
    "dataloader_drop_last": Key(
        "bool", False, OFF, "of DeepSpeed's data loader; a run has its own, see train.last_group"
    ),
    "use_data_before_expert_parallelism": Key("bool", False, OFF, "order of ranks with experts"),
    "sequence_parallel_size": Key("count", None, OFF, "ranks that share a sequence (Ulysses)"),
    "data_parallel_size": Key("count", None, OFF, "ranks with samples of their own beside sequence_parallel_size"),
    "aio": section("reading and writing of NVMe offload"),
    "comms_logger": section("count collectives and their bytes"),
    "timers": section("DeepSpeed's clocks"),
    "checkpoint": section("how DeepSpeed writes checkpoints"),
    "tensorboard": section("log to TensorBoard"),
    "wandb": section("log to Weights and Biases"),
    "comet": section("log to Comet"),
    "csv_monitor": section("log to CSV files"),
    "flops_profiler": section("count operations of the model"),
    "activation_checkpointing": section("options of deepspeed.checkpointing, which the model would have to call"),
    "compile": section("DeepSpeed's passes over a compiled model"),
    "autotuning": section("search for a configuration by running many"),
    "data_efficiency": section("curriculum and random dropping of tokens"),
    "hybrid_engine": section("one engine for training and generation"),
    "tensor_parallel": section("split matrices between ranks (AutoTP)"),
    "expert_parallel": section("split experts between ranks (AutoEP)"),
    "pipeline": section("options of PipelineModule", OFF),
    "weight_quantization": section("quantized weights for inference", OFF),
    "datastates_ckpt": section("checkpoints by DataStates", OFF),
}

_OPTIMIZER = {
    "optimizer.type": Key("text", None, RUN, "which one; a run trains with AdamW"),
    "optimizer.params": section("its options", RUN),
    "optimizer.params.lr": Key("number", 0.001, RUN, "learning rate"),
    "optimizer.params.betas": Key("list", [0.9, 0.999], RUN, "decay of Adam's two moments"),
    "optimizer.params.eps": Key("number", 1e-8, RUN, "added to the denominator of Adam's update"),
    "optimizer.params.weight_decay": Key("number", 0.0, RUN, "decay of weights in each step"),
    "optimizer.params.bias_correction": Key("bool", True, OFF, "correct the moments of the first steps"),
    "optimizer.params.amsgrad": Key("bool", False, OFF, "a variant of Adam"),
    "optimizer.params.adam_w_mode": Key("bool", True, OFF, "decay weights apart from the gradient, which makes AdamW"),
    "optimizer.params.adamw_mode": Key("bool", True, OFF, "the same under CPU offload"),
    "optimizer.params.fp32_optimizer_states": Key("bool", True, OFF, "keep moments in fp32 under CPU offload"),
    "optimizer.params.set_grad_none": Key("bool", True, ENGINE, "forget gradients instead of setting them to 0"),
    "optimizer.params.torch_adam": Key("bool", False, ENGINE, "PyTorch's Adam instead of a compiled one"),
    "optimizer.legacy_fusion": Key("bool", False, OFF, "an old way of fusing"),
    "scheduler.type": Key("text", None, OFF, "which one; a run has its own and drops the section"),
    "scheduler.params": section("its options", OFF),
}

_SCHEDULER = (
    *("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase"),
    *("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size"),
    *("cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom"),
    *("cycle_max_mom", "decay_mom_rate", "last_batch_iteration", "warmup_min_lr", "warmup_max_lr"),
    *("warmup_num_steps", "warmup_type", "total_num_steps", "warmup_min_ratio", "cos_min_ratio"),
)

_FP16 = {
    "auto_cast": Key("bool", False, DETAIL, "cast what goes into the model to fp16"),
    "loss_scale": Key("number", 0, DETAIL, "what the loss is multiplied by; 0 lets it change by itself"),
    "initial_scale_power": Key("count", 16, DETAIL, "it begins at 2 to this power"),
    "loss_scale_window": Key("count", 1000, DETAIL, "steps without overflow before it doubles"),
    "hysteresis": Key("count", 2, DETAIL, "overflows before it is halved"),
    "consecutive_hysteresis": Key("bool", False, DETAIL, "let a step without overflow forget those before it"),
    "min_loss_scale": Key("number", 1, DETAIL, "it is never smaller"),
    "fp16_master_weights_and_grads": Key("bool", False, DETAIL, "keep master weights and gradients in fp16 too"),
}

_BF16 = {
    "immediate_grad_update": Key("bool", False, DETAIL, "add each gradient to its fp32 sum as soon as it comes"),
    "check_grad_overflow": Key("bool", True, DETAIL, "look for infinite gradients before an update"),
    "bf16_master_weights_and_grads": Key("bool", False, DETAIL, "keep master weights and gradients in bf16 too"),
    "bf16_optimizer_states": Key("bool", False, DETAIL, "keep Adam's moments in bf16 too"),
}

_SWITCHED: dict[str, dict[str, tuple[str, object]]] = {
    "torch_autocast": {"dtype": ("text", None), "lower_precision_safe_modules": ("list", None)},
    "tensorboard": {"output_path": ("text", ""), "job_name": ("text", "DeepSpeedJobName")},
    "csv_monitor": {"output_path": ("text", ""), "job_name": ("text", "DeepSpeedJobName")},
    "wandb": {"group": ("text", None), "team": ("text", None), "project": ("text", "deepspeed")},
    "comet": {
        **{"samples_log_interval": ("count", 100), "project": ("text", None), "workspace": ("text", None)},
        **{"api_key": ("text", None), "experiment_name": ("text", None), "experiment_key": ("text", None)},
        **{"online": ("bool", None), "mode": ("text", None)},
    },
    "flops_profiler": {
        **{"recompute_fwd_factor": ("number", 0.0), "profile_step": ("count", 1), "module_depth": ("number", -1)},
        **{"top_modules": ("count", 1), "detailed": ("bool", True), "output_file": ("text", None)},
    },
    "hybrid_engine": {
        **{
            "max_out_tokens": ("count", 512),
            "inference_tp_size": ("count", 1),
            "release_inference_cache": ("bool", False),
        },
        **{
            "pin_parameters": ("bool", True),
            "tp_gather_partition_size": ("count", 8),
            "enable_cuda_graph": ("bool", False),
        },
    },
}
"""Sections that a run here has off -> their keys but `enabled`, fp16 and bf16 apart: each with kind and default."""

_ENGINE_SECTIONS: dict[str, dict[str, Key]] = {
    "aio": {
        "block_size": Key("count", 1048576, ENGINE, "bytes of one read or write"),
        "queue_depth": Key("count", 8, ENGINE, "reads and writes under way at once"),
        "intra_op_parallelism": Key("count", 1, ENGINE, "threads for one of them"),
        "single_submit": Key("bool", False, ENGINE, "hand them over one by one"),
        "overlap_events": Key("bool", True, ENGINE, "hand over the next while the last are awaited"),
        "use_gds": Key("bool", False, OFF, "between disk and GPU without the host (GPUDirect Storage)"),
    },
    "comms_logger": {
        "enabled": Key("bool", False, ENGINE, "switch the counting of collectives on"),
        "prof_all": Key("bool", True, ENGINE, "all collectives"),
        "prof_ops": Key("list", [], ENGINE, "these collectives only"),
        "verbose": Key("bool", False, ENGINE, "print each call"),
        "debug": Key("bool", False, ENGINE, "print who called"),
    },
    "timers": {
        "throughput": section("samples per second"),
        "throughput.enabled": Key("bool", True, ENGINE, "measure samples per second"),
        "throughput.synchronized": Key("bool", True, ENGINE, "wait for the GPU before reading the clock"),
    },
    "checkpoint": {
        "tag_validation": Key("WARN|IGNORE|FAIL", "WARN", ENGINE, "what to do where ranks save under different names"),
        "load_universal": Key("bool", False, OFF, "read a checkpoint in the universal format"),
        "use_node_local_storage": Key(
            "bool", False, OFF, "write to each machine's own disk; a run has one shared folder"
        ),
        "checkpoint_serialization": Key("bool", True, ENGINE, "write by PyTorch's new format"),
        "parallel_write": section("write in parallel"),
        "parallel_write.pipeline_stage": Key("bool", False, OFF, "stages of a pipeline write at the same time"),
        "writer": section("another writer of files", OFF),
    },
    "data_types": {
        "grad_accum_dtype": Key("fp16|bf16|fp32", None, OFF, "format in which micro-batches are added up"),
        "param_dtype": Key("fp16|bf16|fp32", None, OFF, "format of the weights"),
        "buffer_dtype": Key("fp16|bf16|fp32", None, OFF, "format of buffers"),
        "keep_in_fp32_modules": Key("any", "auto", DETAIL, "modules that stay in fp32 under fp16 or bf16"),
    },
    "activation_checkpointing": {
        "partition_activations": Key("bool", False, OFF, "split what is kept between tensor-parallel ranks"),
        "number_checkpoints": Key("count", None, OFF, "layers of the model that are kept"),
        "contiguous_memory_optimization": Key("bool", False, OFF, "keep them in one buffer"),
        "synchronize_checkpoint_boundary": Key("bool", False, OFF, "wait for the GPU at each"),
        "profile": Key("bool", False, OFF, "measure time of each"),
        "cpu_checkpointing": Key("bool", False, OFF, "keep them on the CPU"),
    },
    "compile": {
        "deepcompile": Key("bool", False, OFF, "let DeepSpeed change the compiled model"),
        **{
            name: Key("any", default, DETAIL, "an option of deepcompile")
            for name, default in {
                **{"autoep_non_moe": False, "free_activation": False, "free_activation_threshold": 10485760},
                **{"offload_activation": False, "offload_activation_pin_memory": True, "offload_opt_states": False},
                **{"double_buffer": True, "symmetric_memory": False, "debug_log": False, "offload_parameters": False},
                **{"sync_before_reduce": False, "sync_after_reduce": False, "sync_before_allgather": False},
                **{"sync_after_allgather": False, "keep_int_input_tensors": True, "keep_all_input_tensors": False},
                "passes": None,
            }.items()
        },
    },
    "tensor_parallel": {
        "autotp_size": Key("count", 0, OFF, "ranks that split each matrix"),
        **{
            name: Key("any", default, DETAIL, "an option of AutoTP")
            for name, default in {
                **{"dtype": None, "tp_overlap_comm": False, "vocab_parallel_lm_head": None, "tensor_parallel": None},
                **{"vocab_parallel_ce_backend": "torch", "injection_policy_tuple": None, "partition_config": None},
                **{"preset_model": None, "keep_module_on_host": False, "kernel_inject": False, "tp": None},
                "replace_with_kernel_inject": False,
            }.items()
        },
    },
    **{
        name: {"enabled": Key("bool", False, OFF, f"switch {name} on")}
        for name in ("autotuning", "data_efficiency", "expert_parallel")
    },
}

OPEN = (
    *("autotuning", "data_efficiency", "expert_parallel", "pipeline", "weight_quantization", "datastates_ckpt"),
    *("checkpoint.writer", "tensor_parallel.tp", "tensor_parallel.tensor_parallel", "tensor_parallel.partition_config"),
)
"""Sections inside which anything may stand."""

KEYS: dict[str, Key] = {
    **_TOP,
    **_OPTIMIZER,
    **{
        f"scheduler.params.{name}": Key("any", None, DETAIL, "an option of the scheduler, which a run drops")
        for name in _SCHEDULER
    },
    **{f"{name}.enabled": Key("bool", False, OFF, f"switch {name} on") for name in ("fp16", "bf16", *_SWITCHED)},
    **{f"fp16.{name}": key for name, key in _FP16.items()},
    **{f"bf16.{name}": key for name, key in _BF16.items()},
    **{
        f"{name}.{key}": Key(kind, default, DETAIL, f"an option of {name}, read only where that is on")
        for name, others in _SWITCHED.items()
        for key, (kind, default) in others.items()
    },
    **{f"{name}.{key}": value for name, inner in _ENGINE_SECTIONS.items() for key, value in inner.items()},
    **ZERO_KEYS,
}
"""Dotted name -> what is known of it."""

SHORT_NAMES = {"bfloat16": "bf16", **ZERO_SHORT_NAMES}
"""Other names that DeepSpeed takes without a word -> the one used here."""

OLD_NAMES = {"allgather_size": "write allgather_bucket_size in zero_optimization", **ZERO_OLD_NAMES}
"""Names of before that DeepSpeed still reads -> what to write instead."""

REMOVED = {
    "nebula": "Nebula is gone; leave it out",
    "compression_training": "the compression library is gone; leave it out",
    "amp": "Apex is gone; leave it out",
    "quantize_training": "quantized training is gone; leave it out",
    "sparse_gradients": "sparse gradients of embeddings are gone; leave it out",
    "eigenvalue": "it belonged to quantized training, which is gone; leave it out",
    "sparse_attention": "sparse attention is gone; leave it out",
    "elasticity": "it is gone; write train_micro_batch_size_per_gpu and gradient_accumulation_steps",
    "graph_harvesting": "it is gone; leave it out",
    "curriculum_learning": "it stands in data_efficiency.data_sampling now; leave it out",
    "progressive_layer_drop": "it is gone; leave it out",
    **{name: f"{why}; leave it out" for name, why in ZERO_REMOVED.items()},
}
"""Names of before that DeepSpeed refuses -> why, and what to do."""

OTHER_PROJECTS = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    "accumulation_steps": "gradient_accumulation_steps",
    "grad_accum_steps": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "zero_stage": "zero_optimization.stage",
    "zero": "zero_optimization",
}
"""What TrainingArguments, other trainers and this package call it -> DeepSpeed's name."""
