"""The mesh: named axes over the ranks, and the group of this rank along each."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from ds_comm import world
from ds_comm.communicator import Communicator
from ds_comm.errors import CommError
from ds_comm.loopback import Loopback
from ds_spec import MeshSpec


class Mesh:
    """Ranks arranged along named axes. Several meshes live side by side.

    Args:
        spec: axes and sizes; their product is the number of ranks.

    Raises:
        CommError: the mesh is not as large as the job.
    """

    def __init__(self, spec: MeshSpec) -> None:
        world_size = world.current().world_size if world.is_initialized() else 1
        if spec.world_size != world_size:
            sizes = " x ".join(f"{axis}={size}" for axis, size in zip(spec.axes, spec.sizes, strict=True))
            raise CommError(f"a mesh of {sizes} needs {spec.world_size} ranks, this job has {world_size}")
        self.spec = spec

    @classmethod
    def world(cls) -> "Mesh":
        """All ranks of the job along one ``dp`` axis; one process alone needs no :func:`ds_comm.init`."""
        return cls(
            MeshSpec(axes=("dp",), sizes=(world.current().world_size if world.is_initialized() else 1,))
        )

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return world.current().device if world.is_initialized() else torch.device("cpu")

    @property
    def coordinate(self) -> dict[str, int]:
        """Where this rank sits along each axis."""
        return self.spec.coordinate(world.current().rank if world.is_initialized() else 0)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same mesh as torch's object.

        Collective on first use: every rank.
        """
        return world.current().device_mesh(self.spec)

    def split(self, name: str, size: int) -> tuple[Communicator, Communicator]:
        """The group along ``name`` cut into nodes of ``size`` neighbours.

        Collective on first use: every rank, in the same order.

        Returns:
            The group of this node, and the group of the ranks at this place in every node.

        Raises:
            ValueError: the axis does not divide by ``size``, or the mesh has a ``node`` axis already.
        """
        whole = self.spec.size(name)
        if size < 1 or whole % size:
            raise ValueError(f"axis {name} has {whole} ranks, which do not divide into nodes of {size}")
        axes, sizes = list(self.spec.axes), list(self.spec.sizes)
        place = axes.index(name)
        axes[place : place + 1] = ["node", name]
        sizes[place : place + 1] = [whole // size, size]
        cut = Mesh(MeshSpec(axes=tuple(axes), sizes=tuple(sizes)))
        return cut.axis(name), cut.axis("node")

    def axis(self, name: str) -> Communicator:
        """The group of the ranks that differ from this one along ``name`` only.

        Collective on first use: every rank, in the same order.
        """
        if not world.is_initialized():
            return Loopback(name, self.device)
        return world.current().communicator(self.spec, name)
