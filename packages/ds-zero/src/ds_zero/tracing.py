"""What a model's construction does while its parameters live on meta: seen, recorded, or refused.

Two modes of torch, nothing exchanged: one sees the calls of Python, the other what reaches a device. Records
and their replay are in :mod:`ds_zero.recording`.
"""

import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ds_zero.recording import (
    RANDOM_FILLS,
    Constant,
    DeferredInitError,
    Operation,
    View,
    begin_history,
    is_bare,
    operator_name,
    values_of,
)

# Factories that make parameters. Small tables (torch.arange, torch.tensor, ...) stay real: they cost nothing.
DEFERRED_FACTORIES = frozenset(
    [
        torch.empty,
        torch.empty_strided,
        torch.eye,
        torch.full,
        torch.ones,
        torch.rand,
        torch.randn,
        torch.zeros,
    ]
)
ALLOCATIONS = frozenset(
    ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"]
)
# For fills with normal numbers torch has no meta kernel: asked for one, it imports its symbolic shapes, which
# takes seconds. The shape is that of:
NORMAL = {"randn": torch.ops.aten.empty.memory_format}
META = torch.device("meta")
# Besides those that torch tags so: in-place changes of the geometry only; the storage keeps its values.
GEOMETRY = frozenset(["resize_", "resize_as_", "set_"])
IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# Calls that turn a tensor into Python values.
LOOKS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("__array__", "__bool__", "__complex__", "__float__", "__index__", "__int__"),
        *("item", "numpy", "tolist"),
    )
)
ADVICE = (
    "its value is not there before shard(); move that part after shard(), draw decisions from Python's "
    "random, or name device='cpu' where a small tensor is made that must be real"
)

OWN_FOLDERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


class Factories(TorchFunctionMode):
    """Sees the calls of Python: puts factories on meta unless a device is named, refuses looks at values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if is_bare():
            return func(*args, **kwargs)
        if func in DEFERRED_FACTORIES and kwargs.get("device") is None and kwargs.get("out") is None:
            kwargs["device"] = "meta"
        elif func == IS_META and args[0].is_meta:
            self._record_initialiser(sys._getframe(1))
        elif func in LOOKS and _is_meta(args[0]):
            return _look(func, args, kwargs)
        elif func == SET_DATA and args[0].is_meta is not args[1].is_meta:
            args = (args[0], _value(args[1]) if args[1].is_meta else _deferred_copy(args[1]))
        return func(*args, **kwargs)

    def _record_initialiser(self, caller: FrameType) -> None:
        """Record a function of ``torch.nn.init`` as a whole where it is about to leave out a meta tensor.

        Those that ask ``is_meta`` sample by value or element by element, so their single operations would not
        do. The caller's arguments are all that is needed to call it again.
        """
        code = caller.f_code
        function: Any = getattr(nn.init, code.co_name, None)
        if getattr(function, "__code__", None) is not code:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        tensor, *others = (caller.f_locals[name] for name in names)
        view = View(tensor)
        operation = Operation(function, (view,), dict(zip(names[1:], others, strict=True)), writes=[view])
        operation.advance_generator()
        operation.add()


class Recording(TorchDispatchMode):
    """Sees what reaches a device: runs it on meta, and records what makes or changes a meta tensor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's switch: without it the first operation imports the whole compiler, for seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self._constants: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.WeakSet[Constant]] = (
            weakref.WeakKeyDictionary()
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_bare():
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        real_written = [tensor for tensor in written if not tensor.is_meta]
        for tensor in real_written:
            for constant in self._constants.pop(tensor.untyped_storage(), ()):
                constant.keep_copy()
        touches_meta = any(_is_meta(leaf) for leaf in tree_flatten((args, kwargs))[0])
        if not touches_meta:
            makes_meta = kwargs.get("device") == META
            outputs = _run_on_meta(func, args, kwargs) if makes_meta else func(*args, **kwargs)
            self._record(func, args, kwargs, written=[], outputs=outputs)
            return outputs
        if real_written:
            return _run_for_real(func, args, kwargs, written)
        if _needs_values(func, args, kwargs):
            return _look(func, args, kwargs)
        outputs = _run_on_meta(func, args, kwargs)
        self._record(func, args, kwargs, written=written, outputs=outputs)
        return outputs

    def _record(
        self, func: Any, args: Any, kwargs: Any, *, written: Sequence[torch.Tensor], outputs: Any
    ) -> None:
        """Keep the operation if it makes a meta storage or writes to one; views need no record."""
        results = [out for out in tree_flatten(outputs)[0] if _is_meta(out)]
        if not results and not written:
            return
        name = operator_name(func)
        if name in GEOMETRY or torch.Tag.inplace_view in func.tags:
            begin_history(args[0], known=True)
            return
        # In this order: what the arguments lie on is not made here.
        views = {id(leaf): View(leaf) for leaf in tree_flatten((args, kwargs))[0] if _is_meta(leaf)}
        old = {view.history for view in views.values()}
        made = [View(out, made_here=True) for out in results]
        if name in ALLOCATIONS or not (written or any(view.history not in old for view in made)):
            return
        args, kwargs = tree_map(lambda leaf: self._stand_in(leaf, views), (args, _on_cpu(kwargs)))
        targets = [views[id(tensor)] for tensor in written]
        operation = Operation(func, args, kwargs, outputs=made, writes=targets)
        if torch.Tag.nondeterministic_seeded in func.tags:
            operation.advance_generator()
        operation.add()

    def _stand_in(self, leaf: Any, views: dict[int, View]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_meta:
            return views[id(leaf)]
        constant = Constant(leaf)
        if constant.version >= 0:
            self._constants.setdefault(leaf.untyped_storage(), weakref.WeakSet()).add(constant)
        return constant


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _value(tensor: torch.Tensor) -> torch.Tensor:
    return values_of([View(tensor)])[0]


def _deferred_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta").copy_(tensor)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that the operator's schema says it changes, those in lists among them."""
    if not func._schema.is_mutable:
        return []
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, torch.Tensor)]
    return written


def _needs_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether what the operator returns, or its shape, depends on the values of a meta tensor."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if operator_name(func) != "index":
        return True
    masks = tree_flatten((args[1:], kwargs))[0]
    return any(_is_meta(mask) and mask.dtype in (torch.bool, torch.uint8) for mask in masks)


def _run_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Results of the right shape. Real arguments go to meta, but for scalars and for what picks elements."""
    name = operator_name(func)
    if name in RANDOM_FILLS:
        return args[0]
    if name in NORMAL:
        return NORMAL[name](*args, **{key: value for key, value in kwargs.items() if key != "generator"})

    def shaped(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.is_meta or not leaf.dim():
            return leaf
        picks = "index" in name and not (leaf.is_floating_point() or leaf.is_complex())
        return leaf if picks else leaf.to("meta")

    meta_args, meta_kwargs = tree_map(shaped, (args, kwargs))
    if name == "_to_copy" and kwargs.get("device") is not None:
        meta_kwargs = {**meta_kwargs, "device": META}
    try:
        return func(*meta_args, **meta_kwargs)
    except NotImplementedError:
        if func._schema.is_mutable:
            raise _value_needed(name) from None
    with torch.random.fork_rng(devices=[]):  # torch knows no shape for it: make the inputs and see
        results = func(*_real((args, kwargs))[0], **_on_cpu(_real((args, kwargs))[1]))
    return tree_map(lambda out: _like(out) if isinstance(out, torch.Tensor) else out, results)


def _look(func: Any, args: Any, kwargs: Any) -> Any:
    """Values for torch's own checks, such as ``parametrizations.orthogonal`` makes; an error for others."""
    *inner, _ = _frames_to_the_user()
    if not any(str(frame.f_globals.get("__name__")).startswith("torch.nn.") for frame in inner):
        raise _value_needed(operator_name(func))
    args, kwargs = _real((args, kwargs))
    return func(*args, **kwargs)


def _run_for_real(func: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> Any:
    """A real tensor takes values from deferred ones: those are made for that, and dropped."""
    if any(tensor.is_meta for tensor in written):
        raise DeferredInitError(
            f"{operator_name(func)} at {_user_line()} changes real and deferred tensors in one call; split it"
        )
    args, kwargs = _real((args, kwargs))
    return func(*args, **kwargs)


def _real(tree: Any) -> Any:
    """``tree`` with values in the place of its deferred tensors."""
    deferred = [leaf for leaf in tree_flatten(tree)[0] if _is_meta(leaf)]
    values = dict(zip(map(id, deferred), values_of([View(leaf) for leaf in deferred]), strict=True))
    return tree_map(lambda leaf: values.get(id(leaf), leaf), tree)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _value_needed(call: str) -> DeferredInitError:
    looks_at = f"{call} at {_user_line()} looks at a tensor built inside sharded_init()"
    return DeferredInitError(f"{looks_at}: {ADVICE}")


def _frames_to_the_user() -> list[FrameType]:
    """The stack from here to the innermost line that is neither torch's nor ours, that one last."""
    frames = [sys._getframe(1)]
    while frames[-1].f_code.co_filename.startswith(OWN_FOLDERS) and frames[-1].f_back is not None:
        frames.append(frames[-1].f_back)
    return frames


def _user_line() -> str:
    frame = _frames_to_the_user()[-1]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
