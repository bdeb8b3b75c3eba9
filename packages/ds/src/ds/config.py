"""DeepSpeed's JSON as people write it: read, checked strictly, every mistake named at once."""

import base64
import binascii
import difflib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds.config_keys import ACCEPTED, NOT_YET, is_off

logger = logging.getLogger(__name__)

DEEPSPEED_CLIPPING = 1.0


class ConfigError(ValueError):
    """The configuration is wrong or asks for what is not there; the message lists every reason."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimizerConfig(_Section):
    """``optimizer``: a name and its arguments."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class SchedulerConfig(_Section):
    """``scheduler``: a name and its arguments."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class Bf16Config(_Section):
    """``bf16``: bf16 parameters with fp32 master weights."""

    enabled: bool = False
    check_grad_overflow: bool = True


class ZeroConfig(_Section):
    """``zero_optimization``: what is sharded."""

    stage: Literal[0, 1, 2, 3] = 0
    reduce_bucket_size: int = Field(default=500_000_000, ge=0)
    stage3_gather_16bit_weights_on_model_save: bool = False
    stage3_gather_fp16_weights_on_model_save: bool = False

    @model_validator(mode="before")
    @classmethod
    def _whole_floats(cls, data: Any) -> Any:
        """DeepSpeed's files write sizes as ``5e8``."""
        if isinstance(data, dict) and isinstance(data.get("reduce_bucket_size"), float):
            return {**data, "reduce_bucket_size": int(data["reduce_bucket_size"])}
        return data


class Config(_Section):
    """The keys that ds acts on."""

    train_batch_size: int | None = Field(default=None, ge=1)
    train_micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    gradient_accumulation_steps: int | None = Field(default=None, ge=1)
    gradient_clipping: float = Field(default=DEEPSPEED_CLIPPING, ge=0)
    gradient_allreduce_op: Literal["mean"] = "mean"
    steps_per_print: float | None = Field(default=None, gt=0)
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    bf16: Bf16Config = Bf16Config()
    zero_optimization: ZeroConfig = ZeroConfig()


class Batch(_Section):
    """The batch triple, solved: ``train == micro * accumulation * data_parallel_size``."""

    train: int
    micro: int
    accumulation: int


ALIASES = {"bfloat16": "bf16"}


def read_config(source: Mapping[str, Any] | str | Path) -> Config:
    """A configuration from a dict, a JSON file's path, or URL-safe base64 of JSON; the dict is not changed.

    Keys set to ``"auto"`` count as absent.

    Raises:
        ConfigError: with one line per wrong key: its path, what was expected, the nearest known key.
    """
    raw = _drop_auto(_load(source))
    raw = {ALIASES.get(key, key): value for key, value in raw.items()}
    errors: list[str] = []
    known = _keep_known(raw, Config, "", errors)
    config = None
    try:
        config = Config.model_validate(known)
    except ValidationError as error:
        errors += [_describe(item) for item in error.errors()]
    if errors or config is None:
        raise ConfigError("the configuration has mistakes:\n" + "\n".join(f"  {line}" for line in errors))
    if "gradient_clipping" not in raw:
        logger.info("gradient_clipping is not set: DeepSpeed's default of 1.0 applies; set it to 0 for none")
    return config


def _load(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    try:
        text = path.read_text() if path.is_file() else base64.urlsafe_b64decode(str(source)).decode()
    except (binascii.Error, UnicodeDecodeError, OSError):
        raise ConfigError(
            f"config must be a dict or the path of a JSON file; there is no file {source}"
        ) from None
    try:
        loaded = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} is not JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{source} must hold a JSON object, got {type(loaded).__name__}")
    return loaded


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ConfigError(f"the configuration has the key {repeated[0]!r} twice")
    return dict(pairs)


def _drop_auto(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _drop_auto(item)
            for key, item in value.items()
            if not (isinstance(item, str) and item == "auto")
        }
    return value


def _keep_known(
    raw: Mapping[str, Any], model: type[BaseModel], path: str, errors: list[str]
) -> dict[str, Any]:
    """What the model acts on; the rest is accepted, or noted as an error."""
    kept: dict[str, Any] = {}
    for key, value in raw.items():
        full = f"{path}{key}"
        if key in model.model_fields:
            inner = _section_of(model, key)
            nested = inner is not None and isinstance(value, Mapping)
            kept[key] = _keep_known(value, inner, f"{full}.", errors) if nested and inner else value
        elif full in ACCEPTED:
            logger.info("%s is accepted and not needed: %s", full, ACCEPTED[full])
        elif full in NOT_YET:
            if not is_off(value):
                errors.append(f"{full}: not supported yet ({NOT_YET[full]}); remove the key or switch it off")
        else:
            errors.append(f"{full}: unknown key{_nearest(key, path, model)}")
    return kept


def _section_of(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    annotation = model.model_fields[key].annotation
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def known_keys(model: type[BaseModel] = Config, path: str = "") -> Iterable[str]:
    """Paths of the keys that ds acts on."""
    for key in model.model_fields:
        inner = _section_of(model, key)
        yield f"{path}{key}"
        if inner is not None:
            yield from known_keys(inner, f"{path}{key}.")


def _nearest(key: str, path: str, model: type[BaseModel]) -> str:
    others = [name.removeprefix(path) for name in (*ACCEPTED, *NOT_YET) if name.startswith(path)]
    names = [*model.model_fields, *(name for name in others if "." not in name)]
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return (
        f"; did you mean {path}{close[0]}?"
        if close
        else f"; known here are {', '.join(list(model.model_fields)[:8])}"
    )


def _describe(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"])
    return f"{path}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"


def solve_batch(config: Config, data_parallel_size: int) -> Batch:
    """The whole triple from the keys that are there; two determine the third, one leaves accumulation at 1.

    Raises:
        ConfigError: none is given, or they contradict each other.
    """
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation, ranks = config.gradient_accumulation_steps, data_parallel_size
    if train is None and micro is None:
        raise ConfigError("the configuration needs train_batch_size or train_micro_batch_size_per_gpu")
    if micro is None:
        micro = _divide(train or 0, (accumulation or 1) * ranks, accumulation or 1, ranks)
        accumulation = accumulation or 1
    if accumulation is None:
        accumulation = 1 if train is None else _divide(train, micro * ranks, micro, ranks, "micro-batch")
    train = train if train is not None else micro * accumulation * ranks
    if train != micro * accumulation * ranks:
        raise ConfigError(
            f"train_batch_size={train} must be train_micro_batch_size_per_gpu={micro} * "
            f"gradient_accumulation_steps={accumulation} * {ranks} ranks = {micro * accumulation * ranks}; "
            "drop one of the three keys to have it computed"
        )
    return Batch(train=train, micro=micro, accumulation=accumulation)


def _divide(train: int, parts: int, factor: int, ranks: int, what: str = "accumulation steps") -> int:
    if train % parts:
        below, above = train // parts * parts, -(-train // parts) * parts
        choices = f"{above}" if below == 0 else f"{below} or {above}"
        raise ConfigError(
            f"train_batch_size={train} does not divide into {ranks} ranks * {factor} {what} = {parts}; "
            f"the nearest that do are {choices}"
        )
    return train // parts
