"""DeepSpeed's own names on the engine: one-line getters over the configuration, in one place."""

from typing import Any

import torch

from ds.config import Batch, Config


class DeepSpeedNames:
    """Mixed into the engine; each method is DeepSpeed's of that name."""

    parsed_config: Config
    batch: Batch
    optimizer: Any

    def train_batch_size(self) -> int:
        """Samples per step over all ranks and micro-batches."""
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-batch."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.batch.accumulation

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.parsed_config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self.parsed_config.bf16.enabled

    def fp16_enabled(self) -> bool:
        """fp16 is not there yet."""
        return False

    def gradient_clipping(self) -> float:
        """Limit of the global gradient norm, 0 for none."""
        return self.parsed_config.gradient_clipping

    def steps_per_print(self) -> float | None:
        """Steps between two lines of progress."""
        return self.parsed_config.steps_per_print

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether a framework may save whole weights at stage 3."""
        zero = self.parsed_config.zero_optimization
        return zero.stage3_gather_16bit_weights_on_model_save or zero.stage3_gather_fp16_weights_on_model_save

    def get_batch_info(self) -> tuple[int, int, int]:
        """The batch triple: train, micro, accumulation."""
        return self.batch.train, self.batch.micro, self.batch.accumulation

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtype of parameters and of accumulated gradients."""
        return (torch.bfloat16 if self.bfloat16_enabled() else torch.float32), torch.float32

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as a plain dict, as frameworks read it."""
        return self.parsed_config.model_dump(exclude_none=True)
