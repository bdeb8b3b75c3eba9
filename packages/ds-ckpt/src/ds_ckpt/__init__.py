"""Sharded, atomic, versioned, incremental, asynchronous checkpoints: planned, exports nothing yet."""

__all__: list[str] = []
