"""All processes of the job: how they meet, the groups made of them, and how they part."""

import atexit
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ds_comm.board import Board, SharedBoard
from ds_comm.calls import CallLog
from ds_comm.communicator import Communicator, GroupCommunicator
from ds_comm.errors import CommError
from ds_comm.launch_env import Launched, read_launch
from ds_comm.loopback import Loopback
from ds_comm.store import KeyValue
from ds_comm.store_board import StoreBoard
from ds_comm.watch import Watch
from ds_comm.wire import DeviceWire, GlooWire
from ds_spec import MeshSpec

logger = logging.getLogger(__name__)

# torch's own limit is only the last resort behind the watch.
TRANSPORT_LIMIT = timedelta(hours=2)
MEETING_LIMIT_S = 120.0
EXIT_AFTER_ERROR = 1


class World:
    """The job as this process sees it; made by :func:`init`, one per process.

    Attributes:
        rank: this process among all.
        world_size: processes in all.
        local_rank: this process among those of its host.
        local_world_size: processes of this host.
        device: where this process's tensors live.
        backend: ``gloo``, ``nccl``, ... or ``none`` for a process alone.
    """

    def __init__(
        self, launched: Launched | None, device: torch.device, *, timeout_s: float, check_s: float
    ) -> None:
        self.rank = launched.rank if launched else 0
        self.world_size = launched.world_size if launched else 1
        self.local_rank = launched.local_rank if launched else 0
        self.local_world_size = launched.local_world_size if launched else 1
        self.device = device
        self.backend = "none"
        self._timeout_s = timeout_s
        self._check_s = check_s
        self._store: KeyValue | None = None
        self._groups: dict[tuple[str, tuple[int, ...]], Communicator] = {}
        self._meshes: dict[MeshSpec, DeviceMesh] = {}
        self._stop = threading.Event()
        self._main = threading.get_ident()

    def connect(self, store: dist.Store) -> None:
        """Meet the other processes.

        Collective: every process.
        """
        self._store = KeyValue(store, "ds_comm")
        self.backend = dist.get_default_backend_for_device(self.device)
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore("torch", store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=TRANSPORT_LIMIT,
        )
        threading.Thread(target=self._publish, name="ds-comm-watch", daemon=True).start()

    def communicator(self, mesh: MeshSpec, axis: str) -> Communicator:
        """The group of this process along ``axis`` of ``mesh``; the same object for the same ranks and axis.

        Collective on first use: every process, meshes and axes in the same order.
        """
        ranks = mesh.peers(self.rank, axis)
        key = (axis, ranks)
        if key not in self._groups:
            if len(ranks) == 1:
                self._groups[key] = Loopback(axis, self.device, rank=self.rank)
            else:
                self._groups[key] = self._make_group(mesh, axis, ranks)
        return self._groups[key]

    def device_mesh(self, mesh: MeshSpec) -> DeviceMesh:
        """``mesh`` as torch's own object, for FSDP2, DTensor and the like.

        Collective on first use.
        """
        if mesh not in self._meshes:
            self._meshes[mesh] = init_device_mesh(self.device.type, mesh.sizes, mesh_dim_names=mesh.axes)
        return self._meshes[mesh]

    def _make_group(self, mesh: MeshSpec, axis: str, ranks: Sequence[int]) -> GroupCommunicator:
        # Groups of its own for every axis and mesh: calls of two meshes over the same ranks must not mix.
        everyone = sorted({mesh.peers(rank, axis) for rank in range(self.world_size)})
        made = {members: dist.new_group(list(members), timeout=TRANSPORT_LIMIT) for members in everyone}
        group: Any = made[tuple(ranks)]
        mine = ranks.index(self.rank)
        log = CallLog(axis)
        board = self._make_board(f"{axis}:{','.join(map(str, ranks))}", mine, len(ranks))
        watch = Watch(board, log, rank=mine, ranks=ranks, timeout_s=self._timeout_s, check_s=self._check_s)
        kind = GlooWire if self.device.type == "cpu" else DeviceWire
        return GroupCommunicator(axis, kind(group, mine, ranks, self.device), watch, log, self.device)

    def _make_board(self, name: str, rank: int, world_size: int) -> Board:
        """A shared board when all ranks of the group are on this host, else one in the store."""
        if self._store is None:
            raise CommError("the process group is closed; call ds_comm.init again")
        self._store.set(f"{name}/host/{rank}", _host().encode())
        hosts = {self._store.wait(f"{name}/host/{peer}", MEETING_LIMIT_S) for peer in range(world_size)}
        if len(hosts) > 1:
            return StoreBoard(self._store, name, rank=rank, world_size=world_size)
        if rank == 0:
            self._store.set(f"{name}/path", SharedBoard.create(world_size).encode())
        path = self._store.wait(f"{name}/path", MEETING_LIMIT_S).decode()
        board = SharedBoard(path, rank=rank, world_size=world_size)
        if self._store.add(f"{name}/opened", 1) == world_size:
            os.unlink(path)  # the mapping stays; nothing is left behind however the ranks end
            self._store.set(f"{name}/complete", b"1")
        self._store.wait(f"{name}/complete", MEETING_LIMIT_S)
        return board

    def _publish(self) -> None:
        """Every second, show where this process is, for the ranks that wait for it."""
        while not self._stop.wait(self._check_s):
            for group in self._joined():
                group.watch.show_activity(self._main)
                if isinstance(group.watch.board, StoreBoard):
                    group.watch.board.publish()
                group.inspect()

    def _joined(self) -> list[GroupCommunicator]:
        return [group for group in list(self._groups.values()) if isinstance(group, GroupCommunicator)]

    def leave(self, *, failed: str = "") -> None:
        """Part from the other processes; wait for them unless this one failed.

        Raises:
            CommError: another rank waits for this one in a call it will not make.
        """
        self._stop.set()
        watches = [group.watch for group in self._joined()]
        for watch in watches:
            watch.leave(failed=failed)
        try:
            waited_s = 0.0
            while not failed and waited_s < self._timeout_s:
                if all(watch.peers_left() for watch in watches):
                    break
                threading.Event().wait(self._check_s / 10)
                waited_s += self._check_s / 10
        finally:
            if not failed and self.backend != "none" and dist.is_initialized():
                dist.destroy_process_group()
            self._groups.clear()


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


_world: World | None = None


def init(*, device: str | None = None, timeout_s: float = 300.0, stall_check_s: float = 1.0) -> World:
    """Join the job that a launcher started, or be a job of one process; again is harmless.

    Understands torchrun's (and ``ds run``'s), Slurm's, Open MPI's and MPICH's variables.

    Collective: every process of the job.

    Args:
        device: ``cpu``, ``cuda``, ...; default the accelerator of this process's local rank, if any.
        timeout_s: how long a rank may stay away from a call the others wait in while its process is alive.
        stall_check_s: how often a waiting rank looks for the reason.

    Raises:
        CommError: the launcher's variables are incomplete, or the processes do not meet.
    """
    if _world is None:
        launched = read_launch()
        world = World(launched, _device(device, launched), timeout_s=timeout_s, check_s=stall_check_s)
        if launched is not None and launched.world_size > 1:
            world.connect(_meet(launched))
        adopt(world)
    return current()


def adopt(world: World) -> None:
    """Make ``world`` this process's, and part from it at exit."""
    global _world  # noqa: PLW0603
    _world = world
    atexit.register(_part_at_exit)


def current() -> World:
    """The world of :func:`init`.

    Raises:
        CommError: ``init`` has not been called.
    """
    if _world is None:
        raise CommError("no process group yet; call ds_comm.init() first")
    return _world


def is_initialized() -> bool:
    """Whether :func:`init` has been called."""
    return _world is not None


def shutdown() -> None:
    """Part from the job in order; waits for the other ranks to do so too.

    Raises:
        CommError: another rank still waits for this one in a collective; it gets the same error.
    """
    global _world
    if _world is not None:
        world, _world = _world, None
        world.leave()


def _meet(launched: Launched) -> dist.Store:
    hosts_differ = launched.world_size > launched.local_world_size
    if hosts_differ and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = _interface_to(launched.master_addr)
    if launched.launcher == "torchrun":
        store, _, _ = next(dist.rendezvous("env://"))
        return store
    return dist.TCPStore(
        launched.master_addr,
        launched.master_port,
        launched.world_size,
        is_master=launched.rank == 0,
        timeout=timedelta(seconds=MEETING_LIMIT_S),
    )


def _interface_to(host: str) -> str:
    """The network interface whose address this host uses towards ``host``; gloo cannot find it by itself."""
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; asks the routing table
        address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    raise CommError(
        f"no network interface has the address {address} that leads to {host}; set GLOO_SOCKET_IFNAME"
    )


def _device(name: str | None, launched: Launched | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = torch.device(name) if name else accelerator or torch.device("cpu")
    if kind.type == "cpu" or kind.index is not None:
        return kind
    device = torch.device(kind.type, launched.local_rank if launched else 0)
    torch.accelerator.set_device_index(device.index)
    return device


def _part_at_exit() -> None:
    global _world
    if _world is None:
        return
    world, _world = _world, None
    error = getattr(sys, "last_value", None)
    try:
        world.leave(failed=f"{type(error).__name__}: {error}" if error is not None else "")
    except CommError:
        logger.exception("this process ended while other ranks needed it")
        logging.shutdown()
        os._exit(EXIT_AFTER_ERROR)
    if error is not None and world.backend != "none":
        # The transport's threads still wait for peers that will not come; do not wait for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_AFTER_ERROR)
