"""From the configuration to the option structs of ds_zero."""

import ds_zero
from ds.config import Config
from ds.config_checks import AUTOCAST

HOMES = {"none": "device", "cpu": "cpu", "nvme": "file"}


def precision_of(config: Config) -> ds_zero.Precision:
    """Which dtype holds what."""
    param = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    accumulate = config.data_types.grad_accum_dtype or "fp32"
    narrow = config.communication_data_type or accumulate
    autocast = None
    if config.torch_autocast.enabled:
        autocast = AUTOCAST[config.torch_autocast.dtype]
    return ds_zero.Precision(
        param=param,
        grad=narrow if param == "fp32" and narrow != "fp32" else None,
        reduce=narrow,
        accumulate=accumulate,
        autocast=autocast,
        keep_fp32=tuple(config.data_types.keep_in_fp32_modules or ()),
        loss_scale=_loss_scale(config, autocast),
        state="bf16" if config.bf16.bf16_optimizer_states else "fp32",
    )


def _loss_scale(config: Config, autocast: str | None) -> ds_zero.LossScale | None:
    fp16 = config.fp16
    if not fp16.enabled:
        return ds_zero.LossScale() if autocast == "fp16" else None
    dynamic = fp16.loss_scale == 0
    initial = 2.0**fp16.initial_scale_power if dynamic else fp16.loss_scale
    return ds_zero.LossScale(
        initial=initial,
        dynamic=dynamic,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        restores_hysteresis=fp16.consecutive_hysteresis,
        minimum=min(fp16.min_loss_scale, initial),
    )


def offload_of(config: Config) -> ds_zero.Offload:
    """What lies where. As in DeepSpeed, gradients go where the optimizer goes when they are sharded."""
    zero = config.zero_optimization
    optimizer = HOMES[zero.offload_optimizer.device]
    if zero.cpu_offload and optimizer == "device":
        optimizer = "cpu"
    parameters = HOMES[zero.offload_param.device]
    if zero.cpu_offload_param and parameters == "device":
        parameters = "cpu"
    return ds_zero.Offload(
        optimizer=optimizer,
        gradients=optimizer if zero.stage >= 2 else "device",
        parameters=parameters,
        path=zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path,
        ratio=zero.offload_optimizer.ratio,
    )


def reach_of(config: Config) -> ds_zero.Reach:
    """How far and how wide parameters and gradients travel."""
    zero = config.zero_optimization
    bits = 8
    within_node = zero.mics_shard_size > 0
    secondary = zero.zero_hpz_partition_size > 1
    nodes = zero.mics_shard_size if within_node else zero.zero_hpz_partition_size if secondary else None
    return ds_zero.Reach(
        weight_bits=bits if zero.zero_quantized_weights else None,
        gradient_bits=bits if zero.zero_quantized_gradients else None,
        node_size=nodes,
        secondary=secondary,
        within_node=within_node,
    )
