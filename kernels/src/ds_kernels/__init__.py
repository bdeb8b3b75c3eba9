"""Framework for custom operators with automatic gradients, and the operators: planned, exports nothing yet."""

__all__: list[str] = []
