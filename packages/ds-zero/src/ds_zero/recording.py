"""What was done to storages that have no memory yet, and how to do it for real: records and their replay.

Each meta storage has a history: the operations that wrote to it, in order. An operation remembers which
histories it read and how far they had come, so a tensor's values need its own past and nothing else.
Which operations are recorded is decided in :mod:`ds_zero.deferred`.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from ds_zero.errors import ZeroError

# In-place operations after which nothing is left of what was there before, if they cover the whole storage.
RANDOM_FILLS = frozenset(
    ["cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"]
)
# Functions of torch.nn.init that are recorded whole; they do so too.
INITIALISERS = frozenset(["_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_"])
FILLS = RANDOM_FILLS | INITIALISERS | {"copy_", "fill_", "zero_"}
# Random operations that draw the same numbers whatever is in their input.
BLIND_RANDOM = RANDOM_FILLS | INITIALISERS | {"native_dropout", "rand_like", "randint_like", "randn_like"}
# Real tensors up to this size are copied when an operation uses them; larger ones only once they change.
SMALL_BYTES = 1 << 16


class DeferredInitError(ZeroError):
    """A construction inside :func:`ds_zero.sharded_init` needs, or changes, values that are not there."""


class History:
    """The operations that wrote to one storage, oldest first.

    Attributes:
        nbytes: size of the storage, in bytes; the largest it ever had.
        known: whether it was made inside the context, so that before the first operation it is merely empty.
    """

    __slots__ = ("__weakref__", "known", "nbytes", "operations")

    def __init__(self, nbytes: int, *, known: bool) -> None:
        self.nbytes = nbytes
        self.known = known
        self.operations: list[Operation] = []


# By storage and weakly: the record of a tensor goes when the last tensor on its storage does.
_histories: weakref.WeakKeyDictionary[torch.UntypedStorage, History] = weakref.WeakKeyDictionary()


def history_of(tensor: torch.Tensor) -> History | None:
    """What is recorded for the storage of ``tensor``, if anything that gives it values."""
    if not tensor.is_meta or tensor.layout is not torch.strided:
        return None
    history = _histories.get(tensor.untyped_storage())
    return history if history is not None and (history.known or history.operations) else None


def begin_history(tensor: torch.Tensor, *, known: bool) -> History:
    """The history of a meta tensor's storage, begun now if it has none."""
    storage = tensor.untyped_storage()
    history = _histories.get(storage)
    if history is None:
        history = _histories[storage] = History(storage.nbytes(), known=known)
    history.nbytes = max(history.nbytes, storage.nbytes())
    return history


def drop_history(tensor: torch.Tensor) -> None:
    """Forget how to make the storage of ``tensor``; operations that read it still know."""
    _histories.pop(tensor.untyped_storage(), None)


class View:
    """A meta tensor as a place in a storage: enough to find the same place in the real one."""

    __slots__ = ("conjugate", "covers_all", "dtype", "geometry", "history")

    def __init__(self, tensor: torch.Tensor, *, made_here: bool = False) -> None:
        self.history = begin_history(tensor, known=made_here)
        self.geometry = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self.dtype = tensor.dtype
        self.conjugate = tensor.is_conj()
        self.covers_all = tensor.is_contiguous() and tensor.nbytes == self.history.nbytes

    def on(self, storages: dict[History, torch.UntypedStorage]) -> torch.Tensor:
        """The real tensor, in the storages made so far; made now if this is the first mention."""
        if self.history not in storages:
            storages[self.history] = torch.UntypedStorage(self.history.nbytes)
        tensor = torch.empty(0, dtype=self.dtype).set_(storages[self.history], *self.geometry)
        return tensor.conj() if self.conjugate else tensor

    def receive(self, value: torch.Tensor, storages: dict[History, torch.UntypedStorage]) -> None:
        """Put what an operation returned in this place, without a copy if it can lie where it is."""
        storage = value.untyped_storage()
        place = (value.storage_offset(), tuple(value.shape), value.stride())
        if (
            self.history not in storages
            and place == self.geometry
            and storage.nbytes() == self.history.nbytes
        ):
            storages[self.history] = storage
            return
        target = self.on(storages)
        if target.data_ptr() != value.data_ptr():
            target.copy_(value)


class Constant:
    """A real tensor that an operation uses, with the values it has now."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor  # itself, not an alias: an alias made here would count versions of its own
        self.version = -1
        if self.tensor.nbytes <= SMALL_BYTES:
            self.keep_copy()
        elif not self.tensor.is_inference():
            self.version = self.tensor._version

    def keep_copy(self) -> None:
        """Stop sharing memory with the tensor, which is small or about to change."""
        self.tensor = self.tensor.detach().clone()
        self.version = -1

    def value(self) -> torch.Tensor:
        """The tensor, as it was."""
        if self.version >= 0 and self.tensor._version != self.version:
            raise DeferredInitError(
                f"a tensor of shape {tuple(self.tensor.shape)} that an initialisation inside sharded_init() "
                "read was changed afterwards; leave it as it is until shard() returns, or read a clone"
            )
        return self.tensor


class Operation:
    """One recorded call: its arguments, what it read and wrote, and the generator's state before it.

    Attributes:
        reads: histories whose content it needs, and how many of their operations came before.
        touches: every history in its arguments and results.
        state: the generator's state before a random one, else ``None``.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        outputs: Sequence[View] = (),
        writes: Iterable[View] = (),
    ) -> None:
        self.number = next(self._numbers)
        self.func, self.name = func, operator_name(func)
        self.args, self.kwargs, self.outputs = args, kwargs, outputs
        self.default_dtype = torch.get_default_dtype()
        self.generator: torch.Generator = kwargs.get("generator") or torch.default_generator
        self.state: torch.Tensor | None = None
        views = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, View)]
        self.reads = {view.history: len(view.history.operations) for view in views}
        self.writes = {view.history for view in (*writes, *outputs)}
        self.touches = {*self.reads, *self.writes}
        for view in writes:
            if self.name in FILLS and view.covers_all and view.history not in _sources(args, kwargs):
                self.reads.pop(view.history, None)

    def add(self) -> None:
        """Make this the latest operation of every history that it writes."""
        for history in self.writes:
            history.operations.append(self)

    def advance_generator(self) -> None:
        """Keep the generator's state, then advance it by running once on scratch memory.

        Where the draws depend on the inputs (``bernoulli``, ``multinomial``), they are made for that.
        """
        self.state = self.generator.get_state()
        storages = {} if self.name in BLIND_RANDOM else make(self.reads)
        with bare_torch():
            self._call(storages)

    def replay(self, storages: dict[History, torch.UntypedStorage]) -> None:
        """Run for real in ``storages``, from the generator's state of then."""
        if self.state is not None:
            self.generator.set_state(self.state)
        if self.default_dtype is not torch.get_default_dtype():
            torch.set_default_dtype(self.default_dtype)
        for view, value in zip(self.outputs, self._call(storages), strict=False):
            view.receive(value, storages)

    def _call(self, storages: dict[History, torch.UntypedStorage]) -> list[torch.Tensor]:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, View):
                return leaf.on(storages)
            return leaf.value() if isinstance(leaf, Constant) else leaf

        results = self.func(*tree_map(real, self.args), **tree_map(real, self.kwargs))
        return [value for value in tree_flatten(results)[0] if isinstance(value, torch.Tensor)]


def operator_name(func: Callable[..., Any]) -> str:
    """``normal_`` for ``aten::normal_`` in any overload, and for a Python function its own name."""
    schema = getattr(func, "_schema", None)
    return func.__name__ if schema is None else schema.name.removeprefix("aten::")


def _sources(args: Sequence[Any], kwargs: dict[str, Any]) -> set[History]:
    """Histories in all arguments but the first, which is what an in-place operation writes."""
    leaves = tree_flatten((args[1:], kwargs))[0]
    return {leaf.history for leaf in leaves if isinstance(leaf, View)}


def plan_replay(wanted: dict[History, int]) -> list[Operation]:
    """The operations that bring each history to the wanted count of its own, in the order they were recorded.

    Raises:
        DeferredInitError: one of them reads a meta tensor from outside the context.
    """
    chosen: dict[int, Operation] = {}
    todo = list(wanted.items())
    while todo:
        history, count = todo.pop()
        if count == 0:
            if not history.known:
                raise DeferredInitError(
                    "a parameter built inside sharded_init() takes its values from a meta tensor that was "
                    "made outside and has none; build that one inside too"
                )
            continue
        operation = history.operations[count - 1]
        if operation.number not in chosen:
            chosen[operation.number] = operation
            todo += operation.reads.items()
    return [chosen[number] for number in sorted(chosen)]


def make(wanted: dict[History, int]) -> dict[History, torch.UntypedStorage]:
    """Real storages for the wanted histories; of the rest only what they need, and only while they need it.

    The generators are left as they were.
    """
    operations = plan_replay(wanted)
    last_use = {history: index for index, op in enumerate(operations) for history in op.touches}
    ends: list[list[History]] = [[] for _ in operations]
    for history, index in last_use.items():
        if history not in wanted:
            ends[index].append(history)
    storages: dict[History, torch.UntypedStorage] = {}
    with bare_torch(), _same_generators(operations):
        for operation, done in zip(operations, ends, strict=True):
            operation.replay(storages)
            for history in done:
                storages.pop(history, None)
    return storages


def values_of(views: Sequence[View]) -> list[torch.Tensor]:
    """Real tensors for ``views`` as they are now, sharing storage where these do."""
    storages = make({view.history: len(view.history.operations) for view in views})
    with bare_torch():
        return [view.on(storages) for view in views]


@contextmanager
def _same_generators(operations: Iterable[Operation]) -> Iterator[None]:
    """Give every generator back as it was, and the default dtype."""
    generators = {id(op.generator): op.generator for op in operations if op.state is not None}
    states = [(generator, generator.get_state()) for generator in generators.values()]
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        for generator, state in states:
            generator.set_state(state)


_state = threading.local()


def is_bare() -> bool:
    """Whether this thread is inside :func:`bare_torch`."""
    return getattr(_state, "bare", 0) > 0


@contextmanager
def bare_torch() -> Iterator[None]:
    """Torch as it is on the CPU: no gradient, no default device of the caller's, nothing recorded."""
    _state.bare = getattr(_state, "bare", 0) + 1
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            yield
    finally:
        _state.bare -= 1
