"""Build a model without its memory: parameters on meta, every operation that made them recorded for later."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ds_zero.errors import ZeroError

# Factories that make parameters. Small tables (torch.arange, torch.tensor, ...) stay real: they cost nothing.
DEFERRED_FACTORIES = frozenset(
    [
        torch.empty,
        torch.empty_strided,
        torch.zeros,
        torch.ones,
        torch.full,
        torch.rand,
        torch.randn,
        torch.randint,
    ]
)
IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
TRUNCATED_NORMAL = "_no_grad_trunc_normal_"
# Operations that give Python a value, or a shape, that only data can tell.
DATA_DEPENDENT = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero")


class DeferredInitError(ZeroError):
    """The model's construction looks at values that do not exist yet."""


class _View:
    """A meta tensor as a place in a storage: enough to find the same place in the real one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self.key = self.storage._cdata
        self.geometry = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self.dtype = tensor.dtype

    def on(self, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """The real tensor, in storages made so far; made now if this is the first mention."""
        if self.key not in storages:
            storages[self.key] = torch.UntypedStorage(self.storage.nbytes())
        return torch.empty(0, dtype=self.dtype).set_(storages[self.key], *self.geometry)


class _Operation:
    """One recorded call: arguments with views for meta tensors, what it writes, the generator before it."""

    def __init__(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        self.func = func
        self.args = tree_map(_as_view, args)
        self.kwargs = tree_map(_as_view, _on_cpu(kwargs))
        self.outputs = [_View(out) for out in tree_flatten(outputs)[0] if _is_meta(out)]
        self.reads = {
            leaf.key for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, _View)
        }
        self.writes = {out.key for out in self.outputs} | _written(func, args, kwargs)
        self.generator: torch.Generator | None = kwargs.get("generator")
        self.state: torch.Tensor | None = None

    @classmethod
    def of_initialiser(cls, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> "_Operation":
        """A Python function that overwrites ``tensor`` with random values, recorded as one operation."""
        operation = cls.__new__(cls)
        operation.func = func
        operation.args, operation.kwargs = (_View(tensor), *args), kwargs
        operation.outputs = []
        operation.reads = operation.writes = {tensor.untyped_storage()._cdata}
        operation.generator, operation.state = kwargs.get("generator"), None
        return operation

    @property
    def changes_something(self) -> bool:
        """Whether it makes or changes a storage, and is not only a view of one."""
        return self.func._schema.is_mutable or bool(self.writes - self.reads)

    def remember_state(self) -> None:
        """Keep the generator's state, then advance it as the real operation would."""
        generator = self.generator or torch.default_generator
        self.state = generator.get_state()
        self._call({})

    def replay(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Run for real, from the generator's state of then."""
        if self.state is not None:
            (self.generator or torch.default_generator).set_state(self.state)
        results = self._call(storages)
        for view, out in zip(self.outputs, results, strict=False):
            target = view.on(storages)
            if target.data_ptr() != out.data_ptr():
                target.copy_(out)

    def _call(self, storages: dict[int, torch.UntypedStorage]) -> list[torch.Tensor]:
        args, kwargs = tree_map(
            lambda leaf: leaf.on(storages) if isinstance(leaf, _View) else leaf, (self.args, self.kwargs)
        )
        with torch.no_grad():
            results = tree_flatten(self.func(*args, **kwargs))[0]
        return [out for out in results if isinstance(out, torch.Tensor)]


class _Factories(TorchFunctionMode):
    """Puts what the parameter factories make on meta, unless the caller names a device.

    Some of torch's initialisers return at once for a meta tensor; here they must run to be recorded.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DEFERRED_FACTORIES and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        if func == IS_META and sys._getframe(1).f_globals.get("__name__") == nn.init.__name__:
            return False
        return func(*args, **kwargs)


class _Recording(TorchDispatchMode):
    """Runs operations on meta and keeps those that make or change a meta tensor, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        touches_meta = any(_is_meta(leaf) for leaf in tree_flatten((args, kwargs))[0])
        if touches_meta and name in DATA_DEPENDENT:
            raise DeferredInitError(
                f"inside sharded_init() the model's construction asks for a parameter's value ({name}), "
                "which is not there yet; move that part after shard(), or build outside sharded_init()"
            )
        shape_args, shape_kwargs = tree_map(_to_meta, (args, kwargs)) if touches_meta else (args, kwargs)
        outputs = func(*shape_args, **shape_kwargs)
        if touches_meta or any(_is_meta(out) for out in tree_flatten(outputs)[0]):
            self._record(_Operation(func, args, kwargs, outputs))
        return outputs

    def _record(self, operation: _Operation) -> None:
        if not operation.changes_something:
            return
        if torch.Tag.nondeterministic_seeded in operation.func.tags:
            operation.remember_state()
        self.keep(operation)

    def keep(self, operation: _Operation) -> None:
        """Add ``operation`` to the record."""
        self.operations.append(operation)
        for key in operation.writes:
            _recordings[key] = self

    def replay(self, wanted: Sequence[_View]) -> list[torch.Tensor]:
        """Make the wanted tensors, and of the rest only what they need."""
        needed = {view.key for view in wanted}
        chosen = []
        for operation in reversed(self.operations):
            if operation.writes & needed:
                needed |= operation.reads
                chosen.append(operation)
        storages: dict[int, torch.UntypedStorage] = {}
        for operation in reversed(chosen):
            operation.replay(storages)
        return [view.on(storages) for view in wanted]


# Storages of deferred tensors, by address, and the recording that can make them. A recording holds its
# meta storages, so addresses stay theirs; materialize() drops what it has made.
_recordings: dict[int, _Recording] = {}


@contextmanager
def sharded_init() -> Iterator[None]:
    """Inside, parameters live on the meta device and take no memory; their initialisation is recorded.

    :func:`ds_zero.shard` later makes them unit by unit, bit for bit as a plain construction with the same
    seed would have. The random generator advances as in a plain construction. Custom initialisers work as
    long as they do not look at values.

    Raises:
        DeferredInitError: the construction asks for a parameter's value.
    """
    with _Recording() as recording, _Factories(), _truncated_normal(recording):
        yield


@contextmanager
def _truncated_normal(recording: _Recording) -> Iterator[None]:
    """Record ``trunc_normal_`` as a whole.

    It rejects samples by value, so its single operations cannot run on meta. Its inner function is exchanged
    for the time of the context.
    """
    original = getattr(nn.init, TRUNCATED_NORMAL, None)

    def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if original is None or not tensor.is_meta:
            return original(tensor, *args, **kwargs)  # type: ignore[misc]
        operation = _Operation.of_initialiser(original, tensor, *args, **kwargs)
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            operation.remember_state()
        recording.keep(operation)
        return tensor

    if original is not None:
        setattr(nn.init, TRUNCATED_NORMAL, record)
    try:
        yield
    finally:
        if original is not None:
            setattr(nn.init, TRUNCATED_NORMAL, original)


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` was made inside :func:`sharded_init` and has no values yet."""
    return tensor.is_meta and tensor.untyped_storage()._cdata in _recordings


def materialize(tensors: Sequence[torch.Tensor], device: str = "cpu") -> list[torch.Tensor]:
    """Real values of deferred tensors; the random generators are left as they are.

    Args:
        tensors: deferred ones; others are given back as they are.
        device: where to put the values.
    """
    made: dict[int, torch.Tensor] = {}
    groups: dict[_Recording, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if is_deferred(tensor):
            groups.setdefault(_recordings[tensor.untyped_storage()._cdata], []).append(index)
    state = torch.get_rng_state()
    try:
        for recording, indices in groups.items():
            values = recording.replay([_View(tensors[index]) for index in indices])
            made |= dict(zip(indices, values, strict=True))
    finally:
        torch.set_rng_state(state)
    return [made[index].to(device) if index in made else tensor for index, tensor in enumerate(tensors)]


def forget(tensors: Sequence[torch.Tensor]) -> None:
    """Drop what is recorded for deferred tensors that have been made and will not be asked for again."""
    for tensor in tensors:
        if is_deferred(tensor):
            del _recordings[tensor.untyped_storage()._cdata]


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _as_view(value: Any) -> Any:
    return _View(value) if _is_meta(value) else value


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) and value.dim() else value


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    device = kwargs.get("device")
    return (
        {**kwargs, "device": torch.device("cpu")}
        if device is not None and torch.device(device).type == "meta"
        else kwargs
    )


def _written(func: Any, args: Any, kwargs: Any) -> set[int]:
    """Storages of meta tensors that the operator's schema says it changes."""
    keys = set()
    for argument, value in zip(
        func._schema.arguments, [*args, *[None] * len(func._schema.arguments)], strict=False
    ):
        given = kwargs.get(argument.name, value)
        if argument.alias_info is not None and argument.alias_info.is_write and _is_meta(given):
            keys.add(given.untyped_storage()._cdata)
    return keys
