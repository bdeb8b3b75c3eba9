"""Master weights and moments that do not lie beside the parameters: on the CPU, in files, or narrower."""

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch

from ds_zero.buffers import BufferPool
from ds_zero.errors import InternalError
from ds_zero.layout import FlatLayout
from ds_zero.rounding import round_stochastically

# S = elements that this rank steps of one flat
MASTER = "master"
# What stands in the optimizer's state for a moment that is kept elsewhere.
ELSEWHERE = torch.empty(0)


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of S elements among a flat's states.

    Attributes:
        name: ``master``, or the optimizer's name of a moment.
        dtype: in which it is kept between steps.
        start_byte: where it begins in the raw buffer.
    """

    name: str
    dtype: torch.dtype
    start_byte: int


def plan_components(
    numel: int, *, with_master: bool, moments: Sequence[str], dtype: torch.dtype
) -> tuple[Component, ...]:
    """Lay master weights (fp32) and moments (``dtype``) of ``numel`` elements end to end. Pure."""
    components: list[Component] = []
    position = 0
    for name in ([MASTER] if with_master else []) + list(moments):
        kind = torch.float32 if name == MASTER else dtype
        components.append(Component(name=name, dtype=kind, start_byte=position))
        position += numel * kind.itemsize
    return tuple(components)


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A run of elements in a flat's states that belongs to one parameter.

    Attributes:
        start_numel: where it begins in the states.
        numel: elements.
        key: of the parameter, the same however it is sliced.
        first_numel: position of the first element in the parameter.
    """

    start_numel: int
    numel: int
    key: int
    first_numel: int


def plan_spans(layout: FlatLayout, start_numel: int, stop_numel: int) -> tuple[Span, ...]:
    """The parameters' parts among the elements ``[start_numel, stop_numel)`` of a flat. Pure."""
    spans = []
    for piece in layout.pieces(start_numel, stop_numel):
        slot = layout.slots[piece.slot_index]
        span = Span(
            start_numel=piece.start_numel - start_numel,
            numel=piece.numel,
            key=zlib.crc32(slot.name.encode()),
            first_numel=piece.start_numel - slot.start_numel,
        )
        spans.append(span)
    return tuple(spans)


class Place(Protocol):
    """Where a flat's states lie between steps, as raw bytes."""

    def fetch(self) -> None:
        """Start to bring the bytes."""

    def wait(self) -> torch.Tensor:
        """The bytes, 1-D uint8, the caller's until :meth:`store` or :meth:`drop`."""
        ...

    def blank(self) -> torch.Tensor:
        """Memory for new bytes, contents unspecified, the caller's until :meth:`store`."""
        ...

    def store(self) -> None:
        """Start to put changed bytes back."""

    def drop(self) -> None:
        """Let go of bytes that were only read."""


class ResidentPlace:
    """States that stay in memory, on the device or on the CPU."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._raw = raw

    def fetch(self) -> None:
        """Nothing to bring."""

    def wait(self) -> torch.Tensor:
        """The memory itself."""
        return self._raw

    def blank(self) -> torch.Tensor:
        """The memory itself."""
        return self._raw

    def store(self) -> None:
        """Nothing to put back."""

    def drop(self) -> None:
        """Nothing to let go."""


class FlatStates:
    """The states of one flat: opened for its step, closed after it.

    Args:
        numel: S, elements this rank steps.
        components: what is kept.
        place: where.
        pool: gives fp32 buffers for components that are kept narrower.
        spans: whose elements lie where, so that rounding depends on the element and not on how it is sliced.
    """

    def __init__(
        self,
        numel: int,
        components: Sequence[Component],
        place: Place,
        *,
        pool: BufferPool,
        spans: Sequence[Span],
    ) -> None:
        self.numel = numel
        self.components = tuple(components)
        self.place = place
        self._pool = pool
        self._spans = tuple(spans)
        self._raw: torch.Tensor | None = None
        self._open: dict[str, torch.Tensor] = {}
        self._num_stores = 0

    @property
    def has_master(self) -> bool:
        """Whether the master weights are here too."""
        return any(component.name == MASTER for component in self.components)

    @property
    def nbytes(self) -> int:
        """Bytes kept between steps."""
        return sum(self.numel * component.dtype.itemsize for component in self.components)

    def create(self, master: torch.Tensor) -> None:
        """Put the first master weights (S fp32 elements) in place; moments start at zero."""
        tensors = self.open()
        for name, tensor in tensors.items():
            tensor.zero_() if name != MASTER else tensor.copy_(master)
        self.close()

    def fetch(self) -> None:
        """Start to bring the states, so that :meth:`open` need not wait."""
        if self._raw is None:
            self.place.fetch()

    def open(self) -> dict[str, torch.Tensor]:
        """Every component by name as S fp32 elements, until :meth:`close` or :meth:`drop`."""
        if self._raw is not None:
            raise InternalError("states are open already")
        self._raw = self.place.wait()
        for component in self.components:
            kept = self._view(component)
            if component.dtype is torch.float32:
                self._open[component.name] = kept
            else:
                wide = self._pool.take(self.numel, torch.float32)
                self._open[component.name] = wide.copy_(kept)
        return self._open

    def _view(self, component: Component) -> torch.Tensor:
        if self._raw is None:
            raise InternalError("states are not open")
        stop = component.start_byte + self.numel * component.dtype.itemsize
        return self._raw[component.start_byte : stop].view(component.dtype)

    def close(self) -> None:
        """Keep what is in the open tensors."""
        self._num_stores += 1
        for component in self.components:
            if component.dtype is not torch.float32:
                self._narrow(self._open[component.name], self._view(component), component.name)
        self._let_go()
        self.place.store()

    def _narrow(self, wide: torch.Tensor, kept: torch.Tensor, name: str) -> None:
        for span in self._spans:
            first, stop = span.start_numel, span.start_numel + span.numel
            key = (span.key, self._num_stores, zlib.crc32(name.encode()), span.first_numel)
            round_stochastically(wide[first:stop], kept[first:stop], key=key)

    def drop(self) -> None:
        """Forget what is in the open tensors; what was kept stays."""
        self._let_go()
        self.place.drop()

    def _let_go(self) -> None:
        for component in self.components:
            if component.dtype is not torch.float32:
                self._pool.give(self._open[component.name])
        self._open = {}
        self._raw = None


def moments_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the tensors that ``optimizer`` keeps per element, found by a trial step on one parameter.

    The optimizer itself is left as it is.
    """
    return tuple(name for name, _ in trial_state(optimizer))


def trial_state(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """State tensors with one element per parameter element that a first step makes."""
    probe = torch.nn.Parameter(torch.zeros(8, 8))
    probe.grad = torch.ones_like(probe)
    options = ("params", "initial_lr")
    group = {key: value for key, value in optimizer.param_groups[0].items() if key not in options}
    trial = _like(optimizer, [{"params": [probe], **group}])
    trial.step()
    state: dict[str, Any] = trial.state.get(probe, {})
    return [(k, v) for k, v in state.items() if isinstance(v, torch.Tensor) and v.numel() == probe.numel()]


def _like(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings over other parameters."""
    try:
        return type(optimizer)(groups, **optimizer.defaults)
    except TypeError:  # a constructor whose arguments are not the defaults of its groups
        other = type(optimizer).__new__(type(optimizer))
        other.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
        torch.optim.Optimizer.__init__(other, groups, dict(optimizer.defaults))
        return other
