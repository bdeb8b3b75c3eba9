"""How ranks are arranged: named axes, and rank to coordinate and back. Pure arithmetic."""

import math
from collections.abc import Mapping

import msgspec

from ds_spec.checks import check_fields

AXES = ("pp", "node", "dp", "sp", "tp", "ep")


class MeshSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="mesh"):
    """Axes of a mesh and their sizes, outermost first; ranks count in row-major order.

    Attributes:
        axes: names out of ``pp``, ``node``, ``dp``, ``sp``, ``tp``, ``ep``, each at most once. ``node``
            counts the nodes when another axis, mostly ``dp``, means the ranks of one node only.
        sizes: ranks along each axis, >= 1.

    Raises:
        ValueError: an unknown or repeated axis, a size below 1, or lengths that differ.
        TypeError: a size that is not an ``int``.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    version: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        unknown = [axis for axis in self.axes if axis not in AXES]
        if unknown:
            raise ValueError(f"mesh axes must be among {AXES}, got {unknown}")
        if len(set(self.axes)) != len(self.axes):
            raise ValueError(f"mesh axes must differ, got {self.axes}")
        if len(self.axes) != len(self.sizes):
            raise ValueError(f"a mesh needs one size per axis, got axes {self.axes} and sizes {self.sizes}")
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if type(size) is not int:
                raise TypeError(f"the size of mesh axis {axis!r} must be an int, got {size!r}")
            if size < 1:
                raise ValueError(
                    f"the size of mesh axis {axis!r} must be at least 1, got {size}; leave out unused axes"
                )

    @property
    def world_size(self) -> int:
        """Ranks in the whole mesh."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Ranks along ``axis``; 1 for an axis the mesh does not have."""
        if axis not in AXES:
            raise ValueError(f"axis must be one of {AXES}, got {axis!r}")
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where ``rank`` sits along each axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {rank}")
        place = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.axes}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at ``coordinate``, which names every axis."""
        if set(coordinate) != set(self.axes):
            raise ValueError(f"a coordinate names every axis of {self.axes}, got {sorted(coordinate)}")
        rank = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if not 0 <= coordinate[axis] < size:
                raise ValueError(f"{axis} must be in 0..{size - 1}, got {coordinate[axis]}")
            rank = rank * size + coordinate[axis]
        return rank

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` along ``axis`` only, ``rank`` among them, in axis order."""
        place = self.coordinate(rank)
        if axis not in place:
            return (rank,)
        return tuple(self.rank({**place, axis: index}) for index in range(self.size(axis)))
