"""Follows every storage that operators make, to know which bytes are still held later."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zero.hooks import tensors_in


class LiveStorages(TorchDispatchMode):
    """While it is on, notes the storage of every operator's result.

    Works on real and on fake tensors; views and in-place results share a storage and count once.

    Args:
        ignored: tensors whose storages do not count, such as parameters.
        counted: tensors made before whose storages count too.
        follows_peak: look at what is held after every operator; costs time.

    Attributes:
        peak_bytes: most bytes held at once, if that is followed.
    """

    def __init__(
        self,
        *,
        ignored: Iterable[torch.Tensor] = (),
        counted: Iterable[torch.Tensor] = (),
        follows_peak: bool = False,
    ) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._follows_peak = follows_peak
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in counted:
            self._note(tensor)

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._found.get(storage._cdata)
        if storage._cdata not in self._ignored and (known is None or known[0].expired()):
            self._found[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note what it gives."""
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            self._note(tensor)
        if self._follows_peak:
            self.peak_bytes = max(self.peak_bytes, self.held_bytes())
        return output

    def held_bytes(self, *, without: Iterable[torch.Tensor] = ()) -> int:
        """Bytes of the storages that something still holds, but for those of ``without``."""
        left_out = {tensor.untyped_storage()._cdata for tensor in without}
        self._found = {key: found for key, found in self._found.items() if not found[0].expired()}
        return sum(num_bytes for key, (_, num_bytes) in self._found.items() if key not in left_out)
