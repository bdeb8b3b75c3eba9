"""Every key of DeepSpeed's JSON that ds does not act on, and its standing: data, in one place.

The keys that ds acts on are the fields of the models in :mod:`ds.config`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# A section whose inner keys are the user's own or another library's: they are not looked into.
OPEN = "open"


class Refused(NamedTuple):
    """A key or a section that is refused when it asks for something.

    Attributes:
        keys: inner keys with the values that ask for nothing (DeepSpeed's default first), or ``OPEN``.
        advice: what it is, and what to do instead.
        by_presence: that the section is there is already a request.
    """

    keys: Any
    advice: str
    by_presence: bool = False


# Keys that need nothing here, because ds does it always or in another way. Path -> what happens instead.
ACCEPTED: dict[str, str] = {
    "allgather_size": "gathers go by unit",
    "activation_checkpointing.contiguous_memory_optimization": "the allocator keeps freed memory",
    "activation_checkpointing.number_checkpoints": "inputs are kept as they come",
    "activation_checkpointing.profile": "torch.profiler shows the recomputation",
    "activation_checkpointing.synchronize_checkpoint_boundary": "nothing waits for the device",
    "checkpoint.checkpoint_serialization": "nothing is pickled",
    "checkpoint.tag_validation": "there are no checkpoints yet",
    "checkpoint.use_node_local_storage": "there are no checkpoints yet",
    "disable_allgather": "gathers follow the stage",
    "dump_state": "`ds report` and the log show the state",
    "gradient_predivide_factor": "the mean is taken once, after a sum in fp32",
    "log_level": "set the level of Python's logging instead",
    "managed_gradient_accumulation": "the engine counts micro-batches unless it is told the boundaries",
    "memory_breakdown": "ds_zero.held_bytes gives it",
    "prescale_gradients": "the mean is taken once, after a sum in fp32",
    "seq_parallel_communication_data_type": "only sequence parallelism reads it",
    "use_data_before_expert_parallelism": "only expert parallelism reads it",
    "vocabulary_size": "only the autotuner reads it",
    "zero_allow_untested_optimizer": "every element-wise optimizer is allowed",
    "zero_force_ds_cpu_optimizer": "torch's own optimizers are used",
    "fp16.auto_cast": "floating inputs are always cast to the parameters' dtype",
    "bf16.immediate_grad_update": "gradients are reduced as soon as they are ready",
    "optimizer.legacy_fusion": "torch's fused optimizers are used where there are any",
    "zero_optimization.allgather_bucket_size": "gathers go by unit",
    "zero_optimization.allgather_partitions": "gathers follow the stage",
    "zero_optimization.compute_grad_norm": "the norm is always computed; it finds NaN",
    "zero_optimization.contiguous_gradients": "gradients always lie in one flat buffer",
    "zero_optimization.cpu_offload_use_pin_memory": "memory is pinned where that is of use",
    "zero_optimization.elastic_checkpoint": "there are no checkpoints yet",
    "zero_optimization.enable_sanity_checks": "the calls of ranks are always compared",
    "zero_optimization.ignore_unused_parameters": "unused parameters are handled",
    "zero_optimization.legacy_stage1": "all stages are one engine",
    "zero_optimization.load_from_fp32_weights": "there are no checkpoints yet",
    "zero_optimization.log_trace_cache_warnings": "a changing graph is no reason to warn",
    "zero_optimization.memory_efficient_linear": "weights are never copied for backward",
    "zero_optimization.overlap_comm": "reductions always overlap with backward",
    "zero_optimization.override_module_apply": "nothing is overridden",
    "zero_optimization.parameter_alignment": "the flat buffers are laid out by ds_zero",
    "zero_optimization.pipeline_loading_checkpoint": "there are no checkpoints yet",
    "zero_optimization.reduce_scatter": "reduction is always a true reduce-scatter",
    "zero_optimization.round_robin_gradients": "the slices of ranks are equal by construction",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "only Muon reads it",
    "zero_optimization.stage3_allgather_sequential": "gathers follow the order of use",
    "zero_optimization.stage3_max_live_parameters": "at most two units are gathered",
    "zero_optimization.stage3_max_reuse_distance": "at most two units are gathered",
    "zero_optimization.stage3_model_persistence_threshold": "small parameters travel with their unit",
    "zero_optimization.stage3_module_granularity_threshold": "units are the blocks of the model",
    "zero_optimization.stage3_param_persistence_threshold": "small parameters travel with their unit",
    "zero_optimization.stage3_prefetch_bucket_size": "look-ahead goes by unit",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "a gather moves fewer bytes",
    "zero_optimization.sub_group_size": "the optimizer steps parameter by parameter",
    "zero_optimization.use_multi_rank_bucket_allreduce": "reduction is always a true reduce-scatter",
}
# Whole sections that need nothing: (section, its keys, what happens instead).
for _section, _keys, _reason in (
    (
        "aio",
        "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
        "files are read and written in blocks of 8 MiB by a pool of threads",
    ),
    (
        "zero_optimization.offload_optimizer",
        "buffer_count pin_memory pipeline_read pipeline_write fast_init cpuadam_cores_perc",
        "buffers are as many as the pipeline needs, pinned where that is of use, and always overlap",
    ),
    (
        "zero_optimization.offload_param",
        "buffer_count buffer_size max_in_cpu pin_memory",
        "buffers are as many as the pipeline needs, and pinned where that is of use",
    ),
    (
        "pipeline",
        (
            "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned "
            "use_reentrant"
        ),
        "only pipeline modules read it",
    ),
    ("timers.throughput", "enabled synchronized", "there are no timers to set"),
):
    ACCEPTED |= {f"{_section}.{_key}": _reason for _key in _keys.split()}


def _off(names: str, value: Any = None, **others: Any) -> dict[str, Any]:
    """Keys with one value that asks for nothing, and some with another."""
    return dict.fromkeys(names.split(), value) | others


def _switched(names: str) -> dict[str, Any]:
    """A section that its key ``enabled`` switches on; what else is in it is then of no interest."""
    return {"enabled": False} | dict.fromkeys(names.split(), OPEN)


MONITOR = _switched("output_path job_name")
EXPERT_PARALLEL = _switched(
    "autoep_size expert_tensor_parallel_size validate_folding_routing preset_model moe_layer_pattern "
    "expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm route_scale "
    "routed_scaling_factor score_apply score_func top_k combine_impl num_expert_groups num_limited_groups "
    "load_balance_coeff expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts "
    "shared_experts_pattern shared_experts_gate_pattern comm_backend async_split_plan row_weighting_impl "
    "gate_up_impl comm_num_sm comm_qp_margin comm_max_tokens_per_rank expert_activation"
)
COMPILE = _off(
    "deepcompile free_activation offload_activation offload_opt_states offload_parameters symmetric_memory "
    "debug_log sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
    "keep_all_input_tensors autoep_non_moe",
    False,
    passes=None,
    free_activation_threshold=OPEN,
    offload_activation_pin_memory=OPEN,
    double_buffer=OPEN,
    keep_int_input_tensors=OPEN,
)
AUTOTUNING = _switched(
    "fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path tuner_type "
    "tuner_early_stopping tuner_num_trials arg_mappings model_info model_info_path mp_size "
    "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu "
    "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes"
)
ELASTICITY = _switched(
    "max_train_batch_size micro_batch_sizes min_gpus max_gpus num_gpus_per_node model_parallel_size min_time "
    "prefer_larger_batch ignore_non_elastic_batch_info version"
)
FLOPS_PROFILER = _switched("recompute_fwd_factor profile_step module_depth top_modules detailed output_file")
HYBRID_ENGINE = _switched(
    "max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
    "enable_cuda_graph"
)
COMET = _switched("samples_log_interval project workspace api_key experiment_name experiment_key online mode")
TENSOR_PARALLEL = _off(
    "injection_policy_tuple preset_model partition_config vocab_parallel_lm_head",
    autotp_size=(0, 1),
    dtype=OPEN,
    tp_overlap_comm=False,
    tensor_parallel=_off("mpu tp_group", tp_size=1, tp_grain_size=OPEN),
    tp=_off("mpu tp_group", tp_size=1, tp_grain_size=OPEN),
    keep_module_on_host=False,
    replace_with_kernel_inject=False,
    vocab_parallel_ce_backend=OPEN,
)

# Path -> what is refused. Tuples are several values that ask for nothing; the first is DeepSpeed's default.
REFUSED: dict[str, Refused] = {
    "activation_checkpointing.partition_activations": Refused(
        False, "it needs tensor parallelism; ds_zero.recompute(partition=...) takes any group of ranks"
    ),
    "amp": Refused(OPEN, 'use {"bf16": {"enabled": true}}'),
    "autotuning": Refused(AUTOTUNING, "choose the batch sizes yourself"),
    "bf16.bf16_master_weights_and_grads": Refused(False, "master weights are fp32"),
    "checkpoint.load_universal": Refused(False, "checkpoints arrive with ds-ckpt"),
    "checkpoint.parallel_write": Refused({"pipeline_stage": False}, "checkpoints arrive with ds-ckpt"),
    "checkpoint.writer": Refused(None, "checkpoints arrive with ds-ckpt"),
    "comet": Refused(COMET, "log from the training loop"),
    "comms_logger": Refused(
        _switched("prof_all prof_ops verbose debug"),
        "subscribe to ds_spec.events for every collective with its bytes",
    ),
    "compile": Refused(COMPILE, "call torch.compile on parts of the model"),
    "compression_training": Refused(OPEN, "compression arrives with ds-compress"),
    "csv_monitor": Refused(MONITOR, "log from the training loop"),
    "curriculum_learning": Refused(OPEN, "order the data in the data set"),
    "data_efficiency": Refused(OPEN, "order the data in the data set"),
    "data_parallel_size": Refused((None, 1), "ds shards over all ranks"),
    "data_types.param_dtype": Refused(None, "bf16 and fp16 set it"),
    "data_types.buffer_dtype": Refused(None, "buffers keep their dtype"),
    "datastates_ckpt": Refused(OPEN, "checkpoints arrive with ds-ckpt", by_presence=True),
    "disable_python_gc": Refused(False, "call gc.disable() yourself"),
    "eigenvalue": Refused(OPEN, "DeepSpeed removed it too"),
    "elasticity": Refused(ELASTICITY, "write the batch sizes for the number of ranks"),
    "expert_parallel": Refused(EXPERT_PARALLEL, "expert parallelism arrives with ds-parallel"),
    "flops_profiler": Refused(FLOPS_PROFILER, "profiles arrive with ds-profile"),
    "fp16.fp16_master_weights_and_grads": Refused(False, "master weights are fp32"),
    "gradient_allreduce_op": Refused("mean", "multiply the loss by the number of ranks for a sum"),
    "graph_harvesting": Refused(False, "DeepSpeed removed it too"),
    "hybrid_engine": Refused(HYBRID_ENGINE, "generation in training arrives with ds-rlhf"),
    "msamp": Refused(OPEN, 'use {"bf16": {"enabled": true}}'),
    "nebula": Refused(OPEN, "checkpoints arrive with ds-ckpt"),
    "progressive_layer_drop": Refused(OPEN, "DeepSpeed removed it too"),
    "sequence_parallel_size": Refused((None, 1), "sequence parallelism arrives with ds-parallel"),
    "sparse_attention": Refused(OPEN, "DeepSpeed removed it too", by_presence=True),
    "sparse_gradients": Refused(False, "use torch.nn.Embedding(sparse=False)"),
    "tensor_parallel": Refused(TENSOR_PARALLEL, "tensor parallelism arrives with ds-parallel"),
    "tensorboard": Refused(MONITOR, "log from the training loop"),
    "torch_autocast.lower_precision_safe_modules": Refused(
        (None, OPEN), "torch.autocast decides by operation; leave it out"
    ),
    "wall_clock_breakdown": Refused(False, "profiles arrive with ds-profile; torch.profiler works"),
    "wandb": Refused(
        {"enabled": False, "group": None, "team": None, "project": OPEN}, "log from the training loop"
    ),
    "weight_quantization": Refused(OPEN, "quantization arrives with ds-compress", by_presence=True),
    "zero_optimization.leaf_module": Refused(
        {"classes": [], "names": [], "name_suffixes": []},
        "units are the blocks of the model; ds_zero.shard(units=...) takes others by name",
    ),
    "zero_optimization.mics_hierarchical_params_gather": Refused(
        False, "with mics_shard_size gathers stay within the node anyway"
    ),
    "zero_optimization.offload_optimizer.super_offload": Refused(
        False, "offload always overlaps where it can"
    ),
    "zero_optimization.zenflow": Refused(OPEN, "it goes with offload", by_presence=True),
    "zero_optimization.zero_quantized_nontrainable_weights": Refused(
        False, "zero_quantized_weights takes frozen and trainable ones alike"
    ),
    "zero_optimization.zeropp_loco_param": Refused(None, "codes have no error feedback yet; leave it out"),
}

# Names of optimizers that DeepSpeed has and ds does not have yet.
OPTIMIZERS_NOT_YET = (
    "onebitadam", "zerooneadam", "onebitlamb", "muadam", "muadamw", "musgd",
)  # fmt: skip


def requests(value: Any, entry: Refused, path: str) -> Iterator[str]:
    """Paths under ``path`` at which a value asks for what is refused; none when it is switched off."""
    if entry.by_presence:
        if value is not None and value is not False:
            yield path
    else:
        yield from _requests(value, entry.keys, path)


def _requests(value: Any, known: Any, path: str) -> Iterator[str]:
    if value is None or _is_switched_off(value, known):
        return
    if isinstance(value, Mapping) and isinstance(known, dict):
        switch = next((key for key in ("enabled", "device") if key in known), None)
        if switch is not None:
            yield f"{path}.{switch}"
        else:
            for key, item in value.items():
                if key in known and known[key] is not OPEN:
                    yield from _requests(item, known[key], f"{path}.{key}")
    elif known is OPEN:
        yield f"{path}.enabled" if isinstance(value, Mapping) and value.get("enabled") else path
    elif value not in (known if isinstance(known, tuple) else (known,)):
        yield path


def _is_switched_off(value: Any, known: Any) -> bool:
    if not isinstance(value, Mapping):
        return value is False or value == "none"
    if "shared_parameters" in value:
        return _is_switched_off(value["shared_parameters"], OPEN)
    if "enabled" in value or (isinstance(known, dict) and "enabled" in known):
        return value.get("enabled", False) in (False, None)
    if isinstance(known, dict) and "device" in known:
        return value.get("device", "none") in ("none", None)
    return known is OPEN and all(
        isinstance(item, Mapping) and _is_switched_off(item, OPEN) for item in value.values()
    )


def unknown_inside(value: Any, entry: Refused, path: str) -> Iterator[tuple[str, list[str]]]:
    """Inner keys that DeepSpeed does not have either, each with the keys known at its place."""
    yield from _unknown(value, entry.keys, path)


def _unknown(value: Any, known: Any, path: str) -> Iterator[tuple[str, list[str]]]:
    if not isinstance(value, Mapping) or not isinstance(known, dict):
        return
    for key, item in value.items():
        if key not in known:
            yield f"{path}.{key}", list(known)
        else:
            yield from _unknown(item, known[key], f"{path}.{key}")
