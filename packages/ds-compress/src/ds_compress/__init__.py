"""Pruning, distillation and quantization: planned, exports nothing yet."""

__all__: list[str] = []
