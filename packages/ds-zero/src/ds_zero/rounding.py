"""Stochastic rounding from fp32 to bf16 that depends on the element's place, not on slices or timing."""

import torch

# Elements at a time, so that temporaries stay in the cache.
CHUNK_NUMEL = 1 << 16
LOW_BITS = 0xFFFF
# Odd multipliers of a 32-bit mixer; the two rounds of multiply and xor-shift follow a search for low bias.
# Source: Chris Wellons, "Prospecting for Hash Functions", 2018 (lowbias32).
FIRST_MULTIPLIER = 0x7FEB352D
SECOND_MULTIPLIER = 0x846CA68B
WORD = (1 << 32) - 1


def round_stochastically(
    source: torch.Tensor, target: torch.Tensor, *, key: tuple[int, int, int, int]
) -> None:
    """Round to one of the two nearest bf16 values, up with the probability that makes the mean exact.

    Args:
        source: fp32, 1-D. Not finite values and exact bf16 values pass unchanged.
        target: bf16, the same length.
        key: of the parameter, of the rounding, of the tensor, and position of the first element. The random
            bits of an element follow from the first three and its own position.

    Source: Deep Learning with Limited Numerical Precision, arXiv:1502.02551, section 3.
    """
    parameter, rounding, tensor, first = key
    salt = _mix_int(parameter ^ _mix_int(rounding ^ _mix_int(tensor)))
    for start in range(0, source.numel(), CHUNK_NUMEL):
        part = source[start : start + CHUNK_NUMEL]
        positions = torch.arange(part.numel(), dtype=torch.int64, device=source.device)
        noise = _mix((positions + (first + start)) ^ salt).bitwise_and_(LOW_BITS)
        bits = part.view(torch.int32).long().bitwise_and_(WORD)
        rounded = bits.add(noise).bitwise_and_(WORD ^ LOW_BITS)
        kept = torch.where(torch.isfinite(part), rounded, bits)
        target[start : start + CHUNK_NUMEL].copy_(kept.to(torch.int32).view(torch.float32))


def _mix(words: torch.Tensor) -> torch.Tensor:
    words = words.bitwise_and_(WORD)
    words = (words ^ (words >> 16)).mul_(FIRST_MULTIPLIER).bitwise_and_(WORD)
    words = (words ^ (words >> 15)).mul_(SECOND_MULTIPLIER).bitwise_and_(WORD)
    return words ^ (words >> 16)


def _mix_int(word: int) -> int:
    word &= WORD
    word = ((word ^ (word >> 16)) * FIRST_MULTIPLIER) & WORD
    word = ((word ^ (word >> 15)) * SECOND_MULTIPLIER) & WORD
    return word ^ (word >> 16)
