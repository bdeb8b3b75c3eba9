"""Where every parameter lies in its flat buffer and which rank owns which elements. Pure."""

# P = elements of one parameter, F = flat buffer (padded), S = F // world_size

from collections.abc import Iterator, Sequence

import msgspec

# Every parameter starts at, and every slice boundary falls on, a multiple of this many elements. So a vector
# loop and the rows of the gradient norm see the same groups of elements whatever the stage, the world size
# or the bucket, and give the same bits. 1 KiB in fp32.
ALIGN_NUMEL = 256


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """Where one parameter lies inside the flat buffer."""

    name: str
    shape: tuple[int, ...]
    start_numel: int
    numel: int

    @property
    def stop_numel(self) -> int:
        """One past the last element of the parameter, without its padding."""
        return self.start_numel + self.numel


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one parameter that one rank owns."""

    slot_index: int
    start_numel: int  # in the flat buffer
    numel: int


class FlatLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One flat buffer: slots in order, the padded length, and equal slices for the ranks."""

    slots: tuple[Slot, ...]
    padded_numel: int
    world_size: int

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's slice, S."""
        return self.padded_numel // self.world_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        """First element and one past the last of ``rank``'s slice."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def pieces(self, start_numel: int, stop_numel: int) -> Iterator[Piece]:
        """The parameters' parts inside ``[start_numel, stop_numel)``; empty parts are left out."""
        for index, slot in enumerate(self.slots):
            first = max(slot.start_numel, start_numel)
            last = min(slot.stop_numel, stop_numel)
            if first < last:
                yield Piece(slot_index=index, start_numel=first, numel=last - first)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The padding: ranges that belong to no parameter."""
        position = 0
        for slot in self.slots:
            if slot.start_numel > position:
                yield position, slot.start_numel
            position = slot.stop_numel
        if self.padded_numel > position:
            yield position, self.padded_numel


def plan_flat_layout(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    *,
    world_size: int,
    align_numel: int = ALIGN_NUMEL,
) -> FlatLayout:
    """Lay parameters end to end, each on an aligned start, and pad the tail to equal aligned slices.

    Pure: every rank computes the same answer from the same shapes, so nothing is broadcast.

    Args:
        names: qualified parameter names in registration order.
        shapes: their shapes; zero-element shapes allowed.
        world_size: ranks that share the buffer, >= 1.
        align_numel: alignment of starts and slices in elements.

    Returns:
        One slot per parameter, in order; ``padded_numel % (world_size * align_numel) == 0``.

    Raises:
        ValueError: ``world_size`` is below 1, or names and shapes differ in length.

    Source: ZeRO, arXiv:1910.02054, section 5.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    slots = []
    position = 0
    for name, shape in zip(names, shapes, strict=True):
        numel = 1
        for size in shape:
            numel *= size
        slots.append(Slot(name=name, shape=tuple(shape), start_numel=position, numel=numel))
        position = round_up(position + numel, align_numel)
    padded = round_up(position, world_size * align_numel)
    return FlatLayout(slots=tuple(slots), padded_numel=padded, world_size=world_size)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple
