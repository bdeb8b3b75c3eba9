"""What single keys of the configuration cannot say: which of them go together."""

from collections.abc import Iterator

from ds.config import Config

AUTOCAST = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}


def check_combinations(config: Config) -> Iterator[str]:
    """What does not go together, one line each, beginning with the path of a key."""
    zero = config.zero_optimization
    if config.fp16.enabled and config.bf16.enabled:
        yield "fp16.enabled: bf16.enabled is true too; choose one"
    if config.torch_autocast.enabled and (config.fp16.enabled or config.bf16.enabled):
        yield (
            "torch_autocast.enabled: autocast runs over fp32 parameters; switch fp16 and bf16 off, "
            "or leave it out"
        )
    if config.torch_autocast.dtype not in AUTOCAST:
        yield f"torch_autocast.dtype: must be bfloat16 or float16, got {config.torch_autocast.dtype!r}"
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(zero, name)
        if section.device == "nvme" and not section.nvme_path:
            yield f"zero_optimization.{name}.nvme_path: device nvme needs a folder on a local disk"
    paths = {zero.offload_optimizer.nvme_path, zero.offload_param.nvme_path} - {None}
    if len(paths) > 1:
        yield "zero_optimization.offload_param.nvme_path: must be the folder of offload_optimizer.nvme_path"
    if zero.offload_param.device != "none" and zero.stage < 3:
        yield f"zero_optimization.offload_param.device: needs stage 3, got stage {zero.stage}"
    accumulate = config.data_types.grad_accum_dtype
    sums = config.communication_data_type or accumulate
    if accumulate not in (None, "fp32", sums):
        yield (
            f"data_types.grad_accum_dtype: {accumulate} does not go with communication_data_type {sums}: "
            "sums would be rounded twice; use the same dtype or fp32"
        )
    if sums in ("bf16", "fp16") and not (config.fp16.enabled or config.bf16.enabled) and accumulate == sums:
        yield f"data_types.grad_accum_dtype: {accumulate} needs bf16.enabled or fp16.enabled"
    yield from _check_reach(config)


def _check_reach(config: Config) -> Iterator[str]:
    zero = config.zero_optimization
    if zero.mics_shard_size != -1 and zero.mics_shard_size < 1:
        yield f"zero_optimization.mics_shard_size: must be -1 or at least 1, got {zero.mics_shard_size}"
    if zero.mics_shard_size > 0 and zero.zero_hpz_partition_size > 1:
        yield "zero_optimization.mics_shard_size: does not go with zero_hpz_partition_size; leave one out"
    wants = {
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
    }
    for key, wanted in wants.items():
        if wanted and zero.stage < 3:
            yield f"zero_optimization.{key}: needs stage 3, got stage {zero.stage}"
