"""One flat buffer of gradients: filled by backward, reduced to the owner's slice, accumulated there."""

import enum
from collections.abc import Callable

import torch

from ds_comm import Handle
from ds_zero.buffers import BufferPool, Ledger
from ds_zero.config import ZeroOptions
from ds_zero.errors import InternalError
from ds_zero.layout import ALIGN_NUMEL
from ds_zero.parameters import FlatParameters
from ds_zero.states import Place

# F = flat buffer (padded), S = F // world_size


class Fill(enum.Enum):
    """Whether one parameter's place in the full gradient buffer holds this window's gradient."""

    NONE = "none"  # stale
    SHARED = "shared"  # holds it, and ``parameter.grad`` is a view of it: autograd adds in place
    TAKEN = "taken"  # holds it, and ``parameter.grad`` is None again


class FlatGradients:
    """Gradients of one trainable flat, between backward and the optimizer.

    A window is the time from the first gradient that arrives to the reduction; under ``no_sync`` it spans
    several backwards. Each reduction adds to ``shard``, so accumulation is in fp32 and in the order of the
    micro-batches at every stage.

    Attributes:
        dtype: of this rank's own gradient, and on the wire.
        full: F elements in ``dtype``, this rank's own gradient; kept at stages 0 and 1, taken from the pool
            for a window at stages 2 and 3.
        shard: S elements in the accumulation dtype (fp32 unless asked otherwise), the mean over ranks summed
            over reductions; at stages 0 and 1 in fp32 the owned slice of ``full`` until a second reduction
            needs both. ``None`` while it is kept in ``place``.
        place: where the reduced gradient is kept between reductions and the step, if not on the device.
        num_reduced: reductions since the last ``zero``.
        pending: slots whose gradient has not arrived in this backward.
    """

    def __init__(
        self,
        flat: FlatParameters,
        *,
        options: ZeroOptions,
        pool: BufferPool,
        ledger: Ledger,
        place: Place | None = None,
    ) -> None:
        self.flat = flat
        self.place = place
        self.full: torch.Tensor | None = None
        self.shard: torch.Tensor | None = None
        self.whole: torch.Tensor | None = None  # stage 0: F elements, the reduced gradient of everyone
        self.num_reduced = 0
        self.pending: set[int] = set()
        self._fill = [Fill.NONE] * len(flat.parameters)
        self._touched = [False] * len(flat.parameters)
        self._pool = pool
        self._ledger = ledger
        self._keeps_full = options.stage <= 1
        self._steps_everything = options.stage == 0
        precision = options.precision
        self.dtype = precision.grad_dtype if precision.grad is not None else flat.dtype
        narrow = self.dtype is not torch.float32
        self._reduce_dtype = precision.reduce_dtype if narrow else torch.float32
        self._accumulate_dtype = precision.accumulate_dtype if narrow else torch.float32
        self._handle: Handle | None = None
        self._out: torch.Tensor | None = None
        self._out_is_pooled = False
        self._squares = 0.0

    @property
    def is_stepped_apart(self) -> bool:
        """Whether the optimizer has to step this flat on its own."""
        apart = self.flat.states is not None or self.place is not None
        return apart or self._accumulate_dtype is not torch.float32

    @property
    def touched(self) -> list[bool]:
        """Per parameter, whether this rank got a gradient for it since the last ``zero``."""
        return self._touched

    @property
    def has_open_window(self) -> bool:
        """Whether gradients wait for their reduction."""
        return any(fill is not Fill.NONE for fill in self._fill)

    def begin_backward(self) -> None:
        """Expect a gradient of every parameter."""
        self.pending = set(range(len(self._fill)))

    def accept(self, index: int, *, keep: bool) -> None:
        """Take the gradient autograd just put on parameter ``index``.

        Args:
            index: slot of the parameter.
            keep: leave a view of the buffer as ``parameter.grad``, so that the next backward adds in place.
        """
        parameter = self.flat.parameters[index]
        grad = parameter.grad
        if grad is None:
            return
        if grad.layout is not torch.strided:
            name = self.flat.layout.slots[index].name
            raise TypeError(f"{name} got a {grad.layout} gradient; ds-zero needs dense ones (sparse=False)")
        view = self._view(index)
        keep = keep and view.dtype is grad.dtype
        if self._fill[index] is Fill.TAKEN:
            view.add_(grad)
        elif grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
        self._fill[index] = Fill.SHARED if keep else Fill.TAKEN
        self._touched[index] = True
        parameter.grad = view if keep else None
        self.pending.discard(index)

    def _view(self, index: int) -> torch.Tensor:
        slot = self.flat.layout.slots[index]
        return self.flat.view(self._open(), slot.start_numel, slot.numel).view(slot.shape)

    def _open(self) -> torch.Tensor:
        if self.full is None:
            self.full = self._pool.take(self.flat.layout.padded_numel, self.dtype)
        if self._shard_is_view() and self.num_reduced and not self.has_open_window:
            self._separate_shard()
        return self.full

    def _shard_is_view(self) -> bool:
        return (
            self.shard is not None
            and self.full is not None
            and self.shard.data_ptr() == self._own().data_ptr()
        )

    def _separate_shard(self) -> None:
        reduced = self.shard
        self.shard = self._new_shard()
        if reduced is not None:
            self.shard.copy_(reduced)

    def _own(self) -> torch.Tensor:
        first, last = self.flat.shard_range
        return self._open_full()[first:last]

    def _open_full(self) -> torch.Tensor:
        return self._open() if self.full is None else self.full

    def _new_shard(self) -> torch.Tensor:
        shard = torch.zeros(
            self.flat.layout.shard_numel, dtype=self._accumulate_dtype, device=self.flat.comm.device
        )
        self._ledger.add("gradients", shard.nbytes)
        return shard

    def start_reduce(self) -> None:
        """Post the reduce-scatter of this window; what no backward reached counts as zero.

        Collective: every rank, in the reducer's order.
        """
        full = self._open()
        self._zero_unfilled(full)
        if self.place is not None:
            self._start_reduce_elsewhere(full)
            return
        if self.shard is None:
            in_place = self._keeps_full and full.dtype is self._accumulate_dtype
            self.shard = self._own() if in_place else self._new_shard()
        self._out_is_pooled = False
        if self.num_reduced == 0 and self._reduce_dtype is self.shard.dtype:
            self._out = self.shard
        elif self._reduce_dtype is full.dtype:
            self._out = self._own()
        else:
            self._out = self._pool.take(self.flat.layout.shard_numel, self._reduce_dtype)
            self._out_is_pooled = True
        self._post(self._out, full)

    def _start_reduce_elsewhere(self, full: torch.Tensor) -> None:
        if self.num_reduced and self.place is not None:
            self.place.fetch()
        self._out = self._pool.take(self.flat.layout.shard_numel, self._reduce_dtype)
        self._out_is_pooled = True
        self._post(self._out, full)

    def _post(self, out: torch.Tensor, full: torch.Tensor) -> None:
        tag = f"{self.flat.label} gradients"
        self._handle = self.flat.moves.reduce_async(out, full, tag=tag)

    def _zero_unfilled(self, full: torch.Tensor) -> None:
        for index, fill in enumerate(self._fill):
            if fill is Fill.NONE:
                self._view(index).zero_()
            self.flat.parameters[index].grad = None
            self._fill[index] = Fill.TAKEN
        for first, last in self.flat.layout.gaps():
            full[first:last].zero_()

    def finish_reduce(self) -> None:
        """Wait for the reduction, add it to what earlier windows left, and close the window."""
        if self._handle is None or self._out is None:
            return
        self._handle.wait()
        if self.place is not None:
            self._accumulate_elsewhere(self.place, self._out)
        elif self.shard is not None and self._out is not self.shard:
            if self.num_reduced:
                self.shard.add_(self._out)
            else:
                self.shard.copy_(self._out)
        if self._out_is_pooled:
            self._pool.give(self._out)
        self._handle = self._out = None
        self._out_is_pooled = False
        self.num_reduced += 1
        self._close_window()

    def _accumulate_elsewhere(self, place: Place, out: torch.Tensor) -> None:
        if self.num_reduced:
            kept = self._kept(place.wait())
            kept.add_(out.to(kept.device))
        else:
            kept = self._kept(place.blank()).copy_(out)
        self._squares = _sum_of_squares(kept)
        place.store()

    def _kept(self, raw: torch.Tensor) -> torch.Tensor:
        return raw[: self.flat.layout.shard_numel * self._accumulate_dtype.itemsize].view(
            self._accumulate_dtype
        )

    def sum_of_squares(self) -> float:
        """Of the reduced gradient of this rank's slice."""
        if self.place is not None:
            return self._squares
        return _sum_of_squares(self.shard) if self.shard is not None else 0.0

    def read_shard(self) -> torch.Tensor:
        """The reduced gradient of this rank's slice, wherever it lies; a copy if that is elsewhere."""
        if self.place is not None:
            self.place.fetch()
            shard = self._kept(self.place.wait()).clone()
            self.place.drop()
            return shard
        if self.shard is None:
            raise InternalError(f"{self.flat.label}: no reduced gradient to read")
        return self.shard

    def edit_shard(self, edit: Callable[[torch.Tensor], None]) -> None:
        """Change the reduced gradient of this rank's slice in place, wherever it lies."""
        if self.place is None:
            edit(self.read_shard())
            return
        self.place.fetch()
        kept = self._kept(self.place.wait())
        edit(kept)
        self._squares = _sum_of_squares(kept)
        self.place.store()

    def stepped_gradient(self) -> torch.Tensor:
        """The reduced gradient of the elements that this rank steps.

        Collective at stage 0: every rank, flats in the same order.
        """
        return self.gather_whole() if self._steps_everything else self.read_shard()

    def _close_window(self) -> None:
        self._fill = [Fill.NONE] * len(self._fill)
        if not self._keeps_full and self.full is not None:
            self._pool.give(self.full)
            self.full = None

    def gather_whole(self) -> torch.Tensor:
        """Stage 0: the reduced gradient of every element, on every rank.

        Collective: every rank, flats in the same order.
        """
        if self.shard is None or self.full is None:
            raise InternalError(f"{self.flat.label}: no reduced gradient to gather")
        whole = self.full if self.dtype is self.shard.dtype else self.whole
        if whole is None:
            whole = self.flat.comm.allocate(self.flat.layout.padded_numel, self.shard.dtype)
            self._ledger.add("gradients", whole.nbytes)
        self.flat.comm.all_gather(whole, self.shard, tag=f"{self.flat.label} reduced gradients")
        self.whole = whole
        return whole

    def zero(self) -> None:
        """Forget every gradient; memory stays for the next backward."""
        for parameter in self.flat.parameters:
            parameter.grad = None
        self._touched = [False] * len(self._touched)
        self.num_reduced = 0
        self._close_window()


def _sum_of_squares(shard: torch.Tensor) -> float:
    """Sum of squares in fp64 over fp32 norms of aligned rows, so that any slicing gives the same digits."""
    rows = torch.linalg.vector_norm(shard.view(-1, ALIGN_NUMEL), dim=1, dtype=torch.float32)
    return float(rows.double().square().sum())
