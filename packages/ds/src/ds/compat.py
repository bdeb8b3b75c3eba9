"""DeepSpeed's own names on the engine: one-line getters over the configuration and the world."""

from typing import Any

import torch
from torch import nn

import ds_comm
import ds_zero
from ds.config import Batch, Config
from ds.zero_options import precision_of


class DeepSpeedNames:
    """Mixed into the engine; each method is DeepSpeed's of that name."""

    parsed_config: Config
    batch: Batch
    module: nn.Module
    optimizer: ds_zero.ShardedOptimizer | None
    _world: ds_comm.World

    def train_batch_size(self) -> int:
        """Samples per step over all ranks and micro-batches."""
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-batch."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """The batch triple: train, micro, accumulation."""
        return self.batch.train, self.batch.micro, self.batch.accumulation

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.parsed_config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() > 1

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.zero_optimization_stage() > 2

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether a framework may save whole weights at stage 3."""
        zero = self.parsed_config.zero_optimization
        return zero.stage3_gather_16bit_weights_on_model_save or zero.stage3_gather_fp16_weights_on_model_save

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self.parsed_config.bf16.enabled

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self.parsed_config.fp16.enabled

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtype of parameters and of accumulated gradients."""
        precision = precision_of(self.parsed_config)
        return precision.param_dtype, precision.accumulate_dtype

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by now; 1 without loss scaling."""
        return self.optimizer.loss_scale if self.optimizer is not None else 1.0

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return self.fp16_enabled() and self.parsed_config.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        """Where the dynamic loss scale starts."""
        return 2.0**self.parsed_config.fp16.initial_scale_power

    def gradient_clipping(self) -> float:
        """Limit of the global gradient norm, 0 for none."""
        return self.parsed_config.gradient_clipping

    def steps_per_print(self) -> float | None:
        """Steps between two lines of progress."""
        return self.parsed_config.steps_per_print

    def optimizer_name(self) -> str | None:
        """The configured optimizer's name."""
        return self.parsed_config.optimizer.type if self.parsed_config.optimizer else None

    def scheduler_name(self) -> str | None:
        """The configured schedule's name."""
        return self.parsed_config.scheduler.type if self.parsed_config.scheduler else None

    def get_lr(self) -> list[float]:
        """Learning rates of the parameter groups."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Momentum or betas of the parameter groups."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as a plain dict, as frameworks read it."""
        return self.parsed_config.model_dump(exclude_none=True)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._world.device

    @property
    def global_rank(self) -> int:
        """This rank among all."""
        return self._world.rank

    @property
    def local_rank(self) -> int:
        """This rank on its machine."""
        return self._world.local_rank

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self._world.world_size

    @property
    def dp_world_size(self) -> int:
        """Ranks that share a batch: all."""
        return self._world.world_size

    @property
    def mp_world_size(self) -> int:
        """Ranks that share one copy of a layer: this one."""
        return 1

    def get_data_parallel_rank(self) -> int:
        """This rank among those that share a batch."""
        return self._world.rank
