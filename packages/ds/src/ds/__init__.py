"""One initialize() over the ds packages, driven by DeepSpeed's JSON. Nothing loads before it is used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds.batch_fit import fit_batch
    from ds.config import ConfigError
    from ds.engine import Engine
    from ds.entry import add_config_arguments, init_distributed, initialize

__version__ = "0.1.0"

_HOME = {
    "ConfigError": "ds.config",
    "Engine": "ds.engine",
    "add_config_arguments": "ds.entry",
    "fit_batch": "ds.batch_fit",
    "init_distributed": "ds.entry",
    "initialize": "ds.entry",
}
_PACKAGES = {
    "ckpt": "ds_ckpt",
    "comm": "ds_comm",
    "compress": "ds_compress",
    "infer": "ds_infer",
    "kernels": "ds_kernels",
    "parallel": "ds_parallel",
    "pipe": "ds_pipe",
    "profile": "ds_profile",
    "rlhf": "ds_rlhf",
    "spec": "ds_spec",
    "zero": "ds_zero",
}

__all__ = [
    "ConfigError",
    "Engine",
    "__version__",
    "add_config_arguments",
    "fit_batch",
    "init_distributed",
    "initialize",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name == "checkpointing":
        return importlib.import_module("ds.checkpointing")
    if name in _PACKAGES:
        try:
            return importlib.import_module(_PACKAGES[name])
        except ModuleNotFoundError as error:
            if error.name != _PACKAGES[name]:
                raise
            distribution = _PACKAGES[name].replace("_", "-")
            raise AttributeError(
                f"ds.{name} is the distribution {distribution}, which is not installed"
            ) from None
    raise AttributeError(f"module 'ds' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "checkpointing"])
