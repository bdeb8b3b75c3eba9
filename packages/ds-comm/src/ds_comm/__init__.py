"""Mesh of process groups, recorded collectives and hang diagnosis."""

from ds_comm.blocks import BlockCodec
from ds_comm.communicator import Communicator, Handle
from ds_comm.errors import CollectiveMismatchError, CommError, PeerLostError, StalledError
from ds_comm.hierarchical import Hierarchy
from ds_comm.loopback import Loopback
from ds_comm.mesh import Mesh
from ds_comm.quantized_moves import QuantizedMoves
from ds_comm.world import World, current, init, is_initialized, shutdown

__all__ = [
    "BlockCodec",
    "CollectiveMismatchError",
    "CommError",
    "Communicator",
    "Handle",
    "Hierarchy",
    "Loopback",
    "Mesh",
    "PeerLostError",
    "QuantizedMoves",
    "StalledError",
    "World",
    "current",
    "init",
    "is_initialized",
    "shutdown",
]
