"""Which units are gathered when, at stage 3: on demand, ahead in the traced order, within a limit."""

from collections.abc import Iterable, Sequence

from ds_zero.parameters import FlatParameters, ParameterState


class Unit:
    """The flats that are gathered and released together, and who needs them now.

    Attributes:
        pins: how many uses want the unit gathered; released at zero.
        backward_uses: forward calls whose backward is under way.
        in_backward: whether backward holds one of the pins.
        needs_all_gradients: it is held for a use whose end only the parameters' gradients show.
    """

    def __init__(self, label: str, flats: Sequence[FlatParameters]) -> None:
        self.label = label
        self.flats = tuple(flats)
        self.pins = 0
        self.backward_uses: set[int] = set()
        self.in_backward = False
        self.needs_all_gradients = False

    @property
    def is_sharded(self) -> bool:
        """Whether nothing of the unit is gathered or on its way."""
        return all(flat.state is ParameterState.SHARDED for flat in self.flats)

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit's gathered buffers."""
        return sum(flat.full_bytes for flat in self.flats)


class GatherOrder:
    """The order in which units were wanted, to look one ahead.

    Recorded from one reset to the next; used while the same order comes again; a different one is recorded
    anew, so a dynamic graph only loses the look-ahead.
    """

    def __init__(self) -> None:
        self._trace: list[Unit] = []
        self._recording: list[Unit] = []
        self._position = 0
        self._follows = True

    def advance(self, unit: Unit) -> Unit | None:
        """Note that ``unit`` is wanted now; the one expected next, if known."""
        self._recording.append(unit)
        if self._follows and self._position < len(self._trace) and self._trace[self._position] is unit:
            self._position += 1
            return self._trace[self._position] if self._position < len(self._trace) else None
        self._follows = False
        return None

    def expected(self, ahead: int) -> Unit | None:
        """The unit expected ``ahead`` places after the next one."""
        position = self._position + ahead
        return self._trace[position] if self._follows and position < len(self._trace) else None

    def reset(self) -> None:
        """A pass over the model is over; the next is expected to be like it."""
        if not self._follows or not self._trace:
            self._trace = self._recording
        self._recording = []
        self._position = 0
        self._follows = True


class Gatherer:
    """Gathers units and releases them; every rank in the same order."""

    def __init__(self, units: Iterable[Unit], *, max_gathered_units: int) -> None:
        self._units = [unit for unit in units if unit.flats]
        self._limit = max_gathered_units
        self._order = GatherOrder()
        self.peak_gathered_units = 0

    @property
    def num_gathered(self) -> int:
        """Units gathered now or on their way."""
        return sum(not unit.is_sharded for unit in self._units)

    def pin(self, unit: Unit) -> None:
        """Have ``unit`` gathered until the matching :meth:`unpin`.

        Collective when the unit is not gathered: every rank, same order.
        """
        unit.pins += 1
        if not unit.flats:
            return
        wanted = unit.pins == 1
        if wanted and unit.is_sharded:
            self._drop_ahead()
        for flat in unit.flats:
            flat.start_gather()
        if wanted:
            self._look_ahead(unit)
        for flat in unit.flats:
            flat.finish_gather()

    def _drop_ahead(self) -> None:
        """Release what was gathered ahead: another unit is wanted, so the guess was wrong."""
        for unit in self._units:
            if unit.pins == 0:
                for flat in unit.flats:
                    flat.release()

    def _look_ahead(self, unit: Unit) -> None:
        following = self._order.advance(unit)
        if following is not None and following.is_sharded and self.num_gathered < self._limit:
            for flat in following.flats:
                flat.start_gather()
        beyond = self._order.expected(1) if following is not None else None
        if beyond is not None:
            for flat in beyond.flats:
                flat.fetch()
        self.peak_gathered_units = max(self.peak_gathered_units, self.num_gathered)

    def unpin(self, unit: Unit) -> None:
        """End one use; the last one releases the memory."""
        unit.pins -= 1
        if unit.pins <= 0:
            unit.pins = 0
            for flat in unit.flats:
                flat.release()

    def end_evaluation(self) -> None:
        """End a pass that has no backward, if it is over."""
        if all(unit.pins == 0 for unit in self._units):
            self.end_pass()

    def end_pass(self) -> None:
        """Release what was gathered ahead and not used, and start the order over."""
        self._drop_ahead()
        self._order.reset()
