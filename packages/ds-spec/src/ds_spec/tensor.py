"""Named tensors and which rank holds which elements of them."""

import math

import msgspec


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tensor"):
    """A tensor as people know it: qualified name, shape, and dtype as torch spells it (``bfloat16``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    version: int = 1

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


class ShardPiece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="shard_piece"):
    """A run of one tensor's flattened elements on one rank, and where it lies in that rank's buffer.

    Attributes:
        tensor: name of the tensor.
        rank: rank in the sharding group.
        start_numel: first element, in the flattened tensor.
        numel: length of the run.
        buffer: name of the rank's buffer.
        buffer_start_numel: first element of the run in that buffer.
    """

    tensor: str
    rank: int
    start_numel: int
    numel: int
    buffer: str
    buffer_start_numel: int
    version: int = 1

    def __post_init__(self) -> None:
        if min(self.rank, self.start_numel, self.numel, self.buffer_start_numel) < 0:
            raise ValueError(
                f"ranks and element counts must not be negative, got {self.tensor!r} on rank {self.rank}"
            )


class ShardLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="shard_layout"):
    """Who holds what: every tensor, and the pieces that make it up."""

    world_size: int
    tensors: tuple[TensorSpec, ...]
    pieces: tuple[ShardPiece, ...]
    version: int = 1

    def __post_init__(self) -> None:
        names = {tensor.name for tensor in self.tensors}
        for piece in self.pieces:
            if piece.tensor not in names:
                raise ValueError(f"a piece names tensor {piece.tensor!r}, which the layout does not list")
            if piece.rank >= self.world_size:
                raise ValueError(f"a piece of {piece.tensor!r} is on rank {piece.rank} of {self.world_size}")

    def on_rank(self, rank: int) -> tuple[ShardPiece, ...]:
        """The pieces that ``rank`` holds."""
        return tuple(piece for piece in self.pieces if piece.rank == rank)
