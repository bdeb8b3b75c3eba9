"""Inference engine with paged KV cache and quantized serving: planned, exports nothing yet."""

__all__: list[str] = []
