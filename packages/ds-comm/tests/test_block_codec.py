"""Block codes: a known error, no bias, and what is not finite stays so."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_comm.block_codec import CHUNK_NUMEL, BlockCodec

CODECS = [BlockCodec(bits=8), BlockCodec(bits=4), BlockCodec(bits=4, block_numel=64)]


def there_and_back(codec, values, **options):
    payload = torch.full((codec.payload_bytes(values.numel()),), 255, dtype=torch.uint8)
    codec.encode(values, payload, **options)
    back = torch.full_like(values, float("nan"))
    codec.decode(payload, back)
    return back


@pytest.mark.parametrize("codec", CODECS)
@given(num_blocks=st.integers(0, 5), seed=st.integers(0, 999), exponent=st.integers(-30, 30))
def test_a_value_comes_back_within_half_a_scale(codec, num_blocks, seed, exponent):
    values = torch.randn(num_blocks * codec.block_numel, generator=torch.Generator().manual_seed(seed))
    values *= 2.0**exponent
    rows = values.view(-1, codec.block_numel)
    scale = rows.abs().amax(dim=1) / (127 if codec.bits == 8 else 7) if num_blocks else torch.zeros(0)
    error = (there_and_back(codec, values) - values).abs().view(-1, codec.block_numel)
    assert bool((error <= scale.unsqueeze(1) * 0.5001).all())


def test_large_inputs_and_bf16_and_zeros():
    codec = BlockCodec()
    values = torch.randn(CHUNK_NUMEL + 512)
    assert (there_and_back(codec, values) - values).abs().max() < 0.03
    narrow = values.bfloat16()
    assert (there_and_back(codec, narrow) - narrow).abs().max() < 0.05
    assert not there_and_back(codec, torch.zeros(512)).any()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_still_found(codec, bad):
    values = torch.randn(4 * codec.block_numel)
    values[codec.block_numel + 3] = bad
    back = there_and_back(codec, values).view(4, -1)
    assert not torch.isfinite(back[1]).all()
    assert bool(torch.isfinite(back[[0, 2, 3]]).all())


@pytest.mark.parametrize("codec", CODECS)
def test_stochastic_rounding_has_no_bias(codec):
    values = torch.linspace(-1, 1, codec.block_numel)
    generator = torch.Generator().manual_seed(0)
    mean = sum(there_and_back(codec, values, generator=generator) for _ in range(800)) / 800
    scale = 1 / (127 if codec.bits == 8 else 7)
    assert (
        mean - values
    ).abs().max() < 5 * scale / 800**0.5  # five standard deviations of at most half a scale


def test_decoding_adds():
    codec = BlockCodec(bits=4)
    values = torch.randn(256)
    payload = torch.empty(codec.payload_bytes(256), dtype=torch.uint8)
    codec.encode(values, payload)
    once, twice = torch.zeros(256), torch.zeros(256)
    codec.decode(payload, once)
    codec.decode(payload, twice)
    codec.decode(payload, twice, add=True)
    assert torch.equal(2 * once, twice)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="needs a multiple of 256 elements, got 7; pad first"):
        BlockCodec().payload_bytes(7)
    with pytest.raises(ValueError, match="256 elements need 260 bytes, got 3"):
        BlockCodec().decode(torch.empty(3, dtype=torch.uint8), torch.empty(256))
    with pytest.raises(ValueError, match="needs 8 or 4 bits and even blocks, got 3"):
        BlockCodec(bits=3)
