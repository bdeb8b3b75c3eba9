"""The part of DeepSpeed's JSON that ds acts on, as strict models; read by ds.config_reader."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

DEEPSPEED_CLIPPING = 1.0


class ConfigError(ValueError):
    """The configuration is wrong or asks for what is not there.

    Attributes:
        reasons: one line per mistake, each beginning with the path of its key.
    """

    def __init__(self, *reasons: str) -> None:
        self.reasons = reasons
        lines = "".join(f"\n  {reason}" for reason in reasons)
        super().__init__(
            reasons[0] if len(reasons) == 1 else f"the configuration has {len(reasons)} mistakes:{lines}"
        )


def _whole(value: Any) -> Any:
    """DeepSpeed's files write sizes as ``5e8``."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Power = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=32)]


class Section(BaseModel):
    """No key is ignored, no value is converted, nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class OptimizerConfig(Section):
    """``optimizer``: a name and its arguments."""

    type: str = Field(
        description="adam, adamw, sgd, adagrad or any class of torch.optim; case does not matter"
    )
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="the class's arguments; Adam and AdamW decay weights by 0 when it is absent",
    )


class SchedulerConfig(Section):
    """``scheduler``: a name and its arguments."""

    type: str = Field(
        description="WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a class of "
        "torch.optim.lr_scheduler"
    )
    params: dict[str, Any] = Field(default_factory=dict, description="the class's arguments")


class Fp16Config(Section):
    """``fp16``: fp16 parameters with fp32 master weights and loss scaling."""

    enabled: bool = Field(default=False, description="fp16 parameters, fp32 master weights, loss scaling")
    loss_scale: float = Field(default=0, ge=0, description="a fixed scale; 0 for a dynamic one")
    initial_scale_power: Power = Field(default=16, description="the dynamic scale starts at 2 to this power")
    loss_scale_window: Count = Field(default=1000, description="steps without overflow before it is doubled")
    hysteresis: Count = Field(default=2, description="overflows before it is halved")
    consecutive_hysteresis: bool = Field(
        default=False, description="a step without overflow gives the whole hysteresis back"
    )
    min_loss_scale: float = Field(default=1, gt=0, description="an overflow at this scale is an error")


class Bf16Config(Section):
    """``bf16``: bf16 parameters with fp32 master weights."""

    enabled: bool = Field(default=False, description="bf16 parameters, fp32 master weights and sums")
    check_grad_overflow: bool = Field(
        default=True, description="skip a step whose gradient is not finite; false raises an error instead"
    )
    bf16_optimizer_states: bool = Field(
        default=False, description="keep moments in bf16, rounded stochastically"
    )


class AutocastConfig(Section):
    """``torch_autocast``: fp32 parameters, forward under torch.autocast."""

    enabled: bool = Field(default=False, description="run forward under torch.autocast")
    dtype: str = Field(default="bfloat16", description="bfloat16, or float16 with dynamic loss scaling")


class DataTypesConfig(Section):
    """``data_types``: dtypes beside the parameters'."""

    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="dtype in which reduced gradients are added up, fp32 when absent"
    )
    keep_in_fp32_modules: list[str] | None = Field(
        default=None,
        description="modules (patterns of a whole name or its last part) whose parameters stay fp32; "
        "those that a Hugging Face model lists itself are added",
    )


class OffloadOptimizerConfig(Section):
    """``zero_optimization.offload_optimizer``: where master weights, moments and sharded gradients lie."""

    device: Literal["none", "cpu", "nvme"] = Field(default="none", description="none, cpu, or nvme for files")
    nvme_path: str | None = Field(default=None, description="folder for the files, on a local disk")
    ratio: float = Field(default=1.0, gt=0, le=1, description="share of the elements that leave the device")


class OffloadParamConfig(Section):
    """``zero_optimization.offload_param``: where parameter slices lie at stage 3."""

    device: Literal["none", "cpu", "nvme"] = Field(default="none", description="none, cpu, or nvme for files")
    nvme_path: str | None = Field(default=None, description="folder for the files, on a local disk")


class RecomputeConfig(Section):
    """``activation_checkpointing``: how ds.checkpointing.checkpoint keeps inputs."""

    cpu_checkpointing: bool = Field(default=False, description="keep inputs in CPU memory")


class ZeroConfig(Section):
    """``zero_optimization``: what is sharded."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_whole)] = Field(
        default=0, description="0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too"
    )
    reduce_bucket_size: Count = Field(
        default=500_000_000,
        description="at stages 0 to 2, neighbouring units below this many elements are reduced together; "
        "more than 4,194,304 counts as that",
    )
    offload_optimizer: OffloadOptimizerConfig = Field(
        default=OffloadOptimizerConfig(), description="where optimizer states lie"
    )
    offload_param: OffloadParamConfig = Field(
        default=OffloadParamConfig(), description="where parameter slices lie, stage 3"
    )
    cpu_offload: bool = Field(default=False, description="older form of offload_optimizer.device cpu")
    cpu_offload_param: bool = Field(default=False, description="older form of offload_param.device cpu")
    zero_quantized_weights: bool = Field(
        default=False, description="gather parameters as 8-bit block codes, stage 3"
    )
    zero_quantized_gradients: bool = Field(
        default=False,
        description="reduce gradients as 8-bit block codes, on one node too; in two hops when "
        "zero_hpz_partition_size says what a node is",
    )
    zero_hpz_partition_size: Count = Field(
        default=1,
        description="ranks of a node that hold a second copy of parameters for backward, stage 3; 1 for none",
    )
    mics_shard_size: Annotated[int, BeforeValidator(_whole)] = Field(
        default=-1, description="shard over this many neighbouring ranks only; -1 for all"
    )
    stage3_gather_16bit_weights_on_model_save: bool = Field(
        default=False, description="let frameworks collect whole weights at stage 3 when they save"
    )
    stage3_gather_fp16_weights_on_model_save: bool = Field(
        default=False, description="older name of the above"
    )


class Config(Section):
    """The keys that ds acts on."""

    train_batch_size: Count | None = Field(
        default=None, description="samples per step over all ranks; two of the three sizes give the third"
    )
    train_micro_batch_size_per_gpu: Count | None = Field(
        default=None, description="samples per rank and micro-batch"
    )
    gradient_accumulation_steps: Count | None = Field(
        default=None, description="micro-batches per step; 1 when it does not follow from the other two"
    )
    gradient_clipping: float = Field(
        default=DEEPSPEED_CLIPPING, ge=0, description="limit of the global gradient norm; 0 for none"
    )
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="dtype that sums of gradients over ranks are rounded to, fp32 when absent; on the wire "
        "gradients have the parameters' dtype, or this one when parameters are fp32",
    )
    steps_per_print: float | None = Field(
        default=None, gt=0, description="steps between two lines in the log; infinite or absent for none"
    )
    dataloader_drop_last: bool = Field(
        default=False, description="leave out a last batch that is not full, in the loader of training_data"
    )
    optimizer: OptimizerConfig | None = Field(default=None, description="the optimizer; absent for inference")
    scheduler: SchedulerConfig | None = Field(default=None, description="the learning-rate schedule")
    fp16: Fp16Config = Field(default=Fp16Config(), description="mixed precision with loss scaling")
    bf16: Bf16Config = Field(
        default=Bf16Config(), description="mixed precision; also under the name bfloat16"
    )
    torch_autocast: AutocastConfig = Field(
        default=AutocastConfig(), description="mixed precision by torch.autocast"
    )
    data_types: DataTypesConfig = Field(
        default=DataTypesConfig(), description="dtypes of gradients and modules"
    )
    activation_checkpointing: RecomputeConfig = Field(
        default=RecomputeConfig(), description="for models that call ds.checkpointing.checkpoint"
    )
    zero_optimization: ZeroConfig = Field(default=ZeroConfig(), description="what is sharded over the ranks")


class Batch(Section):
    """The batch triple, solved: ``train == micro * accumulation * data_parallel_size``."""

    train: int
    micro: int
    accumulation: int


def solve_batch(config: Config, data_parallel_size: int) -> Batch:
    """The whole triple from the keys that are there; two determine the third, one leaves accumulation at 1.

    Raises:
        ConfigError: none of the sizes is given, or they contradict each other or the number of ranks.
    """
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation, ranks = config.gradient_accumulation_steps, data_parallel_size
    if train is None and micro is None:
        raise ConfigError(
            "train_batch_size: give it or train_micro_batch_size_per_gpu; "
            "neither is there (a value of 'auto' counts as absent)"
        )
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(train=micro * accumulation * ranks, micro=micro, accumulation=accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = _divide(train, ranks, accumulation, "gradient_accumulation_steps")
    elif accumulation is None:
        accumulation = _divide(train, ranks, micro, "train_micro_batch_size_per_gpu")
    if train != micro * accumulation * ranks:
        raise ConfigError(
            f"train_batch_size: {train} is not train_micro_batch_size_per_gpu {micro} * "
            f"gradient_accumulation_steps {accumulation} * {ranks} data-parallel ranks = "
            f"{micro * accumulation * ranks}; leave one of the three keys out to have it computed"
        )
    return Batch(train=train, micro=micro, accumulation=accumulation)


def _divide(train: int, ranks: int, factor: int, name: str) -> int:
    parts = ranks * factor
    if train % parts:
        below, above = train // parts * parts, (train // parts + 1) * parts
        raise ConfigError(
            f"train_batch_size: {train} / ({ranks} data-parallel ranks * {name} {factor} = {parts}) "
            f"is not whole; the nearest that are: {f'{below} or {above}' if below else above}"
        )
    return train // parts
