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

    def axis(self, name: str) -> Communicator:
        """The group of the ranks that differ from this one along ``name`` only.

        Collective on first use: every rank, in the same order.
        """
        if not world.is_initialized():
            return Loopback(name, self.device)
        return world.current().communicator(self.spec, name)
