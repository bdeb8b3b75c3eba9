"""Compute, communication, memory and I/O profile with TensorBoard views: planned, exports nothing yet."""

__all__: list[str] = []
