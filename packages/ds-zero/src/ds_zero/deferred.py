"""Build a model without its memory: parameters on meta, every operation that made them recorded for later.

The public calls, and the check that nothing changed after the record ended. What is recorded and how it is
replayed: :mod:`ds_zero.tracing` and :mod:`ds_zero.recording`.
"""

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.weak import WeakTensorKeyDictionary

from ds_zero.recording import DeferredInitError, View, drop_history, history_of, values_of
from ds_zero.tracing import Factories, Recording

__all__ = ["DeferredInitError", "forget", "is_deferred", "materialize", "sharded_init"]

logger = logging.getLogger(__name__)

# A real parameter above this size is worth a word: the context was meant to save its memory.
LARGE_BYTES = 1 << 20

_active = threading.local()
# Versions that registered tensors had when the context ended, to notice changes that nobody recorded.
_sealed = WeakTensorKeyDictionary()


@contextmanager
def sharded_init() -> Iterator[None]:
    """Inside, parameters live on the meta device and take no memory; their initialisation is recorded.

    :func:`ds_zero.shard` later makes them unit by unit, bit for bit as a plain construction with the same
    seed would have. The random generator advances as in a plain construction, each random operation on
    scratch memory of one tensor. Custom initialisers work as long as they do not look at values. What names a
    device, and small tables from ``torch.arange``, ``torch.tensor``, ``torch.linspace``, stay real.

    Changes to parameters belong inside the context: later ones are not recorded.

    Raises:
        DeferredInitError: the construction asks for a parameter's value.
    """
    if getattr(_active, "recording", False):
        yield  # inside another one, which records all
        return
    _active.recording = True
    try:
        with ExitStack() as stack:
            stack.enter_context(_seal_at_the_end())
            stack.enter_context(Recording())
            stack.enter_context(Factories())
            yield
    finally:
        _active.recording = False


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` was made inside :func:`sharded_init` and has no values yet."""
    return history_of(tensor) is not None


def materialize(tensors: Sequence[torch.Tensor], device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Real values of deferred tensors, bit for bit those of a plain construction.

    Replays what these tensors need and nothing else, and holds no more memory than that takes; tensors that
    share storage share it again on the CPU. The random generators are left as they are, the tensors remain
    deferred. The caller wraps parameters and sets ``requires_grad``.

    Args:
        tensors: deferred ones; real ones are given back as they are.
        device: where to put the values.

    Raises:
        DeferredInitError: a meta tensor without a record, one that was changed after the context had ended,
            or one whose initialisation read a tensor that has changed since.
    """
    deferred = [index for index, tensor in enumerate(tensors) if tensor.is_meta]
    for index in deferred:
        _check_can_be_made(tensors[index])
    values = values_of([View(tensors[index]) for index in deferred])
    made = dict(zip(deferred, values, strict=True))
    return [made[index].to(device) if index in made else tensor for index, tensor in enumerate(tensors)]


def forget(tensors: Sequence[torch.Tensor]) -> None:
    """Drop what is recorded for deferred tensors that have been made and will not be asked for again."""
    for tensor in tensors:
        if is_deferred(tensor):
            drop_history(tensor)


def _check_can_be_made(tensor: torch.Tensor) -> None:
    shape = tuple(tensor.shape)
    if history_of(tensor) is None:
        raise DeferredInitError(
            f"a meta tensor of shape {shape} has no recorded values: it was made, cast or moved outside "
            "sharded_init(); do that inside the context"
        )
    if tensor in _sealed and tensor._version != _sealed[tensor]:
        raise DeferredInitError(
            f"a deferred parameter of shape {shape} was changed after sharded_init() had ended, where it "
            "is not recorded; make the change inside the context, or after shard() in ds_zero.gathered(...)"
        )


@contextmanager
def _seal_at_the_end() -> Iterator[None]:
    """Note the versions of the parameters and buffers registered inside, by torch's registration hooks."""
    stale = {id(tensor) for tensor, version in _sealed.items() if tensor._version != version}
    registered: list[weakref.ref[torch.Tensor]] = []

    def note(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None or tensor.is_inference():
            return
        if tensor.is_meta:
            registered.append(weakref.ref(tensor))
        elif isinstance(tensor, nn.Parameter) and tensor.nbytes > LARGE_BYTES:
            logger.warning(
                "%s.%s takes %d bytes although built inside sharded_init(): use torch.empty without a device",
                *(type(module).__name__, name, tensor.nbytes),
            )

    hooks = [
        nn_module.register_module_parameter_registration_hook(note),
        nn_module.register_module_buffer_registration_hook(note),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        tensors = [*_sealed, *(tensor for ref in registered if (tensor := ref()) is not None)]
        for tensor in tensors:
            if id(tensor) not in stale:
                _sealed[tensor] = tensor._version
