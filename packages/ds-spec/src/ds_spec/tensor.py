"""Named tensors and which rank holds which elements of them."""

import math

import msgspec

from ds_spec.checks import check_fields


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tensor"):
    """A tensor as people know it: qualified name, shape, and dtype as torch spells it (``bfloat16``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    version: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.name:
            raise ValueError(
                "TensorSpec.name must not be empty; give the qualified name, such as 'head.weight'"
            )
        if any(size < 0 for size in self.shape):
            raise ValueError(f"sizes of {self.name!r} must not be negative, got shape {self.shape}")

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
        check_fields(self, counts=("rank", "start_numel", "numel", "buffer_start_numel"))


class ShardLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="shard_layout"):
    """Who holds what: every tensor, and the pieces that make it up."""

    world_size: int
    tensors: tuple[TensorSpec, ...]
    pieces: tuple[ShardPiece, ...]
    version: int = 1

    def __post_init__(self) -> None:
        check_fields(self, counts=("world_size",))
        if self.world_size < 1:
            raise ValueError(f"ShardLayout.world_size must be at least 1, got {self.world_size}")
        numels = {tensor.name: tensor.numel for tensor in self.tensors}
        if len(numels) < len(self.tensors):
            raise ValueError("ShardLayout.tensors must have different names; list a tied tensor once")
        for piece in self.pieces:
            if piece.tensor not in numels:
                raise ValueError(f"a piece names tensor {piece.tensor!r}, which the layout does not list")
            if piece.rank >= self.world_size:
                raise ValueError(f"a piece of {piece.tensor!r} is on rank {piece.rank} of {self.world_size}")
            if piece.start_numel + piece.numel > numels[piece.tensor]:
                raise ValueError(
                    f"a piece of {piece.tensor!r} must end within its {numels[piece.tensor]} elements, "
                    f"got {piece.numel} from {piece.start_numel} on; leave padding out"
                )

    def on_rank(self, rank: int) -> tuple[ShardPiece, ...]:
        """The pieces that ``rank`` holds."""
        return tuple(piece for piece in self.pieces if piece.rank == rank)
