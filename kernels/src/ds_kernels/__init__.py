"""Custom operators with automatic gradients: a framework, and the operators. Planned, exports nothing yet."""

__all__: list[str] = []
