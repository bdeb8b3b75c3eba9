"""Who updates which whole parameter, and which parts travel there: planned from layouts alone. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from ds_zero.layout import FlatLayout


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a dealt parameter on its way between the rank that holds it and the rank that updates it.

    Attributes:
        name: of the parameter.
        flat_index: which layout holds it.
        holder: rank whose slice has the part.
        updater: rank that gets the whole parameter.
        start_numel: in the flat buffer.
        offset_numel: in the parameter.
        numel: elements.
        position_numel: where it lies among the parts from ``holder`` to ``updater``.
    """

    name: str
    flat_index: int
    holder: int
    updater: int
    start_numel: int
    offset_numel: int
    numel: int
    position_numel: int


class Deal(msgspec.Struct, frozen=True, kw_only=True):
    """Every dealt parameter's updater and parts.

    Attributes:
        updaters: parameter name -> rank.
        parts: of all ranks, in the order in which they are packed.
        width_numel: elements that every pair of ranks exchanges, padding included.
    """

    updaters: dict[str, int]
    parts: tuple[Part, ...]
    width_numel: int


def plan_deal(layouts: Sequence[FlatLayout], names: Sequence[str], *, world_size: int) -> Deal:
    """Deal whole parameters to ranks, the largest first to the rank with the fewest elements so far.

    Args:
        layouts: of all flats that hold dealt parameters.
        names: of the parameters to deal.
        world_size: ranks.
    """
    wanted = set(names)
    sizes = {slot.name: slot.numel for layout in layouts for slot in layout.slots if slot.name in wanted}
    updaters = _updaters(sizes, world_size)
    packed: dict[tuple[int, int], int] = {}
    parts: list[Part] = []
    for flat_index, layout in enumerate(layouts):
        for holder in range(world_size):
            for piece in layout.pieces(*layout.shard_range(holder)):
                slot = layout.slots[piece.slot_index]
                if slot.name in wanted:
                    pair = (holder, updaters[slot.name])
                    parts.append(
                        Part(
                            name=slot.name,
                            flat_index=flat_index,
                            holder=holder,
                            updater=pair[1],
                            start_numel=piece.start_numel,
                            offset_numel=piece.start_numel - slot.start_numel,
                            numel=piece.numel,
                            position_numel=packed.get(pair, 0),
                        )
                    )
                    packed[pair] = packed.get(pair, 0) + piece.numel
    return Deal(updaters=updaters, parts=tuple(parts), width_numel=max(packed.values(), default=0))


def _updaters(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    loads = [0] * world_size
    chosen: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # a stable sort: equal sizes keep their order
        rank = min(range(world_size), key=loads.__getitem__)
        chosen[name] = rank
        loads[rank] += sizes[name]
    return chosen
