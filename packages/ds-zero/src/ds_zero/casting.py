"""Dtypes at the edges of modules: casts of what comes in and goes out, and autocast, as removable hooks."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with every tensor in nested tuples, lists, and dataclasses replaced by its ``change``."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        if type(value) is dict:
            return changed
        same = copy.copy(value)  # a Hugging Face output is a dict whose keys are attributes too
        for key, item in changed.items():
            if item is not value[key]:
                same[key] = item
        return same
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{key: map_tensors(item, change) for key, item in fields.items()})
    return value


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating tensor in it cast to ``dtype``."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


class CastBracket:
    """Casts what a module is given, and what it gives.

    Args:
        module: the module to watch.
        inside: dtype of floating inputs.
        outside: dtype of floating outputs; ``None`` leaves them.
    """

    def __init__(self, module: nn.Module, *, inside: torch.dtype, outside: torch.dtype | None) -> None:
        self._inside = inside
        self.handles: list[Any] = [module.register_forward_pre_hook(self._before, with_kwargs=True)]
        if outside is not None:
            self._outside = outside
            self.handles.append(module.register_forward_hook(self._after))

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floating(args, self._inside), cast_floating(kwargs, self._inside)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return cast_floating(output, self._outside)


class AutocastBracket:
    """Runs a module's forward under ``torch.autocast``.

    The cache of casted weights is off: it would keep a second copy of parameters that are released.
    """

    def __init__(self, module: nn.Module, *, device_type: str, dtype: torch.dtype) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self._entered: list[torch.autocast] = []
        self.handles: list[Any] = [
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, module: nn.Module, args: Any) -> None:
        context = torch.autocast(self._device_type, dtype=self._dtype, cache_enabled=False)
        context.__enter__()
        self._entered.append(context)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._entered.pop().__exit__(None, None, None)
