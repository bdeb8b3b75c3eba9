"""A small face of the rendezvous store: set, get without waiting, wait for a key."""

from datetime import timedelta

from torch.distributed import Store


class KeyValue:
    """Keys under one prefix of a torch store."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        """Write a key for every rank."""
        self._store.set(f"{self._prefix}/{key}", value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value of a key, or nothing when it is not there or the store is gone."""
        try:
            name = f"{self._prefix}/{key}"
            return bytes(self._store.get(name)) if self._store.check([name]) else b""
        except RuntimeError:
            return b""

    def wait(self, key: str, timeout_s: float) -> bytes:
        """The value of a key, once some rank has set it.

        Raises:
            RuntimeError: nobody did in time.
        """
        name = f"{self._prefix}/{key}"
        self._store.wait([name], timedelta(seconds=timeout_s))
        return bytes(self._store.get(name))

    def add(self, key: str, amount: int) -> int:
        """Count up and give the new count."""
        return self._store.add(f"{self._prefix}/{key}", amount)
