"""Numbers in blocks of 8- or 4-bit codes with one fp32 scale per block: less to send, with a known error."""

import msgspec
import torch

# Elements worked on at a time, so that temporaries stay in the cache.
CHUNK_NUMEL = 1 << 18
SCALE_BYTES = 4
LARGEST = {8: 127, 4: 7}


class BlockCodec(msgspec.Struct, frozen=True, kw_only=True):
    """Symmetric quantization: code = round(value / scale), scale = largest magnitude / largest code.

    A value comes back within half a scale. A block with a NaN or an infinity comes back as NaN, so that a
    gradient that is not finite is still found.

    Attributes:
        bits: 8 or 4.
        block_numel: elements that share a scale, even.

    Source: ZeRO++, arXiv:2306.10209, section 3.1, for blocks; LLM.int8(), arXiv:2208.07339, section 2, for
    scaling by the largest magnitude.
    """

    bits: int = 8
    block_numel: int = 256

    def __post_init__(self) -> None:
        if self.bits not in LARGEST or self.block_numel < 2 or self.block_numel % 2:
            raise ValueError(
                f"BlockCodec needs 8 or 4 bits and even blocks, got {self.bits} and {self.block_numel}"
            )

    def payload_bytes(self, numel: int) -> int:
        """Bytes of ``numel`` encoded elements, codes before scales.

        Raises:
            ValueError: ``numel`` is not a multiple of the block.
        """
        if numel % self.block_numel:
            raise ValueError(
                f"BlockCodec needs a multiple of {self.block_numel} elements, got {numel}; pad first"
            )
        return numel * self.bits // 8 + numel // self.block_numel * SCALE_BYTES

    def encode(
        self, source: torch.Tensor, payload: torch.Tensor, *, generator: torch.Generator | None = None
    ) -> None:
        """Write the codes and scales of ``source``.

        Args:
            source: 1-D, a floating dtype, a multiple of the block.
            payload: uint8, 1-D, :meth:`payload_bytes` long.
            generator: round stochastically, without bias, by its numbers; ``None`` rounds to nearest.
        """
        codes, scales = self._parts(payload, source.numel())
        largest = LARGEST[self.bits]
        for start in range(0, source.numel(), CHUNK_NUMEL):
            stop = min(start + CHUNK_NUMEL, source.numel())
            rows = source[start:stop].view(-1, self.block_numel)
            scale = torch.linalg.vector_norm(rows, torch.inf, dim=1, dtype=torch.float32) / largest
            scales[start // self.block_numel : stop // self.block_numel].copy_(scale)
            inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
            quotients = rows * inverse.unsqueeze(1)
            if generator is not None:
                noise = torch.empty_like(quotients).uniform_(-0.5, 0.5, generator=generator)
                quotients = quotients.add_(noise)
            whole = quotients.round_().nan_to_num_(0.0).clamp_(-largest, largest).to(torch.int8).view(-1)
            self._pack(whole, codes, start, stop)

    def decode(self, payload: torch.Tensor, target: torch.Tensor, *, add: bool = False) -> None:
        """Write the values into ``target``, or add them to it.

        Args:
            payload: as :meth:`encode` made it.
            target: 1-D, a floating dtype, a multiple of the block.
            add: to what is there.
        """
        codes, scales = self._parts(payload, target.numel())
        for start in range(0, target.numel(), CHUNK_NUMEL):
            stop = min(start + CHUNK_NUMEL, target.numel())
            scale = scales[start // self.block_numel : stop // self.block_numel].unsqueeze(1)
            values = self._unpack(codes, start, stop).view(-1, self.block_numel) * scale
            part = target[start:stop].view(-1, self.block_numel)
            part.add_(values) if add else part.copy_(values)

    def _parts(self, payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        if payload.numel() != self.payload_bytes(numel):
            raise ValueError(
                f"{numel} elements need {self.payload_bytes(numel)} bytes, got {payload.numel()}"
            )
        code_bytes = numel * self.bits // 8
        return payload[:code_bytes], payload[code_bytes:].view(torch.float32)

    def _pack(self, whole: torch.Tensor, codes: torch.Tensor, start: int, stop: int) -> None:
        if self.bits == 8:
            codes[start:stop].copy_(whole.view(torch.uint8))
            return
        pairs = whole.view(torch.uint8).view(-1, 2)
        codes[start // 2 : stop // 2].copy_((pairs[:, 0] & 0xF) | (pairs[:, 1] << 4))

    def _unpack(self, codes: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if self.bits == 8:
            return codes[start:stop].view(torch.int8)
        packed = codes[start // 2 : stop // 2]
        nibbles = torch.stack((packed << 4, packed & 0xF0), dim=1).view(torch.int8)
        return nibbles >> 4  # an arithmetic shift brings the sign down
