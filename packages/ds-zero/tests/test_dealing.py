"""Dealt parameters: every element travels once, and ranks share the work."""

from hypothesis import given
from hypothesis import strategies as st

from ds_zero.dealing import plan_deal
from ds_zero.homes import leaving
from ds_zero.layout import plan_flat_layout

SHAPES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6)


@given(st.lists(SHAPES, min_size=1, max_size=3), st.integers(1, 4), st.data())
def test_every_element_of_a_dealt_parameter_travels_once(flats, world_size, data):
    layouts = [
        plan_flat_layout([f"{number}.{i}" for i in range(len(shapes))], shapes, world_size=world_size)
        for number, shapes in enumerate(flats)
    ]
    slots = {slot.name: slot for layout in layouts for slot in layout.slots}
    names = data.draw(st.lists(st.sampled_from(sorted(slots)), unique=True))
    deal = plan_deal(layouts, names, world_size=world_size)
    assert set(deal.updaters) == set(names)
    for name in names:
        parts = sorted((p.offset_numel, p.numel) for p in deal.parts if p.name == name)
        covered = 0
        for offset, numel in parts:
            assert offset == covered
            covered += numel
        assert covered == slots[name].numel
    for part in deal.parts:
        first, last = layouts[part.flat_index].shard_range(part.holder)
        assert first <= part.start_numel
        assert part.start_numel + part.numel <= last
        assert part.updater == deal.updaters[part.name]
        assert part.position_numel + part.numel <= deal.width_numel
    loads = [sum(slots[n].numel for n, rank in deal.updaters.items() if rank == r) for r in range(world_size)]
    assert max(loads) - min(loads) <= max((slots[name].numel for name in names), default=0)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.floats(0.01, 1))
def test_at_least_the_share_leaves_and_no_flat_more_than_needed(numels, ratio):
    chosen = leaving(numels, ratio)
    moved = sum(numel for numel, leaves in zip(numels, chosen, strict=True) if leaves)
    assert moved >= ratio * sum(numels) - 1e-6
    last = [numel for numel, leaves in zip(numels, chosen, strict=True) if leaves][-1]
    assert moved - last < ratio * sum(numels)
