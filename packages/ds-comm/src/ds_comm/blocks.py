"""Block quantization: symmetric int8 or int4 codes with one scale per block, into buffers that are there.

Pure tensor arithmetic; how payloads travel is left to the collectives. A faster codec may take its place as
long as it keeps the format. A payload of n elements in blocks (the last may be short, nothing is padded):

- scales, one per block: ``max |x| / q`` with q = 127 or 7, never below the smallest normal fp32, NaN for a
  block with a value that is not finite;
- codes, whole numbers in -q..q. At 4 bits element j of a block of m shares a byte with element
  ``j + ceil(m / 2)``: the byte, as a signed number, is the first plus 16 times the second. Halves instead of
  neighbours, so that packing and unpacking touch memory in order.
"""

from collections.abc import Iterator

import msgspec
import torch

from ds_comm.wire import Scratch

# Elements at a time: temporaries of 2 MB stay in a cache, and twenty calls of torch cost little beside them.
CHUNK_NUMEL = 1 << 19
# On a device every operation is a launch, so chunks only bound the memory.
DEVICE_CHUNK_NUMEL = 1 << 24
ELEMENTS = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# What bf16 scales are raised by, half a unit in the last place, so that rounding never makes them too small.
BFLOAT16_ROOM = 1.0 + 2.0**-8
# Four noise words of 16 bits in one of 64; odd ones only, whose mean is exactly zero.
ODD_WORDS = 0x0001000100010001
NOISE_STEP = 2.0**-16


class BlockCodec(msgspec.Struct, frozen=True, kw_only=True):
    """Writes and reads blocks.

    With s the scale of an element's block and x the element in fp32:

    - to nearest: ``|x - decoded| <= s / 2`` up to the fp32 rounding of x / s and of the product, that is
      ``s * (1 / 2 + q * 2**-22)``;
    - stochastic: decoded is one of the two multiples of s around x, the upper one with a probability that
      makes the mean x up to ``s * 2**-15``. The random bits follow from the generator alone;
    - zeros stay zeros. A block with NaN or infinity decodes to NaN as a whole, so nobody misses it. Values
      within 1 % of the largest fp32 may decode to infinity.

    Attributes:
        bits: 8 or 4 per code.
        block_numel: elements that share a scale; even.
        scale_dtype: ``torch.float32``, or ``torch.bfloat16`` for half the scales' bytes and errors up to
            0.8 % larger.

    Raises:
        ValueError: an attribute that is none of these.

    Source: ZeRO++, arXiv:2306.10209, section 3.1 (blocks); arXiv:1502.02551, section 3 (stochastic rounding).
    """

    bits: int = 8
    block_numel: int = 256
    scale_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.bits not in {4, 8}:
            raise ValueError(f"block codes have 4 or 8 bits, got {self.bits}")
        if self.block_numel < 2 or self.block_numel % 2:
            raise ValueError(f"block_numel must be even and at least 2, got {self.block_numel}")
        if self.scale_dtype not in {torch.float32, torch.bfloat16}:
            raise ValueError(f"scales are torch.float32 or torch.bfloat16, got {self.scale_dtype}")

    @property
    def largest_code(self) -> int:
        """Codes go from minus this to this."""
        return (1 << (self.bits - 1)) - 1

    def num_blocks(self, numel: int) -> int:
        """Scales for ``numel`` elements."""
        return -(-numel // self.block_numel)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of ``numel`` elements."""
        return -(-numel * self.bits // 8)

    def scale_bytes(self, numel: int) -> int:
        """Bytes of the scales of ``numel`` elements."""
        return self.num_blocks(numel) * self.scale_dtype.itemsize

    def payload_bytes(self, numel: int) -> int:
        """Bytes of scales and codes together, up to a multiple of a scale's size.

        Nothing is added when ``numel`` is a multiple of 8.
        """
        size = self.scale_dtype.itemsize
        return -(-(self.scale_bytes(numel) + self.code_bytes(numel)) // size) * size

    def open_payload(self, payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (int8) and scales of ``numel`` elements as views of a payload.

        Raises:
            ValueError: it is not uint8 of ``payload_bytes(numel)``.
        """
        expected = self.payload_bytes(numel)
        if payload.dtype is not torch.uint8 or payload.shape != (expected,) or not payload.is_contiguous():
            raise ValueError(
                f"{numel} elements need a contiguous uint8 payload of {expected} bytes, "
                f"got {payload.dtype} of shape {tuple(payload.shape)}"
            )
        first = self.scale_bytes(numel)
        codes = payload[first : first + self.code_bytes(numel)].view(torch.int8)
        return codes, payload[:first].view(self.scale_dtype)

    def encode(
        self,
        source: torch.Tensor,
        payload: torch.Tensor,
        *,
        generator: torch.Generator | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """Quantize ``source``.

        Args:
            source: fp32, bf16 or fp16, 1-D and contiguous, n elements.
            payload: uint8, ``payload_bytes(n)``, overwritten.
            generator: on the same device; round stochastically by its numbers, ``None`` to nearest.
            scratch: where temporaries (of a chunk, not of n) come from; ``None`` allocates them.

        Raises:
            ValueError: a buffer of another length or dtype.
        """
        _check_elements(source)
        work = _Work(scratch, source.device)
        for part, code, scale in self._pieces(source, *self.open_payload(payload, source.numel())):
            self._encode(part, code, scale, work, generator)
        work.close()

    def decode(
        self,
        payload: torch.Tensor,
        target: torch.Tensor,
        *,
        add: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        """Write what ``payload`` stands for to ``target``, or add it there.

        Args:
            payload: as :meth:`encode` left it.
            target: fp32, bf16 or fp16, 1-D and contiguous; products are taken in fp32, then rounded.
            add: to what is there.
            scratch: as of :meth:`encode`.

        Raises:
            ValueError: a buffer of another length or dtype.
        """
        _check_elements(target)
        work = _Work(scratch, target.device)
        for part, code, scale in self._pieces(target, *self.open_payload(payload, target.numel())):
            direct = not add and part.dtype is torch.float32
            values = part if direct else work.like(part, torch.float32)
            if self.bits == 8:
                values.copy_(code)
            else:
                _unpack(code, values, work)
            values.mul_(scale.float().unsqueeze(1))
            if add:
                part.add_(values)
            elif not direct:
                part.copy_(values)
        work.close()

    def _encode(
        self,
        part: torch.Tensor,
        code: torch.Tensor,
        scale: torch.Tensor,
        work: "_Work",
        generator: torch.Generator | None,
    ) -> None:
        values = work.like(part, torch.float32)
        exact = part if part.dtype is torch.float32 else values.copy_(part)
        self._write_scales(exact, scale)
        torch.mul(exact, scale.float().reciprocal().unsqueeze(1), out=values)
        if generator is not None:
            values.add_(_draw(values, work, generator), alpha=NOISE_STEP)
            # The quotient of the largest value may be an ulp or two above q, and noise would carry it on.
            values.clamp_(-self.largest_code, self.largest_code)
        values.round_()
        if self.bits == 8:
            code.copy_(values)
        else:
            low, high = _halves_of(values)
            low[:, : high.shape[1]].add_(high, alpha=16)
            code.copy_(low)

    def _write_scales(self, exact: torch.Tensor, scale: torch.Tensor) -> None:
        # Two reductions read the chunk twice from the cache; torch's one-pass ones are ten times slower.
        largest = torch.maximum(torch.amax(exact, 1), torch.amin(exact, 1).neg_())
        largest.mul_(1.0 / self.largest_code).clamp_(min=SMALLEST_SCALE)
        largest.add_(largest, alpha=0.0)  # makes NaN of infinity, in a third of the time of a mask
        if self.scale_dtype is torch.bfloat16:
            largest.mul_(BFLOAT16_ROOM)
        scale.copy_(largest)

    def _pieces(
        self, exact: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Chunks of whole blocks as rows, then the short block as one row."""
        num_whole = exact.numel() // self.block_numel
        whole, whole_bytes = num_whole * self.block_numel, self.code_bytes(num_whole * self.block_numel)
        if num_whole:
            chunk = CHUNK_NUMEL if exact.device.type == "cpu" else DEVICE_CHUNK_NUMEL
            num_rows = max(1, chunk // self.block_numel)
            yield from zip(
                exact[:whole].view(num_whole, -1).split(num_rows),
                codes[:whole_bytes].view(num_whole, -1).split(num_rows),
                scales[:num_whole].split(num_rows),
                strict=True,
            )
        if whole < exact.numel():
            yield exact[whole:].unsqueeze(0), codes[whole_bytes:].unsqueeze(0), scales[num_whole:]


class _Work:
    """The temporaries of one call, at most one of each dtype and purpose, reused from chunk to chunk."""

    def __init__(self, scratch: Scratch | None, device: torch.device) -> None:
        self._scratch = scratch if scratch is not None else Scratch(device)
        self._taken: dict[str, torch.Tensor] = {}

    def take(self, purpose: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements; the first chunk is the largest."""
        if purpose not in self._taken:
            self._taken[purpose] = self._scratch.take(numel, dtype)
        return self._taken[purpose][:numel]

    def like(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values of a chunk in its shape."""
        return self.take("values", part.numel(), dtype).view(part.shape)

    def close(self) -> None:
        """Give all back."""
        for buffer in self._taken.values():
            self._scratch.give(buffer)


def _draw(values: torch.Tensor, work: _Work, generator: torch.Generator) -> torch.Tensor:
    """Odd 16-bit numbers in the shape of ``values``, whose mean is zero."""
    # One draw of 64 bits for four elements: the generator is what costs here.
    words = work.take("noise", -(-values.numel() // 4), torch.int64)
    words.random_(-(1 << 63), None, generator=generator).bitwise_or_(ODD_WORDS)
    return words.view(torch.int16)[: values.numel()].view(values.shape)


def _unpack(code: torch.Tensor, values: torch.Tensor, work: _Work) -> None:
    packed = work.take("halves", code.numel(), torch.float32).view(code.shape).copy_(code)
    low, high = _halves_of(values)
    width = high.shape[1]
    # The first of a pair is at most 7 of 16, so rounding finds the second.
    torch.mul(packed[:, :width], 1.0 / 16.0, out=high).round_()
    torch.add(packed[:, :width], high, alpha=-16, out=low[:, :width])
    low[:, width:].copy_(packed[:, width:])


def _halves_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``ceil(m / 2)`` columns and the rest."""
    middle = -(-values.shape[1] // 2)
    return values[:, :middle], values[:, middle:]


def _check_elements(tensor: torch.Tensor) -> None:
    if tensor.dtype not in ELEMENTS or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"blocks are made of contiguous 1-D float32, bfloat16 or float16 elements, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
