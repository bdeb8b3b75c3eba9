"""Laws of the flat layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_zero.layout import ALIGN_NUMEL, plan_flat_layout, round_up

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=8)


def layout_of(shapes, world_size):
    return plan_flat_layout([f"p{i}" for i in range(len(shapes))], shapes, world_size=world_size)


@given(SHAPES, st.integers(1, 8))
def test_every_element_of_every_parameter_has_exactly_one_owner(shapes, world_size):
    layout = layout_of(shapes, world_size)
    covered = {index: [] for index in range(len(shapes))}
    for rank in range(world_size):
        for piece in layout.pieces(*layout.shard_range(rank)):
            slot = layout.slots[piece.slot_index]
            covered[piece.slot_index] += range(
                piece.start_numel - slot.start_numel, piece.start_numel - slot.start_numel + piece.numel
            )
    for index, slot in enumerate(layout.slots):
        assert covered[index] == list(range(slot.numel))


@given(SHAPES, st.integers(1, 8))
def test_starts_and_slices_are_aligned_and_slots_do_not_overlap(shapes, world_size):
    layout = layout_of(shapes, world_size)
    assert layout.padded_numel % (world_size * ALIGN_NUMEL) == 0
    position = 0
    for slot in layout.slots:
        assert slot.start_numel % ALIGN_NUMEL == 0
        assert slot.start_numel >= position
        position = slot.stop_numel
    assert position <= layout.padded_numel


@given(SHAPES, st.integers(1, 8))
def test_slots_and_gaps_fill_the_buffer(shapes, world_size):
    layout = layout_of(shapes, world_size)
    gaps = sum(last - first for first, last in layout.gaps())
    assert gaps + sum(slot.numel for slot in layout.slots) == layout.padded_numel


@given(SHAPES)
def test_padding_is_below_one_alignment_per_parameter_and_rank(shapes):
    layout = layout_of(shapes, 4)
    exact = sum(slot.numel for slot in layout.slots)
    assert layout.padded_numel - exact < ALIGN_NUMEL * (len(shapes) + 4) or layout.padded_numel == 0


def test_no_parameters_make_an_empty_buffer():
    assert layout_of([], 3).padded_numel == 0


def test_world_size_below_one_is_refused():
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        layout_of([(3,)], 0)


def test_round_up():
    assert [round_up(value, 4) for value in (0, 1, 4, 5)] == [0, 4, 4, 8]
