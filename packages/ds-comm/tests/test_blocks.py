"""Block codes: a bound on every error, no bias, nothing lost that is not finite, at any length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_comm import blocks
from ds_comm.blocks import BlockCodec
from ds_comm.wire import Scratch

CODECS = [
    BlockCodec(bits=bits, block_numel=block_numel, scale_dtype=scale_dtype)
    for bits, block_numel in ((8, 256), (4, 256), (8, 2), (4, 6))
    for scale_dtype in (torch.float32, torch.bfloat16)
]
codecs = pytest.mark.parametrize("codec", CODECS, ids=str)


def encode(codec, values, **options):
    # Poisoned, so that what is not written would show.
    payload = torch.full((codec.payload_bytes(values.numel()),), 255, dtype=torch.uint8)
    codec.encode(values, payload, **options)
    return payload


def there_and_back(codec, values, **options):
    back = torch.full_like(values, float("nan"), dtype=torch.float32)
    codec.decode(encode(codec, values, **options), back)
    return back


def scales_of(codec, payload, numel):
    """The scale of every element."""
    scales = codec.open_payload(payload, numel)[1].double()
    return scales.repeat_interleave(codec.block_numel)[:numel]


def nearest_bound(codec, payload, numel):
    return scales_of(codec, payload, numel) * (0.5 + codec.largest_code * 2.0**-22)


def numbers(numel, seed, exponent=0):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return values * 2.0**exponent


@codecs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=30)
@given(numel=st.integers(0, 1100), seed=st.integers(0, 999), exponent=st.integers(-140, 120))
def test_every_element_comes_back_within_half_a_scale(codec, dtype, numel, seed, exponent):
    if dtype is torch.float16:
        exponent = max(-20, min(12, exponent))
    values = numbers(numel, seed, exponent).to(dtype)
    payload = encode(codec, values)
    error = (there_and_back(codec, values).double() - values.double()).abs()
    assert bool((error <= nearest_bound(codec, payload, numel)).all())


@codecs
@settings(max_examples=30)
@given(numel=st.integers(1, 1100), seed=st.integers(0, 99))
def test_scales_are_the_largest_magnitude_over_the_largest_code(codec, numel, seed):
    values = numbers(numel, seed)
    scales = codec.open_payload(encode(codec, values), numel)[1].float()
    exact = torch.stack([part.abs().max() for part in values.split(codec.block_numel)]) / codec.largest_code
    room = 2.0**-7 if codec.scale_dtype is torch.bfloat16 else 2.0**-22
    assert bool((scales >= exact * (1 - 2.0**-22)).all())
    assert bool((scales <= exact * (1 + 1.01 * room)).all())


@codecs
@settings(max_examples=30)
@given(numel=st.integers(0, 1100))
def test_sizes_are_codes_and_scales_and_no_padding_at_multiples_of_eight(codec, numel):
    num_scales = (numel + codec.block_numel - 1) // codec.block_numel
    exact = num_scales * codec.scale_dtype.itemsize + (numel if codec.bits == 8 else (numel + 1) // 2)
    assert codec.scale_bytes(numel) + codec.code_bytes(numel) == exact
    assert 0 <= codec.payload_bytes(numel) - exact < codec.scale_dtype.itemsize
    if numel % 8 == 0:
        assert codec.payload_bytes(numel) == exact


@codecs
def test_chunks_do_not_show(codec, monkeypatch):
    values = numbers(5 * 256 + 77, 3)
    whole = encode(codec, values)
    monkeypatch.setattr(blocks, "CHUNK_NUMEL", 2 * codec.block_numel)
    assert torch.equal(encode(codec, values), whole)
    assert torch.equal(there_and_back(codec, values)[:768], there_and_back(codec, values[:768].clone()))


def test_every_pair_of_codes_of_four_bits_comes_back_exactly():
    codes = torch.arange(-7.0, 8.0)
    pairs = torch.cartesian_prod(codes, codes)
    blocks_of_four = torch.cat([pairs, torch.full_like(pairs, 7.0)], dim=1)  # 7 fixes the scale at one
    values = blocks_of_four[:, [0, 2, 1, 3]].reshape(-1)
    assert torch.equal(there_and_back(BlockCodec(bits=4, block_numel=4), values), values)
    odd = torch.tensor([7.0, -7.0, 3.0, 7.0, -5.0, 1.0, 0.0])
    assert torch.equal(there_and_back(BlockCodec(bits=4), odd), odd)


@codecs
@pytest.mark.parametrize("stochastic", [False, True])
def test_zeros_stay_zeros(codec, stochastic):
    generator = torch.Generator().manual_seed(0) if stochastic else None
    values = numbers(601, 0)
    values[::2] = 0.0
    values[256:512] = 0.0
    back = there_and_back(codec, values, generator=generator)
    assert not back[values == 0].any()
    assert not there_and_back(codec, torch.zeros(601), generator=generator).any()


@codecs
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_block_that_is_not_finite_becomes_nan_and_no_other(codec, bad, stochastic):
    generator = torch.Generator().manual_seed(0) if stochastic else None
    for place in (0, 300, 600):  # the last lies in a short block for blocks of 256
        values = numbers(601, 1)
        values[place] = bad
        back = there_and_back(codec, values, generator=generator)
        first = place // codec.block_numel * codec.block_numel
        expected = torch.zeros(601, dtype=torch.bool)
        expected[first : first + codec.block_numel] = True
        assert torch.equal(back.isnan(), expected)
        assert bool(back[~expected].isfinite().all())


@codecs
def test_stochastic_rounding_takes_a_neighbour_and_has_no_bias(codec):
    num_draws = 1000
    values = numbers(257, 5)
    values[3] = (
        values.abs().max() * 2
    )  # the code at the end of the range, where a bound must not push it down
    generator = torch.Generator().manual_seed(0)
    scale = scales_of(codec, encode(codec, values), 257)
    total = torch.zeros(257, dtype=torch.float64)
    for _ in range(num_draws):
        back = there_and_back(codec, values, generator=generator).double()
        assert bool(((back - values).abs() <= scale * (1 + codec.largest_code * 2.0**-22)).all())
        total += back
    # A draw deviates by at most half a scale, so the mean by 1 / (2 * sqrt(draws)); five of those.
    assert bool(((total / num_draws - values).abs() <= scale * 2.5 / num_draws**0.5).all())


def test_stochastic_rounding_goes_up_as_often_as_the_fraction_says():
    # Blocks of two, the first fixing the scale at one: every other element is the same fraction.
    for fraction in (0.01, 0.25, 0.5, 0.99):
        values = torch.tensor([127.0, fraction]).repeat(1 << 18)
        codec = BlockCodec(block_numel=2)
        back = there_and_back(codec, values, generator=torch.Generator().manual_seed(1))
        spread = (fraction * (1 - fraction) / (1 << 18)) ** 0.5
        assert abs(float(back[1::2].mean()) - fraction) < 5 * spread
        assert torch.equal(back[::2], values[::2])


@codecs
def test_the_seed_decides_the_bits(codec):
    values = numbers(1001, 2)

    def draw(seed):
        return encode(codec, values, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@codecs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adding_is_decoding_and_a_sum(codec, dtype):
    values, before = numbers(1001, 4), numbers(1001, 5).to(dtype)
    payload = encode(codec, values)
    exact = torch.empty(1001)
    codec.decode(payload, exact)
    added, written = before.clone(), torch.empty(1001, dtype=dtype)
    codec.decode(payload, added, add=True)
    codec.decode(payload, written)
    assert torch.equal(added, (before + exact).to(dtype))
    assert torch.equal(written, exact.to(dtype))


@codecs
def test_temporaries_come_from_the_scratch_and_go_back(codec):
    scratch = Scratch(torch.device("cpu"))
    values, target = numbers(2049, 6).bfloat16(), torch.zeros(2049, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)

    def once():
        payload = encode(codec, values, generator=generator, scratch=scratch)
        codec.decode(payload, target, add=True, scratch=scratch)
        return sorted(buffer.data_ptr() for free in scratch._free.values() for buffer in free)

    once()
    assert once() == once() != []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bits": 3}, "4 or 8 bits, got 3"),
        ({"block_numel": 7}, "even and at least 2, got 7"),
        ({"block_numel": 0}, "even and at least 2, got 0"),
        ({"scale_dtype": torch.float16}, "torch.float32 or torch.bfloat16, got torch.float16"),
    ],
)
def test_a_codec_without_sense_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        BlockCodec(**options)


@pytest.mark.parametrize(
    ("values", "payload", "text"),
    [
        (
            torch.zeros(8),
            torch.zeros(11, dtype=torch.uint8),
            "8 elements need a contiguous uint8 payload of 12",
        ),
        (torch.zeros(8), torch.zeros(12, dtype=torch.int8), "8 elements need a contiguous uint8"),
        (torch.zeros(8, dtype=torch.float64), torch.zeros(12, dtype=torch.uint8), "got torch.float64"),
        (torch.zeros(2, 4), torch.zeros(12, dtype=torch.uint8), r"got torch.float32 of shape \(2, 4\)"),
        (torch.zeros(16)[::2], torch.zeros(12, dtype=torch.uint8), "contiguous 1-D"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(values, payload, text):
    codec = BlockCodec()
    with pytest.raises(ValueError, match=text):
        codec.encode(values, payload)
    with pytest.raises(ValueError, match=text):
        codec.decode(payload, values)
