"""Tensor, sequence and expert parallelism: planned, exports nothing yet."""

__all__: list[str] = []
