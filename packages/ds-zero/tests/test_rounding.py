"""Stochastic rounding: one of the two neighbours, right on average, whatever the slicing."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_zero.rounding import CHUNK_NUMEL, round_stochastically


def rounded(values, *, start=0, rounding=0):
    target = torch.empty(values.numel(), dtype=torch.bfloat16)
    round_stochastically(values, target, key=(7, rounding, 3, start))
    return target


def test_the_mean_is_exact():
    values = torch.tensor([1.0 + 1 / 512, -3.14159, 1e-30, 12345.678, 2.0, 0.0])
    mean = torch.stack([rounded(values, rounding=n) for n in range(4000)]).double().mean(0)
    step = (
        values.abs() / 128
    )  # a bf16 digit; the mean of 4000 lies within 5 standard deviations of half of one
    assert bool(((mean - values).abs() <= 5 * step / 2 / 4000**0.5).all())


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=30), st.integers(0, 1 << 40))
def test_it_gives_one_of_the_two_neighbours(numbers, rounding):
    values = torch.tensor(numbers)
    got = rounded(values, rounding=rounding).float()
    bits = values.view(torch.int32) & ~0xFFFF
    below = bits.view(torch.float32)
    above = (bits + 0x10000).view(torch.float32)
    assert bool(((got == below) | (got == above)).all())
    assert torch.equal(rounded(below), below.bfloat16())


@given(st.integers(1, 3 * CHUNK_NUMEL), st.data())
def test_slices_round_as_the_whole_does(numel, data):
    cut = data.draw(st.integers(0, numel))
    values = torch.linspace(-1, 1, numel)
    parts = [rounded(values[:cut]), rounded(values[cut:], start=cut)]
    assert torch.equal(torch.cat(parts), rounded(values))


def test_what_is_not_finite_stays():
    values = torch.tensor([float("inf"), -float("inf"), float("nan")])
    got = rounded(values)
    assert torch.equal(got[:2].float(), values[:2])
    assert bool(got[2].isnan())
