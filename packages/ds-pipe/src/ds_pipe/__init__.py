"""Automatic partitioning, placement, pipeline schedules, executor and simulator: planned, exports nothing yet."""

__all__: list[str] = []
